"""append over caches whose tokens and heads have their own scales, compared with the engines and with the
float64 oracle.
"""

from __future__ import annotations

from importlib import import_module

import pytest
import torch
from append_problems import HEADS, random_problem
from float8_cases import E2M1, FP4_DTYPES, INT4, MXFP4, NVFP4, PAIR, TOKEN_DTYPES, sides, split_int4
from tiers import mostly_slow
from token_scaled_caches import (
    LARGEST,
    cache_for,
    check_token_scaled,
    fits,
    has_same_bits,
    rows_at,
    tensors_of,
    token_scaled_cache,
    unpacked,
)
from torch import Tensor

from attn_backend import Attention, BlockScales, BSRView, KVCache, PageTable, append_kv, append_qkv
from attn_backend.kernels import append

CPU = torch.device("cpu")
DTYPES = (*TOKEN_DTYPES, *FP4_DTYPES, PAIR)
SCALES = ("k_scale", "v_scale")


def engine_rounds(x: Tensor, dtype: torch.dtype | str, factor: float = 1.0) -> tuple[Tensor, Tensor]:
    """The numbers (4-bit ones unpacked) and scales that an engine writes for x, [tokens, heads, head_dim].
    factor: of BlockScales. On the CPU: torch on CUDA multiplies by 1 / 15.

    int8, e4m3: _reshape_cache_per_token_head of vLLM's triton_reshape_and_cache_flash.py. int4, with zero
    points in the scales: its int4_per_token_head.py; rows whose largest and smallest numbers are opposite
    have a zero point of 7.5 before rounding. NVFP4: cvt_warp_fp16_to_fp4() of its nvfp4_utils.cuh. MXFP4:
    batched_quantize() of SGLang's kvfp4_tensor.py.
    """
    x = x.float().cpu()
    if dtype in FP4_DTYPES:
        return _engine_rounds_blocks(x, dtype == MXFP4, factor)
    if not isinstance(dtype, torch.dtype):
        scales = ((x.amax(-1) - x.amin(-1)) / 15).clamp_min(1e-6)
        zero_points = (-x.amin(-1) / scales + 0.5).floor().clamp(0, 15)
        numbers = (x * (1.0 / scales[..., None]) + zero_points[..., None] + 0.5).floor().clamp(0, 15)
        words = scales.view(torch.int32) & ~15 | zero_points.int()
        return numbers.to(torch.uint8), words.view(torch.float32)
    largest = LARGEST[dtype]
    scales = (x.abs().amax(-1) / largest).clamp_min(1e-6)
    scaled = x * (1.0 / scales[..., None])
    if dtype == torch.int8:
        scaled = (scaled + torch.where(scaled >= 0, 0.5, -0.5)).clamp(-128, 127).trunc()
    return scaled.clamp(-largest - (dtype == torch.int8), largest).to(dtype), scales


