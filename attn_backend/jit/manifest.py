"""The table of all kernels that are built ahead of time, and the sources of kernels that are compiled on
first use. The build, the lookup, the wheel, `attn-backend doctor` and the tests use it.

The source of a kernel is generated here from a template: the types and sizes that it is compiled for, and an
include of the `.cu` file with its entry.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from string import Template
from typing import NamedTuple, Protocol

from ..stored_formats import BY_DTYPE, BY_ELEMENT, FORMATS

SM90, SM80 = "sm_90a", "sm_80"


@dataclass(frozen=True)
class Arch:
    """A build of the kernels.

    Attributes:
        gpus: GPUs that use it, for messages.
        capability: the compute capability of GPUs that run it.
        has_ptx: all newer GPUs run it, too.
        flags: nvcc flags, in addition to the common ones.
        has_clusters: CTAs of a cluster can read each other's shared memory.
        has_siblings: there are GPUs of another compute capability with the same major version.
    """

    gpus: str
    capability: tuple[int, int]
    has_ptx: bool
    flags: tuple[str, ...]
    has_clusters: bool
    has_siblings: bool


# In order of preference: a GPU uses the first build that it can run.
BUILDS = {
    SM90: Arch(
        "Hopper",
        (9, 0),
        False,
        ("-gencode=arch=compute_90a,code=sm_90a", "-cubin"),
        has_clusters=True,
        has_siblings=False,
    ),
    SM80: Arch(
        "all other GPUs, from Ampere on",
        (8, 0),
        True,
        ("-gencode=arch=compute_80,code=[sm_80,compute_80]", "-fatbin"),
        has_clusters=False,
        has_siblings=True,
    ),
}
ARCHS = tuple(BUILDS)


def runnable_archs(capability: tuple[int, int]) -> tuple[str, ...]:
    """The archs that a GPU of this compute capability can run."""
    return tuple(
        name
        for name, arch in BUILDS.items()
        if capability == arch.capability or (arch.has_ptx and capability > arch.capability)
    )


class HeadDims(NamedTuple):
    """Columns of a head of Q and K (qk), and of a head of V and O (v)."""

    qk: int
    v: int

    @classmethod
    def of(cls, dims: int | HeadDims) -> HeadDims:
        """An int sets both."""
        return cls(dims, dims) if isinstance(dims, int) else dims

    @classmethod
    def parse(cls, text: str) -> HeadDims:
        """Parses the format of __str__.

        Raises:
            ValueError: the text has another format.
        """
        match = re.fullmatch(r"(\d+)(?:_(\d+))?", text)
        if match is None:
            raise ValueError(
                f"head_dim is {text!r}, must be a number, or two such as 192_128: columns of Q and K, and of "
                f"V"
            )
        return cls(int(match[1]), int(match[2] or match[1]))

    @property
    def runs_on_cuda(self) -> bool:
        """Whether there are CUDA kernels for these dims."""
        return all(dim % 8 == 0 and 8 <= dim <= _MAX_CUDA_HEAD_DIM for dim in self) or self.is_wide

    @property
    def runs_on_cpu(self) -> bool:
        return all(dim % 8 == 0 and 8 <= dim <= _MAX_CPU_HEAD_DIM for dim in self)

    def runs_over(self, kv_element: str | None, float8_q: bool = False) -> bool:
        """Whether there are CUDA kernels over caches of this element, from kv_element_of(). float8_q: Q has
        the cache's type.
        """
        if float8_q and (kv_element == "latent" or self.is_wide):
            return False
        if kv_element == "latent":
            return self == MLA_HEAD_DIMS
        if kv_element is None:
            return self.runs_on_cuda
        stored = BY_ELEMENT[kv_element]
        if stored.head_columns and any(dim % stored.head_columns for dim in self):
            return False
        return self.runs_on_cuda and not (self.is_wide and stored.has_token_scales)

    @property
    def may_be_rotated(self) -> bool:
        """Whether rows of K and V may be rotated."""
        return self.qk == self.v <= MAX_ROTATED_COLUMNS

    @property
    def is_wide(self) -> bool:
        """Whether several warps split the columns of the output (csrc/attention/head_shape.h)."""
        return self in WIDE_HEAD_DIMS

    def __str__(self) -> str:
        return f"{self.qk}" if self.qk == self.v else f"{self.qk}_{self.v}"


_MAX_CUDA_HEAD_DIM, _MAX_CPU_HEAD_DIM = 256, 576
MAX_ROTATED_COLUMNS = 256
MLA_HEAD_DIMS = HeadDims(576, 512)  # absorbed
WIDE_HEAD_DIMS = (HeadDims(512, 512), MLA_HEAD_DIMS)
CPU_HEAD_DIMS_TEXT = f"a multiple of 8 up to {_MAX_CPU_HEAD_DIM}"
CUDA_HEAD_DIMS_TEXT = (
    f"a multiple of 8 up to {_MAX_CUDA_HEAD_DIM}, 512, or (head_dim, head_dim_v) = (576, 512)"
)
FLOAT8_Q_TEXT = f"None, or dtype, with heads of more than {_MAX_CUDA_HEAD_DIM} columns on CUDA"
ROTATION_TEXT = f"at most {MAX_ROTATED_COLUMNS} with rotation"
TOKEN_SCALES_TEXT = (
    f"at most {_MAX_CUDA_HEAD_DIM} on CUDA over a cache with a scale for each token and head, and a multiple "
    f"of 32 over int4, of 64 over FP4"
)
LATENT_HEAD_DIMS_TEXT = (
    "another one: rows of DeepSeek V3.2's latents are for head_dim = 576, head_dim_v = 512"
)


# Elements (stored_formats.py): of Q and O, except 8-bit ones; of caches with scales, which are narrower than
# Q's, or the same under float8_q.
CUDA_ELEMENTS = tuple(stored.element for stored in FORMATS if stored.bits == 16)
SCALED_ELEMENTS = tuple(stored.element for stored in FORMATS if stored.has_scales)
STANDARD_VARIANTS = {"standard": "StandardVariant", "sinks": "WithSinks<attn::StandardVariant>"}
FLOAT8_OUT = "float8_out_"  # prefix, in csrc/, of kernels with 8-bit output
# for variants, these are compiled only when a cache needs them
LATE_KERNELS = ("attention_rows", f"{FLOAT8_OUT}attention_rows")
OUT_ELEMENT = "e4m3"  # of 8-bit outputs
ROTATED = "_rotated"  # part of names of kernels over rotated K and V
USER_VARIANT = "UserVariant"  # the struct that the source of a variant defines
# By variant. Kernels for other heads are compiled on first use, or ahead of time (attn-backend compile).
SHIPPED_HEAD_DIMS = {
    "standard": (
        *(HeadDims(*dims) for dims in ((64, 64), (96, 96), (128, 128), (192, 192), (192, 128), (256, 256))),
        *WIDE_HEAD_DIMS,
    ),
    "sinks": tuple(HeadDims(dim, dim) for dim in (64, 128, 256)),
    # and all of SHIPPED_VARIANTS, in each arch's default design
    "alibi": tuple(HeadDims(dim, dim) for dim in (64, 128)),
}
SHIPPED_FLOAT8_HEAD_DIMS = tuple(HeadDims(dim, dim) for dim in (64, 128, 256))  # bf16 over e4m3 caches
# bf16 over caches with a scale for each token and head
SHIPPED_TOKEN_HEAD_DIMS = tuple(HeadDims(dim, dim) for dim in (64, 128))
SHIPPED_TOKEN_ELEMENTS = ("e4m3_tokens", "int8_tokens", "int4_tokens")
SHIPPED_ROTATED = ("int4_tokens",)  # these only over rotated caches, as engines have them
SHIPPED_PAIR_HEAD_DIMS = (HeadDims(128, 128),)  # for Hopper only
SHIPPED_PAIRS = ("int8_nvfp4",)
# bf16, by elements of caches that are dequantized on load
_SHIPPED_WIDENED = {"e4m3": WIDE_HEAD_DIMS, "latent": (MLA_HEAD_DIMS,)}
# for designs that multiply e4m3 Q and K directly
MULTIPLIED_FLOAT8_HEAD_DIMS = tuple(HeadDims(dim, dim) for dim in (64, 128))
# with 8-bit outputs, for bf16 over bf16 and e4m3 caches
SHIPPED_FLOAT8_OUT_HEAD_DIMS = (HeadDims(128, 128),)


class KernelShape(NamedTuple):
    """The types and sizes that an attention kernel is compiled for, besides a design and a variant.

    Attributes:
        element: of O, and of Q except under float8_q.
        kv_element: of a cache with another type, from kv_element_of(); None: it is element.
        float8_q: whether Q also has the cache's type.
        float8_out: whether O is 8-bit.
        rotation: whether K and V are rotated.
    """

    element: str
    dims: HeadDims
    kv_element: str | None = None
    float8_q: bool = False
    float8_out: bool = False
    rotation: bool = False

    def __str__(self) -> str:
        """The form used in the names of cubins."""
        of_cache = "" if self.kv_element is None else f"_{self.kv_element}{'_q' if self.float8_q else ''}"
        of_out = f"_to_{OUT_ELEMENT}" if self.float8_out else ""
        return f"{self.element}{of_cache}{of_out}{ROTATED if self.rotation else ''}_d{self.dims}"


# Caches whose kernels ship. Q is bfloat16, or e4m3 with float8_q.
_SHIPPED_CACHES = (
    *(KernelShape("bf16", dims, "e4m3") for dims in SHIPPED_FLOAT8_HEAD_DIMS),
    *(
        KernelShape("bf16", dims, element, rotation=element in SHIPPED_ROTATED)
        for element in SHIPPED_TOKEN_ELEMENTS
        for dims in SHIPPED_TOKEN_HEAD_DIMS
    ),
    *(KernelShape("bf16", dims, element) for element in SHIPPED_PAIRS for dims in SHIPPED_PAIR_HEAD_DIMS),
    *(
        KernelShape("bf16", dims, element)
        for element, widened in _SHIPPED_WIDENED.items()
        for dims in widened
    ),
    *(KernelShape("bf16", dims, "e4m3", float8_q=True) for dims in MULTIPLIED_FLOAT8_HEAD_DIMS),
    *(
        KernelShape("bf16", dims, kv_element, float8_q, float8_out=True)
        for dims in SHIPPED_FLOAT8_OUT_HEAD_DIMS
        for kv_element, float8_q in ((None, False), ("e4m3", False), ("e4m3", True))
    ),
)


@dataclass(frozen=True)
class Design:
    """A design of the attention kernel.

    Attributes:
        name: a value of Attention(kernel=...).
        folder: of csrc/attention/, with the design's design.h; also its name in KernelDesign.
        archs: of the GPUs that run it.
        cubins: maps the names of its kernels in design.h to stems. attention_name() makes the names of cubins
            from them.
        serves: whether it has kernels for heads; the bool: under a variant that transforms Q, K or V. Heads
            that it does not support go to the next design.
        multiplies_float8: multiplies e4m3 Q and K directly, for heads of MULTIPLIED_FLOAT8_HEAD_DIMS.
        reads_dequantized: over 8-bit caches, a kernel may dequantize tokens before attention
            (KernelDesign::min_dequantized_rows).
    """

    name: str
    folder: str
    archs: tuple[str, ...]
    cubins: dict[str, str]
    serves: Callable[[HeadDims, bool], bool] = lambda dims, transforms: True
    multiplies_float8: bool = False
    reads_dequantized: bool = False

    def cubins_for(self, shape: KernelShape) -> dict[str, str]:
        """The entries of `cubins` for a shape.

        If rows are dequantized on load, one kernel handles all caches.
        """
        return (
            dict([*self.cubins.items()][:1])
            if shape.dims.is_wide and shape.kv_element in SCALED_ELEMENTS
            else self.cubins
        )


# By name. By default, a GPU uses the first design that it can run and that supports the heads. The last one
# supports all heads on CUDA. sm90_gather: for caches that TMA cannot describe.
DESIGNS = {
    design.name: design
    for design in (
        Design(
            "hopper",
            "sm90",
            (SM90,),
            {"attention": "sm90", "attention_rows": "sm90_gather"},
            # its kernels for wide heads have no room
            lambda dims, transforms: not (transforms and dims.is_wide),
            multiplies_float8=True,
            reads_dequantized=True,
        ),
        Design("generic", "sm80", ARCHS, {"attention": "sm80"}),
    )
}


@dataclass(frozen=True)
class Kernel:
    """A cubin: `source` compiled for each of `archs`. Includes in `source` are relative to csrc/."""

    name: str
    archs: tuple[str, ...]
    source: str


def attention_name(stem: str, shape: KernelShape, variant: str = "standard") -> str:
    """stem: a value of Design.cubins."""
    return f"attention_{stem}_{shape}_{variant}"


def kv_element_of(kv_dtype: object, dtype: object, token_scales: bool = False) -> str | None:
    """The element of a cache whose type differs from Q and O: one of SCALED_ELEMENTS, or the other 16-bit
    type. None: the cache has dtype. token_scales: the cache has a scale for each token and head.

    Dtypes are torch's, or their names.
    """
    name = str(kv_dtype).removeprefix("torch.")
    return None if kv_dtype is None or kv_dtype == dtype else BY_DTYPE[name, token_scales].element


def merge_name(element: str, variant: str = "") -> str:
    """element: of O. variant: given if it transforms the output; otherwise one kernel works for all."""
    return f"merge_{element}_{variant}".rstrip("_")


def append_qkv_name(element: str, kv_element: str | None = None, rotation: bool = False) -> str:
    """element: of heads. kv_element: of a cache of another type, from kv_element_of(). One kernel
    writes all 8-bit caches, another one all with a scale for each token and head, except for 4 bits.
    rotation: rotates K and V.
    """
    of_cache = f"_{BY_ELEMENT[kv_element].append[0]}" if kv_element else ""
    return f"append_qkv_{element}{of_cache}{ROTATED if rotation else ''}"


def dequantize_name(element: str, kv_element: str) -> str:
    """element: of Q and O. kv_element: of an 8-bit cache."""
    return f"dequantize_{element}_{kv_element}"


def merge_states_name(element: str) -> str:
    """element: of states in tensors: "f32", "f16" or "bf16"."""
    return f"merge_states_{element}"


def sampling_name(source: str) -> str:
    """source: of the draw: "f32", "f16" or "bf16" logits, "probs", or "speculative" drafts."""
    return f"sampling_{source}"


@cache
def kernels(arch: str) -> dict[str, Kernel]:
    return {kernel.name: kernel for kernel in _all() if arch in kernel.archs}


def designs_for(dims: HeadDims, transforms: bool = False, arch: str | None = None) -> dict[str, Design]:
    """The designs that support these heads, by name. transforms: under a variant that transforms Q, K or V.
    arch: of the GPU that must run them.
    """
    return {
        name: design
        for name, design in DESIGNS.items()
        if design.serves(dims, transforms) and (arch is None or arch in design.archs)
    }


def default_design(arch: str, dims: HeadDims, transforms: bool = False) -> Design:
    return next(iter(designs_for(dims, transforms, arch).values()))


class VariantSource(Protocol):
    """The input of kernels (attn_backend/variants/variant.py): C++ that defines attn::UserVariant."""

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
    @property
    def has_transforms(self) -> bool: ...


# letter for letter the source of builtin.alibi()
_ALIBI = """\
#include "attention/variant/variant_math.h"
#include "attention/variant/variants.h"

