"""Device kernels on a CPU (tests/csrc/device_kernels.cpp), in the place of the CPU's own: the schedule is what `plan` made."""

from __future__ import annotations

import ctypes
import math
import subprocess
from pathlib import Path
from typing import Any

import torch
from host_planner import COMPILER, ROOT
from torch import Tensor

from attn_backend import Attention, BSRView, Composition, KVCache, Samples, SpeculativeSamples

# What the generic attention kernel is compiled for there.
GENERIC = ((torch.bfloat16, 64), (torch.float16, 128), (torch.bfloat16, 256))
VARIANTS = ("standard", "slanted", "squared", "placed")


def build(folder: Path) -> ctypes.CDLL:
    library, tests = folder / "libkernels.so", ROOT / "tests" / "csrc"
    includes = [tests / "emulated", ROOT / "csrc"]
    options = ["-std=c++17", "-O2", "-Wno-unknown-pragmas", "-fPIC", "-shared", *(f"-I{include}" for include in includes)]
    sources = [tests / "device_kernels.cpp", tests / "emulated" / "cuda_emulation.cpp"]
    subprocess.run([str(COMPILER), *options, *map(str, sources), "-o", str(library)], check=True)
    return ctypes.CDLL(str(library))


class _Attention(ctypes.Structure):
    _fields_ = (
        ("pointers", ctypes.c_void_p * 7),
        ("strides", ctypes.c_int64 * 10),
        ("sizes", ctypes.c_int64 * 4),
        ("sm_scale", ctypes.c_double),
        ("variant_value", ctypes.c_double),
        ("is_bf16", ctypes.c_int64),
        ("variant", ctypes.c_int64),
        ("sinks", ctypes.c_void_p),
    )


class DeviceAttention:
    """`plan` and `run` of an Attention object on the CPU, run by device kernels: the generic kernel, or a walk over the schedule as the Hopper kernel's."""

    def __init__(self, library: ctypes.CDLL, attention: Attention, kernel: str, seed: int = 0) -> None:
        self._library, self._attention, self._generic, self._seed = library, attention, kernel == "generic", seed
        self._page_size = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._attention, name)

    def plan(self, composition: BSRView | Composition) -> None:
        self._attention.plan(composition)
        view = composition.levels[0] if isinstance(composition, Composition) else composition
        self._page_size = view.table.page_size

    def run(
        self,
        q: Tensor,
        kv: KVCache,
        *,
        out: Tensor | None = None,
        lse: Tensor | None = None,
        sm_scale: float | None = None,
        logits_soft_cap: float = 0.0,
        variant: str = "standard",
        slope: float = 0.0,
        sinks: Tensor | None = None,
    ) -> Tensor:
        """variant: one of VARIANTS (tests/csrc/slanted_variant.h). slope: of the slanted one. sinks: float32 [heads]."""
        attention = self._attention
        out = torch.empty_like(q) if out is None else out
        config = attention._library.schedule_config(attention._handle)
        partial_o, partial_lse = torch.full_like(attention._partial_o, torch.nan), torch.full_like(attention._partial_lse, torch.nan)
        pointers = [None if t is None else t.data_ptr() for t in (q, kv.k, kv.v, out, lse, partial_o, partial_lse)]
        passed = _Attention(
            (ctypes.c_void_p * 7)(*pointers),
            (ctypes.c_int64 * 10)(*q.stride()[:2], *out.stride()[:2], *kv.k.stride()[:3], *kv.v.stride()[:3]),
            (ctypes.c_int64 * 4)(q.shape[0], kv.k.shape[0], q.shape[2], self._page_size),
            q.shape[2] ** -0.5 if sm_scale is None else sm_scale,
            slope if variant in ("slanted", "placed") else logits_soft_cap,
            q.dtype == torch.bfloat16,
            VARIANTS.index(variant),
            None if sinks is None else sinks.data_ptr(),
        )
        workspace = ctypes.c_void_p(attention._schedule.data_ptr())
        blocks_y = 1 + self._seed % 4
        self._library.device_attention(config, workspace, ctypes.byref(passed), self._generic, blocks_y, self._seed)
        return out


