"""Caches of e2m1 numbers with a scale for 16 columns: NVFP4 and SGLang's fp4_mx_block16."""

from __future__ import annotations

import subprocess
import sys
from importlib import import_module
from pathlib import Path

import case_tensors
import cases
import cpu_isa
import pytest
import torch
from append_problems import HEADS, Problem, expected, fp4_cache, random_problem, rotated
from float8_cases import (
    E2M1,
    FP4_DTYPES,
    MXFP4,
    NVFP4,
    ROUNDED_TOLERANCE,
    Float8Case,
    block_values,
    e2m1_values,
)
from tiers import mostly_slow
from torch import Tensor
from variant_fuzz.catalogue import by_reference

from attn_backend import Attention, BlockScales, BSRView, KVCache, PageTable, append_kv, append_qkv
from attn_backend.jit import compilers, progress
from attn_backend.variants import builtin

CPU = torch.device("cpu")


def random_case(seed: int, device: torch.device) -> Float8Case:
    spec = cases.random_spec(seed, device.type)
    spec = spec.with_(head_dim=(64, 128, 192, 256)[seed % 4])
    if seed % 5 == 0 and spec.table_form != "ragged":
        spec = spec.with_(head_dim_v=64, cache_form="pair")
    spec = spec.with_(strided=spec.strided and device.type == "cpu")
    if spec.dtype == torch.float32 and device.type == "cuda":
        spec = spec.with_(dtype=torch.bfloat16)
    return Float8Case(spec, device, FP4_DTYPES[seed // 4 % 2], "token", "token")


def run(problem: Float8Case, **options: object) -> None:
    case = problem.case
    attention = case.attention(**problem.options, **options)
    attention.plan(case.view)
    case.run(attention, out=case.out, lse=case.lse)
    problem.check(case.out, case.lse)
    assert attention.schedule().errors == 0


@pytest.mark.parametrize("block", mostly_slow(range(10), fast=2))
def test_random_cases(device: torch.device, kernel: str | None, block: int) -> None:
    for seed in range(12 * block, 12 * (block + 1)):
        options = {} if kernel is None else {"kernel": kernel}
        run(random_case(seed, device), cascade=("always", True, False)[seed % 3], **options)


RUN_CASES = """\
import torch
from test_fp4 import random_case, run
for seed in range(16):
    run(random_case(seed, torch.device("cpu")))
"""


@pytest.mark.parametrize("isa", cpu_isa.ISAS)
def test_every_instruction_set(isa: str) -> None:
    program = f"import sys\nsys.path[:0] = {sys.path}\n{RUN_CASES}"
    subprocess.run([sys.executable, "-c", program], env=cpu_isa.environment(isa), check=True)


def test_sinks_and_chunks(device: torch.device, kernel: str | None) -> None:
    for seed, dtype in enumerate(FP4_DTYPES):
        spec = cases.Spec(
            (3, 1, 20), (90, 400, 64), num_kv_heads=2, group_size=4, head_dim=128, page_size=16, seed=seed
        )
        problem = Float8Case(spec.with_(logits_soft_cap=20.0), device, dtype, "token", "token")
        case, sinks = problem.case, torch.linspace(-2, 3, 8, device=device)
        attention = case.attention(kernel=kernel, sinks=True, batch_invariant=True, **problem.options)
        attention.plan(case.view)
        case.run(attention, out=case.out, lse=case.lse, sinks=sinks)
        wanted, wanted_lse = problem.expected(sinks=sinks.cpu())
        assert (case.out[: case.rows].double() - wanted).norm() <= ROUNDED_TOLERANCE * wanted.norm()
        assert (case.lse[: case.rows].double() - wanted_lse).abs().max() <= 1e-2


@pytest.mark.parametrize("dtype", FP4_DTYPES)
@pytest.mark.parametrize("interprets", [False, True])
def test_variants_see_scaled_rows(
    dtype: str, interprets: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where no C++ compiler is found. The variant transforms K."""
    if interprets:
        monkeypatch.setenv("ATTN_BACKEND_CACHE", str(tmp_path))
        monkeypatch.setattr(compilers, "cpp_compiler", lambda: None)
        monkeypatch.setattr(progress, "warned", set())
    spec = cases.Spec(
        (5, 1, 20), (40, 50, 20), group_size=2, dtype=torch.float32, sharing=0.8, num_ctas=3, head_dim=64
    )
    problem = Float8Case(spec, CPU, dtype, "token", "token")
    case, variant = problem.case, builtin.rope(builtin.rope_frequencies(32))
    attention = case.attention(variant=variant, **problem.options)
    attention.plan(case.view)
    case.run(attention, out=case.out, lse=case.lse)
    case_tensors.check(case, case.out, case.lse, problem.expected(variant=by_reference(variant, {})))


def engine_writes(x: Tensor, dtype: str, factor: float) -> tuple[Tensor, Tensor]:
    """Codes, [tokens, heads, head_dim], and scales of blocks, of x in float32. MXFP4: batched_quantize() of
    SGLang's kvfp4_tensor.py. NVFP4: cvt_warp_fp16_to_fp4() of vLLM's nvfp4_utils.cuh.
    """
    blocks = x.float().cpu().unflatten(-1, (-1, 16))
    largest = blocks.abs().amax(-1)
    if dtype == MXFP4:
        exponents = torch.ceil(torch.log2((largest / 6).clamp_min(1e-10)))
        scales, numbers = (exponents + 127).to(torch.uint8), blocks / torch.exp2(exponents)[..., None]
    else:
        scales = (largest / 6 / factor).clamp(max=448).to(torch.float8_e4m3fn)
        divisors = scales.float() * factor
        numbers = torch.where(divisors[..., None] > 0, blocks / divisors[..., None], 0.0)
    middles = (E2M1[1:] + E2M1[:-1]) / 2
    magnitudes = numbers.abs()
    codes = torch.bucketize(magnitudes, middles, right=True)
    if dtype == NVFP4:  # ties go to even codes
        codes = torch.where(magnitudes == middles[(codes - 1).clamp_min(0)], codes // 2 * 2, codes)
    return (codes + 8 * (numbers < 0)).flatten(-2), scales


def codes_of(rows: Tensor) -> Tensor:
    return torch.stack([rows & 15, rows >> 4], -1).flatten(-2)


@pytest.mark.parametrize("dtype", FP4_DTYPES)
@pytest.mark.parametrize("source", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("layout", ["NHD", "HND"])
def test_append_writes_what_the_engine_writes(
    device: torch.device, dtype: str, source: torch.dtype, layout: str
) -> None:
    if device.type == "cuda" and source == torch.float32:
        pytest.skip("no float32 on CUDA")
    generator = torch.Generator().manual_seed(5)
    magnitudes = torch.logspace(-3, 2, 40)[:, None, None]
    k, v = (
        (torch.randn(40, HEADS, 64, generator=generator) * magnitudes).to(device, source) for _ in range(2)
    )
    k[7] = 0
    k[9, :, :16] = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 6.0]).repeat(2)  # ties
    v[11] *= -1
    slots = torch.randperm(80, generator=generator)[:40].to(device)
    slots[3], slots[5] = -1, 80
    q = torch.randn(40, 2, 64, generator=generator).to(device, source)
    caches = [fp4_cache(dtype, 5, 16, HEADS, 64, layout, device) for _ in range(2)]
    append_kv(k, v, caches[0], slots)
    append_qkv(q, k, v, caches[1], slots)
    written = [i for i in range(40) if i not in (3, 5)]
    page, place = slots[written] // 16, slots[written] % 16
    for x, name in ((k, "k"), (v, "v")):
        rows, scale = getattr(caches[0], name), getattr(caches[0], f"{name}_scale")
        wanted, wanted_scales = engine_writes(x[written], dtype, scale.factor)
        found = codes_of(rows[page, place].cpu())
        scales = scale.blocks[page, place].cpu()
        steps = (scales.view(torch.uint8).int() - wanted_scales.view(torch.uint8).int()).abs()
        assert steps.max() <= 1
        assert (steps > 0).float().mean() <= 0.01
        same = (steps == 0).repeat_interleave(16, -1)
        apart = (found.int() - wanted.int()).abs()[same]
        assert apart[apart != 8].max() <= 1  # -0 and 0 are 8 apart
        assert ((apart != 0) & (apart != 8)).float().mean() <= 0.01
        others = torch.ones(5, 16, dtype=torch.bool, device=device)
        others[page, place] = False
        assert (rows[others] == 0).all()
        assert (scale.blocks.view(torch.uint8)[others] == 0).all()
        twin = getattr(caches[1], f"{name}_scale")
        assert torch.equal(getattr(caches[1], name), rows)
        assert torch.equal(twin.blocks.view(torch.uint8), scale.blocks.view(torch.uint8))


@pytest.mark.parametrize("head_dim", [64, 128])
def test_sglang_quantizes_the_same(head_dim: int) -> None:
    pytest.importorskip("sglang")
    try:
        module = import_module("sglang.srt.layers.quantization.kvfp4_tensor")
    except ImportError as error:
        pytest.skip(str(error))
    (quantize,) = (
        found.batched_quantize for found in vars(module).values() if hasattr(found, "batched_quantize")
    )
    x = torch.randn(30, HEADS, head_dim, generator=torch.Generator().manual_seed(1)).bfloat16()
    kv = fp4_cache(MXFP4, 30, 1, HEADS, head_dim, "NHD", CPU)
    append_kv(x, x, kv, torch.arange(30))
    rows, scales = getattr(quantize, "__wrapped__", quantize)(x)
    assert isinstance(kv.k_scale, BlockScales)
    assert torch.equal(kv.k[:, 0], rows)
    assert torch.equal(kv.k_scale.blocks.flatten(1), scales)


def check_problem(problem: Problem, kv: KVCache, rotation: bool = False) -> None:
    """Compares the cache with the float64 oracle: numbers are the nearest, except for earlier
    rounding."""
    tokens, q_heads = len(problem.slots), problem.num_qo_heads
    k, v = problem.before[:tokens, q_heads:].cpu().split(HEADS, dim=1)
    k = expected(k, problem.positions, problem.rotary, problem.k_norm, problem.norm_eps, problem.norm_offset)
    if rotation:
        k, v = rotated(k), rotated(v)
    for x, rows, scale in ((k, kv.k, kv.k_scale), (v.double(), kv.v, kv.v_scale)):
        assert isinstance(scale, BlockScales)
        steps = block_values(scale).repeat_interleave(16, -1).cpu()
        codes = codes_of(rows.cpu())
        for i, slot in enumerate(problem.slots.tolist()):
            if not 0 <= slot < kv.num_pages * kv.page_size:
                continue
            at = divmod(slot, kv.page_size)
            step, found = steps[at], e2m1_values(codes[at])
            largest = x[i].abs().unflatten(-1, (-1, 16)).amax(-1).repeat_interleave(16, -1)
            assert (step * 6 >= largest * (1 - 2**-3.9)).all()  # e4m3 rounds the scale
            room = torch.where(found.abs() >= 4, 1.0, torch.where(found.abs() >= 2, 0.5, 0.25))
            apart = (found * step - x[i]).abs()
            assert (apart <= room * step * 1.01 + largest * 2**-3.9 * (found.abs() == 6) + 1e-6).all()


@pytest.mark.parametrize("rotation", [False, True])
def test_fused_append(device: torch.device, rotation: bool) -> None:
    """Norm, RoPE, rotation, quantization and both writes."""
    done = 0
    for seed in range(40):
        source = (torch.bfloat16, torch.float16, torch.float32)[seed % (2 if device.type == "cuda" else 3)]
        problem = random_problem(seed, source, device)
        if problem.kv.head_dim % 64 or problem.kv.head_dim > 256:
            continue
        done += 1
        kv = fp4_cache(
            FP4_DTYPES[seed % 2],
            problem.kv.num_pages,
            problem.kv.page_size,
            HEADS,
            problem.kv.head_dim,
            "NHD",
            device,
        )
        append_qkv(
            *(problem.q, problem.k, problem.v, kv, problem.slots),
            **problem.options,
            out=problem.out,
            rotation=rotation,
        )
        check_problem(problem, kv, rotation)
    assert done >= 8


def test_compiled_functions_write_and_read_scales() -> None:
    k, v = torch.randn(2, 5, HEADS, 64).bfloat16()
    q = torch.randn(1, HEADS, 64).bfloat16()
    eager, compiled = (fp4_cache(NVFP4, 2, 16, HEADS, 64, "NHD", CPU) for _ in range(2))
    slots = torch.arange(5)
    made = Attention(HEADS, HEADS, 64, kv_dtype=NVFP4, device="cpu", max_rows=1, max_batch=1)
    table = PageTable.block_table(torch.zeros(1, 1).int(), torch.tensor([5]).int(), 16)
    made.plan(BSRView(torch.tensor([0, 1]).int(), table))

    def step(kv: KVCache) -> Tensor:
        append_kv(k, v, kv, slots)
        return made.run(q, kv)

    wanted = step(eager)
    assert torch.equal(torch.compile(step, backend="eager", fullgraph=True)(compiled), wanted)
    for scales, others in ((eager.k_scale, compiled.k_scale), (eager.v_scale, compiled.v_scale)):
        assert isinstance(scales, BlockScales)
        assert isinstance(others, BlockScales)
        assert torch.equal(scales.blocks.view(torch.uint8), others.blocks.view(torch.uint8))
    assert torch.equal(eager.k, compiled.k)


def test_pages_of_one_token() -> None:
    blocks = BlockScales(torch.zeros(3, 16, HEADS, 4).to(torch.float8_e4m3fn))
    rows = torch.zeros(2, 3, 16, HEADS, 32, dtype=torch.uint8)
    kv = KVCache.from_pair(*rows, k_scale=blocks, v_scale=blocks).by_slot()
    assert kv.k.shape == (48, 1, HEADS, 32)
    assert isinstance(kv.k_scale, BlockScales)
    assert kv.k_scale.blocks.shape == (48, 1, HEADS, 4)
    assert kv.stored_dtype == NVFP4
    assert kv.head_dim == 64
    with pytest.raises(ValueError, match=r"kv\.k_scale is .*, must be in pages as many tokens apart"):
        fp4_cache(NVFP4, 3, 16, HEADS, 64, "NHD", CPU).by_slot()


def test_refusals() -> None:
    kv = fp4_cache(NVFP4, 2, 16, HEADS, 64, "NHD", CPU)
    k_scale, v_scale = kv.k_scale, kv.v_scale
    assert isinstance(k_scale, BlockScales)
    assert isinstance(v_scale, BlockScales)
    for scales, message in (
        ((k_scale, None), r"v_scale is None, must be BlockScales if k_scale is, and only then"),
        (
            (torch.ones(2, 16, HEADS), v_scale),
            r"v_scale is BlockScales\(.*, must be BlockScales if k_scale is",
        ),
        (
            (BlockScales(k_scale.blocks[:1]), v_scale),
            r"k_scale\.blocks is .*, must be float8_e4m3fn or uint8 \[",
        ),
        (
            (k_scale, BlockScales(v_scale.blocks.view(torch.uint8))),
            r"v_scale\.blocks is .*, must be float8_e4m3",
        ),
        ((BlockScales(k_scale.blocks, 0.0), v_scale), r"k_scale\.factor is 0\.0, must be a number above 0"),
        ((BlockScales(k_scale.blocks, torch.ones(1)), v_scale), r"k_scale\.factor is .*, must be a number"),  # type: ignore[arg-type]
    ):
        with pytest.raises(ValueError, match=message):
            KVCache.from_pair(kv.k, kv.v, k_scale=scales[0], v_scale=scales[1])
    with pytest.raises(ValueError, match=r"k_scale is .*, must be a number or a tensor over int8"):
        KVCache.from_pair(kv.k.view(torch.int8), kv.v.view(torch.int8), k_scale=k_scale, v_scale=v_scale)
    narrow = torch.zeros(2, 2, 16, HEADS, 48, dtype=torch.uint8)
    blocks = BlockScales(torch.zeros(2, 16, HEADS, 6, dtype=torch.uint8))
    with pytest.raises(
        ValueError, match=r"k is .*, must be of head_dim / 2 columns, and head_dim a multiple of 64"
    ):
        KVCache.from_pair(*narrow, k_scale=blocks, v_scale=blocks)
    with pytest.raises(ValueError, match=r"head_dim is 96, must be a multiple of 64 with kv_dtype='nvfp4'"):
        Attention(HEADS, HEADS, 96, kv_dtype=NVFP4, device="cpu", max_rows=1, max_batch=1)
    made = Attention(HEADS, HEADS, 64, kv_dtype=NVFP4, device="cpu", max_rows=1, max_batch=1)
    table = PageTable.block_table(torch.zeros(1, 1).int(), torch.tensor([3]).int(), 16)
    made.plan(BSRView(torch.tensor([0, 1]).int(), table))
    q = torch.zeros(1, HEADS, 64).bfloat16()
    apart = torch.zeros(2, 16, HEADS, 5, dtype=torch.uint8)[..., 1:]
    for scale, message in (
        (0.5, r"kv\.v_scale is a number, must be a tensor \[pages, page_size, num_kv_heads, head_dim / 16\]"),
        (
            BlockScales(v_scale.blocks.view(torch.uint8)),
            r"kv\.v_scale\.dtype is uint8, must be float8_e4m3fn",
        ),
        (BlockScales(apart.view(torch.float8_e4m3fn)), r"kv\.v_scale\.(data_ptr|stride)"),
        (v_scale._replace(factor=-1.0), r"kv\.v_scale\.factor is -1, must be above 0 and finite"),
    ):
        with pytest.raises(ValueError, match=message):
            made.run(q, KVCache.unchecked(kv.k, kv.v, k_scale, scale))
    with pytest.raises(ValueError, match=r"k is .*, must be bfloat16, float16 or float32: append computes"):
        append_kv(kv.k[0], kv.v[0], kv, torch.arange(16))
