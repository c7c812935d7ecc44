"""8-bit outputs without a GPU (test_attention_kernels.py): the rows that each kernel writes, compared with a
run of the same plan that writes 16 bits.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import case_tensors
import cases
import host_planner
import numpy
import pytest
import torch
import variant_sources
from compositions import Shape, cascade_problem
from device_attention import CACHES, KERNELS, DeviceAttention
from float8_cases import MULTIPLIED_TOLERANCE, TOLERANCE, Float8Case
from float8_outputs import DTYPE, check_like_unfused, check_rounded, out_of_8_bits, scale_for
from tiers import distinct, in_turn

pytestmark = [pytest.mark.slow, pytest.mark.skipif(host_planner.COMPILER is None, reason="needs g++")]

CPU = torch.device("cpu")
BATCHES = (
    ((1, 70, 3, 20), (200, 70, 300, 150)),
    ((1,) * 6, (70, 300, 1, 0, 64, 129)),
    ((150, 5), (200, 90)),
)
SHARES = (0.0, 0.3, 0.0)  # the share of outputs at the limit


def run_and_check(
    case: case_tensors.Case,
    expected: torch.Tensor,
    attention: DeviceAttention,
    number: int,
    tolerance: float = 5e-3,
    **options: Any,
) -> None:
    """Runs twice: without lse, the Hopper kernel stores rows by TMA where possible."""
    scale = scale_for(expected, SHARES[number % 3])
    out_scale = torch.tensor([scale]) if number % 2 else scale
    attention.plan(case.view)
    case.run(attention, out=case.out, lse=case.lse, **options)  # type: ignore[arg-type]
    plain, plain_lse = case.out[: case.rows].clone(), case.lse.clone()
    for lse in (case.lse.fill_(torch.nan), None):
        out = out_of_8_bits(case)
        out.view(torch.uint8).fill_(0x7F)
        case.run(attention, out=out, lse=lse, out_scale=out_scale, **options)  # type: ignore[arg-type]
        check_rounded(out[: case.rows], expected, out_scale, tolerance, case.spec)
        check_like_unfused(out[: case.rows], plain, out_scale, case.spec)
        assert out[case.rows :].float().isnan().all()
    assert torch.equal(case.lse.nan_to_num(7), plain_lse.nan_to_num(7))
    assert attention.schedule().errors == 0


FORMS = (
    (torch.bfloat16, 64, 64),
    (torch.float16, 128, 128),
    (torch.float16, 72, 72),
    (torch.bfloat16, 256, 256),
    (torch.bfloat16, 192, 128),
)


@pytest.mark.parametrize(
    ("kernel", "dtype", "qk", "v"),
    # without a GPU, 192 x 128 only in Hopper's kernel
    distinct(((kernel, *form) for kernel in KERNELS for form in FORMS), repeated={4}),
)
def test_caches_of_16_bits(emulated: Path, kernel: str, dtype: torch.dtype, qk: int, v: int) -> None:
    """Whole pairs, parts of pairs, states; by TMA and gathered; heads whose rows are not multiples of 16
    bytes.
    """
    turn = FORMS.index((dtype, qk, v)) + KERNELS.index(kernel)
    for number, (qo_lens, kv_lens) in in_turn(BATCHES, turn, without_gpu=2):
        rng = numpy.random.default_rng([number, qk, 85])
        spec = cases.Spec(
            qo_lens,
            kv_lens,
            num_kv_heads=2,
            group_size=int(rng.choice([1, 3, 4])),
            head_dim=qk,
            head_dim_v=v,
            dtype=dtype,
            seed=number,
        )
        spec = spec.with_(
            page_size=int(rng.choice([1, 3, 16])),
            num_ctas=int(rng.choice([3, 11])),
            sharing=0.9,
            padding_rows=3,
            aligned=True,
        )
        case = case_tensors.build(
            spec.with_(**CACHES["pages"] if number == 2 else {}, **{"cache_form": "pair"} if qk != v else {}),
            CPU,
        )
        attention = DeviceAttention(
            emulated, case.attention(kernel=kernel, cascade=("always", False)[number % 2]), kernel, number
        )
        run_and_check(case, case.expected()[0], attention, number)


@pytest.mark.parametrize(
    ("kernel", "head_dim", "float8_q"),
    [
        *(
            ("hopper", *form)
            for form in distinct(((128, False), (128, True), (64, True), (72, True)), repeated={2})
        ),
        ("generic", 128, False),
        ("generic", 72, True),
    ],
)
def test_caches_of_8_bits(emulated: Path, kernel: str, head_dim: int, float8_q: bool) -> None:
    """Hopper multiplies 8-bit Q in separate tiles if a head has 64 or 128 columns. Otherwise Q is dequantized
    as it is loaded.
    """
    for number, (qo_lens, kv_lens) in enumerate(BATCHES):
        spec = cases.Spec(
            qo_lens,
            kv_lens,
            num_kv_heads=2,
            group_size=1 + 2 * (number % 2),
            head_dim=head_dim,
            page_size=16,
            num_ctas=(3, 11)[number % 2],
        )
        problem = Float8Case(
            spec.with_(seed=number, sharing=0.9, padding_rows=3),
            "cpu",
            DTYPE,
            "head",
            "request",
            "head" if float8_q else None,
        )
        case = problem.case
        attention = DeviceAttention(
            emulated,
            case.attention(kernel=kernel, cascade=("always", False)[number % 2], **problem.options),
            kernel,
            number,
        )
        tolerance = MULTIPLIED_TOLERANCE if problem.is_multiplied() and kernel == "hopper" else TOLERANCE
        run_and_check(case, problem.expected()[0], attention, number, tolerance, **problem.run_options)


@pytest.mark.parametrize("kernel", KERNELS)
def test_wide_heads(emulated: Path, kernel: str) -> None:
    for number, (group_size, cache) in enumerate(((16, "pages"), (3, "tokens in runs"))):
        spec = cases.Spec(
            (1, 40, 3),
            (130, 40, 210),
            num_kv_heads=1,
            group_size=group_size,
            head_dim=512,
            cache_form="pair",
            num_ctas=3,
            seed=number,
        )
        # as in test_attention_kernels.py, which also compiles kernels without 8-bit types
        spec = spec.with_(dtype=torch.float16)
        case = case_tensors.build(spec.with_(**CACHES[cache], aligned=True), CPU)
        run_and_check(
            case,
            case.expected()[0],
            DeviceAttention(emulated, case.attention(kernel=kernel, cascade=False), kernel, number),
            number,
        )


@pytest.mark.parametrize("kernel", KERNELS)
def test_sinks_and_a_transformed_output(emulated: Path, kernel: str) -> None:
    """The scale divides the variant's transformed output."""
    for number, (qo_lens, kv_lens) in enumerate(BATCHES):
        spec = cases.Spec(
            qo_lens, kv_lens, num_kv_heads=1, group_size=4, head_dim=64, num_ctas=5, seed=number, aligned=True
        )
        case = case_tensors.build(spec, CPU)
        sinks = torch.linspace(-2, 3, 4)
        attention = DeviceAttention(emulated, case.attention(kernel=kernel, sinks=True), kernel, number)
        run_and_check(case, case.expected(sinks=sinks)[0], attention, number, sinks=sinks)
        of_variant = DeviceAttention(
            emulated,
            case.attention(kernel=kernel, variant=variant_sources.SLANTED),
            kernel,
            number,
            variant_sources.SLANTED,
        )
        oracle = variant_sources.slanted_oracle(0.03)
        run_and_check(
            case,
            case.expected(variant=oracle)[0],
            of_variant,
            number,
            logits_soft_cap=0.0,
            variant_args={"slope": 0.03},
        )


