"""The variant of an Attention: its kernel files, the interval that plan uses, and the arguments of its
functions.

The way from Python functions to a kernel:

1. `variants/variant.py` has them traced (`tracing.py`) and written as a C++ struct (`cpp.py`).
2. The constructor of an Attention makes the `AttentionVariant` below, which asks `jit/manifest.py` for its
   kernels: their names and sources. It then calls `files()`.
3. `jit/cubins.py` finds each kernel or compiles it. Without a compiler, a CPU runs `interpreter.py`.
"""

from __future__ import annotations

import ast
import inspect
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from ..jit import cubins, manifest
from ..jit.manifest import HeadDims
from ..jit.progress import warn_once
from ..metadata import BSRView
from ..metadata.kv_cache import FORMATS_BY_DTYPE, CacheDtype, CacheScale
from ..settings import Settings
from ..validation import dtype_name, refuse, require
from ..variants import Variant, builtin
from ..variants.params import check_shapes
from .interpreter import can_be_interpreted, interpret
from .native import MissingKernelError, library


def window_of_level(view: BSRView, of_variant: int = -1, name: str = "") -> int:
    """window_left of one of several levels, relative to the level's end, for the plan and the standard
    kernels. Windows that count positions are part of the variant's mask. of_variant: the variant's window.

    Raises:
        ValueError: the view gives no positions although its window or the variant's counts them, or its
            window differs from the variant's.
    """
    if of_variant >= 0:
        for given in ("kv_offsets", "positions"):
            if getattr(view, given) is None:
                raise ValueError(
                    f"{given} is None, must be given: variant {name} has a window, which counts positions "
                    f"over all levels"
                )
    if view.window_left < 0 or view.positions is None:
        return view.window_left
    if view.window_left != of_variant:
        instead = (
            f"-1, or that of the Attention: variant=builtin.sliding_window({view.window_left}), or it "
            f"combined with another variant"
        )
        refuse("window_left", view.window_left, instead)
    return -1


_UNKNOWN = "MODULE:OBJECT"


def place_of(variant: Variant) -> tuple[str, str]:
    """(MODULE:OBJECT, a note that a message appends to the command). MODULE made the variant, or imports it
    from the module that did.

    The running program is the last choice, since the command would import and so run it. Built-ins without
    arguments need no module.
    """
    found = [
        (module, name)
        for module in list(sys.modules.values())
        if isinstance(module, ModuleType)
        for name, value in list(vars(module).items())
        if value is variant
    ]
    found = [
        (module, name)
        for module, name in found
        if getattr(module, "__spec__", None) or getattr(module, "__file__", None)
    ]
    if not found:
        return _of_builtin(variant)
    module, name = min(found, key=lambda place: (place[0].__name__ == "__main__", _is_imported(*place)))
    if module.__name__ != "__main__":
        return f"{module.__name__}:{name}", ""
    if module.__spec__ is not None:  # python -m
        return f"{module.__spec__.name}:{name}", ""
    file = Path(str(module.__file__)).resolve()
    return (
        f"{file.stem}:{name}",
        f", in {file.parent}; that imports {file.name}, whose main part must be under `if __name__ == "
        f"'__main__'`",
    )


def _of_builtin(variant: Variant) -> tuple[str, str]:
    if variant.name in builtin.__all__:
        with suppress(TypeError):  # it needs arguments
            if getattr(builtin, variant.name)().source == variant.source:
                return f"{builtin.__name__}:{variant.name}", ""
    return (
        _UNKNOWN,
        f", where {_UNKNOWN} is a module that has this variant, or a function without arguments that makes "
        f"it, such as my_module:my_variant",
    )


def _is_imported(module: ModuleType, name: str) -> bool:
    """Whether the module imports the name from another one, judged by its source; False if unknown."""
    try:
        nodes = list(ast.walk(ast.parse(inspect.getsource(module))))
    except (OSError, TypeError, SyntaxError):
        return False
    imported = [alias for node in nodes if isinstance(node, ast.ImportFrom) for alias in node.names]
    return any((alias.asname or alias.name) in (name, "*") for alias in imported)


VariantArgs = Mapping[str, Tensor | float | int]


