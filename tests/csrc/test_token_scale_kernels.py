"""The attention kernels over caches with a scale for each token and head, without a GPU
(test_attention_kernels.py).
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import cases
import host_planner
import numpy
import pytest
import torch
import variant_sources
from device_attention import CACHES, KERNELS, DeviceAttention
from float8_cases import (
    FOUR_BITS,
    FP4_DTYPES,
    INT4,
    MXFP4,
    NVFP4,
    PAIR,
    ROUNDED_TOLERANCE,
    TOKEN_DTYPES,
    Float8Case,
    block_values,
    lse_tolerance_of_rounded_k,
    rounding,
)
from float8_kernels import BATCHES, FORMS, run_and_check
from tiers import distinct, in_turn
from variant_fuzz.catalogue import by_reference

from attn_backend import BlockScales, KVCache
from attn_backend.variants import builtin

pytestmark = [pytest.mark.slow, pytest.mark.skipif(host_planner.COMPILER is None, reason="needs g++")]


@pytest.mark.parametrize("stored", [*TOKEN_DTYPES, *FP4_DTYPES, PAIR], ids=str)
@pytest.mark.parametrize("form", distinct(FORMS, repeated={0}), ids=str)
@pytest.mark.parametrize("kernel", KERNELS)
def test_random_cases(
    emulated: Path, kernel: str, form: tuple[torch.dtype, int], stored: torch.dtype | str
) -> None:
    """Pages of 1 to 64 tokens, windows, soft caps, shared prefixes; scales of unused slots are no numbers."""
    dtype, head_dim = form
    if stored == INT4 and head_dim == 72:
        head_dim = 96
    if stored in (*FP4_DTYPES, PAIR) and head_dim == 72:
        head_dim = 192
    for number, (qo_lens, kv_lens) in in_turn(BATCHES, FORMS.index(form), without_gpu=2):
        rng = numpy.random.default_rng([number, head_dim, 89])
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
        problem = Float8Case(spec, "cpu", stored, "token", "token")
        cascade = ("always", False)[number % 2]
        run_and_check(problem, emulated, kernel, number, wants_lse=number % 2 == 0, cascade=cascade)


@pytest.mark.parametrize("page_size", [8, 16, 64])
@pytest.mark.parametrize(
    ("stored", "head_dim"),
    [
        *((INT4, 64), (INT4, 96), (INT4, 128), (NVFP4, 64), (NVFP4, 128), (MXFP4, 128)),
        *((PAIR, 64), (PAIR, 128)),
    ],
)
def test_4_bit_pages_with_one_head_after_another(
    emulated: Path, stored: str, head_dim: int, page_size: int
) -> None:
    """Two tokens of a head are a row of 128 bytes, if boxes then have enough rows."""
    for seed, qo_lens in enumerate([(1, 1, 3), (1, 70, 2)]):
        spec = cases.Spec(
            qo_lens,
            (500, 90, 33),
            num_kv_heads=2,
            group_size=(4, 10)[seed],
            head_dim=head_dim,
            page_size=page_size,
            layout="HND",
            num_ctas=3,
            seed=seed,
        )
        problem = Float8Case(spec, "cpu", stored, "token", "token")
        run_and_check(problem, emulated, "hopper", seed)


@pytest.mark.parametrize("stored", [INT4, *FP4_DTYPES, PAIR])
def test_sinks(emulated: Path, stored: str) -> None:
    """In decodes that multiply numbers as they are stored, and in prefills."""
    spec = cases.Spec((1, 70, 3), (200, 90, 30), num_kv_heads=2, group_size=2, head_dim=64, num_ctas=3)
    problem = Float8Case(spec, "cpu", stored, "token", "token")
    case, sinks = problem.case, torch.linspace(-2, 3, 4)
    made = case.attention(kernel="hopper", sinks=True, **problem.options)
    attention = DeviceAttention(emulated, made, "hopper", 0)
    attention.plan(case.view)
    case.run(attention, out=case.out, lse=case.lse, sinks=sinks)  # type: ignore[arg-type]
    expected, expected_lse = problem.expected(sinks=sinks)
    tolerance = 2 * ROUNDED_TOLERANCE
    assert (case.out[: case.rows].double() - expected).norm() <= tolerance * expected.norm()
    assert (case.lse[: case.rows].double() - expected_lse).abs().max() <= 2 * lse_tolerance_of_rounded_k(spec)


@pytest.mark.parametrize("kernel", KERNELS)
def test_variants_that_transform_rows(emulated: Path, kernel: str) -> None:
    """They see scaled rows."""
    variant = builtin.rope(builtin.rope_frequencies(32))
    for seed, qo_lens in enumerate([(1, 70, 3), (1, 2, 1), (1, 80, 5)]):
        spec = cases.Spec(
            qo_lens, (200, 90, 30), num_kv_heads=2, group_size=2, head_dim=64, num_ctas=3, seed=seed
        )
        problem = Float8Case(spec, "cpu", TOKEN_DTYPES[seed], "token", "token")
        case = problem.case
        made = case.attention(kernel=kernel, variant=variant, **problem.options)
        attention = DeviceAttention(emulated, made, kernel, seed, variant)
        attention.plan(case.view)
        case.run(attention, out=case.out, lse=case.lse, logits_soft_cap=0.0)  # type: ignore[arg-type]
        problem.check(case.out, case.lse, kernel, rounding(by_reference(variant, {}), variant, spec.dtype))


@pytest.mark.parametrize("stored", [torch.float8_e4m3fn, INT4, *FP4_DTYPES, PAIR], ids=str)
@pytest.mark.parametrize("kernel", KERNELS)
def test_variants_without_softmax(emulated: Path, kernel: str, stored: torch.dtype | str) -> None:
    """Weights of hidden tokens are 0, whatever the scales of unused slots are."""
    variant = builtin.sigmoid(-3.0)
    spec = cases.Spec((1, 70, 3), (70, 90, 30), num_kv_heads=2, group_size=2, head_dim=64, num_ctas=3)
    problem = Float8Case(spec, "cpu", stored, "token", "token")
    case = problem.case
    made = case.attention(kernel=kernel, variant=variant, **problem.options)
    attention = DeviceAttention(emulated, made, kernel, 0, variant)
    attention.plan(case.view)
    case.run(attention, out=case.out, logits_soft_cap=0.0)  # type: ignore[arg-type]
    exact = by_reference(variant, {})
    problem.check(case.out, None, kernel, rounding(exact, variant, spec.dtype))


@pytest.mark.parametrize(
    ("stored", "scales"),
    [(torch.float8_e4m3fn, "number"), *((dtype, "token") for dtype in (*TOKEN_DTYPES, *FOUR_BITS, PAIR))],
    ids=str,
)
@pytest.mark.parametrize("kernel", KERNELS)
def test_weights_of_any_size(emulated: Path, kernel: str, stored: torch.dtype | str, scales: str) -> None:
    """Without softmax they may be too small or too large for f16."""
    sigmoid = builtin.sigmoid(-14.0)
    squared = variant_sources.SQUARED
    for variant, exact, q_factor, page_size in (
        (sigmoid, by_reference(sigmoid, {}), 1, 16),
        (squared, variant_sources.SQUARED_ORACLE, 60, 1),
        (squared, variant_sources.SQUARED_ORACLE, 300, 16),
    ):
        spec = cases.Spec(
            (1, 3, 1),
            (70, 90, 30),
            num_kv_heads=2,
            group_size=2,
            head_dim=64,
            page_size=page_size,
            num_ctas=3,
        )
        problem = Float8Case(spec, "cpu", stored, scales, scales)
        case = problem.case
        case.q.mul_(q_factor)
        made = case.attention(kernel=kernel, variant=variant, **problem.options)
        attention = DeviceAttention(emulated, made, kernel, 0, variant)
        attention.plan(case.view)
        case.run(attention, out=case.out, logits_soft_cap=0.0)  # type: ignore[arg-type]
        problem.check(case.out, None, kernel, exact)


@pytest.mark.parametrize("stored", [*TOKEN_DTYPES, *FP4_DTYPES, PAIR], ids=str)
def test_a_head_of_q_that_is_not_finite_changes_no_other(emulated: Path, stored: torch.dtype | str) -> None:
    """It shares a row tile with the others."""
    spec = cases.Spec((1, 1), (200, 90), num_kv_heads=2, group_size=4, head_dim=64, num_ctas=3)
    problem = Float8Case(spec, "cpu", stored, "token", "token")
    case = problem.case
    attention = DeviceAttention(emulated, case.attention(kernel="hopper", **problem.options), "hopper", 0)
    attention.plan(case.view)
    case.run(attention, out=case.out)  # type: ignore[arg-type]
    expected = case.out.clone()
    case.q[0, 2, 5] = torch.inf
    case.run(attention, out=case.out)  # type: ignore[arg-type]
    assert case.out[0, 2].isnan().all()
    expected[0, 2] = case.out[0, 2]
    assert torch.equal(case.out[:2].nan_to_num(7), expected[:2].nan_to_num(7))


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("stored", [*TOKEN_DTYPES, NVFP4, PAIR], ids=str)
def test_values_with_a_scale_of_0(emulated: Path, kernel: str, stored: torch.dtype | str) -> None:
    """They are zeros, and count in the softmax."""
    spec = cases.Spec((1, 3), (200, 90), num_kv_heads=1, group_size=4, head_dim=64, page_size=16, num_ctas=3)
    problem = Float8Case(spec, "cpu", stored, "token", "token")
    v_scale = problem.case.kv.v_scale
    if isinstance(v_scale, BlockScales):
        v_scale = v_scale.blocks.view(torch.uint8)
    assert isinstance(v_scale, torch.Tensor)
    for own in problem.case.slots:
        v_scale[own[:40] // 16, own[:40] % 16] = 0
    run_and_check(problem, emulated, kernel, 0, cascade=False)


def test_large_scales_of_unused_slots(emulated: Path) -> None:
    """MX scales beyond those that decodes can multiply by."""
    spec = cases.Spec((1, 1), (200, 90), num_kv_heads=2, group_size=4, head_dim=128, page_size=16, num_ctas=3)
    for exponent in (207, 208, 254):
        problem = Float8Case(spec, "cpu", MXFP4, "token", "token")
        for scales in (problem.case.kv.k_scale, problem.case.kv.v_scale):
            assert isinstance(scales, BlockScales)
            scales.blocks[scales.blocks == 255] = exponent
        run_and_check(problem, emulated, "hopper", 0, cascade=False)


def with_block_scales(stored: str, k_codes: range, v_codes: range) -> Float8Case:
    """Decodes whose blocks have scales with these codes. Q makes up for the largest scale of K."""
    spec = cases.Spec((1, 3, 1), (200, 90, 130), num_kv_heads=2, group_size=4, head_dim=128, num_ctas=3)
    problem = Float8Case(spec, "cpu", stored, "token", "token")
    case, rng = problem.case, numpy.random.default_rng(3)
    k_scale, v_scale = case.kv.k_scale, case.kv.v_scale
    assert isinstance(k_scale, BlockScales)
    assert isinstance(v_scale, BlockScales)
    nan = 255 if stored == MXFP4 else 127  # of unused slots
    is_used = k_scale.blocks.view(torch.uint8) != nan
    usual = float(block_values(k_scale)[is_used].max())
    for scales, codes in ((k_scale, k_codes), (v_scale, v_codes)):
        bits = scales.blocks.view(torch.uint8)
        chosen = torch.from_numpy(rng.integers(codes.start, codes.stop, bits.shape)).to(torch.uint8)
        bits.copy_(torch.where(bits == nan, bits, chosen))
    largest = float(block_values(k_scale)[is_used].max())
    case.q.mul_(2.0 ** round(math.log2(usual / largest)))
    return problem


@pytest.mark.parametrize("v_codes", [range(127), range(1, 8), range(112, 127)], ids=str)
@pytest.mark.parametrize("k_codes", [range(127), range(1, 8), range(112, 127)], ids=str)
def test_nvfp4_scales_of_any_size(emulated: Path, k_codes: range, v_codes: range) -> None:
    """Products with numbers may be subnormal: none of them is rounded."""
    run_and_check(with_block_scales(NVFP4, k_codes, v_codes), emulated, "hopper", 0, cascade=False)


@pytest.mark.parametrize("v_codes", [range(80, 207), range(80, 84), range(203, 207)], ids=str)
@pytest.mark.parametrize("k_codes", [range(80, 207), range(80, 84), range(203, 207)], ids=str)
def test_mx_scales_of_any_size(emulated: Path, k_codes: range, v_codes: range) -> None:
    """From 2^-47 to 2^79."""
    run_and_check(with_block_scales(MXFP4, k_codes, v_codes), emulated, "hopper", 0, cascade=False)


@pytest.mark.parametrize("group_size", [4, 10])
@pytest.mark.parametrize("highest", [9.0, 20.0, 60.0])
@pytest.mark.parametrize("stored", FP4_DTYPES)
def test_scores_that_rise(emulated: Path, stored: str, highest: float, group_size: int) -> None:
    """Probabilities of later tokens are larger than those at the maximum that a row keeps, and finite."""
    tokens = 900
    spec = cases.Spec(
        (1,), (tokens,), num_kv_heads=1, group_size=group_size, head_dim=64, page_size=16, num_ctas=1
    )
    problem = Float8Case(spec, "cpu", stored, "token", "token")
    case = problem.case
    scales = case.kv.k_scale
    assert isinstance(scales, BlockScales)
    case.k_slots.fill_(0.5)
    case.kv.k.fill_(0x22)  # 1.0
    first, last = (119, 127) if stored == MXFP4 else (8, 126)  # smallest and largest normal numbers of e4m3
    own = case.slots[0]
    codes = first + (last - first) * torch.arange(tokens) // (tokens - 1)
    scales.blocks.view(torch.uint8)[own // 16, own % 16] = codes.to(torch.uint8)[:, None, None]
    largest = float(block_values(scales)[own[-1] // 16, own[-1] % 16].max())
    case.q.fill_(highest / (spec.head_dim**0.5 * largest))
    run_and_check(problem, emulated, "hopper", 0, cascade=False)


@pytest.mark.parametrize("cache", CACHES)
def test_forms_of_caches(emulated: Path, cache: str) -> None:
    """Hopper's producer finds the scales of rows that TMA loads in boxes, in runs, and that are gathered."""
    forms = (
        (torch.bfloat16, 64, TOKEN_DTYPES[0]),
        (torch.float16, 128, TOKEN_DTYPES[1]),
        (torch.bfloat16, 64, INT4),
        (torch.bfloat16, 128, INT4),
        (torch.bfloat16, 128, NVFP4),
        (torch.float16, 64, PAIR),
        (torch.bfloat16, 128, PAIR),
    )
    for number, (dtype, head_dim, stored) in enumerate(forms):
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
        problem = Float8Case(spec.with_(**CACHES[cache]), "cpu", stored, "token", "token")
        run_and_check(problem, emulated, "hopper", number, wants_lse=False, cascade=False)


