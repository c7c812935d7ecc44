"""The base of all wrappers: attributes that engines read, and a PlannedAttention."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from ..kernels.attention import Attention
from ..kernels.native import is_captured
from ..metadata import BSRView, Composition
from ..validation import explain_failure, refuse
from ..variants import Variant, builtin
from .arguments import (
    NO_POS_ENCODING,
    Heads,
    PosEncoding,
    Scale,
    Scales,
    alibi_slopes_on,
    check_fits,
    check_kv_layout,
    check_scale_of_requests,
    copy_if_other,
    from_zero,
    is_number,
    one_of,
    ragged_cache,
    rows_of,
    scale_of_v,
    scale_variants,
    scaled,
    token_scales_of,
)
from .features import not_supported, refuse_given
from .jit.attention import has_sinks, jit_variant

_LEAST_ROWS = 1024
_LEAST_BATCH = 64
_ROWS_UNKNOWN = 8192  # if qo_indptr is on a GPU: reading it would wait for the device
_ATTENTIONS_PER_THREAD = 32

Args = Mapping[str, Tensor | float | int]


@dataclass(frozen=True, eq=False)
class Logits:
    """Transformations of Q, K and the logits. soft_cap: 0 for none. packed_mask, mask_indptr: for a custom
    mask. prefix_len, token_pos_in_items: for multi-item scoring. own: a variant that replaces all others; its
    arguments are given to runs.
    """

    soft_cap: float = 0.0
    pos: PosEncoding = NO_POS_ENCODING
    packed_mask: Tensor | None = None
    mask_indptr: Tensor | None = None
    prefix_len: Tensor | None = None
    token_pos_in_items: Tensor | None = None
    own: Variant | None = None

    def variant(self, heads: Heads, scales: frozenset[str] = frozenset()) -> Variant | None:
        """None if no variant is needed: all kernels support a soft cap. scales: names of the scales given to
        runs (Scales.params).
        """
        if self.own is not None:
            return self.own
        return _variant(
            self.pos,
            heads.head_dims.qk,
            self.packed_mask is not None,
            self.prefix_len is not None,
            self.soft_cap > 0,
            scales,
        )

    def args(
        self, num_qo_heads: int, device: torch.device, scales: frozenset[str] = frozenset()
    ) -> Args | None:
        """The arguments of the variant, with 1 for each scale that is only known to a run."""
        if self.own is not None:
            return None
        args: dict[str, Tensor | float | int] = {name: _one_on(device) for name in scales}
        if self.pos.alibi:
            args["slopes"] = alibi_slopes_on(num_qo_heads, device)
        if self.packed_mask is not None and self.mask_indptr is not None:
            args.update(packed_mask=self.packed_mask, mask_indptr=self.mask_indptr)
        if self.prefix_len is not None and self.token_pos_in_items is not None:
            args.update(prefix_len=self.prefix_len, token_pos_in_items=self.token_pos_in_items)
        if (args or self.pos.rope is not None) and self.soft_cap > 0:
            args["cap"] = self.soft_cap
        return args or None


@lru_cache(maxsize=256)
def plain_logits(soft_cap: float | None, pos: PosEncoding = NO_POS_ENCODING) -> Logits:
    """Logits without tensors. Cached, as they rarely change between steps."""
    return Logits(soft_cap or 0.0, pos)


@lru_cache(maxsize=64)
def logits_of(variant: Variant) -> Logits:
    return Logits(own=variant)


@lru_cache(maxsize=64)
def _one_on(device: torch.device) -> Tensor:
    return torch.ones(1, dtype=torch.float32, device=device)


@lru_cache
def _variant(
    pos: PosEncoding,
    head_dim: int,
    has_mask: bool,
    has_items: bool,
    has_soft_cap: bool,
    scales: frozenset[str],
) -> Variant | None:
    parts = scale_variants(scales)
    parts += [builtin.alibi()] if pos.alibi else []
    if pos.rope is not None:
        scale, theta = pos.rope
        parts.append(builtin.rope(builtin.rope_frequencies(head_dim, theta) / scale))
    parts += [builtin.custom_mask()] if has_mask else []
    parts += [builtin.multi_item_scoring()] if has_items else []
    if parts and has_soft_cap:
        parts.append(builtin.soft_cap())
    return Variant.combine(*parts) if parts else None


class PlannedAttention:
    """Creates an Attention at the first plan. Replaces it when a plan or a run needs more room or another
    configuration.

    Args:
        device: of Q, K and V.
        is_fixed: CUDA graphs may have captured runs, so the Attention cannot be replaced. Plans that need
            another one are refused.
    """

    def __init__(self, device: torch.device, is_fixed: bool = False) -> None:
        self.device = device
        self._is_fixed = is_fixed
        self._attention: Attention | None = None
        self._made_for: tuple[object, ...] = ()
        self._with_sinks = False
        self._with_scales: frozenset[str] = frozenset()
        self._last_plan: tuple[Composition | BSRView, Heads, Logits, bool] | None = None
        self._args: Args | None = None
        self._soft_cap = 0.0
        self._is_float8 = self._has_float8_out = self._out_has_dtype_of_q = False

    @property
    def max_rows(self) -> int:
        """Rows that the Attention has room for; 0 before the first plan."""
        return 0 if self._attention is None else self._attention.max_rows

    def zeros(self, q: Tensor) -> Tensor:
        assert self._last_plan is not None
        heads = self._last_plan[1]
        return torch.zeros((*q.shape[:2], heads.head_dims.v), dtype=heads.o_dtype, device=q.device)

    def with_sinks(self) -> None:
        """Prepares for runs with sinks."""
        self._with_sinks = True

    def with_scales(self, *names: str) -> None:
        """Prepares for runs with these scales (Scales.params)."""
        self._with_scales = self._with_scales.union(names)

    def plan(
        self,
        composition: Composition | BSRView,
        heads: Heads,
        logits: Logits,
        *,
        rows: int | None,
        batch_invariant: bool = False,
    ) -> None:
        """Plans on the current stream; never waits for it.

        Args:
            rows: rows of Q, where the composition ends; None: not known to the host. A run with more rows
                than there is room for plans again.

        Raises:
            ValueError: Attention refuses an argument, or the plan needs another Attention while CUDA graphs
                may hold this one.
        """
        if isinstance(composition, BSRView):
            num_levels, batch = 1, composition.batch_size
        else:
            num_levels, batch = (
                len(composition.levels),
                max([level.batch_size for level in composition.levels]),
            )
        variant = logits.variant(heads, self._with_scales)
        last_plan = composition, heads, logits, batch_invariant
        made_for = (heads, variant, self._with_sinks, num_levels, batch_invariant)
        attention = self._attention
        if (
            attention is None
            or self._made_for != made_for
            or batch > attention.max_batch
            or (rows or 0) > attention.max_rows
        ):
            attention = self._make(made_for, variant, heads, num_levels, batch, rows, batch_invariant)
        self._args = (
            None if variant is None else logits.args(heads.num_qo_heads, self.device, self._with_scales)
        )
        self._soft_cap = logits.soft_cap if variant is None else 0.0
        attention.plan(composition, variant_args=self._args)
        self._last_plan = last_plan

    def _make(
        self,
        made_for: tuple[object, ...],
        variant: Variant | None,
        heads: Heads,
        num_levels: int,
        batch: int,
        rows: int | None,
        batch_invariant: bool,
    ) -> Attention:
        before = self._attention
        if before is not None and self._is_fixed and made_for != self._made_for:
            raise ValueError(
                "heads, dtype, masks and positions of a wrapper with use_cuda_graph=True must be those of "
                "its first plan"
            )
        if before is not None and self._is_fixed:
            what, value, room = (
                ("batch_size", batch, before.max_batch)
                if batch > before.max_batch
                else ("qo_indptr[-1]", rows, before.max_rows)
            )
            refuse(what, value, f"at most {room}, as in the first plan: CUDA graphs may hold its workspace")
        if is_captured(self.device):
            raise RuntimeError(
                "a plan or a run inside a CUDA graph needs a new workspace; must be planned, and run once, "
                "before the capture"
            )
        if self._is_fixed:
            max_rows, max_batch = max(rows or _ROWS_UNKNOWN, 1), max(batch, 1)
        else:
            max_rows, max_batch = _room(rows or _ROWS_UNKNOWN, _LEAST_ROWS), _room(batch, _LEAST_BATCH)
            if before is not None and made_for == self._made_for:
                max_rows, max_batch = max(max_rows, before.max_rows), max(max_batch, before.max_batch)
        self._attention = Attention(
            heads.num_qo_heads,
            heads.num_kv_heads,
            heads.head_dims.qk,
            head_dim_v=heads.head_dims.v,
            dtype=heads.dtype,
            kv_dtype=heads.kv_dtype,
            q_dtype=heads.q_dtype,
            device=self.device,
            max_rows=max_rows,
            max_batch=max_batch,
            max_levels=num_levels,
            batch_invariant=batch_invariant,
            variant=variant,
            sinks=self._with_sinks,
            float8_out=heads.float8_out,
            token_scales=heads.token_scales,
        )
        self._made_for = made_for
        self._is_float8, self._has_float8_out = heads.is_over_float8, heads.float8_out
        self._out_has_dtype_of_q = heads.q_dtype == heads.o_dtype
        return self._attention

    def run(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor | None,
        scales: Scales,
        *,
        is_hnd: bool = False,
        q_rope: Tensor | None = None,
        k_rope: Tensor | None = None,
        kv_scale: float | None = None,
        out: Tensor | None = None,
        lse: Tensor | None = None,
        return_lse: bool = False,
        v_scale: Scale | None = None,
        sinks: Tensor | None = None,
        args: Args | None = None,
        lse_to_base_2: bool = True,
        token_scales: tuple[Tensor, Tensor] | None = None,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Runs the last plan over unconverted tensors.

        Args:
            k, v: [pages, page_size, num_kv_heads, head_dim]; or ragged, [tokens, num_kv_heads, head_dim],
                with is_hnd [num_kv_heads, tokens, head_dim]. With k_rope, k has the MLA latents, and v is
                None.
            scales: of Q, K and logits.
            q_rope, k_rope: the last columns of MLA's Q and K; k_rope directly follows k in memory.
            kv_scale: of latents.
            lse: written even without return_lse.
            args: for a variant of the caller's.
            token_scales: of K and V, if the plan's heads have them.

        Returns:
            The output; with return_lse also the lse, base 2 or e.

        Raises:
            ValueError: Attention refuses an argument, or there is no plan yet.
        """
        attention = self._attention
        if attention is None or self._last_plan is None:
            raise ValueError("run() before a successful plan()")
        rows, params, needs_sinks = q.shape[0], scales.params, sinks is not None and not self._with_sinks
        if rows > attention.max_rows or needs_sinks or (params and not self._with_scales.issuperset(params)):
            attention = self._plan_again(rows, needs_sinks, scales)
        if args is None:
            args = self._args
        if params:
            args = {**args, **params} if args else params
        of_k: Scale | None = scales.k
        of_v = after = None
        if v_scale is not None:
            of_v, after = scale_of_v(v_scale, self._is_float8, attention.num_kv_heads)
        if kv_scale is not None:
            of_k = of_v = kv_scale
        if token_scales is not None:
            of_k, of_v = token_scales
        out_scale: Scale | None = None
        if self._has_float8_out:  # the output is divided by it before rounding
            if after is not None and not isinstance(after, Tensor) and after <= 0.0:
                refuse("v_scale", after, "above 0 with outputs of float8_e4m3fn")
            out_scale, after = 1.0 if after is None else 1.0 / after, None
        try:
            if out is None and q_rope is not None and self._out_has_dtype_of_q:
                out = torch.empty_like(q)  # with q's strides, as in FlashInfer
            made = attention._run_raw(
                q,
                k,
                v,
                out,
                lse,
                scales.number,
                self._soft_cap,
                False,
                q_rope,
                of_k,
                of_v,
                scales.q,
                sinks,
                lse_to_base_2,
                is_hnd,
                k_rope,
                out_scale,
                args,
                return_lse,
            )
        except (
            AttributeError,
            OverflowError,
            RuntimeError,
            TypeError,
            ValueError,
        ) as error:  # only on failure, to keep each layer's call cheap
            if isinstance(k, Tensor) and isinstance(v, Tensor) and k.ndim == v.ndim == 3:
                ragged_cache(k, v, "HND" if is_hnd else "NHD", attention.num_kv_heads)
            if not isinstance(error, ValueError):
                given = {
                    "q": q,
                    "k": k,
                    "v": v,
                    "out": out,
                    "lse": lse,
                    "sinks": sinks,
                    "q_rope": q_rope,
                    "k_rope": k_rope,
                }
                explain_failure((name, tensor) for name, tensor in given.items() if tensor is not None)
            raise
        if after is not None:
            (made[0] if isinstance(made, tuple) else made).mul_(after)
        return made

    def _plan_again(self, rows: int, needs_sinks: bool, scales: Scales) -> Attention:
        """Repeats the last plan, with room for these rows, and for arguments that a run uses for the first
        time.
        """
        assert self._last_plan is not None
        composition, heads, logits, batch_invariant = self._last_plan
        if needs_sinks or not self._with_scales.issuperset(scales.params):
            self._with_sinks |= needs_sinks
            self.with_scales(*scales.params)
            # even if it is fixed: no graph has captured such a run
            self._made_for, self._attention = (), None
        self.plan(composition, heads, logits, rows=rows, batch_invariant=batch_invariant)
        assert self._attention is not None
        return self._attention


