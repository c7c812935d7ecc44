"""The attention kernels and merge without a GPU, as in test_attention_kernels.py: rows in several row groups,
variants and their masks, levels, sinks.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import case_tensors
import cases
import device_attention
import forests
import host_planner
import numpy
import oracle
import pytest
import torch
from compositions import cascade_problem, prefix_sum, random_table, tree_problem
from device_attention import DeviceAttention
from device_forests import FORMS, batch_for, random_shape, run_forest
from tiers import HAS_GPU

from attn_backend import BSRView, Composition, Variant
from attn_backend.variants import builtin

pytestmark = [pytest.mark.slow, pytest.mark.skipif(host_planner.COMPILER is None, reason="needs g++")]

CPU = torch.device("cpu")
KERNELS = device_attention.KERNELS


@pytest.mark.parametrize("kernel", KERNELS)
def test_compositions(emulated: Path, kernel: str) -> None:
    """Rows of several row groups, row lists, states."""
    for seed in range(6):
        rng = numpy.random.default_rng([seed, 40])
        shape = random_shape(rng, seed)
        problem = (
            tree_problem(rng, shape, CPU) if seed % 2 else cascade_problem(rng, shape, CPU, 2 + seed % 3)
        )
        problem.run(DeviceAttention(emulated, problem.attention(kernel=kernel), kernel, seed))  # type: ignore[arg-type]
        problem.check()


@pytest.mark.parametrize("options", [{"cascade": "always"}, {"batch_invariant": True}], ids=str)
@pytest.mark.parametrize("kernel", KERNELS)
def test_forests_and_chunks(emulated: Path, kernel: str, options: dict[str, object]) -> None:
    """Rows that `plan` itself puts into several row groups: shared prefixes, and the chunks of a batch
    invariant plan.
    """
    merged = 0
    for seed in range(6):
        rng = numpy.random.default_rng([seed, 41])
        problem, links = run_forest(emulated, kernel, rng, random_shape(rng, seed), seed, options)
        problem.check()
        merged += links
    assert merged > 0


SLOPE = 0.02
# The variants of slanted_variant.h for the oracle.
VARIANTS = {
    "slanted": oracle.Variant(
        logits=lambda logits, at: logits + SLOPE * (at.head + 1) * (at.token - at.position),
        mask=lambda at: (at.token + at.row + at.index + at.kv_len + 5 * at.request + at.kv_head) % 3 != 0,
        output=lambda o, at: o + at.request % 4 + torch.arange(o.shape[-1]) % 3,
    ),
    "squared": oracle.Variant(logits=lambda logits, _at: logits * logits, uses_softmax=False),
}


@pytest.mark.parametrize(
    "options", [{"cascade": "always"}, {"cascade": False}, {"batch_invariant": True}], ids=str
)
@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("kernel", KERNELS)
def test_variants_know_requests_and_positions(
    emulated: Path, kernel: str, variant: str, options: dict[str, object]
) -> None:
    """In plain batches, after and inside shared prefixes, and in chunks of a batch invariant plan."""
    merged = 0
    for seed in range(4):
        rng = numpy.random.default_rng([seed, 43])
        shape = replace(random_shape(rng, 0), logits_soft_cap=0.0)
        problem, links = run_forest(emulated, kernel, rng, shape, seed, options, variant, slope=SLOPE)
        expected, lse = problem.expected(logits_soft_cap=0.0, variant=VARIANTS[variant])
        if variant == "squared":  # has none
            problem.lse[: len(lse)] = lse
        problem.check((expected, lse))
        merged += links
    assert (merged > 0) == (options != {"cascade": False})


def biased(score, b, h, q_idx, kv_idx):  # type: ignore[no-untyped-def]
    return score + slopes[h] * (kv_idx - q_idx)  # type: ignore[name-defined]  # noqa: F821


def same_block_or_sink(b, h, q_idx, kv_idx):  # type: ignore[no-untyped-def]
    return (kv_idx <= q_idx) & ((q_idx // 100 == kv_idx // 100) | (kv_idx < 4 + b))


@pytest.mark.parametrize("kernel", KERNELS)
def test_traced_functions(emulated: Path, kernel: str) -> None:
    """Planned with and without the mask's row ranges."""
    variant = Variant.from_functions(biased, same_block_or_sink, tensors={"slopes": torch.float32})
    expected = oracle.Variant(
        logits=lambda logits, at: logits + slopes[at.head] * (at.token - at.position),
        mask=lambda at: (
            (at.token <= at.position)
            & ((at.position // 100 == at.token // 100) | (at.token < 4 + at.request))
        ),
    )
    dtype, head_dim = FORMS[0]
    for number, page_size in enumerate((16, 3)):
        spec = cases.Spec(
            (1, 150, 3, 20),
            (700, 150, 300, 450),
            group_size=3,
            head_dim=head_dim,
            dtype=dtype,
            num_ctas=4,
            page_size=page_size,
            causal=False,
        )
        case = case_tensors.build(spec, CPU)
        slopes = torch.linspace(0.001, 0.02, 6)
        attention = DeviceAttention(
            emulated,
            case.attention(kernel=kernel, variant=variant, cascade="always"),
            kernel,
            number,
            variant,
        )
        attention.plan(case.view, variant_args={"slopes": slopes} if number == 0 else None)
        case.run(attention, out=case.out, lse=case.lse, variant_args={"slopes": slopes})  # type: ignore[arg-type]
        case_tensors.check(case, case.out, case.lse, case.expected(variant=expected))


@pytest.mark.parametrize(
    "options", [{"cascade": False}, {"cascade": "always"}, {"batch_invariant": True}], ids=str
)
@pytest.mark.parametrize("kernel", KERNELS)
def test_masks_with_holes(emulated: Path, kernel: str, options: dict[str, object]) -> None:
    """In row tiles of all kinds, with any CTA boundaries; by TMA and gathered."""
    variant = builtin.document()
    for number, (page_size, num_ctas) in enumerate(((16, 5), (3, 2), (64, 40))):
        dtype, head_dim = ((torch.bfloat16, 64), FORMS[0])[number % 2]
        spec = cases.Spec(
            (1, 150, 3, 20, 1),
            (1400, 700, 900, 300, 1000),
            group_size=3,
            head_dim=head_dim,
            dtype=dtype,
            num_ctas=num_ctas,
            page_size=page_size,
            causal=False,
            seed=number,
            sharing=0.5,
        )
        case = case_tensors.build(spec, CPU)
        ids = torch.randint(
            4, (5, 8), generator=torch.Generator().manual_seed(number), dtype=torch.int32
        ).repeat_interleave(200, dim=1)
        attention = DeviceAttention(
            emulated, case.attention(kernel=kernel, variant=variant, **options), kernel, number, variant
        )
        attention.plan(case.view, variant_args={"document_ids": ids})
        assert options != {"cascade": False} or int((attention.schedule().tiles[:, 3] < 0).sum()) >= 1
        case.run(attention, out=case.out, lse=case.lse, variant_args={"document_ids": ids})  # type: ignore[arg-type]
        seen = oracle.Variant(
            mask=lambda at, ids=ids: ids[at.request][at.position.clamp(0)] == ids[at.request][at.token]
        )
        case_tensors.check(case, case.out, case.lse, case.expected(variant=seen))


@pytest.mark.parametrize("kernel", KERNELS)
def test_kv_tiles_in_holes_are_not_read(emulated: Path, kernel: str) -> None:
    """V holds NaN there, which a mask would not hide. The transform of K depends on token positions."""
    dtype, head_dim = FORMS[0]
    twice = (
        "Pair key(Pair x, int32_t, int32_t, const KvToken& token) const { float f = token.position / 100 "
        "% 2 + 1; return {x.first * f, x.second * f}; }"
    )
    variant = builtin.document() & Variant.from_source(twice, name="twice")
    for number, (rows, page_size) in enumerate(((1, 16), (10, 3), (100, 64))):
        spec = cases.Spec(
            (rows,),
            (1300,),
            group_size=3,
            head_dim=head_dim,
            dtype=dtype,
            num_ctas=3,
            page_size=page_size,
            causal=False,
        )
        case = case_tensors.build(spec, CPU)
        ids = torch.zeros(1, 1300, dtype=torch.int32)
        ids[:, 200:800] = 1
        seen = oracle.Variant(
            mask=lambda at: (at.token < 200) | (at.token >= 800),
            key=lambda k, at: k * (torch.arange(1300) // 100 % 2 + 1)[None, :, None].double(),
        )
        expected = case.expected(variant=seen)
        hidden = case.slots[0][256:768]
        case.kv.v[hidden // page_size, hidden % page_size] = torch.nan
        attention = DeviceAttention(
            emulated, case.attention(kernel=kernel, variant=variant), kernel, number, variant
        )
        attention.plan(case.view, variant_args={"document_ids": ids})
        case.run(attention, out=case.out, lse=case.lse, variant_args={"document_ids": ids})  # type: ignore[arg-type]
        case_tensors.check(case, case.out, case.lse, expected)


def test_levels_say_where_their_tokens_and_rows_stand(emulated: Path) -> None:
    """A batch as a composition of two levels, split anywhere, gives the same result as its own view."""
    for seed in range(6):
        rng = numpy.random.default_rng([seed, 45])
        shape = replace(random_shape(rng, 0), logits_soft_cap=0.0)
        batch = forests.random_batch(
            rng,
            shape.page_size,
            kv_cost=shape.num_kv_heads * shape.head_dim * 16,
            budget=1e7,
            max_requests=12,
            max_rows=60,
        )
        batch = replace(batch, causal=False, window_left=-1)
        problem = forests.make_problem(rng, shape, batch, CPU)
        cuts = [int(rng.integers(0, length // batch.page_size + 1)) for length in batch.kv_lens]
        qo_indptr = torch.tensor(prefix_sum(batch.qo_lens), dtype=torch.int32)
        positions = torch.cat(
            [
                torch.arange(kv_len - qo_len, kv_len)
                for qo_len, kv_len in zip(batch.qo_lens, batch.kv_lens, strict=True)
            ]
        ).int()
        requests = torch.arange(len(cuts)).repeat_interleave(torch.tensor(batch.qo_lens)).int()
        fronts = (
            [pages[:cut] for pages, cut in zip(batch.pages, cuts, strict=True)],
            [cut * batch.page_size for cut in cuts],
        )
        backs = (
            [pages[cut:] for pages, cut in zip(batch.pages, cuts, strict=True)],
            [n - front for n, front in zip(batch.kv_lens, fronts[1], strict=True)],
        )
        levels = []
        for (pages, lens), offsets in ((fronts, None), (backs, torch.tensor(fronts[1], dtype=torch.int32))):
            table = random_table(rng, CPU, batch.page_size, pages, lens)
            levels.append(
                BSRView(
                    qo_indptr, table, causal=False, kv_offsets=offsets, positions=positions, requests=requests
                )
            )
        attention = DeviceAttention(
            emulated, problem.attention(kernel="generic", max_levels=2), "generic", seed, "placed"
        )
        variant = replace(
            VARIANTS["slanted"], mask=lambda at: (at.token + at.row + 5 * at.request + at.kv_head) % 3 != 0
        )
        problem.run(attention, Composition(levels), slope=SLOPE)  # type: ignore[arg-type]
        problem.check(problem.expected(variant=variant))


@pytest.mark.parametrize("kernel", KERNELS)
def test_sinks_join_the_sum_of_each_row_once(emulated: Path, kernel: str) -> None:
    for seed, options in enumerate(
        [{"cascade": "always"}, {"cascade": False}, {"batch_invariant": True}] * (3 if HAS_GPU else 2)
    ):
        rng = numpy.random.default_rng([seed, 44])
        shape = random_shape(rng, seed)
        batch = batch_for(rng, shape, seed, options)
        problem = forests.make_problem(rng, shape, batch, CPU)
        sinks = torch.from_numpy(rng.normal(0, 4, shape.num_kv_heads * shape.group_size)).float()
        sinks[seed % len(sinks)] = [-torch.inf, 5.0, -200.0][seed % 3]
        attention = DeviceAttention(emulated, problem.attention(kernel=kernel, **options), kernel, seed)
        problem.run(attention, batch.view(rng, CPU), sinks=sinks)  # type: ignore[arg-type]
        problem.check(problem.expected(sinks=sinks))
        problem.run(attention, batch.view(rng, CPU), sinks=torch.full_like(sinks, 200.0))  # type: ignore[arg-type]
        assert (problem.out[: batch.rows] == 0).all(), "a sink that outweighs everything, without overflow"
        assert (problem.lse[: batch.rows] == 200).all()
