"""flashinfer.mla: attention over the latents of MLA (DeepSeek-V2, arXiv 2405.04434), with the up-projections absorbed into Q and the output."""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch import Tensor

from ..kernels.manifest import KV_ELEMENT_NAMES
from ..metadata import BSRView, KVCache, PageTable
from ..metadata.structure import dtype_name, refuse
from .arguments import buffer_length, copy_if_other, element_types, number, on_device, rows_of
from .batch_prefill import BACKENDS
from .features import missing, not_supported, refuse_given
from .planned_attention import Heads, Logits, PlannedAttention, check_head_dims

__all__ = [
    "BatchMLAPagedAttentionWrapper",
    "trtllm_batch_decode_sparse_mla_dsv4",
    "trtllm_batch_decode_with_kv_cache_mla",
    "xqa_batch_decode_with_kv_cache_mla",
]


class BatchMLAPagedAttentionWrapper:
    """Queries of a batch over paged latents; `plan` once a step, `run` once a layer. Prefills that are not absorbed: BatchPrefillWithRaggedKVCacheWrapper.

    The workspace buffer says which device is used, and nothing more. `plan` does not wait for the device.

    Args:
        float_workspace_buffer: any tensor on the device.
        use_cuda_graph: plans are copied to the buffers, and the workspace stays where it is, so that captured runs serve every later plan.
        qo_indptr, kv_indptr: int32 [batch_size + 1], kv_indices: int32 [most pages], kv_len_arr: int32 [batch_size]: where plans are copied to if
            use_cuda_graph.
        backend: "auto", "fa2" or "fa3": all the same here.

    Raises:
        ValueError: an argument that is wrong. NotImplementedError: one that is not supported, by its name.
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
        if backend not in BACKENDS:
            not_supported(f"backend = {backend!r}")
        self._backend = "fa2" if backend == "auto" else backend
        self._float_workspace_buffer = float_workspace_buffer
        self.device = float_workspace_buffer.device
        # Engines hand these on to Kernels.plan; nothing lies in them.
        self._int_workspace_buffer = self._pin_memory_int_workspace_buffer = torch.empty(0, dtype=torch.uint8, device=self.device)
        self._use_cuda_graph = use_cuda_graph
        self._planned = PlannedAttention(self.device, use_cuda_graph)
        # The last plan's, or the buffers of CUDA graphs. (Any: None before the first plan, which nothing below sees.)
        self._qo_indptr_buf: Any = qo_indptr
        self._kv_indptr_buf: Any = kv_indptr
        self._kv_indices_buf: Any = kv_indices
        self._kv_len_arr_buf: Any = kv_len_arr
        self._last_page_len: Any = None
        if use_cuda_graph:
            batch_size = buffer_length("qo_indptr", qo_indptr) - 1
            buffer_length("kv_indices", kv_indices)
            for name, buffer, length in (("kv_indptr", kv_indptr, batch_size + 1), ("kv_len_arr", kv_len_arr, batch_size)):
                if buffer_length(name, buffer) != length:
                    refuse(f"len({name})", buffer_length(name, buffer), f"{length}, as qo_indptr has {batch_size + 1}")
            self._last_page_len = torch.ones(batch_size, dtype=torch.int32, device=self.device)
        self._rows: int | None = None
        self._heads: Heads | None = None
        self._sm_scale = 1.0
        self._page_size = 1
        self._causal = False
        self._has_warned = False

    @property
    def _cached_module(self) -> Kernels | None:
        """What engines call in the place of `plan`; None before the first one."""
        return None if self._heads is None else Kernels(self)

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
        sm_scale: float,
        q_data_type: torch.dtype,
        kv_data_type: torch.dtype,
        use_profiler: bool = False,
    ) -> None:
        """Plans a batch.

        Args:
            qo_indptr: int32 [batch_size + 1], where the queries of each request begin.
            kv_indptr: int32 [at least batch_size + 1], where the pages of each request begin in kv_indices, int32 [pages].
            kv_len_arr: int32 [batch_size], tokens of each request.
            head_dim_ckv, head_dim_kpe: columns of the latent, and of the rotated part: 512 and 64, or 0.
            causal: the queries of a request are its last tokens, and see those before and themselves.
            sm_scale: that of the heads before the absorption: (128 + 64) ** -0.5 in DeepSeek's models.
            kv_data_type: q_data_type, or float8_e4m3fn or float8_e5m2, of both caches.

        Raises:
            ValueError: an argument that is wrong. NotImplementedError: one that is not supported, by its name.
        """
        refuse_given(use_profiler=use_profiler)
        dtype, kv_dtype = element_types(q_data_type, kv_data_type)
        dims = check_head_dims(head_dim_ckv + head_dim_kpe, head_dim_ckv, self.device)
        if kv_dtype is not None and self.device.type == "cuda" and not dims.runs_over(KV_ELEMENT_NAMES[dtype_name(kv_dtype)]):
            not_supported(f"kv_data_type = {kv_dtype} with head_dim = {dims} on CUDA")
        heads = Heads(num_heads, 1, dims, dtype, kv_dtype)
        batch_size = len(qo_indptr) - 1
        self._rows = rows_of(qo_indptr)
        kv_indptr, kv_indices, kv_lens = (on_device(tensor, self.device, True) for tensor in (kv_indptr, kv_indices, kv_len_arr))
        indptr, indices, last_page_len = _exact_pages(kv_indptr, kv_indices, kv_lens, page_size)
        if self._use_cuda_graph:
            if batch_size != len(self._kv_len_arr_buf):
                refuse("batch_size", batch_size, f"{len(self._kv_len_arr_buf)}, that of the buffers, with use_cuda_graph=True")
            if len(indices) > len(self._kv_indices_buf):
                refuse("len(kv_indices)", len(indices), f"at most {len(self._kv_indices_buf)}, that of the buffer kv_indices")
            if self._heads is None and self._rows is None:
                self._rows = int(qo_indptr[-1])  # waits for the device, once: the workspace is made for so many rows
            copy_if_other(self._qo_indptr_buf, qo_indptr, True)
            copy_if_other(self._kv_len_arr_buf, kv_lens, True)
            for buffer, tensor in ((self._kv_indptr_buf, indptr), (self._kv_indices_buf[: len(indices)], indices), (self._last_page_len, last_page_len)):
                buffer.copy_(tensor)
        else:
            self._qo_indptr_buf, self._kv_len_arr_buf = on_device(qo_indptr, self.device, True), kv_lens
            self._kv_indptr_buf, self._kv_indices_buf, self._last_page_len = indptr, indices, last_page_len
        self._page_size, self._causal, self._sm_scale = page_size, bool(causal), number("sm_scale", sm_scale)
        self._plan_buffers(heads)
        self._heads = heads

    def _plan_buffers(self, heads: Heads) -> None:
        table = PageTable.csr(self._kv_indptr_buf, self._kv_indices_buf, self._last_page_len, self._page_size)
        self._planned.plan(BSRView(self._qo_indptr_buf, table, causal=self._causal), heads, Logits(), rows=self._rows)

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
            q_nope: [qo_indptr[-1], num_heads, head_dim_ckv], q_pe: [qo_indptr[-1], num_heads, head_dim_kpe]. Read where they are if they are the two parts of
                one tensor, else put side by side.
            ckv_cache: [pages, page_size, head_dim_ckv], kpe_cache: [pages, page_size, head_dim_kpe]: the two parts of one tensor, `cache[..., :512]` and
                `cache[..., 512:]`. Caches that lie apart are copied into one by each run, all of their pages, with a warning: the kernels read a token's
                latent and rotated part as one row.
            out: [rows, num_heads, head_dim_ckv], lse: float32 [rows, num_heads], written.
            kv_len, page_table: of FlashInfer's backend "cutlass"; not used.
            ckv_scale, kpe_scale: what the numbers of float8 caches are multiplied by; the same for both.

        Returns:
            out; with return_lse also lse, to base 2, or e with return_lse_base_on_e.

        Raises:
            ValueError: an argument that is wrong, or no plan yet. NotImplementedError: one that is not supported, by its name.
        """
        refuse_given(profiler_buffer=profiler_buffer, o_scale=o_scale, ckv_scale_arr=ckv_scale_arr)
        if self._heads is None:
            raise ValueError("run() before a successful plan()")
        dims, dtype, kv_dtype = self._heads.head_dims, self._heads.dtype, self._heads.kv_dtype
        if kv_dtype is None:
            refuse_given(ckv_scale=ckv_scale, kpe_scale=kpe_scale)
        elif (1.0 if ckv_scale is None else ckv_scale) != (1.0 if kpe_scale is None else kpe_scale):
            not_supported(f"ckv_scale = {ckv_scale} with kpe_scale = {kpe_scale}: a row has one scale")
        named = {"q_nope": q_nope, "q_pe": q_pe, "ckv_cache": ckv_cache, "kpe_cache": kpe_cache}
        for (name, tensor), width in zip(named.items(), (dims.v, dims.qk - dims.v) * 2, strict=True):
            planned = kv_dtype if kv_dtype is not None and name.endswith("cache") else dtype
            if tensor.ndim != 3 or tensor.shape[2] != width or tensor.dtype != planned:
                refuse(name, tensor, f"a {dtype_name(planned)} tensor [..., ..., {width}], as planned")
        if self._rows is not None and q_nope.shape[0] != self._rows:
            refuse("q_nope.shape[0]", q_nope.shape[0], f"qo_indptr[-1] = {self._rows}, as planned")
        q, cache = _joined(q_nope, q_pe), _joined(ckv_cache, kpe_cache)
        if ckv_cache.shape[0] == 0:  # kernels want a page, also where no request has a token
            cache = ckv_cache.new_zeros(1, ckv_cache.shape[1], dims.qk)
        if cache is None:
            if not self._has_warned:
                way_out = "allocate one tensor [pages, page_size, head_dim_ckv + head_dim_kpe] and pass its two parts"
                warnings.warn(f"ckv_cache and kpe_cache lie apart, so each run copies both: {way_out}", stacklevel=2)
                self._has_warned = True
            as_bytes = [part.contiguous().view(torch.uint8) for part in (ckv_cache, kpe_cache)]
            cache = torch.cat(as_bytes, -1).view(ckv_cache.dtype)
        k = cache.unsqueeze(2)
        kv = KVCache.unchecked(k, k[..., : dims.v], ckv_scale, ckv_scale)
        if q is None:
            q = torch.cat((q_nope, q_pe), -1)
        wants_lse = return_lse or lse is not None
        found = self._planned.run(q, kv, self._sm_scale, out=out, lse=lse, return_lse=wants_lse, lse_to_base_2=not return_lse_base_on_e)
        return found[0] if wants_lse and not return_lse else found


