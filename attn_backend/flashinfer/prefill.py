"""flashinfer.prefill: many queries of one request, or of each request of a batch."""

from __future__ import annotations

from functools import partial, partialmethod
from typing import Any

import torch
from torch import Tensor

from ..metadata import BSRView, KVCache, PageTable
from ..validation import refuse, require
from .arguments import (
    DType,
    Heads,
    PagedKV,
    PosEncoding,
    Scale,
    Scales,
    alibi_slopes_on,
    buffer_length,
    check_kv_layout,
    from_zero,
    heads_of,
    indptr_of_equal,
    items_of,
    one_of,
    pack_custom_mask,
    pack_single_mask,
    paged_cache,
    pages_from_zero,
    pos_encoding,
    ragged_cache,
    scaled,
)
from .features import missing, not_supported, refuse_given
from .jit.attention import JitModule
from .page import get_seq_lens
from .utils import MaskMode
from .wrapper import (
    BACKENDS,
    HostPlannedWrapper,
    Logits,
    attention_of_call,
    keeps_splits,
    logits_of,
    plain_logits,
)


class BatchPrefill(HostPlannedWrapper):
    """Base of the wrappers over paged and over ragged K and V: a page table that `plan` makes, and options
    that `forward` may change.
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
        # The last plan's tensors, or the buffers of CUDA graphs. Any, as they are None only before a plan.
        self._qo_indptr_buf: Any = qo_indptr_buf
        self._custom_mask_buf: Any = custom_mask_buf
        self._mask_indptr_buf: Any = mask_indptr_buf
        if use_cuda_graph:
            self._fixed_batch_size = buffer_length("qo_indptr_buf", qo_indptr_buf) - 1
        self._rows = None
        # for captured CUDA graphs; engines read and write it
        self._max_total_num_rows: int | None = None

    def _check_fixed(self, batch_size: int) -> None:
        """With CUDA graphs: checks that the batch size equals the buffers', and that there are at most as
        many rows as in the first plan.
        """
        self._check_batch_size(batch_size)
        room = self._planned.max_rows
        if room and self._rows is not None and self._rows > room:
            refuse(
                "qo_indptr[-1]",
                self._rows,
                f"at most {room}, as in the first plan, with use_cuda_graph=True",
            )

    def _keep_mask(self, packed: Tensor | None, mask_indptr: Tensor | None, non_blocking: bool) -> None:
        """Keeps the mask; with CUDA graphs in the buffers."""
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

    def _plan_from_buffers(
        self, causal: bool, pos: PosEncoding, window_left: int, logits_soft_cap: float | None
    ) -> None:
        # Engines compare some of these with their own values.
        self._causal, self._pos, self._window_left = causal, pos, window_left
        self._logits_soft_cap = logits_soft_cap or 0.0
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
        if window_left is not None and window_left != self._window_left:
            refuse("window_left", window_left, f"{self._window_left}, as in the plan")

    def set_causal(self, causal: bool) -> None:
        """Plans again if the plan's value differs."""
        if self._is_planned and causal != self._causal:
            self._plan_from_buffers(causal, self._pos, self._window_left, self._logits_soft_cap)

    def _plan_for_forward(
        self,
        causal: bool,
        pos: PosEncoding,
        window_left: int,
        logits_soft_cap: float | None,
        sm_scale: Scale | None,
    ) -> None:
        """Plans again if the options of `forward`, which replace the plan's, differ from them."""
        if self._is_planned and (causal, pos, window_left, logits_soft_cap or 0.0) != (
            self._causal,
            self._pos,
            self._window_left,
            self._logits_soft_cap,
        ):
            self._plan_from_buffers(causal, pos, window_left, logits_soft_cap)
        self._sm_scale = sm_scale

    def _plan_from_host(
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
        """Plans the contents of the wrapper's buffers, which the caller has filled; copies nothing.

        Returns:
            An empty plan description, which engines keep.

        Raises:
            ValueError: batch size, page size or heads differ from the wrapper's first plan.
        """
        heads = self._heads
        planned = (
            self._fixed_batch_size or batch_size,
            self._table.page_size,
            heads.num_qo_heads,
            heads.num_kv_heads,
            *heads.head_dims,
        )
        given = (batch_size, page_size, num_qo_heads, num_kv_heads, head_dim_qk, head_dim_vo)
        if given != planned:
            refuse(
                "(batch_size, page_size, num_qo_heads, num_kv_heads, head_dim_qk, head_dim_vo)",
                given,
                f"{planned}, as in the first plan",
            )
        self._rows = int(qo_indptr_host[-1])
        self._plan_from_buffers(causal, self._pos, window_left, self._logits_soft_cap)
        return []


class BatchPrefillWithPagedKVCacheWrapper(BatchPrefill):
    """Queries of a batch over a paged cache; call `plan` once a step, `run` once a layer.

    The workspace buffer only selects the device. `plan` neither copies device tensors nor waits for the
    device; leave the tensors unchanged until the runs have ended. If qo_indptr is on the host, `plan` can
    check it, and allocates exactly the memory needed.

    Args:
        float_workspace_buffer: any tensor on the device.
        kv_layout: "NHD" or "HND".
        use_cuda_graph: copies plans to the buffers and keeps the workspace in place, so that captured runs
            work with every later plan.
        qo_indptr_buf, paged_kv_indptr_buf: int32 [batch_size + 1], paged_kv_indices_buf: int32 [most pages],
            paged_kv_last_page_len_buf: int32 [batch_size], custom_mask_buf: uint8, mask_indptr_buf: int32
            [batch_size + 1]: buffers for plans if use_cuda_graph.
        backend: "auto", "fa2" or "fa3": equivalent here.

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
            require(
                lengths[0] == self._fixed_batch_size + 1,
                "len(paged_kv_indptr_buf)",
                lengths[0],
                f"{self._fixed_batch_size + 1}, as for qo_indptr_buf",
            )
            require(
                lengths[1] == self._fixed_batch_size,
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
        use_token_head_sf: bool = False,
    ) -> None:
        """Plans a batch.

        Args:
            qo_indptr: int32 [batch_size + 1], offsets of each request's queries.
            paged_kv_indptr: int32 [batch_size + 1], paged_kv_indices: int32 [pages], paged_kv_last_page_len:
                int32 [batch_size]: the page tables.
            custom_mask: bool [sum of q_len * kv_len]; packed_custom_mask: uint8, each request starting at a
                new byte. A mask overrides `causal`. prefix_len_ptr, token_pos_in_items_ptr,
                token_pos_in_items_len: for multi-item scoring; max_item_len_ptr is not used.
            q_data_type: a 16-bit type, or float8_e4m3fn or float8_e5m2 if kv_data_type is the same.
            o_data_type: Q's type (None), or float8_e4m3fn; under float8 Q also a 16-bit type.
            fixed_split_size, disable_split_kv: either makes the output of a request independent of its batch.
                fixed_split_size -1: none, as None. seq_lens, seq_lens_q, block_tables,
                max_token_per_sequence, max_sequence_kv, use_fp16_qk_reduction: not used.
            use_token_head_sf: float8_e4m3fn K and V have a scale for each token and head, which runs get.

        Raises:
            ValueError: an argument is wrong.
            NotImplementedError: an argument is not supported; the message names it.
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
            use_token_head_sf,
        )
        self._has_token_scales = use_token_head_sf
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
        names = ("paged_kv_indices", "paged_kv_indices_buf")
        self._paged_kv_indices_buf = self._buffered(
            self._paged_kv_indices_buf, paged_kv_indices, non_blocking, names
        )
        self._qo_indptr_buf = self._buffered(self._qo_indptr_buf, qo_indptr, non_blocking)
        self._paged_kv_indptr_buf = self._buffered(self._paged_kv_indptr_buf, paged_kv_indptr, non_blocking)
        self._paged_kv_last_page_len_buf = self._buffered(
            self._paged_kv_last_page_len_buf, paged_kv_last_page_len, non_blocking
        )
        self._keep_mask(packed, mask_indptr, non_blocking)
        self._sm_scale = sm_scale
        self._table = PageTable.csr(
            self._paged_kv_indptr_buf, self._paged_kv_indices_buf, self._paged_kv_last_page_len_buf, page_size
        )
        self._batch_invariant = keeps_splits(fixed_split_size, disable_split_kv)
        self._plan_from_buffers(
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
            args: the values for jit_args: tensors, then scalars; (sinks, sm_scale) for attention sinks.
            window_left: None, or the plan's value.
            sinks: float32 [num_qo_heads]: exp(sink) is added to the sum of each row's exponentials.
            q_scale, k_scale, v_scale: factors by which float8 numbers are multiplied: a number, or float32
                [1] or [heads]. If Q is float8, they may also be three tensors given after K and V.
            kv_cache_sf: (k_sf, v_sf) with use_token_head_sf: float32 [pages, page_size, num_kv_heads], in
                kv_layout HND [pages, num_kv_heads, page_size].
            enable_pdl, use_fp16_softmax: not used.

        Returns:
            The output in q's shape, of o_data_type; with return_lse also the base-2 lse, float32 [rows,
            num_qo_heads].

        Raises:
            ValueError: an argument is wrong, or there is no plan yet.
            NotImplementedError: an argument is not supported; the message names it.
        """
        if skip_softmax_threshold_scale_factor is not None or uses_spcompress:
            refuse_given(
                skip_softmax_threshold_scale_factor=skip_softmax_threshold_scale_factor,
                uses_spcompress=uses_spcompress,
            )
        of_tokens = None
        if kv_cache_sf is not None or self._has_token_scales:
            of_tokens = self._token_scales(kv_cache_sf)
        self._check_run(q, window_left)
        own = None
        if args or self._jit is not None:
            own, sinks, q_scale, k_scale, v_scale = self._take(args, sinks, q_scale, k_scale, v_scale)
        scales = self._scales(q_scale, k_scale)
        kv = paged_cache(paged_kv_cache, self._kv_layout)
        return self._run_planned(
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
            token_scales=of_tokens,
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
        """`run` with options that replace the plan's; plans again.

        For code that predates `run`.
        """
        self._plan_for_forward(
            causal,
            pos_encoding(pos_encoding_mode, rope_scale, rope_theta),
            window_left,
            logits_soft_cap,
            sm_scale,
        )
        return self.run(q, paged_kv_cache, k_scale=k_scale, v_scale=v_scale, return_lse=return_lse)

    forward_return_lse = partialmethod(forward, return_lse=True)


class BatchPrefillWithRaggedKVCacheWrapper(BatchPrefill):
    """Queries of a batch over ragged K and V: the requests concatenated in tensors [tokens, num_kv_heads,
    head_dim], in kv_layout HND [num_kv_heads, tokens, head_dim].

    Args:
        qo_indptr_buf, kv_indptr_buf: int32 [batch_size + 1], custom_mask_buf: uint8, mask_indptr_buf: int32
            [batch_size + 1]: buffers for plans if use_cuda_graph. All others are as in
            BatchPrefillWithPagedKVCacheWrapper.

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
            require(
                length == self._fixed_batch_size + 1,
                "len(kv_indptr_buf)",
                length,
                f"{self._fixed_batch_size + 1}, as for qo_indptr_buf",
            )
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
            qo_indptr, kv_indptr: int32 [batch_size + 1], offsets of each request's queries, and of its keys
                and values. All others are as in BatchPrefillWithPagedKVCacheWrapper.plan.

        Raises:
            ValueError: an argument is wrong.
            NotImplementedError: an argument is not supported; the message names it.
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
            refuse("len(kv_indptr)", len(kv_indptr), f"{batch_size + 1}, as for qo_indptr")
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
        self._qo_indptr_buf = self._buffered(self._qo_indptr_buf, qo_indptr, non_blocking)
        self._kv_indptr_buf = self._buffered(self._kv_indptr_buf, kv_indptr, non_blocking)
        self._keep_mask(packed, mask_indptr, non_blocking)
        self._sm_scale = sm_scale
        self._table = PageTable.ragged(self._kv_indptr_buf)
        self._batch_invariant = keeps_splits(fixed_split_size, disable_split_kv)
        self._plan_from_buffers(
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
            args: the values for jit_args: tensors, then scalars; (sinks, sm_scale) for attention sinks.
            q_scale, k_scale, v_scale: factors by which float8 numbers are multiplied: a number, or float32
                [1] or [heads]. If Q is float8, they may also be three tensors given after K and V.
            o_scale: a number by which 16-bit outputs are multiplied, like v_scale.
            enable_pdl: not used.

        Returns:
            The output in q's shape, of o_data_type; with return_lse also the base-2 lse, float32 [rows,
            num_qo_heads].

        Raises:
            ValueError: an argument is wrong, or there is no plan yet.
            NotImplementedError: an argument is not supported; the message names it.
        """
        if kv_cache_sf is not None:
            refuse_given(kv_cache_sf=kv_cache_sf)
        self._check_run(q)
        sinks = own = None
        if args or self._jit is not None:
            own, sinks, q_scale, k_scale, v_scale = self._take(args, None, q_scale, k_scale, v_scale)
        if o_scale is not None and o_scale != 1.0:
            if self._heads.float8_out:  # FlashInfer has no o_scale here, and divides by it elsewhere
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
        return self._run_planned(
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
        """`run` with options that replace the plan's; plans again.

        For code that predates `run`.
        """
        self._plan_for_forward(
            causal,
            pos_encoding(pos_encoding_mode, rope_scale, rope_theta),
            window_left,
            logits_soft_cap,
            sm_scale,
        )
        return self.run(q, k, v, return_lse=return_lse)

    forward_return_lse = partialmethod(forward, return_lse=True)


__all__ = [
    "BatchPrefillWithPagedKVCacheWrapper",
    "BatchPrefillWithRaggedKVCacheWrapper",
    "cudnn_batch_prefill_with_kv_cache",
    "fmha_varlen",
    "single_prefill_with_kv_cache",
    "single_prefill_with_kv_cache_return_lse",
    "single_prefill_with_kv_cache_with_jit_module",
    "trtllm_batch_context_with_kv_cache",
    "trtllm_fmha_v2_prefill",
    "trtllm_ragged_attention_deepseek",
]


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
    sm_scale: Scale | None = None,
    window_left: int = -1,
    logits_soft_cap: float | None = None,
    rope_scale: float | None = None,
    rope_theta: float | None = None,
    backend: str = "auto",
    return_lse: bool = False,
    kv_cache_sf: tuple[Tensor, Tensor] | None = None,
    k_scale: Scale | None = None,
    v_scale: Scale | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Attention of all queries of one request.

    Args:
        q: [qo_len, num_qo_heads, head_dim].
        k, v: NHD [kv_len, num_kv_heads, head_dim], HND [num_kv_heads, kv_len, head_dim].
        scale_q, scale_k, scale_v: factors of float8 numbers: float32 [1] or [heads]. k_scale, v_scale: the
            same under other names.
        o_dtype: of the output: q's (None), or float8_e4m3fn; for float8 Q also float16 or bfloat16.
        custom_mask: bool [qo_len, kv_len]; packed_custom_mask: uint8, its bits, the first value in the lowest
            bit. A mask overrides `causal`.
        use_fp16_qk_reduction: not used: sums are float32.

    Returns:
        q's shape; with return_lse also the base-2 lse, float32 [qo_len, num_qo_heads].

    Raises:
        ValueError: an argument is wrong.
        NotImplementedError: an argument is not supported; the message names it.
    """
    refuse_given(kv_cache_sf=kv_cache_sf)
    k_scale, v_scale = one_of(scale_k=scale_k, k_scale=k_scale), one_of(scale_v=scale_v, v_scale=v_scale)
    check_kv_layout(kv_layout)
    if backend not in BACKENDS:
        not_supported(f"backend = {backend!r}")
    packed, mask_indptr = pack_single_mask(custom_mask, packed_custom_mask, q.device)
    logits = Logits(
        logits_soft_cap or 0.0, pos_encoding(pos_encoding_mode, rope_scale, rope_theta), packed, mask_indptr
    )
    kv = ragged_cache(k, v, kv_layout)
    heads = heads_of(
        q.device, q.shape[1], kv.num_kv_heads, q.shape[-1], kv.v.shape[-1], q.dtype, k.dtype, o_dtype
    )
    scales = scaled(heads, 1, sm_scale, scale_q, k_scale)
    return single_request(
        q, kv, heads, logits, causal and packed is None, window_left, scales, return_lse, v_scale=v_scale
    )