def _room(wanted: int, least: int) -> int:
    """The next power of two, so that gradually growing plans need few workspaces."""
    return max(least, 1 << max(wanted - 1, 0).bit_length())


class _ThreadCache(threading.local):
    def __init__(self) -> None:
        self.attentions: OrderedDict[object, PlannedAttention] = OrderedDict()


_thread_cache = _ThreadCache()


def attention_of_call(device: torch.device, heads: Heads, logits: Logits, scales: Scales) -> PlannedAttention:
    """A PlannedAttention for a call that plans and runs. This thread keeps one per stream and arguments, but
    only for the most recent ones.
    """
    stream = torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else 0
    key = (device, stream, heads, logits.variant(heads, frozenset(scales.params)))
    attention = _thread_cache.attentions.pop(key, None) or PlannedAttention(device)
    _thread_cache.attentions[key] = attention
    attention.with_scales(*scales.params)
    if len(_thread_cache.attentions) > _ATTENTIONS_PER_THREAD:
        _thread_cache.attentions.popitem(last=False)
    return attention


BACKENDS = ("auto", "fa2", "fa3")
_ALIGNMENT = 16  # in FlashInfer's workspace buffers
_NUM_SCALES = 3  # for Q, K and V


class CompositeWrapper:
    """Methods of a wrapper that is made of others."""

    def reset_workspace_buffer(self, float_workspace_buffer: Tensor, int_workspace_buffer: Tensor) -> None:
        """Accepted; the buffers are not used."""

    def end_forward(self) -> None:
        """Does nothing, as in FlashInfer."""


