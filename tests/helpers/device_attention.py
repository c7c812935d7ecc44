"""The attention kernels and merge on a CPU (tests/csrc/device_attention.cpp) instead of the CPU's own; `plan`
made the schedule.
"""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import emulation
import torch
from torch import Tensor
from workspace import config_bytes, workspace_of

from attn_backend import Attention, BlockScales, BSRView, Composition, KVCache, Variant
from attn_backend.jit import manifest
from attn_backend.jit.manifest import HeadDims
from attn_backend.kernels.attention import prefill_multiplies_float8
from attn_backend.kernels.native import data_type
from attn_backend.metadata.kv_cache import FORMATS_BY_DTYPE

KERNELS = ("generic", "hopper")
# Structs of tests/csrc/slanted_variant.h, by their names in DeviceAttention.
TEST_VARIANTS = {"slanted": "SlantedVariant", "squared": "SquaredVariant", "placed": "PlacedVariant"}

# Caches that TMA loads in different ways, or that are gathered: changes of a cases.Spec.
CACHES = {
    "pages": {"page_size": 16},
    "large pages": {"page_size": 256, "layout": "HND"},
    "small pages": {"page_size": 3},
    "tokens in runs": {"page_size": 1, "run_pages": 1000},
    "tokens": {"page_size": 1, "run_pages": 1},
    "ragged": {"page_size": 1, "table_form": "ragged", "cache_form": "ragged"},
}


class KvScale(ctypes.Structure):
    """The struct of this name in csrc/cache/kv_cache.h."""

    _fields_ = (
        ("data", ctypes.c_void_p),
        ("value", ctypes.c_float),
        *((name, ctypes.c_int32) for name in ("head_stride", "request_stride", "num_requests")),
    )

    @classmethod
    def of(cls, scale: Tensor | float | None) -> KvScale:
        if not isinstance(scale, Tensor):
            return cls(None, 1.0 if scale is None else scale, 0, 0, 1)
        head_stride = 0 if scale.numel() == 1 or scale.shape[-1] == 1 else scale.stride(-1)
        of_requests = scale.ndim == 2 and scale.numel() > 1
        return cls(
            scale.data_ptr(),
            0.0,
            head_stride,
            scale.stride(0) if of_requests else 0,
            scale.shape[0] if of_requests else 1,
        )


class AttentionScales(ctypes.Structure):
    """The struct of this name in csrc/cache/kv_cache.h."""

    _fields_ = (
        ("k", KvScale),
        ("v", KvScale),
        ("q", KvScale),
        ("element", ctypes.c_int32),
        ("q_element", ctypes.c_int32),
    )


