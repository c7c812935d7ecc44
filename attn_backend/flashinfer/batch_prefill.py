"""Queries of a batch: what the wrappers over paged and over ragged K and V have in common."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ..metadata import BSRView, PageTable
from ..metadata.structure import refuse
from .arguments import PosEncoding, Scale, buffer_length
from .planned_attention import Logits, plain_logits
from .wrapper import Wrapper


class BatchPrefill(Wrapper):
    """What the wrappers over paged and over ragged K and V have in common: a page table that `plan` makes,
    and the options that `forward` may change.
    """

    # Of the last plan.
    _table: PageTable
    _items: tuple[Tensor | None, Tensor | None]

    def __init__(
        self,
        float_workspace_buffer: Tensor,
        kv_layout: str,
        use_cuda_graph: bool,
        backend: str,
        jit_args: list[Any] | None,
        qo_indptr_buf: Tensor | None,
        custom_mask_buf: Tensor | None,
        mask_indptr_buf: Tensor | None,
    ) -> None:
        super().__init__(float_workspace_buffer, kv_layout, use_cuda_graph, backend, jit_args)
        # The last plan's, or the buffers of CUDA graphs. (Any: nothing below sees the None before a plan.)
        self._qo_indptr_buf: Any = qo_indptr_buf
        self._custom_mask_buf: Any = custom_mask_buf
        self._mask_indptr_buf: Any = mask_indptr_buf
        if use_cuda_graph:
            self._fixed_batch_size = buffer_length("qo_indptr_buf", qo_indptr_buf) - 1
        self._rows = None
        # with which CUDA graphs were captured; engines read and write it
        self._max_total_num_rows: int | None = None

    @property
    def _cached_module(self) -> Kernels | None:
        """What engines call in the place of `plan`; None before the first one."""
        return Kernels(self) if self._is_planned else None

    # What engines compare with what they planned.
    @property
    def _causal(self) -> bool:
        return self._options[0]

    @property
    def _window_left(self) -> int:
        return self._options[2]

    @property
    def _logits_soft_cap(self) -> float:
        return self._options[3] or 0.0

    def _check_fixed(self, batch_size: int) -> None:
        """With CUDA graphs: the batch size is that of the buffers, and the rows are at most those of the
        first plan.
        """
        self._check_batch_size(batch_size)
        room = self._planned.max_rows
        if room and self._rows is not None and self._rows > room:
            refuse(
                "qo_indptr[-1]",
                self._rows,
                f"at most {room}, that of the first plan, with use_cuda_graph=True",
            )

    def _keep_mask(self, packed: Tensor | None, mask_indptr: Tensor | None, non_blocking: bool) -> None:
        """The mask, in the buffers if there are CUDA graphs."""
        if packed is None or not self._use_cuda_graph:
            if not self._use_cuda_graph:
                self._custom_mask_buf, self._mask_indptr_buf = packed, mask_indptr
            self._mask = (packed, mask_indptr)
            return
        assert mask_indptr is not None
        for name, buffer in (
            ("custom_mask_buf", self._custom_mask_buf),
            ("mask_indptr_buf", self._mask_indptr_buf),
        ):
            if not isinstance(buffer, Tensor):
                refuse(name, buffer, "a tensor, with use_cuda_graph=True and a custom mask")
        if len(packed) > len(self._custom_mask_buf):
            refuse(
                "len(custom_mask_buf)",
                len(self._custom_mask_buf),
                f"at least {len(packed)}, the bytes of the mask",
            )
        self._custom_mask_buf[: len(packed)].copy_(packed, non_blocking=non_blocking)
        self._mask_indptr_buf.copy_(mask_indptr, non_blocking=non_blocking)
        self._mask = (self._custom_mask_buf, self._mask_indptr_buf)

    def _plan_logits(
        self, causal: bool, pos: PosEncoding, window_left: int, logits_soft_cap: float | None
    ) -> None:
        """Plans the batch that is known."""
        self._options = (causal, pos, window_left, logits_soft_cap)
        packed, mask_indptr = self._mask
        prefix_len, token_pos_in_items = self._items
        if packed is None and prefix_len is None:
            logits = plain_logits(logits_soft_cap, pos)
        else:
            logits = Logits(logits_soft_cap or 0.0, pos, packed, mask_indptr, prefix_len, token_pos_in_items)
        self._plan_view(
            BSRView(
                self._qo_indptr_buf,
                self._table,
                causal=causal and packed is None,
                window_left=max(window_left, -1),
            ),
            logits,
        )

    def _tensors_of_plan(self) -> dict[str, Tensor | None]:
        packed, mask_indptr = self._mask
        masks = {} if packed is None else {"maybe_custom_mask": packed, "maybe_mask_indptr": mask_indptr}
        return super()._tensors_of_plan() | masks

    def _check_run(self, q: Tensor, window_left: int | None = None) -> None:
        self._check_planned()
        if self._rows is not None and q.shape[0] != self._first_row + self._rows:
            refuse("q.shape[0]", q.shape[0], f"qo_indptr[-1] = {self._first_row + self._rows}, as planned")
        if window_left is not None and window_left != self._options[2]:
            refuse("window_left", window_left, f"{self._options[2]}, that of the plan")

    def set_causal(self, causal: bool) -> None:
        """Plans again if the plan has another one."""
        if self._is_planned and causal != self._options[0]:
            self._plan_logits(causal, *self._options[1:])

    def _plan_as(
        self,
        causal: bool,
        pos: PosEncoding,
        window_left: int,
        logits_soft_cap: float | None,
        sm_scale: Scale | None,
    ) -> None:
        """For `forward`, whose options replace the plan's."""
        if self._is_planned and (causal, pos, window_left, logits_soft_cap) != self._options:
            self._plan_logits(causal, pos, window_left, logits_soft_cap)
        self._sm_scale = sm_scale


class Kernels:
    """FlashInfer's compiled kernels, as engines see them that call their `plan` with host arrays, to save the
    wrapper's copies to the host.
    """

    def __init__(self, wrapper: BatchPrefill) -> None:
        self._wrapper = wrapper

    def plan(
        self,
        _float_workspace: Tensor,
        _int_workspace: Tensor,
        _pinned_int_workspace: Tensor,
        qo_indptr_host: Tensor,
        _kv_indptr_host: Tensor,
        _kv_lens_host: Tensor,
        _max_rows: int,
        batch_size: int,
        num_qo_heads: int,
        num_kv_heads: int,
        page_size: int,
        _use_cuda_graph: bool,
        head_dim_qk: int,
        head_dim_vo: int,
        causal: bool,
        window_left: int,
        *_options: int,
    ) -> list[int]:
        """Plans what lies in the wrapper's buffers, which the caller has filled; nothing is copied.

        Returns:
            What engines keep as the plan's description: nothing.

        Raises:
            ValueError: another batch size, page size or shape of heads than that of the wrapper's first plan.
        """
        wrapper = self._wrapper
        heads = wrapper._heads
        planned = (
            wrapper._fixed_batch_size or batch_size,
            wrapper._table.page_size,
            heads.num_qo_heads,
            heads.num_kv_heads,
            *heads.head_dims,
        )
        given = (batch_size, page_size, num_qo_heads, num_kv_heads, head_dim_qk, head_dim_vo)
        if given != planned:
            refuse(
                "(batch_size, page_size, num_qo_heads, num_kv_heads, head_dim_qk, head_dim_vo)",
                given,
                f"{planned}, those of the first plan",
            )
        wrapper._rows = int(qo_indptr_host[-1])
        wrapper._plan_logits(causal, wrapper._options[1], window_left, wrapper._options[3])
        return []
