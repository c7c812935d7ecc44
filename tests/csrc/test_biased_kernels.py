"""Biases with a slope (ALiBi) in the attention kernels, without a GPU.

Hopper's kernels visit KV tiles from last to first, keep the maxima that rows find first, and add the bias
where they exponentiate.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import case_tensors
import cases
import device_attention
import host_planner
import numpy
import oracle
import pytest
import torch
from compositions import Shape
from device_attention import CACHES, DeviceAttention
from device_forests import run_forest
from tiers import in_turn
from torch import Tensor
from variant_fuzz.catalogue import by_reference

from attn_backend import Attention, BSRView, KVCache, PageTable, Variant
from attn_backend.variants import builtin

pytestmark = [pytest.mark.slow, pytest.mark.skipif(host_planner.COMPILER is None, reason="needs g++")]

CPU = torch.device("cpu")
KERNELS = device_attention.KERNELS
ALIBI = builtin.alibi()
FORMS = ((torch.bfloat16, 64), (torch.float16, 128))
FAR = 131071  # the position of a row, far beyond the others


def biased(slopes: Tensor) -> oracle.Variant:
    return oracle.Variant(
        logits=lambda logits, at: logits + slopes[at.head].double() * (at.token - at.position)
    )


def slopes_of(name: str, heads: int) -> Tensor:
    """The slopes of a model, and other slopes that no model should have."""
    some = {
        "model": builtin.alibi_slopes(heads),
        "steep": torch.linspace(0.7, 1.0, heads),
        "none": torch.zeros(heads),
        "falling": -builtin.alibi_slopes(heads),
        "both": torch.linspace(-0.5, 0.5, heads),
    }
    return some[name]


def check(
    case: case_tensors.Case,
    attention: DeviceAttention,
    slopes: Tensor,
    variant: oracle.Variant | None = None,
    **args: Tensor,
) -> None:
    attention.plan(case.view, **({"variant_args": {"slopes": slopes, **args}} if args else {}))
    case.run(attention, out=case.out, lse=case.lse, variant_args={"slopes": slopes, **args})  # type: ignore[arg-type]
    case_tensors.check(case, case.out, case.lse, case.expected(variant=variant or biased(slopes)))
    case_tensors.check_padding(case)
    assert attention.schedule().errors == 0


SLOPES = ("model", "steep", "none", "falling", "both")


@pytest.mark.parametrize("name", SLOPES)
@pytest.mark.parametrize("kernel", KERNELS)
def test_every_kind_of_row_tile(emulated: Path, kernel: str, name: str) -> None:
    """Items with several KV tiles, parts of split tiles, and rows that see one token, nothing, or nothing in
    the last KV tile.
    """
    lens = (((300, 7), (300, 3)), ((90, 5, 130, 40), (90, 700, 200, 45)), ((1, 2, 1, 3), (70, 300, 0, 1290)))
    turn = SLOPES.index(name) + KERNELS.index(kernel)
    for number, (qo_lens, kv_lens) in enumerate(lens):
        for _, (dtype, head_dim) in in_turn(FORMS, turn + number, without_gpu=1):
            sizes = {
                "num_kv_heads": 1,
                "group_size": (1, 3, 4)[number],
                "head_dim": head_dim,
                "num_ctas": 5,
                "padding_rows": 2,
            }
            spec = cases.Spec(
                qo_lens,
                kv_lens,
                dtype=dtype,
                seed=number,
                page_size=(16, 5)[number % 2],
                window_left=70 if number == 1 else -1,
                **sizes,
            )
            case = case_tensors.build(spec, CPU)
            made = case.attention(kernel=kernel, cascade=False, variant=ALIBI)
            check(
                case, DeviceAttention(emulated, made, kernel, number, ALIBI), slopes_of(name, spec.group_size)
            )


@pytest.mark.parametrize("cache", CACHES)
def test_every_form_of_cache(emulated: Path, cache: str) -> None:
    spec = cases.Spec(
        (1, 70, 3, 20),
        (200, 270, 300, 150),
        num_kv_heads=2,
        group_size=2,
        head_dim=64,
        num_ctas=3,
        aligned=True,
    )
    case = case_tensors.build(spec.with_(**CACHES[cache]), CPU)
    attention = DeviceAttention(
        emulated, case.attention(kernel="hopper", cascade=False, variant=ALIBI), "hopper", 1, ALIBI
    )
    check(case, attention, slopes_of("model", 4))
    assert attention.launched == (
        "attention" if cache in ("pages", "large pages", "ragged") else "attention_rows"
    )


def test_pairs_from_the_work_queue(emulated: Path) -> None:
    case = case_tensors.build(
        cases.Spec(
            (200, 20, 1, 100, 300) * 2, (200, 20, 90, 100, 350) * 2, num_kv_heads=2, group_size=4, num_ctas=8
        ),
        CPU,
    )
    attention = DeviceAttention(emulated, case.attention(kernel="hopper", variant=ALIBI), "hopper", 0, ALIBI)
    check(case, attention, slopes_of("model", 8))
    assert attention.schedule().uses_queue


@pytest.mark.parametrize("kernel", KERNELS)
def test_scores_that_outgrow_the_first_maxima(emulated: Path, kernel: str) -> None:
    """Logits around tens: logits of earlier tokens exceed the nearest ones' by far, most of all if a row has
    seen only one token.
    """
    for number, (dtype, head_dim) in enumerate(FORMS):
        for name in ("model", "none", "falling"):
            spec = cases.Spec(
                (200, 2),
                (400, 600),
                num_kv_heads=1,
                group_size=2,
                head_dim=head_dim,
                dtype=dtype,
                sm_scale=10 / head_dim**0.5,
                num_ctas=2,
            )
            case = case_tensors.build(spec.with_(seed=number), CPU)
            attention = DeviceAttention(
                emulated, case.attention(kernel=kernel, variant=ALIBI), kernel, number, ALIBI
            )
            check(case, attention, slopes_of(name, 2) / 8)


@pytest.mark.parametrize("first", [True, False])
@pytest.mark.parametrize("kernel", KERNELS)
def test_a_token_of_large_scores(emulated: Path, kernel: str, first: bool) -> None:
    """The first token, as in models, where the bias makes its scores small, or the last token.

    In float16 the other tokens must not vanish next to it.
    """
    for number, (dtype, head_dim) in enumerate(FORMS):
        spec = cases.Spec(
            (150,),
            (500,),
            num_kv_heads=1,
            group_size=2,
            head_dim=head_dim,
            dtype=dtype,
            num_ctas=1,
            causal=first,
            seed=number,
        )
        case = case_tensors.build(spec, CPU)
        token = case.slots[0][0 if first else -1]
        mean = case.q[: case.rows].double().mean((0, 1))
        # 40 for a row along the mean of all: a score of 60 to the base of 2.
        row = (mean / mean.norm() ** 2 * 40 * head_dim**0.5).to(dtype)
        case.q[: case.rows] = mean.to(dtype) + case.q[: case.rows] / 16
        case.k_slots[token, 0] = row
        case.kv.k[token // spec.page_size, token % spec.page_size, 0] = row
        attention = DeviceAttention(
            emulated, case.attention(kernel=kernel, variant=ALIBI), kernel, number, ALIBI
        )
        check(case, attention, torch.tensor([1.0, 0.15]))


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("kernel", KERNELS)
def test_rows_far_from_all_that_they_see(emulated: Path, kernel: str, causal: bool) -> None:
    """Biases of a hundred thousand, where a float32 has at most seven fractional bits, and slopes that are
    not powers of 2. Hopper's row tiles of 32 rows and more do not round there.
    """
    for number, (dtype, head_dim) in enumerate(FORMS):
        generator = torch.Generator().manual_seed(number)
        rows, tokens = (3, 100)[number], 386  # two in the last KV tile: the tile before it counts too
        q, k, v = (
            torch.randn(n, heads, head_dim, generator=generator).to(dtype)
            for n, heads in ((rows, 2), (tokens, 1), (tokens, 1))
        )
        positions = torch.arange(FAR - rows + 1, FAR + 1, dtype=torch.int32)
        view = BSRView(
            torch.tensor([0, rows], dtype=torch.int32),
            PageTable.ragged(torch.tensor([0, tokens], dtype=torch.int32)),
            causal=False,
            positions=positions,
        )
        variant = ALIBI & builtin.causal() if causal else ALIBI
        made = Attention(
            2,
            1,
            head_dim,
            dtype=dtype,
            device="cpu",
            max_rows=rows,
            max_batch=1,
            variant=ALIBI,
            kernel=kernel,
            num_ctas=2,
            max_levels=2,
        )
        attention = DeviceAttention(emulated, made, kernel, number, variant)
        attention.plan(view)
        for slopes in (torch.tensor([0.9171, 0.7333]), torch.tensor([1.0, -0.4141])):
            lse = torch.full((rows, 2), torch.nan)
            out = attention.run(q, KVCache(k[:, None], v[:, None]), lse=lse, variant_args={"slopes": slopes})
            # The oracle places rows at the end of the tokens: `behind` tokens nearer.
            behind = FAR + 1 - tokens
            far = oracle.Variant(
                logits=lambda logits, at, s=slopes, b=behind: (
                    logits + s[at.head].double() * (at.token - at.position - b)
                )
            )
            o, expected = oracle.attention(q, k, v, causal=False, variant=far)
            is_rounded = kernel == "generic" or rows < 16
            assert float((out.double() - o).norm() / o.norm()) <= (
                1e-2 if is_rounded else cases.TOLERANCE[dtype]
            )
            torch.testing.assert_close(lse.double(), expected, rtol=2e-7, atol=1e-3)


@pytest.mark.parametrize("kernel", KERNELS)
def test_rows_at_the_end_of_many_tokens(emulated: Path, kernel: str) -> None:
    """Steep slopes: tokens far from a row have no weight, in any part of the KV."""
    for number, (dtype, head_dim) in enumerate(FORMS):
        spec = cases.Spec(
            (1, 33),
            (9000, 5000),
            num_kv_heads=1,
            group_size=2,
            head_dim=head_dim,
            dtype=dtype,
            num_ctas=4,
            seed=number,
        )
        case = case_tensors.build(spec, CPU)
        attention = DeviceAttention(
            emulated, case.attention(kernel=kernel, variant=ALIBI), kernel, number, ALIBI
        )
        check(case, attention, torch.tensor([1.0, 0.01]))


@pytest.mark.parametrize("options", [{"cascade": "always"}, {"batch_invariant": True}], ids=str)
@pytest.mark.parametrize("kernel", KERNELS)
def test_prefixes_and_chunks(emulated: Path, kernel: str, options: dict[str, object]) -> None:
    merged = 0
    for seed in range(4):
        rng = numpy.random.default_rng([seed, 51])
        dtype, head_dim = FORMS[seed % 2]
        shape = Shape(
            num_kv_heads=2,
            group_size=2,
            page_size=16,
            head_dim=head_dim,
            dtype=dtype,
            num_ctas=7,
            logits_soft_cap=0.0,
        )
        slopes = slopes_of(("model", "steep", "both", "falling")[seed], 4)
        problem, links = run_forest(
            emulated, kernel, rng, shape, seed, options, ALIBI, variant_args={"slopes": slopes}
        )
        problem.check(problem.expected(variant=biased(slopes)))
        merged += links
    assert merged > 0


def test_bits_of_a_row_do_not_depend_on_others(emulated: Path) -> None:
    """Even if other rows find larger scores later, or see nothing."""
    spec = cases.Spec(
        (64, 70), (400, 320), num_kv_heads=1, group_size=1, dtype=torch.float16, sm_scale=1.0, num_ctas=2
    )
    case = case_tensors.build(spec, CPU)
    attention = DeviceAttention(
        emulated, case.attention(kernel="hopper", variant=ALIBI, batch_invariant=True), "hopper", 0, ALIBI
    )
    attention.plan(case.view)
    first = attention.run(case.q, case.kv, variant_args={"slopes": torch.tensor([0.05])}).clone()
    for changed in range(0, 64, 9):
        q = case.q.clone()
        q[changed] = 30 * q[changed]
        out = attention.run(q, case.kv, variant_args={"slopes": torch.tensor([0.05])})
        same = torch.arange(case.rows) != changed
        assert torch.equal(out[: case.rows][same], first[: case.rows][same])


@pytest.mark.parametrize("kernel", KERNELS)
def test_beside_a_mask_with_holes(emulated: Path, kernel: str) -> None:
    """KV tiles are listed, and some are skipped; the mask may hide the nearest tokens."""
    variant = ALIBI & builtin.document()
    for number, page_size in enumerate((16, 3)):
        spec = cases.Spec(
            (1, 150, 3, 20),
            (1400, 700, 900, 300),
            group_size=3,
            num_ctas=5,
            page_size=page_size,
            causal=False,
            seed=number,
        )
        case = case_tensors.build(spec, CPU)
        ids = torch.randint(
            4, (4, 8), generator=torch.Generator().manual_seed(number), dtype=torch.int32
        ).repeat_interleave(200, dim=1)
        slopes = slopes_of("model", 6) / 4
        seen = replace(
            biased(slopes),
            mask=lambda at, ids=ids: ids[at.request][at.position.clamp(0)] == ids[at.request][at.token],
        )
        attention = DeviceAttention(
            emulated, case.attention(kernel=kernel, variant=variant), kernel, number, variant
        )
        check(case, attention, slopes, seen, document_ids=ids)


TRANSFORMED = {
    "keys": ALIBI & builtin.rope(builtin.rope_frequencies(64)),
    "logits": ALIBI
    & Variant.from_source(
        "float logits(float logit, const ScoreRow&, int32_t) const { return logit * 0.5f; }", name="halved"
    ),
}


@pytest.mark.parametrize("name", TRANSFORMED)
def test_beside_other_hooks(emulated: Path, name: str) -> None:
    """Keys are transformed tile by tile, also in order from last to first.

    If another hook also changes logits, they are more than a bias.
    """
    variant = TRANSFORMED[name]
    assert variant.has_bias_slope == (name == "keys")
    spec = cases.Spec((150, 3), (600, 290), num_kv_heads=1, group_size=2, num_ctas=2, aligned=True)
    case = case_tensors.build(spec, CPU)
    slopes = slopes_of("model", 2)
    attention = DeviceAttention(
        emulated, case.attention(kernel="hopper", cascade=False, variant=variant), "hopper", 0, variant
    )
    halved = oracle.Variant(logits=lambda logits, at: biased(slopes).logits(logits, at) / 2)
    check(case, attention, slopes, by_reference(variant, {"slopes": slopes}) if name == "keys" else halved)