class TokenScales(ctypes.Structure):
    """The struct of this name in csrc/cache/kv_cache.h."""

    _fields_ = (
        ("data", ctypes.c_void_p),
        *((name, ctypes.c_int64) for name in ("page_stride", "token_stride", "head_stride")),
    )

    @classmethod
    def of(cls, scales: Tensor | BlockScales) -> TokenScales:
        if isinstance(scales, BlockScales):  # in words
            return cls(scales.blocks.data_ptr(), *(stride // 4 for stride in scales.blocks.stride()[:3]))
        return cls(scales.data_ptr(), *scales.stride())


class AttentionTokenScales(ctypes.Structure):
    """The struct of this name in csrc/cache/kv_cache.h."""

    _fields_ = (
        ("k", TokenScales),
        ("v", TokenScales),
        ("k_factor", ctypes.c_float),
        ("v_factor", ctypes.c_float),
        ("padding", ctypes.c_int64),
    )


class _Scales(ctypes.Union):
    _fields_ = (("of_cache", AttentionScales), ("of_tokens", AttentionTokenScales))


class KvScales(ctypes.Structure):
    """The struct of this name in csrc/cache/kv_cache.h."""

    _fields_ = (("k", KvScale), ("v", KvScale), ("element", ctypes.c_int32), ("padding", ctypes.c_int32 * 3))


class _Passed(ctypes.Structure):
    """PassedAttention of device_attention.cpp."""

    _fields_ = (
        ("pointers", ctypes.c_void_p * 7),
        ("sinks", ctypes.c_void_p),
        ("strides", ctypes.c_int64 * 10),
        ("sizes", ctypes.c_int64 * 6),
        ("sm_scale", ctypes.c_double),
        ("dtype", ctypes.c_int64),
        ("q_dtype", ctypes.c_int64),
        ("kv_dtype", ctypes.c_int64),
        ("uses_softmax", ctypes.c_int64),
        ("variant_bytes", ctypes.c_int64),
        ("variant", ctypes.c_char_p),
        ("out_scale_data", ctypes.c_void_p),
        ("out_scale", ctypes.c_double),
        ("q_rope", ctypes.c_void_p),
        ("q_rope_strides", ctypes.c_int64 * 2),
        ("scales", _Scales),
        ("multiplies_float8", ctypes.c_int64),
        ("has_token_scales", ctypes.c_int64),
        ("dequantized", ctypes.c_void_p),
        ("dequantizes", ctypes.c_int64),
        ("launched", ctypes.c_int64),
    )


def library(
    folder: Path,
    kernel: str,
    dtype: torch.dtype,
    head_dim: HeadDims,
    variant: str | Variant,
    kv_dtype: torch.dtype | None = None,
    float8_q: bool = False,
    float8_out: bool = False,
    token_scales: bool = False,
    rotation: bool = False,
) -> ctypes.CDLL:
    """The kernels of a design for one dtype, head widths, variant and cache dtype, compiled into `folder`
    unless they exist. float8_q: Q has the dtype of the cache. float8_out: O has 8 bits. token_scales: the
    cache has a scale for each token and head. rotation: its rows are rotated.

    Args:
        variant: "standard"; "sinks", which may have some; one of TEST_VARIANTS; or any other.
    """
    design, element = manifest.DESIGNS[kernel], FORMATS_BY_DTYPE[dtype].element
    if isinstance(variant, Variant):
        text, variant_type, name = manifest.variant_text(variant), manifest.USER_VARIANT, variant.name
    elif variant in TEST_VARIANTS:
        text, variant_type, name = '#include "slanted_variant.h"\n', TEST_VARIANTS[variant], variant
    else:
        text, variant_type, name = "", manifest.STANDARD_VARIANTS[variant], variant
    kv_element = manifest.kv_element_of(kv_dtype, dtype, token_scales)
    shape = manifest.KernelShape(element, head_dim, kv_element, float8_q, float8_out, rotation)
    cubins = design.cubins_for(shape)
    for cubin, stem in cubins.items():
        names = ("attention_kernel", "attention_kernel_code", "KernelTraits", "KernelCopier")
        text += "".join(f"#define {name} {cubin}_{name}\n" for name in names)
        text += manifest.attention_source(stem, shape, variant_type)
        text += "".join(f"#undef {name}\n" for name in names)
    dequantize = "nullptr"
    if design.reads_dequantized and kv_element in manifest.SCALED_ELEMENTS and kv_element != "latent":
        text += "#undef __shared__\n#define __shared__ static\n#define KernelElement DequantizedElement\n"
        text += manifest.dequantize_source(element, kv_element)
        text += "#undef __shared__\n#define __shared__\n#undef KernelElement\n"
        dequantize = "dequantize_kernel"
    text += manifest.merge_source(manifest.OUT_ELEMENT if float8_out else element, variant_type)
    text += (
        f"constexpr std::array kKernels{{{', '.join(f'&{cubin}_attention_kernel' for cubin in cubins)}}};\n"
    )
    text += f"constexpr void (*kDequantize)(attn::DequantizeParams) = {dequantize};\n"
    name = manifest.attention_name(next(iter(cubins.values())), shape, name)
    source, options = emulation.TESTS / "device_attention.cpp", ["-Og", f"-DDESIGN=attn::{design.folder}"]
    made = emulation.build(
        folder, name, source, header=text, options=options, precompiled=source.with_suffix(".h")
    )
    made.device_attention.restype = ctypes.c_char_p
    assert made.launched_offset() == _Passed.launched.offset
    return made


class DeviceAttention:
    """`plan` and `run` of an Attention object on the CPU; runs use its `kernel`.

    Args:
        folder: for the compiled kernels.
        attention: plans; created with the same `kernel`, for a variant with it.
        seed: determines the order of threads, CTAs and copies.
        variant: as in library().

    Attributes:
        launched: the attention kernel of the last run, one of manifest.Design.cubins.
        dequantizes: whether runs dequantize the tokens of long row groups before attention, if plans place
            any.
    """

    def __init__(
        self, folder: Path, attention: Attention, kernel: str, seed: int = 0, variant: str | Variant = "sinks"
    ) -> None:
        dims = HeadDims(attention.head_dim, attention.head_dim_v)
        # For outputs of dtype and for 8-bit outputs: compiled when the first run needs them.
        of_kernels = (
            folder,
            kernel,
            attention.dtype,
            dims,
            variant,
            attention.kv_dtype,
            attention.q_dtype != attention.dtype,
        )
        of_cache = attention._config.token_scales, attention._config.rotation
        self._library = cache(lambda float8_out: library(*of_kernels, float8_out, *of_cache))
        self._attention, self._seed, self._variant = attention, seed, variant
        self._levels: tuple[BSRView, ...] = ()
        design = manifest.DESIGNS[kernel]
        self._kernels = tuple(design.cubins)
        self._multiplies_float8 = prefill_multiplies_float8(
            design, attention.q_dtype, dims, variant if isinstance(variant, Variant) else None
        )
        self.launched = ""
        self.dequantizes = True

    def __getattr__(self, name: str) -> Any:
        return getattr(self._attention, name)

    def plan(self, composition: BSRView | Composition, **options: Any) -> None:
        self._attention.plan(composition, **options)
        self._levels = tuple(composition.levels) if isinstance(composition, Composition) else (composition,)

    def run(
        self,
        q: Tensor,
        kv: KVCache,
        *,
        q_rope: Tensor | None = None,
        out: Tensor | None = None,
        lse: Tensor | None = None,
        sm_scale: float | None = None,
        logits_soft_cap: float = 0.0,
        slope: float = 0.0,
        sinks: Tensor | None = None,
        variant_args: Mapping[str, Any] | None = None,
        q_scale: Tensor | float | None = None,
        out_scale: Tensor | float | None = None,
    ) -> Tensor:
        """Like Attention.run. slope: for "slanted" and "placed".

        Raises:
            emulation.DeviceError: a kernel does something wrong.
        """
        attention = self._attention
        out = attention._new_out(q, out_scale) if out is None else out
        config = config_bytes(attention)
        memory = workspace_of(attention)
        memory.dequantized.fill_(0xFF)  # NaN
        partial_o, partial_lse = (
            torch.full_like(memory.partial_o, torch.nan),
            torch.full_like(memory.partial_lse, torch.nan),
        )
        if isinstance(self._variant, Variant):
            params = self._variant.pack({} if variant_args is None else variant_args, torch.device("cpu"))
        else:
            params = struct.pack("f", slope if self._variant in TEST_VARIANTS else logits_soft_cap)
        uses_softmax = (
            self._variant.uses_softmax if isinstance(self._variant, Variant) else self._variant != "squared"
        )
        of_dtypes = [data_type(dtype) for dtype in (attention.dtype, attention.q_dtype, attention.kv_dtype)]
        elements = (of_dtypes[2], of_dtypes[1])
        if kv.has_token_scales:
            of_tokens = (TokenScales.of(scale) for scale in (kv.k_scale, kv.v_scale))  # type: ignore[arg-type]
            factors = (getattr(scale, "factor", 1.0) for scale in (kv.k_scale, kv.v_scale))
            scales = _Scales(of_tokens=AttentionTokenScales(*of_tokens, *factors))
        else:
            of_cache = (KvScale.of(scale) for scale in (kv.k_scale, kv.v_scale, q_scale))
            scales = _Scales(of_cache=AttentionScales(*of_cache, *elements))
        passed = _Passed(
            (ctypes.c_void_p * 7)(
                *(
                    None if t is None else t.data_ptr()
                    for t in (q, kv.k, kv.v, out, lse, partial_o, partial_lse)
                )
            ),
            None if sinks is None else sinks.data_ptr(),
            (ctypes.c_int64 * 10)(*q.stride()[:2], *out.stride()[:2], *kv.k.stride()[:3], *kv.v.stride()[:3]),
            (ctypes.c_int64 * 6)(
                q.shape[0],
                kv.k.shape[0],
                attention.head_dim,
                self._levels[0].table.page_size,
                len(self._levels),
                attention.head_dim_v,
            ),
            attention.head_dim**-0.5 if sm_scale is None else sm_scale,
            *of_dtypes,
            uses_softmax,
            len(params),
            params,
            out_scale.data_ptr() if isinstance(out_scale, Tensor) else None,
            out_scale if isinstance(out_scale, float) else 0.0,
            None if q_rope is None else q_rope.data_ptr(),
            (ctypes.c_int64 * 2)(*((0, 0) if q_rope is None else q_rope.stride()[:2])),
            scales,
            self._multiplies_float8,
            kv.has_token_scales,
            memory.dequantized.data_ptr(),
            self.dequantizes,
            -1,
        )
        workspace = ctypes.c_void_p(memory.schedule.data_ptr())
        device_attention = self._library(out_scale is not None).device_attention
        emulation.check(
            device_attention(config, workspace, ctypes.byref(passed), 1 + self._seed % 4, self._seed)
        )
        self.launched = self._kernels[passed.launched]
        return out
