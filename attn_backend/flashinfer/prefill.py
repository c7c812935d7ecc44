"""flashinfer.prefill: many queries of a request, or of each request of a batch."""

from __future__ import annotations

from functools import partial, partialmethod
from typing import Any

import torch
from torch import Tensor

from ..metadata import BSRView, PageTable
from ..metadata.structure import refuse
from .arguments import (
    DType,
    PagedKV,
    buffer_length,
    check_kv_layout,
    check_pos_encoding_mode,
    element_type,
    from_zero,
    indptr_of_equal,
    on_device,
    paged_cache,
    ragged_cache,
    rows_of,
    scaled,
)
from .decode import copy_if_other
from .features import missing, not_supported, refuse_given
from .masks import items_of, pack_custom_mask, pack_single_mask
from .page import get_seq_lens
from .planned_attention import Heads, Logits, PlannedAttention, attention_of_call, check_head_dims

__all__ = [
    "BatchPrefillWithPagedKVCacheWrapper",
    "BatchPrefillWithRaggedKVCacheWrapper",
    "fmha_varlen",
    "single_prefill_with_kv_cache",
    "single_prefill_with_kv_cache_return_lse",
    "single_prefill_with_kv_cache_with_jit_module",
    "trtllm_batch_context_with_kv_cache",
    "trtllm_fmha_v2_prefill",
    "trtllm_ragged_attention_deepseek",
]

_BACKENDS = ("auto", "fa2", "fa3")


