"""plan and run compared with the float64 oracle on random cases."""

from __future__ import annotations

import case_tensors
import cases
import pytest
import torch
from tiers import mostly_slow

from attn_backend import Composition

SEEDS = 2000


@pytest.mark.parametrize("seed", mostly_slow(range(SEEDS), fast=100, without_gpu=300))
def test_random_case(device: torch.device, seed: int) -> None:
    case = case_tensors.build(cases.random_spec(seed, device.type), device)
    attention = case.attention()
    attention.plan(case.view if seed % 2 else Composition((case.view,)))
    lse = case.lse if seed % 3 else None
    out = case.run(attention, out=case.out, lse=lse)
    assert out is case.out
    case_tensors.check(case, out, lse)
    case_tensors.check_padding(case)
