"""The variant of an Attention: which files its kernels are in, the interval that it lets plan know, the
arguments of its functions.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ..metadata import BSRView, KVCache
from ..metadata.kv_cache import Scale
from ..metadata.structure import dtype_name, refuse
from ..settings import Settings
from ..variants.params import check_shapes
from . import cpp_compiler, interpreted_variant, manifest, variant_kernels
from .attention_config import kv_element_of
from .errors import MissingKernelError
from .head_dims import HeadDims
from .level_options import window_of_level
from .library import library
from .variant_place import place_of

if TYPE_CHECKING:
    from ..variants import Variant

VariantArgs = Mapping[str, Tensor | float | int]


class AttentionVariant:
    """A variant in an Attention, of one dtype and one width of heads. design: None on a CPU. sinks: whether
    runs may be given sinks. kv_dtype: of the cache; None: dtype. float8_q: Q has kv_dtype, too. float8_out:
    whether outputs may be of 8 bits. max_levels: of a composition. num_heads: query and KV heads, if they are
    known.

    Raises:
        ValueError: it has no softmax, and sinks are given; or its transforms do not fit head_dim; or kv_dtype
            is torch.uint8; or a tensor that is bound is shorter than the heads.
    """

    def __init__(
        self,
        variant: Variant,
        design: manifest.Design | None,
        dtype: torch.dtype,
        head_dim: int | HeadDims,
        device: torch.device,
        sinks: bool = False,
        kv_dtype: torch.dtype | None = None,
        float8_q: bool = False,
        float8_out: bool = False,
        max_levels: int = 1,
        num_heads: tuple[int, int] = (0, 0),
    ) -> None:
        if kv_dtype == torch.uint8:
            refuse("variant", variant, "None with kv_dtype = torch.uint8")
        if sinks and not variant.uses_softmax:
            refuse("sinks", sinks, f"False under variant {variant.name}, which does not use softmax")
        dims = HeadDims.of(head_dim)
        variant.check_head_dim(*dims)
        # of variants.params.SIZES: "batch" comes with each plan, "rows" with each run; they are looked at
        # only if the variant has tensors for them
        self._sizes = dict(zip(("num_qo_heads", "num_kv_heads"), num_heads, strict=True))
        check_shapes(variant.params, {}, self._sizes)
        self._has_batch, self._has_rows = (
            any(size in (param.shape or ()) for param in variant.params) for size in ("batch", "rows")
        )
        self._shapes_hold = False  # of the last arguments, for the last plan
        self._kv_element = kv_element_of(kv_dtype, dtype)
        self._float8_q, self._float8_out = float8_q, float8_out
        self._given = variant
        self.variant = variant = variant if max_levels == 1 else variant.across_levels()
        self._dtype = dtype_name(dtype)
        self._dims = dims
        self._device = device
        self._kernels: dict[str, manifest.Kernel] = {}
        self._target, self._options = "cpu", ""
        if design is not None and device.type == "cuda":
            self._target = variant_kernels.target_of(torch.cuda.get_device_capability(device))
            arch = variant_kernels.arch_of(self._target)
            if design is not manifest.default_design(arch, dims, variant.has_transforms):
                self._options = (
                    f" --kernel {next(name for name, known in manifest.DESIGNS.items() if known is design)}"
                )
            shape = manifest.KernelShape(
                manifest.ELEMENT_NAMES[self._dtype], dims, self._kv_element, float8_q, float8_out
            )
            self._kernels = manifest.variant_kernels(arch, design, shape, variant, sinks)
            self._options += " --sinks" if sinks else ""
        self._options += " --levels" if variant is not self._given else ""
        self.is_interpreted = False  # files() finds out
        self._bound: dict[str, Tensor | float | int] | None = None
        self._addresses: list[int] = []
        self._planned_mask: dict[str, object] | None = None
        # Under a variant with a mask of its own, a view is causal only if it says so.
        self._is_causal_by_default = not (variant.has_mask or variant.causal or variant.window_left >= 0)

    def files(self) -> dict[str, str]:
        """Files of the kernels that an Attention needs from the start, by the kernels' names in csrc/;
        compiled now if they are missing. Those of manifest.LATE_KERNELS are not among them. Empty on a CPU
        without a compiler if the variant can be interpreted.

        Raises:
            RuntimeError: one is missing and cannot be compiled, or must not be.
        """
        if not self._kernels:
            return self._library_file()
        names = [name for name in self._kernels if name not in manifest.LATE_KERNELS]
        with ThreadPoolExecutor(len(names)) as pool:
            return dict(zip(names, pool.map(self.file_of, names), strict=True))

    def _library_file(self) -> dict[str, str]:
        isa, jit = library().current_isa(), Settings.read().jit
        try:
            of_products = manifest.multiplied_dtype(self._dtype, self._kv_element)
            widens = self._kv_element in manifest.CUDA_KV_ELEMENTS
            return {
                "variant": str(
                    variant_kernels.find_library(
                        self.variant, isa, of_products, self._dims, widens, None if jit else self._ahead
                    )
                )
            }
        except RuntimeError as error:
            if (
                not jit
                or cpp_compiler.compiler() is not None
                or not interpreted_variant.is_possible(self.variant)
            ):
                raise
            interpreted_variant.warn_once(self.variant, str(error))
        self.is_interpreted = True
        return {}

    def file_of(self, name: str) -> str:
        """The file of one kernel, by its name in csrc/.

        Raises:
            RuntimeError: it is missing and cannot be compiled, or must not be.
        """
        ahead = None if Settings.read().jit else self._ahead
        return str(variant_kernels.find_cubin(self.variant, self._kernels[name], self._target, ahead))

    def loads_missing_kernel(self, handle: int, error: Exception) -> bool:
        """Whether a run of the Attention with this handle has failed for want of one of
        manifest.LATE_KERNELS. It is loaded now: the run may be tried again.
        """
        if not isinstance(error, MissingKernelError):
            return False
        library().load_attention_kernel(handle, str(error), self.file_of(str(error)))
        return True

    def visibility(self, view: BSRView, num_levels: int) -> tuple[bool, int]:
        """causal and window_left of what a view and the variant both let through.

        Raises:
            ValueError: there are several levels, and the variant transforms K or V by the request, or reads
                positions that this one does not give, or has another window than the view's.
        """
        if num_levels > 1:  # a level that is not causal says that its tokens come before its rows
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

    def check_scales(self, kv: KVCache, levels: Sequence[BSRView], is_shared: bool) -> None:
        """Refuses scales of requests where a transform sees a token for several: it sees numbers times their
        scale. is_shared: plan looks for prefixes.

        Raises:
            ValueError: such scales of a tensor that the variant transforms.
        """
        is_shared = (
            (is_shared and not self.variant.tells_requests_apart)
            or len(levels) > 1
            or levels[0].requests is not None
        )
        for name, scale, transforms in (
            ("K", kv.k_scale, self.variant.has_key),
            ("V", kv.v_scale, self.variant.has_value),
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

    def bind(self, handle: int, args: VariantArgs | None, q: Tensor) -> None:
        """Gives the library the arguments of the run that follows. handle: of the Attention.

        Raises:
            ValueError: an argument that the variant refuses, or another mask than the plan's.
        """
        packed = self._pack_if_new(args)
        if self._has_rows or not self._shapes_hold:
            self._check_shapes(args, self._sizes | {"rows": len(q)})
        if packed is not None:
            self._check_mask(args)
            library().set_variant_params(handle, packed)

    def bind_to_plan(self, handle: int, args: VariantArgs | None, levels: Sequence[BSRView]) -> bool:
        """As bind(), for the plan of `levels` that follows.

        Returns whether that asks the mask what each row sees: all of its parameters must then be known.

        Raises:
            ValueError: an argument that the variant refuses.
        """
        self._planned_mask = None
        if self._has_batch:  # not of levels that say the request of each row: they may say any
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
        """Refuses tensors that are shorter than the variant declares.

        Raises:
            ValueError: such a tensor.
        """
        try:
            check_shapes(self.variant.params, args or {}, sizes)
        except ValueError:
            self._bound = None
            raise
        self._shapes_hold = True

    def _check_mask(self, args: VariantArgs | None) -> None:
        """Refuses a run with another mask than the plan's: it would not see the KV tiles that the plan's mask
        hides.

        Raises:
            ValueError: a parameter of the mask is another tensor, or another number.
        """
        if self._planned_mask is None:
            return
        for (name, planned), given in zip(
            self._planned_mask.items(), self._of_mask(args or {}).values(), strict=True
        ):
            if given != planned:
                self._bound = None
                raise ValueError(
                    f"variant_args[{name!r}] is not what plan() was given, must be: what a mask hides is "
                    f"left out of the plan"
                )

    def _of_mask(self, args: VariantArgs) -> dict[str, object]:
        values = {name: args[name] for name in self.variant.mask_params}
        return {
            name: (value.data_ptr(), value.shape, value.stride()) if isinstance(value, Tensor) else value
            for name, value in values.items()
        }

    def _pack_if_new(self, args: VariantArgs | None) -> bytes | None:
        """The bytes of the variant's Params; None if the arguments are those of the last call: the same
        tensors, where they were, and equal numbers.

        Raises:
            ValueError: an argument that the variant refuses.
        """
        args = {} if args is None else args
        if self._bound is not None and self._is_bound(args):
            return None
        self._bound, self._shapes_hold = None, False
        packed = self.variant.pack(args, self._device)
        self._bound = dict(args)
        self._addresses = [value.data_ptr() for value in args.values() if isinstance(value, Tensor)]
        return packed

    def _is_bound(self, args: VariantArgs) -> bool:
        bound = self._bound
        if bound is None or len(bound) != len(args):
            return False
        addresses = iter(self._addresses)
        for (name, value), (bound_name, bound_value) in zip(args.items(), bound.items(), strict=True):
            if name != bound_name:
                return False
            if isinstance(value, Tensor):
                if value is not bound_value or value.data_ptr() != next(addresses):
                    return False
            elif (
                isinstance(bound_value, Tensor)
                or type(value) is not type(bound_value)
                or value != bound_value
            ):
                return False
        return True

    def interpret(
        self,
        levels: Sequence[BSRView],
        q: Tensor,
        kv: KVCache,
        out: Tensor,
        lse: Tensor | None,
        sm_scale: float,
        sinks: Tensor | None,
        q_scale: Scale,
        out_scale: Scale,
    ) -> None:
        """A run by torch, whose arguments have been checked."""
        visibilities = [self.visibility(view, len(levels)) for view in levels]
        interpreted_variant.run(
            self.variant,
            self._bound or {},
            levels,
            visibilities,
            q,
            kv,
            out,
            lse,
            sm_scale,
            sinks,
            q_scale,
            out_scale,
        )

    def _ahead(self) -> str:
        """What compiles the variant ahead, for messages."""
        place, note = place_of(self._given)
        on_gpu = self._target != "cpu"
        options = manifest.float8_options(
            self._kv_element, self._float8_q and on_gpu, self._float8_out and on_gpu
        )
        of_kernel = (
            f"--dtype {self._dtype} --head-dim {self._dims}{options} --arch {self._target}{self._options}"
        )
        return f"`attn-backend compile --variant {place} {of_kernel}` compiles it ahead{note}"
