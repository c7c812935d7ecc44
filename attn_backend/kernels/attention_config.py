"""What an Attention may be: checks of its arguments, and what the host library is told of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from numbers import Real
from typing import TYPE_CHECKING, NoReturn

import torch
from torch import Tensor

from ..metadata import BSRView
from ..metadata.checks import check_page_ids
from ..metadata.composition import MAX_LEVELS
from ..metadata.kv_cache import SCALED_DTYPES, KVCache
from ..metadata.structure import MAX_INT32, check_int, check_types, dtype_name, explain_failure, refuse
from . import manifest
from .head_dims import (
    CPU_HEAD_DIMS_TEXT,
    CUDA_HEAD_DIMS_TEXT,
    FLOAT8_Q_TEXT,
    LATENT_HEAD_DIMS_TEXT,
    MLA_HEAD_DIMS,
    HeadDims,
)
from .kernel_files import arch_on, kernel_file
from .schedule import describe_errors
from .selection import SelectedTokens
from .structs import pack, values_of

if TYPE_CHECKING:
    from ..variants import Variant
    from .attention_variant import AttentionVariant

# The manifest's tables by dtypes: parts of cubins' names; KV: of caches whose elements differ from Q's.
DTYPE_NAMES = {getattr(torch, name): element for name, element in manifest.ELEMENT_NAMES.items()}
KV_DTYPE_NAMES = {getattr(torch, name): element for name, element in manifest.KV_ELEMENT_NAMES.items()}
FLOAT_NAMES = {torch.float32: "f32"} | DTYPE_NAMES  # of tensors that are not heads: states, logits
# The names of DataType (csrc/common/data_type.h).
DTYPES = {torch.float32: "kFloat32"} | {
    dtype: f"k{manifest.CUDA_ELEMENTS[element]}" for dtype, element in DTYPE_NAMES.items()
}
KV_DTYPES = {dtype: f"k{manifest.CUDA_KV_ELEMENTS[element]}" for dtype, element in KV_DTYPE_NAMES.items()}
FLOAT8_Q_DTYPES = SCALED_DTYPES  # that Q may have, over a cache of the same
MAX_CUDA_INVARIANT_BATCH = 1024  # requests of a batch invariant plan, each of which may become 32 row groups
MAX_CTAS = 4096
MAX_CUDA_BATCH = 8192  # the device planner keeps one int32 a request in shared memory
CASCADE_MODES: dict[bool | str, str] = {
    False: "kCascadeOff",
    True: "kCascadeByCost",
    "always": "kCascadeAlways",
}
_MAX_CPU_BATCH = 2**20
_MAX_FLOAT = torch.finfo(torch.float32).max


@dataclass(frozen=True)
class AttentionConfig:
    """The checked arguments of an Attention, by their names."""

    num_qo_heads: int
    num_kv_heads: int
    head_dim: int
    head_dim_v: int
    dtype: torch.dtype
    q_dtype: torch.dtype
    kv_dtype: torch.dtype
    device: torch.device
    max_rows: int
    max_batch: int
    max_levels: int
    num_ctas: int | None
    cascade: bool | str
    batch_invariant: bool
    kernel: str | None
    variant: Variant | None
    sinks: bool
    float8_out: bool

    @property
    def dims(self) -> HeadDims:
        return HeadDims(self.head_dim, self.head_dim_v)

    @property
    def design(self) -> manifest.Design | None:
        """The design that schedules are made for; None: the CPU's."""
        return choose_design(self.kernel, self.device, self.dims, self.variant)

    def pack(self, attention_variant: AttentionVariant | None) -> bytes:
        """AttentionConfig of csrc/. attention_variant: made of `variant`."""
        data_types = values_of("DataType")
        variant = None if attention_variant is None else attention_variant.variant
        design = self.design
        # Under such a variant no token is the same for several requests.
        cascade = False if variant is not None and variant.tells_requests_apart else self.cascade
        return pack(
            "AttentionConfig",
            num_qo_heads=self.num_qo_heads,
            num_kv_heads=self.num_kv_heads,
            head_dim=self.head_dim,
            head_dim_v=self.head_dim_v,
            dtype=data_types[DTYPES[self.dtype]],
            q_dtype=data_types[(DTYPES | KV_DTYPES)[self.q_dtype]],
            kv_dtype=data_types[(DTYPES | KV_DTYPES)[self.kv_dtype]],
            max_rows=self.max_rows,
            max_groups=self.max_batch,
            max_levels=self.max_levels,
            num_ctas=self.num_ctas or 0,
            cascade=values_of("CascadeMode")[CASCADE_MODES[cascade]],
            design=values_of("KernelDesign")[design.name if design else "cpu"],
            device=self.device.index or 0,
            batch_invariant=self.batch_invariant,
            on_cuda=self.device.type == "cuda",
            has_variant=variant is not None,
            uses_softmax=variant is None or variant.uses_softmax,
            has_mask=variant is not None and variant.has_mask,
            skips_kv_tiles=variant is not None and variant.skips_kv_tiles,
            has_sinks=self.sinks,
            float8_out=self.float8_out,
        )

    def kernel_files(self, variant: AttentionVariant | None) -> dict[str, str]:
        """Cubins of plan, merge and attention, by the names that csrc/ has for them; on a CPU the library of
        a variant.
        """
        files = {} if variant is None else variant.files()
        design = self.design
        if design is None or self.device.type == "cpu":
            return files
        element = DTYPE_NAMES[self.dtype]
        names = {"plan": "plan"}
        shape = manifest.KernelShape(
            element, self.dims, kv_element_of(self.kv_dtype, self.dtype), self.q_dtype != self.dtype
        )
        for prefix, out_element in manifest.out_elements(element, self.float8_out).items():
            names[f"{prefix}merge"] = manifest.merge_name(out_element)
            if variant is None:
                which = shape._replace(float8_out=prefix != ""), "sinks" if self.sinks else "standard"
                names |= {
                    prefix + kernel: manifest.attention_name(stem, *which)
                    for kernel, stem in design.cubins_for(shape).items()
                }
        return {
            kernel: kernel_file(name, self.device) for kernel, name in names.items() if kernel not in files
        } | files


