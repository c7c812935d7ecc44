"""Attention sinks: logits that join the sum of each row once, no matter where its parts were computed."""

from __future__ import annotations

import case_tensors
import cases
import forests
import numpy
import pytest
import torch
from cases import Spec
from tiers import mostly_slow

from attn_backend import Variant

pytestmark = pytest.mark.usefixtures("kernel")


def random_sinks(rng: numpy.random.Generator, heads: int, device: torch.device) -> torch.Tensor:
    sinks = torch.from_numpy(rng.normal(0, 3, heads)).float()
    sinks[rng.integers(heads)] = [-torch.inf, 5.0, -200.0][rng.integers(3)]
    return sinks.to(device)


@pytest.mark.parametrize("seed", mostly_slow(range(60), fast=6))
def test_random_cases(device: torch.device, seed: int) -> None:
    spec = cases.random_spec(3 * 10**6 + seed, device.type)
    case = case_tensors.build(spec, device)
    sinks = random_sinks(numpy.random.default_rng(seed), spec.num_kv_heads * spec.group_size, device)
    attention = case.attention(sinks=True, batch_invariant=seed % 4 == 0)
    attention.plan(case.view)
    case.run(attention, out=case.out, lse=case.lse, sinks=sinks)
    case_tensors.check(case, case.out, case.lse, case.expected(sinks=sinks))
    case_tensors.check_padding(case)
    # the same object without sinks; without lse, rows are stored in another way
    without = case.run(attention)
    case_tensors.check(case, without, None)
    case_tensors.check(case, case.run(attention, sinks=sinks), None, case.expected(sinks=sinks))


@pytest.mark.parametrize("seed", mostly_slow(range(20), fast=3))
def test_with_shared_prefixes(device: torch.device, seed: int) -> None:
    rng = numpy.random.default_rng([seed, 60])
    problem = forests.random_problem(rng, device)
    sinks = random_sinks(rng, problem.shape.num_kv_heads * problem.shape.group_size, device)
    attention = problem.attention(sinks=True, cascade="always")
    problem.run(attention, problem.batch.view(rng, device), sinks=sinks)
    problem.check(problem.expected(sinks=sinks))


def test_a_sink_that_outweighs_everything(device: torch.device) -> None:
    case = case_tensors.build(Spec((1, 70, 3), (900, 200, 40), num_ctas=5), device)
    attention = case.attention(sinks=True)
    attention.plan(case.view)
    case.run(
        attention, out=case.out, lse=case.lse, sinks=torch.full((case.q.shape[1],), 300.0, device=device)
    )
    assert (case.out[: case.rows] == 0).all()
    assert (case.lse[: case.rows] == 300).all()


def test_refusals(device: torch.device) -> None:
    case = case_tensors.build(Spec((1, 3), (40, 25)), device)
    heads = case.q.shape[1]
    plain, attention = case.attention(), case.attention(sinks=True)
    for made in (plain, attention):
        made.plan(case.view)
    with pytest.raises(
        ValueError, match="sinks is a tensor, must be None, or the Attention made with sinks=True"
    ):
        case.run(plain, sinks=torch.zeros(heads, device=device))
    for wrong, message in (
        (torch.zeros(heads + 1, device=device), "sinks"),
        (torch.zeros(heads, dtype=torch.float64, device=device), "sinks"),
        (torch.zeros(2 * heads, device=device)[::2], "sinks is not contiguous"),
        (torch.zeros(heads, device="meta"), "sinks"),
        ([0.0] * heads, "sinks"),
    ):
        with pytest.raises(ValueError, match=message):
            case.run(attention, sinks=wrong)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="sinks is 1, must be True or False"):
        case.attention(sinks=1)
    squared = Variant.from_source(
        "static constexpr bool kUsesSoftmax = false;\nfloat logits(float x, const ScoreRow&, int32_t) const "
        "{ return x; }",
        name="linear",
    )
    with pytest.raises(ValueError, match="sinks is True, must be False under variant linear"):
        case.attention(sinks=True, variant=squared)
