"""Caches of rotated rows: signs, then a Hadamard matrix (csrc/common/rotation.h)."""

from __future__ import annotations

import subprocess
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

import case_tensors
import cases
import cpu_isa
import numpy
import pytest
import torch
from append_problems import HEADS, check, random_problem
from compositions import random_shape
from float8_cases import INT4, ROUNDED_TOLERANCE, TOKEN_DTYPES
from rotations import (
    TOLERANCES,
    RotatedCase,
    block_of,
    check_problem,
    matrix,
    rotated,
    rotated_case,
    rotated_problem,
)
from tiers import mostly_slow
from token_scaled_caches import cache_for, check_token_scaled, fits, token_scaled_cache
from variant_fuzz.catalogue import by_reference

from attn_backend import Attention, BSRView, KVCache, PageTable, append_kv, append_qkv
from attn_backend.jit import compilers, progress
from attn_backend.kernels.append import rotation_matrix
from attn_backend.variants import builtin

CPU = torch.device("cpu")
HEAD_DIMS = (8, 24, 64, 80, 96, 128, 192, 256)


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_signs_and_matrix(head_dim: int) -> None:
    """Torch draws the signs that csrc/ holds."""
    assert torch.equal(rotation_matrix(head_dim).double(), matrix(head_dim))


@pytest.mark.parametrize("head_dim", [64, 96, 128, 256])
def test_the_rotation_of_the_engine(head_dim: int) -> None:
    name = "vllm.v1.attention.ops.int4_per_token_head"
    pytest.importorskip("vllm")
    try:
        rotate = import_module(name).single_rht
    except (ImportError, AttributeError):
        pytest.skip(f"no single_rht in {name}")
    x = torch.randn(5, head_dim, generator=torch.Generator().manual_seed(1))
    torch.testing.assert_close(rotate(x).double(), rotated(x), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(
        rotate(rotated(x).float(), inverse=True).double() / block_of(head_dim),
        x.double(),
        rtol=1e-5,
        atol=1e-5,
    )


def random_case(
    seed: int, device: torch.device, **options: Any
) -> tuple[case_tensors.Case, dict[str, Any], tuple[torch.Tensor, torch.Tensor], tuple[float, float]]:
    """A case, options of Attention, the expected output and lse, and their tolerances. options: of the
    oracle.
    """
    spec = cases.random_spec(seed, device.type)
    dims = HEAD_DIMS if device.type == "cpu" else (64, 128, 256, 128)
    spec = spec.with_(head_dim=dims[seed % len(dims)], head_dim_v=None)
    form = seed // 2 % 4
    tolerance, of_lse = TOLERANCES[spec.dtype]
    if form == 0:
        case = rotated_case(spec, device)
        made: dict[str, Any] = {"rotation": True}
        expected = case.expected(**options)
    else:
        dtype: torch.dtype | str = (torch.float8_e4m3fn, torch.int8, torch.float8_e4m3fn)[form - 1]
        base = of_lse
        if form < 3 and device.type == "cuda":
            of_lse = 2 * base  # rotated Q is rounded, and so is K times its scales
        spec = spec.with_(strided=spec.strided and device.type == "cpu")
        if form == 1 and seed // 8 % 2:
            dtype, of_lse = INT4, 4 * base  # zero points of some rows are far from their numbers
            spec = spec.with_(head_dim=max(spec.head_dim // 32 * 32, 32))
        problem = RotatedCase(spec, device, dtype, *(["token"] * 2 if form < 3 else ["head", "number"]))
        case, made, expected = problem.case, problem.options, problem.expected(**options)
    return case, made, expected, (tolerance, of_lse)


def run_and_check(seed: int, device: torch.device, **options: Any) -> None:
    case, made, expected, tolerances = random_case(seed, device)
    attention = case.attention(**made, **options)
    attention.plan(case.view)
    case.run(attention, out=case.out, lse=case.lse)
    case_tensors.check(case, case.out, case.lse, expected, *tolerances)
    case_tensors.check_padding(case)
    assert attention.schedule().errors == 0


@pytest.mark.parametrize("block", mostly_slow(range(8), fast=2))
def test_random_cases(device: torch.device, kernel: str | None, block: int) -> None:
    """Attention over the rows that the cache stands for."""
    for seed in range(12 * block, 12 * (block + 1)):
        options = {} if kernel is None else {"kernel": kernel}
        run_and_check(seed, device, cascade=("always", True, False)[seed % 3], **options)


RUN_CASES = """\
import torch
from test_rotation import run_and_check
for seed in range(24):
    run_and_check(seed, torch.device("cpu"))
"""


@pytest.mark.parametrize("isa", cpu_isa.ISAS)
def test_every_instruction_set(isa: str) -> None:
    program = f"import sys\nsys.path[:0] = {sys.path}\n{RUN_CASES}"
    subprocess.run([sys.executable, "-c", program], env=cpu_isa.environment(isa), check=True)


def test_sinks_and_chunks(device: torch.device, kernel: str | None) -> None:
    spec = cases.Spec((3, 1, 20), (90, 400, 64), num_kv_heads=2, group_size=4, head_dim=128, page_size=16)
    problem = RotatedCase(spec.with_(logits_soft_cap=20.0), device, torch.int8, "token", "token")
    case, sinks = problem.case, torch.linspace(-2, 3, 8, device=device)
    attention = case.attention(kernel=kernel, sinks=True, batch_invariant=True, **problem.options)
    attention.plan(case.view)
    case.run(attention, out=case.out, lse=case.lse, sinks=sinks)
    expected = problem.expected(sinks=sinks.cpu())
    case_tensors.check(case, case.out, case.lse, expected, *TOLERANCES[case.spec.dtype])


@pytest.mark.parametrize("seed", mostly_slow(range(24), fast=8))
def test_compositions(device: torch.device, seed: int) -> None:
    shape = random_shape(numpy.random.default_rng([seed, 91]), device)
    problem, o, lse = rotated_problem(seed, shape, device)
    problem.run(problem.attention(rotation=True))
    check_problem(problem, o, lse)


def test_rows_that_float16_cannot_hold(device: torch.device) -> None:
    """Rotated rows are up to sqrt(b) times as long. Numbers beyond the largest become that."""
    rows = torch.full((1, 1, 64), 60000.0, dtype=torch.float16, device=device)
    kv = KVCache.from_pair(*torch.zeros(2, 1, 16, 1, 64, dtype=torch.float16, device=device))
    append_kv(rows, rows, kv, torch.zeros(1, dtype=torch.long, device=device), rotation=True)
    wanted = rotated(rows[0].cpu()).clamp(-65504, 65504)
    assert (wanted.abs() == 65504).any()
    torch.testing.assert_close(kv.k[0, 0].cpu().double(), wanted, rtol=1e-3, atol=0)


def test_a_captured_run(device: torch.device, kernel: str | None) -> None:
    if device.type == "cpu":
        pytest.skip("needs a CUDA GPU")
    spec = cases.Spec((1, 70, 3), (200, 90, 300), num_kv_heads=2, group_size=4, head_dim=128)
    problem = RotatedCase(spec, device, torch.int8, "token", "token")
    case = problem.case
    attention = case.attention(kernel=kernel, **problem.options)

    def step() -> None:
        attention.plan(case.view)
        case.run(attention, out=case.out, lse=case.lse)

    step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    case.out.fill_(torch.nan)
    case.lse.fill_(torch.nan)
    graph.replay()
    case_tensors.check(case, case.out, case.lse, problem.expected(), *TOLERANCES[spec.dtype])


@pytest.mark.parametrize("interprets", [False, True])
def test_variants(interprets: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where no C++ compiler is found."""
    if interprets:
        monkeypatch.setenv("ATTN_BACKEND_CACHE", str(tmp_path))
        monkeypatch.setattr(compilers, "cpp_compiler", lambda: None)
        monkeypatch.setattr(progress, "warned", set())
    variant, args = builtin.alibi(), {"slopes": torch.linspace(0.05, 0.4, 4)}
    for stored in (torch.int8, None):
        spec = cases.Spec(
            (5, 1, 20), (40, 50, 20), group_size=2, dtype=torch.float32, sharing=0.8, num_ctas=3, head_dim=96
        )
        exact = by_reference(variant, args)
        if stored is None:
            case, options = rotated_case(spec, CPU), {"rotation": True}
            expected = case.expected(variant=exact)
        else:
            problem = RotatedCase(spec, CPU, stored, "token", "token")
            case, options, expected = problem.case, problem.options, problem.expected(variant=exact)
        attention = case.attention(variant=variant, **options)
        attention.plan(case.view)
        case.run(attention, out=case.out, lse=case.lse, variant_args=args)
        case_tensors.check(case, case.out, case.lse, expected, 2e-5)


def attend(kv: KVCache, q: torch.Tensor, tokens: int, **options: Any) -> torch.Tensor:
    attention = Attention(
        q.shape[1], HEADS, q.shape[2], dtype=q.dtype, device=q.device, max_rows=len(q), max_batch=1, **options
    )
    table = PageTable.block_table(
        torch.arange(kv.num_pages, dtype=torch.int32, device=q.device)[None],
        torch.tensor([tokens], device=q.device),
        kv.page_size,
    )
    attention.plan(BSRView(torch.tensor([0, len(q)], device=q.device), table))
    return attention.run(q, kv)


@pytest.mark.parametrize("head_dim", [64, 96, 256])
def test_appended_rows(device: torch.device, head_dim: int) -> None:
    """A large column costs other columns no precision: int8 is exacter than without rotation."""
    generator = torch.Generator().manual_seed(3)
    k, v = torch.randn(2, 70, HEADS, head_dim, generator=generator).to(device, torch.bfloat16)
    k[:, :, 5] *= 30
    v[:, :, 7] *= 30
    q = torch.randn(9, 2 * HEADS, head_dim, generator=generator).to(device, torch.bfloat16)
    q[:, :, 5] = 0
    slots = torch.arange(70, device=device)
    exact = torch.nn.functional.scaled_dot_product_attention(
        *(x.double().transpose(0, 1) for x in (q, *(x.repeat_interleave(2, 1) for x in (k, v)))),
        attn_mask=torch.arange(70, device=device)[None] <= torch.arange(61, 70, device=device)[:, None],
    ).transpose(0, 1)
    errors = []
    for rotation in (False, True):
        kv = token_scaled_cache(torch.int8, 5, 16, head_dim, device=device)
        append_kv(k, v, kv, slots, rotation=rotation)
        out = attend(kv, q, 70, kv_dtype=torch.int8, token_scales=True, rotation=rotation)
        others = torch.arange(head_dim) != 7
        errors.append(float((out.double() - exact)[..., others].norm() / exact[..., others].norm()))
    assert errors[1] < 0.5 * errors[0], errors
    plain = KVCache.from_pair(*torch.zeros(2, 5, 16, HEADS, head_dim, device=device, dtype=torch.bfloat16))
    append_kv(k, v, plain, slots, rotation=True)
    out = attend(plain, q, 70, rotation=True)
    assert (out.double() - exact).norm() <= ROUNDED_TOLERANCE * exact.norm()


@pytest.mark.parametrize("block", mostly_slow(range(6), fast=2))
def test_fused_append(device: torch.device, block: int) -> None:
    """After norm and RoPE, before the numbers are rounded; Q is left as it is."""
    for seed in range(10 * block, 10 * (block + 1)):
        source = (torch.bfloat16, torch.float16, torch.float32)[seed % (2 if device.type == "cuda" else 3)]
        problem = random_problem(seed, source, device)
        of_tokens = TOKEN_DTYPES[seed % (3 if fits(problem.kv.head_dim, INT4) else 2)]
        kv = problem.kv if seed // 3 % 2 else cache_for(problem, of_tokens)
        append_qkv(
            *(problem.q, problem.k, problem.v, kv, problem.slots),
            **problem.options,
            out=problem.out,
            rotation=True,
        )
        if kv is problem.kv:
            problem.check(rotation=True)
        else:
            check_token_scaled(problem, kv, rotation=True)


@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16, torch.float16, torch.float8_e5m2], ids=str)
def test_append_alone(device: torch.device, stored: torch.dtype) -> None:
    sources = [torch.float32] if stored == torch.float32 else [torch.bfloat16, torch.float16]
    if device.type == "cuda" and stored == torch.float32:
        pytest.skip("no float32 on CUDA")
    for source in sources:
        k, v = torch.randn(2, 9, HEADS, 80, generator=torch.Generator().manual_seed(2)).to(device, source)
        slots = torch.tensor([3, -1, 17, 16, 20, 31, 32, 5, 0], device=device)
        kv = KVCache.from_pair(*torch.zeros(2, 2, 16, HEADS, 80, device=device).to(stored))
        append_kv(k, v, kv, slots, rotation=True)
        for x, of_cache in ((k, kv.k), (v, kv.v)):
            wanted = torch.zeros(32, HEADS, 80, dtype=torch.float64)
            is_there = [i for i in range(9) if i not in (1, 6)]
            wanted[slots[is_there].cpu()] = rotated(x[is_there])
            found = of_cache.flatten(0, 1).double().cpu()
            if stored == torch.float8_e5m2:
                assert ((found - wanted).abs() <= 0.126 * wanted.abs() + 1e-4).all()
            else:
                check(of_cache.flatten(0, 1), wanted)


def test_compiled_functions() -> None:
    k, v = torch.randn(2, 5, HEADS, 64).bfloat16()
    q = torch.randn(5, HEADS, 64).bfloat16()
    slots = torch.tensor([3, 31, 0, 16, 7])
    for function, given in ((append_kv, (k, v)), (append_qkv, (q, k, v))):
        eager, compiled = (KVCache.from_pair(*torch.zeros(2, 2, 16, HEADS, 64).bfloat16()) for _ in range(2))
        function(*given, eager, slots, rotation=True)  # type: ignore[operator]
        torch.compile(function, backend="eager", fullgraph=True)(*given, compiled, slots, rotation=True)
        assert torch.equal(eager.k, compiled.k)
        assert torch.equal(eager.v, compiled.v)
        assert torch.equal(eager.v[1, 15].double(), rotated(v[1]).to(torch.bfloat16).double())


def attention(head_dim: int = 64, **options: Any) -> Attention:
    return Attention(
        HEADS,
        HEADS,
        head_dim,
        **({"device": "cpu", "max_rows": 3, "max_batch": 1, "rotation": True} | options),
    )


REFUSED: dict[str, dict[str, Any]] = {
    r"rotation is 1, must be True or False": {"rotation": 1},
    r"head_dim_v is 32, must be head_dim = 64 with rotation=True": {"head_dim_v": 32},
    r"head_dim is 320, must be at most 256 with rotation": {"head_dim": 320},
    r"q_dtype is torch.float8_e4m3fn, must be None or dtype = torch.bfloat16 with rotation=True": {
        "kv_dtype": torch.float8_e4m3fn,
        "q_dtype": torch.float8_e4m3fn,
    },
    r"variant is .*, must be a variant that leaves Q, K, V and the output as they are, with rotation=True": {
        "variant": builtin.rope(builtin.rope_frequencies(32))
    },
}


@pytest.mark.parametrize("message", REFUSED)
def test_refused_objects(message: str) -> None:
    with pytest.raises(ValueError, match=message):
        attention(**REFUSED[message])


def test_refused_appends() -> None:
    slots = torch.zeros(1).long()

    def kv(*columns: int, dtype: torch.dtype = torch.bfloat16) -> KVCache:
        return KVCache.from_pair(*(torch.zeros(1, 2, HEADS, width).to(dtype) for width in columns))

    def rows(width: int) -> torch.Tensor:
        return torch.zeros(1, HEADS, width).bfloat16()

    with pytest.raises(ValueError, match=r"kv\.v\.shape\[3\] \(head_dim_v\) is 32, must be head_dim = 64"):
        append_kv(rows(64), rows(32), kv(64, 32), slots, rotation=True)
    with pytest.raises(ValueError, match=r"kv\.k\.shape\[3\] \(head_dim\) is 264, must be .*256"):
        append_kv(rows(264), rows(264), kv(264, 264), slots, rotation=True)
    with pytest.raises(ValueError, match=r"kv\.k\.shape\[3\] \(head_dim\) is 4, must be .*8"):
        append_kv(rows(4), rows(4), kv(4, 4), slots, rotation=True)
    of_8_bits = torch.zeros(1, HEADS, 64).to(torch.float8_e4m3fn)
    with pytest.raises(ValueError, match=r"k\.dtype is float8_e4m3fn, must be"):
        append_kv(of_8_bits, of_8_bits, kv(64, 64, dtype=torch.float8_e4m3fn), slots, rotation=True)
    for append, given in ((append_kv, ()), (append_qkv, (rows(64),))):
        with pytest.raises(ValueError, match="rotation is 'yes', must be True or False"):
            append(*given, rows(64), rows(64), kv(64, 64), slots, rotation="yes")  # type: ignore[operator]