class Wrapper:
    """A wrapper over the kernels of this package.

    The workspace buffer only selects the device.

    Raises:
        ValueError: an argument is wrong.
        NotImplementedError: an argument is not supported; the message names it.
    """

    # Of the last plan.
    _heads: Heads
    _batch_size = 0
    _first_row = 0  # rows of Q before it belong to no request
    _rows: int | None  # after _first_row; None: not known to the host
    _run_planned: Callable[..., Any]  # from run_from
    _batch_invariant = False
    _has_token_scales = False  # then each run gets them
    # callers check whether it exists; in FlashInfer it passes plan's decisions to the kernels
    _plan_info: Sequence[int] | None = None

    def __init__(
        self,
        float_workspace_buffer: Tensor,
        kv_layout: str = "NHD",
        use_cuda_graph: bool = False,
        backend: str = "auto",
        jit_args: Sequence[Any] | None = None,
    ) -> None:
        if backend not in BACKENDS:
            not_supported(f"backend = {backend!r}")
        self._kv_layout = check_kv_layout(kv_layout)
        self._backend = "fa2" if backend == "auto" else backend
        self._float_workspace_buffer = float_workspace_buffer
        self.device = float_workspace_buffer.device
        # Engines pass these to other wrappers and to the plan of _cached_module. Their contents are not used.
        self._int_workspace_buffer = self._pin_memory_int_workspace_buffer = torch.empty(
            0, dtype=torch.uint8, device=self.device
        )
        self._use_cuda_graph = use_cuda_graph
        self._fixed_batch_size = 0
        self._planned = PlannedAttention(self.device, use_cuda_graph)
        self._is_planned = False
        self._sm_scale: Scale | None = None
        self._number = Scales(1.0)  # of the last run without tensors
        # of the last run with tensors
        self._of_tensors: tuple[Scale, Scale | None, Scale | None, Scales] | None = None
        self._jit = jit_variant(jit_args)
        self._has_sinks = has_sinks(jit_args)

    @property
    def is_cuda_graph_enabled(self) -> bool:
        return self._use_cuda_graph

    def reset_workspace_buffer(
        self, float_workspace_buffer: Tensor, int_workspace_buffer: Any = None, *_more: Any, **_options: Any
    ) -> None:
        """Accepted; the buffers are not used."""
        self._float_workspace_buffer = float_workspace_buffer

    def workspace_size(self, *_arguments: Any, **_options: Any) -> tuple[int, int]:
        """Bytes of the two workspace buffers that a plan needs. It needs none, but code that allocates them
        expects some.
        """
        return _ALIGNMENT, _ALIGNMENT

    def end_forward(self) -> None:
        """Does nothing, as in FlashInfer."""

    def _check_planned(self) -> None:
        if not self._is_planned:
            raise ValueError("run() before a successful plan()")

    def _check_batch_size(self, batch_size: int) -> None:
        if batch_size != self._fixed_batch_size:
            refuse(
                "batch_size",
                batch_size,
                f"{self._fixed_batch_size}, that of the buffers, with use_cuda_graph=True",
            )

    def _buffered(
        self, buffer: Any, tensor: Tensor, non_blocking: bool, names: tuple[str, str] | None = None
    ) -> Tensor:
        """A plan's tensor on the device, with CUDA graphs in its buffer.

        names: of a tensor that may be shorter than its buffer, and of the buffer.
        """
        if not self._use_cuda_graph:
            return (
                tensor if tensor.device == self.device else tensor.to(self.device, non_blocking=non_blocking)
            )
        if names is not None:
            check_fits(names[0], tensor, names[1], buffer)
        copy_if_other(buffer if names is None else buffer[: len(tensor)], tensor, non_blocking)
        return buffer

    def _start_rows(self, qo_indptr: Tensor) -> Tensor:
        """qo_indptr shifted to start at 0; runs get the rows after its first element.

        With CUDA graphs, which hold addresses, all plans must start at the same row.
        """
        first_row, qo_indptr = from_zero(qo_indptr)
        if self._use_cuda_graph and self._is_planned and first_row != self._first_row:
            refuse(
                "qo_indptr[0]",
                first_row,
                f"{self._first_row}, as in the first plan, with use_cuda_graph=True",
            )
        self._first_row, self._run_planned = first_row, run_from(self._planned, first_row)
        self._rows = rows_of(qo_indptr)
        if self._rows is None and self._use_cuda_graph and not self._is_planned:
            # waits for the device, once, to size the workspace
            self._rows = int(qo_indptr[-1])
        return qo_indptr

    def _plan_view(self, view: BSRView | Composition, logits: Logits) -> None:
        """Plans a view with the options of the last plan()."""
        self._of_tensors = None  # their meaning depends on the heads and the batch
        self._batch_size = view.batch_size if isinstance(view, BSRView) else view.levels[-1].batch_size
        if isinstance(self._sm_scale, Tensor) and not is_number(self._sm_scale):
            if self._jit is None:
                check_scale_of_requests(self._sm_scale, self._batch_size)
            self._planned.with_scales("sm_scales")
        if self._has_sinks:
            self._planned.with_sinks()
        if self._jit is not None:
            logits = logits_of(self._jit.variant)
        self._planned.plan(view, self._heads, logits, rows=self._rows, batch_invariant=self._batch_invariant)
        self._is_planned = True
        self._plan_info = ()

    def _tensors_of_plan(self) -> dict[str, Tensor | None]:
        """Tensors that FlashInfer passes to a jit_args variant itself, if the variant names them."""
        return {"maybe_alibi_slopes": alibi_slopes_on(self._heads.num_qo_heads, self.device)}

    def _take(
        self,
        args: tuple[Any, ...],
        sinks: Tensor | None,
        q_scale: Scale | None,
        k_scale: Scale | None,
        v_scale: Scale | None,
    ) -> tuple[Args | None, Tensor | None, Scale | None, Scale | None, Scale | None]:
        """Reads the run's arguments after q, K and V: the arguments of the jit_args variant in order, (sinks,
        sm_scale) for attention sinks, or the scales of 8-bit Q, K and V. Returns the variant's arguments,
        sinks and scales, including those given by name.
        """
        if self._jit is not None:
            own = self._jit.args(
                args, self._tensors_of_plan(), self._heads.num_qo_heads // self._heads.num_kv_heads
            )
            return own, sinks, q_scale, k_scale, v_scale
        if len(args) == _NUM_SCALES and self._heads.float8_q:
            scales = (
                one_of(scale_q=args[0], q_scale=q_scale),
                one_of(scale_k=args[1], k_scale=k_scale),
                one_of(scale_v=args[2], v_scale=v_scale),
            )
            return None, sinks, *scales
        if not self._has_sinks or len(args) > 2:
            not_supported("the argument args")
        if len(args) > 1:
            self._sm_scale = float(args[1])
        return None, args[0], q_scale, k_scale, v_scale

    def _scales(self, q_scale: Scale | None = None, k_scale: Scale | None = None) -> Scales:
        """sm_scale of the plan, and the scales of a run. A jit_args variant applies scales itself."""
        scale = self._sm_scale if self._jit is None else 1.0
        if scale is None:
            scale = self._heads.default_scale
        # The common case: all are floats or None. Checking for tensors takes longer.
        if (
            not isinstance(scale, float)
            or not (q_scale is None or isinstance(q_scale, float))
            or not (k_scale is None or isinstance(k_scale, float))
        ):
            return self._scales_of(scale, q_scale, k_scale)
        if q_scale is not None:
            scale *= q_scale
        if k_scale is not None:
            scale *= k_scale
        if scale != self._number.number:
            self._number = Scales(scale)
        return self._number

    def _scales_of(self, scale: Scale, q_scale: Scale | None, k_scale: Scale | None) -> Scales:
        """Cached while runs get the same tensors, if kernels read these and not copies."""
        known = self._of_tensors
        if known is not None and known[0] is scale and known[1] is q_scale and known[2] is k_scale:
            return known[3]
        made = scaled(self._heads, self._batch_size, scale, q_scale, k_scale)
        are_read = all(
            any(tensor is part for part in made)
            for tensor in (scale, q_scale, k_scale)
            if isinstance(tensor, Tensor)
        )
        self._of_tensors = (scale, q_scale, k_scale, made) if are_read else None
        return made

    def _token_scales(self, kv_cache_sf: object) -> tuple[Tensor, Tensor]:
        if not self._has_token_scales:
            refuse_given(kv_cache_sf=kv_cache_sf)
        return token_scales_of(kv_cache_sf, self._kv_layout)


