"""plan and run: attention of a composition over a paged or ragged KV cache."""

from __future__ import annotations

import os
import weakref
from numbers import Integral
from typing import Any, Literal

import torch

from ..metadata import BSRView, Composition, KVCache
from ..metadata.checks import check_values
from ..metadata.composition import MAX_LEVELS
from .cubins import arch_of, find_kernel
from .library import library
from .schedule import Schedule, describe_errors

_DTYPE_CODES = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2}
_DTYPE_NAMES = {torch.float16: "f16", torch.bfloat16: "bf16"}
_CUDA_HEAD_DIMS = (64, 128, 256)
_MAX_CPU_HEAD_DIM = 256
_KERNEL_CODES = {"cpu": 0, "generic": 1, "hopper": 2}
_CASCADE_MODES: dict[object, int] = {False: 0, True: 1, "always": 2}
MAX_CUDA_INVARIANT_BATCH = 1024  # requests of a batch invariant plan, each of which may become 32 row groups
_MAX_CUDA_BATCH = 8192  # the device planner keeps one int32 a request in shared memory


def _refuse(argument: str, was: object, must: str) -> None:
    raise ValueError(f"{argument} is {was}, must be {must}")


class Attention:
    """Attention of one shape of heads: `plan()` once a step, `run()` once a layer.

    The workspace is allocated here, once, from an exact bound. All that `plan()` decides lies in it, so a CUDA graph that captured `run()`
    serves every later plan.

    Args:
        num_qo_heads: query heads.
        num_kv_heads: KV heads; divides num_qo_heads.
        head_dim: 64, 128 or 256 on CUDA; a multiple of 8 up to 256 on a CPU.
        dtype: of Q, K, V and the output: bfloat16 or float16, or float32 on a CPU.
        device: a CUDA device or "cpu".
        max_rows: most rows of Q that a plan covers.
        max_batch: most requests (row groups) of a level.
        max_levels: most levels of a composition. More than one costs a state of head_dim + 1 floats for each of max_levels * max_rows * num_qo_heads.
        num_ctas: parts that the work is split into; default: what the device holds at once.
        cascade: whether `plan` finds leading pages that requests of a view share, and reads them once where a cost model says that it pays. It looks at
            views of 2 to 1024 requests with a page table and no row list, and leaves requests alone whose rows fill the largest row tile. "always": takes
            whatever there is room for, for tests.
        batch_invariant: a request's output has the same bits whatever else is in the batch, and wherever it stands in it: they depend on its query
            length, its KV and the head configuration only. No cascade; max_levels must be 1; at most 1024 requests on CUDA.
        kernel: "hopper" (compute capability 9.0, there the default) or "generic" (Ampere and later). On a CPU: plan with the row tiles and the costs of that
            kernel, to look at its schedules.

    Raises:
        ValueError: an argument that is not supported, named with its value and what it must be.
        RuntimeError: a kernel is neither in the package nor compilable, or the driver refuses it.
    """

    def __init__(
        self,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim: int,
        *,
        dtype: torch.dtype = torch.bfloat16,
        device: torch.device | str = "cuda",
        max_rows: int,
        max_batch: int,
        max_levels: int = 1,
        num_ctas: int | None = None,
        cascade: bool | Literal["always"] = True,
        batch_invariant: bool = False,
        kernel: Literal["hopper", "generic"] | None = None,
    ) -> None:
        device = torch.device(device)
        if device.type == "cuda" and not torch.cuda.is_available():
            _refuse("device", device, "cpu here: torch sees no GPU")
        if device.type == "cuda" and device.index is None:
            device = torch.device("cuda", torch.cuda.current_device())
        for name, value in (("max_rows", max_rows), ("max_batch", max_batch), ("max_levels", max_levels)):
            if not isinstance(value, Integral) or isinstance(value, bool):
                _refuse(name, repr(value), "an int of at least 1")
        if batch_invariant not in (True, False):
            _refuse("batch_invariant", repr(batch_invariant), "True or False")
        _check_shape(num_qo_heads, num_kv_heads, head_dim, dtype, device)
        if max_rows < 1 or max_rows * (num_qo_heads // num_kv_heads) >= 2**31:
            _refuse("max_rows", max_rows, "at least 1, and below 2^31 when multiplied by the query heads of one KV head")
        if max_batch < 1 or (device.type == "cuda" and max_batch > _MAX_CUDA_BATCH):
            _refuse("max_batch", max_batch, f"at least 1 (and at most {_MAX_CUDA_BATCH} on CUDA)")
        if not 1 <= max_levels <= MAX_LEVELS:
            _refuse("max_levels", max_levels, f"in [1, {MAX_LEVELS}]")
        if device.type == "cuda" and max_batch * max_levels > _MAX_CUDA_BATCH:
            _refuse("max_batch * max_levels", max_batch * max_levels, f"at most {_MAX_CUDA_BATCH} on CUDA")
        if cascade not in _CASCADE_MODES:
            _refuse("cascade", repr(cascade), "True, False or 'always'")
        if batch_invariant and max_levels != 1:
            _refuse("max_levels", max_levels, "1 with batch_invariant=True")
        if batch_invariant and device.type == "cuda" and max_batch > MAX_CUDA_INVARIANT_BATCH:
            _refuse("max_batch", max_batch, f"at most {MAX_CUDA_INVARIANT_BATCH} on CUDA with batch_invariant=True")
        chosen = _choose_kernel(kernel, device)
        if num_ctas is not None and not 1 <= num_ctas <= 4096:
            _refuse("num_ctas", num_ctas, "in [1, 4096]")

        self.num_qo_heads = num_qo_heads
        self.num_kv_heads = num_kv_heads
        self.head_dim = head_dim
        self.dtype = dtype
        self.device = device
        self.max_rows = max_rows
        self.max_batch = max_batch
        self.max_levels = max_levels
        self.batch_invariant = batch_invariant
        self._debug = os.environ.get("ATTN_BACKEND_DEBUG", "0") not in ("", "0")
        self._sm_scale = head_dim**-0.5
        self._levels: tuple[BSRView, ...] = ()  # keeps the planned tensors alive while their pointers lie in the workspace

        self._library = library()
        self._plan_level = self._library.plan_level
        self._run_function = self._library.run
        on_cuda = device.type == "cuda"
        self._handle: int = self._library.attention_create(
            num_qo_heads,
            num_kv_heads,
            head_dim,
            _DTYPE_CODES[dtype],
            max_rows,
            max_batch,
            max_levels,
            num_ctas or 0,
            _CASCADE_MODES[cascade],
            batch_invariant,
            _KERNEL_CODES[chosen],
            on_cuda,
            device.index or 0,
            *_kernel_files(chosen, dtype, head_dim, device),
        )
        weakref.finalize(self, self._library.attention_destroy, self._handle)
        sizes = self._library.workspace_size(self._handle)
        self._schedule = torch.zeros(sizes[0], dtype=torch.uint8, device=device)
        self._partial_o = torch.empty(sizes[1] // 4, dtype=torch.float32, device=device)
        self._partial_lse = torch.empty(sizes[2] // 4, dtype=torch.float32, device=device)
        self._library.set_workspace(self._handle, self._schedule, self._partial_o, self._partial_lse)

    @property
    def workspace_bytes(self) -> int:
        """Bytes of device memory that this object holds."""
        return sum(t.numel() * t.element_size() for t in (self._schedule, self._partial_o, self._partial_lse))

    def plan(self, composition: Composition | BSRView) -> None:
        """Computes the schedule of a batch: one kernel on the current stream, no synchronisation; may be captured in a CUDA graph.

        The tensors of the composition are read on the device, by this call's kernel and by those of the following `run()`s: leave them
        unchanged until those have run.

        Raises:
            ValueError: an argument that is wrong in shape, dtype or device; on a CPU also in value (page ids beyond the cache: by `run`, which knows it).
                There is then no plan, not even the one before. On CUDA wrong values are clamped, so that nothing outside the buffers is touched, and
                reported by `raise_for_errors()`, which is called here when ATTN_BACKEND_DEBUG=1.
        """
        levels = (composition,) if isinstance(composition, BSRView) else _levels(composition)
        errors = 0
        for i, view in enumerate(levels):
            table = view.table
            errors = self._plan_level(
                self._handle,
                i,
                len(levels),
                view.qo_indptr,
                view.rows,
                table.indices,
                table.indptr,
                table.last_page_len,
                table.kv_lens,
                table.rows,
                table.page_size,
                table.entry_step,
                view.causal,
                view.window_left,
            )
        if errors:
            for view in levels:
                check_values(view, self.max_rows)
            raise ValueError(describe_errors(errors))
        self._levels = levels
        if self._debug:
            self.raise_for_errors()

    def run(
        self,
        q: torch.Tensor,
        kv: KVCache,
        *,
        out: torch.Tensor | None = None,
        lse: torch.Tensor | None = None,
        sm_scale: float | None = None,
        logits_soft_cap: float = 0.0,
        after_append: bool = False,
    ) -> torch.Tensor:
        """Runs the last plan. May be captured in a CUDA graph: grid and pointers never change.

        Args:
            q: [rows, num_qo_heads, head_dim]; rows beyond the plan's are padding and left alone, rows of the plan beyond q's are not computed.
            kv: the cache of one layer. All tokens of a request must be finite, those that a row does not see too: zero times their values is added.
            out: [rows, num_qo_heads, head_dim], written; allocated when None.
            lse: float32 [rows, num_qo_heads], filled with the natural-log sum of exponentials when given; -inf for a row that sees nothing (its output is 0).
            sm_scale: multiplies q . k, above 0; default head_dim ** -0.5.
            logits_soft_cap: cap * tanh(logit / cap) when above 0.
            after_append: promises that `append_kv` was called on this stream since the plan. The kernel then starts while that one still runs, and has read
                the schedule by the time the new tokens are in the cache.

        Returns:
            out.

        Raises:
            ValueError: an argument that is wrong in shape, dtype, device or stride, or no plan yet.
        """
        if out is None:
            out = torch.empty_like(q)
        errors = self._run_function(self._handle, q, kv.k, kv.v, out, lse, self._sm_scale if sm_scale is None else sm_scale, logits_soft_cap, after_append)
        if errors:
            raise ValueError(describe_errors(errors))
        if self._debug:
            self.raise_for_errors()
        return out

    def schedule(self) -> Schedule:
        """A copy of the last plan's schedule on the CPU (synchronises)."""
        return Schedule.read(self._schedule.cpu(), list(self._library.schedule_config(self._handle)))

    def raise_for_errors(self) -> None:
        """Reads the device's error word (synchronises; does nothing while a CUDA graph is being captured).

        Raises:
            ValueError: the last plan or a run of it met metadata that had to be clamped.
        """
        if self.device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            return
        errors = self.schedule().errors
        if errors:
            raise ValueError(describe_errors(errors))


def _levels(composition: Any) -> tuple[BSRView, ...]:
    if not isinstance(composition, Composition):
        raise ValueError(f"composition is a {type(composition).__name__}, must be a Composition or a BSRView")
    return composition.levels


def _check_shape(num_qo_heads: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype, device: torch.device) -> None:
    if num_kv_heads < 1:
        _refuse("num_kv_heads", num_kv_heads, "at least 1")
    if num_qo_heads < 1 or num_qo_heads % num_kv_heads:
        _refuse("num_qo_heads", num_qo_heads, f"a positive multiple of num_kv_heads = {num_kv_heads}")
    if device.type == "cuda":
        if head_dim not in _CUDA_HEAD_DIMS:
            _refuse("head_dim", head_dim, f"one of {_CUDA_HEAD_DIMS} on CUDA")
        if dtype not in _DTYPE_NAMES:
            _refuse("dtype", dtype, "torch.bfloat16 or torch.float16 on CUDA")
    elif device.type == "cpu":
        if head_dim < 8 or head_dim % 8 or head_dim > _MAX_CPU_HEAD_DIM:
            _refuse("head_dim", head_dim, f"a multiple of 8 up to {_MAX_CPU_HEAD_DIM} on a CPU")
        if dtype not in _DTYPE_CODES:
            _refuse("dtype", dtype, "torch.bfloat16, torch.float16 or torch.float32 on a CPU")
    else:
        _refuse("device", device, "a CUDA device or the CPU")


def _choose_kernel(kernel: str | None, device: torch.device) -> str:
    """The kernel that a schedule is made for."""
    if kernel not in (None, "hopper", "generic"):
        _refuse("kernel", repr(kernel), "'hopper', 'generic' or None")
    if device.type == "cpu":
        return kernel or "cpu"
    is_hopper = arch_of(torch.cuda.get_device_capability(device)) == "sm_90a"
    if kernel == "hopper" and not is_hopper:
        _refuse("kernel", repr(kernel), "'generic' or None: this GPU's compute capability is not 9.0")
    return kernel or ("hopper" if is_hopper else "generic")


def _kernel_files(kernel: str, dtype: torch.dtype, head_dim: int, device: torch.device) -> tuple[str, ...]:
    if device.type == "cpu":
        return "", "", ""
    arch = arch_of(torch.cuda.get_device_capability(device))
    name = _DTYPE_NAMES[dtype]
    attention = f"{'hopper_' if kernel == 'hopper' else ''}attention_{name}_d{head_dim}"
    return tuple(str(find_kernel(file, arch)) for file in ("plan", attention, f"merge_{name}"))
