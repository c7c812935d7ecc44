"""The kernels whose producer dequantizes 8-bit caches, without a GPU (csrc/attention/feed/dequantizer.cuh).

test_float8_kernels.py and test_float8_transform_kernels.py run these kernels, too.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import case_tensors
import cases
import host_planner
import numpy
import oracle
import pytest
import torch
from device_attention import CACHES, DeviceAttention
from float8_cases import DTYPES, TOLERANCE, Float8Case, rounding
from float8_outputs import check_like_unfused, check_rounded, out_of_8_bits, scale_for
from torch import Tensor
from variant_fuzz.catalogue import by_reference

from attn_backend import Attention, KVCache
from attn_backend.variants import builtin

pytestmark = [pytest.mark.slow, pytest.mark.skipif(host_planner.COMPILER is None, reason="needs g++")]

FORMS = ((torch.bfloat16, 64, DTYPES[0]), (torch.float16, 128, DTYPES[1]), (torch.bfloat16, 256, DTYPES[0]))
# Every kind of row tile for wgmma, with one and with many KV tiles, alone and one after the other.
PROMPTS = (((300, 7), (300, 7)), ((70, 20, 200), (700, 300, 200)), ((9,) * 5, (70, 300, 1, 129, 64)))


def dequantized(kv: KVCache, dtype: torch.dtype, scales: tuple[float, float]) -> KVCache:
    """A cache of 16 bits with the same numbers; scales: powers of 2."""
    k, v = (stored.to(dtype) * scale for stored, scale in zip((kv.k, kv.v), scales, strict=True))
    return KVCache.from_pair(k, v)


def of_scales(problem: Float8Case, scales: tuple[float, float]) -> KVCache:
    kv = problem.case.kv
    return KVCache.from_pair(kv.k, kv.v, k_scale=scales[0], v_scale=scales[1])


def run(
    folder: Path, attention: Attention, kernel: str, case: case_tensors.Case, seed: int
) -> tuple[Tensor, Tensor]:
    device = DeviceAttention(folder, attention, kernel, seed)
    device.plan(case.view)
    out, lse = torch.full_like(case.out, torch.nan), torch.full_like(case.lse, torch.nan)
    case.run(device, out=out, lse=lse)  # type: ignore[arg-type]
    assert device.schedule().errors == 0
    return out[: case.rows], lse[: case.rows]


@pytest.mark.parametrize("form", FORMS, ids=str)
@pytest.mark.parametrize("cache", ["pages", "small pages", "tokens in runs"])
def test_bits_of_prompts_are_those_of_a_16_bit_cache(
    emulated: Path, form: tuple[torch.dtype, int, torch.dtype], cache: str
) -> None:
    dtype, head_dim, kv_dtype = form
    scales = (0.5, 2.0)
    for number, (qo_lens, kv_lens) in enumerate(PROMPTS):
        spec = cases.Spec(
            qo_lens,
            kv_lens,
            num_kv_heads=2,
            group_size=(1, 4, 2)[number],
            head_dim=head_dim,
            dtype=dtype,
            num_ctas=(3, 5, 8)[number],
            seed=number,
            window_left=(-1, 150, -1)[number],
            logits_soft_cap=(0.0, 0.0, 20.0)[number],
        )
        problem = Float8Case(spec.with_(**CACHES[cache]), "cpu", kv_dtype)
        case = replace(problem.case, kv=of_scales(problem, scales))
        fed = run(
            emulated,
            case.attention(kernel="hopper", cascade=False, kv_dtype=kv_dtype),
            "hopper",
            case,
            number,
        )
        plain_case = replace(case, kv=dequantized(case.kv, dtype, scales))
        plain = run(
            emulated, plain_case.attention(kernel="hopper", cascade=False), "hopper", plain_case, number
        )
        rows = torch.cat(  # not of row tiles of 16 rows, which multiply in f16
            [torch.full((length,), length * spec.group_size > 16) for length in qo_lens]
        )
        assert rows.any()
        for of_feed, of_plain in zip(fed, plain, strict=True):
            assert not of_feed[rows].isnan().any()
            assert torch.equal(of_feed[rows], of_plain[rows])


@pytest.mark.parametrize("form", FORMS, ids=str)
@pytest.mark.parametrize("cache", ["pages", "small pages", "tokens", "ragged"])
def test_long_row_groups_read_a_16_bit_copy(
    emulated: Path,
    monkeypatch: pytest.MonkeyPatch,
    form: tuple[torch.dtype, int, torch.dtype],
    cache: str,
) -> None:
    """With room for two of them, or three behind a window.

    Bits are the same without the copy, also where the plan has placed it.
    """
    dtype, head_dim, kv_dtype = form
    tokens = (1 << 20) // (2 * 2 * 2 * head_dim)  # for which there is room
    monkeypatch.setenv("ATTN_BACKEND_DEQUANTIZED_MIB", "1")
    for seed, window_left in enumerate((-1, 150)):
        spec = cases.Spec(
            (400, 1, 385, 390, 20),
            (400, 90, tokens - 420, 900, 300),
            num_kv_heads=2,
            group_size=4,
            head_dim=head_dim,
            dtype=dtype,
            num_ctas=7,
            window_left=window_left,
            seed=seed,
        )
        problem = Float8Case(spec.with_(**CACHES[cache]), "cpu", kv_dtype, "head", "tensor")
        case = problem.case
        made = case.attention(kernel="hopper", cascade=False, **problem.options)
        outs = []
        for dequantizes in (True, False):
            attention = DeviceAttention(emulated, made, "hopper", seed)
            attention.dequantizes = dequantizes
            attention.plan(case.view)
            case.run(attention, out=case.out, lse=case.lse)  # type: ignore[arg-type]
            problem.check(case.out, case.lse, "hopper")
            outs.append(case.out.clone())
        assert torch.equal(*outs)
        is_copied = (made.schedule().of_groups("dequantized_row") >= 0).tolist()
        assert is_copied == [True, False, True, head_dim == 64 and window_left >= 0, False]


@pytest.mark.parametrize("form", FORMS, ids=str)
def test_pairs_from_the_work_queue(emulated: Path, form: tuple[torch.dtype, int, torch.dtype]) -> None:
    """Decodes among prompts; with heads of 64, row tiles of 192 rows, whose scales are of requests."""
    dtype, head_dim, kv_dtype = form
    spec = cases.Spec(
        (200, 20, 1, 100, 300) * 2,
        (200, 20, 90, 100, 350) * 2,
        num_kv_heads=2,
        group_size=4,
        num_ctas=8,
        head_dim=head_dim,
        dtype=dtype,
    )
    problem = Float8Case(spec, "cpu", kv_dtype, "request and head", "request")
    case = problem.case
    attention = DeviceAttention(emulated, case.attention(kernel="hopper", **problem.options), "hopper")
    attention.plan(case.view)
    case.run(attention, out=case.out, lse=case.lse)  # type: ignore[arg-type]
    problem.check(case.out, case.lse, "hopper")
    schedule = attention.schedule()
    assert schedule.uses_queue
    assert (schedule.of_tiles("kind") == 4).any() == (head_dim == 64)


@pytest.mark.parametrize("form", FORMS, ids=str)
def test_many_orders_of_threads(emulated: Path, form: tuple[torch.dtype, int, torch.dtype]) -> None:
    """Rings that go on from prompts to decodes and back, and CTAs that begin and end inside a pair."""
    dtype, head_dim, kv_dtype = form
    for seed in range(12):
        rng = numpy.random.default_rng([seed, head_dim, 53])
        batch = int(rng.integers(1, 9))
        qo_lens = tuple(int(rng.choice([1, 2, 9, 40, 130])) for _ in range(batch))
        spec = cases.Spec(
            qo_lens,
            tuple(length + int(rng.choice([0, 1, 60, 300, 700])) for length in qo_lens),
            num_kv_heads=int(rng.integers(1, 4)),
            group_size=int(rng.choice([1, 2, 5])),
            head_dim=head_dim,
            dtype=dtype,
            num_ctas=int(rng.choice([1, 2, 7])),
            page_size=int(rng.choice([1, 3, 16, 64])),
            run_pages=int(rng.choice([1, 1000])),
            window_left=int(rng.choice([-1, -1, 100])),
            seed=seed,
        )
        problem = Float8Case(spec, "cpu", kv_dtype, "head", "tensor")
        case = problem.case
        attention = DeviceAttention(
            emulated, case.attention(kernel="hopper", **problem.options), "hopper", seed
        )
        attention.plan(case.view)
        case.run(attention, out=case.out, lse=case.lse)  # type: ignore[arg-type]
        problem.check(case.out, case.lse, "hopper")


@pytest.mark.parametrize("form", FORMS, ids=str)
def test_decodes_and_prompts_of_one_cta(emulated: Path, form: tuple[torch.dtype, int, torch.dtype]) -> None:
    """The tile of a prompt takes the stages of a decode's K and V, whose consumers may still read V."""
    dtype, head_dim, kv_dtype = form
    for seed in range(3):
        spec = cases.Spec(
            (1, 40, 1, 130),
            (900, 1000, 1300, 500),
            num_kv_heads=1,
            group_size=2,
            head_dim=head_dim,
            dtype=dtype,
            num_ctas=1,
            page_size=16,
            seed=seed,
        )
        problem = Float8Case(spec, "cpu", kv_dtype, "head", "tensor")
        case = problem.case
        made = case.attention(kernel="hopper", cascade=False, **problem.options)
        attention = DeviceAttention(emulated, made, "hopper", seed)
        attention.plan(case.view)
        case.run(attention, out=case.out, lse=case.lse)  # type: ignore[arg-type]
        problem.check(case.out, case.lse, "hopper")


