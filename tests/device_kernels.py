"""Device kernels on a CPU (tests/csrc/device_kernels.cpp), in the place of the CPU's own: the schedule is what `plan` made."""

from __future__ import annotations

import ctypes
import subprocess
from pathlib import Path
from typing import Any

import torch
from host_planner import COMPILER, ROOT
from torch import Tensor

from attn_backend import Attention, BSRView, Composition, KVCache

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


def sample(
    library: ctypes.CDLL, logits: Tensor, temperature: Tensor, seed: Tensor, position: Tensor, token_mask: Tensor | None, workspace: Tensor, ctas: int
) -> tuple[Tensor, Tensor]:
    """Tokens (int64) and flags by the kernel for rows without filters, with so many CTAs a row. workspace: as `sample` has it; anything."""
    tokens, valid = torch.full((len(logits),), -1), torch.full((len(logits),), 7, dtype=torch.uint8)
    tensors = (logits, token_mask, temperature, seed, position, workspace, tokens, valid)
    pointers = (ctypes.c_void_p * 8)(*(None if t is None else t.data_ptr() for t in tensors))
    mask_stride = 0 if token_mask is None else token_mask.stride(0)
    sizes = (ctypes.c_int64 * 6)(*logits.shape, logits.stride(0), mask_stride, ctas, logits.dtype == torch.bfloat16)
    library.device_sample(pointers, sizes, ctas)
    return tokens, valid
