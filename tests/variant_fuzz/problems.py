"""Random batches under a variant: cases of all forms of tables and caches, forests with shared prefixes, row
lists, levels. Unused memory is NaN.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import case_tensors
import cases
import compositions
import forests
import numpy
import oracle
import torch
from compositions import prefix_sum, random_table
from torch import Tensor

from attn_backend import Attention, BSRView, Composition, KVCache

from .arguments import Args, Sizes
from .catalogue import Entry

ROUNDING = 2e-6  # error of a float32 after a dozen operations


@dataclass(frozen=True)
class Form:
    """The configuration for which a variant is compiled. kernel: None on a CPU. sinks: whether runs may get
    some."""

    dtype: torch.dtype
    head_dim: int
    kernel: str | None
    device: torch.device
    sinks: bool = False


@dataclass
class Problem:
    """A batch, and the float64 result of each row, computed on the CPU: oracles of several processes would
    wait for each other on a GPU.

    rows: of q, in the order of `expected`, which takes the variant and the sinks. made_with: arguments of
    Attention. tells_plan: the variant's arguments.
    """

    kind: str
    made_with: dict[str, Any]
    composition: BSRView | Composition
    sizes: Sizes
    q: Tensor
    kv: KVCache
    out: Tensor
    lse: Tensor
    sm_scale: float | None
    rows: list[int]
    expected: Callable[[oracle.Variant, Tensor | None], tuple[Tensor, Tensor]]
    text: str
    sinks: Tensor | None = None  # float32 [num_qo_heads]
    tells_plan: bool = False

    def attention(self, entry: Entry, form: Form) -> Attention:
        made_with = {
            "num_qo_heads": self.q.shape[1],
            "head_dim": form.head_dim,
            "dtype": form.dtype,
            "sinks": form.sinks,
        } | self.made_with
        return Attention(device=form.device, kernel=form.kernel, variant=entry.variant, **made_with)

    def run(self, entry: Entry, form: Form, args: Args) -> None:
        attention = self.attention(entry, form)
        args = {
            name: value.to(form.device) if isinstance(value, Tensor) else value
            for name, value in args.items()
        }
        sinks = None if self.sinks is None else self.sinks.to(form.device)
        attention.plan(self.composition, variant_args=args if self.tells_plan else None)
        lse = self.lse if entry.variant.uses_softmax else None
        attention.run(
            self.q, self.kv, out=self.out, lse=lse, sm_scale=self.sm_scale, variant_args=args, sinks=sinks
        )
        if form.device.type == "cuda":
            attention.raise_for_errors()

    def check(self, entry: Entry, form: Form, args: Args) -> None:
        """Compares `out` and `lse` with float64; unused rows must still be NaN."""
        largest = 0.0  # logit, whose rounding error equals the error of the weights
        variant = entry.oracle(args)

        def logits(score: Tensor, at: oracle.Pairs) -> Tensor:
            nonlocal largest
            changed = variant.logits(score, at)
            if changed.numel():
                largest = max(largest, float(changed.abs().nan_to_num(0.0, posinf=0.0).amax()))
            return changed

        o_ref, lse_ref = self.expected(replace(variant, logits=logits), self.sinks)
        tolerance = cases.TOLERANCE[form.dtype] + ROUNDING * largest
        out, lse = self.out.cpu(), self.lse.cpu()
        absent = torch.ones(len(out), dtype=torch.bool)
        absent[self.rows] = False
        assert out[absent].isnan().all(), "unused rows were written"
        error = out[self.rows].double() - o_ref
        assert not error.isnan().any(), (
            f"{int(error.isnan().any(-1).sum())} rows of {error.shape[:2].numel()} hold NaN"
        )
        if entry.has_steps:
            assert error.norm() <= 20 * tolerance * o_ref.norm(), (
                f"||o - ref|| / ||ref|| = {float(error.norm() / o_ref.norm()):.2e}"
            )
            return
        assert error.norm() <= tolerance * o_ref.norm(), (
            f"||o - ref|| / ||ref|| = {float(error.norm() / o_ref.norm()):.2e} > {tolerance:.1e}"
        )
        sizes = o_ref.norm(dim=-1)
        # Weights that are not normalized may all be almost zero, since products of Q and K can cancel.
        least = 1e-30 if entry.variant.uses_softmax or not len(sizes) else float(sizes.mean()) / 10 + 1e-30
        # A sink may leave a row with values too small for float16.
        lost = 2.0**-25 * form.head_dim**0.5 if form.dtype == torch.float16 else 0.0
        relative = (error.norm(dim=-1) - lost).clamp_min(0.0) / sizes.clamp_min(least)
        assert (relative <= 10 * tolerance).all(), (
            f"||o - ref|| / ||ref|| = {float(relative.max()):.2e} in one row > {10 * tolerance:.1e}"
        )
        if not entry.variant.uses_softmax:
            assert lse.isnan().all()
            return
        assert lse[absent].isnan().all(), "lse of unused rows was written"
        infinite = lse_ref == -torch.inf
        lse = lse[self.rows]
        assert torch.equal(lse == -torch.inf, infinite), "lse is -inf in other rows than it should be"
        lse_error = (lse.double() - lse_ref).masked_fill(infinite, 0).abs()
        lse_tolerance = cases.LSE_TOLERANCE + ROUNDING * largest
        if entry.variant.has_query:
            rare = (lse_error > lse_tolerance).sum()
            assert rare <= max(1, lse_error.numel() // 1000), (
                f"lse is more than {lse_tolerance:.1e} off in {int(rare)} of {lse_error.numel()} places"
            )
            lse_tolerance += cases.lse_tolerance_of_transformed_q(form.dtype, form.head_dim, self.sm_scale)
        assert (lse_error <= lse_tolerance).all(), (
            f"lse is {float(lse_error.nan_to_num(torch.inf).max()):.2e} off"
        )


def random_problem(seed: int, entry: Entry, form: Form) -> tuple[Problem, Args]:
    """Case number `seed` of a variant."""
    rng = numpy.random.default_rng([seed, 20])
    kinds = ["case", "forest", "batch invariant", "rows", *(["levels"] if entry.fits_levels else [])]
    kind = kinds[rng.integers(len(kinds))]
    make = {"case": _case, "batch invariant": _case, "forest": _forest, "rows": _rows, "levels": _levels}[
        kind
    ]
    problem = make(kind, rng, seed, entry, form)
    problem.tells_plan = bool(rng.random() < 0.75)
    if form.sinks and rng.random() < 0.9:
        problem.sinks = torch.from_numpy(rng.normal(0, 3, problem.sizes.heads)).float()
    return problem, entry.args(rng, problem.sizes)


def _is_causal(entry: Entry, causal: bool | None) -> bool:
    return entry.variant.causal or (entry.is_plain if causal is None else causal)


def _random_causal(rng: numpy.random.Generator) -> bool | None:
    return [None, None, True, False][rng.integers(4)]


def _case(kind: str, rng: numpy.random.Generator, seed: int, entry: Entry, form: Form) -> Problem:
    """A problem of cases.random_spec, cut to the variant's limits."""
    spec = cases.random_spec(seed, form.device.type)
    group_size = min(spec.group_size, entry.max_heads)
    causal = _random_causal(rng)
    is_causal = _is_causal(entry, causal)
    lens = [
        # functions need q_idx of at least 0; if causal, earlier queries see nothing
        (qo_len if is_causal or not kv_len else min(qo_len, kv_len), kv_len)
        for qo_len, kv_len in zip(spec.qo_lens, (min(n, entry.max_tokens) for n in spec.kv_lens), strict=True)
    ][: entry.max_requests]
    spec = spec.with_(
        qo_lens=tuple(qo_len for qo_len, _ in lens),
        kv_lens=tuple(kv_len for _, kv_len in lens),
        num_kv_heads=max(min(spec.num_kv_heads, entry.max_heads // group_size), 1),
        group_size=group_size,
        head_dim=form.head_dim,
        dtype=form.dtype,
        logits_soft_cap=0.0,
        causal=is_causal,
    )
    case = case_tensors.build(spec, form.device)
    lens_of = (list(spec.qo_lens), list(spec.kv_lens))

    def expected(variant: oracle.Variant, sinks: Tensor | None) -> tuple[Tensor, Tensor]:
        told = {
            "causal": spec.causal,
            "window_left": spec.window_left,
            "sm_scale": spec.sm_scale,
            "variant": variant,
            "sinks": sinks,
        }
        return oracle.paged_attention(
            case.q.cpu(),
            case.k_slots.cpu(),
            case.v_slots.cpu(),
            lens_of[0],
            [own.cpu() for own in case.slots],
            **told,
        )

    made_with: dict[str, Any] = {"num_kv_heads": spec.num_kv_heads, "num_ctas": spec.num_ctas}
    made_with |= {"max_rows": case.rows + 1 + seed % 5, "max_batch": len(spec.qo_lens) + 1 + seed % 3}
    made_with["batch_invariant"] = kind == "batch invariant"
    sizes = Sizes(*lens_of, spec.num_kv_heads * group_size)
    view = replace(case.view, causal=causal)
    return Problem(
        kind,
        made_with,
        view,
        sizes,
        case.q,
        case.kv,
        case.out,
        case.lse,
        spec.sm_scale,
        list(range(case.rows)),
        expected,
        f"{causal=} {spec}",
    )


def _shape(rng: numpy.random.Generator, entry: Entry, form: Form) -> compositions.Shape:
    shape = compositions.random_shape(rng, torch.device("cpu"))
    group_size = min(shape.group_size, entry.max_heads)
    num_kv_heads = max(min(shape.num_kv_heads, entry.max_heads // group_size), 1)
    return replace(
        shape,
        num_kv_heads=num_kv_heads,
        group_size=group_size,
        head_dim=form.head_dim,
        dtype=form.dtype,
        logits_soft_cap=0.0,
    )


def _batch(
    rng: numpy.random.Generator, shape: compositions.Shape, entry: Entry, **kinds: Any
) -> forests.Batch:
    elements = shape.num_kv_heads * shape.head_dim
    costs = {"kv_cost": elements, "pair_cost": shape.group_size * elements / 30, "budget": 8e6}
    batch = forests.random_batch(
        rng,
        shape.page_size,
        max_requests=min(int(rng.choice([2, 5, 12, 24, 64])), entry.max_requests),
        **costs,
        **kinds,
    )
    batch = batch.select(list(range(len(batch.qo_lens)))[: entry.max_requests])
    kv_lens = [min(kv_len, entry.max_tokens) for kv_len in batch.kv_lens]
    qo_lens = [
        min(qo_len, kv_len) if kv_len else qo_len
        for qo_len, kv_len in zip(batch.qo_lens, kv_lens, strict=True)
    ]
    pages = [own[: -(-kv_len // batch.page_size)] for own, kv_len in zip(batch.pages, kv_lens, strict=True)]
    return replace(batch, qo_lens=qo_lens, kv_lens=kv_lens, pages=pages)


def _of_forest(
    kind: str,
    problem: forests.Problem,
    entry: Entry,
    form: Form,
    composition: BSRView | Composition,
    row_list: list[int] | None = None,
    **made_with: Any,
) -> Problem:
    batch, shape = problem.batch, problem.shape
    rows = list(range(batch.rows)) if row_list is None else row_list
    place = torch.tensor(rows, dtype=torch.int64)

    def expected(variant: oracle.Variant, sinks: Tensor | None) -> tuple[Tensor, Tensor]:
        def placed(at: oracle.Pairs) -> oracle.Pairs:
            return replace(at, row=place[at.row])

        of_rows = replace(
            variant,
            logits=lambda logits, at: variant.logits(logits, placed(at)),
            mask=lambda at: variant.mask(placed(at)),
            output=lambda o, at: variant.output(o, placed(at)),
            query=lambda q, at: variant.query(q, placed(at)),
        )
        told = {
            "causal": batch.causal,
            "window_left": batch.window_left,
            "sm_scale": shape.sm_scale,
            "variant": of_rows,
            "sinks": sinks,
        }
        memory = problem.memory
        return oracle.paged_attention(
            problem.q.cpu()[place],
            memory.k_slots.cpu(),
            memory.v_slots.cpu(),
            batch.qo_lens,
            [own.cpu() for own in memory.slots],
            **told,
        )

    room = {"max_rows": len(problem.q) + 1, "max_batch": len(batch.qo_lens) + 1}
    made_with = {"num_kv_heads": shape.num_kv_heads, "num_ctas": shape.num_ctas, **room, **made_with}
    sizes = Sizes(batch.qo_lens, batch.kv_lens, shape.num_kv_heads * shape.group_size)
    text = (
        f"{shape} qo_lens={batch.qo_lens} kv_lens={batch.kv_lens} causal={batch.causal} "
        f"window_left={batch.window_left}"
    )
    return Problem(
        kind,
        made_with,
        composition,
        sizes,
        problem.q,
        problem.memory.kv,
        problem.out,
        problem.lse,
        shape.sm_scale,
        rows,
        expected,
        text,
    )


def _forest(kind: str, rng: numpy.random.Generator, seed: int, entry: Entry, form: Form) -> Problem:
    """Requests with common prefixes, which plan uses at any cost."""
    shape = _shape(rng, entry, form)
    batch = _batch(rng, shape, entry, depth=int(rng.integers(1, 5)))
    causal = _random_causal(rng)
    batch = replace(batch, causal=_is_causal(entry, causal))
    problem = forests.make_problem(rng, shape, batch, form.device)
    view = replace(batch.view(rng, form.device), causal=causal)
    return _of_forest(kind, problem, entry, form, view, cascade="always" if rng.random() < 0.8 else True)


def _rows(kind: str, rng: numpy.random.Generator, seed: int, entry: Entry, form: Form) -> Problem:
    """The rows of the batch are anywhere in Q, with others between them."""
    shape = _shape(rng, entry, form)
    batch = _batch(rng, shape, entry, depth=int(rng.integers(0, 3)))
    causal = _random_causal(rng)
    batch = replace(batch, causal=_is_causal(entry, causal))
    problem = forests.make_problem(rng, shape, batch, form.device)
    room = batch.rows + int(rng.integers(0, 30))
    row_list = rng.permutation(room)[: batch.rows].tolist()
    q = torch.full((room, *problem.q.shape[1:]), torch.nan, dtype=problem.q.dtype, device=form.device)
    q[row_list] = problem.q[: batch.rows]
    problem = replace(
        problem,
        q=q,
        out=torch.full_like(q, torch.nan),
        lse=torch.full(q.shape[:2], torch.nan, device=form.device),
    )
    rows = torch.tensor([*row_list, -1], dtype=torch.int32, device=form.device)
    view = replace(batch.view(rng, form.device), causal=causal, rows=rows)
    return _of_forest(kind, problem, entry, form, view, row_list)


def _levels(kind: str, rng: numpy.random.Generator, seed: int, entry: Entry, form: Form) -> Problem:
    """Each request split in two: the front of its tokens in one level, the rest in another, with their
    positions. Only the front consists of whole pages.
    """
    shape = _shape(rng, entry, form)
    batch = replace(_batch(rng, shape, entry, depth=int(rng.integers(0, 3))), window_left=-1)
    causal = _is_causal(entry, None) if rng.random() < 0.7 else True
    batch = replace(batch, causal=causal)
    problem = forests.make_problem(rng, shape, batch, form.device)
    device, size = form.device, batch.page_size
    # A causal front ends before the first row; with only a mask it may end anywhere.
    ends = [
        kv_len - qo_len if causal else kv_len
        for qo_len, kv_len in zip(batch.qo_lens, batch.kv_lens, strict=True)
    ]
    cuts = [int(rng.integers(0, max(end, 0) // size + 1)) for end in ends]

    def index(values: list[int]) -> Tensor:
        return torch.tensor(values, dtype=torch.int32, device=device)

    positions = [
        kv_len - qo_len + i
        for qo_len, kv_len in zip(batch.qo_lens, batch.kv_lens, strict=True)
        for i in range(qo_len)
    ]
    requests = [i for i, qo_len in enumerate(batch.qo_lens) for _ in range(qo_len)]
    more = [0] * (len(problem.q) - batch.rows)
    of_rows = {
        "positions": index(positions + more),
        "requests": index(requests + more) if rng.random() < 0.5 else None,
    }
    offsets = [cut * size for cut in cuts]
    fronts = random_table(
        rng, device, size, [pages[:cut] for pages, cut in zip(batch.pages, cuts, strict=True)], offsets
    )
    backs = random_table(
        rng,
        device,
        size,
        [pages[cut:] for pages, cut in zip(batch.pages, cuts, strict=True)],
        [n - o for n, o in zip(batch.kv_lens, offsets, strict=True)],
    )
    qo_indptr = index(prefix_sum(batch.qo_lens))
    front = BSRView(
        qo_indptr,
        fronts,
        causal=False,
        kv_offsets=index([0] * len(cuts)) if rng.random() < 0.5 or entry.variant.window_left >= 0 else None,
        **of_rows,
    )
    back = BSRView(qo_indptr, backs, causal=causal, kv_offsets=index(offsets), **of_rows)
    levels = Composition([front, back] if rng.random() < 0.5 else [back, front])
    return _of_forest(kind, problem, entry, form, levels, max_levels=2)
