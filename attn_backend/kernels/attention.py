"""plan and run: attention of a composition over a paged or ragged KV cache."""

from __future__ import annotations

import ctypes
import inspect
import itertools
import json
import math
import os
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import lru_cache
from numbers import Real
from threading import Lock
from types import NoneType
from typing import Any, Literal, NamedTuple, NoReturn, SupportsIndex, overload

import torch
from torch import Tensor
from torch.compiler import is_compiling

from ..jit import manifest, progress
from ..jit.cubins import use_plain_kernels_or_raise
from ..jit.manifest import (
    CPU_HEAD_DIMS_TEXT,
    CUDA_HEAD_DIMS_TEXT,
    FLOAT8_Q_TEXT,
    LATENT_HEAD_DIMS_TEXT,
    MLA_HEAD_DIMS,
    ROTATION_TEXT,
    TOKEN_SCALES_TEXT,
    HeadDims,
)
from ..metadata import BSRView, Composition
from ..metadata.kv_cache import (
    FORMATS_BY_DTYPE,
    FOUR_BIT_COLUMNS,
    SCALED_DTYPES,
    SCALED_LATENT_DTYPE,
    TOKEN_SCALED_FORMATS,
    BlockScales,
    CacheDtype,
    CacheScale,
    KVCache,
    Scale,
    checked_scale,
    named_tensors,
    side_dtypes,
)
from ..metadata.values import check_page_ids, check_values, describe_batch
from ..metadata.views import MAX_LEVELS
from ..settings import Settings
from ..validation import (
    MAX_INT32,
    check_device,
    check_handle,
    check_int,
    check_plain,
    check_types,
    explain_failure,
    refuse,
    require,
)
from ..variants import Variant
from . import selection, torch_ops
from .native import (
    CPU_DTYPES,
    CUDA_DTYPES,
    InUseError,
    arch_on,
    by_name,
    data_type,
    in_order,
    is_captured,
    kernel_file,
    library,
    names_of,
    pack,
    unpack,
    values_of,
)
from .schedule import Schedule, ScheduleCounts, describe_errors
from .selection import SelectedTokens
from .variant import AttentionVariant, VariantArgs, window_of_level

FLOAT8_Q_DTYPES = SCALED_DTYPES  # dtypes that Q may have if the cache has the same
MAX_CUDA_INVARIANT_BATCH = 1024  # requests of a batch invariant plan, each of which may become 32 row groups
MAX_CTAS = 4096
MAX_CUDA_BATCH = 8192  # the device planner keeps one int32 per request in shared memory
CASCADE_MODES: dict[bool | str, str] = {
    False: "kCascadeOff",
    True: "kCascadeByCost",
    "always": "kCascadeAlways",
}
LOG2_E = math.log2(math.e)
MAX_DUMPS = 10  # files of one process in ATTN_BACKEND_DUMP
# Argument order of the library's run, as _run_raw() passes them; SelectedTokens' arguments follow.
_RUN_ARGUMENTS = (
    "handle",
    "q",
    "k",
    "v",
    "out",
    "lse",
    "sm_scale",
    "logits_soft_cap",
    "after_append",
    "q_rope",
    "k_scale",
    "v_scale",
    "q_scale",
    "sinks",
    "lse_to_base_2",
    "is_hnd",
    "k_rope",
    "out_scale",
    "k_factor",
    "v_factor",
)
_MAX_CPU_BATCH = 2**20
_dumps = itertools.count(1)
_MAX_FLOAT = torch.finfo(torch.float32).max


def prefill_multiplies_float8(
    design: manifest.Design | None, q_dtype: torch.dtype, dims: HeadDims, variant: Variant | None
) -> bool:
    """Whether prefill multiplies 8-bit Q, K and V as they are (kMultipliesFloat8 in csrc/)."""
    return (
        design is not None
        and design.multiplies_float8
        and q_dtype == torch.float8_e4m3fn
        and dims in manifest.MULTIPLIED_FLOAT8_HEAD_DIMS
        and (variant is None or (variant.uses_softmax and not variant.has_transforms))
    )


@dataclass(frozen=True)
class AttentionConfig:
    """The checked arguments of an Attention, by name."""

    num_qo_heads: int
    num_kv_heads: int
    head_dim: int
    head_dim_v: int
    dtype: torch.dtype
    q_dtype: torch.dtype
    kv_dtype: CacheDtype
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
    token_scales: bool = False
    rotation: bool = False

    @property
    def dims(self) -> HeadDims:
        return HeadDims(self.head_dim, self.head_dim_v)

    @property
    def design(self) -> manifest.Design | None:
        """The kernel design that schedules are made for; None: the CPU design."""
        return choose_design(self.kernel, self.device, self.dims, self.variant)

    @property
    def design_name(self) -> str:
        """'hopper', 'generic' or 'cpu'."""
        design = self.design
        return design.name if design else "cpu"

    def cascade_under(self, variant: Variant | None) -> bool | str:
        """Whether plans look for shared prefixes. A variant may transform tokens by request: then requests
        cannot share them.
        """
        return False if variant is not None and variant.tells_requests_apart else self.cascade

    def pack(self, attention_variant: AttentionVariant | None) -> bytes:
        """Packs AttentionConfig of csrc/. attention_variant: made from `variant`."""
        variant = None if attention_variant is None else attention_variant.variant
        design = self.design
        return pack(
            "AttentionConfig",
            dequantized_bytes=Settings.read().dequantized_mib << 20 if design else 0,
            num_qo_heads=self.num_qo_heads,
            num_kv_heads=self.num_kv_heads,
            head_dim=self.head_dim,
            head_dim_v=self.head_dim_v,
            dtype=data_type(self.dtype),
            q_dtype=data_type(self.q_dtype),
            kv_dtype=data_type(self.kv_dtype),
            max_rows=self.max_rows,
            max_batch=self.max_batch,
            max_levels=self.max_levels,
            num_ctas=self.num_ctas or 0,
            cascade=values_of("CascadeMode")[CASCADE_MODES[self.cascade_under(variant)]],
            design=values_of("KernelDesign")[design.folder if design else "cpu"],
            device=self.device.index or 0,
            batch_invariant=self.batch_invariant,
            on_cuda=self.device.type == "cuda",
            has_variant=variant is not None,
            uses_softmax=variant is None or variant.uses_softmax,
            has_mask=variant is not None and variant.has_mask,
            skips_kv_tiles=variant is not None and variant.skips_kv_tiles,
            has_sinks=self.sinks,
            float8_out=self.float8_out,
            multiplies_float8=prefill_multiplies_float8(design, self.q_dtype, self.dims, variant),
            token_scales=self.token_scales,
            rotation=self.rotation,
        )

    def kernel_files(self, attention_variant: AttentionVariant | None) -> dict[str, str]:
        """Cubins of plan, merge and attention, by their names in csrc/. On a CPU: the variant's library."""
        files = {} if attention_variant is None else attention_variant.files()
        design = self.design
        if design is None or self.device.type == "cpu":
            return files
        element = FORMATS_BY_DTYPE[self.dtype].element
        names = {"plan": "plan"}
        kv_element = manifest.kv_element_of(self.kv_dtype, self.dtype, self.token_scales)
        reads_dequantized = design.reads_dequantized and not self.dims.is_wide  # rows of latents are wide
        if reads_dequantized and kv_element in manifest.SCALED_ELEMENTS:
            names["dequantize"] = manifest.dequantize_name(element, kv_element)
        shape = manifest.KernelShape(
            element, self.dims, kv_element, self.q_dtype != self.dtype, rotation=self.rotation
        )
        for prefix, out_element in manifest.out_elements(element, self.float8_out).items():
            names[f"{prefix}merge"] = manifest.merge_name(out_element)
            if attention_variant is None:
                which = shape._replace(float8_out=prefix != ""), "sinks" if self.sinks else "standard"
                names |= {
                    prefix + kernel: manifest.attention_name(stem, *which)
                    for kernel, stem in design.cubins_for(shape).items()
                }
        return {
            kernel: kernel_file(name, self.device) for kernel, name in names.items() if kernel not in files
        } | files


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
    require(
        num_qo_heads % num_kv_heads == 0,
        "num_qo_heads",
        num_qo_heads,
        f"a multiple of num_kv_heads = {num_kv_heads}",
    )
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
        require(dtype in CUDA_DTYPES, "dtype", dtype, "torch.bfloat16 or torch.float16 on CUDA")
    else:
        for name, dim in {"head_dim": dims.qk, "head_dim_v": dims.v}.items():
            require(HeadDims.of(dim).runs_on_cpu, name, dim, f"{CPU_HEAD_DIMS_TEXT} on a CPU")
        require(
            dtype in CPU_DTYPES, "dtype", dtype, "torch.bfloat16, torch.float16 or torch.float32 on a CPU"
        )
    return num_qo_heads, num_kv_heads, dims


