"""Cache slots of the tokens that sparse attention selected for each query."""

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
    """The tokens that the rows of a run attend to, under a plan of `BSRView.selected`.

    Args:
        indices: int32 [rows of q, topk]: for each row of Q, the tokens of its request that it attends to, in
            any order. Negative entries are ignored, at any place. A token that occurs twice counts twice.
        block_table: int32 [batch, max_pages]: page j of request i is block_table[i, j]; a negative entry
            means no page. None: indices are slots.
        requests: int32 or int64 [rows], the request of each row; a request outside the table has no tokens.
            None: row i belongs to request i; only if block_table is None or has one row per row of Q.
        page_size: tokens per page of block_table.
        page_stride: slots from one page to the next, at least page_size (`KVCache.page_stride`); None:
            page_size.
        kv_lens: int32 or int64 [rows], the number of tokens of its request that each row sees; later tokens
            are ignored. None: all tokens in the table.
    """

    indices: Tensor
    block_table: Tensor | None = None
    requests: Tensor | None = None
    page_size: int = 1
    page_stride: int | None = None
    kv_lens: Tensor | None = None

    __repr__ = short_repr

    def for_library(self) -> dict[str, Tensor | int | None]:
        """The arguments of the library's functions, by name. The library checks the rest.

        Raises:
            ValueError: a tensor with a pending negation, which its handle hides from the library; an invalid
                page size or stride.
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
        """Refuses the first tensor that is not plain. Called when an error message did not name a tensor."""
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
    """The slots of selected tokens, in the form that `BSRView.selected` takes: first the slots, in the order
    of `indices`, then -1.

    One kernel on the current stream: no synchronization; may be captured in a CUDA graph. A run given
    `SelectedTokens` does the same itself.

    Args:
        indices, block_table, requests, page_size, page_stride, kv_lens: as in `SelectedTokens`.
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
    ):  # only on failure, to keep each layer's call cheap
        selected.explain_failure()
        explain_failure((("out", indices if out is None else out),))
        raise
    return out
