"""The attention kernels over rotated caches, without a GPU (test_attention_kernels.py): the outputs are those
over the rows that the cache stands for.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import case_tensors
import cases
import host_planner
import mixed_cases
import numpy
import pytest
import torch
from compositions import Shape
from device_attention import KERNELS, DeviceAttention
from float8_cases import INT4, MXFP4, NVFP4, ROUNDED_TOLERANCE
from float8_kernels import BATCHES
from float8_outputs import check_rounded, out_of_8_bits, scale_for
from rotations import (
    TOLERANCES,
    RotatedCase,
    check_problem,
    rotated_back,
    rotated_case,
    rotated_problem,
    spec_of_rotated,
)
from tiers import distinct, in_turn
from variant_fuzz.catalogue import by_reference

from attn_backend.variants import builtin

pytestmark = [pytest.mark.slow, pytest.mark.skipif(host_planner.COMPILER is None, reason="needs g++")]

BF16, F16, E4M3, INT8 = torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.int8
# dtype, head_dim, the 8-bit cache's dtype, and the form of its scales. Blocks of 8 to 256 columns.
FORMS = (
    (BF16, 128, E4M3, "token"),
    (BF16, 64, INT8, "token"),
    (F16, 256, E4M3, "head"),
    (BF16, 72, E4M3, "number"),
    (F16, 64, None, None),
    (BF16, 96, None, None),
    (BF16, 256, INT8, "token"),
    (F16, 80, E4M3, "request"),
    (BF16, 128, INT4, "token"),
    (F16, 64, INT4, "token"),
    (BF16, 96, INT4, "token"),
    (BF16, 256, INT4, "token"),
    (BF16, 128, NVFP4, "token"),
    (BF16, 64, MXFP4, "token"),
)


def tolerances(case: case_tensors.Case) -> tuple[float, float]:
    return TOLERANCES[case.kv.dtype if case.kv.dtype in TOLERANCES else case.spec.dtype]


def run(
    attention: DeviceAttention,
    case: case_tensors.Case,
    expected: tuple[Any, Any],
    wants_lse: bool = True,
    **given: Any,
) -> None:
    attention.plan(case.view)
    lse = case.lse if wants_lse else None
    case.run(attention, out=case.out, lse=lse, **given)  # type: ignore[arg-type]
    case_tensors.check(case, case.out, lse, expected, *tolerances(case))
    assert case.out[case.rows :].isnan().all()
    assert attention.schedule().errors == 0


@pytest.mark.parametrize("form", distinct(FORMS, repeated={6, 7}), ids=str)
@pytest.mark.parametrize("kernel", KERNELS)
def test_random_cases(
    emulated: Path, kernel: str, form: tuple[torch.dtype, int, torch.dtype | None, str | None]
) -> None:
    """Row tiles of all sizes, shared prefixes, chunks, and pairs that several CTAs share."""
    dtype, head_dim, stored, scales = form
    for number, (qo_lens, kv_lens) in in_turn(BATCHES, FORMS.index(form), without_gpu=2):
        rng = numpy.random.default_rng([number, head_dim, 90])
        spec = cases.Spec(
            qo_lens,
            kv_lens,
            num_kv_heads=2,
            group_size=int(rng.choice([1, 3, 4])),
            head_dim=head_dim,
            dtype=dtype,
            seed=number,
            page_size=int(rng.choice([1, 3, 16, 64])),
            num_ctas=int(rng.choice([3, 11])),
            sharing=0.9,
            window_left=int(rng.choice([-1, 60])),
            logits_soft_cap=float(rng.choice([0.0, 20.0])),
        )
        modes = {"batch_invariant": True} if number == 1 else {"cascade": ("always", True, False)[number % 3]}
        problem, case = None, None
        if stored is None:
            case = rotated_case(spec, "cpu")
            expected, options = case.expected(), {"rotation": True}
        else:
            problem = RotatedCase(spec, "cpu", stored, scales, scales)
            case, expected, options = problem.case, problem.expected(), problem.options
        made = case.attention(kernel=kernel, **options, **modes)
        run(DeviceAttention(emulated, made, kernel, number), case, expected, number % 2 == 0)


@pytest.mark.parametrize("kernel", KERNELS)
def test_compositions(emulated: Path, kernel: str) -> None:
    """Rows in several levels: their states are rotated back before they merge."""
    for seed in range(3):
        shape = Shape(2, 4, 64, (BF16, F16)[seed % 2], (16, 5, 1)[seed], 5)
        problem, o, lse = rotated_problem(seed, shape, torch.device("cpu"))
        made = problem.attention(kernel=kernel, rotation=True)
        problem.run(DeviceAttention(emulated, made, kernel, seed))  # type: ignore[arg-type]
        check_problem(problem, o, lse)


@pytest.mark.parametrize("kernel", KERNELS)
def test_q_of_another_type(emulated: Path, kernel: str) -> None:
    """Q is converted and rotated at once."""
    for seed, qo_lens in enumerate([(1, 70, 3), (1, 2, 1)]):
        spec = cases.Spec(
            qo_lens,
            (200, 90, 30),
            num_kv_heads=2,
            group_size=4,
            head_dim=64,
            num_ctas=3,
            seed=seed,
            dtype=(F16, BF16)[seed],
        )
        case = mixed_cases.build(spec_of_rotated(spec), "cpu")
        case.k_slots, case.v_slots = rotated_back(case.k_slots), rotated_back(case.v_slots)
        made = case.attention(kernel=kernel, kv_dtype=case.kv.dtype, rotation=True)
        expected = case.expected()
        run(DeviceAttention(emulated, made, kernel, seed), case, expected)


@pytest.mark.parametrize("kernel", KERNELS)
def test_variants_and_sinks(emulated: Path, kernel: str) -> None:
    """A bias with a slope; sinks; weights without softmax."""
    spec = cases.Spec((1, 70, 3), (200, 90, 30), num_kv_heads=2, group_size=2, head_dim=64, num_ctas=3)
    problem = RotatedCase(spec, "cpu", INT8, "token", "token")
    case, sinks = problem.case, torch.linspace(-2, 3, 4)
    made = case.attention(kernel=kernel, sinks=True, **problem.options)
    run(DeviceAttention(emulated, made, kernel, 0), case, problem.expected(sinks=sinks), sinks=sinks)
    slopes = torch.linspace(0.05, 0.4, 4)
    for variant, args in ((builtin.alibi(), {"slopes": slopes}), (builtin.sigmoid(-3.0), {})):
        made = case.attention(kernel=kernel, variant=variant, **problem.options)
        expected = problem.expected(variant=by_reference(variant, args))
        device = DeviceAttention(emulated, made, kernel, 0, variant)
        run(device, case, expected, variant.uses_softmax, variant_args=args, logits_soft_cap=0.0)


@pytest.mark.parametrize("kernel", KERNELS)
def test_8_bit_outputs(emulated: Path, kernel: str) -> None:
    spec = cases.Spec((1, 70, 3), (200, 90, 30), num_kv_heads=2, group_size=2, head_dim=64, num_ctas=3)
    case = rotated_case(spec, "cpu")
    expected = case.expected()
    attention = DeviceAttention(
        emulated, case.attention(kernel=kernel, float8_out=True, rotation=True), kernel, 1
    )
    attention.plan(case.view)
    scale = scale_for(expected[0], 0.01)
    out = out_of_8_bits(case)
    case.run(attention, out=out, out_scale=scale)  # type: ignore[arg-type]
    check_rounded(out[: case.rows], expected[0], scale, ROUNDED_TOLERANCE)


@pytest.mark.parametrize("head_dim", [64, 128])
def test_long_row_groups_read_a_16_bit_copy(
    emulated: Path, monkeypatch: pytest.MonkeyPatch, head_dim: int
) -> None:
    monkeypatch.setenv("ATTN_BACKEND_DEQUANTIZED_MIB", "1")
    spec = cases.Spec(
        (400, 1, 390), (400, 90, 420), num_kv_heads=2, group_size=4, head_dim=head_dim, num_ctas=7
    )
    problem = RotatedCase(spec, "cpu", (INT8, E4M3)[head_dim // 128], "token", "token")
    made = problem.case.attention(kernel="hopper", cascade=False, **problem.options)
    run(DeviceAttention(emulated, made, "hopper", 1), problem.case, problem.expected())
    assert (made.schedule().of_groups("dequantized_row") >= 0).tolist() == [True, False, True]