@pytest.mark.parametrize("head_dim", [64, 128])
def test_a_copy_is_read_after_a_long_decode(
    emulated: Path, monkeypatch: pytest.MonkeyPatch, head_dim: int
) -> None:
    """The warpgroups of a decode do not wait for each other: the stages of one may be a round behind."""
    monkeypatch.setenv("ATTN_BACKEND_DEQUANTIZED_MIB", "4")
    for seed in range(3):
        spec = cases.Spec(
            (1, 400, 1, 400),
            (5000, 400, 3000, 420),
            num_kv_heads=1,
            group_size=4,
            head_dim=head_dim,
            seed=seed,
        )
        spec = spec.with_(num_ctas=1, page_size=64)
        problem = Float8Case(spec, "cpu", torch.float8_e4m3fn, "head", "tensor")
        case = problem.case
        made = case.attention(kernel="hopper", cascade=False, **problem.options)
        attention = DeviceAttention(emulated, made, "hopper", seed)
        attention.plan(case.view)
        case.run(attention, out=case.out, lse=case.lse)  # type: ignore[arg-type]
        problem.check(case.out, case.lse, "hopper")
        assert (made.schedule().of_groups("dequantized_row") >= 0).tolist() == [False, True, False, True]


SLOPES = builtin.alibi_slopes(6) / 4
IDS = torch.randint(4, (3, 8), generator=torch.Generator().manual_seed(3), dtype=torch.int32)
IDS = IDS.repeat_interleave(200, dim=1)
ALIBI = builtin.alibi()
ROTATED = ALIBI & builtin.rope(builtin.rope_frequencies(64))
BIASED = oracle.Variant(
    logits=lambda logits, at: logits + SLOPES[at.head].double() * (at.token - at.position)
)
VARIANTS = {
    "bias": (ALIBI, {"slopes": SLOPES}, BIASED),
    "bias and a mask with holes": (
        ALIBI & builtin.document(),
        {"slopes": SLOPES, "document_ids": IDS},
        replace(BIASED, mask=lambda at: IDS[at.request][at.position.clamp(0)] == IDS[at.request][at.token]),
    ),
    "bias and rotated keys": (
        ROTATED,
        {"slopes": SLOPES},
        rounding(by_reference(ROTATED, {"slopes": SLOPES}), ROTATED, torch.bfloat16),
    ),
}


