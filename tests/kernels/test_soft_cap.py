"""Accuracy of a soft cap, with logits far beyond it: prompts, decodes, and the variant, which is exact."""

from __future__ import annotations

import attention_kernels
import oracle
import pytest
import torch

from attn_backend import Attention, BSRView, KVCache, PageTable
from attn_backend.variants import builtin

TANH_ERROR = 2.0**-11  # relative: of tanh.approx.f32, which the Hopper kernel uses for prompts
ROUNDING = 2e-3  # of lse, in bfloat16

pytestmark = pytest.mark.usefixtures("kernel")


def lse_error(device: torch.device, cap: float, qo_len: int, head_dim: int, by_variant: bool) -> float:
    """The largest error of lse where logits reach ten times the cap."""
    kv_len, heads = 700, 2
    generator = torch.Generator().manual_seed(int(cap) + head_dim + qo_len)
    shape = (kv_len, 1, head_dim)
    k, v = (torch.randn(shape, generator=generator).to(device, torch.bfloat16) for _ in range(2))
    q = torch.randn(qo_len, heads, head_dim, generator=generator).to(device, torch.bfloat16)
    largest = float((q.double().flatten(0, 1) @ k[:, 0].double().T).abs().max())
    sm_scale = 10 * cap / largest
    variant = builtin.soft_cap(cap) if by_variant else None
    kernel = attention_kernels.kernel_of(device, 0)
    attention = Attention(
        heads, 1, head_dim, max_rows=qo_len, max_batch=1, device=device, variant=variant, kernel=kernel
    )
    qo_indptr, kv_indptr = (torch.tensor([0, n], dtype=torch.int32, device=device) for n in (qo_len, kv_len))
    attention.plan(BSRView(qo_indptr, PageTable.ragged(kv_indptr)))
    _, lse = attention.run(
        q,
        KVCache.from_ragged(k, v),
        return_lse=True,
        sm_scale=sm_scale,
        logits_soft_cap=0.0 if by_variant else cap,
    )
    _, expected = oracle.attention(q, k, v, sm_scale=sm_scale, logits_soft_cap=cap)
    return float((lse.double() - expected.to(device)).abs().max())


@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("cap", [20.0, 30.0, 50.0])
def test_prompts_are_as_exact_as_tanh_of_the_gpu(
    device: torch.device, kernel: str | None, cap: float, head_dim: int
) -> None:
    of_tanh = cap * TANH_ERROR if kernel == "hopper" else 0.0
    assert lse_error(device, cap, 300, head_dim, False) <= of_tanh + ROUNDING


@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("cap", [20.0, 30.0, 50.0])
def test_decodes_are_exact(device: torch.device, cap: float, head_dim: int) -> None:
    assert lse_error(device, cap, 1, head_dim, False) <= ROUNDING


@pytest.mark.parametrize("cap", [30.0, 50.0])
def test_the_variant_is_exact(device: torch.device, cap: float) -> None:
    assert lse_error(device, cap, 300, 128, True) <= ROUNDING
