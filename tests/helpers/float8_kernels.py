"""Batches for the emulated attention kernels over 8-bit caches, and their comparison with the oracle."""

from __future__ import annotations

from pathlib import Path

import torch
from device_attention import DeviceAttention
from float8_cases import Float8Case

FORMS = (
    (torch.bfloat16, 64),
    (torch.float16, 128),
    (torch.bfloat16, 72),
    (torch.bfloat16, 256),
    (torch.bfloat16, 128),
)
# Two pairs, each of a batch with decode and one for prefill: without a GPU each form runs one pair. Odd and
# even places have different options.
BATCHES = (
    ((1, 70, 3, 20), (200, 70, 300, 150)),
    ((150, 5), (200, 90)),
    ((40, 1, 260), (140, 500, 300)),
    ((1,) * 6, (70, 300, 1, 0, 64, 129)),
)


def run_and_check(
    problem: Float8Case, emulated: Path, kernel: str, seed: int, wants_lse: bool = True, **options: object
) -> str:
    case = problem.case
    attention = DeviceAttention(
        emulated, case.attention(kernel=kernel, **problem.options, **options), kernel, seed
    )
    attention.plan(case.view)
    case.run(attention, out=case.out, lse=case.lse if wants_lse else None, **problem.run_options)  # type: ignore[arg-type]
    lse = case.lse.clone()
    if not wants_lse:
        lse[: case.rows] = problem.expected()[1]
    problem.check(case.out, lse, kernel)
    assert attention.schedule().errors == 0
    return attention.launched
