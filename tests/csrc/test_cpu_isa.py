"""The CPU executor with each instruction set of the machine, on the same random cases.

(A process chooses the set once.)
"""

from __future__ import annotations

from pathlib import Path

import cpu_isa
import forked_python
import pytest
import torch
from tiers import mostly_slow

RUN = """
import sys
import case_tensors, cases, torch

torch.set_num_threads(1)
for seed in range(int(sys.argv[1]), int(sys.argv[2])):
    case = case_tensors.build(cases.random_spec(seed, "cpu"), "cpu")
    attention = case.attention()
    attention.plan(case.view)
    case.run(attention, out=case.out, lse=case.lse)
    case_tensors.check(case, case.out, case.lse)
    case_tensors.check_padding(case)
"""


def test_the_best_set_is_what_the_operating_system_says() -> None:
    cpuinfo = Path("/proc/cpuinfo")
    lines = (
        [line for line in cpuinfo.read_text().splitlines() if line.startswith("flags")]
        if cpuinfo.exists()
        else []
    )
    if not lines or cpu_isa.COMPILER is None:
        pytest.skip("needs g++ and the flags of an x86-64 processor")
    flags = set(lines[0].split())
    needed = {
        "avx2": {"avx2", "fma", "f16c"},
        "avx512": {"avx512f", "avx512bw", "avx512vl", "avx512dq"},
        "amx": {"avx512_bf16", "amx_bf16", "amx_tile"},
    }
    best = "baseline"
    for isa, its_flags in needed.items():
        if not its_flags <= flags:
            break
        best = isa
    assert cpu_isa.used("amx") == best


@pytest.mark.parametrize("first", mostly_slow([2000, 2020], fast=1))
@pytest.mark.parametrize("isa", cpu_isa.ISAS)
def test_random_cases(isa: str, first: int) -> None:
    forked_python.run(RUN, [str(first), str(first + 20)], cpu_isa.environment(isa))


@pytest.mark.parametrize("isa", cpu_isa.ISAS)
def test_8_bit_caches(isa: str) -> None:
    program = """
import cases, float8_cases, torch

torch.set_num_threads(1)
dtypes = (torch.bfloat16, torch.float16, torch.float32)
for seed, (head_dim, dtype) in enumerate((d, t) for d in (64, 72, 128, 256) for t in dtypes):
    shape = {"head_dim": head_dim, "dtype": dtype, "num_ctas": 5, "strided": bool(seed % 2), "seed": seed}
    spec = cases.Spec((1, 30, 3, 0), (200, 70, 300, 10), **shape)
    kv_dtype = float8_cases.DTYPES[seed // 2 % len(float8_cases.DTYPES)]
    problem = float8_cases.Float8Case(spec, "cpu", kv_dtype, "head", "request")
    attention = problem.case.attention(kv_dtype=problem.dtype)
    attention.plan(problem.case.view)
    problem.case.run(attention, out=problem.case.out, lse=problem.case.lse)
    problem.check(problem.case.out, problem.case.lse)
"""
    forked_python.run(program, [], cpu_isa.environment(isa))


@pytest.mark.parametrize("isa", cpu_isa.ISAS)
def test_caches_of_the_other_16_bit_type(isa: str) -> None:
    program = """
import cases, mixed_cases, torch

torch.set_num_threads(1)
dtypes = (torch.bfloat16, torch.float16)
for seed, (head_dim, dtype) in enumerate((d, t) for d in (64, 72, 128) for t in dtypes):
    shape = {"head_dim": head_dim, "dtype": dtype, "num_ctas": 5, "strided": bool(seed % 4), "seed": seed}
    spec = cases.Spec((1, 30, 3, 0), (200, 70, 300, 10), **shape)
    case = mixed_cases.build(spec, "cpu")
    attention = case.attention(kv_dtype=case.kv.dtype)
    attention.plan(case.view)
    case.run(attention, out=case.out, lse=case.lse)
    mixed_cases.check(case, case.out, case.lse)
"""
    forked_python.run(program, [], cpu_isa.environment(isa))


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("isa", cpu_isa.ISAS)
def test_every_head_dim(isa: str, dtype: torch.dtype) -> None:
    program = f"""
import case_tensors, cases, torch

torch.set_num_threads(1)
for head_dim in range(8, 257, 8):
    for seed, causal in enumerate((True, False)):
        shape = {{"head_dim": head_dim, "group_size": 3, "strided": causal}}
        spec = cases.Spec((1, 9, 40), (70, 9, 100), dtype={dtype}, causal=causal, seed=seed, **shape)
        case = case_tensors.build(spec, "cpu")
        attention = case.attention()
        attention.plan(case.view)
        case.run(attention, out=case.out, lse=case.lse)
        case_tensors.check(case, case.out, case.lse)
"""
    forked_python.run(program, [], cpu_isa.environment(isa))
