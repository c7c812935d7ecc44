"""flashinfer.mla: attention over MLA latents (DeepSeek-V2, arXiv 2405.04434), with up-projections absorbed
into Q and the output.
"""

from __future__ import annotations

import math
import warnings
from typing import Any

import torch
from torch import Tensor

from ..metadata import BSRView, PageTable
from ..validation import check_plain, dtype_name, refuse, require
from .arguments import (
    Scale,
    buffer_length,
    heads_of,
    pages_from_zero,
    rows_of,
)
from .features import missing, not_supported, refuse_given
from .wrapper import HostPlannedWrapper, plain_logits

__all__ = [
    "BatchMLAPagedAttentionWrapper",
    "trtllm_batch_decode_sparse_mla_dsv4",
    "trtllm_batch_decode_with_kv_cache_mla",
    "xqa_batch_decode_with_kv_cache_mla",
]


class BatchMLAPagedAttentionWrapper(HostPlannedWrapper):
    """Queries of a batch over paged latents; call `plan` once a step, `run` once a layer.

    For prefills without absorption, use BatchPrefillWithRaggedKVCacheWrapper.

    The workspace buffer only selects the device. `plan` does not wait for the device.

    Args:
        float_workspace_buffer: any tensor on the device.
        use_cuda_graph: copies plans to the buffers and keeps the workspace in place, so that captured runs
            work with every later plan.
        qo_indptr, kv_indptr: int32 [batch_size + 1], kv_indices: int32 [most pages], kv_len_arr: int32
            [batch_size]: buffers for plans if use_cuda_graph.
        backend: "auto", "fa2" or "fa3": equivalent here.

    Raises:
        ValueError: an argument is wrong.
        NotImplementedError: an argument is not supported; the message names it.
    """

    def __init__(
        self,
        float_workspace_buffer: Tensor,
        use_cuda_graph: bool = False,
        qo_indptr: Tensor | None = None,
        kv_indptr: Tensor | None = None,
        kv_indices: Tensor | None = None,
        kv_len_arr: Tensor | None = None,
        backend: str = "auto",
    ) -> None:
        super().__init__(float_workspace_buffer, use_cuda_graph=use_cuda_graph, backend=backend)
        # The last plan's tensors, or the buffers of CUDA graphs. Any, as they are None only before a plan.
        self._qo_indptr_buf: Any = qo_indptr
        self._kv_indptr_buf: Any = kv_indptr
        self._kv_indices_buf: Any = kv_indices
        self._kv_len_arr_buf: Any = kv_len_arr
        if use_cuda_graph:
            batch_size = buffer_length("qo_indptr", qo_indptr) - 1
            buffer_length("kv_indices", kv_indices)
            for name, buffer, length in (
                ("kv_indptr", kv_indptr, batch_size + 1),
                ("kv_len_arr", kv_len_arr, batch_size),
            ):
                require(
                    buffer_length(name, buffer) == length,
                    f"len({name})",
                    buffer_length(name, buffer),
                    f"{length}, as qo_indptr has {batch_size + 1}",
                )
            self._fixed_batch_size = batch_size
        self._rows = None
        self._page_size = 1
        self._causal = False
        self._has_warned = False

    def plan(
        self,
        qo_indptr: Tensor,
        kv_indptr: Tensor,
        kv_indices: Tensor,
        kv_len_arr: Tensor,
        num_heads: int,
        head_dim_ckv: int,
        head_dim_kpe: int,
        page_size: int,
        causal: bool,
        sm_scale: Scale,
        q_data_type: torch.dtype,
        kv_data_type: torch.dtype,
        use_profiler: bool = False,
    ) -> None:
        """Plans a batch.

        Args:
            qo_indptr: int32 [batch_size + 1], offsets of each request's queries.
            kv_indptr: int32 [at least batch_size + 1], offsets of each request's pages in kv_indices, int32
                [pages].
            kv_len_arr: int32 [batch_size], tokens of each request.
            head_dim_ckv, head_dim_kpe: columns of the latent, and of the rotated part: 512 and 64, or 0.
            causal: the queries of a request are its last tokens; each sees the tokens up to itself.
            sm_scale: the scale of the heads before absorption: (128 + 64) ** -0.5 in DeepSeek's models.
            kv_data_type: q_data_type, or float8_e4m3fn or float8_e5m2, for both caches.

        Raises:
            ValueError: an argument is wrong.
            NotImplementedError: an argument is not supported; the message names it.
        """
        refuse_given(use_profiler=use_profiler)
        heads = heads_of(
            self.device, num_heads, 1, head_dim_ckv + head_dim_kpe, head_dim_ckv, q_data_type, kv_data_type
        )
        batch_size = qo_indptr.shape[0] - 1
        if kv_indptr.shape[0] != batch_size + 1:
            kv_indptr = kv_indptr[: batch_size + 1]
        qo_indptr = self._start_rows(qo_indptr)
        if self._use_cuda_graph:
            self._check_batch_size(batch_size)
        kv_indptr, kv_indices = pages_from_zero(kv_indptr, kv_indices)
        names = ("kv_indices", "the buffer kv_indices")
        self._kv_indices_buf = self._buffered(self._kv_indices_buf, kv_indices, True, names)
        self._qo_indptr_buf = self._buffered(self._qo_indptr_buf, qo_indptr, True)
        self._kv_indptr_buf = self._buffered(self._kv_indptr_buf, kv_indptr, True)
        self._kv_len_arr_buf = self._buffered(self._kv_len_arr_buf, kv_len_arr, True)
        self._heads, self._page_size, self._causal, self._sm_scale = heads, page_size, bool(causal), sm_scale
        self._of_cache = heads.kv_dtype or heads.dtype
        self._has_rope = head_dim_kpe > 0
        self._latent_bytes = head_dim_ckv * self._of_cache.itemsize
        self._plan_from_buffers()

    def _plan_from_buffers(self) -> None:
        table = PageTable.csr(
            self._kv_indptr_buf, self._kv_indices_buf, None, self._page_size, kv_lens=self._kv_len_arr_buf
        )
        self._plan_view(BSRView(self._qo_indptr_buf, table, causal=self._causal), plain_logits(None))

    def run(
        self,
        q_nope: Tensor,
        q_pe: Tensor,
        ckv_cache: Tensor,
        kpe_cache: Tensor,
        out: Tensor | None = None,
        lse: Tensor | None = None,
        return_lse: bool = False,
        profiler_buffer: Tensor | None = None,
        kv_len: Tensor | None = None,
        page_table: Tensor | None = None,
        return_lse_base_on_e: bool = False,
        o_scale: float | None = None,
        *,
        ckv_scale: float | None = None,
        ckv_scale_arr: Tensor | None = None,
        kpe_scale: float | None = None,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Runs the last plan. May be captured in a CUDA graph; never waits for the device.

        Args:
            q_nope: [qo_indptr[-1], num_heads, head_dim_ckv], q_pe: [qo_indptr[-1], num_heads, head_dim_kpe].
                They are not copied.
            ckv_cache: [pages, page_size, head_dim_ckv], kpe_cache: [pages, page_size, head_dim_kpe]: the two
                parts of one tensor, `cache[..., :512]` and `cache[..., 512:]`. The kernels read a token's
                latent and rotated part as one row. Separate caches are therefore copied into one by each
                run, all of their pages, with a warning.
            out: [rows, num_heads, head_dim_ckv], lse: float32 [rows, num_heads], written.
            kv_len, page_table: for FlashInfer's backend "cutlass"; not used.
            ckv_scale, kpe_scale: factors of the numbers in float8 caches, which require both. If they differ,
                q_pe is multiplied by kpe_scale / ckv_scale, and rounded.

        Returns:
            out; with return_lse also lse, base 2, or base e with return_lse_base_on_e.

        Raises:
            ValueError: an argument is wrong, or there is no plan yet.
            NotImplementedError: an argument is not supported; the message names it.
        """
        if profiler_buffer is not None or o_scale is not None:
            refuse_given(profiler_buffer=profiler_buffer, o_scale=o_scale)
        if not self._is_planned:
            self._check_planned()
        if self._heads.is_over_float8:
            q_pe, ckv_scale = self._with_one_scale(q_pe, ckv_scale, ckv_scale_arr, kpe_scale)
        elif ckv_scale is not None or ckv_scale_arr is not None or kpe_scale is not None:
            refuse(
                "(ckv_scale, ckv_scale_arr, kpe_scale)",
                (ckv_scale, ckv_scale_arr, kpe_scale),
                f"None where kv_data_type is {self._of_cache}",
            )
        if self._rows is not None and q_nope.shape[0] != self._first_row + self._rows:
            refuse(
                "q_nope.shape[0]",
                q_nope.shape[0],
                f"qo_indptr[-1] = {self._first_row + self._rows}, as planned",
            )
        try:
            if self._has_rope:
                # Without pages both addresses are 0. Wrong parts may pass; run refuses them.
                q_rope, is_one = q_pe, kpe_cache.data_ptr() - ckv_cache.data_ptr() == self._latent_bytes
            else:
                self._refuse_columns(q_pe=q_pe, kpe_cache=kpe_cache)
                q_rope, is_one = None, ckv_cache.shape[0] > 0
            k, v, k_rope = (
                (ckv_cache, None, kpe_cache) if is_one else (*self._joined(ckv_cache, kpe_cache), None)
            )
            return self._run_planned(
                q_nope,
                k,
                v,
                self._scales(),
                q_rope=q_rope,
                k_rope=k_rope,
                kv_scale=ckv_scale,
                out=out,
                lse=lse,
                return_lse=return_lse,
                lse_to_base_2=not return_lse_base_on_e,
            )
        except (AttributeError, ValueError):
            self._refuse_columns(q_nope=q_nope, q_pe=q_pe, ckv_cache=ckv_cache, kpe_cache=kpe_cache)
            check_plain("q_nope", q_nope)
            check_plain("q_pe", q_pe)
            raise

    def _with_one_scale(
        self, q_pe: Tensor, ckv_scale: float | None, ckv_scale_arr: Tensor | None, kpe_scale: float | None
    ) -> tuple[Tensor, float]:
        """q_pe, and one scale for a whole row of the cache. q_pe is multiplied by the ratio of the scales, so
        its products stay the same.
        """
        if (ckv_scale is None) == (ckv_scale_arr is None):
            raise ValueError(
                f"Exactly one of ckv_scale or ckv_scale_arr must be given where kv_data_type is "
                f"{self._of_cache}"
            )
        if kpe_scale is None:
            refuse("kpe_scale", kpe_scale, f"a number where kv_data_type is {self._of_cache}")
        refuse_given(ckv_scale_arr=ckv_scale_arr)
        assert ckv_scale is not None
        of_ckv, of_kpe = float(ckv_scale), float(kpe_scale)
        if not (0.0 < of_ckv < math.inf and 0.0 < of_kpe < math.inf):
            refuse("(ckv_scale, kpe_scale)", (ckv_scale, kpe_scale), "above 0 and finite")
        if of_ckv == of_kpe:
            return q_pe, of_ckv
        if self._heads.float8_q:
            not_supported(
                f"ckv_scale = {ckv_scale} with kpe_scale = {kpe_scale} under q_data_type = "
                f"{self._heads.q_dtype}"
            )
        return q_pe * (of_kpe / of_ckv), of_ckv

    def _joined(self, ckv_cache: Tensor, kpe_cache: Tensor) -> tuple[Tensor, Tensor]:
        """K and V as pages [pages, page_size, 1, columns]: views of the caches, or of a copy if they are
        separate.
        """
        self._refuse_columns(ckv_cache=ckv_cache, kpe_cache=kpe_cache)
        dims = self._heads.head_dims
        cache = _joined(ckv_cache, kpe_cache)
        if ckv_cache.shape[0] == 0:  # two tensors without memory are never adjacent
            cache = ckv_cache.new_empty(0, ckv_cache.shape[1], 1, dims.qk)
        if cache is None:
            if not self._has_warned:
                way_out = (
                    "allocate one tensor [pages, page_size, head_dim_ckv + head_dim_kpe] and pass its "
                    "two parts"
                )
                warnings.warn(
                    f"ckv_cache and kpe_cache lie apart, so each run copies both: {way_out}", stacklevel=3
                )
                self._has_warned = True
            as_bytes = [part.contiguous().view(torch.uint8) for part in (ckv_cache, kpe_cache)]
            cache = torch.cat(as_bytes, -1).view(ckv_cache.dtype).unsqueeze(2)
        return cache, cache.as_strided((*cache.shape[:3], dims.v), cache.stride())

    def _refuse_columns(self, **tensors: Tensor) -> None:
        """Refuses parts of Q or the cache that differ from the plan."""
        dims = self._heads.head_dims
        for name, tensor in tensors.items():
            columns = dims.v if name in ("q_nope", "ckv_cache") else dims.qk - dims.v
            dtype = self._of_cache if name.endswith("cache") else self._heads.q_dtype
            if not isinstance(tensor, Tensor) or tensor.ndim != 3 or tensor.shape[2] != columns:
                refuse(name, tensor, f"a {dtype_name(dtype)} tensor [..., ..., {columns}], as planned")
            if tensor.dtype != dtype:
                refuse(f"{name}.dtype", tensor.dtype, f"{dtype}, as planned")

    def _plan_from_host(
        self,
        _float_workspace: Tensor,
        _int_workspace: Tensor,
        _pinned_int_workspace: Tensor,
        qo_indptr_host: Tensor,
        _kv_indptr_host: Tensor,
        _kv_lens_host: Tensor,
        num_heads: int,
        head_dim_ckv: int,
        causal: bool,
        *_options: int,
    ) -> list[int]:
        """Plans the contents of the wrapper's buffers, which the caller has filled.

        Returns:
            An empty plan description, which engines keep.

        Raises:
            ValueError: the heads differ from the wrapper's first plan.
        """
        heads = self._heads
        if (num_heads, head_dim_ckv) != (heads.num_qo_heads, heads.head_dims.v):
            refuse(
                "(num_heads, head_dim_ckv)",
                (num_heads, head_dim_ckv),
                f"{(heads.num_qo_heads, heads.head_dims.v)}, as in the first plan",
            )
        self._rows, self._causal = rows_of(qo_indptr_host), bool(causal)
        self._plan_from_buffers()
        return []


def _joined(left: Tensor, right: Tensor) -> Tensor | None:
    """The cache [pages, page_size, 1, width] that consists of these two parts; None if there is none."""
    (pages, page_size, width), (page_step, step, element_step) = left.shape, left.stride()
    right_pages, right_page_size, more = right.shape
    if element_step != 1:
        return None
    if more > 0:
        right_page_step, right_step, right_element_step = right.stride()
        if right.data_ptr() != left.data_ptr() + width * left.element_size() or right_element_step != 1:
            return None
        if (
            (pages, page_size) != (right_pages, right_page_size)
            or (page_step != right_page_step and pages > 1)
            or (step != right_step and page_size > 1)
        ):
            return None
        width += more
    try:
        step = step if page_size > 1 else width
        return left.as_strided(
            (pages, page_size, 1, width), (page_step if pages > 1 else page_size * step, step, width, 1)
        )
    except RuntimeError:  # left's memory ends before right: they are two adjacent tensors
        return None


trtllm_batch_decode_sparse_mla_dsv4 = missing("mla.trtllm_batch_decode_sparse_mla_dsv4")
trtllm_batch_decode_with_kv_cache_mla = missing("mla.trtllm_batch_decode_with_kv_cache_mla")
xqa_batch_decode_with_kv_cache_mla = missing("mla.xqa_batch_decode_with_kv_cache_mla")