def append_kv(library: ctypes.CDLL, k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slots: Tensor, blocks: int) -> None:
    """k_cache, v_cache: [pages, page_size, num_kv_heads, head_dim]. Elements of any type: bytes are copied."""
    pointers = (ctypes.c_void_p * 5)(*(t.data_ptr() for t in (k, v, k_cache, v_cache, slots)))
    strides = (ctypes.c_int64 * 10)(*k.stride()[:2], *v.stride()[:2], *k_cache.stride()[:3], *v_cache.stride()[:3])
    sizes = (ctypes.c_int64 * 7)(slots.shape[0], *k_cache.shape, k.element_size(), slots.dtype == torch.int64)
    library.device_append(pointers, strides, sizes, blocks)


def merge_states(library: ctypes.CDLL, o: Tensor, lse: Tensor, indptr: Tensor | None, mask: Tensor | None, log2: bool, blocks: int) -> tuple[Tensor, Tensor]:
    """o [rows, states, heads, head_dim], or with an int64 indptr [states, heads, head_dim]; lse likewise. Rows that the mask leaves alone are NaN."""
    rows = o.shape[0] if indptr is None else len(indptr) - 1
    out, out_lse = torch.full((rows, *o.shape[-2:]), torch.nan, dtype=o.dtype), torch.full((rows, o.shape[-2]), torch.nan)
    pointers = (ctypes.c_void_p * 6)(*(None if t is None else t.data_ptr() for t in (o, lse, out, out_lse, indptr, mask)))
    of_states = [0] if indptr is not None else []
    strides = (ctypes.c_int64 * 8)(*of_states, *o.stride()[:-1], *of_states, *lse.stride()[:-1], *out.stride()[:2], out_lse.stride(0))
    dtype = (torch.float32, torch.float16, torch.bfloat16).index(o.dtype)
    sizes = (ctypes.c_int64 * 5)(0 if indptr is not None else o.shape[1], rows, *o.shape[-2:], dtype)
    library.device_merge_states(pointers, strides, sizes, ctypes.c_double(1.0 if log2 else math.log2(math.e)), blocks)
    return out, out_lse


class _RowFloat(ctypes.Structure):
    _fields_ = (("data", ctypes.c_void_p), ("value", ctypes.c_float))


class _RowInt(ctypes.Structure):
    _fields_ = (("data", ctypes.c_void_p), ("is_int64", ctypes.c_int32), ("value", ctypes.c_int64))


class _IndexArray(ctypes.Structure):
    _fields_ = (("data", ctypes.c_void_p), ("is_int64", ctypes.c_int32))


class _SamplingParams(ctypes.Structure):
    """SamplingParams of csrc/sampling/sampling.h."""

    _fields_ = (
        ("values", ctypes.c_void_p),
        ("row_stride", ctypes.c_int64),
        ("source_rows", _IndexArray),
        ("num_source_rows", ctypes.c_int32),
        ("token_mask", ctypes.c_void_p),
        ("mask_stride", ctypes.c_int64),
        ("temperature", _RowFloat),
        ("top_p", _RowFloat),
        ("min_p", _RowFloat),
        ("top_k", _RowInt),
        ("seed", _RowInt),
        ("position", _RowInt),
        ("token_ids", ctypes.c_void_p),
        ("valid", ctypes.c_void_p),
        ("logprobs", ctypes.c_void_p),
        ("top_logprobs", ctypes.c_void_p),
        ("top_token_ids", ctypes.c_void_p),
        ("written", ctypes.c_void_p),
        ("written_stride", ctypes.c_int64),
        ("workspace", ctypes.c_void_p),
        ("draft_probs", ctypes.c_void_p),
        ("draft_token_ids", ctypes.c_void_p),
        ("num_accepted", ctypes.c_void_p),
        *((name, ctypes.c_int32) for name in ("draft_ids_are_int64", "num_draft_tokens", "batch", "vocab", "num_top_logprobs")),
        *((name, ctypes.c_int32) for name in ("token_ids_are_int64", "joint", "tempered_logprobs", "task")),
    )