def check_kv_dtype(
    kv_dtype: CacheDtype | None, dtype: torch.dtype, dims: HeadDims, token_scales: bool = False
) -> CacheDtype:
    require(
        token_scales or kv_dtype not in (torch.int8, *FOUR_BIT_COLUMNS),
        "token_scales",
        token_scales,
        f"True with kv_dtype={kv_dtype!r}",
    )
    token_scaled = (*TOKEN_SCALED_FORMATS,)  # a tuple: kv_dtype may be anything, also without a hash
    if token_scales and kv_dtype not in token_scaled:
        *others, last = map(repr, token_scaled)
        refuse("kv_dtype", kv_dtype, f"{', '.join(others)} or {last} with token_scales=True")
    if kv_dtype is None:
        return dtype
    if token_scales:
        return kv_dtype
    check_types(
        torch.dtype, f"a torch.dtype, {', '.join(map(repr, FOUR_BIT_COLUMNS))} or None", kv_dtype=kv_dtype
    )
    assert isinstance(kv_dtype, torch.dtype)
    scaled = (*SCALED_DTYPES, SCALED_LATENT_DTYPE)
    if kv_dtype != dtype and kv_dtype not in scaled and not {dtype, kv_dtype} <= {*CUDA_DTYPES}:
        others = [
            *map(str, scaled),
            *(str(other) for other in CUDA_DTYPES if dtype in CUDA_DTYPES and other != dtype),
        ]
        refuse("kv_dtype", kv_dtype, f"None, dtype = {dtype}, {', '.join(others[:-1])} or {others[-1]}")
    if kv_dtype == torch.uint8 and (dims != MLA_HEAD_DIMS or dtype != torch.bfloat16):
        *others, last = (repr(name) for name in FOUR_BIT_COLUMNS if side_dtypes(name) == (name, name))
        names = f"{', '.join(others)} or {last}"
        refuse(
            "kv_dtype",
            kv_dtype,
            f"{LATENT_HEAD_DIMS_TEXT}, dtype = torch.bfloat16; pass {names} for bytes of two columns",
        )
    return kv_dtype


def check_q_dtype(
    q_dtype: torch.dtype | None,
    dtype: torch.dtype,
    kv_dtype: CacheDtype,
    dims: HeadDims,
    design: manifest.Design | None,
) -> torch.dtype:
    """Q's dtype. kv_dtype: from check_kv_dtype(). design: from choose_design()."""
    if q_dtype is None:
        return dtype
    check_types(torch.dtype, "a torch.dtype or None", q_dtype=q_dtype)
    if q_dtype == dtype:
        return dtype
    require(
        q_dtype in FLOAT8_Q_DTYPES and q_dtype == kv_dtype,
        "q_dtype",
        q_dtype,
        f"None, dtype = {dtype}, or kv_dtype if that is {' or '.join(map(str, FLOAT8_Q_DTYPES))}",
    )
    if design is not None and not dims.runs_over(FORMATS_BY_DTYPE[q_dtype].element, float8_q=True):
        refuse("q_dtype", q_dtype, FLOAT8_Q_TEXT)
    return q_dtype


def check_token_scales(
    q_dtype: torch.dtype,
    dtype: torch.dtype,
    kv_dtype: CacheDtype,
    dims: HeadDims,
    design: manifest.Design | None,
) -> None:
    """Refuses what kernels do not support over caches with a scale for each token and head."""
    require(q_dtype == dtype, "q_dtype", q_dtype, f"None or dtype = {dtype} with token_scales=True")
    require(design is None or not dims.is_wide, "head_dim", dims.qk, TOKEN_SCALES_TEXT)
    step = FOUR_BIT_COLUMNS.get(kv_dtype, 1)
    for name, columns in {"head_dim": dims.qk, "head_dim_v": dims.v}.items():
        require(columns % step == 0, name, columns, f"a multiple of {step} with kv_dtype={kv_dtype!r}")


def check_rotation(q_dtype: torch.dtype, dtype: torch.dtype, dims: HeadDims, variant: Variant | None) -> None:
    """Refuses what kernels do not support over a rotated cache."""
    require(dims.qk == dims.v, "head_dim_v", dims.v, f"head_dim = {dims.qk} with rotation=True")
    require(dims.may_be_rotated, "head_dim", dims.qk, ROTATION_TEXT)
    require(q_dtype == dtype, "q_dtype", q_dtype, f"None or dtype = {dtype} with rotation=True")
    if variant is not None and (variant.has_transforms or variant.has_output):
        must = "a variant that leaves Q, K, V and the output as they are, with rotation=True"
        refuse("variant", variant, must)


