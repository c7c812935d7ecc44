"""Random forests compared with an independent oracle."""

from __future__ import annotations

from dataclasses import replace

import cases
import jax_oracle
import numpy
import pytest
import torch
from compositions import Shape
from forests import Problem, make_problem, random_batch, with_lengths

FORESTS = 80 if torch.cuda.is_available() else 12
QO_LENS = [0, 1, 20]
KV_LENS = [0, 1, 17, 90, 400, 1000]
HEADS = [(2, 4, 64), (1, 8, 128)]


@pytest.fixture(autouse=True)
def jax() -> None:
    jax_oracle.reference()


def make_forest(seed: int, device: torch.device) -> Problem:
    rng = numpy.random.default_rng([seed, 20])
    dtypes = [torch.bfloat16, torch.float16] + ([torch.float32] if device.type == "cpu" else [])
    shape = Shape(
        *HEADS[rng.integers(len(HEADS))],
        dtype=dtypes[rng.integers(len(dtypes))],
        page_size=int(rng.choice([1, 16, 16, 64])),
        num_ctas=[None, 1, 37][rng.integers(3)],
        sm_scale=float(rng.uniform(0.02, 0.3)) if rng.random() < 0.2 else None,
        logits_soft_cap=float(rng.uniform(1, 50)) if rng.random() < 0.2 else 0.0,
    )
    batch = random_batch(
        rng,
        shape.page_size,
        depth=1 + seed % 6,
        max_requests=int(rng.choice([4, 8, 24], p=[0.2, 0.7, 0.1])),
        budget=1e4,
    )
    return make_problem(rng, shape, replace(with_lengths(batch, QO_LENS, KV_LENS), causal=True), device)


def expected(problem: Problem) -> torch.Tensor:
    shape, batch, memory = problem.shape, problem.batch, problem.memory
    return jax_oracle.paged_attention(
        problem.q[: batch.rows],
        memory.k_slots,
        memory.v_slots,
        batch.page_size,
        batch.qo_lens,
        batch.kv_lens,
        batch.pages,
        sm_scale=shape.sm_scale,
        window_left=batch.window_left,
        logits_soft_cap=shape.logits_soft_cap,
    )


def test_forests(device: torch.device) -> None:
    """On a CPU it also checks our own oracle, which the other tests use: it agrees with jax to float32's
    precision.
    """
    for seed in range(FORESTS):
        problem = make_forest(seed, device)
        o_jax = expected(problem)
        if device.type == "cpu":
            assert (o_jax - problem.expected()[0]).norm() <= 2e-6 * o_jax.norm(), (
                f"seed {seed}\n{problem.shape}"
            )
        o_ref = o_jax.to(device).double()
        for cascade in (True, "always"):
            out, _ = problem.run(
                problem.attention(cascade=cascade), problem.batch.view(numpy.random.default_rng(seed), device)
            )
            error = (out[: problem.batch.rows].double() - o_ref).norm()
            tolerance = cases.TOLERANCE[problem.shape.dtype]
            assert error <= tolerance * o_ref.norm(), (
                f"seed {seed}: ||o - ref|| / ||ref|| = {float(error / o_ref.norm()):.2e} > "
                f"{tolerance}\n{problem.shape}"
            )