class HostPlannedWrapper(Wrapper):
    """A wrapper whose buffers engines fill, and which they then plan from host arrays."""

    _plan_from_host: Callable[..., list[int]]

    @property
    def _cached_module(self) -> SimpleNamespace | None:
        """In FlashInfer the compiled module, whose plan engines call instead of `plan`: it takes host arrays,
        which saves the wrapper copies to the host. None before the first plan.
        """
        return SimpleNamespace(plan=self._plan_from_host) if self._is_planned else None


def keeps_splits(fixed_split_size: int | None, disable_split_kv: bool) -> bool:
    """Whether a request's splits must not depend on its batch. Engines that do not need this pass -1."""
    return disable_split_kv or (fixed_split_size is not None and fixed_split_size > 0)


def run_from(planned: PlannedAttention, first_row: int) -> Callable[..., Tensor | tuple[Tensor, Tensor]]:
    """planned.run for a q whose rows before first_row belong to no request: their output is 0."""
    return planned.run if first_row == 0 else partial(_run_rows, planned, first_row)


def _run_rows(
    planned: PlannedAttention,
    first_row: int,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scales: Scales,
    *,
    out: Tensor | None = None,
    lse: Tensor | None = None,
    return_lse: bool = False,
    q_rope: Tensor | None = None,
    **options: Any,
) -> Tensor | tuple[Tensor, Tensor]:
    out = planned.zeros(q) if out is None else out
    lse = (
        torch.zeros(q.shape[:2], dtype=torch.float32, device=q.device) if return_lse and lse is None else lse
    )
    if q_rope is not None:
        options["q_rope"] = q_rope[first_row:]
    planned.run(
        q[first_row:],
        k,
        v,
        scales,
        out=out[first_row:],
        lse=None if lse is None else lse[first_row:],
        return_lse=return_lse,
        **options,
    )
    return (out, lse) if return_lse and lse is not None else out
