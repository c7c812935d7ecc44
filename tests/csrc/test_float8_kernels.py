"""The attention kernels over 8-bit caches without a GPU (test_attention_kernels.py): dequantized in registers
for mma.sync, in the ring by the producer for wgmma.
"""

from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path

import cases
import host_planner
import numpy
import pytest
import torch
import variant_sources
from compositions import Shape, cascade_problem
from device_attention import KERNELS, DeviceAttention
from float8_cases import (
    DTYPES,
    MULTIPLIED_LSE_TOLERANCE,
    MULTIPLIED_TOLERANCE,
    Q_SCALES,
    SCALES,
    Float8Case,
    Needle,
    rounded_cache,
)
from float8_kernels import BATCHES, FORMS, run_and_check
from tiers import distinct, in_turn

from attn_backend import KVCache

pytestmark = [pytest.mark.slow, pytest.mark.skipif(host_planner.COMPILER is None, reason="needs g++")]


@pytest.mark.parametrize("form", distinct(FORMS, repeated={4}), ids=str)
@pytest.mark.parametrize("kernel", KERNELS)
def test_random_cases(emulated: Path, kernel: str, form: tuple[torch.dtype, int]) -> None:
    """Pages of 1 to 64 tokens, windows, soft caps, scales of every form, shared prefixes."""
    dtype, head_dim = form
    kv_dtype = DTYPES[dtype == torch.float16]
    turn = FORMS.index(form) + KERNELS.index(kernel)
    for number, (qo_lens, kv_lens) in in_turn(BATCHES, turn, without_gpu=2):
        rng = numpy.random.default_rng([number, head_dim, 82])
        spec = cases.Spec(
            qo_lens,
            kv_lens,
            num_kv_heads=2,
            group_size=int(rng.choice([1, 3, 4])),
            head_dim=head_dim,
            dtype=dtype,
            seed=number,
        )
        spec = spec.with_(
            page_size=int(rng.choice([1, 3, 16, 64])),
            num_ctas=int(rng.choice([3, 11])),
            run_pages=int(rng.choice([1, 1000])),
            sharing=0.9,
        )
        spec = spec.with_(
            window_left=int(rng.choice([-1, 60])),
            logits_soft_cap=float(rng.choice([0.0, 20.0])),
            causal=bool(rng.random() < 0.8),
        )
        k_form, v_form = (str(of) for of in rng.choice(SCALES, size=2))
        problem = Float8Case(spec, "cpu", kv_dtype, k_form, v_form)
        run_and_check(
            problem,
            emulated,
            kernel,
            number,
            wants_lse=number % 2 == 0,
            cascade=("always", False)[number % 2],
        )


# Hopper's kernel multiplies e4m3 Q (bf16) of 64 and 128 columns, and dequantizes Q of the other forms.
QUERIES = [
    *(("hopper", form) for form in distinct(FORMS, repeated={2})),
    *(("generic", form) for form in FORMS[1:3]),
]


@pytest.mark.parametrize(("kernel", "form"), QUERIES, ids=str)
def test_queries_of_8_bits(emulated: Path, kernel: str, form: tuple[torch.dtype, int]) -> None:
    """The generic kernel always dequantizes Q as it loads it: whole rows of a tile, and partial ones."""
    dtype, head_dim = form
    turn = QUERIES.index((kernel, form))
    for number, (qo_lens, kv_lens) in in_turn(BATCHES, turn, without_gpu=2):
        rng = numpy.random.default_rng([number, head_dim, 84])
        spec = cases.Spec(
            qo_lens,
            kv_lens,
            num_kv_heads=2,
            group_size=int(rng.choice([1, 3, 4])),
            head_dim=head_dim,
            dtype=dtype,
            seed=number,
        )
        spec = spec.with_(
            page_size=int(rng.choice([1, 3, 16, 64])),
            num_ctas=int(rng.choice([3, 11])),
            run_pages=int(rng.choice([1, 1000])),
            sharing=0.9,
        )
        spec = spec.with_(
            window_left=int(rng.choice([-1, 60])),
            logits_soft_cap=float(rng.choice([0.0, 20.0])),
            causal=bool(rng.random() < 0.8),
        )
        k_form, v_form = (str(of) for of in rng.choice(SCALES, size=2))
        problem = Float8Case(
            spec, "cpu", DTYPES[dtype == torch.float16], k_form, v_form, Q_SCALES[number % 3]
        )
        run_and_check(
            problem,
            emulated,
            kernel,
            number,
            wants_lse=number % 2 == 0,
            cascade=("always", False)[number % 2],
        )


