"""8-bit caches in compositions of several levels: every level uses the scales of the row's request."""

from __future__ import annotations

from dataclasses import replace

import numpy
import pytest
import torch
from compositions import Problem, cascade_problem, check_states, random_shape, tree_problem
from float8_cases import DTYPES, SCALES, random_scale, rounded_cache, scale_of
from tiers import mostly_slow

from attn_backend import Composition


def problem_over_8_bits(seed: int, device: torch.device) -> tuple[Problem, torch.Tensor, torch.Tensor]:
    """A tree or a cascade with scales in any form, and its float64 o and lse.

    Rows that see the same tokens are a request.
    """
    rng = numpy.random.default_rng([seed, 88])
    shape = random_shape(rng, device)
    problem = (
        tree_problem(rng, shape, device, 1 + seed % 3)
        if seed % 2
        else cascade_problem(rng, shape, device, 2 + seed // 2 % 2)
    )
    memory, dtype = problem.memory, DTYPES[seed // 4 % 2]
    k_form, v_form = (str(form) for form in rng.choice(SCALES, size=2))
    k_scale, v_scale = (
        random_scale(rng, form, len(problem.seen), shape.num_kv_heads, device) for form in (k_form, v_form)
    )
    if "request" in k_form + v_form:
        requests = torch.zeros(len(problem.q), dtype=torch.int32, device=device)
        for request, seen in enumerate(problem.seen):
            requests[seen.rows] = request
        problem.composition = Composition(
            tuple(replace(level, requests=requests) for level in problem.composition.levels)
        )
    memory.kv = rounded_cache(memory.kv, dtype, k_scale, v_scale)
    k_slots, v_slots = (slots.to(dtype).double() for slots in (memory.k_slots, memory.v_slots))
    q, o, lse = (
        problem.q,
        torch.full(problem.out.shape, torch.nan, dtype=torch.float64, device=device),
        problem.lse.double(),
    )
    for request, seen in enumerate(problem.seen):
        k, v = (
            slots * scale_of(scale, request, shape.num_kv_heads).to(device)[:, None]
            for slots, scale in ((k_slots, k_scale), (v_slots, v_scale))
        )
        of_request = replace(
            problem, q=q.double(), memory=replace(memory, k_slots=k, v_slots=v), seen=[seen]
        ).expected()
        o[seen.rows], lse[seen.rows] = (states[seen.rows] for states in of_request)
    return problem, o, lse


@pytest.mark.parametrize("seed", mostly_slow(range(160), fast=60, without_gpu=60))
def test_random_compositions(device: torch.device, seed: int) -> None:
    problem, o, lse = problem_over_8_bits(seed, device)
    problem.run(problem.attention(kv_dtype=problem.memory.kv.k.dtype))
    rows = sorted({row for seen in problem.seen for row in seen.rows})
    check_states(problem.shape, rows, problem.out, problem.lse, o[rows], lse[rows])


def test_row_groups_are_not_requests(device: torch.device) -> None:
    """Levels with different numbers of row groups do not determine a row's scale."""
    problem, _, _ = problem_over_8_bits(0, device)
    bare = Composition(tuple(replace(level, requests=None) for level in problem.composition.levels))
    assert len({level.batch_size for level in bare.levels}) > 1
    attention = problem.attention(kv_dtype=problem.memory.kv.k.dtype)
    requests = len(problem.seen)
    for name in ("k_scale", "v_scale"):
        problem.memory.kv = replace(
            problem.memory.kv,
            **{"k_scale": None, "v_scale": None, name: torch.ones(requests, 1, device=device)},
        )
        with pytest.raises(
            ValueError, match=rf"^kv\.{name}\.shape is \[batch, \.\.\.\], must be .* made with `requests`"
        ):
            problem.run(attention, bare)
