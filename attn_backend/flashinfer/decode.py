"""flashinfer.decode: one or a few queries per request."""

from __future__ import annotations

import warnings
from functools import partialmethod
from typing import Any

from torch import Tensor

from ..metadata import BSRView, PageTable
from ..metadata.views import csr_lengths
from ..validation import refuse, require
from .arguments import (
    DType,
    PagedKV,
    PosEncoding,
    Scale,
    buffer_length,
    check_fits,
    check_kv_layout,
    heads_of,
    indptr_of_equal,
    paged_cache,
    pages_from_zero,
    pos_encoding,
    ragged_cache,
    scaled,
)
from .features import missing, not_supported, refuse_given
from .jit.attention import JitModule
from .prefill import single_prefill_with_kv_cache_with_jit_module, single_request
from .utils import MaskMode
from .wrapper import Logits, Wrapper, keeps_splits, plain_logits

__all__ = [
    "BatchDecodeMlaWithPagedKVCacheWrapper",
    "BatchDecodeWithPagedKVCacheWrapper",
    "CUDAGraphBatchDecodeWithPagedKVCacheWrapper",
    "cudnn_batch_decode_with_kv_cache",
    "fast_decode_plan",
    "single_decode_with_kv_cache",
    "single_decode_with_kv_cache_with_jit_module",
    "trtllm_batch_decode_with_kv_cache",
    "trtllm_batch_decode_with_kv_cache_mla",
    "xqa_batch_decode_with_kv_cache",
]