class AttentionVariant:
    """A variant in an Attention of one dtype and one head width.

    Args:
        design: None on a CPU.
        sinks: whether runs may be given sinks.
        kv_dtype: of the cache; None: dtype.
        float8_q: Q also has kv_dtype.
        float8_out: whether outputs may be 8-bit.
        token_scales: the cache has a scale for each token and head.
        rotation: rows of the cache are rotated.
        max_levels: of a composition.
        num_heads: query and KV heads, if known.

    Raises:
        ValueError: sinks are given, but the variant has no softmax; its transforms do not fit head_dim;
            kv_dtype is torch.uint8; or a bound tensor is shorter than the heads.
    """

    def __init__(
        self,
        variant: Variant,
        design: manifest.Design | None,
        dtype: torch.dtype,
        head_dim: int | HeadDims,
        device: torch.device,
        sinks: bool = False,
        kv_dtype: CacheDtype | None = None,
        float8_q: bool = False,
        float8_out: bool = False,
        token_scales: bool = False,
        rotation: bool = False,
        max_levels: int = 1,
        num_heads: tuple[int, int] = (0, 0),
    ) -> None:
        require(kv_dtype != torch.uint8, "variant", variant, "None with kv_dtype = torch.uint8")
        require(
            variant.uses_softmax or not sinks,
            "sinks",
            sinks,
            f"False under variant {variant.name}, which does not use softmax",
        )
        dims = HeadDims.of(head_dim)
        variant.check_head_dim(*dims)
        # variants.params.SIZES: each plan sets "batch", each run sets "rows". Only checked if the variant has
        # tensors of these sizes.
        self._sizes = dict(zip(("num_qo_heads", "num_kv_heads"), num_heads, strict=True))
        check_shapes(variant.params, {}, self._sizes)
        self._has_batch, self._has_rows = (
            any(size in (param.shape or ()) for param in variant.params) for size in ("batch", "rows")
        )
        self._shapes_hold = False  # whether the last arguments fit the last plan
        self._kv_element = manifest.kv_element_of(kv_dtype, dtype, token_scales)
        self._float8_q, self._float8_out, self._rotation = float8_q, float8_out, rotation
        self._given = variant
        self.variant = variant = variant if max_levels == 1 else variant.across_levels()
        self._dtype = dtype_name(dtype)
        self._dims = dims
        self._device = device
        self._kernels: dict[str, manifest.Kernel] = {}
        self._target, self._options = "cpu", ""
        if design is not None and device.type == "cuda":
            self._target = cubins.target_of(torch.cuda.get_device_capability(device))
            arch = cubins.arch_of_target(self._target)
            if design is not manifest.default_design(arch, dims, variant.has_transforms):
                self._options = f" --kernel {design.name}"
            shape = manifest.KernelShape(
                FORMATS_BY_DTYPE[dtype].element, dims, self._kv_element, float8_q, float8_out, rotation
            )
            self._kernels = manifest.variant_kernels(arch, design, shape, variant, sinks)
            self._options += " --sinks" if sinks else ""
        self._options += " --levels" if variant is not self._given else ""
        self.is_interpreted = False  # files() may set it
        self._last_args: dict[str, Tensor | float | int] | None = None
        self._addresses: list[int] = []
        self._planned_mask: dict[str, object] | None = None
        # Under a variant with its own mask, views are causal only on request.
        self._is_causal_by_default = not (variant.has_mask or variant.causal or variant.window_left >= 0)

    def files(self) -> dict[str, str]:
        """Files of the kernels that an Attention needs from the start, by the kernels' names in csrc/.
        Compiles missing ones. Does not include manifest.LATE_KERNELS. Empty on a CPU without a compiler if
        the variant can be interpreted.

        Raises:
            RuntimeError: a kernel is missing and cannot be compiled, or must not be.
        """
        if not self._kernels:
            return self._library_file()
        names = [name for name in self._kernels if name not in manifest.LATE_KERNELS]
        with ThreadPoolExecutor(len(names)) as pool:
            return dict(zip(names, pool.map(self.file_of, names), strict=True))

    def _library_file(self) -> dict[str, str]:
        ahead = None if Settings.read().jit else self._ahead
        try:
            file = cubins.find_library(
                self.variant, library().current_isa(), self._dtype, self._dims, self._kv_element, ahead
            )
            return {"variant": str(file)}
        except cubins.NoCompilerError as error:
            if not can_be_interpreted(self.variant):
                raise
            warn_once(
                f"attn_backend: variant {self.variant.name} is interpreted, many times slower than compiled: "
                f"{error}",
                subject="interpreter",
            )
        self.is_interpreted = True
        return {}

    def file_of(self, name: str) -> str:
        """The file of one kernel, by the kernel's name in csrc/.

        Raises:
            RuntimeError: it is missing and cannot be compiled, or must not be.
        """
        ahead = None if Settings.read().jit else self._ahead
        return str(cubins.find_variant_kernel(self.variant, self._kernels[name], self._target, ahead))

    def load_if_missing(self, handle: int, error: Exception) -> bool:
        """Loads the kernel of manifest.LATE_KERNELS that a failed run of the Attention with this handle
        lacked. Returns False for any other error; otherwise the caller may retry the run.
        """
        if not isinstance(error, MissingKernelError):
            return False
        library().load_attention_kernel(handle, str(error), self.file_of(str(error)))
        return True

    def visibility(self, view: BSRView, num_levels: int) -> tuple[bool, int]:
        """causal and window_left, after applying the limits of both the view and the variant.

        Raises:
            ValueError: there are several levels, and the variant transforms K or V by the request, reads
                positions that the view does not give, or has another window than the view.
        """
        if num_levels > 1:  # tokens of a non-causal level come before its rows
            if self.variant.tells_requests_apart:
                why = (
                    f"1 under variant {self.variant.name}, whose transforms of K and V depend on the "
                    f"request or on its kv_len"
                )
                refuse("len(composition.levels)", num_levels, why)
            window_left = window_of_level(view, self.variant.window_left, self.variant.name)
            if self.variant.reads_positions and view.kv_offsets is None and view.positions is None:
                reason = (
                    f"variant {self.variant.name} reads positions, and each of several levels has its own"
                )
                raise ValueError(
                    f"kv_offsets and positions are None, must be given, one of them at least: {reason}"
                )
            return (
                self._is_causal_by_default or self.variant.causal
            ) if view.causal is None else view.causal, window_left
        causal = self.variant.causal or (self._is_causal_by_default if view.causal is None else view.causal)
        windows = [window for window in (view.window_left, self.variant.window_left) if window >= 0]
        return causal, min(windows, default=-1)

    def check_scales(
        self, k_scale: CacheScale, v_scale: CacheScale, levels: Sequence[BSRView], is_shared: bool
    ) -> None:
        """Refuses per-request scales if several requests share a transformed token, because transforms see
        scaled values. is_shared: plan looks for prefixes.

        Raises:
            ValueError: a transformed tensor has such scales.
        """
        is_shared = (
            (is_shared and not self.variant.tells_requests_apart)
            or len(levels) > 1
            or levels[0].requests is not None
        )
        for name, scale, transforms in (
            ("K", k_scale, self.variant.has_key),
            ("V", v_scale, self.variant.has_value),
        ):
            if (
                is_shared
                and transforms
                and isinstance(scale, Tensor)
                and scale.ndim == 2
                and scale.shape[0] > 1
            ):
                instead = (
                    "[], [1] or [num_kv_heads], or the Attention made with cascade=False and planned "
                    "with one level without requests"
                )
                refuse(
                    f"kv.{name.lower()}_scale.shape",
                    list(scale.shape),
                    f"{instead}: variant {self.variant.name} transforms {name}",
                )

    def set_args(self, handle: int, args: VariantArgs | None, q: Tensor) -> None:
        """Sets the variant's arguments for the next run. handle: the Attention's.

        Raises:
            ValueError: an argument that the variant refuses, or a mask that differs from the plan's.
        """
        packed = self._pack_if_new(args)
        if self._has_rows or not self._shapes_hold:
            self._check_shapes(args, self._sizes | {"rows": len(q)})
        if packed is not None:
            self._check_mask(args)
            library().set_variant_params(handle, packed)

    def set_plan_args(self, handle: int, args: VariantArgs | None, levels: Sequence[BSRView]) -> bool:
        """Like set_args(), for the next plan, of `levels`.

        Returns whether the plan evaluates the mask, which needs all of the mask's parameters.

        Raises:
            ValueError: an argument that the variant refuses.
        """
        self._planned_mask = None
        if self._has_batch:  # levels with a request per row may name any request
            self._sizes["batch"] = max(
                [view.table.batch_size for view in levels if view.requests is None], default=0
            )
            self._shapes_hold = False
        if args is None and any(param.value is None for param in self.variant.params):
            return False
        packed = self._pack_if_new(args)
        if not self._shapes_hold:
            self._check_shapes(args, self._sizes)
        if packed is not None:
            library().set_variant_params(handle, packed)
        if self.variant.has_mask:
            self._planned_mask = self._of_mask(args or {})
        return self.variant.has_mask

    def _check_shapes(self, args: VariantArgs | None, sizes: Mapping[str, int]) -> None:
        """Checks that tensors are at least as long as the variant declares.

        Raises:
            ValueError: a tensor is shorter.
        """
        try:
            check_shapes(self.variant.params, args or {}, sizes)
        except ValueError:
            self._last_args = None
            raise
        self._shapes_hold = True

    def _check_mask(self, args: VariantArgs | None) -> None:
        """Refuses a run whose mask differs from the plan's, because KV tiles that the plan's mask hides are
        skipped.

        Raises:
            ValueError: a parameter of the mask is another tensor, or another number.
        """
        if self._planned_mask is None:
            return
        for (name, planned), given in zip(
            self._planned_mask.items(), self._of_mask(args or {}).values(), strict=True
        ):
            if given != planned:
                self._last_args = None
                raise ValueError(
                    f"variant_args[{name!r}] is not what plan() was given, must be the same: the plan "
                    f"leaves out what the mask hides"
                )

    def _of_mask(self, args: VariantArgs) -> dict[str, object]:
        values = {name: args[name] for name in self.variant.mask_params}
        return {
            name: (value.data_ptr(), value.shape, value.stride()) if isinstance(value, Tensor) else value
            for name, value in values.items()
        }

    def _pack_if_new(self, args: VariantArgs | None) -> bytes | None:
        """The bytes of the variant's Params. None if the arguments equal the last call's: the same tensors at
        the same addresses, and equal numbers.

        Raises:
            ValueError: an argument that the variant refuses.
        """
        args = {} if args is None else args
        if self._last_args is not None and self._are_last_args(args):
            return None
        self._last_args, self._shapes_hold = None, False
        packed = self.variant.pack(args, self._device)
        self._last_args = dict(args)
        self._addresses = [value.data_ptr() for value in args.values() if isinstance(value, Tensor)]
        return packed

    def _are_last_args(self, args: VariantArgs) -> bool:
        last = self._last_args
        if last is None or len(last) != len(args):
            return False
        addresses = iter(self._addresses)
        for (name, value), (last_name, last_value) in zip(args.items(), last.items(), strict=True):
            if name != last_name:
                return False
            if isinstance(value, Tensor):
                if value is not last_value or value.data_ptr() != next(addresses):
                    return False
            elif isinstance(last_value, Tensor) or type(value) is not type(last_value) or value != last_value:
                return False
        return True

    def interpret(self, levels: Sequence[BSRView], **of_run: Any) -> None:
        """Runs attention in torch. of_run: arguments of interpreter.interpret(), already checked."""
        interpret(
            self.variant,
            args=self._last_args or {},
            levels=levels,
            visibilities=[self.visibility(view, len(levels)) for view in levels],
            rotation=self._rotation,
            **of_run,
        )

    def _ahead(self) -> str:
        """The command that compiles the variant ahead of time, for messages."""
        place, note = place_of(self._given)
        on_gpu = self._target != "cpu"
        options = manifest.cache_options(
            self._kv_element,
            self._float8_q and on_gpu,
            self._float8_out and on_gpu,
            self._rotation and on_gpu,
        )
        of_kernel = (
            f"--dtype {self._dtype} --head-dim {self._dims}{options} --arch {self._target}{self._options}"
        )
        return f"`attn-backend compile --variant {place} {of_kernel}` compiles it ahead{note}"
