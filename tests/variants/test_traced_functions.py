"""Traced functions and built-ins: their compiled C++ gives the results of the Python functions."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from compiled_variants import COMPILER, CompiledVariants, Coordinates, interval
from variant_functions import CASES, LENGTH, B, H, floats, ints

from attn_backend.variants import Variant, builtin, segment_packbits

pytestmark = pytest.mark.skipif(not COMPILER, reason="needs g++")

Q_LENS = (5, 96, 30)


def packed(square: bool) -> dict[str, torch.Tensor]:
    masks = [ints(2, q_len * (q_len if square else LENGTH)) for q_len in Q_LENS]
    indptr = torch.tensor([0, *(len(mask) for mask in masks)], dtype=torch.int32).cumsum(0, dtype=torch.int32)
    bits, bytes_indptr = segment_packbits(torch.cat(masks), indptr, "little")
    return {"packed_mask": bits, "mask_indptr": bytes_indptr}


def booleans(square: bool) -> dict[str, torch.Tensor]:
    masks = [ints(2, q_len * (q_len if square else LENGTH)).bool() for q_len in Q_LENS]
    return {
        "mask": torch.cat(masks),
        "mask_indptr": torch.tensor([0, *(len(mask) for mask in masks)], dtype=torch.int32).cumsum(
            0, dtype=torch.int32
        ),
    }


SPANS = ints(4, B, LENGTH) - 1
ITEMS = torch.tensor([0, 1, 2, 3, 0, 1, 2, 0] * 12, dtype=torch.int32).repeat(B, 1).to(torch.uint16)
BUILTINS: dict[str, tuple[Variant, dict[str, Any]]] = {
    "causal": (builtin.causal(), {}),
    "sliding_window": (builtin.sliding_window(9), {}),
    "streaming_llm": (builtin.streaming_llm(9, 3), {}),
    "soft_cap": (builtin.soft_cap(5.0), {}),
    "soft_cap_given": (builtin.soft_cap(), {"cap": 3.0}),
    "alibi": (builtin.alibi(), {"slopes": builtin.alibi_slopes(H)}),
    "alibi_bound": (builtin.alibi(builtin.alibi_slopes(H)), {}),
    "sigmoid": (builtin.sigmoid(-1.5), {}),
    "prefix_lm": (builtin.prefix_lm(), {"prefix_lens": ints(50, B)}),
    "bidirectional_spans": (builtin.bidirectional_spans(), {"span_ids": SPANS}),
    "chunked_local": (builtin.chunked_local(24), {}),
    "document": (builtin.document(SPANS), {}),
    "multi_item_scoring": (
        builtin.multi_item_scoring(),
        {"prefix_len": torch.tensor([10, 20, 30], dtype=torch.int32), "token_pos_in_items": ITEMS},
    ),
    "temperature": (builtin.temperature(0.1, 20), {}),
    "position_temperature": (builtin.position_temperature(), {"scales": floats(LENGTH)}),
    "request_scale": (builtin.request_scale(), {"sm_scales": floats(B)}),
    "custom_mask": (builtin.custom_mask(), packed(square=False)),
    "custom_mask_of_booleans": (builtin.custom_mask(packed=False), booleans(square=False)),
    "tree_mask": (builtin.tree_mask(), packed(square=True)),
    "tree_mask_of_booleans": (builtin.tree_mask(packed=False), booleans(square=True)),
    "combined": (
        builtin.soft_cap(4.0)
        & builtin.causal()
        & builtin.alibi()
        & builtin.sliding_window(30)
        & builtin.soft_cap(8.0)
        & builtin.tree_mask()
        & builtin.sigmoid(),
        {"slopes": builtin.alibi_slopes(H), **packed(square=True)},
    ),
}
VARIANTS: dict[str, tuple[Variant, dict[str, Any]]] = {
    **{case.name: (case.variant(), case.args) for case in CASES},
    **BUILTINS,
}


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> CompiledVariants:
    return CompiledVariants(
        [variant for variant, _ in VARIANTS.values()], tmp_path_factory.mktemp("variants")
    )


def coordinates(count: int) -> Coordinates:
    """Coordinates of existing queries and tokens: the last Q_LENS[b] of LENGTH tokens are queries."""
    b = ints(B, count)
    q_lens = torch.tensor(Q_LENS, dtype=torch.int32)[b]
    index = (torch.rand(count) * q_lens).to(torch.int32)
    return Coordinates(
        b,
        ints(H, count),
        LENGTH - q_lens + index,
        ints(LENGTH, count),
        index,
        torch.full((count,), LENGTH, dtype=torch.int32),
    )


def test_enough_of_them() -> None:
    assert len(CASES) >= 60
    assert len({variant.source for variant, _ in VARIANTS.values()}) >= 60


@pytest.mark.parametrize("name", VARIANTS)
def test_same_as_python(compiled: CompiledVariants, name: str) -> None:
    variant, args = VARIANTS[name]
    at, scores = coordinates(3000), 3 * torch.randn(3000)
    reference = variant.reference()
    assert reference is not None
    logits, mask, slopes = compiled.evaluate(list(VARIANTS).index(name), variant, at, scores, args)
    expected = reference.logits(scores.double(), at.b, at.h, at.q_idx, at.kv_idx, args).float()
    torch.testing.assert_close(logits, expected, rtol=2e-5, atol=2e-5)
    if variant.has_bias_slope:
        torch.testing.assert_close(scores + slopes * (at.kv_idx - at.q_idx), expected, rtol=2e-5, atol=2e-5)
    seen = reference.mask(at.b, at.h, at.q_idx, at.kv_idx, args, index=at.index, kv_len=at.kv_len)
    assert torch.equal(mask & interval(variant, at), seen)
    hooks = (
        variant.has_logits
        + 2 * variant.has_mask
        + 4 * variant.has_output
        + 8 * variant.uses_softmax
        + 16 * variant.has_bias_slope
    )
    assert compiled.hooks(list(VARIANTS).index(name)) == hooks


@pytest.mark.parametrize("name", VARIANTS)
def test_tokens_that_do_not_exist(compiled: CompiledVariants, name: str) -> None:
    """With any coordinates, nothing outside the tensors is read, and nothing crashes."""
    variant, args = VARIANTS[name]
    ends = torch.tensor([0, 1, -1, -500, 3, 95, 96, 100000], dtype=torch.int32)
    at = Coordinates(*(ends[ints(len(ends), 2000)] for _ in range(6)))
    compiled.evaluate(list(VARIANTS).index(name), variant, at, torch.randn(2000), args)


def test_common_expressions_are_computed_once() -> None:
    def score_mod(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        def distance() -> Any:
            return torch.log(1.0 + torch.abs(q_idx - kv_idx))

        return score * distance() + distance() / (1.0 + distance())

    source = Variant.from_functions(score_mod).source
    assert source.count("log(") == 1
    assert source.count("abs(") == 1


def test_constants_are_folded() -> None:
    def score_mod(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        one = torch.ones_like(score)
        return torch.where(one > 0, score * one, q_idx) + (0 * torch.exp(one * 2) + 0.5)

    assert "return logit + 0.5f;" in Variant.from_functions(score_mod).source


def test_intervals_take_the_place_of_masks() -> None:
    found = {
        name: (variant.causal, variant.window_left, variant.has_mask)
        for name, (variant, _) in VARIANTS.items()
    }
    assert found["causal"] == (True, -1, False)
    assert found["sliding_window"] == (False, 9, False)
    assert found["streaming_llm"] == (True, -1, True)
    assert found["chunked_local"] == (True, 23, True)
    assert found["causal_window"] == (True, 17, False)
    assert found["causal_window_by_abs"] == (True, 5, False)
    assert found["strictly_causal"] == (True, -1, True)
    assert found["window_on_both_sides"] == (False, 8, True)
    assert found["not_of_or"] == (True, 12, False)
    assert found["scaled_comparison"] == (True, 10, False)
    assert found["blocks_of_any_size"] == (False, 6, True)
    assert found["windows_by_head"] == (True, -1, True)
    assert found["neighbourhood_2d"] == (False, -1, True)
    assert found["everything"] == (False, -1, False)


def test_scores_that_are_left_alone_need_no_hook() -> None:
    assert not VARIANTS["unchanged"][0].has_logits


def test_biases_with_a_slope_are_found() -> None:
    found = {name for name, (variant, _) in VARIANTS.items() if variant.has_bias_slope}
    assert found == {
        "alibi_declared",
        "alibi_computed",
        "alibi_of_a_number",
        "alibi_from_behind",
        "declared_name_in_helper",
        "score_and_mask",
        "alibi",
        "alibi_bound",
    }
    assert (builtin.alibi() & builtin.document() & builtin.sliding_window(5)).has_bias_slope
    assert not (builtin.alibi() & builtin.soft_cap(3.0)).has_bias_slope
    assert not (
        builtin.alibi()
        & Variant.from_functions(lambda score, b, h, q_idx, kv_idx: score + 0.5 * (kv_idx - q_idx))
    ).has_bias_slope


def test_biases_that_fall_or_bend_have_no_slope() -> None:
    for score_mod in (
        lambda score, b, h, q_idx, kv_idx: score + 0.5 * (q_idx - kv_idx),
        lambda score, b, h, q_idx, kv_idx: score - 0.5 * (kv_idx - q_idx),
        lambda score, b, h, q_idx, kv_idx: score + torch.sqrt(kv_idx * 1.0) * (kv_idx - q_idx),
        lambda score, b, h, q_idx, kv_idx: score + 0.01 * score * (kv_idx - q_idx),
        lambda score, b, h, q_idx, kv_idx: score * 2 + 0.5 * (kv_idx - q_idx),
        lambda score, b, h, q_idx, kv_idx: 0.5 * (kv_idx - q_idx) - score,
        lambda score, b, h, q_idx, kv_idx: score + 0.5 * torch.abs(kv_idx - q_idx),
        lambda score, b, h, q_idx, kv_idx: score + 0.5 * (kv_idx - kv_idx // 2),
    ):
        assert not Variant.from_functions(score_mod).has_bias_slope


def test_slopes_of_alibi() -> None:
    assert builtin.alibi_slopes(8).tolist() == [2.0**-i for i in range(1, 9)]
    torch.testing.assert_close(
        builtin.alibi_slopes(6), torch.tensor([2.0**-2, 2.0**-4, 2.0**-6, 2.0**-8, 2.0**-1, 2.0**-3])
    )


def test_builtin_by_name() -> None:
    assert Variant.builtin("soft_cap", cap=30.0).source == builtin.soft_cap(30.0).source
    assert builtin.soft_cap(30.0).source == builtin.soft_cap(50.0).source, "one kernel for all caps"
    with pytest.raises(ValueError, match="name is 'yarn', must be one of alibi, "):
        Variant.builtin("yarn")
    with pytest.raises(
        ValueError, match="name is 'alibi_slopes', must be one of alibi, bidirectional_spans, "
    ):
        Variant.builtin("alibi_slopes", 8)
