"""Every kernel that is built ahead of time: one table, from which the build, the lookup, the wheel, `attn-backend doctor` and the tests work.

A kernel's source is generated here: a wrapper that instantiates a template of csrc/ for one element type, head shape and variant.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from string import Template
from typing import Protocol

SM90, SM80 = "sm_90a", "sm_80"
ARCHS = (SM90, SM80)
CUDA_ELEMENTS = {"bf16": "BFloat16", "f16": "Float16"}
ELEMENT_NAMES = {"bfloat16": "bf16", "float16": "f16"}  # by torch's names
CUDA_KV_ELEMENTS = {"e4m3": "Float8E4M3", "e5m2": "Float8E5M2"}  # of caches whose elements are not those of Q
KV_ELEMENT_NAMES = {"float8_e4m3fn": "e4m3", "float8_e5m2": "e5m2"}  # by torch's names
SHIPPED_HEAD_DIMS = (64, 128, 256)
CUDA_HEAD_DIMS = tuple(range(8, 257, 8))  # kernels of the others are compiled when they are first needed, or ahead
VARIANTS = {"standard": "StandardVariant", "sinks": "WithSinks<attn::StandardVariant>"}
LATE_KERNELS = ("attention_rows",)  # those of a design that a variant has only if a cache needs them
USER_VARIANT = "UserVariant"  # the struct that the source of a variant defines


@dataclass(frozen=True)
class Design:
    """A design of the attention kernel: a folder of csrc/attention/ with a design.h.

    Attributes:
        name: of the folder.
        archs: of the GPUs that it is for.
        cubins: what design.h calls its kernels, and what their cubins' names say (attention_name()).
    """

    name: str
    archs: tuple[str, ...]
    cubins: dict[str, str]


# By the names that Attention(kernel=...) has for them; the first that a GPU can run is its default. sm90_gather: for caches that TMA cannot describe.
DESIGNS = {
    "hopper": Design("sm90", (SM90,), {"attention": "sm90", "attention_rows": "sm90_gather"}),
    "generic": Design("sm80", ARCHS, {"attention": "sm80"}),
}


@dataclass(frozen=True)
class Kernel:
    """A cubin: `source` compiled for each of `archs`. Includes in `source` are relative to csrc/."""

    name: str
    archs: tuple[str, ...]
    source: str


def attention_name(design: str, element: str, head_dim: int, variant: str = "standard", kv_element: str | None = None) -> str:
    """design: of Design.cubins. element: of Q and O. kv_element: of a cache of another type, one of CUDA_KV_ELEMENTS; None: it is element."""
    elements = element if kv_element is None else f"{element}_{kv_element}"
    return f"attention_{design}_{elements}_d{head_dim}_{variant}"


def merge_name(element: str, variant: str = "") -> str:
    """variant: that transforms the output; else one kernel serves all."""
    return f"merge_{element}_{variant}".rstrip("_")


def append_qkv_name(element: str, quantises: bool = False) -> str:
    """quantises: to a float8 cache."""
    return f"append_qkv_{element}_float8" if quantises else f"append_qkv_{element}"


def sampling_name(source: str) -> str:
    """source: what is drawn from: "f32", "f16" or "bf16" logits, "probs", or "speculative" drafts."""
    return f"sampling_{source}"


@cache
def kernels(arch: str) -> dict[str, Kernel]:
    """The kernels of an arch, by name."""
    return {kernel.name: kernel for kernel in _ALL if arch in kernel.archs}


class VariantSource(Protocol):
    """What kernels are made of (attn_backend/variants/variant.py): C++ that defines attn::UserVariant."""

    @property
    def name(self) -> str: ...
    @property
    def source(self) -> str: ...
    @property
    def user_sources(self) -> Mapping[str, str]: ...
    @property
    def has_mask(self) -> bool: ...
    @property
    def has_output(self) -> bool: ...


def variant_text(variant: VariantSource) -> str:
    """The source of a variant as it stands in front of a kernel's: what a compiler says of its lines names it, and not a file of ours."""
    return f'#line 1 "{variant_place(variant.name)}"\n{variant.source.rstrip()}\n#line 1 "attn_backend"\n'