@pytest.mark.parametrize("name", VARIANTS)
def test_variants(emulated: Path, name: str) -> None:
    """KV tiles are taken from the last to the first, some are skipped, or all are dequantized."""
    variant, args, expected = VARIANTS[name]
    for number, page_size in enumerate((16, 3)):
        spec = cases.Spec(
            (1, 150, 20),
            (1400, 700, 300),
            num_kv_heads=2,
            group_size=3,
            head_dim=64,
            num_ctas=5,
            page_size=page_size,
            causal="mask" not in name,
            seed=number,
        )
        problem = Float8Case(spec, "cpu", DTYPES[0], "head", "head")
        case = problem.case
        made = case.attention(kernel="hopper", variant=variant, **problem.options)
        attention = DeviceAttention(emulated, made, "hopper", number, variant)
        attention.plan(case.view, **({"variant_args": args} if "mask" in name else {}))
        case.run(attention, out=case.out, lse=case.lse, variant_args=args)  # type: ignore[arg-type]
        problem.check(case.out, case.lse, "hopper", expected)


def test_outputs_of_8_bits(emulated: Path) -> None:
    for number, (qo_lens, kv_lens) in enumerate(PROMPTS):
        spec = cases.Spec(
            qo_lens, kv_lens, num_kv_heads=2, group_size=1 + 2 * (number % 2), head_dim=128, page_size=16
        )
        problem = Float8Case(
            spec.with_(seed=number, sharing=0.9, padding_rows=3, num_ctas=5),
            "cpu",
            DTYPES[0],
            "head",
            "request",
        )
        case, expected = problem.case, problem.expected()[0]
        made = case.attention(kernel="hopper", cascade=("always", False)[number % 2], **problem.options)
        attention = DeviceAttention(emulated, made, "hopper", number)
        attention.plan(case.view)
        case.run(attention, out=case.out)  # type: ignore[arg-type]
        out, scale = out_of_8_bits(case), scale_for(expected, 0.3)
        case.run(attention, out=out, out_scale=scale)  # type: ignore[arg-type]
        check_rounded(out[: case.rows], expected, scale, TOLERANCE, case.spec)
        check_like_unfused(out[: case.rows], case.out[: case.rows], scale, case.spec)