@pytest.mark.parametrize("stored", [torch.int8, *FOUR_BITS, PAIR], ids=str)
@pytest.mark.parametrize("kernel", KERNELS)
def test_heads_of_different_widths(emulated: Path, kernel: str, stored: torch.dtype | str) -> None:
    """Their scales of blocks have different numbers of words."""
    for number, (head_dim, head_dim_v, page_size) in enumerate(
        [(192, 128, 16), (64, 128, 1), (64, 128, 16), (128, 64, 16)]
    ):
        spec = cases.Spec(
            (1, 70, 3),
            (200, 90, 130),
            num_kv_heads=2,
            group_size=2,
            head_dim=head_dim,
            head_dim_v=head_dim_v,
            cache_form="pair",
            page_size=page_size,
            num_ctas=3,
            seed=number,
        )
        problem = Float8Case(spec, "cpu", stored, "token", "token")
        run_and_check(problem, emulated, kernel, number, cascade=False)


@pytest.mark.parametrize(
    ("stored", "head_dim"), [(torch.int8, 64), (INT4, 128), (NVFP4, 128), (PAIR, 64), (PAIR, 128)], ids=str
)
@pytest.mark.parametrize("is_by_head", [False, True], ids=["NHD", "HND"])
def test_pages_with_scales_at_their_end(
    emulated: Path, is_by_head: bool, stored: torch.dtype | str, head_dim: int
) -> None:
    """A page, or each head's part of it, holds all rows, then all scales: rows then are as far apart as TMA
    needs. One copy loads the scales of a box.
    """
    spec = cases.Spec(
        (1, 40, 1), (70, 90, 270), num_kv_heads=2, group_size=2, head_dim=head_dim, page_size=16, num_ctas=3
    )
    problem = Float8Case(spec, "cpu", stored, "token", "token")
    case, kv = problem.case, problem.case.kv
    inner = (16, 1) if is_by_head else (16, 2)  # tokens and heads whose rows lie together
    tensors = [kv.k, kv.v]
    for scale in (kv.k_scale, kv.v_scale):
        of_heads = scale.blocks if isinstance(scale, BlockScales) else scale
        assert isinstance(of_heads, torch.Tensor)
        tensors.append(of_heads)
    widths = [x[0, 0, 0].numel() * x.element_size() for x in tensors]  # bytes
    sizes = [inner[0] * inner[1] * width for width in widths]
    pages = torch.zeros(kv.num_pages, 2 // inner[1], sum(sizes), dtype=torch.uint8)
    parts = pages.split(sizes, dim=2)
    k, v = (
        part.unflatten(2, (*inner, width)).transpose(1, 2).flatten(2, 3)
        for part, width in zip(parts[:2], widths[:2], strict=True)
    )
    k_scale, v_scale = (
        part.unflatten(2, (inner[1], 16, width)).flatten(1, 2).transpose(1, 2)
        for part, width in zip(parts[2:], widths[2:], strict=True)
    )
    made: list[Any] = []
    for to, of in ((k, kv.k), (v, kv.v), (k_scale, kv.k_scale), (v_scale, kv.v_scale)):
        assert to.untyped_storage().data_ptr() == pages.data_ptr()
        tensor = of.blocks if isinstance(of, BlockScales) else of
        assert isinstance(tensor, torch.Tensor)
        typed = to.view(tensor.dtype)
        if tensor.dtype == torch.float32:
            typed = typed.squeeze(-1)
        typed.copy_(tensor)
        made.append(BlockScales(typed, of.factor) if isinstance(of, BlockScales) else typed)
    case.kv = KVCache.from_pair(made[0], made[1], k_scale=made[2], v_scale=made[3])
    assert run_and_check(problem, emulated, "hopper", 0, cascade=False) == "attention"


@pytest.mark.parametrize(
    ("head_dim", "stored"),
    [
        *((64, torch.int8), (128, torch.float8_e4m3fn), (64, INT4), (128, INT4), (64, MXFP4), (128, NVFP4)),
        *((64, PAIR), (128, PAIR)),
    ],
)
@pytest.mark.parametrize("cache", ["pages", "tokens"])
def test_long_row_groups_read_a_16_bit_copy(
    emulated: Path, monkeypatch: pytest.MonkeyPatch, cache: str, head_dim: int, stored: torch.dtype | str
) -> None:
    """It has the bits that the producer makes in the ring."""
    monkeypatch.setenv("ATTN_BACKEND_DEQUANTIZED_MIB", "1")
    spec = cases.Spec(
        (400, 1, 390), (400, 90, 420), num_kv_heads=2, group_size=4, head_dim=head_dim, num_ctas=7
    )
    problem = Float8Case(spec.with_(**CACHES[cache]), "cpu", stored, "token", "token")
    case, outs = problem.case, []
    made = case.attention(kernel="hopper", cascade=False, **problem.options)
    for dequantizes in (True, False):
        attention = DeviceAttention(emulated, made, "hopper", 1)
        attention.dequantizes = dequantizes
        attention.plan(case.view)
        case.run(attention, out=case.out, lse=case.lse)  # type: ignore[arg-type]
        problem.check(case.out, case.lse, "hopper")
        outs.append(case.out.clone())
    assert torch.equal(*outs)
    assert (made.schedule().of_groups("dequantized_row") >= 0).tolist() == [True, False, True]
