"""A variant's range() in C++ contains everything that a row sees. Plans evaluate the mask only inside it, and
kernels visit no other KV tiles.
"""

from __future__ import annotations

from typing import Any

import case_tensors
import cases
import oracle
import pytest
import torch
from cases import Spec
from tiers import mostly_slow

from attn_backend import Variant
from attn_backend.jit import compilers
from attn_backend.kernels.schedule import TILE_ROWS
from attn_backend.variants import builtin

pytestmark = [
    pytest.mark.usefixtures("kernel"),
    pytest.mark.skipif(compilers.cpp_compiler() is None, reason="needs a C++ compiler"),
]

# From the block before a row's own block on; one more block for odd heads.
RANGE_CPP = """
  TokenRange range(const ScoreRow& row) const {
    const int32_t blocks = 1 + row.qo_head % 2;
    return {(row.position / width - blocks) * width, row.position + 1};
  }
"""
BLOCKS = Variant.from_source(RANGE_CPP, {"width": int}, name="blocks")
HOLES = "  bool mask(const ScoreRow&, int32_t kv_position) const { return kv_position / 90 % 3 != 1; }"
WITH_HOLES = Variant.from_source(
    RANGE_CPP + HOLES, {"width": int}, name="blocks_with_holes", skips_kv_tiles=True
)


def in_range(at: oracle.Pairs, width: int) -> Any:
    own = torch.div(at.position.clamp(0), width, rounding_mode="floor")
    return (at.token >= (own - 1 - at.head % 2) * width) & (at.token <= at.position)


def reference(variant: Variant, width: int) -> oracle.Variant:
    if variant is BLOCKS:
        return oracle.Variant(mask=lambda at: in_range(at, width))
    return oracle.Variant(
        mask=lambda at: in_range(at, width) & (torch.div(at.token, 90, rounding_mode="floor") % 3 != 1)
    )


@pytest.mark.parametrize("variant", [BLOCKS, WITH_HOLES], ids=lambda variant: variant.name)
@pytest.mark.parametrize("seed", mostly_slow(range(30), fast=4))
def test_random_cases(device: torch.device, seed: int, variant: Variant) -> None:
    spec = cases.random_spec(7 * 10**6 + seed, device.type).with_(
        logits_soft_cap=0.0, dtype=torch.bfloat16, head_dim=64
    )
    case = case_tensors.build(spec, device)
    arguments = {"width": [3, 50, 128, 400][seed % 4]}
    attention = case.attention(
        variant=variant, batch_invariant=seed % 5 == 0, cascade=["always", False][seed % 3 == 0]
    )
    for to_plan in (arguments, None):
        attention.plan(case.view, variant_args=to_plan)
        case.run(attention, out=case.out, lse=case.lse, variant_args=arguments)
        case_tensors.check(case, case.out, case.lse, case.expected(variant=reference(variant, **arguments)))
    case_tensors.check_padding(case)


@pytest.mark.parametrize("variant", [BLOCKS, WITH_HOLES], ids=lambda variant: variant.name)
def test_row_tiles_begin_and_end_where_their_ranges_do(device: torch.device, variant: Variant) -> None:
    tokens, width = 2048, 256
    case = case_tensors.build(
        Spec((tokens,), (tokens,), head_dim=64, dtype=torch.bfloat16, num_kv_heads=1, group_size=4), device
    )
    attention = case.attention(variant=variant)
    attention.plan(case.view, variant_args={"width": width})
    schedule = attention.schedule()
    size = schedule.kv_tile
    for _, kind, packed_begin, kv_begin, kv_end, num_kv_tiles in schedule.tiles.tolist():
        begin, end = packed_begin // 4, (packed_begin + TILE_ROWS[kind]) // 4
        rows = torch.arange(begin, min(end, tokens))[:, None]
        at = torch.arange(tokens)
        seen = (at >= (rows // width - 2) * width) & (at <= rows)
        if variant is WITH_HOLES:
            seen &= at // 90 % 3 != 1
        visited = seen.any(0).unflatten(0, (-1, size)).any(1).nonzero()
        assert num_kv_tiles == len(visited)
        assert kv_end == int(seen.any(0).nonzero()[-1]) + 1
        assert kv_begin < 0 or kv_begin == int(visited[0]) * size
    case.run(attention, out=case.out, lse=case.lse, variant_args={"width": width})
    case_tensors.check(case, case.out, case.lse, case.expected(variant=reference(variant, width)))


def test_ranges_and_masks_are_intersected(device: torch.device) -> None:
    """Combined variants: two ranges, a mask, and an interval."""
    first = Variant.from_source(
        "TokenRange range(const ScoreRow& row) const { return {-2147483647 - 1, row.position - 3}; }",
        name="before",
    )
    last = Variant.from_source(
        "TokenRange range(const ScoreRow& row) const { return {row.request * 20, 2147483647}; }", name="after"
    )
    odd = Variant.from_source(
        "bool mask(const ScoreRow&, int32_t kv_position) const { return kv_position % 2 == 1; }", name="odd"
    )
    variant = first & last & odd & builtin.sliding_window(100)
    assert variant.has_range
    assert variant.has_mask
    seen = oracle.Variant(
        mask=lambda at: (
            (at.token < at.position - 3)
            & (at.token >= at.request * 20)
            & (at.token % 2 == 1)
            & (at.position - at.token <= 100)
        )
    )
    case = case_tensors.build(
        Spec((1, 40, 7), (300, 90, 160), head_dim=64, dtype=torch.bfloat16, causal=False), device
    )
    attention = case.attention(variant=variant)
    for to_plan in ({}, None):
        attention.plan(case.view, variant_args=to_plan)
        case.run(attention, out=case.out, lse=case.lse)
        case_tensors.check(case, case.out, case.lse, case.expected(variant=seen))


def test_plans_ask_the_mask_inside_of_the_range_only(device: torch.device) -> None:
    """A mask that would show everything counts its evaluations."""
    if device.type == "cuda":
        pytest.skip("counts on the CPU")
    counting = Variant.from_source(
        """
  TokenRange range(const ScoreRow& row) const { return {row.position - 9, row.position + 1}; }
  bool mask(const ScoreRow& row, int32_t kv_position) const {
    const_cast<int32_t*>(asked.data)[kv_position] += 1;
    return true;
  }
        """,
        {"asked": torch.int32},
        name="counting",
    )
    case = case_tensors.build(Spec((1,), (1000,), head_dim=64, dtype=torch.bfloat16), device)
    attention = case.attention(variant=counting)
    asked = torch.zeros(1000, dtype=torch.int32)
    attention.plan(case.view, variant_args={"asked": asked})
    heads = attention.num_qo_heads
    assert asked[:990].sum() == 0
    assert asked[990:].tolist() == [1] * 10 or asked[990:].tolist() == [heads] * 10


@pytest.mark.parametrize(
    ("cpp", "message"),
    [
        (
            "bool range(const ScoreRow& row) const { return true; }",
            r"range\(\) must be `TokenRange range\(const ScoreRow& row\) const`",
        ),
        (
            "TokenRange range(const ScoreRow& row) { return {0, 1}; }",
            r"range\(\) must be `TokenRange range\(const ScoreRow& row\) const`",
        ),
        (
            "TokenRange range(int32_t row) const { return {0, 1}; }",
            r"range\(\) must be `TokenRange range\(const ScoreRow& row\) const`",
        ),
    ],
)
def test_other_signatures_are_refused(cpp: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Variant.from_source(cpp, name="wrong")
