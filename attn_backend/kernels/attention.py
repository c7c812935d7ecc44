"""plan and run: attention of a composition over a paged or ragged KV cache."""

from __future__ import annotations

import ctypes
import inspect
import weakref
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, NoReturn, SupportsIndex, overload

import torch
from torch import Tensor
from torch.compiler import is_compiling

from ..metadata import BSRView, Composition, KVCache
from ..metadata.checks import check_values
from ..metadata.kv_cache import Scale, checked_scale
from ..metadata.structure import check_device, check_handle, check_int, check_types, explain_failure, refuse
from ..settings import Settings
from . import compiled, selection
from .attention_config import (
    MAX_CTAS,
    AttentionConfig,
    check_heads,
    check_kv_dtype,
    check_modes,
    check_q_dtype,
    check_room,
    choose_design,
    explain_failed_run,
    refuse_run,
)
from .attention_variant import AttentionVariant, VariantArgs
from .cubins import forget_kernels
from .errors import InUseError
from .level_options import level_options, levels_of, positions_of, tensors_of, visibility_of
from .library import library
from .named_calls import by_name
from .schedule import Schedule, describe_errors
from .selection import SelectedTokens
from .structs import unpack

if TYPE_CHECKING:
    from ..variants import Variant


class Attention:
    """Attention of one shape of heads: `plan()` once a step, `run()` once a layer.

    The workspace is allocated here, once, from an exact bound. All that `plan()` decides lies in it, so a
    CUDA graph that captured `run()` serves every later plan.

    Args:
        num_qo_heads: query heads.
        num_kv_heads: KV heads; divides num_qo_heads.
        head_dim: columns of a head of Q and K: a multiple of 8, on CUDA up to 256, or 512, or 576 (MLA), on a
            CPU up to 576.
        head_dim_v: columns of a head of V and of the output, as head_dim; None: head_dim. On CUDA 512 and 576
            of K go with 512 of V.
        dtype: of Q and the output: bfloat16 or float16, or float32 on a CPU.
        q_dtype: of Q: dtype (None), or kv_dtype, if that is a float8. The Hopper kernel multiplies
            float8_e4m3fn as it is (heads of 64 and 128, under softmax, row tiles of 32 rows and more) and
            rounds probabilities to it: outputs are then off by 2.5 %, in the mean of many random ones,
            instead of 0.3 %.
        kv_dtype: of K and V: dtype (None), or float8_e4m3fn or float8_e5m2, which are widened to dtype, or
            the other one of bfloat16 and float16, to which Q is rounded (float16: limited to 65504).
            torch.uint8: rows of DeepSeek V3.2's latents (`KVCache.from_latent`), for 576 with 512 and
            bfloat16.
        device: a CUDA device or "cpu".
        max_rows: most rows of Q that a plan covers.
        max_batch: most requests (row groups) of a level.
        max_levels: most levels of a composition. More than one costs a state of head_dim_v + 1 floats for
            each of max_levels * max_rows * num_qo_heads.
        num_ctas: parts that the work is split into; default: what the device holds at once; of a CPU 32, so
            that results do not depend on its number of cores.
        cascade: whether `plan` finds leading pages that requests of a view share, and reads them once where a
            cost model says that it pays. It looks at views of 2 to 1024 requests (736 where a block has 99 KB
            of shared memory) with a page table and no row list, and leaves requests alone whose rows fill the
            largest row tile. "always": takes whatever there is room for, for tests. Not under a variant that
            transforms K or V by the request or its kv_len.
        batch_invariant: a request's output has the same bits whatever else is in the batch, and wherever it
            stands in it: they depend on its query length, its KV and the head configuration only. No cascade;
            max_levels must be 1; at most 1024 requests on CUDA.
        kernel: "hopper" (compute capability 9.0, there the default, but not for variants that transform Q, K
            or V of 512 columns or MLA's latents) or "generic" (Ampere and later). On a CPU: plan with the row
            tiles and the costs of that kernel, to look at its schedules.
        variant: what attention is instead of softmax(Q K^T) V. Its kernels come from the cache, or are
            compiled now, in seconds (ATTN_BACKEND_JIT=0: not here).
        sinks: whether runs may be given sinks: logits, one for each query head, that join the sum of a row's
            exponentials (gpt-oss).
        float8_out: whether runs may be given an out_scale: their output is float8_e4m3fn. On CUDA they have
            kernels of their own, loaded beside the others.

    Raises:
        ValueError: an argument that is not supported, named with its value and what it must be.
        RuntimeError: a kernel is neither in the package nor compilable, or the driver refuses it.
    """

    def __new__(cls, *_arguments: Any, **_options: Any) -> Attention:
        """Under ATTN_BACKEND_DEBUG=1, an Attention that checks."""
        if cls is Attention and Settings.read().debug:
            from .debug_attention import DebugAttention  # which derives from this class

            return object.__new__(DebugAttention)
        return object.__new__(cls)

    def __init__(
        self,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim: int,
        *,
        dtype: torch.dtype = torch.bfloat16,
        kv_dtype: torch.dtype | None = None,
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
        kv_dtype = check_kv_dtype(kv_dtype, dtype, dims)
        q_dtype = check_q_dtype(q_dtype, dtype, kv_dtype, dims, design)
        num_ctas = None if num_ctas is None else check_int("num_ctas", num_ctas, 1, MAX_CTAS)
        check_types(bool, "True or False", sinks=sinks, float8_out=float8_out)

        self.num_qo_heads, self.num_kv_heads = num_qo_heads, num_kv_heads
        self.head_dim, self.head_dim_v = dims.qk, dims.v
        self.dtype, self.kv_dtype, self.q_dtype = dtype, kv_dtype, q_dtype
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
            kv_dtype=kv_dtype,
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
        )
        kernels = (
            design,
            dtype,
            dims,
            device,
            sinks,
            kv_dtype,
            q_dtype != dtype,
            float8_out,
            max_levels,
            (num_qo_heads, num_kv_heads),
        )
        self._variant = None if variant is None else AttentionVariant(variant, *kernels)
        # keeps the planned tensors alive while their pointers lie in the workspace
        self._levels: Sequence[BSRView] = ()

        self._library = library()
        self._plan_level = by_name("plan_level")
        self._run, self._run_with_options = by_name("run", last="q_rope"), by_name("run", last="out_scale")
        try:
            self._handle: int = self._library.attention_create(
                self._config.pack(self._variant), self._config.kernel_files(self._variant)
            )
        except RuntimeError as error:
            if self._variant is not None and device.type == "cpu":
                raise
            forget_kernels(error)
            self._handle = self._library.attention_create(
                self._config.pack(self._variant), self._config.kernel_files(self._variant)
            )
        weakref.finalize(self, self._library.attention_destroy, self._handle)
        compiled.know(self._handle, self)
        sizes = unpack("WorkspaceSize", self._library.workspace_size(self._handle))
        try:
            self._schedule = _zeros(int(sizes["schedule"]), device)
            self._partial_o = torch.empty(int(sizes["partial_o"]) // 4, dtype=torch.float32, device=device)
            self._partial_lse = torch.empty(
                int(sizes["partial_lse"]) // 4, dtype=torch.float32, device=device
            )
            self._row_ranges = _zeros(int(sizes["row_ranges"]), device)
        except RuntimeError as error:  # torch.OutOfMemoryError is one
            room = (
                f"max_rows = {max_rows}, max_batch = {max_batch}, max_levels = {max_levels} need a "
                f"workspace of {sum(sizes.item())} bytes on {device}"
            )
            raise type(error)(f"{room}, which torch cannot allocate: {error}") from None
        self._library.set_workspace(
            self._handle, self._schedule, self._partial_o, self._partial_lse, self._row_ranges
        )

    @property
    def workspace_bytes(self) -> int:
        """Bytes of device memory that this object holds."""
        return sum(
            t.numel() * t.element_size()
            for t in (self._schedule, self._partial_o, self._partial_lse, self._row_ranges)
        )

    def with_room(self, *, max_rows: int = 0, max_batch: int = 0, max_levels: int = 0) -> Attention:
        """Another Attention like this one, with room for at least so much, for batches that outgrow this one;
        this one if it has the room. It has a workspace of its own and no plan yet. CUDA graphs that captured
        this one go on with this one, which must live as long as they.

        Raises:
            ValueError: what the constructor refuses.
            RuntimeError: a CUDA graph is being captured, and this one has too little room.
        """
        wanted = {"max_rows": max_rows, "max_batch": max_batch, "max_levels": max_levels}
        larger = {
            name: value for name, value in wanted.items() if check_int(name, value, 0) > getattr(self, name)
        }
        if not larger:
            return self
        if self.device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            raise RuntimeError(
                f"{', '.join(larger)} must have grown before the CUDA graph is captured: a workspace cannot "
                f"be allocated in it"
            )
        return Attention(**(vars(self._config) | larger))

    def __reduce_ex__(self, protocol: SupportsIndex) -> NoReturn:
        """Refuses copy.copy, copy.deepcopy and pickle: always a TypeError."""
        raise TypeError("an Attention owns its workspace and cannot be copied or pickled: make another one")

    def plan(self, composition: Composition | BSRView, *, variant_args: VariantArgs | None = None) -> None:
        """Computes the schedule of a batch: one kernel on the current stream, no synchronisation; may be
        captured in a CUDA graph.

        The tensors of the composition are read on the device, by this call's kernel and by those of the
        following `run()`s: leave them unchanged until those have run.

        Args:
            variant_args: what the runs will be given, if the variant has a mask: a kernel in front then asks
                the mask about every token of every row, and neither plan nor runs look at KV tiles that no
                row of a row tile sees. Without, the mask alone hides. A mask without parameters needs none.

        Raises:
            ValueError: an argument that is wrong in shape, dtype or device; on a CPU also in value (page ids
                beyond the cache: by `run`, which knows it). What is wrong in a Composition is named with its
                level. There is then no plan, not even the one before. On CUDA wrong values are clamped, so
                that nothing outside the buffers is touched, and reported by `raise_for_errors()`, which is
                called here when ATTN_BACKEND_DEBUG=1.
            RuntimeError: another thread uses this object.
        """
        level = -1  # the one being checked
        try:
            levels = (
                (composition,)
                if isinstance(composition, BSRView)
                else levels_of(composition, self.max_levels, self.max_rows)
            )
            has_variant = self._variant is not None or variant_args is not None
            finds_row_ranges = has_variant and self._variant_of(variant_args).bind_to_plan(
                self._handle, variant_args, levels
            )
            errors = 0
            for level, view in enumerate(levels):
                table = view.table
                causal, window_left = visibility_of(view, len(levels), self._variant)
                has_slots = view.pages_change and view.has_slots and not causal and window_left < 0
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
                )
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
            if level >= 0 and isinstance(error, RuntimeError):
                explain_failure(tensors_of(levels[level]))
            if level >= 0 and isinstance(error, ValueError) and isinstance(composition, Composition):
                raise ValueError(f"levels[{level}]: {error}") from None
            raise
        self._levels = levels

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
                add to a batch to replay a CUDA graph of a fixed size: no kernel writes their out and lse. A
                new out holds anything there, NaN among it. Rows of the plan beyond q's are not computed.
            q_rope: of MLA's latents, whose V is K's first columns: [rows, num_qo_heads, head_dim -
                head_dim_v], the last columns of q, with strides of its own; q is then [rows, num_qo_heads,
                head_dim_v]. On CUDA with head_dim 576 and head_dim_v 512. None: q has all columns.
            kv: the cache of one layer. All tokens of a request must be finite, those that a row does not see
                too: zero times their values is added. A cache of 0 pages, or K and V of 0 tokens, serves
                plans whose requests have no tokens.
            out: [rows, num_qo_heads, head_dim_v], of dtype, with an out_scale float8_e4m3fn; None: a new one.
                It may be q itself, else must not overlap q or the cache (not checked).
            lse: float32 [rows, num_qo_heads], filled with the natural-log sum of exponentials when given;
                -inf for a row that sees nothing (its output is 0).
            return_lse: returns the attention state, for `merge_state`; lse is allocated if it is None.
            sm_scale: multiplies q . k, above 0; default head_dim ** -0.5.
            logits_soft_cap: cap * tanh(logit / cap) when above 0; 0 with a variant, which can be combined
                with soft_cap.
            after_append: promises that `append_kv` was called on this stream since the plan, and that the
                composition's tensors were complete before. The Hopper kernel then starts while that one still
                runs, and has read the schedule by the time the new tokens are in the cache. Others wait.
            variant_args: the variant's parameters by their names, tensors on this device or numbers. A
                captured CUDA graph has the numbers and the tensors' addresses, as they were: change what
                tensors hold, not which they are.
            sinks: float32 [num_qo_heads]: exp(sink) joins the sum of exponentials of each row, once; lse
                includes it. Leave them out of states that are to be merged with others.
            q_scale: of a float8 q, whose elements stand for numbers that are larger by this factor; None: 1.
                A number above 0; or a float32 tensor of such, [], [1] or [num_kv_heads], read when the kernel
                runs.
            out_scale: the output is divided by it, rounded to the nearest float8_e4m3fn number, and limited
                to +-448. A number above 0; or a float32 tensor of one such, read when the kernel runs. lse
                stays what it is. Needs float8_out.
            selected: the tokens that this layer's rows attend to, under a plan of `BSRView.selected`: a
                kernel in front writes their slots where the plan has them. None: what these hold already. Not
                in a function under torch.compile: there `selected_slots` writes them before.

        Returns:
            out; with return_lse (out, lse).

        Raises:
            ValueError: an argument that is wrong in type, shape, dtype, device or stride, or no plan yet; on
                a CPU also a page id beyond the cache.
            RuntimeError: another thread uses this object.
        """
        if is_compiling():
            if selected is not None:
                raise ValueError(
                    "selected is given, must be None in a compiled function: call selected_slots before, "
                    "into the slots of the plan"
                )
            explain_failed_run(
                q,
                q_rope,
                kv,
                out,
                lse,
                sinks,
                self._sm_scale if sm_scale is None else sm_scale,
                logits_soft_cap,
                after_append,
                None,
            )
            out = self._new_out(q, out_scale) if out is None else out
            lse = q.new_empty(q.shape[:2], dtype=torch.float32) if return_lse and lse is None else lse
            options = {
                "lse": lse,
                "sm_scale": sm_scale,
                "logits_soft_cap": logits_soft_cap,
                "after_append": after_append,
                "sinks": sinks,
            }
            out = compiled.run(
                self._handle,
                q,
                kv,
                out,
                variant_args,
                options | {"q_rope": q_rope, "q_scale": q_scale, "out_scale": out_scale},
            )
            return (out, lse) if return_lse else out  # type: ignore[return-value]
        try:
            check_handle("q", q)
            if q_rope is not None:
                check_handle("q_rope", q_rope)
            if out is None:
                out = self._new_out(q, out_scale)
            else:
                check_handle("out", out)
            if lse is not None:
                check_handle("lse", lse)
            elif return_lse:
                lse = q.new_empty(q.shape[:2], dtype=torch.float32)
            if self._variant is not None or variant_args is not None:
                self._bind(variant_args, q)
            scale = self._sm_scale if sm_scale is None else sm_scale
            if (
                sinks is None
                and q_scale is None
                and out_scale is None
                and kv.k_scale is None
                and kv.v_scale is None
                and selected is None
            ):
                errors = self._run(
                    handle=self._handle,
                    q=q,
                    k=kv.k,
                    v=kv.v,
                    out=out,
                    lse=lse,
                    sm_scale=scale,
                    logits_soft_cap=logits_soft_cap,
                    after_append=after_append,
                    q_rope=q_rope,
                )
            else:
                if sinks is not None:
                    check_handle("sinks", sinks)
                if self._variant is not None:
                    self._variant.check_scales(
                        kv, self._levels, self._config.cascade is not False and not self.batch_invariant
                    )
                run = (
                    self._run_with_options
                    if selected is None
                    else partial(by_name("run"), **selected.for_library())
                )
                errors = run(
                    handle=self._handle,
                    q=q,
                    k=kv.k,
                    v=kv.v,
                    out=out,
                    lse=lse,
                    sm_scale=scale,
                    logits_soft_cap=logits_soft_cap,
                    after_append=after_append,
                    q_rope=q_rope,
                    sinks=sinks,
                    k_scale=kv.k_scale,
                    v_scale=kv.v_scale,
                    q_scale=checked_scale("q_scale", q_scale),
                    out_scale=checked_scale("out_scale", out_scale),
                )
        except (
            AttributeError,
            OverflowError,
            RuntimeError,
            TypeError,
        ) as error:  # examined only on failure: each layer's call would pay for it
            if self._variant is not None and self._variant.loads_missing_kernel(self._handle, error):
                given: dict[str, Any] = {
                    "out": out,
                    "lse": lse,
                    "return_lse": return_lse,
                    "sm_scale": sm_scale,
                    "after_append": after_append,
                }
                given |= {
                    "q_rope": q_rope,
                    "variant_args": variant_args,
                    "sinks": sinks,
                    "q_scale": q_scale,
                    "out_scale": out_scale,
                    "selected": selected,
                }
                # not the run of a subclass, which has not ended yet
                return Attention.run(self, q, kv, **given)
            explain_failed_run(
                q,
                q_rope,
                kv,
                out,
                lse,
                sinks,
                self._sm_scale if sm_scale is None else sm_scale,
                logits_soft_cap,
                after_append,
                selected,
            )
            raise
        if errors:
            refuse_run(errors, self._levels, kv.num_pages)
        if self._variant is not None and self._variant.is_interpreted:
            whole_q = q if q_rope is None else torch.cat((q, q_rope), -1)
            self._variant.interpret(self._levels, whole_q, kv, out, lse, scale, sinks, q_scale, out_scale)
        return out if lse is None or not return_lse else (out, lse)

    def _new_out(self, q: Tensor, out_scale: Scale) -> Tensor:
        dtype = self.dtype if out_scale is None else torch.float8_e4m3fn
        if self.head_dim_v == self.head_dim and self.q_dtype == dtype:
            return torch.empty_like(q)
        return q.new_empty((q.shape[0], self.num_qo_heads, self.head_dim_v), dtype=dtype)

    def _bind(self, variant_args: VariantArgs | None, q: Tensor) -> None:
        """Gives the variant its arguments, for the run that follows."""
        self._variant_of(variant_args).bind(self._handle, variant_args, q)

    def _variant_of(self, variant_args: VariantArgs | None) -> AttentionVariant:
        if self._variant is None:
            refuse("variant_args", variant_args, "None: this Attention has no variant")
        return self._variant

    def schedule(self) -> Schedule:
        """A copy of the last plan's schedule on the CPU (synchronises)."""
        config = unpack("ScheduleConfig", self._library.schedule_config(self._handle))
        layout = unpack("ScheduleLayout", self._library.schedule_layout(self._handle))
        return Schedule.read(self._schedule.cpu(), config, layout)

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


def _zeros(num_bytes: int, device: torch.device) -> Tensor:
    """On a CPU without torch.zeros: it waits for torch's threads, which a forked child does not have."""
    if device.type != "cpu":
        return torch.zeros(num_bytes, dtype=torch.uint8, device=device)
    memory = torch.empty(num_bytes, dtype=torch.uint8, device=device)
    ctypes.memset(memory.data_ptr(), 0, num_bytes)
    return memory


_arguments = inspect.signature(Attention.__init__)
# What help() and editors show: otherwise that of __new__.
Attention.__signature__ = _arguments.replace(parameters=list(_arguments.parameters.values())[1:])  # type: ignore[attr-defined]