def check_room(
    max_rows: int, max_batch: int, max_levels: int, group_size: int, device: torch.device
) -> tuple[int, int, int]:
    """group_size: query heads of one KV head. Returns max_rows, max_batch, max_levels."""
    on_cuda = device.type == "cuda"
    max_rows = check_int("max_rows", max_rows, 1)
    require(
        max_rows * group_size <= MAX_INT32,
        "max_rows",
        max_rows,
        f"below 2^31 when multiplied by the {group_size} query heads of one KV head",
    )
    max_batch = check_int("max_batch", max_batch, 1, MAX_CUDA_BATCH if on_cuda else _MAX_CPU_BATCH)
    max_levels = check_int("max_levels", max_levels, 1, MAX_LEVELS)
    require(max_rows * max_levels <= MAX_INT32, "max_rows * max_levels", max_rows * max_levels, "below 2^31")
    if on_cuda and max_batch * max_levels > MAX_CUDA_BATCH:
        refuse("max_batch * max_levels", max_batch * max_levels, f"at most {MAX_CUDA_BATCH} on CUDA")
    return max_rows, max_batch, max_levels


def check_modes(
    cascade: bool | str, batch_invariant: bool, max_batch: int, max_levels: int, device: torch.device
) -> None:
    is_mode = isinstance(cascade, bool) or (isinstance(cascade, str) and cascade == "always")
    require(is_mode, "cascade", cascade, "True, False or 'always'")
    check_types(bool, "True or False", batch_invariant=batch_invariant)
    require(max_levels == 1 or not batch_invariant, "max_levels", max_levels, "1 with batch_invariant=True")
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
    check_types((Variant, NoneType), "a Variant or None", variant=variant)
    transforms = variant is not None and variant.has_transforms
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