class DeviceSampling:
    """Sampling's kernels. Keyword arguments are SamplingParams' fields; `temperature` to `position`: a number or a tensor."""

    SAMPLE, RENORM, MASK_LOGITS, SPECULATE = range(4)

    def __init__(self, library: ctypes.CDLL) -> None:
        self._library = library

    def launch(self, values: Tensor, *, of_probs: bool = False, ctas: int = 1, unfiltered: bool = False, run_seed: int = 0, **fields: Any) -> None:
        params = _SamplingParams(values=values.data_ptr(), row_stride=values.stride(0), batch=values.shape[0], vocab=values.shape[-1])
        fields = {"temperature": 1.0, "top_p": 1.0, "min_p": 0.0, "top_k": 0, "seed": 0, "position": 0, **fields}
        for name, value in fields.items():
            if name in ("temperature", "top_p", "min_p"):
                setattr(params, name, _RowFloat(value.data_ptr(), 0.0) if isinstance(value, Tensor) else _RowFloat(None, value))
            elif name in ("top_k", "seed", "position"):
                is_tensor = isinstance(value, Tensor)
                setattr(params, name, _RowInt(value.data_ptr(), value.dtype == torch.int64, 0) if is_tensor else _RowInt(None, 0, value))
            else:
                setattr(params, name, value.data_ptr() if isinstance(value, Tensor) else value)
        element = 2 if of_probs else int(values.dtype == torch.bfloat16)
        self._library.device_sample(ctypes.byref(params), element, ctas, unfiltered, run_seed)

    def sample(
        self, values: Tensor, *, token_mask: Tensor | None = None, filter_order: str = "top_k_first", logprobs_of: str = "logits", **given: Any
    ) -> Samples:
        """As `sample`, or `sample_from_probs` with of_probs=True."""
        rows = given.pop("rows", None)
        if rows is not None:
            given |= {"source_rows": _IndexArray(rows.data_ptr(), rows.dtype == torch.int64), "num_source_rows": len(values), "batch": len(rows)}
        batch, count = len(values) if rows is None else len(rows), given.pop("num_top_logprobs", 0)
        samples = Samples(
            torch.full((batch,), -1, dtype=torch.int32),
            torch.full((batch,), False),
            torch.zeros(batch) if given.pop("return_logprobs", False) else None,
            torch.full((batch, count), -1, dtype=torch.int32) if count else None,
            torch.zeros(batch, count) if count else None,
        )
        outputs = {
            "token_ids": samples.token_ids,
            "valid": samples.valid,
            "logprobs": samples.logprobs,
            "top_token_ids": samples.top_token_ids,
            "top_logprobs": samples.top_logprobs,
        }
        if token_mask is not None:
            given |= {"token_mask": token_mask, "mask_stride": token_mask.stride(0)}
        given |= {"joint": filter_order == "joint", "tempered_logprobs": logprobs_of == "tempered", "num_top_logprobs": count}
        self.launch(values, **outputs, **given)
        return samples

    def write_rows(self, values: Tensor, task: int, **given: Any) -> Tensor:
        out = torch.full(values.shape, torch.nan)
        self.launch(values, task=task, written=out, written_stride=out.stride(0), **given)
        return out

    def speculate(self, draft_probs: Tensor, draft_token_ids: Tensor, target_probs: Tensor, **given: Any) -> SpeculativeSamples:
        batch, rows = target_probs.shape[:2]
        tokens, accepted = torch.full((batch, rows), -7, dtype=torch.int32), torch.full((batch,), -7, dtype=torch.int32)
        samples = SpeculativeSamples(tokens, accepted, torch.full((batch,), False))
        drafts = {"draft_probs": draft_probs, "draft_token_ids": draft_token_ids, "draft_ids_are_int64": True, "num_draft_tokens": rows - 1}
        outputs = {"token_ids": tokens, "num_accepted": accepted, "valid": samples.valid}
        self.launch(target_probs, of_probs=True, task=self.SPECULATE, **drafts, **outputs, **given)
        return samples