namespace attn {

struct UserVariant : VariantBase {
  struct Params {
    ParamTensor<float, 1> slopes;
  };
  static constexpr bool kMaskReadsHead = false;

  const ParamTensor<float, 1>& slopes;

  ATTN_HD UserVariant(const Params& params, int32_t /*kv_head*/) : slopes(params.slopes) {}

  ATTN_HD float logits(float logit, const ScoreRow& row, int32_t kv_position) const {
    return logit + (slopes(row.qo_head) * (static_cast<float>(kv_position) - \
static_cast<float>(row.position)));
  }

  ATTN_HD float bias_slope(const ScoreRow& row) const {
    return slopes(row.qo_head);
  }
};

static_assert(sizeof(UserVariant::Params) == 16, "not as Python packs it");
static_assert(UserVariant::kUsesSoftmax == true,
              "kUsesSoftmax must be the literal true or false");
static_assert((VariantHooks<UserVariant>::kQuery || VariantHooks<UserVariant>::kKey || \
VariantHooks<UserVariant>::kValue) == false,
              "query(), key() and value() must not come from macros or conditional directives");

}  // namespace attn
"""


@dataclass(frozen=True)
class ShippedVariant:
    """A VariantSource without a mask and without transforms of Q, K, V and the output, because those
    would need additional kernels.
    """

    name: str
    source: str
    user_sources: Mapping[str, str] = field(default_factory=dict)
    has_mask: bool = False
    has_output: bool = False
    has_transforms: bool = False


SHIPPED_VARIANTS = (ShippedVariant("alibi", _ALIBI),)
_SHIPPED_BY_SOURCE = {variant.source: variant for variant in SHIPPED_VARIANTS}


def variant_text(variant: VariantSource) -> str:
    """The source of a variant, to be put before a kernel's. Compiler messages about its lines name the
    variant instead of a file of this project.
    """
    return f'#line 1 "{variant_place(variant.name)}"\n{variant.source.rstrip()}\n#line 1 "attn_backend"\n'


def variant_place(name: str) -> str:
    """The file name that compilers report for a variant's generated source."""
    return f"<source of variant {name}>"


