"""Traced functions compared with flex_attention itself, on the same functions and inputs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import variant_functions
from variant_functions import CASES, LENGTH, B, Case, H

from attn_backend import Attention, BSRView, KVCache, PageTable
from attn_backend.jit import compilers

flex = pytest.importorskip("torch.nn.attention.flex_attention", reason="this torch has no flex_attention")

pytestmark = [
    pytest.mark.skipif(compilers.cpp_compiler() is None, reason="needs a C++ compiler"),
    pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile"),
]

KV_HEADS, HEAD_DIM = 2, 64
NAMES = [
    "causal_documents",
    "alibi_declared",
    "relative_position",
    "relative_position_of_even_heads",
    "soft_cap_by_hand",
    "bias_by_distance",
    "bias_with_strides",
    "t5_buckets",
    "score_masked_by_where",
    "forgetting_gate",
    "affine_of_each_head",
    "causal_window",
    "prefix_lm_mask",
    "documents_of_requests",
    "padding",
    "dilated_window",
    "neighbourhood_2d",
    "neighbourhood_clamped_at_the_border",
    "tiled_2d",
    "global_tokens",
    "local_heads",
    "block_sparse",
    "and_masks",
    "score_and_mask",
]
CASE_OF = {case.name: case for case in CASES}


@pytest.fixture
def given(monkeypatch: pytest.MonkeyPatch) -> Callable[[Case, torch.device], dict[str, Any]]:
    """Makes the arguments of a case, and the globals that its functions use: flex_attention looks these up by
    name.
    """

    def give(case: Case, device: torch.device) -> dict[str, Any]:
        args = {
            name: value.to(device) if isinstance(value, torch.Tensor) else value
            for name, value in case.args.items()
        }
        for name, value in args.items():
            monkeypatch.setattr(variant_functions, name, value, raising=False)
        torch._dynamo.reset()
        return args

    return give


def by_flex_attention(
    case: Case, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, compiled: bool
) -> torch.Tensor:
    """[B, H, queries, HEAD_DIM] for the last tokens' queries."""
    queries, score_mod, mask_mod = q.shape[2], case.score_mod, case.mask_mod

    def score(value: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return score_mod(value, b, h, q_idx + (LENGTH - queries), kv_idx)

    def mask(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return mask_mod(b, h, q_idx + (LENGTH - queries), kv_idx)

    block_mask = (
        None if mask_mod is None else flex.create_block_mask(mask, B, H, queries, LENGTH, device=q.device)
    )
    if mask_mod is not None:
        seen = flex.create_mask(mask, B, H, queries, LENGTH, device=q.device)
        assert seen.any()
        assert not seen.all()
    attend = torch.compile(flex.flex_attention, dynamic=False) if compiled else flex.flex_attention
    return attend(
        q, k, v, score_mod=None if score_mod is None else score, block_mask=block_mask, enable_gqa=True
    )  # type: ignore[no-any-return]


def by_us(
    case: Case, args: dict[str, Any], q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
) -> torch.Tensor:
    """The same result with our kernels; without a mask_mod every token is visible."""
    queries, device = q.shape[2], q.device
    attention = Attention(
        H,
        KV_HEADS,
        HEAD_DIM,
        dtype=q.dtype,
        device=device,
        max_rows=B * queries,
        max_batch=B,
        variant=case.variant(),
    )
    indptr = torch.arange(B + 1, dtype=torch.int32, device=device)
    view = BSRView(indptr * queries, PageTable.ragged(indptr * LENGTH), causal=False)
    attention.plan(view, variant_args=args)
    rows, *kv = (tensor.transpose(1, 2).flatten(0, 1).contiguous() for tensor in (q, k, v))
    return (
        attention.run(rows, KVCache.from_ragged(*kv), variant_args=args)
        .unflatten(0, (B, queries))
        .transpose(1, 2)
    )


def inputs(
    queries: int, dtype: torch.dtype, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(queries)
    shapes = ((B, H, queries, HEAD_DIM), (B, KV_HEADS, LENGTH, HEAD_DIM), (B, KV_HEADS, LENGTH, HEAD_DIM))
    q, k, v = (torch.randn(shape, generator=generator).to(device, dtype) for shape in shapes)
    return q, k, v


def test_enough_of_them() -> None:
    assert len(set(NAMES)) >= 20
    assert set(NAMES) <= set(CASE_OF)


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_same_as_flex_attention(name: str, given: Callable[[Case, torch.device], dict[str, Any]]) -> None:
    case, device = CASE_OF[name], torch.device("cpu")
    args = given(case, device)
    for queries in (LENGTH, 7):
        q, k, v = inputs(queries, torch.float32, device)
        torch.testing.assert_close(
            by_us(case, args, q, k, v), by_flex_attention(case, q, k, v, compiled=False), rtol=1e-4, atol=5e-5
        )


@pytest.mark.gpu
@pytest.mark.parametrize("name", NAMES[:4])
def test_same_as_flex_attention_compiled(
    name: str, given: Callable[[Case, torch.device], dict[str, Any]]
) -> None:
    case, device = CASE_OF[name], torch.device("cuda")
    q, k, v = inputs(LENGTH, torch.bfloat16, device)
    args = given(case, device)
    torch.testing.assert_close(
        by_us(case, args, q, k, v), by_flex_attention(case, q, k, v, compiled=True), rtol=3e-2, atol=3e-2
    )
