"""attn_backend.flashinfer.rope against float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from flashinfer_oracle import DEVICES, rotated
from torch import Tensor

from attn_backend import flashinfer
from attn_backend.variants.builtin import llama3_frequencies

LENS, OFFSETS = [3, 1, 17, 0, 2], [100, 0, 2000, 7, 31]
LLAMA31 = {"rope_scale": 4.0, "low_freq_factor": 1.5, "high_freq_factor": 5.0, "old_context_len": 512}


def problem(device: str, head_dim: int) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """q, k, indptr, offsets and the positions of the rows. Q and K are slices of one tensor."""
    qkv = torch.randn(sum(LENS), 6, head_dim, device=device).to(torch.float16)
    positions = torch.cat(
        [torch.arange(length) + offset for length, offset in zip(LENS, OFFSETS, strict=True)]
    )
    indptr = torch.tensor([0, *LENS]).cumsum(0).int()
    return (
        qkv[:, :4],
        qkv[:, 4:],
        indptr.to(device),
        torch.tensor(OFFSETS, dtype=torch.int32, device=device),
        positions.int().to(device),
    )


def close(found: tuple[Tensor, Tensor], expected: tuple[Tensor, Tensor]) -> None:
    for tensor, wanted in zip(found, expected, strict=True):
        torch.testing.assert_close(tensor.cpu().double(), wanted, rtol=1e-3, atol=2e-3)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("head_dim", "rotary_dim"), [(64, None), (128, 64), (256, None)])
@pytest.mark.parametrize("interleave", [False, True])
def test_given_positions_and_offsets(
    device: str, head_dim: int, rotary_dim: int | None, interleave: bool
) -> None:
    q, k, indptr, offsets, positions = problem(device, head_dim)
    options: dict[str, Any] = {
        "rotary_dim": rotary_dim,
        "interleave": interleave,
        "rope_scale": 2.0,
        "rope_theta": 5000.0,
    }
    expected = (
        rotated(q, positions, 2.0, 5000.0, rotary_dim, interleave),
        rotated(k, positions, 2.0, 5000.0, rotary_dim, interleave),
    )
    before = q.clone(), k.clone()
    close(flashinfer.apply_rope(q, k, indptr, offsets, **options), expected)
    close(flashinfer.apply_rope_pos_ids(q, k, positions, **options), expected)
    assert torch.equal(q, before[0])
    assert torch.equal(k, before[1])
    flashinfer.apply_rope_inplace(q, k, indptr, offsets, **options)
    close((q, k), expected)
    q.copy_(before[0])
    k.copy_(before[1])
    flashinfer.apply_rope_pos_ids_inplace(q, k, positions, **options)
    close((q, k), expected)


@pytest.mark.parametrize("device", DEVICES)
def test_frequencies_of_llama31(device: str) -> None:
    q, k, indptr, offsets, positions = problem(device, 128)
    frequencies = llama3_frequencies(
        128, 5e5, factor=4.0, low_freq_factor=1.5, high_freq_factor=5.0, original_max_position_embeddings=512
    )
    angles = torch.arange(4096).double()[:, None] * frequencies
    table = torch.cat([angles.cos(), angles.sin()], -1).float().to(device)
    flat = q.flatten(1).contiguous(), k.flatten(1).contiguous()
    expected = flashinfer.apply_rope_with_cos_sin_cache(positions.long(), *flat, 128, table)
    shaped = tuple(x.view(sum(LENS), -1, 128).cpu().double() for x in expected)
    assert not torch.allclose(shaped[0], q.cpu().double())
    close(flashinfer.apply_llama31_rope(q, k, indptr, offsets, **LLAMA31), shaped)  # type: ignore[arg-type]
    close(flashinfer.apply_llama31_rope_pos_ids(q, k, positions, **LLAMA31), shaped)  # type: ignore[arg-type]
    copies = [(q.clone(), k.clone()) for _ in range(2)]
    flashinfer.apply_llama31_rope_inplace(*copies[0], indptr, offsets, **LLAMA31)  # type: ignore[arg-type]
    flashinfer.apply_llama31_rope_pos_ids_inplace(*copies[1], positions, **LLAMA31)  # type: ignore[arg-type]
    for copy in copies:
        close(copy, shaped)  # type: ignore[arg-type]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("is_neox", [True, False])
def test_table_of_cosines_and_sines(device: str, is_neox: bool) -> None:
    q, k, _, _, positions = problem(device, 64)
    angles = torch.arange(4096).double()[:, None] * 1e4 ** (-torch.arange(0, 32, 2).double() / 32)
    table = torch.cat([angles.cos(), angles.sin()], -1).float().to(device)
    expected = (
        rotated(q, positions, 1.0, 1e4, 32, not is_neox),
        rotated(k, positions, 1.0, 1e4, 32, not is_neox),
    )
    flat = q.flatten(1).contiguous(), k.flatten(1).contiguous()
    found = flashinfer.apply_rope_with_cos_sin_cache(positions, *flat, 64, table, is_neox)
    assert [x.shape for x in found] == [x.shape for x in flat]
    close((found[0].unflatten(1, (-1, 64)), found[1].unflatten(1, (-1, 64))), expected)
    flashinfer.apply_rope_with_cos_sin_cache_inplace(positions, *flat, 64, table, is_neox)
    assert torch.equal(flat[0], found[0])
    assert torch.equal(flat[1], found[1])


def test_wrong_arguments_are_named() -> None:
    q, k, indptr, offsets, positions = problem("cpu", 64)
    with pytest.raises(ValueError, match="cos_sin_cache is"):
        flashinfer.apply_rope_with_cos_sin_cache(
            positions, q.flatten(1), k.flatten(1), 64, torch.zeros(9, 64).half()
        )
    with pytest.raises(ValueError, match=r"query is .*, must be a tensor \[rows, heads \* 48\]"):
        flashinfer.apply_rope_with_cos_sin_cache(
            positions, q.flatten(1), k.flatten(1), 48, torch.zeros(9, 48)
        )
    with pytest.raises(ValueError, match="positions"):
        flashinfer.apply_rope_pos_ids(q, k, positions.float())
    with pytest.raises(ValueError, match="theta"):
        flashinfer.apply_rope(q, k, indptr, offsets, rope_theta=0.0)