def variant_kernels(
    arch: str, design: Design, shape: KernelShape, variant: VariantSource, sinks: bool = False
) -> dict[str, Kernel]:
    """A variant's kernels for a design, by their names in csrc/. With shape.float8_out, kernels with 8-bit
    outputs are included as well. sinks: whether runs may be given sinks. If a shipped variant has the same
    source, its kernels are used, under its name.
    """
    variant = _SHIPPED_BY_SOURCE.get(variant.source, variant)
    text = variant_text(variant)
    variant_type = f"WithSinks<attn::{USER_VARIANT}>" if sinks else USER_VARIANT
    name = f"{variant.name}_sinks" if sinks else variant.name
    made = {}
    for prefix, out_element in out_elements(shape.element, shape.float8_out).items():
        of_out = shape._replace(float8_out=prefix != "")
        for kernel, stem in design.cubins_for(shape).items():
            made[prefix + kernel] = Kernel(
                attention_name(stem, of_out, name),
                (arch,),
                text + attention_source(stem, of_out, variant_type),
            )
        if variant.has_output:
            made[f"{prefix}merge"] = Kernel(
                merge_name(out_element, variant.name), (arch,), text + merge_source(out_element, USER_VARIANT)
            )
    if variant.has_mask:
        made["row_ranges"] = Kernel(
            f"row_ranges_{variant.name}",
            (arch,),
            text + _ROW_RANGES.substitute(variant=USER_VARIANT),
        )
    return made