class BatchDecodeWithPagedKVCacheWrapper(Wrapper):
    """q_len_per_req queries of each request over a paged cache; call `plan` once a step, `run` once a layer.

    The workspace buffer only selects the device: this package allocates its own memory, once. `plan` neither
    copies device tensors nor waits for the device; leave the tensors unchanged until the runs have ended.

    Args:
        float_workspace_buffer: any tensor on the device.
        kv_layout: "NHD" or "HND".
        use_cuda_graph: copies plans to the buffers and keeps the workspace in place, so that captured runs
            work with every later plan.
        use_tensor_cores: selects no kernel, as all use them. q_len_per_req and fixed_split_size need it.
        paged_kv_indptr_buffer: int32 [batch_size + 1], paged_kv_indices_buffer: int32 [most pages],
            paged_kv_last_page_len_buffer: int32 [batch_size]: buffers for plans if use_cuda_graph.
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
        use_tensor_cores: bool = False,
        paged_kv_indptr_buffer: Tensor | None = None,
        paged_kv_indices_buffer: Tensor | None = None,
        paged_kv_last_page_len_buffer: Tensor | None = None,
        backend: str = "auto",
        jit_args: list[Any] | None = None,
    ) -> None:
        super().__init__(float_workspace_buffer, kv_layout, use_cuda_graph, backend, jit_args)
        self._use_tensor_cores = use_tensor_cores
        # The last plan's tensors, or the buffers of CUDA graphs. Any, as they are None only before a plan.
        self._paged_kv_indptr_buf: Any = paged_kv_indptr_buffer
        self._paged_kv_indices_buf: Any = paged_kv_indices_buffer
        self._paged_kv_last_page_len_buf: Any = paged_kv_last_page_len_buffer
        if use_cuda_graph:
            length = buffer_length("paged_kv_indptr_buffer", paged_kv_indptr_buffer)
            buffer_length("paged_kv_indices_buffer", paged_kv_indices_buffer)
            self._fixed_batch_size = buffer_length(
                "paged_kv_last_page_len_buffer", paged_kv_last_page_len_buffer
            )
            require(
                length == self._fixed_batch_size + 1,
                "len(paged_kv_indptr_buffer)",
                length,
                f"{self._fixed_batch_size + 1}, one more than paged_kv_last_page_len_buffer",
            )
        self._q_len_per_req: int | None = None
        self._rows = 0

    @property
    def use_tensor_cores(self) -> bool:
        return self._use_tensor_cores

    def plan(
        self,
        indptr: Tensor,
        indices: Tensor,
        last_page_len: Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim: int,
        page_size: int,
        pos_encoding_mode: str = "NONE",
        window_left: int = -1,
        logits_soft_cap: float | None = None,
        q_data_type: DType | None = "float16",
        kv_data_type: DType | None = None,
        o_data_type: DType | None = None,
        data_type: DType | None = None,
        sm_scale: Scale | None = None,
        rope_scale: float | None = None,
        rope_theta: float | None = None,
        non_blocking: bool = True,
        block_tables: Tensor | None = None,
        seq_lens: Tensor | None = None,
        fixed_split_size: int | None = None,
        disable_split_kv: bool = False,
        q_len_per_req: int = 1,
        window_right: int = 0,
        use_token_head_sf: bool = False,
    ) -> None:
        """Plans a batch.

        Args:
            indptr: int32 [batch_size + 1], indices: int32 [pages], last_page_len: int32 [batch_size]: the
                page table of each request, on the device or on the host.
            window_left: tokens that a query sees before its own; -1: all.
            logits_soft_cap: cap * tanh(logit / cap) if above 0.
            sm_scale: default head_dim ** -0.5. A tensor with one element, or one per request, is read when
                the run's kernel runs.
            q_data_type: a 16-bit type, or float8_e4m3fn or float8_e5m2 if kv_data_type is the same.
            o_data_type: Q's type (None), or float8_e4m3fn; under float8 Q also a 16-bit type.
            fixed_split_size, disable_split_kv: either makes the output of a request independent of its batch.
                fixed_split_size -1: none, as None.
            q_len_per_req: queries of each request, which are its last tokens. Causal among each other.
            use_token_head_sf: float8_e4m3fn K and V have a scale for each token and head, which runs get.
            block_tables, seq_lens: not used.

        Raises:
            ValueError: an argument is wrong.
            NotImplementedError: an argument is not supported; the message names it.
        """
        if window_right != 0:
            not_supported(f"window_right = {window_right}")
        if q_len_per_req < 1:
            refuse("q_len_per_req", q_len_per_req, "at least 1")
        if q_len_per_req > 1 and not self._use_tensor_cores:
            refuse("q_len_per_req", q_len_per_req, "1 without use_tensor_cores=True")
        if keeps_splits(fixed_split_size, False) and not self._use_tensor_cores:
            refuse("fixed_split_size", fixed_split_size, "None without use_tensor_cores=True")
        if data_type is not None:
            q_data_type = data_type if q_data_type is None else q_data_type
            kv_data_type = data_type if kv_data_type is None else kv_data_type
        heads = heads_of(
            self.device,
            num_qo_heads,
            num_kv_heads,
            head_dim,
            None,
            q_data_type or "float16",
            kv_data_type,
            o_data_type,
            use_token_head_sf,
        )
        batch_size = last_page_len.shape[0]
        if q_len_per_req > 1:
            self._check_kv_lens(indptr, last_page_len, page_size, q_len_per_req)
        if self._use_cuda_graph:
            if self._q_len_per_req not in (None, q_len_per_req):
                refuse(
                    "q_len_per_req",
                    q_len_per_req,
                    f"{self._q_len_per_req}, as in the first plan: it is frozen with use_cuda_graph=True",
                )
            self._check_batch_size(batch_size)
        indptr, indices = pages_from_zero(indptr, indices)
        names = ("indices", "paged_kv_indices_buffer")
        self._paged_kv_indices_buf = self._buffered(self._paged_kv_indices_buf, indices, non_blocking, names)
        self._paged_kv_indptr_buf = self._buffered(self._paged_kv_indptr_buf, indptr, non_blocking)
        self._paged_kv_last_page_len_buf = self._buffered(
            self._paged_kv_last_page_len_buf, last_page_len, non_blocking
        )
        self._q_len_per_req = q_len_per_req
        self._batch_size, self._rows = batch_size, batch_size * q_len_per_req
        self._heads, self._has_token_scales = heads, use_token_head_sf
        self._sm_scale = sm_scale
        self._table = PageTable.csr(
            self._paged_kv_indptr_buf, self._paged_kv_indices_buf, self._paged_kv_last_page_len_buf, page_size
        )
        self._batch_invariant = keeps_splits(fixed_split_size, disable_split_kv)
        self._plan_from_buffers(
            pos_encoding(pos_encoding_mode, rope_scale, rope_theta), window_left, logits_soft_cap
        )

    begin_forward = plan

    def _plan_from_buffers(self, pos: PosEncoding, window_left: int, logits_soft_cap: float | None) -> None:
        # Engines compare some of these with their own values.
        self._pos, self._window_left, self._logits_soft_cap = pos, window_left, logits_soft_cap or 0.0
        qo_indptr = indptr_of_equal(self._batch_size, self._q_len_per_req or 1, self.device)
        view = BSRView(qo_indptr, self._table, causal=True, window_left=max(window_left, -1))
        self._plan_view(view, plain_logits(logits_soft_cap, pos))

    def _check_kv_lens(self, indptr: Tensor, last_page_len: Tensor, page_size: int, q_len: int) -> None:
        """Refuses requests with fewer tokens than queries if the host can read them. On a device, their first
        rows see nothing.
        """
        if indptr.device.type != "cpu" or last_page_len.device.type != "cpu" or len(last_page_len) == 0:
            return
        shortest = int(csr_lengths(indptr, last_page_len, page_size).min())
        if shortest < q_len:
            refuse(
                "kv_len",
                shortest,
                f"at least q_len_per_req = {q_len} for every request: first rows would have an empty KV "
                f"range",
            )

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
        q_len_per_req: int | None = None,
        skip_softmax_threshold_scale_factor: float | None = None,
        kv_cache_sf: PagedKV | None = None,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Runs the last plan. May be captured in a CUDA graph; never waits for the device.

        Args:
            q: [batch_size * q_len_per_req, num_qo_heads, head_dim].
            paged_kv_cache: (k, v), or both in one tensor, in kv_layout.
            window_left: None, or the plan's value.
            sinks: float32 [num_qo_heads]: exp(sink) is added to the sum of each row's exponentials.
            q_scale, k_scale, v_scale: factors by which float8 numbers are multiplied: a number, or float32
                [1] or [heads]. If Q is float8, they may also be three tensors given after K and V.
            kv_cache_sf: (k_sf, v_sf) with use_token_head_sf: float32 [pages, page_size, num_kv_heads], in
                kv_layout HND [pages, num_kv_heads, page_size].
            enable_pdl: not used.

        Returns:
            The output in q's shape, of o_data_type; with return_lse also the base-2 lse, float32 [rows,
            num_qo_heads].

        Raises:
            ValueError: an argument is wrong, or there is no plan yet.
            NotImplementedError: an argument is not supported; the message names it.
        """
        if skip_softmax_threshold_scale_factor is not None:
            refuse_given(skip_softmax_threshold_scale_factor=skip_softmax_threshold_scale_factor)
        of_tokens = None
        if kv_cache_sf is not None or self._has_token_scales:
            of_tokens = self._token_scales(kv_cache_sf)
        if (
            not self._is_planned
            or q.shape[0] != self._rows
            or window_left is not None
            or q_len_per_req is not None
        ):
            self._check_run(q, window_left, q_len_per_req)
        own = None
        if args or self._jit is not None:
            own, sinks, q_scale, k_scale, v_scale = self._take(args, sinks, q_scale, k_scale, v_scale)
        kv = paged_cache(paged_kv_cache, self._kv_layout)
        return self._planned.run(
            q,
            kv.k,
            kv.v,
            self._scales(q_scale, k_scale),
            out=out,
            lse=lse,
            return_lse=return_lse,
            v_scale=v_scale,
            sinks=sinks,
            args=own,
            token_scales=of_tokens,
        )

    run_return_lse = partialmethod(run, return_lse=True)

    def _check_run(self, q: Tensor, window_left: int | None, q_len_per_req: int | None) -> None:
        self._check_planned()
        if q.shape[0] != self._rows:
            must_be = f"batch_size * q_len_per_req = {self._batch_size} * {self._q_len_per_req}, as planned"
            refuse("q.shape[0]", q.shape[0], must_be)
        if window_left is not None and window_left != self._window_left:
            refuse("window_left", window_left, f"{self._window_left}, as in the plan")
        if q_len_per_req is not None:
            warnings.warn("q_len_per_req belongs to plan()", DeprecationWarning, stacklevel=3)
            if q_len_per_req != self._q_len_per_req:
                refuse("q_len_per_req", q_len_per_req, f"{self._q_len_per_req}, as in the plan")

    def forward(
        self,
        q: Tensor,
        paged_kv_cache: PagedKV,
        pos_encoding_mode: str = "NONE",
        q_scale: float | None = None,
        k_scale: float | None = None,
        v_scale: float | None = None,
        window_left: int = -1,
        logits_soft_cap: float | None = None,
        sm_scale: float | None = None,
        rope_scale: float | None = None,
        rope_theta: float | None = None,
        return_lse: bool = False,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """`run` with options that replace the plan's; plans again.

        For code that predates `run`.
        """
        pos = pos_encoding(pos_encoding_mode, rope_scale, rope_theta)
        if self._is_planned and (pos, window_left, logits_soft_cap or 0.0) != (
            self._pos,
            self._window_left,
            self._logits_soft_cap,
        ):
            self._plan_from_buffers(pos, window_left, logits_soft_cap)
        self._sm_scale = sm_scale
        return self.run(
            q, paged_kv_cache, q_scale=q_scale, k_scale=k_scale, v_scale=v_scale, return_lse=return_lse
        )

    forward_return_lse = partialmethod(forward, return_lse=True)


class CUDAGraphBatchDecodeWithPagedKVCacheWrapper(BatchDecodeWithPagedKVCacheWrapper):
    """BatchDecodeWithPagedKVCacheWrapper with use_cuda_graph=True."""

    def __init__(
        self,
        workspace_buffer: Tensor,
        indptr_buffer: Tensor,
        indices_buffer: Tensor,
        last_page_len_buffer: Tensor,
        kv_layout: str = "NHD",
        use_tensor_cores: bool = False,
    ) -> None:
        super().__init__(
            workspace_buffer,
            kv_layout,
            True,
            use_tensor_cores,
            indptr_buffer,
            indices_buffer,
            last_page_len_buffer,
        )


def fast_decode_plan(
    self: BatchDecodeWithPagedKVCacheWrapper,
    indptr: Tensor,
    indices: Tensor,
    last_page_len: Tensor,
    num_qo_heads: int,
    num_kv_heads: int,
    head_dim: int,
    page_size: int,
    pos_encoding_mode: str = "NONE",
    window_left: int = -1,
    logits_soft_cap: float | None = None,
    q_data_type: DType | None = None,
    kv_data_type: DType | None = None,
    data_type: DType | None = None,
    sm_scale: float | None = None,
    rope_scale: float | None = None,
    rope_theta: float | None = None,
    non_blocking: bool = True,
    fixed_split_size: int | None = None,
    disable_split_kv: bool = False,
    q_len_per_req: int = 1,
    global_override_indptr_cpu: Tensor | None = None,
) -> None:
    """`plan`, but uses the wrapper's buffers as they are if it has them (use_cuda_graph): the caller has
    filled them. global_override_indptr_cpu is not used.

    Raises:
        ValueError: an argument is wrong.
        NotImplementedError: an argument is not supported; the message names it.
    """
    if q_len_per_req > 1 and self._q_len_per_req is None:
        refuse("q_len_per_req", q_len_per_req, "1 without a prior plan() of the wrapper, as in FlashInfer")
    if self.is_cuda_graph_enabled:
        self._check_batch_size(len(last_page_len))
        check_fits("indices", indices, "paged_kv_indices_buffer", self._paged_kv_indices_buf)
        indptr, indices, last_page_len = (
            self._paged_kv_indptr_buf,
            self._paged_kv_indices_buf,
            self._paged_kv_last_page_len_buf,
        )
    BatchDecodeWithPagedKVCacheWrapper.plan(  # engines replace the wrapper's plan with this function
        self,
        indptr,
        indices,
        last_page_len,
        num_qo_heads,
        num_kv_heads,
        head_dim,
        page_size,
        pos_encoding_mode=pos_encoding_mode,
        window_left=window_left,
        logits_soft_cap=logits_soft_cap,
        q_data_type=q_data_type,
        kv_data_type=kv_data_type,
        data_type=data_type,
        sm_scale=sm_scale,
        rope_scale=rope_scale,
        rope_theta=rope_theta,
        non_blocking=non_blocking,
        fixed_split_size=fixed_split_size,
        disable_split_kv=disable_split_kv,
        q_len_per_req=q_len_per_req,
    )


def single_decode_with_kv_cache(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    kv_layout: str = "NHD",
    pos_encoding_mode: str = "NONE",
    use_tensor_cores: bool = False,
    q_scale: float | None = None,
    k_scale: float | None = None,
    v_scale: float | None = None,
    window_left: int = -1,
    logits_soft_cap: float | None = None,
    sm_scale: Scale | None = None,
    rope_scale: float | None = None,
    rope_theta: float | None = None,
    return_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Attention of one query of one request.

    Args:
        q: [num_qo_heads, head_dim].
        k, v: NHD [kv_len, num_kv_heads, head_dim], HND [num_kv_heads, kv_len, head_dim].

    Returns:
        [num_qo_heads, head_dim]; with return_lse also the base-2 lse, float32 [num_qo_heads].

    Raises:
        ValueError: an argument is wrong.
        NotImplementedError: an argument is not supported; the message names it.
    """
    check_kv_layout(kv_layout)
    logits = Logits(logits_soft_cap or 0.0, pos_encoding(pos_encoding_mode, rope_scale, rope_theta))
    kv = ragged_cache(k, v, kv_layout)
    heads = heads_of(q.device, q.shape[0], kv.num_kv_heads, q.shape[-1], kv.v.shape[-1], q.dtype, k.dtype)
    scales = scaled(heads, 1, sm_scale, q_scale, k_scale)
    result = single_request(
        q.unsqueeze(0), kv, heads, logits, True, window_left, scales, return_lse, v_scale=v_scale
    )
    return (result[0].squeeze(0), result[1].squeeze(0)) if isinstance(result, tuple) else result.squeeze(0)


def single_decode_with_kv_cache_with_jit_module(
    jit_module: JitModule,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *args: Any,
    kv_layout: str = "NHD",
    window_left: int = -1,
    return_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """single_decode_with_kv_cache under a custom variant; args: the values for jit_args, tensors first.

    Raises:
        ValueError: an argument is wrong.
        NotImplementedError: an argument is not supported; the message names it.
    """
    result = single_prefill_with_kv_cache_with_jit_module(
        jit_module,
        q.unsqueeze(0),
        k,
        v,
        *args,
        kv_layout=kv_layout,
        mask_mode=MaskMode.CAUSAL.value,
        window_left=window_left,
        return_lse=return_lse,
    )
    return (result[0].squeeze(0), result[1].squeeze(0)) if isinstance(result, tuple) else result.squeeze(0)


BatchDecodeMlaWithPagedKVCacheWrapper = missing("BatchDecodeMlaWithPagedKVCacheWrapper")
cudnn_batch_decode_with_kv_cache = missing("cudnn_batch_decode_with_kv_cache")
trtllm_batch_decode_with_kv_cache = missing("trtllm_batch_decode_with_kv_cache")
trtllm_batch_decode_with_kv_cache_mla = missing("trtllm_batch_decode_with_kv_cache_mla")
xqa_batch_decode_with_kv_cache = missing("xqa_batch_decode_with_kv_cache")


def _grouped_size_compiled_for_decode_kernels(num_qo_heads: int, num_kv_heads: int) -> bool:
    """Engines use this to choose use_tensor_cores, which has no effect here."""
    return num_qo_heads // num_kv_heads in (1, 2, 4, 8)
