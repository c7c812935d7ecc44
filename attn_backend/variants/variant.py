"""Variants of attention: Python functions or C++, with parameters, compiled into every kernel as one C++
struct. attn_backend/kernels/variant.py describes the way from here to a compiled kernel.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NoReturn

import torch
from torch import Tensor

from ..validation import check_int, check_types, describe, refuse, require
from .cpp import (
    HOOKS,
    TRANSFORMS,
    Body,
    PairLayout,
    body_from_expressions,
    body_from_source,
    has_bias_slope,
    pairs_of,
    whole_source,
)
from .params import MAX_BYTES, Layout, Param, check_value, params_from
from .reference import Reference, ReferenceFunctions
from .tracing import MASK_MOD, SCORE_MOD, Bound, TracingError, error_at_definition, trace

_MAX_NAME = 40
# The functions of builtin.py that make a variant, by name. builtin.py fills it.
BUILTINS: dict[str, Callable[..., Variant]] = {}


class Variant:
    """The difference between an attention and softmax(Q K^T * sm_scale) V. Immutable.

    Made by `from_functions`, `from_source`, `builtin` or `combine` (`a & b`).

    Attributes:
        name: short, of [a-z0-9_]; for messages and file names.
        source: the C++ that is compiled: defines attn::UserVariant.
        params: the parameters, in the order of the C++ struct; parameters whose `value` is None are given to
            every run.
        uses_softmax: whether logits go through a softmax; otherwise they are the weights.
        has_logits: whether it has this hook; the same for has_output, has_query, has_key, has_value.
        has_transforms: whether any of has_query, has_key and has_value is true.
        has_bias_slope: whether it has this hook; only if nothing else changes the logits.
        has_mask: whether it has a mask() or a range().
        has_range: whether it has a range().
        mask_params: names of a run's parameters that the mask may read.
        reads_positions: whether hooks may depend on the positions of rows and tokens in their requests.
        skips_kv_tiles: whether plans look for holes in the mask, and kernels skip KV tiles in which no row of
            a row tile sees anything.
        tells_requests_apart: whether a transform of K or V may differ between requests for the same token at
            the same position. Plans then do not look for shared prefixes.
        causal: with window_left, an interval that contains all tokens that the mask lets through. It is
            part of the variant: the mask hook leaves out terms of a mask_mod that the interval fully covers.
        window_left: most tokens before the query that it sees, in addition to itself; -1: no limit.
        params_bytes: sizeof(UserVariant::Params).
        user_sources: the user's C++, by the file name that compilers report for it.
    """

    name: str
    source: str
    params: tuple[Param, ...]
    uses_softmax: bool
    has_logits: bool
    has_bias_slope: bool
    has_mask: bool
    has_range: bool
    has_output: bool
    mask_params: tuple[str, ...]
    reads_positions: bool
    has_query: bool
    has_key: bool
    has_value: bool
    has_transforms: bool
    tells_requests_apart: bool
    skips_kv_tiles: bool
    causal: bool
    window_left: int
    params_bytes: int
    user_sources: Mapping[str, str]
    _bodies: tuple[Body, ...]
    _references: tuple[Reference | None, ...]
    _layout: Layout
    _given: tuple[str, ...]  # names of parameters given to each run
    _on_device: dict[tuple[int, torch.device], Tensor]  # bound tensors by their index in params

    def __init__(
        self,
        parts: Sequence[Variant] = (),
        *,
        body: Body | None = None,
        causal: bool = False,
        window_left: int = -1,
        reference: Reference | None = None,
        name: str | None = None,
        cpp: str | None = None,
    ) -> None:
        """Made from one body, or from several variants. Users call the class methods."""
        bodies = (body,) if body is not None else tuple(body for part in parts for body in part._bodies)
        references = (
            (reference,)
            if body is not None
            else tuple(reference for part in parts for reference in part._references)
        )
        fields: dict[str, Any] = {
            "_bodies": bodies,
            "_references": references,
            "causal": causal,
            "window_left": window_left,
        }
        fields["name"] = _clean(name if name is not None else "_and_".join(body.name for body in bodies))
        fields["uses_softmax"] = all(body.uses_softmax for body in bodies)
        # has_mask and has_bias_slope mean more than the hook, and are set below
        for hook_name in HOOKS:
            fields[f"has_{hook_name}"] = any(hook_name in body.hooks for body in bodies)
        fields["has_transforms"] = any(fields[f"has_{hook_name}"] for hook_name in TRANSFORMS)
        fields["has_mask"] = any(body.hides for body in bodies)
        fields["has_bias_slope"] = has_bias_slope(bodies)
        for flag in ("reads_positions", "skips_kv_tiles", "tells_requests_apart"):
            fields[flag] = any(getattr(body, flag) for body in bodies)
        layout = Layout([body.params for body in bodies])
        if layout.bytes > MAX_BYTES:
            raise ValueError(
                f"the parameters of variant {fields['name']} take {layout.bytes} bytes, must be at most "
                f"{MAX_BYTES}: put numbers into a tensor"
            )
        fields.update(_layout=layout, params=layout.params, params_bytes=layout.bytes, _on_device={})
        fields["_given"] = tuple(param.name for param in layout.params if param.value is None)
        fields["mask_params"] = tuple(
            name for body in bodies for name in body.mask_params if name in fields["_given"]
        )
        for param in layout.params:
            if fields["_given"].count(param.name) > 1:
                raise ValueError(
                    f"variants that are combined both have a parameter {param.name!r}, must have different "
                    f"names"
                )
        fields["source"] = whole_source(bodies, layout.bytes)
        fields["user_sources"] = {k: v for part in parts for k, v in part.user_sources.items()} | (
            {} if cpp is None else {f"<variant {fields['name']}>": cpp}
        )
        self.__dict__.update(fields)

    def __setattr__(self, name: str, value: object) -> NoReturn:
        raise AttributeError(f"{name}: a Variant cannot be changed; must be made anew")

    __delattr__ = __setattr__  # type: ignore[assignment]

    def __copy__(self) -> Variant:
        """Returns itself, as it is immutable."""
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> Variant:
        return self

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            f"variant {self.name} cannot be pickled: it holds functions and addresses of tensors; make it "
            f"again in the process that needs it"
        )

    def __repr__(self) -> str:
        interval = [
            *(["causal"] if self.causal else []),
            *([f"window_left={self.window_left}"] if self.window_left >= 0 else []),
        ]
        hooks = [name for name in HOOKS if getattr(self, f"has_{name}")]
        params = [f"{param.name}: {param.describe()}" for param in self.params if param.value is None]
        softmax = [] if self.uses_softmax else ["no softmax"]
        does = ", ".join([*interval, *hooks, *softmax, *params])
        return f"<Variant {self.name}: {does or 'plain attention'}>"

    @classmethod
    def from_functions(
        cls,
        score_mod: Callable[..., Any] | None = None,
        mask_mod: Callable[..., Any] | None = None,
        *,
        tensors: Mapping[str, Any] | Sequence[Param] = {},
        name: str | None = None,
    ) -> Variant:
        """Traces functions in flex_attention's signatures.

        b is the request's index in the batch, h the query head. q_idx and kv_idx are positions in a request:
        query i of n has position kv_len - n + i. All are int32. score is q . k * sm_scale, in float32.
        Functions are traced once, here. They may use arithmetic, comparisons, & | ^ ~, //, % (rounded down),
        torch.where, minimum, maximum, clamp, exp, exp2, log, log2, tanh, sigmoid, sqrt, abs, floor, ceil,
        casts, and tensors indexed by integers.

        Args:
            score_mod: (score, b, h, q_idx, kv_idx) -> score.
            mask_mod: (b, h, q_idx, kv_idx) -> whether the query attends to the token.
            tensors: free variables of the functions that are given to each run. Params, or {name: dtype,
                (dtype, ndim) or (dtype, shape)}, by default of one dimension; `float` or `int`: a number.
                The variables need not exist. Other tensors that the functions use are bound: kernels read
                their elements when they run (on another device, from a copy made once). Numbers and CPU
                tensors without dimensions become constants.
            name: default: from the functions' names.

        Raises:
            TracingError: a ValueError that names what cannot be traced, with the file, the line and the
                source line.
            ValueError: a wrong argument.
        """
        if score_mod is None and mask_mod is None:
            raise ValueError("score_mod and mask_mod are None, must be a function, one of them at least")
        declared = params_from(tensors, "tensors")
        bound: Bound = {}
        traced = {
            what: trace(what, function, arguments, declared, bound)
            for what, function, arguments in (
                ("score_mod", score_mod, SCORE_MOD),
                ("mask_mod", mask_mod, MASK_MOD),
            )
            if function is not None
        }
        for param in declared:
            if not any(param.name in one.used for one in traced.values()):
                raise error_at_definition(
                    next(filter(None, (score_mod, mask_mod))),
                    f"tensors[{param.name!r}] is not a free variable of the functions, must be one",
                )
        params = {param.name: param for param in (*declared, *(param for _, param in bound.values()))}
        functions = [function for function in (score_mod, mask_mod) if function is not None]
        name = _clean(name if name is not None else "_".join(map(_name_of, functions)))
        results = {what: one.result for what, one in traced.items()}
        body, visibility = body_from_expressions(
            name, results.get("score_mod"), results.get("mask_mod"), params
        )
        return cls(
            body=body,
            causal=visibility.causal,
            window_left=visibility.window_left,
            reference=Reference(score_mod, mask_mod, declared),
        )

    @classmethod
    def from_source(
        cls,
        cpp: str,
        params: Mapping[str, Any] | Sequence[Param] = (),
        *,
        name: str,
        causal: bool = False,
        window_left: int = -1,
        pair_distance: int | None = None,
        pair_columns: int | None = None,
        skips_kv_tiles: bool = False,
        reference: Reference | None = None,
    ) -> Variant:
        """Makes a variant from hooks in C++, any of:

            // The transformed logit.
            float logits(float logit, const ScoreRow& row, int32_t kv_position) const
            // Next to a logits() that returns logit + bias_slope(row) * (kv_position - row.position):
            // Hopper's kernels then take less time.
            float bias_slope(const ScoreRow& row) const
            // Whether the row attends to the token.
            bool mask(const ScoreRow& row, int32_t kv_position) const
            // {begin, end}: the row attends to no token outside of them.
            TokenRange range(const ScoreRow& row) const
            // The transformed output, once.
            float output(float value, const ScoreRow& row, int32_t column) const
            // Two elements of a row of Q, K or V, in the columns first and second.
            Pair query(Pair x, int32_t first, int32_t second, const ScoreRow& row) const
            Pair key(Pair x, int32_t first, int32_t second, const KvToken& token) const
            Pair value(Pair x, int32_t first, int32_t second, const KvToken& token) const
            // logits() returns weights.
            static constexpr bool kUsesSoftmax = false;

        row has request, qo_head, position, index (the query's index in its request), kv_len and row (of Q).
        token has request, position, kv_head and kv_len. A Pair has first and second, float32. Transformed
        rows are rounded to the dtype of the cache. Use parameters by their names. Put ATTN_HD before your own
        functions. The functions of attention/variant/variant_math.h are included (exp, log, tanh, sigmoid,
        min, max, ...). Hooks are also called for rows and tokens that do not exist; those results are
        ignored. Compiler errors name `<variant NAME>` and the line in `cpp`.

        Args:
            cpp: the hooks.
            params: Params, or {name: dtype, (dtype, ndim) or (dtype, shape)}, `float` or `int` for a number.
            name: for messages.
            causal: the query sees nothing after it, whatever mask() returns.
            window_left: the query sees at most this many tokens before it; -1: no limit.
            pair_distance: columns between the two elements that a transform gets: 1, or a multiple of 8;
                None: half of head_dim.
            pair_columns: number of transformed columns, starting at the first: a multiple of 2 *
                pair_distance; None: all.
            skips_kv_tiles: the mask may have holes. Plans that get its arguments look for them, and kernels
                skip KV tiles in which no row of a row tile sees anything. Wasteful for masks without holes.
            reference: the same in Python.

        Raises:
            ValueError: a wrong argument, no hook, or a hook with a wrong signature; names the line.
        """
        check_types(str, "a string", name=name)
        name = _clean(name)
        check_types(bool, "True or False", causal=causal, skips_kv_tiles=skips_kv_tiles)
        body = body_from_source(
            cpp, params_from(params, "params"), name, _checked_pairs(pair_distance, pair_columns)
        )
        if skips_kv_tiles and "mask" not in body.hooks:
            raise ValueError("skips_kv_tiles is True, must be False: cpp has no mask()")
        body = replace(body, skips_kv_tiles=skips_kv_tiles)
        return cls(
            body=body,
            causal=causal,
            window_left=check_int("window_left", window_left, -1),
            reference=reference,
            cpp=cpp,
        )

    @classmethod
    def builtin(cls, name: str, *args: Any, **kwargs: Any) -> Variant:
        """A function of `attn_backend.variants.builtin`, by name: Variant.builtin("soft_cap", 30.0).

        Raises:
            ValueError: there is no such function.
        """
        require(isinstance(name, str) and name in BUILTINS, "name", name, f"one of {', '.join(BUILTINS)}")
        return BUILTINS[name](*args, **kwargs)

    @classmethod
    def combine(cls, *variants: Variant) -> Variant:
        """Combines variants: applies score functions one after another, and intersects masks and intervals.

        Raises:
            ValueError: an argument is not a Variant, parameters have the same name, or weights without
                softmax would be changed by others.
        """
        if not variants:
            raise ValueError("variants is empty, must be at least one Variant")
        for i, variant in enumerate(variants):
            require(isinstance(variant, Variant), f"variants[{i}]", variant, "a Variant")
        for variant, later in zip(variants, [variants[i + 1 :] for i in range(len(variants))], strict=True):
            after = [other.name for other in later if other.has_logits or not other.uses_softmax]
            if not variant.uses_softmax and after:
                raise ValueError(
                    f"variant {variant.name} makes weights without softmax, must come after "
                    f"{', '.join(after)}"
                )
        windows = [variant.window_left for variant in variants if variant.window_left >= 0]
        return cls(
            variants, causal=any(variant.causal for variant in variants), window_left=min(windows, default=-1)
        )

    def __and__(self, other: object) -> Variant:
        return Variant.combine(self, other) if isinstance(other, Variant) else NotImplemented

    def across_levels(self) -> Variant:
        """This variant for compositions of several levels. Its mask also hides tokens outside of its window,
        by the positions that levels give. An Attention with max_levels above 1 calls this itself. Without a
        window: returns the variant.
        """
        if self.window_left < 0:
            return self
        return Variant(
            (self, _window_mask(self.window_left)),
            causal=self.causal,
            window_left=self.window_left,
            name=self.name,
        )

    def pack(self, args: Mapping[str, Tensor | float | int], device: torch.device) -> bytes:
        """The bytes of UserVariant::Params.

        Tensors are stored as addresses: they must live until the kernels that read them have run.

        Args:
            args: the parameters that are given at run time, by name: numbers, or tensors on `device`. Tensors
                have the declared dtype and number of dimensions, any strides and at least one element.
            device: of the kernels.

        Raises:
            ValueError: a parameter that is missing, unknown, or not as declared.
        """
        if not isinstance(args, Mapping):
            raise ValueError(
                f"variant_args is {describe(args)}, must be a dict: {', '.join(self._given) or 'empty'}"
            )
        if len(args) != len(self._given) or any(name not in args for name in self._given):
            self._refuse_names(args)
        values = [
            self._bound_on(i, param, device)
            if param.value is not None
            else check_value(f"variant_args[{param.name!r}]", param, args[param.name], device)
            for i, param in enumerate(self.params)
        ]
        return self._layout.pack(values)

    def check_head_dim(self, head_dim: int, head_dim_v: int | None = None) -> None:
        """Refuses heads that do not fit the transforms. head_dim: of Q and K; head_dim_v: of V; None: the
        same.

        Raises:
            ValueError: head_dim or head_dim_v is odd or too small for the pairs.
        """
        for hook_name in TRANSFORMS:
            if not getattr(self, f"has_{hook_name}"):
                continue
            name, columns = "head_dim", head_dim
            if hook_name == "value" and head_dim_v not in (None, head_dim):
                name, columns = "head_dim_v", head_dim_v
            pairs = pairs_of(hook_name, self._bodies)
            what = f"{hook_name}() of variant {self.name} takes"
            if pairs.distance is None:
                must_be = f"a multiple of 16: {what} columns i and i + {name} / 2 together"
                require(columns % 16 == 0, name, columns, must_be)
            elif pairs.columns is not None:
                must_be = f"at least {pairs.columns}, the columns that {what}"
                require(columns >= pairs.columns, name, columns, must_be)
            else:
                step = 2 * pairs.distance
                must_be = f"a multiple of {step}: {what} columns i and i + {pairs.distance} together"
                require(columns % step == 0, name, columns, must_be)

    def reference(self) -> ReferenceFunctions | None:
        """The variant in torch; None if it has C++ without a Python equivalent."""
        known = tuple(reference for reference in self._references if reference is not None)
        return ReferenceFunctions(known) if len(known) == len(self._references) else None

    def _bound_on(self, i: int, param: Param, device: torch.device) -> Tensor | float | int:
        """The value of params[i] on a device; copies are cached."""
        if not isinstance(param.value, Tensor):
            return param.value
        if (i, device) not in self._on_device:
            tensor = param.value.to(device)
            check_value(param.name, param, tensor, device)
            self._on_device[i, device] = tensor
        return self._on_device[i, device]

    def _refuse_names(self, args: Mapping[str, Any]) -> NoReturn:
        params = {param.name: param for param in self.params if param.value is None}
        for name in args:
            if name not in params:
                raise ValueError(
                    f"variant_args: {name!r} is unknown; known of variant {self.name} are "
                    f"{', '.join(params) or 'none'}"
                )
        missing = next(param for name, param in params.items() if name not in args)
        raise ValueError(
            f"variant_args[{missing.name!r}] of variant {self.name} is missing, must be {missing.describe()}"
        )


def _window_mask(window_left: int) -> Variant:
    """q_idx - kv_idx <= window_left as a mask, which would otherwise become only an interval."""

    def reference(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return q_idx - kv_idx <= window_left

    code = (
        f"  ATTN_HD bool mask(const ScoreRow& row, int32_t kv_position) const {{\n    return row.position "
        f"- kv_position <= {window_left};\n  }}\n"
    )
    return Variant(
        body=Body("window", (), frozenset({"mask"}), True, code), reference=Reference(None, reference)
    )


def _checked_pairs(distance: int | None, columns: int | None) -> PairLayout:
    if distance is not None:
        distance = check_int("pair_distance", distance, 1)
        require(
            distance == 1 or distance % 8 == 0, "pair_distance", distance, "1 or a multiple of 8, or None"
        )
    if columns is not None:
        columns = check_int("pair_columns", columns, 2)
        if distance is None or columns % (2 * distance):
            refuse(
                "pair_columns",
                columns,
                "None where pair_distance is None"
                if distance is None
                else f"a multiple of 2 * pair_distance = {2 * distance}",
            )
    return PairLayout(distance, columns)


def _name_of(function: Callable[..., Any]) -> str:
    while isinstance(function, partial):
        function = function.func
    return getattr(function, "__name__", type(function).__name__)


def _clean(name: str) -> str:
    cleaned = re.sub(r"[^a-z0-9]+", "_", name.lower()).strip("_")[:_MAX_NAME].strip("_")
    return cleaned or "variant"


__all__ = ["TracingError", "Variant"]