def out_elements(element: str, float8_out: bool) -> dict[str, str]:
    """Elements that outputs may have, by the prefix of their kernels' names in csrc/."""
    return {"": element} | ({FLOAT8_OUT: OUT_ELEMENT} if float8_out else {})


_SM80_ATTENTION = Template("""\
#include "attention/traits.cuh"

namespace attn {
using KernelTraits = $traits;
}  // namespace attn

#include "attention/sm80/attention.cu"
""")

_SM90_ATTENTION = Template("""\
#include "attention/sm90/attention.cuh"

namespace attn {
using KernelTraits = sm90::HopperTraits<$traits$gathers>;
template <class Traits>
using KernelCopier = feed::$copier<Traits>;
}  // namespace attn

#include "attention/sm90/attention.cu"
""")

_MERGE = Template("""\
#include "attention/variant/variants.h"
#include "common/elements.cuh"

namespace attn {
using KernelElement = $element;
using KernelVariant = $variant;
}  // namespace attn

#include "attention/merge/merge.cu"
""")

_MERGE_STATES = Template("""\
#include "attention/merge/merge_states.cuh"

namespace attn {
using KernelElement = $element;
}  // namespace attn

#include "attention/merge/merge_states.cu"
""")

_ROW_RANGES = Template("""\
namespace attn {
using KernelVariant = $variant;
}  // namespace attn

#include "attention/variant/row_ranges.cu"
""")

