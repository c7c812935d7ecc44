"""The variant of an Attention: its kernel files, the interval that plan uses, and the arguments of its
functions.
"""

from __future__ import annotations

import ast
import inspect
import logging
import sys
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from ..jit import compilers, cubins, manifest
from ..jit.manifest import HeadDims
from ..metadata import BSRView, KVCache, PageTable
from ..metadata.kv_cache import Scale
from ..metadata.views import check_page_ids
from ..settings import Settings
from ..validation import dtype_name, refuse
from ..variants import Variant, builtin
from ..variants.params import check_shapes
from .native import MissingKernelError, kv_element_of, library


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


logger = logging.getLogger("attn_backend")

_TILE_ROWS = 256
_TILE_TOKENS = 1024
_warned: list[str] = []


def can_be_interpreted(variant: Variant) -> bool:
    """Whether Python functions, traced or built-in, define the whole variant."""
    return variant.reference() is not None and not variant.has_output


def warn_of_interpreter(variant: Variant, reason: str) -> None:
    """Warns once per process."""
    if not _warned:
        _warned.append(variant.name)
        logger.warning(
            "attn_backend: variant %s is interpreted, many times slower than compiled: %s",
            variant.name,
            reason,
        )


@dataclass(frozen=True)
class Pairs:
    """Rows of one request, with all of its tokens in one level."""

    request: int  # index in the view
    rows: Tensor  # int64 [rows], rows of Q
    # int64 [rows], positions among the level's tokens of the request, for causal and window_left
    places: Tensor
    positions: Tensor  # int64 [rows], given to the variant
    indices: Tensor  # int64 [rows], among the rows of the request
    requests: Tensor  # int64 [rows]
    slots: Tensor  # int64 [tokens]
    kv_offset: int
    kv_len: int  # given to the variant