def variant_place(name: str) -> str:
    """What the compiler takes for the file of a variant's generated source."""
    return f"<source of variant {name}>"


def variant_kernels(
    arch: str, design: Design, element: str, head_dim: int, variant: VariantSource, sinks: bool = False, kv_element: str | None = None
) -> dict[str, Kernel]:
    """A variant's kernels for a design, by the names that csrc/ has for them. sinks: whether runs may be given some."""
    text = variant_text(variant)
    variant_type = f"WithSinks<attn::{USER_VARIANT}>" if sinks else USER_VARIANT
    name = f"{variant.name}_sinks" if sinks else variant.name
    made = {
        kernel: Kernel(
            attention_name(stem, element, head_dim, name, kv_element), (arch,), text + attention_source(stem, element, head_dim, variant_type, kv_element)
        )
        for kernel, stem in design.cubins.items()
    }
    if variant.has_output:
        made["merge"] = Kernel(merge_name(element, variant.name), (arch,), text + merge_source(element, USER_VARIANT))
    if variant.has_mask:
        made["row_ranges"] = Kernel(f"row_ranges_{variant.name}", (arch,), text + _ROW_RANGES)
    return made


def attention_source(design: str, element: str, head_dim: int, variant_type: str, kv_element: str | None = None) -> str:
    """design: of Design.cubins. kv_element: as in attention_name()."""
    kv_type = CUDA_ELEMENTS[element] if kv_element is None else CUDA_KV_ELEMENTS[kv_element]
    variant = f"attn::{variant_type}" if kv_element is None else f"attn::WithScales<attn::{variant_type}>"
    traits = f"attn::Traits<attn::{CUDA_ELEMENTS[element]}, attn::{kv_type}, attn::HeadShape<{head_dim}>, {variant}>"
    template, copier = {"sm80": (_SM80_ATTENTION, ""), "sm90": (_SM90_ATTENTION, "BoxCopier"), "sm90_gather": (_SM90_ATTENTION, "RowCopier")}[design]
    return template.substitute(traits=traits, copier=copier)


def merge_source(element: str, variant_type: str) -> str:
    return _MERGE.substitute(element=CUDA_ELEMENTS[element], variant=variant_type)


_SM80_ATTENTION = Template("""\
#include "attention/sm80/attention.cuh"

extern "C" __global__ __launch_bounds__(attn::sm80::kThreads, attn::sm80::kCtasPerMultiprocessor)
void attention_kernel(const __grid_constant__ attn::AttentionParams params) {
  attn::sm80::attention<$traits>(params);
}
""")

_SM90_ATTENTION = Template("""\
#include "attention/sm90/attention.cuh"
#include "common/kernel_code.cuh"

extern "C" __global__ __launch_bounds__(attn::sm90::kThreads, 1) void attention_kernel(const __grid_constant__ attn::HopperParams params) {
  attn::sm90::attention<$traits, attn::sm90::$copier>(params);
}

extern "C" __device__ attn::KernelCode attention_kernel_code{&attn::unknown_code, 0};
""")

_MERGE = Template("""\
#include "attention/merge/merge.cuh"
#include "common/kernel_code.cuh"

extern "C" __global__ __launch_bounds__(attn::kMergeThreads, 4) void merge_kernel(const __grid_constant__ attn::AttentionParams params) {
  attn::merge<attn::$element, attn::$variant>(params);
}

extern "C" __device__ attn::KernelCode merge_kernel_code{&attn::unknown_code, 0};
""")

_ROW_RANGES = f"""\
#include "attention/row_ranges.cuh"

extern "C" __global__ __launch_bounds__(attn::kRowRangeThreads) void row_ranges_kernel(const __grid_constant__ attn::RowRangeParams params) {{
  attn::find_row_ranges<attn::{USER_VARIANT}>(params);
}}
"""

_APPEND_QKV = Template("""\
#include "cache/append_qkv.cuh"

extern "C" __global__ __launch_bounds__(attn::kAppendQkvThreads) void append_qkv_kernel(const __grid_constant__ attn::QkvParams params) {
  attn::append_qkv<attn::$element$quantises>(params);
}
""")