_APPEND_QKV = Template("""\
#include "cache/elements_in_memory.cuh"
#include "common/elements.cuh"

namespace attn {
using KernelElement = $element;
using KernelCacheElement = $cache_element;
using KernelQuantizer = $quantizer;
constexpr bool kKernelRotates = $rotates;
}  // namespace attn

#include "cache/append_$entry.cu"
""")

_DEQUANTIZE = Template("""\
#include "common/elements.cuh"

namespace attn {
using KernelElement = $element;
using KernelStored = $stored;
constexpr bool kKernelHasTokenScales = $has_scales;
}  // namespace attn

#include "attention/feed/dequantize.cu"
""")

_SAMPLING_LOGITS = Template("""\
#include "sampling/device/source.cuh"

namespace attn {
using KernelElement = $element;
}  // namespace attn

#include "sampling/device/logits.cu"
""")


def attention_source(stem: str, shape: KernelShape, variant_type: str) -> str:
    """stem: a value of Design.cubins."""
    element, dims, kv_element, float8_q, float8_out, rotation = shape
    stored = BY_ELEMENT[kv_element or element]
    # A cache of 8 or 4 bits is dequantized to Q's type; Q of another 16-bit type is converted to the cache's.
    elements = [
        element if stored.has_scales else stored.element,
        stored.element,
        stored.element if float8_q else element,
        OUT_ELEMENT if float8_out else element,
    ]
    variant = f"attn::{variant_type}"
    variant = f"attn::WithRotation<{variant}>" if rotation else variant
    if stored.has_scales:
        wrapped = "WithScaledLoads" if dims == MLA_HEAD_DIMS else "WithScales"
        wrapped = "WithTokenScales" if stored.has_token_scales else wrapped
        variant = f"attn::{wrapped}<{variant}{', true' if float8_q else ''}>"
    of_products, of_cache, of_q, of_out = (f"attn::{BY_ELEMENT[of].struct}" for of in elements)
    traits = (
        f"attn::Traits<{of_products}, {of_cache}, attn::HeadShape<{dims.qk}, {dims.v}>, {variant}, "
        f"{of_q}, {of_out}>"
    )
    template, copier = {
        "sm80": (_SM80_ATTENTION, ""),
        "sm90": (_SM90_ATTENTION, "BoxCopier"),
        "sm90_gather": (_SM90_ATTENTION, "RowCopier"),
    }[stem]
    if copier and dims.is_wide and stored.has_scales:
        copier = "DequantizingCopier"
    gathers = ", true" if copier == "RowCopier" else ""
    return template.substitute(traits=traits, copier=copier, gathers=gathers)