@pytest.mark.parametrize(("rows", "place"), [(40, 0), (128, 9_000)])
def test_a_needle(emulated: Path, rows: int, place: int) -> None:
    """Emulated 8-bit products keep 14 bits of a sum: summing over all 16 384 tokens one by one loses 1 %."""
    needle = Needle(16_384, place, rows, 64, torch.device("cpu"))
    attention = DeviceAttention(emulated, needle.attention(kernel="hopper"), "hopper")
    attention.plan(needle.view)
    assert needle.error(attention.run(needle.q, needle.kv, sm_scale=needle.sm_scale)) <= 4e-3


def test_8_bit_products_of_variants(emulated: Path) -> None:
    """A variant's own logits and mask, which see scaled scores; a sink."""
    slanted = replace(
        variant_sources.slanted_oracle(0.03),
        mask=lambda at: (at.token + at.row + at.index + at.kv_len + 5 * at.request + at.kv_head) % 3 != 0,
    )
    for number, (qo_lens, kv_lens) in enumerate(BATCHES):
        spec = cases.Spec(
            qo_lens, kv_lens, num_kv_heads=2, group_size=2, head_dim=64, num_ctas=3, page_size=16, seed=number
        )
        problem = Float8Case(spec, "cpu", DTYPES[0], "head", "request", "head")
        case = problem.case
        attention = DeviceAttention(
            emulated, case.attention(kernel="hopper", **problem.options), "hopper", number, "slanted"
        )
        attention.plan(case.view)
        out = case.run(attention, logits_soft_cap=0.0, slope=0.03, **problem.run_options)  # type: ignore[arg-type]
        expected, _ = problem.expected(variant=slanted)
        assert (out[: case.rows].double() - expected).norm() <= MULTIPLIED_TOLERANCE * expected.norm()

        sinks = torch.linspace(-2, 3, 4)
        attention = DeviceAttention(
            emulated, case.attention(kernel="hopper", sinks=True, **problem.options), "hopper", number
        )
        attention.plan(case.view)
        case.run(attention, out=case.out, lse=case.lse, sinks=sinks, **problem.run_options)  # type: ignore[arg-type]
        expected, expected_lse = problem.expected(sinks=sinks)
        assert (case.out[: case.rows].double() - expected).norm() <= MULTIPLIED_TOLERANCE * expected.norm()
        assert (case.lse[: case.rows].double() - expected_lse).abs().max() <= MULTIPLIED_LSE_TOLERANCE