# One kernel of a sampling cubin; ctas: that share a multiprocessor.
_SAMPLING = Template("""
extern "C" __global__ __launch_bounds__(attn::kSamplingThreads, $ctas) void ${name}_kernel(const __grid_constant__ attn::SamplingParams params) {
  attn::$call(params);
}
""")


def attention_kernels(element: str, head_dim: int, kv_element: str | None = None) -> list[Kernel]:
    """The standard kernels for heads of head_dim columns, of CUDA_HEAD_DIMS. kv_element: as in attention_name()."""
    made = []
    for variant, variant_type in VARIANTS.items():
        for design, archs in (("sm80", ARCHS), ("sm90", (SM90,)), ("sm90_gather", (SM90,))):
            name = attention_name(design, element, head_dim, variant, kv_element)
            made.append(Kernel(name, archs, attention_source(design, element, head_dim, variant_type, kv_element)))
    return made


def source_of(name: str, arch: str) -> str | None:
    """The source of a kernel, also of one that is not built ahead of time; None if there is no such kernel for this arch."""
    if name in kernels(arch):
        return kernels(arch)[name].source
    shape = re.fullmatch(rf"attention_.*_({'|'.join(CUDA_ELEMENTS)})(?:_({'|'.join(CUDA_KV_ELEMENTS)}))?_d(\d+)_.*", name)
    if shape is None or int(shape[3]) not in CUDA_HEAD_DIMS:
        return None
    return next((kernel.source for kernel in attention_kernels(shape[1], int(shape[3]), shape[2]) if kernel.name == name and arch in kernel.archs), None)


def _attention_kernels() -> list[Kernel]:
    made = []
    for element in CUDA_ELEMENTS:
        for head_dim in SHIPPED_HEAD_DIMS:
            made += attention_kernels(element, head_dim)
            if element == "bf16":
                made += [kernel for kernel in attention_kernels(element, head_dim, "e4m3") if kernel.name.endswith("_standard")]
        made.append(Kernel(merge_name(element), ARCHS, merge_source(element, VARIANTS["standard"])))
    return made


def _sampling_kernels() -> list[Kernel]:
    headers = "".join(f'#include "sampling/device/{name}.cuh"\n' for name in ("filtered", "unfiltered", "write_rows"))

    def kernel(name: str, call: str, ctas: int = 3) -> str:
        return _SAMPLING.substitute(name=name, ctas=ctas, call=call)

    made = []
    for element, element_type in {"f32": "Float32Element", "f16": "Float16Element", "bf16": "BFloat16Element"}.items():
        plain, masked = (f"LogitSource<attn::{element_type}, {is_masked}>" for is_masked in ("false", "true"))
        text = headers
        # As many as fit without spilled registers.
        text += kernel("sample_unfiltered", f"sample_unfiltered<attn::{plain}>", 4 if element == "f32" else 3)
        text += kernel("masked_sample_unfiltered", f"sample_unfiltered<attn::{masked}>")
        text += kernel("sample_filtered", f"sample_filtered<attn::{plain}>")
        text += kernel("masked_sample_filtered", f"sample_filtered<attn::{masked}>", 2)
        made.append(Kernel(sampling_name(element), ARCHS, text + kernel("write_rows", f"write_rows<attn::{plain}>")))
    probs = "".join(kernel(function, f"{function}<attn::ProbSource<false>>") for function in ("sample_filtered", "write_rows"))
    made.append(Kernel(sampling_name("probs"), ARCHS, headers + probs))
    made.append(Kernel(sampling_name("speculative"), ARCHS, '#include "sampling/device/speculative.cuh"\n' + kernel("speculate", "speculate")))
    return made


_ALL = (
    Kernel("plan", ARCHS, '#include "planner/device/plan.cu"\n'),
    Kernel("append", ARCHS, '#include "cache/append.cu"\n'),
    *(
        Kernel(append_qkv_name(element, quantises), ARCHS, _APPEND_QKV.substitute(element=name, quantises=", true" if quantises else ""))
        for element, name in CUDA_ELEMENTS.items()
        for quantises in (False, True)
    ),
    *_attention_kernels(),
    *_sampling_kernels(),
)
