"""flashinfer.attention: any batch in one plan (as all wrappers here can do), and attention sinks."""

from __future__ import annotations

import torch
from torch import Tensor

from ..metadata import BSRView, PageTable
from ..validation import refuse
from .arguments import DType, PagedKV, Scale, heads_of, on_device, paged_cache, pages_on_device
from .features import not_supported, refuse_given
from .prefill import BatchPrefillWithPagedKVCacheWrapper
from .wrapper import PlannedAttention, Wrapper, plain_logits

__all__ = ["BatchAttention", "BatchAttentionWithAttentionSinkWrapper"]


class BatchAttention(Wrapper):
    """Decodes, chunks and prompts of a batch over a paged cache; call `plan` once a step, `run` once a layer.

    Args:
        kv_layout: "NHD" or "HND".
        device: only used for plans whose tensors are on the host; otherwise the tensors' device is used.

    Raises:
        ValueError: an argument is wrong.
        NotImplementedError: an argument is not supported; the message names it.
    """

    def __init__(self, kv_layout: str = "NHD", device: str | torch.device = "cuda") -> None:
        self._device = torch.device(device)
        super().__init__(torch.empty(0, dtype=torch.uint8), kv_layout)  # plans set the device

    def plan(
        self,
        qo_indptr: Tensor,
        kv_indptr: Tensor,
        kv_indices: Tensor,
        kv_len_arr: Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim_qk: int,
        head_dim_vo: int,
        page_size: int,
        causal: bool = False,
        sm_scale: Scale | None = None,
        logits_soft_cap: float | None = None,
        q_data_type: DType = torch.bfloat16,
        kv_data_type: DType = torch.bfloat16,
        use_profiler: bool = False,
    ) -> None:
        """Plans a batch; never waits for the device.

        Args:
            qo_indptr, kv_indptr: int32 [batch_size + 1], kv_indices: int32 [pages], kv_len_arr: int32
                [batch_size], tokens.

        Raises:
            ValueError: an argument is wrong.
            NotImplementedError: an argument is not supported; the message names it.
        """
        refuse_given(use_profiler=use_profiler)
        device = (
            kv_indices.device
            if self._device.type == "cpu" or kv_indices.device.type != "cpu" or not torch.cuda.is_available()
            else self._device
        )
        if self.device != device:
            self.device, self._planned = device, PlannedAttention(device)
        self._heads = heads_of(
            device, num_qo_heads, num_kv_heads, head_dim_qk, head_dim_vo, q_data_type, kv_data_type
        )
        self._sm_scale, self._soft_cap = sm_scale, logits_soft_cap or 0.0
        qo_indptr = self._start_rows(qo_indptr)
        table = PageTable.csr(
            *pages_on_device(kv_indptr, kv_indices, device, True),
            None,
            page_size,
            kv_lens=on_device(kv_len_arr, device, True),
        )
        self._plan_view(
            BSRView(on_device(qo_indptr, device, True), table, causal=causal), plain_logits(self._soft_cap)
        )

    def run(
        self,
        q: Tensor,
        kv_cache: PagedKV,
        out: Tensor | None = None,
        lse: Tensor | None = None,
        k_scale: float | None = None,
        v_scale: float | None = None,
        logits_soft_cap: float = 0.0,
        profiler_buffer: Tensor | None = None,
        kv_cache_sf: PagedKV | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Runs the last plan. May be captured in a CUDA graph; never waits for the device.

        Args:
            q: [rows, num_qo_heads, head_dim].
            kv_cache: (k, v), or both in one tensor, in kv_layout.
            logits_soft_cap: 0, or the plan's value.

        Returns:
            The output in q's shape, and the base-2 lse, float32 [rows, num_qo_heads].

        Raises:
            ValueError: an argument is wrong, or there is no plan yet.
            NotImplementedError: an argument is not supported; the message names it.
        """
        if profiler_buffer is not None or kv_cache_sf is not None:
            refuse_given(profiler_buffer=profiler_buffer, kv_cache_sf=kv_cache_sf)
        self._check_planned()
        if logits_soft_cap > 0 and logits_soft_cap != self._soft_cap:
            refuse("logits_soft_cap", logits_soft_cap, f"0, or that of the plan: {self._soft_cap}")
        kv = paged_cache(kv_cache, self._kv_layout)
        return self._run_planned(
            q, kv.k, kv.v, self._scales(None, k_scale), out=out, lse=lse, return_lse=True, v_scale=v_scale
        )


class BatchAttentionWithAttentionSinkWrapper(BatchPrefillWithPagedKVCacheWrapper):
    """BatchPrefillWithPagedKVCacheWrapper whose runs take sinks: `run(q, paged_kv_cache, sinks, sm_scale)`,
    sinks float32 [num_qo_heads].

    Args:
        q_data_type, kv_data_type, head_dim_qk, head_dim_vo, pos_encoding_mode, window_left: not used; the
            plan's values apply.

    Raises:
        ValueError: an argument is wrong.
        NotImplementedError: an argument is not supported; the message names it.
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
        pos_encoding_mode: str = "NONE",
        use_fp16_qk_reduction: bool = False,
        q_data_type: DType = torch.bfloat16,
        kv_data_type: DType = torch.bfloat16,
        head_dim_qk: int = 128,
        head_dim_vo: int = 128,
        window_left: int = -1,
    ) -> None:
        if head_dim_vo != head_dim_qk:
            not_supported(f"head_dim_vo = {head_dim_vo} with head_dim_qk = {head_dim_qk}")
        buffers = (
            qo_indptr_buf,
            paged_kv_indptr_buf,
            paged_kv_indices_buf,
            paged_kv_last_page_len_buf,
            custom_mask_buf,
            mask_indptr_buf,
        )
        super().__init__(float_workspace_buffer, kv_layout, use_cuda_graph, *buffers, backend)
        self._has_sinks = True
