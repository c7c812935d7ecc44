"""Queries of a batch over K and V that lie one request after another."""

from __future__ import annotations

from functools import partialmethod
from typing import Any

from torch import Tensor

from ..metadata import PageTable
from ..metadata.structure import refuse
from .arguments import DType, PagedKV, Scale, buffer_length, copy_if_other, from_zero, on_device, pos_encoding
from .batch_prefill import BatchPrefill
from .features import not_supported, refuse_given
from .heads import heads_of
from .masks import items_of, pack_custom_mask
from .wrapper import keeps_splits


class BatchPrefillWithRaggedKVCacheWrapper(BatchPrefill):
    """Queries of a batch over K and V that lie one request after another in tensors [tokens, num_kv_heads,
    head_dim], in kv_layout HND [num_kv_heads, tokens, head_dim].

    Args:
        qo_indptr_buf, kv_indptr_buf: int32 [batch_size + 1], custom_mask_buf: uint8, mask_indptr_buf: int32
            [batch_size + 1]: where plans are copied to if use_cuda_graph. The rest as in
            BatchPrefillWithPagedKVCacheWrapper.

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
        self._kv_indptr_buf: Any = kv_indptr_buf
        if use_cuda_graph:
            length = buffer_length("kv_indptr_buf", kv_indptr_buf)
            if length != self._fixed_batch_size + 1:
                refuse("len(kv_indptr_buf)", length, f"{self._fixed_batch_size + 1}, that of qo_indptr_buf")
        self._is_hnd = self._kv_layout == "HND"

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
        sm_scale: Scale | None = None,
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
            qo_indptr, kv_indptr: int32 [batch_size + 1], where the queries, and the keys and values, of each
                request begin. The rest as in BatchPrefillWithPagedKVCacheWrapper.plan.

        Raises:
            ValueError: an argument that is wrong. NotImplementedError: one that is not supported, by its
                name.
        """
        refuse_given(v_indptr=v_indptr, o_indptr=o_indptr)
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
        if kv_indptr.shape[0] != batch_size + 1:
            refuse("len(kv_indptr)", len(kv_indptr), f"{batch_size + 1}, that of qo_indptr")
        qo_indptr = self._start_rows(qo_indptr)
        self._first_token, kv_indptr = from_zero(kv_indptr)
        self._items = items_of(prefix_len_ptr, token_pos_in_items_ptr, token_pos_in_items_len)
        kv_lens = (
            kv_indptr[1:] - kv_indptr[:-1]
            if custom_mask is not None or packed_custom_mask is not None
            else kv_indptr
        )
        packed, mask_indptr = pack_custom_mask(
            custom_mask, packed_custom_mask, qo_indptr, kv_lens, self.device, non_blocking
        )
        if self._use_cuda_graph:
            self._check_fixed(batch_size)
            copy_if_other(self._qo_indptr_buf, qo_indptr, non_blocking)
            copy_if_other(self._kv_indptr_buf, kv_indptr, non_blocking)
        else:
            self._qo_indptr_buf = on_device(qo_indptr, self.device, non_blocking)
            self._kv_indptr_buf = on_device(kv_indptr, self.device, non_blocking)
        self._keep_mask(packed, mask_indptr, non_blocking)
        self._sm_scale = sm_scale
        self._table = PageTable.ragged(self._kv_indptr_buf)
        self._batch_invariant = keeps_splits(fixed_split_size, disable_split_kv)
        self._plan_logits(
            causal, pos_encoding(pos_encoding_mode, rope_scale, rope_theta), window_left, logits_soft_cap
        )

    begin_forward = plan

    def run(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *args: Any,
        q_scale: Scale | None = None,
        k_scale: Scale | None = None,
        v_scale: Scale | None = None,
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
            k, v: in kv_layout NHD [kv_indptr[-1], num_kv_heads, head_dim], HND [num_kv_heads, kv_indptr[-1],
                head_dim].
            args: what jit_args name: tensors, then scalars; (sinks, sm_scale) of attention sinks.
            q_scale, k_scale, v_scale: factors by which float8 numbers are multiplied: a number, or float32
                [1] or [heads]. If Q is float8, they may also be three tensors given after K and V.
            o_scale: a number by which outputs of 16 bits are multiplied, as by v_scale.
            enable_pdl: not used.

        Returns:
            The output in q's shape, of o_data_type; with return_lse also float32 [rows, num_qo_heads], to
            base 2.

        Raises:
            ValueError: an argument that is wrong, or no plan yet. NotImplementedError: one that is not
                supported, by its name.
        """
        if kv_cache_sf is not None:
            refuse_given(kv_cache_sf=kv_cache_sf)
        self._check_run(q)
        sinks = own = None
        if args or self._jit is not None:
            own, sinks, q_scale, k_scale, v_scale = self._take(args, None, q_scale, k_scale, v_scale)
        if o_scale is not None and o_scale != 1.0:
            if self._heads.float8_out:  # FlashInfer has none here, and divides by it elsewhere
                not_supported(f"o_scale with o_data_type = {self._heads.o_dtype}")
            v_scale = o_scale if v_scale is None else v_scale * o_scale
        if self._first_token:
            k, v = (
                part.narrow(
                    1 if self._is_hnd else 0,
                    self._first_token,
                    part.shape[1 if self._is_hnd else 0] - self._first_token,
                )
                for part in (k, v)
            )
        scales = self._scales(q_scale, k_scale)
        return self._run(
            q,
            k,
            v,
            scales,
            is_hnd=self._is_hnd,
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
        k: Tensor,
        v: Tensor,
        causal: bool = False,
        pos_encoding_mode: str = "NONE",
        use_fp16_qk_reduction: bool = False,
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
        return self.run(q, k, v, return_lse=return_lse)

    forward_return_lse = partialmethod(forward, return_lse=True)
