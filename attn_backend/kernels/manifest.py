"""Every kernel that is built ahead of time: one table, from which the build, the lookup, the wheel, `attn-backend doctor` and the tests work.

A kernel's source is generated here: a wrapper that instantiates a template of csrc/ for one element type, head shape and variant.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from string import Template

SM90, SM80 = "sm_90a", "sm_80"
ARCHS = (SM90, SM80)
CUDA_ELEMENTS = {"bf16": "BFloat16", "f16": "Float16"}
CUDA_HEAD_DIMS = (64, 128, 256)
VARIANTS = {"standard": "StandardVariant"}


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


def attention_name(design: str, element: str, head_dim: int, variant: str = "standard") -> str:
    """design: of Design.cubins. element: of Q, O and the cache."""
    return f"attention_{design}_{element}_d{head_dim}_{variant}"


def merge_name(element: str) -> str:
    return f"merge_{element}"


def sampling_name(source: str) -> str:
    """source: what is drawn from: "f32", "f16" or "bf16" logits, "probs", or "speculative" drafts."""
    return f"sampling_{source}"


@cache
def kernels(arch: str) -> dict[str, Kernel]:
    """The kernels of an arch, by name."""
    return {kernel.name: kernel for kernel in _ALL if arch in kernel.archs}


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
  attn::merge<attn::$element>(params);
}

extern "C" __device__ attn::KernelCode merge_kernel_code{&attn::unknown_code, 0};
""")

# One kernel of a sampling cubin; ctas: that share a multiprocessor.
_SAMPLING = Template("""
extern "C" __global__ __launch_bounds__(attn::kSamplingThreads, $ctas) void ${name}_kernel(const __grid_constant__ attn::SamplingParams params) {
  attn::$call(params);
}
""")


def _attention_kernels() -> list[Kernel]:
    made = []
    for element, element_type in CUDA_ELEMENTS.items():
        for head_dim in CUDA_HEAD_DIMS:
            for variant, variant_type in VARIANTS.items():
                element_types = f"attn::{element_type}, attn::{element_type}"
                traits = f"attn::Traits<{element_types}, attn::HeadShape<{head_dim}>, attn::{variant_type}>"
                made.append(Kernel(attention_name("sm80", element, head_dim, variant), ARCHS, _SM80_ATTENTION.substitute(traits=traits)))
                for design, copier in (("sm90", "BoxCopier"), ("sm90_gather", "RowCopier")):
                    made.append(Kernel(attention_name(design, element, head_dim, variant), (SM90,), _SM90_ATTENTION.substitute(traits=traits, copier=copier)))
        made.append(Kernel(merge_name(element), ARCHS, _MERGE.substitute(element=element_type)))
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
    *_attention_kernels(),
    *_sampling_kernels(),
)
