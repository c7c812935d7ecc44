"""Tokens that sparse attention has selected for each query: their places in the cache."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor
from torch.compiler import is_compiling

from ..validation import check_int, check_plain, explain_failure, short_repr
from . import torch_ops
from .native import by_name, kernel_file, library


@dataclass(frozen=True, eq=False)
class SelectedTokens:
    """What the rows of a run attend to, where a plan of `BSRView.selected` leaves it to the run.

    Args:
        indices: int32 [rows of q, topk]: for each row of Q the tokens of its request that it attends to, in
            any order; a negative entry means no token, wherever it stands. A token that occurs twice counts
            twice.
        block_table: int32 [batch, max_pages]: page j of request i is block_table[i, j]; a negative entry
            means no page. None: indices are slots.
        requests: int32 or int64 [rows], the request of each row; one outside of the table has no tokens.
            None, only where block_table is None or has a row of its own for each row of Q: row i.
        page_size: tokens of a page of block_table.
        page_stride: slots from one page to the next, at least page_size (`KVCache.page_stride`); None:
            page_size.
        kv_lens: int32 or int64 [rows], how many tokens of its request each row sees: later ones are ignored.
            None: all that the table has.
    """

    indices: Tensor
    block_table: Tensor | None = None
    requests: Tensor | None = None
    page_size: int = 1
    page_stride: int | None = None
    kv_lens: Tensor | None = None

    __repr__ = short_repr

    def for_library(self) -> dict[str, Tensor | int | None]:
        """The arguments of the library's functions by name. The library checks what is not checked here.

        Raises:
            ValueError: a tensor with a pending change of sign, which its handle does not show to the library;
                a page size or stride that is not such an int.
        """
        for name, tensor in self._tensors():
            if tensor.is_neg():
                check_plain(name, tensor)
        page_size = check_int("page_size", self.page_size, 1)
        page_stride = (
            page_size if self.page_stride is None else check_int("page_stride", self.page_stride, page_size)
        )
        tensors: dict[str, Tensor | int | None] = dict(self._tensors())
        return tensors | {"page_size": page_size, "page_stride": page_stride}

    def explain_failure(self) -> None:
        """Called when a call has failed without naming the tensor: refuses the first that is not plain."""
        explain_failure(self._tensors())

    def _tensors(self) -> Iterator[tuple[str, Tensor]]:
        yield "indices", self.indices
        for name, tensor in (
            ("block_table", self.block_table),
            ("requests", self.requests),
            ("kv_lens", self.kv_lens),
        ):
            if tensor is not None:
                yield name, tensor


@cache
def load(device: torch.device) -> None:
    """Loads the kernel; must come before the library packs on a CUDA device."""
    if device.type == "cuda":
        index = torch.cuda.current_device() if device.index is None else device.index
        library().load_selection(kernel_file("selected_slots", device), index)


@torch_ops.eager
def selected_slots(
    indices: Tensor,
    block_table: Tensor | None = None,
    requests: Tensor | None = None,
    page_size: int = 1,
    *,
    page_stride: int | None = None,
    kv_lens: Tensor | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """The slots of selected tokens, as `BSRView.selected` takes them: first the slots, in the order of
    `indices`, then -1.

    One kernel on the current stream: no synchronisation; may be captured in a CUDA graph. A run of such a
    plan does the same itself, if it is given `SelectedTokens`.

    Args:
        indices, block_table, requests, page_size, page_stride, kv_lens: as of `SelectedTokens`.
        out: int32 [rows, topk], written and returned; may be `indices` itself. None: a new tensor.

    Raises:
        ValueError: an argument that is wrong in type, dtype, shape, strides or device, or tensors that
            overlap.
    """
    selected = SelectedTokens(indices, block_table, requests, page_size, page_stride, kv_lens)
    if is_compiling():
        selected.explain_failure()
        if out is not None:
            explain_failure((("out", out),))
        check_int("page_size", page_size, 1)
        if page_stride is not None:
            check_int("page_stride", page_stride, page_size)
        return torch_ops.selected_slots(indices, block_table, requests, page_size, page_stride, kv_lens, out)
    try:
        if out is None:
            out = torch.empty(indices.shape, dtype=indices.dtype, device=indices.device)
        given = selected.for_library()
        if out.is_neg():
            check_plain("out", out)
        load(indices.device)
        by_name("selected_slots")(**given, out=out)
    except (
        AttributeError,
        OverflowError,
        RuntimeError,
        TypeError,
    ):  # examined only on failure: each layer's call would pay for it
        selected.explain_failure()
        explain_failure((("out", indices if out is None else out),))
        raise
    return out