def interpret(
    variant: Variant,
    args: Mapping[str, Any],
    levels: Sequence[BSRView],
    visibilities: Sequence[tuple[bool, int]],
    q: Tensor,
    kv: KVCache,
    out: Tensor,
    lse: Tensor | None,
    sm_scale: float,
    sinks: Tensor | None,
    q_scale: Scale,
    out_scale: Scale,
) -> None:
    """Attention.run() in torch. All arguments are checked, except page ids. visibilities: causal and
    window_left of each level. If the variant transforms rows, their scales are applied before the transform.
    Other scales multiply the scores before the variant sees them, or the sums of values.

    Raises:
        ValueError: a page id beyond the cache, or levels that lack something the variant's functions need.
    """
    levels = [view.with_slots_counted() for view in levels]
    for view in levels:
        check_page_ids(view, kv.num_pages)
    states = _States(out, variant.uses_softmax)
    functions = variant.reference()
    assert functions is not None
    # (scales of transformed rows, scales of other rows)
    k_scales = (kv.k_scale, None) if variant.has_key else (None, kv.k_scale)
    v_scales = (kv.v_scale, None) if variant.has_value else (None, kv.v_scale)
    q_scales = (q_scale, None) if variant.has_query else (None, q_scale)
    heads, kv_heads = torch.arange(q.shape[1])[:, None, None], torch.arange(kv.num_kv_heads)[None, :]
    for view, (causal, window_left) in zip(levels, visibilities, strict=True):
        if len(levels) > 1 and variant.causal and not causal and view.positions is None:
            refuse(
                "positions",
                None,
                f"given in levels that are not causal: variant {variant.name}, which is interpreted, hides "
                f"what comes after a row",
            )
        for pairs in _pairs_of(view, q.shape[0]):
            row_tiles = torch.arange(pairs.rows.numel()).split(_TILE_ROWS)
            for tokens in torch.arange(pairs.slots.numel()).split(_TILE_TOKENS):
                page, place = pairs.slots[tokens] // kv.page_size, pairs.slots[tokens] % kv.page_size
                token, kv_len = pairs.kv_offset + tokens, torch.tensor(pairs.kv_len)
                of_tokens = (torch.tensor(pairs.request), kv_heads, token[:, None], args)
                k_scale, v_scale = (
                    _of_heads(scales[0], of_tokens[0][None], kv.num_kv_heads)[0, :, None]
                    for scales in (k_scales, v_scales)
                )
                k = functions.key(kv.k[page, place].double() * k_scale, *of_tokens, kv_len=kv_len)
                v = functions.value(kv.v[page, place].double() * v_scale, *of_tokens, kv_len=kv_len)
                token = token[None, None, :]
                for tile in row_tiles:
                    rows, position = pairs.rows[tile], pairs.positions[tile][None, :, None]
                    request, index = pairs.requests[tile][None, :, None], pairs.indices[tile][None, :, None]
                    of_rows = (request[0], heads[:, 0, 0], position[0], args)
                    of_rows_scales = (*q_scales, k_scales[1], v_scales[1])
                    own_q, of_q, of_k, of_v = (
                        _of_heads(scale, pairs.requests[tile], kv.num_kv_heads) for scale in of_rows_scales
                    )
                    own_q = own_q.repeat_interleave(q.shape[1] // kv.num_kv_heads, 1)[:, :, None]
                    queries = functions.query(
                        q[rows].double() * own_q, *of_rows, row=rows[:, None], kv_len=kv_len
                    )
                    products = (
                        _scores(queries, k)
                        * sm_scale
                        * (of_k * of_q).repeat_interleave(q.shape[1] // kv.num_kv_heads, 1).T[:, :, None]
                    )
                    scores = functions.logits(products, request, heads, position, token, args)
                    distance = pairs.places[tile][:, None] - tokens[None, :]
                    seen = functions.mask(request, heads, position, token, args, index=index, kv_len=kv_len)
                    seen = (
                        seen
                        & ((distance >= 0) | (not causal))
                        & ((distance <= window_left) | (window_left < 0))
                    )
                    states.add(rows, scores, seen, v, of_v)
    states.finish(out, lse, sinks, out_scale)


def _of_heads(scale: Scale, requests: Tensor, num_kv_heads: int) -> Tensor:
    """[rows, KV heads]: the scale for rows of these requests; requests out of range are clamped."""
    scale = torch.as_tensor(1.0 if scale is None else scale, dtype=torch.float64)
    of_rows = scale[requests.clamp(0, scale.shape[0] - 1)] if scale.ndim == 2 else scale
    return of_rows.expand(requests.numel(), num_kv_heads)


def _scores(q: Tensor, k: Tensor) -> Tensor:
    """[heads, rows, tokens] from q [rows, heads, head_dim] and k [tokens, KV heads, head_dim]."""
    rows, heads, head_dim = q.shape
    grouped = q.reshape(rows, k.shape[1], -1, head_dim)
    return torch.einsum("rkgd,tkd->kgrt", grouped, k).reshape(heads, rows, k.shape[0])


class _States:
    """Attention states of all rows of Q, in float64. Tiles are added in any order, by online softmax, or as
    sums without softmax.
    """

    def __init__(self, out: Tensor, uses_softmax: bool) -> None:
        rows, heads, head_dim_v = out.shape
        self._uses_softmax = uses_softmax
        self._is_planned = torch.zeros(rows, dtype=torch.bool)
        self._peak = torch.full((rows, heads), -torch.inf, dtype=torch.float64)
        self._sum = torch.zeros(rows, heads, dtype=torch.float64)
        self._o = torch.zeros(rows, heads, head_dim_v, dtype=torch.float64)

    def add(self, rows: Tensor, scores: Tensor, seen: Tensor, v: Tensor, v_scale: Tensor) -> None:
        """scores, seen: [heads, rows, tokens]; v: [tokens, KV heads, head_dim]; v_scale: [rows, KV heads]."""
        self._is_planned[rows] = True
        if not v.shape[0]:
            return
        weights = scores.masked_fill(~seen, -torch.inf if self._uses_softmax else 0.0).transpose(0, 1)
        if self._uses_softmax:
            before = self._peak[rows]
            peak = torch.maximum(before, weights.amax(dim=-1))
            base = peak.masked_fill(peak == -torch.inf, 0.0)
            weights, rescale = torch.exp(weights - base[..., None]), torch.exp(before - base)
            self._peak[rows] = peak
            self._sum[rows] = self._sum[rows] * rescale + weights.sum(dim=-1)
            self._o[rows] *= rescale[..., None]
        grouped = weights.unflatten(1, (v.shape[1], -1)) * v_scale[:, :, None, None]
        self._o[rows] += torch.einsum("rkgt,tkd->rkgd", grouped, v).flatten(1, 2)

    def finish(self, out: Tensor, lse: Tensor | None, sinks: Tensor | None, out_scale: Scale) -> None:
        """Writes the rows that the plan covers."""
        rows, o, peak, total = self._is_planned, self._o, self._peak, self._sum
        if self._uses_softmax:
            if sinks is not None:
                sinks = sinks.double()
                with_sink = torch.maximum(peak, sinks)
                rescale = torch.exp(peak - with_sink)
                peak, o, total = (
                    with_sink,
                    o * rescale[..., None],
                    total * rescale + torch.exp(sinks - with_sink),
                )
            o = o / total.masked_fill(total == 0, 1.0)[..., None]
        if out_scale is not None:
            limit = torch.finfo(out.dtype).max
            o = (o / out_scale).clamp(-limit, limit).float()  # rounded once, as in kernels
        out[rows] = o[rows].to(out.dtype)
        if lse is not None:
            lse[rows] = (peak + torch.log(total))[rows].float()


def _pairs_of(view: BSRView, num_rows: int) -> Iterator[Pairs]:
    """One Pairs for each request that has rows; num_rows: rows of Q."""
    for request in range(view.batch_size):
        begin, end = (int(view.qo_indptr[i]) for i in (request, request + 1))
        indices = torch.arange(end - begin)
        rows = torch.arange(begin, end) if view.rows is None else view.rows[begin:end].long()
        is_there = rows < num_rows
        rows, indices = rows[is_there], indices[is_there]
        if not rows.numel():
            continue
        slots = _slots_of(view.table, request)
        places = slots.numel() - (end - begin) + indices
        kv_offset = 0 if view.kv_offsets is None else int(view.kv_offsets[request])
        yield Pairs(
            request,
            rows,
            places,
            kv_offset + places if view.positions is None else view.positions[rows].long(),
            indices,
            torch.full_like(rows, request) if view.requests is None else view.requests[rows].long(),
            slots,
            kv_offset,
            kv_offset + slots.numel(),
        )


def _slots_of(table: PageTable, request: int) -> Tensor:
    """int64 [tokens]: page * page_size + offset in the page, for each token of a request."""
    if table.indptr is not None:
        begin, end = (int(table.indptr[i]) for i in (request, request + 1))
        if table.indices is None:
            return torch.arange(begin, end)
        pages = table.indices[begin:end]
        if table.last_page_len is None:
            assert table.kv_lens is not None
            kv_len = int(table.kv_lens[request])
            pages = pages[: -(-kv_len // table.page_size)]
        else:
            kv_len = (
                (end - begin - 1) * table.page_size + int(table.last_page_len[request]) if end > begin else 0
            )
    else:
        assert table.indices is not None
        assert table.kv_lens is not None
        kv_len = int(table.kv_lens[request])
        row = table.indices[request if table.rows is None else int(table.rows[request])]
        pages = (
            row[: kv_len : table.page_size] // table.page_size
            if table.rows is not None
            else row[: -(-kv_len // table.page_size)]
        )
    return (pages.long()[:, None] * table.page_size + torch.arange(table.page_size)).flatten()[:kv_len]


VariantArgs = Mapping[str, Tensor | float | int]


class AttentionVariant:
    """A variant in an Attention of one dtype and one head width. design: None on a CPU. sinks: whether runs
    may be given sinks. kv_dtype: of the cache; None: dtype. float8_q: Q also has kv_dtype. float8_out:
    whether outputs may be 8-bit. max_levels: of a composition. num_heads: query and KV heads, if known.

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
        # variants.params.SIZES: each plan sets "batch", each run sets "rows". Only checked if the variant has
        # tensors of these sizes.
        self._sizes = dict(zip(("num_qo_heads", "num_kv_heads"), num_heads, strict=True))
        check_shapes(variant.params, {}, self._sizes)
        self._has_batch, self._has_rows = (
            any(size in (param.shape or ()) for param in variant.params) for size in ("batch", "rows")
        )
        self._shapes_hold = False  # whether the last arguments fit the last plan
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
            self._target = cubins.target_of(torch.cuda.get_device_capability(device))
            arch = cubins.arch_of_target(self._target)
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
        self.is_interpreted = False  # files() may set it
        self._bound: dict[str, Tensor | float | int] | None = None
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
        isa, jit = library().current_isa(), Settings.read().jit
        try:
            of_products = manifest.multiplied_dtype(self._dtype, self._kv_element)
            widens = self._kv_element in manifest.CUDA_KV_ELEMENTS
            return {
                "variant": str(
                    cubins.find_library(
                        self.variant, isa, of_products, self._dims, widens, None if jit else self._ahead
                    )
                )
            }
        except RuntimeError as error:
            if not jit or compilers.cpp_compiler() is not None or not can_be_interpreted(self.variant):
                raise
            warn_of_interpreter(self.variant, str(error))
        self.is_interpreted = True
        return {}

    def file_of(self, name: str) -> str:
        """The file of one kernel, by the kernel's name in csrc/.

        Raises:
            RuntimeError: it is missing and cannot be compiled, or must not be.
        """
        ahead = None if Settings.read().jit else self._ahead
        return str(cubins.find_cubin(self.variant, self._kernels[name], self._target, ahead))

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
        self, k_scale: Scale, v_scale: Scale, levels: Sequence[BSRView], is_shared: bool
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

    def bind(self, handle: int, args: VariantArgs | None, q: Tensor) -> None:
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

    def bind_to_plan(self, handle: int, args: VariantArgs | None, levels: Sequence[BSRView]) -> bool:
        """Like bind(), for the next plan, of `levels`.

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
            self._bound = None
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
                self._bound = None
                raise ValueError(
                    f"variant_args[{name!r}] is not what plan() was given, must be: the plan leaves "
                    f"out what the mask hides"
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
        """Runs attention in torch. The arguments are already checked."""
        visibilities = [self.visibility(view, len(levels)) for view in levels]
        interpret(
            self.variant,
            args=self._bound or {},
            levels=levels,
            visibilities=visibilities,
            q=q,
            kv=kv,
            out=out,
            lse=lse,
            sm_scale=sm_scale,
            sinks=sinks,
            q_scale=q_scale,
            out_scale=out_scale,
        )

    def _ahead(self) -> str:
        """The command that compiles the variant ahead of time, for messages."""
        place, note = place_of(self._given)
        on_gpu = self._target != "cpu"
        options = manifest.float8_options(
            self._kv_element, self._float8_q and on_gpu, self._float8_out and on_gpu
        )
        of_kernel = (
            f"--dtype {self._dtype} --head-dim {self._dims}{options} --arch {self._target}{self._options}"
        )
        return f"`attn-backend compile --variant {place} {of_kernel}` compiles it ahead{note}"