def explain_failed_run(
    *,
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
    """Refuses the argument that made a run fail, if it finds one.

    Called only after a failure, and while torch.compile traces a run, to keep each call cheap.
    """
    check_types(KVCache, "a KVCache", kv=kv)
    explain_failure((("q", q), *named_tensors(kv)))
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
    """Raises ValueError with the errors that a CPU run found in the planned tensors."""
    for view in levels:
        check_page_ids(view.with_slots_counted(), num_pages)
    raise ValueError(describe_errors(errors))


class PositionTensors(NamedTuple):
    """Addresses of a view's kv_offsets, positions (of_rows) and requests, or 0; rows of the last two."""

    kv_offsets: int = 0
    of_rows: int = 0
    requests: int = 0
    num_rows: int = 0


@lru_cache(maxsize=256)
def level_options(
    index: int,
    num_levels: int,
    page_size: int,
    window_left: int,
    entry_step: int,
    causal: bool,
    finds_row_ranges: bool,
    pages_change: bool,
    has_slots: bool,
    positions: PositionTensors,
    prompts: int,
) -> bytes:
    """LevelOptions of csrc/, cached because they rarely change between steps."""
    return pack(
        "LevelOptions",
        index=index,
        num_levels=num_levels,
        page_size=page_size,
        window_left=window_left,
        kv_offsets=positions.kv_offsets,
        prompts=prompts,
        positions={
            "positions": positions.of_rows,
            "requests": positions.requests,
            "num_rows": positions.num_rows,
        },
        entry_step=entry_step,
        causal=causal,
        finds_row_ranges=finds_row_ranges,
        pages_change=pages_change,
        has_slots=has_slots,
    )


_NO_POSITIONS = PositionTensors()


def positions_of(view: BSRView) -> PositionTensors:
    if view.kv_offsets is None and view.positions is None and view.requests is None:
        return _NO_POSITIONS

    def address(name: str) -> int:
        tensor: Tensor | None = getattr(view, name)
        return 0 if tensor is None else check_plain(name, tensor).data_ptr()

    of_rows = view.requests if view.positions is None else view.positions
    return PositionTensors(
        address("kv_offsets"),
        address("positions"),
        address("requests"),
        0 if of_rows is None else of_rows.shape[0],
    )


def tensors_of(view: BSRView) -> Iterator[tuple[str, Tensor]]:
    """The tensors of a view, with the names that users gave them."""
    table = view.table
    indices = {
        "csr": "kv_indices",
        "block_table": "block_table",
        "token_slots": "req_to_token",
        "ragged": "",
    }[table.form]
    tensors = (
        view.qo_indptr,
        view.rows,
        table.indices,
        table.indptr,
        table.last_page_len,
        table.kv_lens,
        table.rows,
    )
    for name, tensor in zip(
        ("qo_indptr", "rows", indices, "kv_indptr", "kv_last_page_len", "kv_lens", "table.rows"),
        tensors,
        strict=True,
    ):
        if tensor is not None:
            yield name, tensor


def levels_of(composition: object, max_levels: int, max_rows: int) -> Sequence[BSRView]:
    """The levels of a composition, checked to have the cache's page size."""
    if not isinstance(composition, Composition):
        refuse("composition", composition, "a Composition or a BSRView")
    if len(composition.levels) > max_levels:
        refuse("len(composition.levels)", len(composition.levels), f"at most max_levels = {max_levels}")
    page_size = composition.page_size
    if all(view.table.page_size == page_size for view in composition.levels):
        return composition.levels
    return [_in_pages_of(page_size, level, view, max_rows) for level, view in enumerate(composition.levels)]


def _in_pages_of(page_size: int, level: int, view: BSRView, max_rows: int) -> BSRView:
    if view.table.page_size == page_size:
        return view
    if view.pages_change:
        refuse(
            f"levels[{level}].pages_change",
            True,
            f"False with pages of {view.table.page_size} tokens in a cache of {page_size}: plan copies the "
            f"page ids",
        )
    if view.device.type == "cpu":  # now, so that messages show the caller's values
        try:
            check_values(view, max_rows)
        except ValueError as error:
            raise ValueError(f"levels[{level}]: {error}") from None
    return replace(view, table=view.table.in_pages_of(page_size))


def level_visibility(view: BSRView, num_levels: int, variant: AttentionVariant | None) -> tuple[bool, int]:
    """causal and window_left of a level.

    Raises:
        ValueError: there are several levels, and the view lacks arguments that they need.
    """
    if variant is not None:
        return variant.visibility(view, num_levels)
    return view.causal is not False, view.window_left if num_levels == 1 else window_of_level(view)


class Attention:
    """Attention for one head configuration: call `plan()` once a step and `run()` once a layer.

    The constructor allocates the workspace once, from an exact bound. `plan()` writes all its decisions
    there, so a CUDA graph that captured `run()` works with every later plan.

    Args:
        num_qo_heads: query heads.
        num_kv_heads: KV heads; divides num_qo_heads.
        head_dim: columns of a head of Q and K: a multiple of 8, on CUDA up to 256, or 512, or 576 (MLA), on a
            CPU up to 576.
        head_dim_v: columns of a head of V and of the output, limited like head_dim; None: head_dim. On CUDA,
            head_dim 512 and 576 require head_dim_v 512.
        dtype: of Q and the output: bfloat16 or float16, or float32 on a CPU.
        q_dtype: of Q: dtype (None), or kv_dtype, if that is a float8. The Hopper kernel multiplies
            float8_e4m3fn directly, for heads of 64 and 128, under softmax, in row tiles of 32 rows or more.
            It then rounds probabilities to float8_e4m3fn as well. The mean error over many random outputs
            rises from 0.3 % to 2.5 %.
        kv_dtype: of K and V: dtype (None). Or float8_e4m3fn or float8_e5m2, which are dequantized to dtype.
            Or int8, with token_scales. Or the other one of bfloat16 and float16, to which Q is rounded
            (float16: limited to 65504). Or torch.uint8: rows of DeepSeek V3.2's latents
            (`KVCache.from_latent`), for head dims 576 and 512 and bfloat16. Or "int4", "nvfp4" or
            "fp4_mx_block16": a uint8 cache whose bytes have two columns each. Or "int8_k_nvfp4_v". These
            imply token_scales.
        device: a CUDA device or "cpu".
        max_rows: most rows of Q that a plan covers.
        max_batch: most requests (row groups) of a level.
        max_levels: most levels of a composition. If it is above 1, the workspace holds a state of
            head_dim_v + 1 floats for each of max_levels * max_rows * num_qo_heads.
        num_ctas: parts that the work is split into. Default: the CTAs that the device holds at once. On a CPU
            32, so that results do not depend on its number of cores.
        cascade: whether `plan` finds leading pages that requests of a view share, and reads them once if its
            cost model predicts a gain. It searches views of 2 to 1024 requests that have a page table and no
            row list (736 requests on GPUs with 99 KB of shared memory per block). Requests whose rows fill
            the largest row tile are not grouped. "always": group everything that fits, for tests. Off under a
            variant that transforms K or V by the request or its kv_len.
        batch_invariant: make a request's output bitwise independent of the rest of the batch and of its place
            in it. The output then depends only on the request's query length (see `BSRView.prompts`), its KV
            and the head configuration. No cascade; max_levels must be 1; at most 1024 requests on CUDA.
        kernel: "hopper" or "generic" (Ampere and later). "hopper" is the default on compute capability 9.0,
            except for variants that transform Q, K or V of 512 columns or MLA's latents. On a CPU: plan with
            that kernel's row tiles and costs, to inspect its schedules.
        variant: the attention to compute instead of softmax(Q K^T) V. Its kernels come from the cache, or are
            compiled now, which takes seconds (with ATTN_BACKEND_JIT=0 they are not compiled).
        sinks: whether runs may be given sinks: one logit per query head, whose exponential is added to a
            row's sum of exponentials (gpt-oss).
        float8_out: whether runs may be given an out_scale, which makes their output float8_e4m3fn. On CUDA
            such runs need additional kernels, which are also loaded.
        token_scales: the cache has a scale for each token and head (`KVCache`). kv_dtype is float8_e4m3fn,
            int8, a 4-bit type or "int8_k_nvfp4_v", and q_dtype is dtype. On CUDA heads have up to 256
            columns. Over int4 they have a multiple of 32, over FP4 and "int8_k_nvfp4_v" of 64. None: True
            for the types that are names, else False.
        rotation: rows of K and V were appended with rotation=True. Q is rotated, and the output back, in the
            same kernel. q_dtype is dtype, head_dim_v is head_dim, at most 256, and the variant does not
            transform Q, K, V or the output.

    Raises:
        ValueError: an unsupported argument; the message gives its name, its value and the requirement.
        RuntimeError: a kernel is neither in the package nor compilable, or the driver refuses it.
    """

    def __new__(cls, *_arguments: Any, **_options: Any) -> Attention:
        """With ATTN_BACKEND_DEBUG=1 or ATTN_BACKEND_DUMP, returns an Attention that checks.

        Both settings give a DebugAttention, which dumps, too.
        """
        if cls is Attention:
            settings = Settings.read()
            if settings.debug:
                return object.__new__(DebugAttention)
            if settings.dump is not None:
                return object.__new__(DumpingAttention)
        return object.__new__(cls)

    def __init__(
        self,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim: int,
        *,
        dtype: torch.dtype = torch.bfloat16,
        kv_dtype: CacheDtype | None = None,
        device: torch.device | str = "cuda",
        max_rows: int,
        max_batch: int,
        max_levels: int = 1,
        num_ctas: int | None = None,
        cascade: bool | Literal["always"] = True,
        batch_invariant: bool = False,
        kernel: Literal["hopper", "generic"] | None = None,
        variant: Variant | None = None,
        sinks: bool = False,
        head_dim_v: int | None = None,
        q_dtype: torch.dtype | None = None,
        float8_out: bool = False,
        token_scales: bool | None = None,
        rotation: bool = False,
    ) -> None:
        device = check_device(device)
        if device.type == "cuda" and device.index is None:
            device = torch.device("cuda", torch.cuda.current_device())
        num_qo_heads, num_kv_heads, dims = check_heads(
            num_qo_heads, num_kv_heads, head_dim, head_dim_v, dtype, device
        )
        max_rows, max_batch, max_levels = check_room(
            max_rows, max_batch, max_levels, num_qo_heads // num_kv_heads, device
        )
        check_modes(cascade, batch_invariant, max_batch, max_levels, device)
        design = choose_design(kernel, device, dims, variant)
        check_types(bool, "True or False", sinks=sinks, float8_out=float8_out, rotation=rotation)
        check_types((bool, NoneType), "True, False or None", token_scales=token_scales)
        if token_scales is None:
            token_scales = isinstance(kv_dtype, str) and kv_dtype in FOUR_BIT_COLUMNS
        of_cache = check_kv_dtype(kv_dtype, dtype, dims, token_scales)
        q_dtype = check_q_dtype(q_dtype, dtype, of_cache, dims, design)
        if token_scales:
            check_token_scales(q_dtype, dtype, of_cache, dims, design)
        if rotation:
            check_rotation(q_dtype, dtype, dims, variant)
        num_ctas = None if num_ctas is None else check_int("num_ctas", num_ctas, 1, MAX_CTAS)

        self.num_qo_heads, self.num_kv_heads = num_qo_heads, num_kv_heads
        self.head_dim, self.head_dim_v = dims.qk, dims.v
        self.dtype, self.kv_dtype, self.q_dtype = dtype, of_cache, q_dtype
        self.device, self.batch_invariant = device, batch_invariant
        self.max_rows, self.max_batch, self.max_levels = max_rows, max_batch, max_levels
        self._sm_scale = dims.qk**-0.5
        self._config = AttentionConfig(
            num_qo_heads=num_qo_heads,
            num_kv_heads=num_kv_heads,
            head_dim=dims.qk,
            head_dim_v=dims.v,
            dtype=dtype,
            q_dtype=q_dtype,
            kv_dtype=of_cache,
            device=device,
            max_rows=max_rows,
            max_batch=max_batch,
            max_levels=max_levels,
            num_ctas=num_ctas,
            cascade=cascade,
            batch_invariant=batch_invariant,
            kernel=kernel,
            variant=variant,
            sinks=sinks,
            float8_out=float8_out,
            token_scales=token_scales,
            rotation=rotation,
        )
        self._attention_variant = None
        if variant is not None:
            self._attention_variant = AttentionVariant(
                variant,
                design=design,
                dtype=dtype,
                head_dim=dims,
                device=device,
                sinks=sinks,
                kv_dtype=of_cache,
                float8_q=q_dtype != dtype,
                float8_out=float8_out,
                token_scales=token_scales,
                rotation=rotation,
                max_levels=max_levels,
                num_heads=(num_qo_heads, num_kv_heads),
            )
        # keeps the planned tensors alive while their pointers are in the workspace
        self._levels: Sequence[BSRView] = ()
        self._dumped_errors = 0  # of the last plan and its runs
        # An Attention must not have more than 30 attributes: each look-up would be slower (CPython's
        # SHARED_KEYS_MAX_SIZE).
        self._out_is_like_q = dims.qk == dims.v and q_dtype == dtype
        # the last q's shape, and a tensor of its lse's shape
        self._like_lse: tuple[torch.Size, Tensor] | None = None

        self._library = library()
        self._plan_level = by_name("plan_level")
        self._library_run = in_order("run", _RUN_ARGUMENTS)  # run.cpp checks, attention.cpp launches
        try:
            self._handle: int = self._library.attention_create(
                self._config.pack(self._attention_variant), self._config.kernel_files(self._attention_variant)
            )
        except RuntimeError as error:
            if self._attention_variant is not None and device.type == "cpu":
                raise
            use_plain_kernels_or_raise(error)
            self._handle = self._library.attention_create(
                self._config.pack(self._attention_variant), self._config.kernel_files(self._attention_variant)
            )
        weakref.finalize(self, self._library.attention_destroy, self._handle)
        torch_ops.know(self._handle, self)
        sizes = unpack("WorkspaceSize", self._library.workspace_size(self._handle))
        try:
            self._schedule = _zeros(int(sizes["schedule"]), device)
            self._partial_o = torch.empty(int(sizes["partial_o"]) // 4, dtype=torch.float32, device=device)
            self._partial_lse = torch.empty(
                int(sizes["partial_lse"]) // 4, dtype=torch.float32, device=device
            )
            self._row_ranges = _zeros(int(sizes["row_ranges"]), device)
            self._dequantized = torch.empty(int(sizes["dequantized"]), dtype=torch.uint8, device=device)
        except RuntimeError as error:  # includes torch.OutOfMemoryError
            room = (
                f"max_rows = {max_rows}, max_batch = {max_batch}, max_levels = {max_levels} need a "
                f"workspace of {sum(sizes.item())} bytes on {device}"
            )
            raise type(error)(f"{room}, which torch cannot allocate: {error}") from None
        self._library.set_workspace(
            self._handle,
            self._schedule,
            self._partial_o,
            self._partial_lse,
            self._row_ranges,
            self._dequantized,
        )
        self._counts = (
            ScheduleCounts(self._schedule, *self._schedule_structs()) if Settings.read().metrics else None
        )

    @property
    def design(self) -> str:
        """The kernel design that runs: 'hopper', 'generic' or 'cpu'."""
        return "cpu" if self.device.type == "cpu" else self._config.design_name

    @property
    def workspace_bytes(self) -> int:
        """Bytes of device memory that this object holds."""
        return sum(
            t.numel() * t.element_size()
            for t in (
                self._schedule,
                self._partial_o,
                self._partial_lse,
                self._row_ranges,
                self._dequantized,
            )
        )

    def with_room(self, *, max_rows: int = 0, max_batch: int = 0, max_levels: int = 0) -> Attention:
        """An Attention like this one, with room for at least these sizes. Returns this one if it is large
        enough; otherwise a new one, with its own workspace and no plan. CUDA graphs that captured this object
        keep using it; it must outlive them.

        Raises:
            ValueError: as the constructor.
            RuntimeError: a CUDA graph is being captured, and this one is too small.
        """
        wanted = {"max_rows": max_rows, "max_batch": max_batch, "max_levels": max_levels}
        larger = {
            name: value for name, value in wanted.items() if check_int(name, value, 0) > getattr(self, name)
        }
        if not larger:
            return self
        if is_captured(self.device):
            raise RuntimeError(
                f"{', '.join(larger)} must have grown before the CUDA graph is captured: a workspace cannot "
                f"be allocated in it"
            )
        return Attention(**(vars(self._config) | larger))

    def __reduce_ex__(self, protocol: SupportsIndex) -> NoReturn:
        """Refuses copy.copy, copy.deepcopy and pickle: always a TypeError."""
        raise TypeError("an Attention owns its workspace and cannot be copied or pickled: make another one")

    def plan(self, composition: Composition | BSRView, *, variant_args: VariantArgs | None = None) -> None:
        """Computes the schedule of a batch in one kernel on the current stream. It does not synchronize, and
        may be captured in a CUDA graph.

        This kernel and the kernels of the following `run()`s read the composition's tensors on the device.
        Leave the tensors unchanged until those kernels have run.

        Args:
            composition: one BSRView, or a Composition of at most `max_levels` views. Its tensors are on
                `device`, with the shapes and dtypes that BSRView and PageTable name.
            variant_args: the arguments that the runs will get, if the variant has a mask. A kernel then first
                evaluates the mask for every token of every row. Plan and runs skip KV tiles that no row of a
                row tile sees. Without variant_args the mask still applies, but nothing is skipped. A mask
                without parameters needs none.

        Raises:
            ValueError: an argument that is wrong in shape, dtype or device, on a CPU also in value. On a CPU
                `run` checks page ids, as it knows the cache. Messages about a Composition name the level.
                After this error there is no plan; the previous one is gone, too. On CUDA, wrong values are
                clamped, so that no access is out of bounds. `raise_for_errors()` reports them, and is called
                here when ATTN_BACKEND_DEBUG=1.
            RuntimeError: another thread uses this object.
        """
        if self._counts is not None:
            self._counts.before_plan()
        level = -1  # the level being checked
        levels: Sequence[BSRView] = ()
        try:
            levels = (
                (composition,)
                if isinstance(composition, BSRView)
                else levels_of(composition, self.max_levels, self.max_rows)
            )
            has_variant = self._attention_variant is not None or variant_args is not None
            finds_row_ranges = has_variant and self._required_variant(variant_args).set_plan_args(
                self._handle, variant_args, levels
            )
            errors = 0
            for level, view in enumerate(levels):
                table = view.table
                causal, window_left = level_visibility(view, len(levels), self._attention_variant)
                has_slots = view.has_slots and not causal and window_left < 0  # a variant may narrow the view
                if has_slots:
                    selection.load(self.device)
                options = level_options(
                    level,
                    len(levels),
                    table.page_size,
                    window_left,
                    table.entry_step,
                    causal,
                    finds_row_ranges,
                    view.pages_change,
                    has_slots,
                    positions_of(view),
                    0 if view.prompts is None else check_plain("prompts", view.prompts).data_ptr(),
                )
                # The library keeps each level. With the last one it plans and returns errors (plan.cpp).
                errors = self._plan_level(
                    handle=self._handle,
                    options=options,
                    qo_indptr=view.qo_indptr,
                    row_list=view.rows,
                    indices=table.indices,
                    indptr=table.indptr,
                    last_page_len=table.last_page_len,
                    kv_lens=table.kv_lens,
                    rows=table.rows,
                )
            if errors:
                for level, view in enumerate(levels):  # noqa: B007
                    check_values(view, self.max_rows)
                level = -1
                raise ValueError(describe_errors(errors))
        except BaseException as error:
            if isinstance(error, InUseError):
                raise  # the plan belongs to the other thread
            self._library.abandon_plan(self._handle)
            if isinstance(error, Exception):
                self._note_refusal(error, levels)
            if level >= 0 and isinstance(error, RuntimeError):
                explain_failure(tensors_of(levels[level]))
            if level >= 0 and isinstance(error, ValueError) and isinstance(composition, Composition):
                raise ValueError(f"levels[{level}]: {error}") from None
            raise
        self._levels = levels
        self._dumped_errors = 0
        if self._counts is not None:
            self._counts.after_plan()

    @overload
    def run(
        self,
        q: Tensor,
        kv: KVCache,
        *,
        q_rope: Tensor | None = None,
        out: Tensor | None = None,
        lse: Tensor | None = None,
        return_lse: Literal[False] = False,
        sm_scale: float | None = None,
        logits_soft_cap: float = 0.0,
        after_append: bool = False,
        variant_args: VariantArgs | None = None,
        sinks: Tensor | None = None,
        q_scale: Scale = None,
        out_scale: Scale = None,
        selected: SelectedTokens | None = None,
    ) -> Tensor: ...

    @overload
    def run(
        self,
        q: Tensor,
        kv: KVCache,
        *,
        q_rope: Tensor | None = None,
        out: Tensor | None = None,
        lse: Tensor | None = None,
        return_lse: Literal[True],
        sm_scale: float | None = None,
        logits_soft_cap: float = 0.0,
        after_append: bool = False,
        variant_args: VariantArgs | None = None,
        sinks: Tensor | None = None,
        q_scale: Scale = None,
        out_scale: Scale = None,
        selected: SelectedTokens | None = None,
    ) -> tuple[Tensor, Tensor]: ...

    def run(
        self,
        q: Tensor,
        kv: KVCache,
        *,
        q_rope: Tensor | None = None,
        out: Tensor | None = None,
        lse: Tensor | None = None,
        return_lse: bool = False,
        sm_scale: float | None = None,
        logits_soft_cap: float = 0.0,
        after_append: bool = False,
        variant_args: VariantArgs | None = None,
        sinks: Tensor | None = None,
        q_scale: Scale = None,
        out_scale: Scale = None,
        selected: SelectedTokens | None = None,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Runs the last plan. May be captured in a CUDA graph: grid and pointers never change.

        Args:
            q: [rows, num_qo_heads, head_dim], of q_dtype. Rows beyond the plan's are padding, which engines
                add to replay a CUDA graph of a fixed size. Kernels do not write their out and lse, so a new
                out may hold anything there, including NaN. Rows of the plan beyond q's are not computed.
            q_rope: only for MLA latents, whose V is the first columns of K: the last columns of q, [rows,
                num_qo_heads, head_dim - head_dim_v], with its own strides. q is then [rows, num_qo_heads,
                head_dim_v]. On CUDA only for head_dim 576 and head_dim_v 512. None: q has all columns.
            kv: the cache of one layer. All tokens of a request must be finite, even tokens that a row does
                not see, because their values are multiplied by zero and added. A cache of 0 pages, or K and V
                of 0 tokens, is valid for plans whose requests have no tokens.
            out: [rows, num_qo_heads, head_dim_v], of dtype, with an out_scale float8_e4m3fn; None: a new one.
                It may be q itself, else must not overlap q or the cache (not checked).
            lse: float32 [rows, num_qo_heads], filled with the natural-log sum of exponentials when given;
                -inf for a row that sees nothing (its output is 0).
            return_lse: returns the attention state, for `merge_state`; lse is allocated if it is None.
            sm_scale: multiplies q . k, above 0; default head_dim ** -0.5.
            logits_soft_cap: cap * tanh(logit / cap) when above 0. Must be 0 with a variant; combine the
                variant with soft_cap instead. Prompts on Hopper compute tanh with a relative error of 2^-11,
                as FlashAttention does. The variant soft_cap is exact to 1e-6.
            after_append: promises that `append_kv` was called on this stream since the plan, and that the
                composition's tensors were complete before. The Hopper kernel then overlaps with the append
                and reads the schedule while the new tokens are being written. Other kernels wait.
            variant_args: the variant's parameters by name, tensors on this device or numbers. A captured CUDA
                graph keeps the numbers and the tensors' addresses. To change an argument, write into the
                tensor.
            sinks: float32 [num_qo_heads]: exp(sink) is added once to each row's sum of exponentials; lse
                includes it. Leave sinks out of states that are to be merged with others.
            q_scale: for a float8 q: the true q is q * q_scale; None: 1. A number above 0, or a float32 tensor
                of such numbers, [], [1] or [num_kv_heads], read when the kernel runs.
            out_scale: the output is divided by it, rounded to the nearest float8_e4m3fn number, and limited
                to +-448. A number above 0, or a float32 tensor with one such number, read when the kernel
                runs. lse is not scaled. Needs float8_out.
            selected: the tokens that this layer's rows attend to, under a plan of `BSRView.selected`. A
                kernel first writes their slots to the plan's table. None: use the slots already there. Not
                supported under torch.compile; call `selected_slots` before the run instead.

        Returns:
            out; with return_lse (out, lse).

        Raises:
            ValueError: an argument that is wrong in type, shape, dtype, device or stride, or no plan yet; on
                a CPU also a page id beyond the cache.
            RuntimeError: another thread uses this object.
        """
        scale = self._sm_scale if sm_scale is None else sm_scale
        if is_compiling():
            if selected is not None:
                raise ValueError(
                    "selected is given, must be None in a compiled function: call selected_slots before, "
                    "into the slots of the plan"
                )
            options: dict[str, Any] = {
                "q_rope": q_rope,
                "sinks": sinks,
                "sm_scale": scale,
                "logits_soft_cap": logits_soft_cap,
                "after_append": after_append,
            }
            explain_failed_run(q=q, kv=kv, out=out, lse=lse, selected=None, **options)
            out = self._new_out(q, out_scale) if out is None else out
            lse = q.new_empty(q.shape[:2], dtype=torch.float32) if return_lse and lse is None else lse
            options |= {"lse": lse, "q_scale": q_scale, "out_scale": out_scale}
            out = torch_ops.run(self._handle, q, kv, out, variant_args, options)
            return (out, lse) if return_lse else out  # type: ignore[return-value]
        try:
            return self._run_raw(
                q,
                kv.k,
                kv.v,
                out,
                lse,
                scale,
                logits_soft_cap,
                after_append,
                q_rope,
                kv.k_scale,
                kv.v_scale,
                q_scale if q_scale is None else checked_scale("q_scale", q_scale),
                sinks,
                False,  # lse_to_base_2
                False,  # is_hnd
                None,  # k_rope
                out_scale if out_scale is None else checked_scale("out_scale", out_scale),
                variant_args,
                return_lse,
                selected,
            )
        except (
            AttributeError,
            OverflowError,
            RuntimeError,
            TypeError,
        ):  # only on failure, to keep each layer's call cheap
            explain_failed_run(
                q=q,
                q_rope=q_rope,
                kv=kv,
                out=out,
                lse=lse,
                sinks=sinks,
                sm_scale=scale,
                logits_soft_cap=logits_soft_cap,
                after_append=after_append,
                selected=selected,
            )
            raise

    def _run_raw(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor | None,
        out: Tensor | None,
        lse: Tensor | None,
        sm_scale: float,
        logits_soft_cap: float,
        after_append: bool,
        q_rope: Tensor | None,
        k_scale: CacheScale,
        v_scale: CacheScale,
        q_scale: Scale,
        sinks: Tensor | None,
        lse_to_base_2: bool,
        is_hnd: bool,
        k_rope: Tensor | None,
        out_scale: Scale,
        variant_args: VariantArgs | None,
        return_lse: bool,
        selected: SelectedTokens | None = None,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Runs the last plan, for `run` and for FlashInfer's wrappers, whose K and V come in more forms. Only
        this method calls the library's run.

        Arguments are positional, in the library's order: keywords would cost each layer a microsecond.

        Args:
            k, v: of a KVCache, or ragged: [tokens, num_kv_heads, head_dim], with is_hnd [num_kv_heads,
                tokens, head_dim].
            k_scale, v_scale, q_scale, out_scale: already checked.
            lse_to_base_2: lse is a binary logarithm.
            k_rope: the last columns of MLA's K, directly after k in memory; v is then None.
            The others: as in `run`.

        Returns:
            As `run`.

        Raises:
            ValueError: as `run`.
            AttributeError, OverflowError, RuntimeError, TypeError: an argument of a wrong type, or a failed
                launch: explain_failed_run() finds the argument.
        """
        if lse is not None:
            check_handle("lse", lse)
        elif return_lse:
            like = self._like_lse
            if like is None or like[0] != q.shape:
                like = self._like_lse = q.shape, q.new_empty((), dtype=torch.float32).expand(q.shape[:2])
            lse = torch.empty_like(like[1])  # takes half the time of new_empty
        if out is None:
            is_like_q = self._out_is_like_q and out_scale is None  # the common case of _new_out()
            out = torch.empty_like(q) if is_like_q else self._new_out(q, out_scale)
        elif out.is_neg() or out.requires_grad:
            check_handle("out", out)
        if q.is_neg() or q.requires_grad:
            check_handle("q", q)
        if q_rope is not None:
            check_handle("q_rope", q_rope)
        variant = self._attention_variant
        if variant is not None or variant_args is not None:
            self._required_variant(variant_args).set_args(self._handle, variant_args, q)
        # Fewer arguments make a call faster, and most runs need no others.
        is_plain = (
            sinks is None
            and k_scale is None
            and v_scale is None
            and q_scale is None
            and out_scale is None
            and selected is None
            and k_rope is None
            and not (is_hnd or lse_to_base_2)
        )
        given: tuple[Any, ...] = (
            self._handle,
            q,
            k,
            v,
            out,
            lse,
            sm_scale,
            logits_soft_cap,
            after_append,
            q_rope,
        )
        if not is_plain:
            k_scales, k_factor = k_scale if isinstance(k_scale, BlockScales) else (k_scale, None)
            v_scales, v_factor = v_scale if isinstance(v_scale, BlockScales) else (v_scale, None)
            if sinks is not None:
                check_handle("sinks", sinks)
            if variant is not None:
                is_shared = self._config.cascade is not False and not self.batch_invariant
                variant.check_scales(k_scale, v_scale, self._levels, is_shared)
            given += (
                k_scales,
                v_scales,
                q_scale,
                sinks,
                lse_to_base_2,
                is_hnd,
                k_rope,
                out_scale,
                k_factor,
                v_factor,
            )
            if selected is not None:
                tensors = selected.for_library()
                given += tuple(tensors.get(name) for name in names_of("run")[len(_RUN_ARGUMENTS) :])
        while True:
            try:
                errors = self._library_run(*given)
                break
            except RuntimeError as error:
                if variant is None or not variant.load_if_missing(self._handle, error):
                    raise
        if errors:
            num_pages = k.shape[1 if is_hnd else 0]
            try:
                refuse_run(errors, self._levels, num_pages)
            except ValueError as error:
                self._note_refusal(error, self._levels, num_pages)
                raise
        if variant is not None and variant.is_interpreted:
            if v is None:  # with k_rope: MLA's K in pages of rows
                k = k.as_strided((*k.shape[:2], 1, self.head_dim), (*k.stride()[:2], self.head_dim, 1))
                v = k[..., : self.head_dim_v]
            elif k.ndim == 3:  # ragged: one token per page
                k, v = ((x.transpose(0, 1) if is_hnd else x).unsqueeze(1) for x in (k, v))
            variant.interpret(
                self._levels,
                q=q if q_rope is None else torch.cat((q, q_rope), -1),
                kv=KVCache.unchecked(k, v, k_scale, v_scale),
                out=out,
                lse=lse,
                sm_scale=sm_scale,
                sinks=sinks,
                q_scale=q_scale,
                out_scale=out_scale,
            )
            if lse is not None and lse_to_base_2:
                lse.mul_(LOG2_E)
        return (out, lse) if return_lse else out  # type: ignore[return-value]

    def _new_out(self, q: Tensor, out_scale: Scale) -> Tensor:
        dtype = self.dtype if out_scale is None else torch.float8_e4m3fn
        if self.head_dim_v == self.head_dim and self.q_dtype == dtype:
            return torch.empty_like(q)
        return q.new_empty((q.shape[0], self.num_qo_heads, self.head_dim_v), dtype=dtype)

    def _required_variant(self, variant_args: VariantArgs | None) -> AttentionVariant:
        if self._attention_variant is None:
            refuse("variant_args", variant_args, "None: this Attention has no variant")
        return self._attention_variant

    def schedule(self) -> Schedule:
        """A copy of the last plan's schedule on the CPU (synchronizes)."""
        return Schedule.read(self._schedule.cpu(), *self._schedule_structs())

    def _schedule_structs(self) -> tuple[Any, Any]:
        config = unpack("ScheduleConfig", self._library.schedule_config(self._handle))
        return config, unpack("ScheduleLayout", self._library.schedule_layout(self._handle))

    def raise_for_errors(self) -> None:
        """Reads the device's error word (synchronizes; does nothing while a CUDA graph is being captured).

        Raises:
            ValueError: the last plan or one of its runs found metadata that had to be clamped.
        """
        if is_captured(self.device):
            return
        if errors := self.schedule().errors:
            fault = describe_errors(errors)
            if errors != self._dumped_errors:
                self._dumped_errors = errors
                self._dump(f"clamped: {fault}", self._levels)
            raise ValueError(fault)

    def _note_refusal(
        self, error: Exception, levels: Sequence[BSRView], num_pages: int | None = None
    ) -> None:
        """Counts a plan or a run that raises, and dumps its batch. num_pages: of the cache, if known."""
        if self._counts is not None:
            self._counts.total.refusals += 1
        self._dump(f"refused: {error}", levels, num_pages)

    def _dump(self, fault: str, levels: Sequence[BSRView], num_pages: int | None = None) -> None:
        """Writes the metadata of a batch for `attn-backend plan`, if ATTN_BACKEND_DUMP names a folder. Never
        raises.
        """
        path = None
        try:
            folder = Settings.read().dump
            if folder is None or len(levels) != 1 or levels[0].rows is not None or is_captured(self.device):
                return
            number = next(_dumps)
            if number > MAX_DUMPS:
                return
            path = folder / f"batch-{os.getpid()}-{number}.json"
            causal, window_left = levels[0].causal is not False, levels[0].window_left
            with suppress(ValueError):
                causal, window_left = level_visibility(levels[0], 1, self._attention_variant)
            config = self._config
            batch = {
                "fault": fault,
                "heads": f"{self.num_qo_heads}/{self.num_kv_heads}",
                "head_dim": self.head_dim,
                "head_dim_v": self.head_dim_v,
                "costs": config.design_name,
                "num_ctas": int(self._schedule_structs()[0]["num_ctas"]),
                "causal": causal,
                "window_left": window_left,
                "cascade": config.cascade_under(config.variant),
                "batch_invariant": self.batch_invariant,
                "variant": config.variant and config.variant.name,
                "max_rows": self.max_rows,
                "max_batch": self.max_batch,
                "num_pages": num_pages,
                **describe_batch(levels[0]),
            }
            folder.mkdir(parents=True, exist_ok=True)
            unfinished = path.with_suffix(".tmp")
            try:
                unfinished.write_text(json.dumps(batch))
                unfinished.replace(path)
            finally:
                unfinished.unlink(missing_ok=True)
        except Exception as error:  # a fault of the diagnosis must not hide the batch's own
            progress.LOGGER.warning("attn_backend could not write %s: %s", path or "a batch", error)
            return
        progress.LOGGER.warning(
            "attn_backend wrote the metadata of a batch that it %s. Replay it: attn-backend plan %s",
            fault,
            path,
        )


def _zeros(num_bytes: int, device: torch.device) -> Tensor:
    """Avoids torch.zeros on a CPU: it waits for torch's threads, which a forked child does not have."""
    if device.type != "cpu":
        return torch.zeros(num_bytes, dtype=torch.uint8, device=device)
    memory = torch.empty(num_bytes, dtype=torch.uint8, device=device)
    ctypes.memset(memory.data_ptr(), 0, num_bytes)
    return memory


_arguments = inspect.signature(Attention.__init__)
# The signature that help() and editors show, instead of __new__'s.
_arguments = _arguments.replace(parameters=list(_arguments.parameters.values())[1:])
Attention.__signature__ = _arguments  # type: ignore[attr-defined]


class DebugAttention(Attention):
    """Each plan and each run waits for the device and raises the errors that it found.

    Meanwhile, calls from other threads are refused.
    """

    def __init__(self, *arguments: Any, **options: Any) -> None:
        self._in_use_until_done = Lock()
        super().__init__(*arguments, **options)

    def plan(self, composition: Composition | BSRView, *, variant_args: VariantArgs | None = None) -> None:
        with self._until_done():
            super().plan(composition, variant_args=variant_args)

    def _run_raw(self, *arguments: Any, **options: Any) -> Tensor | tuple[Tensor, Tensor]:
        with self._until_done():
            return super()._run_raw(*arguments, **options)

    @contextmanager
    def _until_done(self) -> Iterator[None]:
        if not self._in_use_until_done.acquire(blocking=False):
            raise InUseError(
                "this Attention is in use by another thread, whose plan() or run() has not ended on the "
                "device"
            )
        try:
            yield
            self.raise_for_errors()
        finally:
            self._in_use_until_done.release()


class DumpingAttention(Attention):
    """Each plan and each run waits for the device, and dumps a batch whose metadata was clamped."""

    def plan(self, composition: Composition | BSRView, *, variant_args: VariantArgs | None = None) -> None:
        super().plan(composition, variant_args=variant_args)
        with suppress(ValueError):
            self.raise_for_errors()

    def _run_raw(self, *arguments: Any, **options: Any) -> Tensor | tuple[Tensor, Tensor]:
        made = super()._run_raw(*arguments, **options)
        with suppress(ValueError):
            self.raise_for_errors()
        return made