@pytest.mark.parametrize("kernel", KERNELS)
def test_compositions(emulated: Path, kernel: str) -> None:
    """Rows of several row groups: the merge kernel rounds them."""
    for seed in range(2):
        shape = Shape(
            num_kv_heads=2,
            group_size=2,
            page_size=(1, 16)[seed],
            head_dim=(64, 128)[seed],
            dtype=(torch.bfloat16, torch.float16)[seed],
            num_ctas=7,
        )
        problem = cascade_problem(numpy.random.default_rng([seed, 86]), shape, CPU, 2)
        attention = DeviceAttention(emulated, problem.attention(kernel=kernel), kernel, seed)
        problem.run(attention)  # type: ignore[arg-type]
        problem.check()
        plain, memory, exact = problem.out.clone(), problem.memory, problem.expected()[0]
        rows = sorted({row for seen in problem.seen for row in seen.rows})
        scale = torch.tensor(scale_for(exact[rows], 0.1))
        out = attention.run(
            problem.q,
            memory.kv,
            out_scale=scale,
            sm_scale=shape.sm_scale,
            logits_soft_cap=shape.logits_soft_cap,
        )
        check_rounded(out[rows], exact[rows], scale, 5e-3)
        check_like_unfused(out[rows], plain[rows], scale)
