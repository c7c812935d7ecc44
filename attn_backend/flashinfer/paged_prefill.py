"""Queries of a batch over a paged cache."""

from __future__ import annotations

from functools import partialmethod
from typing import Any

from torch import Tensor

from ..metadata import PageTable
from ..metadata.structure import refuse
from .arguments import (
    DType,
    PagedKV,
    Scale,
    buffer_length,
    check_fits,
    copy_if_other,
    on_device,
    paged_cache,
    pages_from_zero,
    pages_on_device,
    pos_encoding,
)
from .batch_prefill import BatchPrefill
from .features import refuse_given
from .heads import heads_of
from .masks import items_of, pack_custom_mask
from .page import get_seq_lens
from .wrapper import keeps_splits


class BatchPrefillWithPagedKVCacheWrapper(BatchPrefill):
    """Queries of a batch over a paged cache; `plan` once a step, `run` once a layer.

    The workspace buffer says which device is used, and nothing more. `plan` neither copies tensors that are
    on the device nor waits for it; they must stay as they are until the runs have ended. qo_indptr on the
    host lets `plan` check it, and make exactly the room that it needs.

    Args:
        float_workspace_buffer: any tensor on the device.
        kv_layout: "NHD" or "HND".
        use_cuda_graph: plans are copied to the buffers, and the workspace stays where it is, so that captured
            runs serve every later plan.
        qo_indptr_buf, paged_kv_indptr_buf: int32 [batch_size + 1], paged_kv_indices_buf: int32 [most pages],
            paged_kv_last_page_len_buf: int32 [batch_size], custom_mask_buf: uint8, mask_indptr_buf: int32
            [batch_size + 1]: where plans are copied to if use_cuda_graph.
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
        super().__init__(
            float_workspace_buffer,
            kv_layout,
            use_cuda_graph,
            backend,
            jit_args,
            qo_indptr_buf,
            custom_mask_buf,
            mask_indptr_buf,
        )
        self._paged_kv_indptr_buf: Any = paged_kv_indptr_buf
        self._paged_kv_indices_buf: Any = paged_kv_indices_buf
        self._paged_kv_last_page_len_buf: Any = paged_kv_last_page_len_buf
        if use_cuda_graph:
            lengths = (
                buffer_length("paged_kv_indptr_buf", paged_kv_indptr_buf),
                buffer_length("paged_kv_last_page_len_buf", paged_kv_last_page_len_buf),
            )
            buffer_length("paged_kv_indices_buf", paged_kv_indices_buf)
            if lengths[0] != self._fixed_batch_size + 1:
                refuse(
                    "len(paged_kv_indptr_buf)",
                    lengths[0],
                    f"{self._fixed_batch_size + 1}, that of qo_indptr_buf",
                )
            if lengths[1] != self._fixed_batch_size:
                refuse(
                    "len(paged_kv_last_page_len_buf)",
                    lengths[1],
                    f"{self._fixed_batch_size}, one less than qo_indptr_buf",
                )

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
        sm_scale: Scale | None = None,
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
            paged_kv_indptr: int32 [batch_size + 1], paged_kv_indices: int32 [pages], paged_kv_last_page_len:
                int32 [batch_size]: the page tables.
            custom_mask: bool [sum of q_len * kv_len]; packed_custom_mask: uint8, each request from a byte of
                its own. With a mask `causal` does not count. prefix_len_ptr, token_pos_in_items_ptr,
                token_pos_in_items_len: of multi-item scoring; max_item_len_ptr is not needed.
            q_data_type: of 16 bits; or float8_e4m3fn or float8_e5m2, as kv_data_type is then.
            o_data_type: that of Q (None), or float8_e4m3fn; under float8 Q also one of 16 bits.
            fixed_split_size, disable_split_kv: either makes the output of a request independent of its batch.
                fixed_split_size -1: none, as None. seq_lens, seq_lens_q, block_tables,
                max_token_per_sequence, max_sequence_kv, use_fp16_qk_reduction: not used.

        Raises:
            ValueError: an argument that is wrong. NotImplementedError: one that is not supported, by its
                name.
        """
        self._heads = heads_of(
            self.device,
            num_qo_heads,
            num_kv_heads,
            head_dim_qk,
            head_dim_vo,
            q_data_type,
            kv_data_type,
            o_data_type,
        )
        batch_size = qo_indptr.shape[0] - 1
        qo_indptr = self._start_rows(qo_indptr)
        self._items = items_of(prefix_len_ptr, token_pos_in_items_ptr, token_pos_in_items_len)
        packed = mask_indptr = None
        if custom_mask is not None or packed_custom_mask is not None:
            kv_lens = get_seq_lens(paged_kv_indptr, paged_kv_last_page_len, page_size)
            packed, mask_indptr = pack_custom_mask(
                custom_mask, packed_custom_mask, qo_indptr, kv_lens, self.device, non_blocking
            )
        if self._use_cuda_graph:
            self._check_fixed(batch_size)
            paged_kv_indptr, paged_kv_indices = pages_from_zero(paged_kv_indptr, paged_kv_indices)
            check_fits(
                "paged_kv_indices", paged_kv_indices, "paged_kv_indices_buf", self._paged_kv_indices_buf
            )
            copy_if_other(self._qo_indptr_buf, qo_indptr, non_blocking)
            copy_if_other(self._paged_kv_indptr_buf, paged_kv_indptr, non_blocking)
            copy_if_other(self._paged_kv_last_page_len_buf, paged_kv_last_page_len, non_blocking)
            copy_if_other(self._paged_kv_indices_buf[: len(paged_kv_indices)], paged_kv_indices, non_blocking)
        else:
            self._qo_indptr_buf = on_device(qo_indptr, self.device, non_blocking)
            self._paged_kv_indptr_buf, self._paged_kv_indices_buf = pages_on_device(
                paged_kv_indptr, paged_kv_indices, self.device, non_blocking
            )
            self._paged_kv_last_page_len_buf = on_device(paged_kv_last_page_len, self.device, non_blocking)
        self._keep_mask(packed, mask_indptr, non_blocking)
        self._sm_scale = sm_scale
        self._table = PageTable.csr(
            self._paged_kv_indptr_buf, self._paged_kv_indices_buf, self._paged_kv_last_page_len_buf, page_size
        )
        self._batch_invariant = keeps_splits(fixed_split_size, disable_split_kv)
        self._plan_logits(
            causal, pos_encoding(pos_encoding_mode, rope_scale, rope_theta), window_left, logits_soft_cap
        )

    begin_forward = plan

    def run(
        self,
        q: Tensor,
        paged_kv_cache: PagedKV,
        *args: Any,
        q_scale: Scale | None = None,
        k_scale: Scale | None = None,
        v_scale: Scale | None = None,
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
            args: what jit_args name: tensors, then scalars; (sinks, sm_scale) of attention sinks.
            window_left: None, or that of the plan.
            sinks: float32 [num_qo_heads]: exp(sink) joins the sum of each row's exponentials.
            q_scale, k_scale, v_scale: factors by which float8 numbers are multiplied: a number, or float32
                [1] or [heads]. If Q is float8, they may also be three tensors given after K and V.
            enable_pdl, use_fp16_softmax: not used.

        Returns:
            The output in q's shape, of o_data_type; with return_lse also float32 [rows, num_qo_heads], to
            base 2.

        Raises:
            ValueError: an argument that is wrong, or no plan yet. NotImplementedError: one that is not
                supported, by its name.
        """
        if skip_softmax_threshold_scale_factor is not None or kv_cache_sf is not None or uses_spcompress:
            refuse_given(
                skip_softmax_threshold_scale_factor=skip_softmax_threshold_scale_factor,
                kv_cache_sf=kv_cache_sf,
                uses_spcompress=uses_spcompress,
            )
        self._check_run(q, window_left)
        own = None
        if args or self._jit is not None:
            own, sinks, q_scale, k_scale, v_scale = self._take(args, sinks, q_scale, k_scale, v_scale)
        scales = self._scales(q_scale, k_scale)
        kv = paged_cache(paged_kv_cache, self._kv_layout)
        return self._run(
            q,
            kv.k,
            kv.v,
            scales,
            out=out,
            lse=lse,
            return_lse=return_lse,
            v_scale=v_scale,
            sinks=sinks,
            args=own,
        )

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
        sm_scale: Scale | None = None,
        rope_scale: float | None = None,
        rope_theta: float | None = None,
        return_lse: bool = False,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """`run` with other options than the plan's, which is then made again.

        For code that was written before `run`.
        """
        self._plan_as(
            causal,
            pos_encoding(pos_encoding_mode, rope_scale, rope_theta),
            window_left,
            logits_soft_cap,
            sm_scale,
        )
        return self.run(q, paged_kv_cache, k_scale=k_scale, v_scale=v_scale, return_lse=return_lse)

    forward_return_lse = partialmethod(forward, return_lse=True)
