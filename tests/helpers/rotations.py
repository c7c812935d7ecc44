"""The rotation of heads (csrc/common/rotation.h) in float64, as vLLM's int4_per_token_head defines it, and
cases whose caches hold rotated rows.
"""

from __future__ import annotations

import math
from dataclasses import replace
from functools import cache
from typing import Any

import case_tensors
import cases
import numpy
import torch
from compositions import Problem, Shape, cascade_problem, tree_problem
from float8_cases import ROUNDED_TOLERANCE, Float8Case
from torch import Tensor

# Of outputs, relative, and of lse, by the dtype that is multiplied: Q is rotated and rounded again. With
# spec_of_rotated() a score's error is about a tenth of an eps.
TOLERANCES = {
    torch.bfloat16: (ROUNDED_TOLERANCE, 2.0**-6),
    torch.float16: (2e-3, 2.0**-9),
    torch.float32: (2e-5, 1e-4),
}


def block_of(head_dim: int) -> int:
    """The largest power of 2 that divides it."""
    return head_dim & -head_dim


def signs(block: int) -> Tensor:
    """+1 and -1, float64."""
    generator = torch.Generator().manual_seed(0x9E3779B9)
    return 2.0 * torch.bernoulli(torch.full((block,), 0.5), generator=generator).double() - 1.0


@cache
def matrix(head_dim: int) -> Tensor:
    """x @ matrix is the rotated x."""
    block = block_of(head_dim)
    hadamard = torch.ones(1, 1, dtype=torch.float64)
    while len(hadamard) < block:
        hadamard = torch.kron(torch.tensor([[1.0, 1.0], [1.0, -1.0]], dtype=torch.float64), hadamard)
    return torch.block_diag(*[signs(block)[:, None] * hadamard] * (head_dim // block))


def rotated(x: Tensor) -> Tensor:
    """float64, on the CPU."""
    return x.double().cpu() @ matrix(x.shape[-1])


def rotated_back(x: Tensor) -> Tensor:
    """What `rotated` made x of."""
    return x.double().cpu() @ matrix(x.shape[-1]).T / block_of(x.shape[-1])


def multiplied_query(q: Tensor) -> Tensor:
    """In float64: the Q that CUDA kernels multiply. They rotate Q, divide it by the block and round it."""
    block = block_of(q.shape[-1])
    return rotated_back((rotated(q) / block).to(q.dtype)) * block


def spec_of_rotated(spec: cases.Spec) -> cases.Spec:
    """With scores that differ by about 1: stored rows are random numbers, so the rows that they stand for
    have small ones.
    """
    return spec.with_(head_dim_v=None, sm_scale=math.sqrt(block_of(spec.head_dim) / spec.head_dim))


class RotatedCase(Float8Case):
    """A case over an 8-bit cache whose stored rows are rotated."""

    def __init__(self, spec: cases.Spec, device: torch.device | str, *cache: Any) -> None:
        super().__init__(spec_of_rotated(spec), device, *cache)
        self.options["rotation"] = True

    def _represented(self, *arguments: Any) -> Tensor:
        return rotated_back(super()._represented(*arguments))


def rotated_case(spec: cases.Spec, device: torch.device | str) -> case_tensors.Case:
    """A case over a 16-bit or float32 cache whose stored rows are rotated: its k_slots and v_slots, for the
    oracle, are the rows that they stand for.
    """
    case = case_tensors.build(spec_of_rotated(spec), device)
    k_slots, v_slots = (rotated_back(slots).to(case.device) for slots in (case.k_slots, case.v_slots))
    return replace(case, k_slots=k_slots, v_slots=v_slots)


def rotated_problem(seed: int, shape: Shape, device: torch.device) -> tuple[Problem, Tensor, Tensor]:
    """A tree or a cascade whose stored rows are rotated, and its float64 o and lse."""
    rng = numpy.random.default_rng([seed, 90])
    scale = math.sqrt(block_of(shape.head_dim) / shape.head_dim)
    shape = replace(shape, head_dim_v=None, v_in_k=False, sm_scale=scale)
    problem = (tree_problem if seed % 2 else cascade_problem)(rng, shape, device, 2)
    memory = problem.memory
    k_slots, v_slots = (rotated_back(slots).to(device) for slots in (memory.k_slots, memory.v_slots))
    represented = replace(problem, memory=replace(memory, k_slots=k_slots, v_slots=v_slots))
    return problem, *represented.expected()


def check_problem(problem: Problem, o: Tensor, lse: Tensor) -> None:
    """Compares outputs with the results of rotated_problem()."""
    tolerance, lse_tolerance = TOLERANCES[problem.shape.dtype]
    rows = sorted({row for seen in problem.seen for row in seen.rows})
    assert (problem.out[rows].double() - o[rows]).norm() <= tolerance * o[rows].norm()
    seen = lse[rows] != -torch.inf
    assert torch.equal(problem.lse[rows] != -torch.inf, seen)
    assert ((problem.lse[rows] - lse[rows])[seen].abs() <= lse_tolerance).all()
    absent = torch.ones(len(problem.out), dtype=torch.bool)
    absent[rows] = False
    assert problem.out[absent].isnan().all()