class Kernels:
    """FlashInfer's compiled kernels, as engines see them that call their `plan` with host arrays, to save the wrapper's copies to the host."""

    def __init__(self, wrapper: BatchMLAPagedAttentionWrapper) -> None:
        self._wrapper = wrapper

    def plan(
        self, _float_workspace: Tensor, _int_workspace: Tensor, _pinned_int_workspace: Tensor, qo_indptr_host: Tensor, _kv_indptr_host: Tensor,
        _kv_lens_host: Tensor, num_heads: int, head_dim_ckv: int, causal: bool, *_options: int,
    ) -> list[int]:  # fmt: skip
        """Plans what lies in the wrapper's buffers, which the caller has filled, with as many pages for each request as its length needs.

        Returns:
            What engines keep as the plan's description: nothing.

        Raises:
            ValueError: other heads than those of the wrapper's first plan.
        """
        wrapper = self._wrapper
        heads = wrapper._heads
        assert heads is not None
        if (num_heads, head_dim_ckv) != (heads.num_qo_heads, heads.head_dims.v):
            refuse("(num_heads, head_dim_ckv)", (num_heads, head_dim_ckv), f"{(heads.num_qo_heads, heads.head_dims.v)}, those of the first plan")
        indptr = wrapper._kv_indptr_buf
        wrapper._last_page_len.copy_(wrapper._kv_len_arr_buf - (indptr[1:] - indptr[:-1] - 1) * wrapper._page_size)
        wrapper._rows, wrapper._causal = int(qo_indptr_host[-1]), bool(causal)
        wrapper._plan_buffers(heads)
        return []


