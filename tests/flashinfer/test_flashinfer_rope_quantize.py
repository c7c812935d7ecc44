"""attn_backend.flashinfer.rope: Q and K rotated, rounded to 8 bits, and appended, compared with float64."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from flashinfer_oracle import DEVICES, rotated
from torch import Tensor

from attn_backend import flashinfer

DTYPES = [torch.float8_e4m3fn, torch.float8_e5m2]
ROWS, THETA = 9, 1e4
POSITIONS = torch.tensor([0, 5, 3, 100, 7, 255, 40, 41, 42])
# Q and KV heads (0: MLA's, without that dimension), rotated columns, other columns.
SHAPES = [(4, 2, 64, 64), (8, 8, 32, 96), (4, 2, 128, 0), (6, 0, 64, 512), (3, 0, 32, 0)]


def table(rotary_dim: int, device: str) -> Tensor:
    angles = torch.arange(256).double()[:, None] * THETA ** (
        -torch.arange(0, rotary_dim, 2).double() / rotary_dim
    )
    return torch.cat((angles.cos(), angles.sin()), -1).float().to(device)


def parts(
    heads: int, columns: int, rotary_dim: int, dtype: torch.dtype, device: str, seed: int
) -> tuple[Tensor, Tensor]:
    """Rotated columns and other columns, as slices of one tensor."""
    shape = (ROWS, heads, columns + rotary_dim) if heads else (ROWS, columns + rotary_dim)
    whole = torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype).to(device)
    return whole[..., :rotary_dim], whole[..., rotary_dim:]


def rotated_part(part: Tensor, is_neox: bool) -> Tensor:
    return rotated(part.view(ROWS, -1, part.shape[-1]), POSITIONS, 1.0, THETA, interleave=not is_neox).view(
        part.shape
    )


def check_rounded(found: Tensor, exact: Tensor, scale: float, dtype: torch.dtype) -> None:
    """Each result is the value nearest to the exact one, rounded once, within float32 error. Values that are
    too large become the largest.
    """
    assert found.dtype == dtype
    largest = torch.finfo(dtype).max
    wanted = (exact * scale).clamp(-largest, largest)
    step = (
        wanted.abs().clamp(min=torch.finfo(dtype).smallest_normal).log2().floor().exp2()
        * torch.finfo(dtype).eps
    )
    assert ((found.cpu().double() - wanted).abs() <= 0.5 * step + 2e-6 * scale).all()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_rope_quantize(device: str, dtype: torch.dtype, shape: tuple[int, int, int, int]) -> None:
    qo_heads, kv_heads, rotary_dim, columns = shape
    is_neox, q_scale, kv_scale = columns != 96, 0.5, 300.0  # K: some values are limited
    q_rope, q_nope = parts(qo_heads, columns, rotary_dim, torch.float16, device, 1)
    k_rope, k_nope = parts(kv_heads, columns, rotary_dim, torch.float16, device, 2)
    options: dict[str, Any] = {
        "is_neox": is_neox,
        "quantize_dtype": dtype,
        "quant_scale_q": q_scale,
        "quant_scale_kv": kv_scale,
    }
    inputs = (
        q_rope,
        k_rope,
        q_nope if columns else None,
        k_nope if columns else None,
        table(rotary_dim, device),
        POSITIONS.to(device),
    )
    before = q_rope.clone(), k_rope.clone()
    exact = (
        rotated_part(q_rope, is_neox),
        rotated_part(k_rope, is_neox),
        q_nope.cpu().double(),
        k_nope.cpu().double(),
    )
    found = flashinfer.rope.rope_quantize_fp8(*inputs, **options)
    for name, part, wanted in zip(("q_rope", "k_rope", "q_nope", "k_nope"), found, exact, strict=True):
        check_rounded(part, wanted, q_scale if name.startswith("q") else kv_scale, dtype)
    assert torch.equal(q_rope, before[0])
    assert torch.equal(k_rope, before[1])
    # Into columns of larger tensors, whose dtype selects the output type.
    outs = [
        torch.zeros(*x.shape[:-1], rotary_dim + columns, dtype=dtype, device=device) for x in (q_rope, k_rope)
    ]
    given = {"q_rope_out": outs[0][..., :rotary_dim], "k_rope_out": outs[1][..., :rotary_dim]}
    given |= (
        {"q_nope_out": outs[0][..., rotary_dim:], "k_nope_out": outs[1][..., rotary_dim:]} if columns else {}
    )
    flashinfer.rope.mla_rope_quantize_fp8(*inputs, **{**options, "quantize_dtype": None}, **given)
    for out, rope, nope in ((outs[0], found[0], found[2]), (outs[1], found[1], found[3])):
        assert torch.equal(out.view(torch.uint8), torch.cat((rope, nope), -1).view(torch.uint8))


def pages_of(device: str) -> dict[str, Tensor]:
    """Destinations of nine rows: two requests that already have tokens; one row is padding."""
    requests = torch.tensor([0, 0, 0, 1, 1, 1, 1, 1, -1], dtype=torch.int32)
    positions = torch.tensor([6, 7, 8, 0, 1, 2, 3, 4, 0], dtype=torch.int32)
    tables = {
        "kv_indices": torch.tensor([5, 1, 4, 0, 2], dtype=torch.int32),
        "kv_indptr": torch.tensor([0, 3, 5], dtype=torch.int32),
    }
    return {
        name: tensor.to(device)
        for name, tensor in (tables | {"batch_indices": requests, "positions": positions}).items()
    }


# (page, token) of each row, pages of 4 tokens
PLACES = [(1, 2), (1, 3), (4, 0), (0, 0), (0, 1), (0, 2), (0, 3), (2, 0), None]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kv_layout", ["NHD", "HND"])
@pytest.mark.parametrize("shape", SHAPES[:4], ids=str)
def test_append(device: str, dtype: torch.dtype, kv_layout: str, shape: tuple[int, int, int, int]) -> None:
    qo_heads, kv_heads, rotary_dim, columns = shape
    head_dim, scales = rotary_dim + columns, {"quant_scale_q": 2.0, "quant_scale_kv": 0.5}
    q_rope, q_nope = parts(qo_heads, columns, rotary_dim, torch.bfloat16, device, 1)
    k_rope, k_nope = parts(kv_heads, columns, rotary_dim, torch.bfloat16, device, 2)
    v = parts(kv_heads, 0, head_dim, torch.bfloat16, device, 3)[0] if kv_heads else None
    of_heads = (6, 4, kv_heads, head_dim) if kv_layout == "NHD" else (6, kv_heads, 4, head_dim)
    sizes = [(6, 4, columns), (6, 4, rotary_dim)] if v is None else [of_heads, of_heads]
    caches = tuple(torch.full(size, 1.5, device=device).to(dtype) for size in sizes)
    nopes = (q_nope, k_nope) if columns else (None, None)
    inputs = (q_rope, k_rope, *nopes, v, table(rotary_dim, device), POSITIONS.to(device), caches)
    found = flashinfer.rope.rope_quantize_fp8_append_paged_kv_cache(
        *inputs, **pages_of(device), page_size=4, kv_layout=kv_layout, **scales
    )
    for part, wanted in zip(found, (rotated_part(q_rope, True), q_nope.cpu().double()), strict=True):
        check_rounded(part, wanted, 2.0, dtype)
    rotated_k = rotated_part(k_rope, True)
    rows = (k_nope, rotated_k) if v is None else (torch.cat((rotated_k, k_nope.cpu().double()), -1), v)
    untouched = torch.ones(6, 4, dtype=torch.bool)
    for cache, wanted in zip(caches, rows, strict=True):
        by_token = cache.transpose(1, 2) if v is not None and kv_layout == "HND" else cache
        for row, place in enumerate(PLACES):
            if place is not None:
                untouched[place] = False
                check_rounded(by_token[place], wanted[row].cpu().double(), 0.5, dtype)
        assert (by_token.float().cpu()[untouched] == 1.5).all()


def test_what_is_refused() -> None:
    q_rope, q_nope = parts(4, 64, 64, torch.float16, "cpu", 1)
    k_rope, k_nope = parts(2, 64, 64, torch.float16, "cpu", 2)
    inputs: dict[str, Any] = {
        "q_rope": q_rope,
        "k_rope": k_rope,
        "q_nope": q_nope,
        "k_nope": k_nope,
        "cos_sin_cache": table(64, "cpu"),
        "pos_ids": POSITIONS,
    }
    for changes, message in (
        (
            {"quantize_dtype": torch.float16},
            "quantize_dtype is torch.float16, must be torch.float8_e4m3fn or torch.float8_e5m2",
        ),
        ({"q_rope_out": torch.empty(9, 4, 64)}, "quantize_dtype is torch.float32"),
        (
            {"q_rope_out": torch.empty(9, 4, 32).to(DTYPES[0])},
            r"q_rope_out is .*, must be of dtype torch.float8_e4m3fn and shape \[9, 4, 64\] on cpu",
        ),
        (
            {"quantize_dtype": DTYPES[1], "q_rope_out": torch.empty(9, 4, 64).to(DTYPES[0])},
            "q_rope_out.dtype is torch.float8_e4m3fn, must be quantize_dtype",
        ),
        ({"quant_scale_q": 0.0}, "quant_scale_q is 0.0, must be a number above 0"),
        ({"quant_scale_kv": math.nan}, "quant_scale_kv is nan"),
        ({"cos_sin_cache": table(64, "cpu").half()}, "cos_sin_cache is .*, must be a float32 tensor"),
        ({"q_nope": q_nope[..., :20]}, r"q_nope.shape\[-1\] is 20, must be a multiple of 8"),
        ({"pos_ids": POSITIONS[:3]}, "positions"),
    ):
        with pytest.raises(ValueError, match=message):
            flashinfer.rope.rope_quantize_fp8(**{**inputs, **changes})
    with pytest.raises(NotImplementedError, match="backend = 'cutile'"):
        flashinfer.rope.rope_quantize_fp8(**inputs, backend="cutile")
    caches = tuple(torch.zeros(6, 4, 2, 128).to(DTYPES[0]) for _ in range(2))
    appended: dict[str, Any] = (
        inputs
        | pages_of("cpu")
        | {"v": torch.zeros(9, 2, 128).half(), "paged_kv_cache": caches, "page_size": 4}
    )
    for changes, message in (
        ({"page_size": 8}, "page_size is 8, must be 4, that of paged_kv_cache"),
        ({"v": None, "k_nope": None}, "k_nope is None, must be a tensor without v"),
        ({"paged_kv_cache": caches[0]}, "paged_kv_cache is .*, must be the tuple"),
        ({"paged_kv_cache": (caches[0].half(), caches[1].half())}, "quantize_dtype is torch.float16"),
        ({"kv_layout": "other"}, "kv_layout"),
    ):
        with pytest.raises(ValueError, match=message):
            flashinfer.rope.rope_quantize_fp8_append_paged_kv_cache(**{**appended, **changes})
