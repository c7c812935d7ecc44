"""Caches in which each token and head has its own scales (`TOKEN_DTYPES` and `FP4_DTYPES` of
float8_cases.py), and a check of what append wrote to them.
"""

from __future__ import annotations

import torch
from append_problems import HEADS, Problem, check, expected
from float8_cases import FP4_DTYPES, INT4, MXFP4, NVFP4, PAIR, block_values, e2m1_values, sides
from rotations import rotated
from torch import Tensor

from attn_backend import BlockScales, KVCache

ALL_LAYOUTS = ("NHD", "HND", "apart")
LARGEST = {torch.float8_e4m3fn: 448.0, torch.int8: 127.0}


def token_scaled_cache(
    dtype: torch.dtype | str,
    pages: int,
    page_size: int,
    head_dim: int,
    layout: str = "apart",
    device: torch.device | str = "cpu",
    heads: int = HEADS,
) -> KVCache:
    """A cache of zeros. layout: "NHD" or "HND" is the engine's. In int8, e4m3 and int4 a row is then K, its
    scale, V, its scale (_ensure_scale_caches() of vLLM's triton_attn.py). In FP4, and if K and V differ, a
    page is K, its scales, V, its scales, as in vLLM's nvfp4. "apart": separate tensors for K, V and their
    scales, the scales of a head together.
    """
    widths = []  # bytes
    for of_side in sides(dtype):
        is_fp4 = of_side in FP4_DTYPES
        columns = head_dim // 2 if is_fp4 or of_side == INT4 else head_dim
        widths += [columns, head_dim // 16 if is_fp4 else 4]
    if layout == "apart":
        made = [torch.zeros(pages, page_size, heads, width, dtype=torch.uint8) for width in widths[::2]]
        of_heads = [torch.zeros(heads, pages, page_size, width, dtype=torch.uint8) for width in widths[1::2]]
        k_scales, v_scales = (scales.to(device).permute(1, 2, 0, 3) for scales in of_heads)
        parts = [made[0].to(device), k_scales, made[1].to(device), v_scales]
    else:
        inner = (page_size, heads) if layout == "NHD" else (heads, page_size)
        memory = torch.zeros(pages, page_size * heads * sum(widths), dtype=torch.uint8, device=device)
        if dtype in (*FP4_DTYPES, PAIR):
            of_pages = memory.split([page_size * heads * width for width in widths], 1)
            parts = [part.unflatten(1, (*inner, -1)) for part in of_pages]
        else:
            parts = list(memory.unflatten(1, (*inner, -1)).split(widths, 3))
        if layout == "HND":
            parts = [part.transpose(1, 2) for part in parts]
    rows, made_scales = [], []
    for of_side, part, bytes_, factor in zip(sides(dtype), parts[::2], parts[1::2], (0.5, 0.25), strict=True):
        rows.append(part.view(of_side) if isinstance(of_side, torch.dtype) else part)
        if of_side == MXFP4:
            made_scales.append(BlockScales(bytes_))
        elif of_side == NVFP4:
            made_scales.append(BlockScales(bytes_.view(torch.float8_e4m3fn), factor))
        else:
            made_scales.append(bytes_.view(torch.float32)[..., 0].fill_(1.0))
    return KVCache.from_pair(rows[0], rows[1], k_scale=made_scales[0], v_scale=made_scales[1])


def fits(head_dim: int, dtype: torch.dtype | str) -> bool:
    """Whether a cache of this dtype may have heads of head_dim columns."""
    return head_dim % (64 if dtype in (*FP4_DTYPES, PAIR) else 32 if dtype == INT4 else 1) == 0


def cache_for(problem: Problem, dtype: torch.dtype | str, layout: str = "apart") -> KVCache:
    """An empty cache for the heads of a problem."""
    kv = problem.kv
    return token_scaled_cache(dtype, kv.num_pages, kv.page_size, kv.head_dim, layout, kv.device)


def unpacked(rows: Tensor) -> Tensor:
    """The columns of bytes that have two."""
    return torch.stack([rows & 15, rows >> 4], -1).flatten(-2)


def tensors_of(kv: KVCache) -> dict[str, Tensor]:
    """K, V and their scales, of any form with tensors."""
    scales = {"k_scale": kv.k_scale, "v_scale": kv.v_scale}
    return {"k": kv.k, "v": kv.v} | {
        name: scale.blocks if isinstance(scale, BlockScales) else scale
        for name, scale in scales.items()
        if isinstance(scale, Tensor | BlockScales)
    }


def has_same_bits(a: Tensor, b: Tensor) -> bool:
    """torch.equal() that takes NaN and float8."""
    bits = {1: torch.uint8, 2: torch.int16, 4: torch.int32}[a.element_size()]
    return torch.equal(a.view(bits), b.view(bits))


def check_token_scaled(problem: Problem, kv: KVCache, has_q: bool = True, rotation: bool = False) -> None:
    """Compares the rows that append_qkv wrote to `kv` with the float64 oracle. has_q: and Q. rotation: K and
    V were rotated.
    """
    tokens, q_heads = len(problem.slots), problem.num_qo_heads
    norm = (problem.norm_eps, problem.norm_offset)
    if has_q:
        q = problem.before[:tokens, :q_heads]
        check(
            problem.written_q[:tokens], expected(q, problem.positions, problem.rotary, problem.q_norm, *norm)
        )
    k, v = problem.before[:tokens, q_heads:].cpu().split(HEADS, dim=1)
    k, v = expected(k, problem.positions, problem.rotary, problem.k_norm, *norm), v.double()
    if rotation:
        k, v = rotated(k), rotated(v)
    slots = problem.slots.long().cpu()
    written = (slots >= 0) & (slots < kv.num_pages * kv.page_size)
    at = slots[written] // kv.page_size, slots[written] % kv.page_size
    for x, name in ((k, "k"), (v, "v")):
        rows, scale = rows_at(kv, name, at)
        check_rows(rows, scale, x[written])


def rows_at(kv: KVCache, name: str, at: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor | BlockScales]:
    """Rows of K or V and their scales, at pages and places in them, on the CPU."""
    rows, scale = getattr(kv, name).cpu()[at], getattr(kv, f"{name}_scale")
    if isinstance(scale, BlockScales):
        return rows, BlockScales(scale.blocks.cpu()[at], scale.factor)
    return rows, scale.cpu()[at]


def check_rows(rows: Tensor, scale: Tensor | BlockScales, x: Tensor) -> None:
    """Compares rows of a cache [tokens, heads, columns], and their scales, with exact numbers."""
    if isinstance(scale, BlockScales):
        _check_fp4(rows, scale, x)
    elif rows.dtype == torch.uint8:
        _check_int4(rows, scale, x)
    else:
        wanted = (x.abs().amax(-1) / LARGEST[rows.dtype]).clamp_min(1e-6)
        torch.testing.assert_close(scale.double(), wanted, rtol=2e-5, atol=0)
        step = torch.ones_like(x)
        if rows.dtype == torch.float8_e4m3fn:
            scaled = (x / wanted[..., None]).abs()
            step = scaled.clamp_min(2.0**-6).log2().floor().exp2() / 8
        apart = (rows.double() * scale.double()[..., None] - x).abs()
        assert (apart <= (0.501 * step + 1e-2 * (step < 1)) * wanted[..., None] + 1e-5).all()


def _check_int4(rows: Tensor, words: Tensor, x: Tensor) -> None:
    bits = words.contiguous().view(torch.int32)
    zero_points, scales = (bits & 15).double(), (bits & ~15).view(torch.float32).double()
    smallest, largest = x.amin(-1), x.amax(-1)
    wanted = ((largest - smallest) / 15).clamp_min(1e-6)
    torch.testing.assert_close(scales, wanted, rtol=2e-5, atol=0)
    assert ((zero_points - (-smallest / wanted).clamp(0, 15)).abs() <= 0.501).all()
    wanted_numbers = (x / wanted[..., None] + zero_points[..., None]).clamp(0, 15)
    assert ((unpacked(rows).double() - wanted_numbers).abs() <= 0.502).all()


def _check_fp4(rows: Tensor, scale: BlockScales, x: Tensor) -> None:
    """Numbers are the nearest, except for earlier rounding."""
    step, found = block_values(scale).repeat_interleave(16, -1), e2m1_values(unpacked(rows))
    largest = x.abs().unflatten(-1, (-1, 16)).amax(-1).repeat_interleave(16, -1)
    assert (step * 6 >= largest * (1 - 2**-3.9)).all()  # e4m3 rounds the scale
    room = torch.where(found.abs() >= 4, 1.0, torch.where(found.abs() >= 2, 0.5, 0.25))
    apart = (found * step - x).abs()
    assert (apart <= room * step * 1.01 + largest * 2**-3.9 * (found.abs() == 6) + 1e-6).all()