single_prefill_with_kv_cache_return_lse = partial(single_prefill_with_kv_cache, return_lse=True)


def single_prefill_with_kv_cache_with_jit_module(
    jit_module: JitModule,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *args: Any,
    kv_layout: str = "NHD",
    mask_mode: int = MaskMode.NON_CAUSAL.value,
    window_left: int = -1,
    return_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """single_prefill_with_kv_cache under a custom variant; args: the values for jit_args, tensors first.
    mask_mode: MaskMode.CAUSAL.value, or any other to leave masking to the variant.

    Raises:
        ValueError: an argument is wrong.
        NotImplementedError: an argument is not supported; the message names it.
    """
    own = jit_module.variant
    kv = ragged_cache(k, v, check_kv_layout(kv_layout))
    heads = heads_of(q.device, q.shape[1], kv.num_kv_heads, q.shape[-1], kv.v.shape[-1], q.dtype, k.dtype)
    slopes = {"maybe_alibi_slopes": alibi_slopes_on(heads.num_qo_heads, q.device)}
    given = own.args(args, slopes, heads.num_qo_heads // heads.num_kv_heads)
    return single_request(
        q,
        kv,
        heads,
        logits_of(own.variant),
        mask_mode == MaskMode.CAUSAL.value,
        window_left,
        Scales(1.0),
        return_lse,
        args=given,
    )


def single_request(
    q: Tensor,
    kv: KVCache,
    heads: Heads,
    logits: Logits,
    causal: bool,
    window_left: int,
    scales: Scales,
    return_lse: bool,
    **options: Any,
) -> Tensor | tuple[Tensor, Tensor]:
    """Plans and runs one request."""
    attention = attention_of_call(q.device, heads, logits, scales)
    table = PageTable.ragged(indptr_of_equal(1, kv.num_pages, q.device))
    view = BSRView(
        indptr_of_equal(1, q.shape[0], q.device), table, causal=causal, window_left=max(window_left, -1)
    )
    attention.plan(view, heads, logits, rows=q.shape[0])
    return attention.run(q, kv.k, kv.v, scales, return_lse=return_lse, **options)


cudnn_batch_prefill_with_kv_cache = missing("cudnn_batch_prefill_with_kv_cache")
fmha_varlen = missing("fmha_varlen")
trtllm_batch_context_with_kv_cache = missing("trtllm_batch_context_with_kv_cache")
trtllm_fmha_v2_prefill = missing("trtllm_fmha_v2_prefill")
trtllm_ragged_attention_deepseek = missing("trtllm_ragged_attention_deepseek")