def merge_source(element: str, variant_type: str) -> str:
    """element: of O."""
    return _MERGE.substitute(element=BY_ELEMENT[element].struct, variant=variant_type)


def dequantize_source(element: str, kv_element: str) -> str:
    stored = BY_ELEMENT[kv_element]
    return _DEQUANTIZE.substitute(
        element=BY_ELEMENT[element].struct,
        stored=stored.struct,
        has_scales=str(stored.has_token_scales).lower(),
    )


def attention_kernels(shape: KernelShape, variants: Iterable[str] = STANDARD_VARIANTS) -> list[Kernel]:
    """The standard kernels of a shape that has CUDA kernels (runs_over())."""
    stems = {
        stem: design.archs
        for design in designs_for(shape.dims).values()
        for stem in design.cubins_for(shape).values()
    }
    return [
        Kernel(
            attention_name(stem, shape, variant),
            archs,
            attention_source(stem, shape, STANDARD_VARIANTS[variant]),
        )
        for variant in variants
        for stem, archs in stems.items()
    ]


def shape_of(name: str) -> KernelShape | None:
    element, kv_element = "|".join(CUDA_ELEMENTS), "|".join((*SCALED_ELEMENTS, *CUDA_ELEMENTS))
    elements = rf"({element})(?:_({kv_element})(_q)?)?(_to_{OUT_ELEMENT})?({ROTATED})?"
    shape = re.fullmatch(rf"attention_.*?_{elements}_d(\d+(?:_\d+)?)_.*", name)
    if shape is None or shape[1] == shape[2]:
        return None
    return KernelShape(
        shape[1],
        HeadDims.parse(shape[6]),
        shape[2],
        shape[3] is not None,
        shape[4] is not None,
        shape[5] is not None,
    )