@pytest.mark.parametrize(
    ("head_dim", "head_dim_v"), distinct([(192, 128), (72, 200), (128, 64)], repeated={2})
)
@pytest.mark.parametrize("kernel", KERNELS)
def test_heads_of_different_widths(emulated: Path, kernel: str, head_dim: int, head_dim_v: int) -> None:
    """Loaded by TMA, gathered, in runs of tokens; V in separate memory."""
    caches = [
        {"page_size": 16},
        {"page_size": 3},
        {"page_size": 1, "run_pages": 1000},
        {"page_size": 1, "table_form": "ragged", "cache_form": "ragged"},
    ]
    turn = (192, 72, 128).index(head_dim) + KERNELS.index(kernel)
    for number, cache in in_turn(caches, turn, without_gpu=2):
        spec = cases.Spec(
            *BATCHES[number % 2 * 2],
            num_kv_heads=2,
            group_size=1 + number % 3,
            head_dim=head_dim,
            head_dim_v=head_dim_v,
            num_ctas=5,
            seed=number,
        )
        spec = spec.with_(**{"cache_form": "pair", **cache}, window_left=60 if number == 2 else -1)
        problem = Float8Case(spec, "cpu", DTYPES[head_dim_v // 8 % len(DTYPES)], SCALES[number + 1], "head")
        run_and_check(
            problem,
            emulated,
            kernel,
            number,
            wants_lse=number % 2 == 0,
            cascade=("always", False)[number % 2],
        )


# Query tokens, tokens, query heads, the cache, scales of K and of V: rows in one and in several row tiles, KV
# tiles that CTAs share, shared prefixes.
WIDE_BATCHES = (
    ((1, 2, 1), (200, 70, 0), 16, {"page_size": 16}, ("request and head", "head")),
    ((1, 1, 1), (130, 130, 130), 4, {"page_size": 1, "sharing": 0.9}, ("request", "request")),
    ((30,), (150,), 5, {"page_size": 7, "window_left": 60, "logits_soft_cap": 20.0}, ("head", "tensor")),
    (
        (5, 1),
        (90, 300),
        3,
        {"page_size": 1, "table_form": "ragged", "cache_form": "ragged"},
        ("number", "request and head"),
    ),
)


@pytest.mark.parametrize(
    ("kernel", "dtype"),
    distinct(itertools.product(KERNELS, (torch.bfloat16, torch.float16)), repeated={0, 3}),
    ids=str,
)
def test_wide_heads(emulated: Path, kernel: str, dtype: torch.dtype) -> None:
    """Dequantized on the way to shared memory, and scaled like other heads."""
    for number, (qo_lens, kv_lens, heads, cache, scales) in enumerate(WIDE_BATCHES):
        spec = cases.Spec(
            qo_lens,
            kv_lens,
            num_kv_heads=1 + number % 2,
            group_size=heads,
            head_dim=512,
            dtype=dtype,
            num_ctas=3,
            seed=number,
        )
        problem = Float8Case(spec.with_(**cache), "cpu", DTYPES[dtype == torch.float16], *scales)
        launched = run_and_check(
            problem,
            emulated,
            kernel,
            number,
            wants_lse=number % 2 == 0,
            cascade=("always", False)[number % 2 == 0],
        )
        assert launched == "attention"


def test_wide_values_in_the_bytes_of_keys(emulated: Path) -> None:
    """They are loaded twice, since their scales may differ."""
    spec = cases.Spec(
        (1, 30), (200, 90), num_kv_heads=1, group_size=16, head_dim=512, cache_form="pair", num_ctas=3
    )
    case, outs = Float8Case(spec, "cpu", DTYPES[0]).case, []
    for v in (case.kv.k, case.kv.k.clone()):
        attention = DeviceAttention(emulated, case.attention(kernel="hopper", kv_dtype=DTYPES[0]), "hopper")
        attention.plan(case.view)
        outs.append(
            attention.run(case.q[: case.rows], KVCache.from_pair(case.kv.k, v, k_scale=0.5, v_scale=2.0))
        )
    assert outs[0].isfinite().all()
    assert torch.equal(*outs)


def test_caches_that_tma_loads_and_those_that_are_gathered(emulated: Path) -> None:
    caches = {
        "attention": [
            {"page_size": 16},
            {"page_size": 256, "layout": "HND"},
            {"page_size": 1, "table_form": "ragged", "cache_form": "ragged"},
        ],
        "attention_rows": [
            {"page_size": 3},
            {"page_size": 1, "run_pages": 1000},
            {"page_size": 1, "run_pages": 1},
        ],
    }
    for kernel, forms in caches.items():
        for number, cache in enumerate(forms):
            dtype, head_dim = FORMS[(0, 1, 4)[number]]
            spec = cases.Spec(
                (1, 70, 3, 20),
                (200, 70, 300, 150),
                num_kv_heads=2,
                group_size=2,
                head_dim=head_dim,
                dtype=dtype,
                num_ctas=3,
                seed=number,
            )
            problem = Float8Case(spec.with_(**cache), "cpu", DTYPES[dtype == torch.float16], "head", "head")
            assert (
                run_and_check(problem, emulated, "hopper", number, wants_lse=False, cascade=False) == kernel
            )


@pytest.mark.parametrize("kernel", KERNELS)
def test_shared_prefixes_with_scales_of_requests(emulated: Path, kernel: str) -> None:
    """Rows of one row tile have different scales, also for wgmma."""
    for number, (rows, group_size) in enumerate(((1, 4), (5, 4), (20, 2))):
        spec = cases.Spec(
            (rows,) * 7,
            (200,) * 7,
            num_kv_heads=2,
            group_size=group_size,
            head_dim=64,
            sharing=0.9,
            num_ctas=5,
            seed=number,
        )
        problem = Float8Case(spec, "cpu", DTYPES[0], "request and head", "request")
        run_and_check(problem, emulated, kernel, number, cascade="always")


@pytest.mark.parametrize("kernel", KERNELS)
def test_compositions(emulated: Path, kernel: str) -> None:
    for seed in range(3):
        shape = Shape(
            num_kv_heads=2,
            group_size=2,
            page_size=(1, 16, 3)[seed],
            head_dim=64,
            dtype=torch.bfloat16,
            num_ctas=7,
        )
        problem = cascade_problem(numpy.random.default_rng([seed, 83]), shape, torch.device("cpu"), 2)
        memory = problem.memory
        memory.kv = rounded_cache(memory.kv, DTYPES[0], 0.75, torch.full((2,), 0.5))
        # The oracle computes in the type of K and V, so these values are bf16.
        memory.k_slots, memory.v_slots = (
            slots.to(DTYPES[0]).to(torch.bfloat16) * scale
            for slots, scale in ((memory.k_slots, 0.75), (memory.v_slots, 0.5))
        )
        problem.run(
            DeviceAttention(emulated, problem.attention(kernel=kernel, kv_dtype=DTYPES[0]), kernel, seed)
        )  # type: ignore[arg-type]
        problem.check()
