"""8-bit caches with a scale for each token and head: int8 and e4m3."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import case_tensors
import cases
import cpu_isa
import pytest
import torch
from append_problems import HEADS, LARGEST, check_token_scaled, random_problem, token_scaled
from float8_cases import INT4, ROUNDED_TOLERANCE, TOKEN_DTYPES, Float8Case, split_int4
from tiers import mostly_slow
from torch import Tensor
from variant_fuzz.catalogue import by_reference

from attn_backend import Attention, BSRView, KVCache, PageTable, append_kv, append_mla_kv, append_qkv
from attn_backend.jit import compilers, progress
from attn_backend.kernels import append
from attn_backend.variants import builtin

CPU = torch.device("cpu")


def run(problem: Float8Case, **options: object) -> None:
    case = problem.case
    attention = case.attention(**problem.options, **options)
    attention.plan(case.view)
    case.run(attention, out=case.out, lse=case.lse)
    problem.check(case.out, case.lse)
    assert attention.schedule().errors == 0


def random_case(seed: int, device: torch.device) -> Float8Case:
    spec = cases.random_spec(seed, device.type)
    dtype = TOKEN_DTYPES[seed // 2 % 3]
    spec = spec.with_(head_dim=(64, 72, 128, 256)[seed % 4], strided=spec.strided and device.type == "cpu")
    if dtype == INT4:
        spec = spec.with_(head_dim=(64, 96, 128, 256)[seed % 4])
    if spec.dtype == torch.float32 and device.type == "cuda":
        spec = spec.with_(dtype=torch.bfloat16)
    return Float8Case(spec, device, dtype, "token", "token")


@pytest.mark.parametrize("block", mostly_slow(range(10), fast=2))
def test_random_cases(device: torch.device, kernel: str | None, block: int) -> None:
    for seed in range(12 * block, 12 * (block + 1)):
        options = {} if kernel is None else {"kernel": kernel}
        run(random_case(seed, device), cascade=("always", True, False)[seed % 3], **options)


RUN_CASES = """\
import torch
from test_token_scales import random_case, run
for seed in range(16):
    run(random_case(seed, torch.device("cpu")))
"""


@pytest.mark.parametrize("isa", cpu_isa.ISAS)
def test_every_instruction_set(isa: str) -> None:
    program = f"import sys\nsys.path[:0] = {sys.path}\n{RUN_CASES}"
    subprocess.run([sys.executable, "-c", program], env=cpu_isa.environment(isa), check=True)


def test_sinks_and_chunks(device: torch.device, kernel: str | None) -> None:
    for seed, dtype in enumerate(TOKEN_DTYPES):
        spec = cases.Spec(
            (3, 1, 20), (90, 400, 64), num_kv_heads=2, group_size=4, head_dim=128, page_size=16, seed=seed
        )
        problem = Float8Case(spec.with_(logits_soft_cap=20.0), device, dtype, "token", "token")
        case, sinks = problem.case, torch.linspace(-2, 3, 8, device=device)
        attention = case.attention(kernel=kernel, sinks=True, batch_invariant=True, **problem.options)
        attention.plan(case.view)
        case.run(attention, out=case.out, lse=case.lse, sinks=sinks)
        expected, expected_lse = problem.expected(sinks=sinks.cpu())
        assert (case.out[: case.rows].double() - expected).norm() <= ROUNDED_TOLERANCE * expected.norm()
        assert (case.lse[: case.rows].double() - expected_lse).abs().max() <= 1e-2


@pytest.mark.parametrize("dtype", TOKEN_DTYPES, ids=str)
@pytest.mark.parametrize("interprets", [False, True])
def test_variants_see_scaled_rows(
    dtype: torch.dtype | str, interprets: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
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


def engine_cache(
    dtype: torch.dtype | str,
    pages: int,
    page_size: int,
    head_dim: int,
    layout: str,
    device: torch.device = CPU,
) -> KVCache:
    """vLLM's: a row is K, its scale, V, its scale (_ensure_scale_caches() of its triton_attn.py)."""
    if not isinstance(dtype, torch.dtype):
        dtype, head_dim = torch.uint8, head_dim // 2
    inner = (page_size, HEADS) if layout == "NHD" else (HEADS, page_size)
    rows = torch.zeros(pages, *inner, 2 * (head_dim + 4), dtype=torch.int8, device=device)
    if layout == "HND":
        rows = rows.transpose(1, 2)
    (k, k_scale), (v, v_scale) = (half.split([head_dim, 4], dim=3) for half in rows.chunk(2, dim=3))
    k_scale, v_scale = (scale.view(torch.float32)[..., 0].fill_(1.0) for scale in (k_scale, v_scale))
    return KVCache.from_pair(k.view(dtype), v.view(dtype), k_scale=k_scale, v_scale=v_scale)