def shipped_appends() -> list[tuple[str | None, bool]]:
    """The caches (kv_element, rotation) whose append kernels are built ahead of time: one for each kernel."""
    elements = (*SHIPPED_TOKEN_ELEMENTS, *SHIPPED_PAIRS)
    of_tokens = {BY_ELEMENT[element].append[0]: element for element in elements}
    return [(element, element in SHIPPED_ROTATED) for element in (None, "e4m3", *of_tokens.values())]


def late_append(name: str) -> tuple[str, str | None, bool] | None:
    """The arguments of append_qkv_name() that give this name, if it is an append kernel that is not built
    ahead of time; otherwise None.
    """
    if name in {append_qkv_name(element, *of) for element in CUDA_ELEMENTS for of in shipped_appends()}:
        return None
    made = (
        (element, of_cache if of_cache != element else None, rotation)
        for element in CUDA_ELEMENTS
        for of_cache in (None, *SCALED_ELEMENTS, *CUDA_ELEMENTS)
        for rotation in (False, True)
    )
    return next((arguments for arguments in made if append_qkv_name(*arguments) == name), None)


def compile_options(name: str) -> str:
    """The `attn-backend compile` options for a kernel that is not built ahead of time."""
    if (append := late_append(name)) is not None:
        return cache_options(append[1], False, False, append[2])
    shape = shape_of(name)
    if shape is None:
        return ""
    return f" --head-dim {shape.dims}{cache_options(*shape[2:])}"


def cache_options(kv_element: str | None, float8_q: bool, float8_out: bool, rotation: bool = False) -> str:
    """The `attn-backend compile` options for caches of another type, rotated caches, and 8-bit queries and
    outputs.
    """
    of_cache = (
        ""
        if kv_element is None
        else f" --kv-dtype {BY_ELEMENT[kv_element].dtype}{' --float8-q' if float8_q else ''}"
    )
    if kv_element and BY_ELEMENT[kv_element].has_token_scales and not BY_ELEMENT[kv_element].head_columns:
        of_cache += " --token-scales"
    return f"{of_cache}{' --float8-out' if float8_out else ''}{' --rotation' if rotation else ''}"