def kv_element_of(kv_dtype: torch.dtype | None, dtype: torch.dtype) -> str | None:
    """manifest.kv_element_of()."""
    return manifest.kv_element_of(None if kv_dtype is None else dtype_name(kv_dtype), dtype_name(dtype))


def check_heads(
    num_qo_heads: int,
    num_kv_heads: int,
    head_dim: int,
    head_dim_v: int | None,
    dtype: torch.dtype,
    device: torch.device,
) -> tuple[int, int, HeadDims]:
    """Returns num_qo_heads, num_kv_heads, and head_dim with head_dim_v."""
    max_heads = values_of("Limit")["kMaxHeads"]
    num_kv_heads = check_int("num_kv_heads", num_kv_heads, 1, max_heads)
    num_qo_heads = check_int("num_qo_heads", num_qo_heads, 1, max_heads)
    if num_qo_heads % num_kv_heads:
        refuse("num_qo_heads", num_qo_heads, f"a multiple of num_kv_heads = {num_kv_heads}")
    dims = HeadDims(
        check_int("head_dim", head_dim, 1),
        check_int("head_dim_v", head_dim if head_dim_v is None else head_dim_v, 1),
    )
    check_types(torch.dtype, "a torch.dtype", dtype=dtype)
    if device.type == "cuda":
        if not dims.runs_on_cuda:
            is_k = head_dim_v is None or not HeadDims.of(dims.qk).runs_on_cuda
            refuse(
                "head_dim" if is_k else "head_dim_v",
                dims.qk if is_k else dims.v,
                f"{CUDA_HEAD_DIMS_TEXT} on CUDA",
            )
        if dtype not in DTYPE_NAMES:
            refuse("dtype", dtype, "torch.bfloat16 or torch.float16 on CUDA")
    else:
        for name, dim in {"head_dim": dims.qk, "head_dim_v": dims.v}.items():
            if not HeadDims.of(dim).runs_on_cpu:
                refuse(name, dim, f"{CPU_HEAD_DIMS_TEXT} on a CPU")
        if dtype not in DTYPES:
            refuse("dtype", dtype, "torch.bfloat16, torch.float16 or torch.float32 on a CPU")
    return num_qo_heads, num_kv_heads, dims


def check_kv_dtype(kv_dtype: torch.dtype | None, dtype: torch.dtype, dims: HeadDims) -> torch.dtype:
    """The cache's dtype."""
    if kv_dtype is None:
        return dtype
    check_types(torch.dtype, "a torch.dtype or None", kv_dtype=kv_dtype)
    if kv_dtype != dtype and kv_dtype not in KV_DTYPES and not {dtype, kv_dtype} <= DTYPE_NAMES.keys():
        others = [
            *map(str, KV_DTYPES),
            *(str(other) for other in DTYPE_NAMES if dtype in DTYPE_NAMES and other != dtype),
        ]
        refuse("kv_dtype", kv_dtype, f"None, dtype = {dtype}, {', '.join(others[:-1])} or {others[-1]}")
    if kv_dtype == torch.uint8 and (dims != MLA_HEAD_DIMS or dtype != torch.bfloat16):
        refuse("kv_dtype", kv_dtype, f"{LATENT_HEAD_DIMS_TEXT} and dtype = torch.bfloat16")
    return kv_dtype


def check_q_dtype(
    q_dtype: torch.dtype | None,
    dtype: torch.dtype,
    kv_dtype: torch.dtype,
    dims: HeadDims,
    design: manifest.Design | None,
) -> torch.dtype:
    """Q's dtype. kv_dtype: of check_kv_dtype(). design: of choose_design()."""
    if q_dtype is None:
        return dtype
    check_types(torch.dtype, "a torch.dtype or None", q_dtype=q_dtype)
    if q_dtype == dtype:
        return dtype
    if q_dtype not in FLOAT8_Q_DTYPES or q_dtype != kv_dtype:
        refuse(
            "q_dtype",
            q_dtype,
            f"None, dtype = {dtype}, or kv_dtype if that is {' or '.join(map(str, FLOAT8_Q_DTYPES))}",
        )
    if design is not None and not dims.runs_over(KV_DTYPE_NAMES[q_dtype], float8_q=True):
        refuse("q_dtype", q_dtype, FLOAT8_Q_TEXT)
    return q_dtype