def engine_rounds(x: Tensor, dtype: torch.dtype | str) -> tuple[Tensor, Tensor]:
    """What vLLM writes for x, [tokens, heads, head_dim], and the scales
    (_reshape_cache_per_token_head of its triton_reshape_and_cache_flash.py). int4: unpacked, and the scales
    with their zero points (its int4_per_token_head.py). On the CPU: torch on CUDA multiplies by 1 / 15, and
    rows whose largest and smallest numbers are opposite have a zero point of 7.5 before rounding.
    """
    x = x.float().cpu()
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


def steps_apart(a: Tensor, b: Tensor) -> Tensor:
    """The distance of numbers of 8 bits, in representable numbers."""

    def order(x: Tensor) -> Tensor:
        bits = x.contiguous().view(torch.uint8).int()
        return x.int() if x.dtype == torch.int8 else torch.where(bits < 128, bits, 128 - bits)

    return (order(a) - order(b)).abs()


def stored_numbers(of_cache: Tensor, dtype: torch.dtype | str) -> Tensor:
    if dtype == INT4:
        return torch.stack([of_cache & 15, of_cache >> 4], -1).flatten(-2)
    return of_cache


@pytest.mark.parametrize("dtype", TOKEN_DTYPES, ids=str)
@pytest.mark.parametrize("source", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("layout", ["NHD", "HND"])
def test_append_writes_what_the_engine_writes(
    device: torch.device, dtype: torch.dtype | str, source: torch.dtype, layout: str
) -> None:
    if device.type == "cuda" and source == torch.float32:
        pytest.skip("no float32 on CUDA")
    generator = torch.Generator().manual_seed(5)
    magnitudes = torch.logspace(-9, 4, 40)[:, None, None]
    k, v = (
        (torch.randn(40, HEADS, 64, generator=generator) * magnitudes).to(device, source) for _ in range(2)
    )
    k[7] = 0
    v[9], v[11] = v[9].abs() + 3, -v[11].abs() - 3  # zero points that are limited
    slots = torch.randperm(80, generator=generator)[:40].to(device)
    slots[3], slots[5] = -1, 80
    q = torch.randn(40, 2, 64, generator=generator).to(device, source)
    caches = [engine_cache(dtype, 5, 16, 64, layout, device) for _ in range(2)]
    append_kv(k, v, caches[0], slots)
    append_qkv(q, k, v, caches[1], slots)
    written = [i for i in range(40) if i not in (3, 5)]
    page, place = slots[written] // 16, slots[written] % 16
    for x, name in ((k, "k"), (v, "v")):
        of_cache, scales = (getattr(caches[0], which) for which in (name, f"{name}_scale"))
        of_tokens, numbers = scales[page, place].cpu(), stored_numbers(of_cache[page, place].cpu(), dtype)
        wanted, wanted_scales = engine_rounds(x[written], dtype)
        rtol = 3e-7
        if dtype == INT4:
            (got, zero_points), (wanted_scales, wanted_zeros) = map(split_int4, (of_tokens, wanted_scales))
            assert (zero_points - wanted_zeros).abs().max() <= 1
            assert (zero_points != wanted_zeros).float().mean() <= 0.02
            torch.testing.assert_close(got, wanted_scales, rtol=3e-6, atol=0)
        else:
            torch.testing.assert_close(of_tokens, wanted_scales, rtol=rtol, atol=0)
        apart = steps_apart(numbers, wanted)
        assert apart.max() <= 1
        assert (apart == 1).float().mean() <= 0.01  # ties, and numbers next to them
        others = torch.ones(5, 16, dtype=torch.bool, device=device)
        others[page, place] = False
        assert (of_cache.float()[others] == 0).all()
        assert (scales[others] == 1).all()
        assert torch.equal(getattr(caches[1], name).view(torch.uint8), of_cache.view(torch.uint8))
        assert torch.equal(getattr(caches[1], f"{name}_scale"), scales)


@pytest.mark.parametrize("dtype", TOKEN_DTYPES, ids=str)
def test_the_layout_of_the_engine(dtype: torch.dtype | str) -> None:
    """Rows of 4 * n bytes, appended and read on a CPU."""
    generator = torch.Generator().manual_seed(1)
    k, v = torch.randn(2, 70, HEADS, 64, generator=generator).bfloat16()
    q = torch.randn(3, HEADS, 64, generator=generator).bfloat16()
    cache = engine_cache(dtype, 5, 16, 64, "HND")
    append_kv(k, v, cache, torch.arange(70))
    attention = Attention(
        HEADS, HEADS, 64, kv_dtype=dtype, token_scales=True, device="cpu", max_rows=3, max_batch=1
    )
    table = PageTable.block_table(torch.arange(5, dtype=torch.int32)[None], torch.tensor([70]).int(), 16)
    attention.plan(BSRView(torch.tensor([0, 3], dtype=torch.int32), table))
    out = attention.run(q, cache)
    exact = torch.nn.functional.scaled_dot_product_attention(
        *(x.double().transpose(0, 1) for x in (q, k, v)),
        attn_mask=torch.arange(70)[None] <= torch.arange(67, 70)[:, None],
    ).transpose(0, 1)
    assert (out.double() - exact).norm() <= (0.2 if dtype == INT4 else 0.04) * exact.norm()


@pytest.mark.parametrize("block", mostly_slow(range(6), fast=2))
def test_fused_append(device: torch.device, block: int) -> None:
    """Norm, RoPE, quantization and both writes."""
    for seed in range(10 * block, 10 * (block + 1)):
        source = (torch.bfloat16, torch.float16, torch.float32)[seed % (2 if device.type == "cuda" else 3)]
        problem = random_problem(seed, source, device)
        dtype = TOKEN_DTYPES[seed // 2 % 3]
        if dtype == INT4 and problem.kv.head_dim % 32:
            continue
        kv = token_scaled(problem.kv, dtype)
        append_qkv(
            *(problem.q, problem.k, problem.v, kv, problem.slots),
            **problem.options,
            out=problem.out,
        )
        check_token_scaled(problem, kv)


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
    kv = token_scaled(problem.kv, torch.int8)
    append.append_rounded(problem.k, problem.v, kv, problem.slots, problem.rotary, problem.positions)
    check_token_scaled(problem, kv, has_q=False)


def test_compiled_functions_write_scales() -> None:
    k, v = torch.randn(2, 5, HEADS, 64).bfloat16()
    eager, compiled = (engine_cache(torch.int8, 2, 16, 64, "NHD") for _ in range(2))
    slots = torch.tensor([3, 31, 0, 16, 7])
    append_kv(k, v, eager, slots)
    torch.compile(append_kv, backend="eager", fullgraph=True)(k, v, compiled, slots)
    for name in ("k", "v", "k_scale", "v_scale"):
        assert torch.equal(getattr(eager, name), getattr(compiled, name))


def test_pages_of_one_token() -> None:
    kv = engine_cache(torch.int8, 3, 16, 64, "NHD").by_slot()
    assert isinstance(kv.k_scale, Tensor)
    assert kv.k.shape == (48, 1, HEADS, 64)
    assert kv.k_scale.shape == (48, 1, HEADS)
    assert kv.k_scale[17].data_ptr() - kv.k[17].data_ptr() == 64
    apart = torch.ones(3, 20, HEADS)[:, :16]
    kv = KVCache.from_pair(*torch.zeros(2, 3, 16, HEADS, 64, dtype=torch.int8), k_scale=apart, v_scale=apart)
    with pytest.raises(ValueError, match=r"kv\.k_scale is .*, must be in pages as many tokens apart"):
        kv.by_slot()


def attention(**options: Any) -> Attention:
    return Attention(
        HEADS, HEADS, 64, **({"device": "cpu", "max_rows": 3, "max_batch": 1, "token_scales": True} | options)
    )


REFUSED = {
    r"token_scales is False, must be True with kv_dtype=torch.int8": {
        "kv_dtype": torch.int8,
        "token_scales": None,
    },
    r"token_scales is False, must be True with kv_dtype='int4'": {"kv_dtype": INT4, "token_scales": False},
    r"kv_dtype is torch.uint8, must be another one: .*; pass 'int4', .* for bytes of two columns": {
        "kv_dtype": torch.uint8,
        "token_scales": None,
    },
    r"kv_dtype is None, must be torch.float8_e4m3fn, torch.int8, 'int4', .* with token_scales=": {},
    r"kv_dtype is torch.float8_e5m2, must be torch.float8_e4m3fn, ": {"kv_dtype": torch.float8_e5m2},
    r"kv_dtype is torch.uint8, must be torch.float8_e4m3fn, ": {"kv_dtype": torch.uint8},
    r"head_dim_v is 48, must be a multiple of 32 with kv_dtype='int4'": {
        "kv_dtype": INT4,
        "head_dim_v": 48,
        "token_scales": None,
    },
    r"kv_dtype is 'int3', must be a torch.dtype, 'int4', 'nvfp4', 'fp4_mx_block16' or None": {
        "kv_dtype": "int3",
        "token_scales": False,
    },
    r"q_dtype is torch.int8, must be None, dtype = torch.bfloat16": {
        "kv_dtype": INT4,
        "q_dtype": torch.int8,
    },
    r"q_dtype is torch.float8_e4m3fn, must be None or dtype = torch.bfloat16 with token_scales=True": {
        "kv_dtype": torch.float8_e4m3fn,
        "q_dtype": torch.float8_e4m3fn,
    },
    r"q_dtype is torch.int8, must be None, dtype": {"kv_dtype": torch.int8, "q_dtype": torch.int8},
    r"token_scales is 1, must be True, False or None": {"kv_dtype": torch.int8, "token_scales": 1},
}


@pytest.mark.parametrize("message", REFUSED)
def test_refused_objects(message: str) -> None:
    with pytest.raises(ValueError, match=message):
        attention(**REFUSED[message])


def test_refused_runs_and_appends() -> None:
    kv = engine_cache(torch.float8_e4m3fn, 2, 16, 64, "NHD")
    q = torch.zeros(1, HEADS, 64).bfloat16()
    table = PageTable.block_table(torch.zeros(1, 1).int(), torch.tensor([3]).int(), 16)
    view = BSRView(torch.tensor([0, 1]).int(), table)
    plain, of_tokens = (
        attention(kv_dtype=torch.float8_e4m3fn, token_scales=token_scales) for token_scales in (False, True)
    )
    plain.plan(view)
    of_tokens.plan(view)
    with pytest.raises(ValueError, match=r"kv\.k_scale\.shape is \[2, 16, 3\], must be .*token_scales=True"):
        plain.run(q, kv)
    for scale, message in (
        (None, r"kv\.v_scale is None, must be a tensor \[pages, page_size, num_kv_heads\]"),
        (0.5, r"kv\.v_scale is a number, must be a tensor \[pages, page_size, num_kv_heads\]"),
        (torch.ones(HEADS), r"kv\.v_scale\.shape is \[3\], must be \[pages = 2, page_size = 16"),
        (torch.ones(2, 16, 3).double(), r"kv\.v_scale\.dtype is float64, must be float32"),
    ):
        with pytest.raises(ValueError, match=message):
            of_tokens.run(q, KVCache.unchecked(kv.k, kv.v, kv.k_scale, scale))
    slots = torch.zeros(1).long()
    with pytest.raises(ValueError, match=r"k is .*, must be bfloat16, float16 or float32: append computes"):
        append_kv(q.to(torch.float8_e4m3fn), q.to(torch.float8_e4m3fn), kv, slots)
    one = torch.ones(1, 1, 1).expand(2, 16, HEADS)
    with pytest.raises(ValueError, match=r"kv\.k_scale\.stride\(.\) is 0, must be such that no two"):
        append_kv(q, q, KVCache.from_pair(kv.k, kv.v, k_scale=one, v_scale=one), slots)
    with pytest.raises(ValueError, match=r"kv\.v_scale is None or of another shape, must be one for each"):
        append_kv(q, q, KVCache.unchecked(kv.k, kv.v, kv.k_scale, None), slots)
    with pytest.raises(ValueError, match=r"kv\.k\.dtype is float8_e5m2, must be float8_e4m3fn, int8 or"):
        append_kv(
            q, q, KVCache.unchecked(*torch.zeros(2, 2, 16, HEADS, 64).to(torch.float8_e5m2), one, one), slots
        )
    latents = torch.zeros(2, 16, 576).to(torch.float8_e4m3fn)
    with pytest.raises(ValueError, match=r"scale is .*, must be one for all: latents have no scale for each"):
        KVCache.from_latent(latents, scale=torch.ones(2, 16, 1))
    k = latents[:, :, None]
    kv = KVCache.unchecked(k, k[..., :512], torch.ones(2, 16, 1), torch.ones(2, 16, 1))
    with pytest.raises(ValueError, match=r"kv\.k_scale is .*, must be one for all: latents have no scale"):
        append_mla_kv(torch.zeros(1, 512).bfloat16(), torch.zeros(1, 64).bfloat16(), kv, slots)