def source_of(name: str, arch: str) -> str | None:
    """The source of a kernel, which need not be built ahead of time; None if this arch has no such kernel."""
    if name in kernels(arch):
        return kernels(arch)[name].source
    if (append := late_append(name)) is not None:
        return append_qkv_kernel(*append).source
    shape = shape_of(name)
    if shape is None or not shape.dims.runs_over(shape.kv_element, shape.float8_q):
        return None
    if shape.rotation and (not shape.dims.may_be_rotated or shape.float8_q):
        return None
    return next(
        (
            kernel.source
            for kernel in attention_kernels(shape)
            if kernel.name == name and arch in kernel.archs
        ),
        None,
    )


def _attention_kernels() -> Iterator[Kernel]:
    for element in CUDA_ELEMENTS:
        for variant in STANDARD_VARIANTS:
            for dims in SHIPPED_HEAD_DIMS[variant]:
                yield from attention_kernels(KernelShape(element, dims), (variant,))
        for shipped in SHIPPED_VARIANTS:
            for arch in ARCHS:
                for dims in SHIPPED_HEAD_DIMS[shipped.name]:
                    design = default_design(arch, dims)
                    yield from variant_kernels(arch, design, KernelShape(element, dims), shipped).values()
    float8_archs = {arch for design in DESIGNS.values() if design.multiplies_float8 for arch in design.archs}
    for shape in _SHIPPED_CACHES:
        for kernel in attention_kernels(shape, ("standard",)):
            # other designs dequantize Q and K
            is_for_hopper = shape.float8_q or shape.kv_element in SHIPPED_PAIRS
            if not is_for_hopper or float8_archs.issuperset(kernel.archs):
                yield kernel
    for element in (*CUDA_ELEMENTS, OUT_ELEMENT):
        yield Kernel(merge_name(element), ARCHS, merge_source(element, STANDARD_VARIANTS["standard"]))


def append_qkv_kernel(element: str, kv_element: str | None = None, rotation: bool = False) -> Kernel:
    """The kernel of append_qkv_name(). The wheel has none for Q and a cache of different 16-bit types. For
    other caches it has a kernel that rotates rows (SHIPPED_ROTATED), or a kernel that does not.
    """
    stored, struct = BY_ELEMENT[kv_element or element], BY_ELEMENT[element].struct
    text = _APPEND_QKV.substitute(
        element=struct,
        cache_element=struct if stored.has_scales else stored.struct,
        rotates=str(rotation).lower(),
        quantizer=stored.append[1],
        entry="pair" if stored.pair else "qkv",
    )
    text += '#include "cache/append_rounded.cu"\n' if stored.has_given_scales and not rotation else ""
    return Kernel(append_qkv_name(element, kv_element, rotation), ARCHS, text)


@cache
def _all() -> tuple[Kernel, ...]:
    return (
        Kernel("plan", ARCHS, '#include "planner/device/plan.cu"\n'),
        Kernel("append", ARCHS, '#include "cache/append.cu"\n'),
        Kernel("append_latent", ARCHS, '#include "cache/append_latent.cu"\n'),
        Kernel("selected_slots", ARCHS, '#include "planner/device/selection.cu"\n'),
        *(
            append_qkv_kernel(element, kv_element, rotation)
            for element in CUDA_ELEMENTS
            for kv_element, rotation in shipped_appends()
        ),
        *(
            Kernel(dequantize_name(element, kv_element), (SM90,), dequantize_source(element, kv_element))
            for element in CUDA_ELEMENTS
            for kv_element in SCALED_ELEMENTS
            if kv_element != "latent"
        ),
        *_attention_kernels(),
        *(
            Kernel(
                merge_states_name(stored.element),
                ARCHS,
                _MERGE_STATES.substitute(element=stored.struct if stored.bits == 16 else "Float32State"),
            )
            for stored in FORMATS
            if not stored.has_scales
        ),
        *(
            Kernel(
                sampling_name(stored.element),
                ARCHS,
                _SAMPLING_LOGITS.substitute(element=f"{stored.struct}Element"),
            )
            for stored in FORMATS
            if not stored.has_scales
        ),
        *(
            Kernel(sampling_name(name), ARCHS, f'#include "sampling/device/{name}.cu"\n')
            for name in ("probs", "speculative")
        ),
    )
