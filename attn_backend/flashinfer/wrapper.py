"""What all wrappers have in common: what engines read of them, and a PlannedAttention."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ..metadata import BSRView, Composition
from ..metadata.structure import refuse
from .arguments import Scale, alibi_slopes_on, check_kv_layout, from_zero, is_number, rows_of
from .features import not_supported
from .heads import Heads
from .jit_variants import has_sinks, jit_variant
from .planned_attention import Args, Logits, PlannedAttention, logits_of
from .scales import Scales, check_scale_of_requests, one_of, scaled

BACKENDS = ("auto", "fa2", "fa3")
_ALIGNMENT = 16  # of FlashInfer's workspace buffers
_NUM_SCALES = 3  # of Q, K and V


class Wrapper:
    """A wrapper over the kernels of this package.

    The workspace buffer says which device is used, and nothing more.

    Raises:
        ValueError: an argument that is wrong. NotImplementedError: one that is not supported, by its name.
    """

    # Of the last plan.
    _heads: Heads
    _batch = 0  # requests
    _first_row = 0  # rows of Q before it belong to no request
    _rows: int | None  # after _first_row; None: not known to the host
    _run: Callable[..., Tensor | tuple[Tensor, Tensor]]
    _batch_invariant = False
    # callers ask whether there is one; FlashInfer's kernels are told by it what plan decided
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
        # Engines hand these on, from one wrapper to another and to Kernels.plan; nothing lies in them.
        self._int_workspace_buffer = self._pin_memory_int_workspace_buffer = torch.empty(
            0, dtype=torch.uint8, device=self.device
        )
        self._use_cuda_graph = use_cuda_graph
        self._fixed_batch_size = 0
        self._planned = PlannedAttention(self.device, use_cuda_graph)
        self._is_planned = False
        self._sm_scale: Scale | None = None
        self._number = Scales(1.0)  # of the last run that was given no tensors
        # of the last run that was given some
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
        """Bytes of the two workspace buffers that a plan needs: none, but code that allocates them expects
        some.
        """
        return _ALIGNMENT, _ALIGNMENT

    def end_forward(self) -> None:
        """Does nothing, as in FlashInfer."""

    def _check_planned(self) -> None:
        if not self._is_planned:
            raise ValueError("run() before a successful plan()")

    def _check_batch_size(self, batch_size: int) -> None:
        """With CUDA graphs."""
        if batch_size != self._fixed_batch_size:
            refuse(
                "batch_size",
                batch_size,
                f"{self._fixed_batch_size}, that of the buffers, with use_cuda_graph=True",
            )

    def _start_rows(self, qo_indptr: Tensor) -> Tensor:
        """qo_indptr from 0; runs are given the rows after its first element.

        With CUDA graphs, which hold addresses, plans start at the same row.
        """
        first_row, qo_indptr = from_zero(qo_indptr)
        if self._use_cuda_graph and self._is_planned and first_row != self._first_row:
            refuse(
                "qo_indptr[0]",
                first_row,
                f"{self._first_row}, that of the first plan, with use_cuda_graph=True",
            )
        self._first_row, self._run = first_row, run_from(self._planned, first_row)
        self._count_rows(qo_indptr)
        return qo_indptr

    def _count_rows(self, qo_indptr: Tensor) -> None:
        self._rows = rows_of(qo_indptr)
        if self._rows is None and self._use_cuda_graph and not self._is_planned:
            # waits for the device, once: the workspace is made for so many rows
            self._rows = int(qo_indptr[-1])

    def _plan_view(self, view: BSRView | Composition, logits: Logits) -> None:
        """Plans a view under the options of the last plan()."""
        self._of_tensors = None  # what scales mean depends on the heads and the batch
        self._batch = view.batch_size if isinstance(view, BSRView) else view.levels[-1].batch_size
        if isinstance(self._sm_scale, Tensor) and not is_number(self._sm_scale):
            if self._jit is None:
                check_scale_of_requests(self._sm_scale, self._batch)
            self._planned.with_scales("sm_scales")
        if self._has_sinks:
            self._planned.with_sinks()
        if self._jit is not None:
            logits = logits_of(self._jit.variant)
        self._planned.plan(view, self._heads, logits, rows=self._rows, batch_invariant=self._batch_invariant)
        self._is_planned = True
        self._plan_info = ()

    def _tensors_of_plan(self) -> dict[str, Tensor | None]:
        """Those that FlashInfer gives to a variant of jit_args by itself, if it names them."""
        return {"maybe_alibi_slopes": alibi_slopes_on(self._heads.num_qo_heads, self.device)}

    def _take(
        self,
        args: tuple[Any, ...],
        sinks: Tensor | None,
        q_scale: Scale | None,
        k_scale: Scale | None,
        v_scale: Scale | None,
    ) -> tuple[Args | None, Tensor | None, Scale | None, Scale | None, Scale | None]:
        """Reads what a run is given after q, K and V: the arguments of the variant of jit_args in their
        order, (sinks, sm_scale) of attention sinks, or the scales of 8-bit Q, K and V. Returns the variant's
        arguments, sinks and scales, those that were given by name among them.
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
        """sm_scale of the plan, and the scales of a run. A variant of jit_args scales by itself."""
        scale = self._sm_scale if self._jit is None else 1.0
        if scale is None:
            scale = self._heads.default_scale
        # Each is a float, or not there: looking whether it is a tensor takes longer.
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
        """Kept while runs are given the same tensors, if kernels read these and not copies."""
        known = self._of_tensors
        if known is not None and known[0] is scale and known[1] is q_scale and known[2] is k_scale:
            return known[3]
        made = scaled(self._heads, self._batch, scale, q_scale, k_scale)
        are_read = all(
            any(tensor is part for part in made)
            for tensor in (scale, q_scale, k_scale)
            if isinstance(tensor, Tensor)
        )
        self._of_tensors = (scale, q_scale, k_scale, made) if are_read else None
        return made


def keeps_splits(fixed_split_size: int | None, disable_split_kv: bool) -> bool:
    """Whether a request's parts are not to depend on its batch; engines that do not ask for that pass -1."""
    return disable_split_kv or (fixed_split_size is not None and fixed_split_size > 0)


def run_from(planned: PlannedAttention, first_row: int) -> Callable[..., Tensor | tuple[Tensor, Tensor]]:
    """planned.run of a q whose rows before first_row belong to no request: their output is 0."""
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