def _engine_rounds_blocks(x: Tensor, is_mx: bool, factor: float) -> tuple[Tensor, Tensor]:
    blocks = x.unflatten(-1, (-1, 16))
    largest = blocks.abs().amax(-1)
    if is_mx:
        exponents = torch.ceil(torch.log2((largest / 6).clamp_min(1e-10)))
        scales, numbers = (exponents + 127).to(torch.uint8), blocks / torch.exp2(exponents)[..., None]
    else:
        scales = (largest / 6 / factor).clamp(max=448).to(torch.float8_e4m3fn)
        divisors = scales.float() * factor
        numbers = torch.where(divisors[..., None] > 0, blocks / divisors[..., None], 0.0)
    middles = (E2M1[1:] + E2M1[:-1]) / 2
    magnitudes = numbers.abs()
    codes = torch.bucketize(magnitudes, middles, right=True)
    if not is_mx:  # ties go to even codes
        codes = torch.where(magnitudes == middles[(codes - 1).clamp_min(0)], codes // 2 * 2, codes)
    return (codes + 8 * (numbers < 0)).flatten(-2), scales


def steps_apart(a: Tensor, b: Tensor) -> Tensor:
    """The distance of numbers of 8 bits, in representable numbers."""

    def order(x: Tensor) -> Tensor:
        bits = x.contiguous().view(torch.uint8).int()
        return x.int() if x.dtype == torch.int8 else torch.where(bits < 128, bits, 128 - bits)

    return (order(a) - order(b)).abs()


def check_bytes(rows: Tensor, scale: Tensor | BlockScales, x: Tensor, dtype: torch.dtype | str) -> None:
    """Compares rows and their scales with what the engine writes for x, except for ties and numbers next to
    them.
    """
    if isinstance(scale, BlockScales):
        wanted, wanted_scales = engine_rounds(x, dtype, scale.factor)
        steps = (scale.blocks.view(torch.uint8).int() - wanted_scales.view(torch.uint8).int()).abs()
        assert steps.max() <= 1
        assert (steps > 0).float().mean() <= 0.01
        apart = (unpacked(rows).int() - wanted.int()).abs()[(steps == 0).repeat_interleave(16, -1)]
        assert apart[apart != 8].max() <= 1  # -0 and 0 are 8 apart
        assert ((apart != 0) & (apart != 8)).float().mean() <= 0.01
        return
    wanted, wanted_scales = engine_rounds(x, dtype)
    if dtype == INT4:
        (got, zero_points), (wanted_scales, wanted_zeros) = map(split_int4, (scale, wanted_scales))
        assert (zero_points - wanted_zeros).abs().max() <= 1
        assert (zero_points != wanted_zeros).float().mean() <= 0.02
        torch.testing.assert_close(got, wanted_scales, rtol=3e-6, atol=0)
    else:
        torch.testing.assert_close(scale, wanted_scales, rtol=3e-7, atol=0)
    apart = steps_apart(unpacked(rows) if dtype == INT4 else rows, wanted)
    assert apart.max() <= 1
    assert (apart == 1).float().mean() <= 0.01


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("source", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("layout", ["NHD", "HND"])
def test_append_writes_what_the_engine_writes(
    device: torch.device, dtype: torch.dtype | str, source: torch.dtype, layout: str
) -> None:
    if device.type == "cuda" and source == torch.float32:
        pytest.skip("no float32 on CUDA")
    is_fp4 = dtype in (*FP4_DTYPES, PAIR)
    generator = torch.Generator().manual_seed(5)
    magnitudes = torch.logspace(*((-3, 2) if is_fp4 else (-9, 4)), 40)[:, None, None]
    k, v = (
        (torch.randn(40, HEADS, 64, generator=generator) * magnitudes).to(device, source) for _ in range(2)
    )
    k[7] = 0
    if is_fp4:
        k[9, :, :16] = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 6.0]).repeat(2)  # ties
        v[11] *= -1
    else:
        v[9], v[11] = v[9].abs() + 3, -v[11].abs() - 3  # zero points that are limited
    slots = torch.randperm(80, generator=generator)[:40].to(device)
    slots[3], slots[5] = -1, 80
    q = torch.randn(40, 2, 64, generator=generator).to(device, source)
    empty, alone, fused = (token_scaled_cache(dtype, 5, 16, 64, layout, device) for _ in range(3))
    append_kv(k, v, alone, slots)
    append_qkv(q, k, v, fused, slots)
    written = [i for i in range(40) if i not in (3, 5)]
    at = (slots[written] // 16).cpu(), (slots[written] % 16).cpu()
    of_k, of_v = sides(dtype)
    check_bytes(*rows_at(alone, "k", at), k[written], of_k)
    check_bytes(*rows_at(alone, "v", at), v[written], of_v)
    for before, of_alone, of_fused in zip(
        *(tensors_of(kv).values() for kv in (empty, alone, fused)), strict=True
    ):
        assert has_same_bits(of_fused, of_alone)
        of_alone[at] = before[at]
        assert has_same_bits(of_alone, before)  # nothing else was written


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
    kv = token_scaled_cache(MXFP4, 30, 1, head_dim, "NHD")
    append_kv(x, x, kv, torch.arange(30))
    rows, scales = getattr(quantize, "__wrapped__", quantize)(x)
    assert isinstance(kv.k_scale, BlockScales)
    assert torch.equal(kv.k[:, 0], rows)
    assert torch.equal(kv.k_scale.blocks.flatten(1), scales)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("rotation", [False, True])
@pytest.mark.parametrize("block", mostly_slow(range(3), fast=1))
def test_fused_append(device: torch.device, block: int, rotation: bool, dtype: torch.dtype | str) -> None:
    """Norm, RoPE, rotation, quantization and both writes."""
    done = 0
    for seed in range(20 * block, 20 * (block + 1)):
        source = (torch.bfloat16, torch.float16, torch.float32)[seed % (2 if device.type == "cuda" else 3)]
        for layout in ("apart", "NHD"):
            problem = random_problem(seed, source, device)
            if not fits(problem.kv.head_dim, dtype):
                continue
            kv = cache_for(problem, dtype, layout)
            append_qkv(
                *(problem.q, problem.k, problem.v, kv, problem.slots),
                **problem.options,
                out=problem.out,
                rotation=rotation,
            )
            check_token_scaled(problem, kv, rotation=rotation)
            done += 1
    assert done >= 6


def test_heads_of_different_widths() -> None:
    generator = torch.Generator().manual_seed(6)
    k, v = (torch.randn(9, 2, columns, generator=generator).bfloat16() for columns in (192, 72))
    scales = torch.zeros(2, 5, 4, 2)
    kv = KVCache.from_pair(
        *(torch.zeros(5, 4, 2, columns, dtype=torch.int8) for columns in (192, 72)),
        k_scale=scales[0],
        v_scale=scales[1],
    )
    slots = torch.tensor([3, 19, -1, 0, 17, 16, 20, 11, 5])
    append_kv(k, v, kv, slots)
    written = [i for i in range(9) if i not in (2, 6)]
    for x, of_cache, of_tokens in ((k, kv.k, scales[0]), (v, kv.v, scales[1])):
        wanted, wanted_scales = engine_rounds(x[written], torch.int8)
        torch.testing.assert_close(of_tokens.flatten(0, 1)[slots[written]], wanted_scales, rtol=3e-7, atol=0)
        assert steps_apart(of_cache.flatten(0, 1)[slots[written]], wanted).max() <= 1
        assert (of_tokens != 0).sum() == 2 * len(written)


def test_rows_rotated_while_they_are_rounded() -> None:
    problem = random_problem(2, torch.bfloat16, CPU)
    assert problem.rotary is not None
    problem.k_norm = None
    kv = cache_for(problem, torch.int8)
    append.append_rounded(problem.k, problem.v, kv, problem.slots, problem.rotary, problem.positions)
    check_token_scaled(problem, kv, has_q=False)


@pytest.mark.parametrize("dtype", [torch.int8, NVFP4, PAIR], ids=str)
def test_compiled_functions_write_and_read_scales(dtype: torch.dtype | str) -> None:
    k, v = torch.randn(2, 5, HEADS, 64).bfloat16()
    q, slots = torch.randn(1, HEADS, 64).bfloat16(), torch.tensor([3, 31, 0, 16, 7])
    eager, compiled = (token_scaled_cache(dtype, 2, 16, 64, "NHD") for _ in range(2))
    made = Attention(
        HEADS, HEADS, 64, kv_dtype=dtype, token_scales=True, device="cpu", max_rows=1, max_batch=1
    )
    table = PageTable.block_table(torch.tensor([[0, 1]]).int(), torch.tensor([32]).int(), 16)
    made.plan(BSRView(torch.tensor([0, 1]).int(), table))

    def step(kv: KVCache) -> Tensor:
        append_kv(k, v, kv, slots)
        return made.run(q, kv)

    wanted = step(eager)
    assert torch.equal(torch.compile(step, backend="eager", fullgraph=True)(compiled), wanted)
    for of_eager, of_compiled in zip(tensors_of(eager).values(), tensors_of(compiled).values(), strict=True):
        assert has_same_bits(of_eager, of_compiled)


@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn])
def test_k_and_v_with_the_same_scales_are_refused(dtype: torch.dtype) -> None:
    pages, scales = torch.zeros(2, 3, 4, 2, 64, dtype=dtype), torch.ones(3, 4, 2)
    kv, new = KVCache.from_pair(*pages, k_scale=scales, v_scale=scales), torch.randn(5, 2, 64)
    with pytest.raises(
        ValueError, match=r"kv\.v_scale is kv\.k_scale, must be another tensor: append writes"
    ):
        append_kv(new, new, kv, torch.arange(5))
    assert (scales == 1).all()


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_int8_stores_nan_as_0(device: str) -> None:
    numbers = torch.randn(2, 5, 2, 64, device=device)
    caches = []
    for nan in (0.0, torch.nan):
        numbers[:, :, :, 7] = nan
        pages = torch.ones(2, 3, 4, 2, 64, dtype=torch.int8, device=device)
        kv = KVCache.from_pair(*pages, **{name: torch.ones(3, 4, 2, device=device) for name in SCALES})
        append_kv(*numbers.bfloat16(), kv, torch.arange(5, device=device))
        caches.append(kv)
    of_zeros, of_nans = caches
    assert of_zeros.k.any()
    for name in ("k", "v", *SCALES):
        assert getattr(of_zeros, name).equal(getattr(of_nans, name)), name