def _exact_pages(kv_indptr: Tensor, kv_indices: Tensor, kv_lens: Tensor, page_size: int) -> tuple[Tensor, Tensor, Tensor]:
    """The indptr, indices and last page lengths of requests whose lengths count, and whose pages begin at kv_indptr: FlashInfer lets a request have more pages
    than it needs."""
    batch_size = len(kv_lens)
    num_pages = (kv_lens + page_size - 1) // page_size
    indptr = torch.zeros(batch_size + 1, dtype=torch.int32, device=kv_lens.device)
    torch.cumsum(num_pages, 0, dtype=torch.int32, out=indptr[1:])
    last_page_len = (kv_lens - (num_pages - 1) * page_size).to(torch.int32)
    if batch_size == 0 or len(kv_indices) == 0:
        return indptr, kv_indices, last_page_len
    entry = torch.arange(len(kv_indices), dtype=torch.int32, device=kv_lens.device)
    request = torch.searchsorted(indptr[1:], entry, right=True).clamp_(max=batch_size - 1)
    found = kv_indptr[request] + (entry - indptr[request])
    return indptr, kv_indices[found.clamp_(0, len(kv_indices) - 1).long()], last_page_len


def _joined(left: Tensor, right: Tensor) -> Tensor | None:
    """The tensor [..., left's and right's columns] of which these are the two parts; None where they are not."""
    width = left.shape[-1]
    if right.shape[-1] == 0:
        return left
    same_steps = all(size <= 1 or of_left == of_right for size, of_left, of_right in zip(left.shape[:-1], left.stride(), right.stride(), strict=False))
    is_behind = right.data_ptr() == left.data_ptr() + width * left.element_size() and left.untyped_storage().data_ptr() == right.untyped_storage().data_ptr()
    if not same_steps or not is_behind or left.shape[:-1] != right.shape[:-1] or left.stride(-1) != 1 or right.stride(-1) != 1:
        return None
    return left.as_strided((*left.shape[:-1], width + right.shape[-1]), left.stride())


trtllm_batch_decode_sparse_mla_dsv4 = missing("mla.trtllm_batch_decode_sparse_mla_dsv4")
trtllm_batch_decode_with_kv_cache_mla = missing("mla.trtllm_batch_decode_with_kv_cache_mla")
xqa_batch_decode_with_kv_cache_mla = missing("mla.xqa_batch_decode_with_kv_cache_mla")