def check_room(
    max_rows: int, max_batch: int, max_levels: int, group_size: int, device: torch.device
) -> tuple[int, int, int]:
    """group_size: query heads of one KV head. Returns max_rows, max_batch, max_levels."""
    on_cuda = device.type == "cuda"
    max_rows = check_int("max_rows", max_rows, 1)
    if max_rows * group_size > MAX_INT32:
        refuse(
            "max_rows", max_rows, f"below 2^31 when multiplied by the {group_size} query heads of one KV head"
        )
    max_batch = check_int("max_batch", max_batch, 1, MAX_CUDA_BATCH if on_cuda else _MAX_CPU_BATCH)
    max_levels = check_int("max_levels", max_levels, 1, MAX_LEVELS)
    if max_rows * max_levels > MAX_INT32:
        refuse("max_rows * max_levels", max_rows * max_levels, "below 2^31")
    if on_cuda and max_batch * max_levels > MAX_CUDA_BATCH:
        refuse("max_batch * max_levels", max_batch * max_levels, f"at most {MAX_CUDA_BATCH} on CUDA")
    return max_rows, max_batch, max_levels


def check_modes(
    cascade: bool | str, batch_invariant: bool, max_batch: int, max_levels: int, device: torch.device
) -> None:
    if not isinstance(cascade, bool) and not (isinstance(cascade, str) and cascade == "always"):
        refuse("cascade", cascade, "True, False or 'always'")
    if not isinstance(batch_invariant, bool):
        refuse("batch_invariant", batch_invariant, "True or False")
    if batch_invariant and max_levels != 1:
        refuse("max_levels", max_levels, "1 with batch_invariant=True")
    if batch_invariant and device.type == "cuda" and max_batch > MAX_CUDA_INVARIANT_BATCH:
        refuse(
            "max_batch", max_batch, f"at most {MAX_CUDA_INVARIANT_BATCH} on CUDA with batch_invariant=True"
        )


def choose_design(
    kernel: str | None, device: torch.device, dims: HeadDims, variant: Variant | None = None
) -> manifest.Design | None:
    """The kernel design that schedules are made for; None: the CPU's."""
    if kernel is not None and (not isinstance(kernel, str) or kernel not in manifest.DESIGNS):
        refuse("kernel", kernel, f"{', '.join(map(repr, manifest.DESIGNS))} or None")
    transforms = variant is not None and _checked(variant).has_transforms
    if device.type == "cpu" and kernel is None:
        return None
    arch = arch_on(device) if device.type == "cuda" else None
    designs = manifest.designs_for(dims, transforms, arch)
    if kernel is not None and kernel not in designs:
        why = f"this GPU runs kernels of {arch}"
        if not manifest.DESIGNS[kernel].serves(dims, transforms):
            why = (
                f"it has no kernels for head_dim = {dims.qk}, head_dim_v = "
                f"{dims.v}{' and variants that transform Q, K or V' if transforms else ''}"
            )
        refuse("kernel", kernel, f"{', '.join(map(repr, designs))} or None: {why}")
    return next(iter(designs.values())) if kernel is None else designs[kernel]


def _checked(variant: Variant) -> Variant:
    from ..variants import Variant  # imported already if the argument is one

    check_types(Variant, "a Variant or None", variant=variant)
    return variant


def explain_failed_run(
    q: Tensor,
    q_rope: Tensor | None,
    kv: KVCache,
    out: Tensor | None,
    lse: Tensor | None,
    sinks: Tensor | None,
    sm_scale: float,
    logits_soft_cap: float,
    after_append: bool,
    selected: SelectedTokens | None,
) -> None:
    """Refuses an argument of a run that has failed, if one explains it.

    Called only then, and while torch.compile traces a run: each call would pay for it.
    """
    check_types(KVCache, "a KVCache", kv=kv)
    explain_failure((("q", q), ("kv.k", kv.k), ("kv.v", kv.v)))
    optional = (("q_rope", q_rope), ("out", out), ("lse", lse), ("sinks", sinks))
    explain_failure((name, tensor) for name, tensor in optional if tensor is not None)
    if selected is not None:
        check_types(SelectedTokens, "SelectedTokens, or None", selected=selected)
        selected.explain_failure()
    numbers = {"sm_scale": sm_scale, "logits_soft_cap": logits_soft_cap}
    check_types(Real, "a number", **numbers)
    for name, number in numbers.items():
        if abs(number) > _MAX_FLOAT:
            refuse(name, number, "a number that a float32 holds")
    check_types(int, "True or False", after_append=after_append)


def refuse_run(errors: int, levels: Sequence[BSRView], num_pages: int) -> NoReturn:
    """Raises ValueError: what a run on a CPU has found wrong in the planned tensors."""
    for view in levels:
        check_page_ids(view.with_slots_counted(), num_pages)
    raise ValueError(describe_errors(errors))
