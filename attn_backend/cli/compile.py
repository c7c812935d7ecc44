"""`attn-backend compile`: compiles the standard kernels, or a variant's, into the cache ahead of time."""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from ..jit import build, cubins, manifest
from ..jit.manifest import (
    ARCHS,
    BUILDS,
    CPU_HEAD_DIMS_TEXT,
    CUDA_HEAD_DIMS_TEXT,
    FLOAT8_Q_TEXT,
    LATENT_HEAD_DIMS_TEXT,
    ROTATION_TEXT,
    TOKEN_SCALES_TEXT,
    HeadDims,
)
from ..stored_formats import BY_DTYPE, FORMATS
from .console import explained

if TYPE_CHECKING:
    from ..variants import Variant

_DTYPES = tuple(stored.dtype for stored in FORMATS if not stored.has_scales)
_CUDA_DTYPES = tuple(stored.dtype for stored in FORMATS if stored.bits == 16)


EPILOG = """examples:
  attn-backend compile                                     # standard kernels, if the wheel has none (nvcc)
  attn-backend compile --arch sm_90a --head-dim 80         # another head_dim
  attn-backend compile --arch sm_90a --dtype float16 --kv-dtype bfloat16   # Q and cache of different dtypes
  attn-backend compile --variant my_module:variant --arch sm_90a --dtype bfloat16 --head-dim 128
  attn-backend compile --variant attn_backend.variants.builtin:alibi --arch cpu --dtype float32
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    build.add_arguments(parser, jobs=2, archs=None)
    needs = (
        "Compile variants instead, for this machine's GPU or --arch. Needs nvcc or NVRTC; --arch cpu needs a "
        "C++ compiler."
    )
    variant = parser.add_argument_group("variants", needs)
    variant.add_argument(
        "--variant",
        action="append",
        metavar="MODULE:OBJECT",
        help="a Variant in a module, or a function without arguments that returns one; repeatable",
    )
    variant.add_argument(
        "--dtype", action="append", choices=_DTYPES, help="dtype of Q (bfloat16); repeatable"
    )
    variant.add_argument(
        "--kv-dtype",
        choices=dict.fromkeys(stored.dtype for stored in FORMATS if stored.bits < 32),
        help="dtype of the cache (default: Q's). Also without --variant",
    )
    variant.add_argument(
        "--token-scales",
        action="store_true",
        help="the cache has a scale for each token and head; always so with 4 bits. Also without --variant",
    )
    variant.add_argument(
        "--rotation", action="store_true", help="the cache's rows are rotated. Also without --variant"
    )
    variant.add_argument(
        "--float8-q", action="store_true", help="give Q the cache's dtype. Also without --variant"
    )
    variant.add_argument(
        "--float8-out",
        action="store_true",
        help="also compile the kernels of Attention(float8_out=True). Also without --variant",
    )
    what = (
        "head dimension, or two for Q/K and V, such as 192_128; repeatable; default: 128. Without "
        "--variant: the standard kernels for this head dimension"
    )
    variant.add_argument("--head-dim", action="append", type=HeadDims.parse, metavar="N[_N]", help=what)
    variant.add_argument("--sinks", action="store_true", help="for an Attention with sinks=True")
    variant.add_argument(
        "--levels",
        action="store_true",
        help="for an Attention with max_levels above 1: windows become part of the mask",
    )
    variant.add_argument("--kernel", choices=manifest.DESIGNS, help="default: the GPU's default kernel")


def run(arguments: argparse.Namespace) -> int:
    """Returns the exit status."""
    try:
        _check_combinations(arguments)
        if arguments.variant:
            _compile_variants(arguments)
            return 0
        if "cpu" in (arguments.arch or []):
            _check_heads(arguments, arguments.head_dim or [], "", on_cpu=True)
            print(
                "The host library has all standard CPU kernels: nothing to compile. --arch cpu only compiles "
                "a --variant."
            )
            arguments.arch = [arch for arch in arguments.arch if arch != "cpu"]
            if not arguments.arch:
                return 0
        _check_archs(
            arguments.arch or [], ARCHS, " or ".join(f"{name} ({arch.gpus})" for name, arch in BUILDS.items())
        )
        if not _chooses(arguments):
            if not arguments.arch and not arguments.out and _are_shipped():
                print(
                    "The package has all standard kernels: nothing to compile. --arch compiles them "
                    "again for an arch."
                )
                return 0
            return build.run(arguments)
        _compile_head_dims(arguments)
    except (RuntimeError, ValueError, OSError, ImportError) as error:
        print(f"error: {explained(error)}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("error: interrupted", file=sys.stderr)
        return 130
    return 0


def _chooses(arguments: argparse.Namespace) -> bool:
    """Whether only some standard kernels are compiled, which the package may lack."""
    return bool(arguments.head_dim or arguments.kv_dtype or arguments.float8_out or arguments.rotation)


def _check_combinations(arguments: argparse.Namespace) -> None:
    """Refuses options that would have no effect, or that lack something they need.

    Raises:
        ValueError: such an option.
    """
    kv_dtype, chooses = arguments.kv_dtype, _chooses(arguments)
    arguments.token_scales |= any(stored.dtype == kv_dtype and stored.head_columns for stored in FORMATS)
    has_token_scales = arguments.token_scales and (kv_dtype, True) in BY_DTYPE
    with_token_scales = " or ".join(stored.dtype for stored in FORMATS if stored.has_token_scales)
    given_scales = BY_DTYPE.get((kv_dtype, False))
    only_with_variant = {
        "--sinks": arguments.sinks,
        "--levels": arguments.levels,
        "--kernel": arguments.kernel,
    }
    for_some = "--head-dim, --kv-dtype, --float8-out or --rotation"
    rules = (
        (
            arguments.float8_q and not (given_scales and given_scales.has_scales),
            "--float8-q is given, must come with --kv-dtype of 8 bits",
        ),
        (
            (arguments.token_scales or kv_dtype == "int8") and not has_token_scales,
            f"--token-scales and --kv-dtype must come together, with {with_token_scales}",
        ),
        (
            arguments.float8_q and arguments.token_scales,
            "--float8-q is given, must not come with --token-scales",
        ),
        (arguments.float8_q and arguments.rotation, "--float8-q is given, must not come with --rotation"),
        *(
            (
                arguments.rotation and not head_dim.may_be_rotated,
                f"--head-dim is {head_dim}, must be {ROTATION_TEXT}, and the same for V",
            )
            for head_dim in arguments.head_dim or []
        ),
        (
            arguments.out and arguments.variant,
            "--out is given, must not come with --variant: its kernels are kept in the cache",
        ),
        *(
            (value and not arguments.variant, f"{name} is given, must come with --variant")
            for name, value in only_with_variant.items()
        ),
        (
            arguments.dtype and not arguments.variant and not chooses,
            f"--dtype is given, must come with --variant, {for_some}: without them all standard kernels are "
            f"compiled",
        ),
        (
            arguments.out and chooses,
            f"--out is given, must not come with {for_some}: these kernels are kept in the cache",
        ),
    )
    _refuse_broken(rules)


def _refuse_broken(rules: Iterable[tuple[object, str]]) -> None:
    for is_broken, message in rules:
        if is_broken:
            raise ValueError(message)


def _check_heads(
    arguments: argparse.Namespace, head_dims: Iterable[HeadDims], dtype: str, *, on_cpu: bool
) -> None:
    """Refuses heads that no kernel supports over this cache. dtype: of Q; empty: any.

    Raises:
        ValueError: such heads.
    """
    kv_element = manifest.kv_element_of(arguments.kv_dtype, dtype, arguments.token_scales)
    text = f"{CPU_HEAD_DIMS_TEXT} on a CPU" if on_cpu else CUDA_HEAD_DIMS_TEXT
    for head_dim in head_dims:
        is_supported = head_dim.runs_on_cpu if on_cpu else head_dim.runs_on_cuda
        is_over_cache = (on_cpu and kv_element != "latent") or head_dim.runs_over(kv_element)
        float8_q = arguments.float8_q and not on_cpu
        rules = (
            (not is_supported, f"--head-dim is {head_dim}, must be {text}"),
            (
                arguments.token_scales and not is_over_cache,
                f"--head-dim is {head_dim}, must be {TOKEN_SCALES_TEXT}",
            ),
            (not is_over_cache, f"--kv-dtype is {arguments.kv_dtype}, must be {LATENT_HEAD_DIMS_TEXT}"),
            (
                float8_q and not head_dim.runs_over(kv_element, float8_q=True),
                f"--float8-q is given, must not be: q_dtype must be {FLOAT8_Q_TEXT}",
            ),
        )
        _refuse_broken(rules)


def _are_shipped() -> bool:
    files = [cubins.shipped_kernel(name, arch) for arch in ARCHS for name in cubins.kernel_sources(arch)]
    return all(file.is_file() and not cubins.shipped_fault(file) for file in files)


def _compile_variants(arguments: argparse.Namespace) -> None:
    from ..jit import cubins
    from ..kernels.native import library

    archs = arguments.arch or [_own_arch()]
    others = [arch for arch in archs if not cubins.is_target(arch)]
    _check_archs(
        others,
        ["cpu"],
        f"cpu, sm_90a, sm_80 (8.6 and 8.9, too), sm_100, sm_120, ... (one for each major version), or "
        f"{cubins.PTX_OF_SM80}",
    )
    isa, on_gpu = library().current_isa(), {*archs} != {"cpu"}
    if arguments.kernel and not on_gpu:
        raise ValueError(f"--kernel is {arguments.kernel}, must be left out: a CPU has no choice of kernels")
    head_dims = arguments.head_dim or [HeadDims.of(128)]
    for place in arguments.variant:
        variant = _imported(place)
        variant = variant.across_levels() if arguments.levels else variant
        for dtype in arguments.dtype or ["bfloat16"]:
            is_16_bits, names = dtype in _CUDA_DTYPES, " or ".join(_CUDA_DTYPES)
            rules = (
                (on_gpu and not is_16_bits, f"--dtype is {dtype}, must be {names} on a GPU"),
                (
                    arguments.kv_dtype in _CUDA_DTYPES and not is_16_bits,
                    f"--kv-dtype is {arguments.kv_dtype}, must be {dtype} or of 8 bits",
                ),
            )
            _refuse_broken(rules)
            for on_cpu in {arch == "cpu" for arch in archs}:
                _check_heads(arguments, head_dims, dtype, on_cpu=on_cpu)
            for head_dim in head_dims:
                variant.check_head_dim(*head_dim)
                of_cache = (
                    arguments.kv_dtype,
                    arguments.float8_q,
                    arguments.float8_out,
                    arguments.token_scales,
                    arguments.rotation,
                )
                for entry in cubins.compile_ahead(
                    variant, archs, arguments.kernel, dtype, head_dim, isa, arguments.sinks, *of_cache
                ):
                    print(entry, flush=True)


def _compile_head_dims(arguments: argparse.Namespace) -> None:
    """Compiles the standard kernels for head dims, or caches, that the package lacks."""
    head_dims = arguments.head_dim or (
        manifest.SHIPPED_FLOAT8_HEAD_DIMS if arguments.kv_dtype else manifest.SHIPPED_FLOAT8_OUT_HEAD_DIMS
    )
    kv_element = manifest.kv_element_of(arguments.kv_dtype, "", arguments.token_scales)
    _check_heads(arguments, head_dims, "", on_cpu=False)
    allowed = [dtype for dtype in _CUDA_DTYPES if dtype != arguments.kv_dtype]  # the cache's differs from Q's
    elements = [
        BY_DTYPE[dtype, False].element for dtype in arguments.dtype or _CUDA_DTYPES if dtype in allowed
    ]
    if not elements:
        others = " or ".join(allowed)
        raise ValueError(
            f"--dtype is {', '.join(arguments.dtype)}, must be {others} on a "
            f"GPU{f' with --kv-dtype {arguments.kv_dtype}' if kv_element else ''}"
        )
    for arch in arguments.arch or ARCHS:
        for element in elements:
            name = manifest.append_qkv_name(element, kv_element, arguments.rotation)
            if manifest.late_append(name) is not None:
                print(cubins.compile_kernel(name, arch)[0], flush=True)
        for head_dim in head_dims:
            for element in elements:
                for float8_out in sorted({False, arguments.float8_out}):
                    shape = manifest.KernelShape(
                        element, head_dim, kv_element, arguments.float8_q, float8_out, arguments.rotation
                    )
                    for kernel in manifest.attention_kernels(shape):
                        if arch in kernel.archs:
                            print(cubins.compile_kernel(kernel.name, arch)[0], flush=True)


def _own_arch() -> str:
    import torch

    from ..jit.cubins import target_of

    if not torch.cuda.is_available():
        raise RuntimeError(
            "there is no GPU here to compile for: say which with --arch, such as --arch sm_90a; --arch cpu "
            "compiles for this CPU"
        )
    return target_of(torch.cuda.get_device_capability())


def _check_archs(archs: list[str], known: Sequence[str], must_be: str) -> None:
    for arch in archs:
        if arch not in known:
            raise ValueError(f"--arch is {arch!r}, must be {must_be}")


def _imported(place: str) -> Variant:
    """Imports MODULE:OBJECT; the working folder is searched as well."""
    from ..variants import Variant

    module_name, _, name = place.partition(":")
    if not module_name or not name:
        raise ValueError(
            f"--variant is {place!r}, must be MODULE:OBJECT, such as my_package.masks:document_mask"
        )
    if "" not in sys.path:
        sys.path.insert(0, "")
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        raise ValueError(f"--variant is {place!r}: {error}") from error
    found: Any = module
    for part in name.split("."):
        if not hasattr(found, part):
            raise ValueError(f"--variant is {place!r}, but {module_name} has no {name}")
        found = getattr(found, part)
    if callable(found):
        try:
            found = found()
        except TypeError as error:
            raise ValueError(
                f"--variant is {place!r}, a function that does not return a Variant without arguments: "
                f"{error}"
            ) from error
    if not isinstance(found, Variant):
        raise ValueError(f"--variant is {place!r}, which is a {type(found).__name__}, must be a Variant")
    return found