def single_prefill_with_kv_cache(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale_q: Tensor | None = None,
    scale_k: Tensor | None = None,
    scale_v: Tensor | None = None,
    o_dtype: torch.dtype | None = None,
    custom_mask: Tensor | None = None,
    packed_custom_mask: Tensor | None = None,
    causal: bool = False,
    kv_layout: str = "NHD",
    pos_encoding_mode: str = "NONE",
    use_fp16_qk_reduction: bool = False,
    sm_scale: float | None = None,
    window_left: int = -1,
    logits_soft_cap: float | None = None,
    rope_scale: float | None = None,
    rope_theta: float | None = None,
    backend: str = "auto",
    return_lse: bool = False,
    kv_cache_sf: tuple[Tensor, Tensor] | None = None,
    k_scale: float | None = None,
    v_scale: float | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """All queries of one request.

    Args:
        q: [qo_len, num_qo_heads, head_dim].
        k, v: NHD [kv_len, num_kv_heads, head_dim], HND [num_kv_heads, kv_len, head_dim].
        custom_mask: bool [qo_len, kv_len]; packed_custom_mask: uint8, its bits, the first the lowest. With a mask `causal` does not count.
        use_fp16_qk_reduction: not used: sums are float32.

    Returns:
        q's shape; with return_lse also float32 [qo_len, num_qo_heads], to base 2.

    Raises:
        ValueError: an argument that is wrong. NotImplementedError: one that is not supported, by its name.
    """
    refuse_given(scale_q=scale_q, scale_k=scale_k, scale_v=scale_v, kv_cache_sf=kv_cache_sf)
    check_kv_layout(kv_layout)
    if backend not in _BACKENDS:
        not_supported(f"backend = {backend!r}")
    packed, mask_indptr = pack_single_mask(custom_mask, packed_custom_mask, q.device)
    logits = Logits(logits_soft_cap or 0.0, check_pos_encoding_mode(pos_encoding_mode), packed, mask_indptr)
    kv = ragged_cache(k, v, kv_layout)
    head_dim = check_head_dims(q.shape[-1], kv.v.shape[-1], q.device)
    heads = Heads(q.shape[1], kv.num_kv_heads, head_dim, element_type(q.dtype, k.dtype, o_dtype))
    attention = attention_of_call(q.device, heads, logits)
    view = BSRView(
        indptr_of_equal(1, q.shape[0], q.device),
        PageTable.ragged(indptr_of_equal(1, kv.num_pages, q.device)),
        causal=causal and packed is None,
        window_left=max(window_left, -1),
    )
    attention.plan(view, heads, logits, rows=q.shape[0])
    scale = scaled(head_dim**-0.5 if sm_scale is None else sm_scale, k_scale=k_scale)
    return attention.run(q, kv, scale, return_lse=return_lse, v_scale=v_scale)


single_prefill_with_kv_cache_return_lse = partial(single_prefill_with_kv_cache, return_lse=True)


class _BatchPrefill:
    """What the wrappers over paged and over ragged K and V have in common: a page table that `plan` makes, and the options that `forward` may change."""

    # Of the last plan.
    _heads: Heads
    _table: PageTable
    _qo_indptr: Tensor
    _first_row: int
    _items: tuple[Tensor | None, Tensor | None]
    _batch_invariant: bool
    _sm_scale: float | None

    def __init__(self, float_workspace_buffer: Tensor, kv_layout: str, use_cuda_graph: bool, backend: str, jit_args: list[Any] | None) -> None:
        self._kv_layout = check_kv_layout(kv_layout)
        if backend not in _BACKENDS:
            not_supported(f"backend = {backend!r}")
        self._backend = backend
        self._float_workspace_buffer = float_workspace_buffer
        self.device = float_workspace_buffer.device
        self._use_cuda_graph = use_cuda_graph
        self._planned = PlannedAttention(self.device, use_cuda_graph)
        self._has_sinks = has_sinks(jit_args)
        self._custom_mask_buf: Any = None
        self._mask_indptr_buf: Any = None
        self._rows: int | None = None
        self._fixed_batch_size = 0
        self._is_planned = False

    @property
    def is_cuda_graph_enabled(self) -> bool:
        return self._use_cuda_graph

    def reset_workspace_buffer(self, float_workspace_buffer: Tensor, int_workspace_buffer: Tensor) -> None:
        """Accepted; the buffers are not used."""
        self._float_workspace_buffer = float_workspace_buffer

    def workspace_size(self, *_arguments: Any, **_options: Any) -> tuple[int, int]:
        """Bytes of the two workspace buffers that a plan needs: none."""
        return 0, 0

    def end_forward(self) -> None:
        """Does nothing, as in FlashInfer."""

    def _check_fixed(self, batch_size: int, qo_indptr: Tensor) -> None:
        """With CUDA graphs: the batch size is that of the buffers, and the rows are at most those of the first plan."""
        if batch_size != self._fixed_batch_size:
            refuse("batch_size", batch_size, f"{self._fixed_batch_size}, that of the buffers, with use_cuda_graph=True")
        if not self._is_planned and self._rows is None:
            self._rows = int(qo_indptr[-1])  # waits for the device, once: the workspace is made for so many rows
        room = self._planned.max_rows
        if room and self._rows is not None and self._rows > room:
            refuse("qo_indptr[-1]", self._rows, f"at most {room}, that of the first plan, with use_cuda_graph=True")

    def _keep_mask(self, packed: Tensor | None, mask_indptr: Tensor | None, non_blocking: bool) -> None:
        """The mask, in the buffers if there are CUDA graphs."""
        if packed is None or not self._use_cuda_graph:
            self._custom_mask_buf, self._mask_indptr_buf = (packed, mask_indptr) if not self._use_cuda_graph else (self._custom_mask_buf, self._mask_indptr_buf)
            self._mask = (packed, mask_indptr)
            return
        assert mask_indptr is not None
        for name, buffer in (("custom_mask_buf", self._custom_mask_buf), ("mask_indptr_buf", self._mask_indptr_buf)):
            if not isinstance(buffer, Tensor):
                refuse(name, buffer, "a tensor, with use_cuda_graph=True and a custom mask")
        if len(packed) > len(self._custom_mask_buf):
            refuse("len(custom_mask_buf)", len(self._custom_mask_buf), f"at least {len(packed)}, the bytes of the mask")
        self._custom_mask_buf[: len(packed)].copy_(packed, non_blocking=non_blocking)
        self._mask_indptr_buf.copy_(mask_indptr, non_blocking=non_blocking)
        self._mask = (self._custom_mask_buf, self._mask_indptr_buf)

    def _plan_logits(self, causal: bool, pos_encoding_mode: str, window_left: int, logits_soft_cap: float | None) -> None:
        """Plans the batch that is known."""
        self._options = (causal, pos_encoding_mode, window_left, logits_soft_cap)
        packed, mask_indptr = self._mask
        prefix_len, token_pos_in_items = self._items
        logits = Logits(logits_soft_cap or 0.0, check_pos_encoding_mode(pos_encoding_mode), packed, mask_indptr, prefix_len, token_pos_in_items)
        if self._has_sinks:
            self._planned.with_sinks()
        view = BSRView(self._qo_indptr, self._table, causal=causal and packed is None, window_left=max(window_left, -1))
        self._planned.plan(view, self._heads, logits, rows=self._rows, batch_invariant=self._batch_invariant)
        self._is_planned = True

    def _take(self, args: tuple[Any, ...], sinks: Tensor | None = None) -> Tensor | None:
        """What a run is given behind q, K and V if the wrapper is for sinks: (sinks, sm_scale). Returns the sinks."""
        if not args:
            return sinks
        if not self._has_sinks or len(args) > 2:
            not_supported("the argument args")
        self._sm_scale = float(args[1]) if len(args) > 1 else self._sm_scale
        taken: Tensor = args[0]
        return taken

    def _scale(self) -> float:
        return self._heads.head_dim**-0.5 if self._sm_scale is None else self._sm_scale

    def _check_run(self, q: Tensor, window_left: int | None = None) -> None:
        if not self._is_planned:
            raise ValueError("run() before a successful plan()")
        if self._rows is not None and q.shape[0] != self._first_row + self._rows:
            refuse("q.shape[0]", q.shape[0], f"qo_indptr[-1] = {self._first_row + self._rows}, as planned")
        if window_left is not None and window_left != self._options[2]:
            refuse("window_left", window_left, f"{self._options[2]}, that of the plan")

    def set_causal(self, causal: bool) -> None:
        """Plans again if the plan has another one."""
        if self._is_planned and causal != self._options[0]:
            self._plan_logits(causal, *self._options[1:])

    def _plan_as(self, causal: bool, pos_encoding_mode: str, window_left: int, logits_soft_cap: float | None, sm_scale: float | None) -> None:
        """For `forward`, whose options replace the plan's."""
        if self._is_planned and (causal, pos_encoding_mode, window_left, logits_soft_cap) != self._options:
            self._plan_logits(causal, pos_encoding_mode, window_left, logits_soft_cap)
        self._sm_scale = sm_scale


class BatchPrefillWithPagedKVCacheWrapper(_BatchPrefill):
    """Queries of a batch over a paged cache; `plan` once a step, `run` once a layer.

    The workspace buffer says which device is used, and nothing more. `plan` neither copies tensors that are on the device nor waits for it; they must stay as
    they are until the runs have ended. qo_indptr on the host lets `plan` check it, and make exactly the room that it needs.

    Args:
        float_workspace_buffer: any tensor on the device.
        kv_layout: "NHD" or "HND".
        use_cuda_graph: plans are copied to the buffers, and the workspace stays where it is, so that captured runs serve every later plan.
        qo_indptr_buf, paged_kv_indptr_buf: int32 [batch_size + 1], paged_kv_indices_buf: int32 [most pages], paged_kv_last_page_len_buf: int32 [batch_size],
            custom_mask_buf: uint8, mask_indptr_buf: int32 [batch_size + 1]: where plans are copied to if use_cuda_graph.
        backend: "auto", "fa2" or "fa3": all the same here.

    Raises:
        ValueError: an argument that is wrong. NotImplementedError: one that is not supported, by its name.
    """

    def __init__(
        self,
        float_workspace_buffer: Tensor,
        kv_layout: str = "NHD",
        use_cuda_graph: bool = False,
        qo_indptr_buf: Tensor | None = None,
        paged_kv_indptr_buf: Tensor | None = None,
        paged_kv_indices_buf: Tensor | None = None,
        paged_kv_last_page_len_buf: Tensor | None = None,
        custom_mask_buf: Tensor | None = None,
        mask_indptr_buf: Tensor | None = None,
        backend: str = "auto",
        jit_args: list[Any] | None = None,
        jit_kwargs: dict[str, Any] | None = None,
    ) -> None:
        super().__init__(float_workspace_buffer, kv_layout, use_cuda_graph, backend, jit_args)
        # The last plan's, or the buffers of CUDA graphs. (Any: None before the first plan, which nothing below sees.)
        self._qo_indptr_buf: Any = qo_indptr_buf
        self._paged_kv_indptr_buf: Any = paged_kv_indptr_buf
        self._paged_kv_indices_buf: Any = paged_kv_indices_buf
        self._paged_kv_last_page_len_buf: Any = paged_kv_last_page_len_buf
        if use_cuda_graph:
            self._fixed_batch_size = buffer_length("qo_indptr_buf", qo_indptr_buf) - 1
            lengths = buffer_length("paged_kv_indptr_buf", paged_kv_indptr_buf), buffer_length("paged_kv_last_page_len_buf", paged_kv_last_page_len_buf)
            buffer_length("paged_kv_indices_buf", paged_kv_indices_buf)
            if lengths[0] != self._fixed_batch_size + 1:
                refuse("len(paged_kv_indptr_buf)", lengths[0], f"{self._fixed_batch_size + 1}, that of qo_indptr_buf")
            if lengths[1] != self._fixed_batch_size:
                refuse("len(paged_kv_last_page_len_buf)", lengths[1], f"{self._fixed_batch_size}, one less than qo_indptr_buf")
        self._custom_mask_buf = custom_mask_buf
        self._mask_indptr_buf = mask_indptr_buf

    def plan(
        self,
        qo_indptr: Tensor,
        paged_kv_indptr: Tensor,
        paged_kv_indices: Tensor,
        paged_kv_last_page_len: Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim_qk: int,
        page_size: int,
        head_dim_vo: int | None = None,
        custom_mask: Tensor | None = None,
        packed_custom_mask: Tensor | None = None,
        causal: bool = False,
        pos_encoding_mode: str = "NONE",
        use_fp16_qk_reduction: bool = False,
        sm_scale: float | None = None,
        window_left: int = -1,
        logits_soft_cap: float | None = None,
        rope_scale: float | None = None,
        rope_theta: float | None = None,
        q_data_type: DType = "float16",
        kv_data_type: DType | None = None,
        o_data_type: DType | None = None,
        non_blocking: bool = True,
        prefix_len_ptr: Tensor | None = None,
        token_pos_in_items_ptr: Tensor | None = None,
        token_pos_in_items_len: int = 0,
        max_item_len_ptr: Tensor | None = None,
        seq_lens: Tensor | None = None,
        seq_lens_q: Tensor | None = None,
        block_tables: Tensor | None = None,
        max_token_per_sequence: int | None = None,
        max_sequence_kv: int | None = None,
        fixed_split_size: int | None = None,
        disable_split_kv: bool = False,
    ) -> None:
        """Plans a batch.

        Args:
            qo_indptr: int32 [batch_size + 1], where the queries of each request begin.
            paged_kv_indptr: int32 [batch_size + 1], paged_kv_indices: int32 [pages], paged_kv_last_page_len: int32 [batch_size]: the page tables.
            custom_mask: bool [sum of q_len * kv_len]; packed_custom_mask: uint8, each request from a byte of its own. With a mask `causal` does not count.
            prefix_len_ptr, token_pos_in_items_ptr, token_pos_in_items_len: of multi-item scoring; max_item_len_ptr is not needed.
            fixed_split_size, disable_split_kv: either makes the output of a request independent of its batch.
            seq_lens, seq_lens_q, block_tables, max_token_per_sequence, max_sequence_kv, rope_scale, rope_theta, use_fp16_qk_reduction: not used.

        Raises:
            ValueError: an argument that is wrong. NotImplementedError: one that is not supported, by its name.
        """
        dtype = element_type(q_data_type, kv_data_type, o_data_type)
        self._heads = Heads(num_qo_heads, num_kv_heads, check_head_dims(head_dim_qk, head_dim_vo, self.device), dtype)
        batch_size = len(qo_indptr) - 1
        self._first_row, qo_indptr = from_zero(qo_indptr)
        self._rows = rows_of(qo_indptr)
        self._items = items_of(prefix_len_ptr, token_pos_in_items_ptr, token_pos_in_items_len)
        packed = mask_indptr = None
        if custom_mask is not None or packed_custom_mask is not None:
            kv_lens = get_seq_lens(paged_kv_indptr, paged_kv_last_page_len, page_size)
            packed, mask_indptr = pack_custom_mask(custom_mask, packed_custom_mask, qo_indptr, kv_lens, self.device, non_blocking)
        if self._use_cuda_graph:
            self._check_fixed(batch_size, qo_indptr)
            if len(paged_kv_indices) > len(self._paged_kv_indices_buf):
                refuse("len(paged_kv_indices)", len(paged_kv_indices), f"at most {len(self._paged_kv_indices_buf)}, that of paged_kv_indices_buf")
            copy_if_other(self._qo_indptr_buf, qo_indptr, non_blocking)
            copy_if_other(self._paged_kv_indptr_buf, paged_kv_indptr, non_blocking)
            copy_if_other(self._paged_kv_last_page_len_buf, paged_kv_last_page_len, non_blocking)
            copy_if_other(self._paged_kv_indices_buf[: len(paged_kv_indices)], paged_kv_indices, non_blocking)
        else:
            first, paged_kv_indptr = from_zero(paged_kv_indptr)
            self._qo_indptr_buf = on_device(qo_indptr, self.device, non_blocking)
            self._paged_kv_indptr_buf = on_device(paged_kv_indptr, self.device, non_blocking)
            self._paged_kv_indices_buf = on_device(paged_kv_indices[first:] if first else paged_kv_indices, self.device, non_blocking)
            self._paged_kv_last_page_len_buf = on_device(paged_kv_last_page_len, self.device, non_blocking)
        self._keep_mask(packed, mask_indptr, non_blocking)
        self._qo_indptr = self._qo_indptr_buf
        self._sm_scale = sm_scale
        self._table = PageTable.csr(self._paged_kv_indptr_buf, self._paged_kv_indices_buf, self._paged_kv_last_page_len_buf, page_size)
        self._batch_invariant = fixed_split_size is not None or disable_split_kv
        self._plan_logits(causal, pos_encoding_mode, window_left, logits_soft_cap)

    begin_forward = plan

    def run(
        self,
        q: Tensor,
        paged_kv_cache: PagedKV,
        *args: Any,
        q_scale: float | None = None,
        k_scale: float | None = None,
        v_scale: float | None = None,
        out: Tensor | None = None,
        lse: Tensor | None = None,
        return_lse: bool = False,
        enable_pdl: bool | None = None,
        window_left: int | None = None,
        sinks: Tensor | None = None,
        kv_cache_sf: PagedKV | None = None,
        skip_softmax_threshold_scale_factor: float | None = None,
        use_fp16_softmax: bool | None = None,
        uses_spcompress: bool | None = None,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Runs the last plan. May be captured in a CUDA graph; never waits for the device.

        Args:
            q: [qo_indptr[-1], num_qo_heads, head_dim].
            paged_kv_cache: (k, v), or both in one tensor, in kv_layout.
            args: sinks and sm_scale, if the wrapper is for sinks.
            window_left: None, or that of the plan.
            sinks: float32 [num_qo_heads]: exp(sink) joins the sum of each row's exponentials.
            enable_pdl, use_fp16_softmax: not used.

        Returns:
            The output in q's shape; with return_lse also float32 [rows, num_qo_heads], to base 2.

        Raises:
            ValueError: an argument that is wrong, or no plan yet. NotImplementedError: one that is not supported, by its name.
        """
        if skip_softmax_threshold_scale_factor is not None or kv_cache_sf is not None or uses_spcompress:
            refuse_given(skip_softmax_threshold_scale_factor=skip_softmax_threshold_scale_factor, kv_cache_sf=kv_cache_sf, uses_spcompress=uses_spcompress)
        self._check_run(q, window_left)
        sinks = self._take(args, sinks)
        scale = self._scale()
        if q_scale is not None or k_scale is not None:
            scale = scaled(scale, q_scale=q_scale, k_scale=k_scale)
        kv = paged_cache(paged_kv_cache, self._kv_layout)
        return run_rows(self._planned, self._first_row, q, kv, scale, out=out, lse=lse, return_lse=return_lse, v_scale=v_scale, sinks=sinks)

    run_return_lse = partialmethod(run, return_lse=True)

    def forward(
        self,
        q: Tensor,
        paged_kv_cache: PagedKV,
        causal: bool = False,
        pos_encoding_mode: str = "NONE",
        use_fp16_qk_reduction: bool = False,
        k_scale: float | None = None,
        v_scale: float | None = None,
        window_left: int = -1,
        logits_soft_cap: float | None = None,
        sm_scale: float | None = None,
        rope_scale: float | None = None,
        rope_theta: float | None = None,
        return_lse: bool = False,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """`run` with other options than the plan's, which is then made again. For code that was written before `run`."""
        self._plan_as(causal, pos_encoding_mode, window_left, logits_soft_cap, sm_scale)
        return self.run(q, paged_kv_cache, k_scale=k_scale, v_scale=v_scale, return_lse=return_lse)

    forward_return_lse = partialmethod(forward, return_lse=True)


class BatchPrefillWithRaggedKVCacheWrapper(_BatchPrefill):
    """Queries of a batch over K and V that lie one request after another in tensors [tokens, num_kv_heads, head_dim].

    Args:
        qo_indptr_buf, kv_indptr_buf: int32 [batch_size + 1], custom_mask_buf: uint8, mask_indptr_buf: int32 [batch_size + 1]: where plans are copied to if
            use_cuda_graph. The rest as in BatchPrefillWithPagedKVCacheWrapper.

    Raises:
        ValueError: an argument that is wrong. NotImplementedError: one that is not supported, by its name.
    """

    def __init__(
        self,
        float_workspace_buffer: Tensor,
        kv_layout: str = "NHD",
        use_cuda_graph: bool = False,
        qo_indptr_buf: Tensor | None = None,
        kv_indptr_buf: Tensor | None = None,
        custom_mask_buf: Tensor | None = None,
        mask_indptr_buf: Tensor | None = None,
        backend: str = "auto",
        jit_args: list[Any] | None = None,
        jit_kwargs: dict[str, Any] | None = None,
    ) -> None:
        super().__init__(float_workspace_buffer, kv_layout, use_cuda_graph, backend, jit_args)
        # The last plan's, or the buffers of CUDA graphs. (Any: None before the first plan, which nothing below sees.)
        self._qo_indptr_buf: Any = qo_indptr_buf
        self._kv_indptr_buf: Any = kv_indptr_buf
        if use_cuda_graph:
            self._fixed_batch_size = buffer_length("qo_indptr_buf", qo_indptr_buf) - 1
            length = buffer_length("kv_indptr_buf", kv_indptr_buf)
            if length != self._fixed_batch_size + 1:
                refuse("len(kv_indptr_buf)", length, f"{self._fixed_batch_size + 1}, that of qo_indptr_buf")
        self._custom_mask_buf = custom_mask_buf
        self._mask_indptr_buf = mask_indptr_buf

    def plan(
        self,
        qo_indptr: Tensor,
        kv_indptr: Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim_qk: int,
        head_dim_vo: int | None = None,
        custom_mask: Tensor | None = None,
        packed_custom_mask: Tensor | None = None,
        causal: bool = False,
        pos_encoding_mode: str = "NONE",
        use_fp16_qk_reduction: bool = False,
        window_left: int = -1,
        logits_soft_cap: float | None = None,
        sm_scale: float | None = None,
        rope_scale: float | None = None,
        rope_theta: float | None = None,
        q_data_type: DType = "float16",
        kv_data_type: DType | None = None,
        o_data_type: DType | None = None,
        non_blocking: bool = True,
        prefix_len_ptr: Tensor | None = None,
        token_pos_in_items_ptr: Tensor | None = None,
        token_pos_in_items_len: int = 0,
        max_item_len_ptr: Tensor | None = None,
        fixed_split_size: int | None = None,
        disable_split_kv: bool = False,
        seq_lens: Tensor | None = None,
        seq_lens_q: Tensor | None = None,
        max_token_per_sequence: int | None = None,
        max_sequence_kv: int | None = None,
        v_indptr: Tensor | None = None,
        o_indptr: Tensor | None = None,
    ) -> None:
        """Plans a batch.

        Args:
            qo_indptr, kv_indptr: int32 [batch_size + 1], where the queries, and the keys and values, of each request begin. The rest as in
                BatchPrefillWithPagedKVCacheWrapper.plan.

        Raises:
            ValueError: an argument that is wrong. NotImplementedError: one that is not supported, by its name.
        """
        refuse_given(v_indptr=v_indptr, o_indptr=o_indptr)
        dtype = element_type(q_data_type, kv_data_type, o_data_type)
        self._heads = Heads(num_qo_heads, num_kv_heads, check_head_dims(head_dim_qk, head_dim_vo, self.device), dtype)
        batch_size = len(qo_indptr) - 1
        if len(kv_indptr) != batch_size + 1:
            refuse("len(kv_indptr)", len(kv_indptr), f"{batch_size + 1}, that of qo_indptr")
        self._first_row, qo_indptr = from_zero(qo_indptr)
        self._first_token, kv_indptr = from_zero(kv_indptr)
        self._rows = rows_of(qo_indptr)
        self._items = items_of(prefix_len_ptr, token_pos_in_items_ptr, token_pos_in_items_len)
        kv_lens = kv_indptr[1:] - kv_indptr[:-1] if custom_mask is not None or packed_custom_mask is not None else kv_indptr
        packed, mask_indptr = pack_custom_mask(custom_mask, packed_custom_mask, qo_indptr, kv_lens, self.device, non_blocking)
        if self._use_cuda_graph:
            self._check_fixed(batch_size, qo_indptr)
            copy_if_other(self._qo_indptr_buf, qo_indptr, non_blocking)
            copy_if_other(self._kv_indptr_buf, kv_indptr, non_blocking)
        else:
            self._qo_indptr_buf = on_device(qo_indptr, self.device, non_blocking)
            self._kv_indptr_buf = on_device(kv_indptr, self.device, non_blocking)
        self._keep_mask(packed, mask_indptr, non_blocking)
        self._qo_indptr = self._qo_indptr_buf
        self._sm_scale = sm_scale
        self._table = PageTable.ragged(self._kv_indptr_buf)
        self._batch_invariant = fixed_split_size is not None or disable_split_kv
        self._plan_logits(causal, pos_encoding_mode, window_left, logits_soft_cap)

    begin_forward = plan

    def run(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *args: Any,
        q_scale: float | None = None,
        k_scale: float | None = None,
        v_scale: float | None = None,
        o_scale: float | None = None,
        out: Tensor | None = None,
        lse: Tensor | None = None,
        return_lse: bool = False,
        enable_pdl: bool | None = None,
        kv_cache_sf: PagedKV | None = None,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Runs the last plan. May be captured in a CUDA graph; never waits for the device.

        Args:
            q: [qo_indptr[-1], num_qo_heads, head_dim].
            k, v: [kv_indptr[-1], num_kv_heads, head_dim].
            args: sinks and sm_scale, if the wrapper is for sinks.
            enable_pdl: not used.

        Returns:
            The output in q's shape; with return_lse also float32 [rows, num_qo_heads], to base 2.

        Raises:
            ValueError: an argument that is wrong, or no plan yet. NotImplementedError: one that is not supported, by its name.
        """
        refuse_given(kv_cache_sf=kv_cache_sf, o_scale=o_scale)
        self._check_run(q)
        sinks = self._take(args)
        kv = ragged_cache(k[self._first_token :], v[self._first_token :]) if self._first_token else ragged_cache(k, v)
        scale = scaled(self._scale(), q_scale=q_scale, k_scale=k_scale)
        return run_rows(self._planned, self._first_row, q, kv, scale, out=out, lse=lse, return_lse=return_lse, v_scale=v_scale, sinks=sinks)

    run_return_lse = partialmethod(run, return_lse=True)

    def forward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        causal: bool = False,
        pos_encoding_mode: str = "NONE",
        use_fp16_qk_reduction: bool = False,
        window_left: int = -1,
        logits_soft_cap: float | None = None,
        sm_scale: float | None = None,
        rope_scale: float | None = None,
        rope_theta: float | None = None,
        return_lse: bool = False,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """`run` with other options than the plan's, which is then made again. For code that was written before `run`."""
        self._plan_as(causal, pos_encoding_mode, window_left, logits_soft_cap, sm_scale)
        return self.run(q, k, v, return_lse=return_lse)

    forward_return_lse = partialmethod(forward, return_lse=True)


def has_sinks(jit_args: list[Any] | None) -> bool:
    """Whether jit_args ask for FlashInfer's variant of attention sinks, the only one that has a counterpart: C++ for its kernels is not for ours.

    Raises:
        NotImplementedError: another variant.
    """
    if jit_args is None:
        return False
    name = jit_args[11] if len(jit_args) > 11 else None
    if name != "AttentionSink":
        not_supported(f"jit_args of the variant {name!r}")
    return True


def run_rows(
    planned: PlannedAttention, first_row: int, q: Tensor, kv: Any, sm_scale: float, *, out: Tensor | None, lse: Tensor | None, return_lse: bool, **options: Any
) -> Tensor | tuple[Tensor, Tensor]:
    """planned.run of the rows of q from first_row on. Those before are no request's: their output is 0."""
    if not first_row:
        return planned.run(q, kv, sm_scale, out=out, lse=lse, return_lse=return_lse, **options)
    out = torch.zeros(q.shape, dtype=q.dtype, device=q.device) if out is None else out
    lse = torch.zeros(q.shape[:2], dtype=torch.float32, device=q.device) if return_lse and lse is None else lse
    planned.run(q[first_row:], kv, sm_scale, out=out[first_row:], lse=None if lse is None else lse[first_row:], return_lse=return_lse, **options)
    return (out, lse) if return_lse and lse is not None else out


fmha_varlen = missing("fmha_varlen")
single_prefill_with_kv_cache_with_jit_module = missing("single_prefill_with_kv_cache_with_jit_module")
trtllm_batch_context_with_kv_cache = missing("trtllm_batch_context_with_kv_cache")
trtllm_fmha_v2_prefill = missing("trtllm_fmha_v2_prefill")
trtllm_ragged_attention_deepseek = missing("trtllm_ragged_attention_deepseek")
