"""attn_backend.flashinfer.prefill against float64."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from flashinfer_oracle import DEVICES, Batch, attention, check, make_batch, workspace
from torch import Tensor

from attn_backend import flashinfer

Q_LENS, KV_LENS = [3, 1, 17, 2, 0], [7, 1, 33, 20, 5]
OPTIONS: list[dict[str, Any]] = [
    {},
    {"causal": True},
    {"causal": True, "window_left": 4},
    {"soft_cap": 5.0},
    {"alibi": True, "causal": True},
    {"sm_scale": 0.3},
    {"rope": (2.0, 500.0), "causal": True},
    {"rope": (1.0, 1e4), "soft_cap": 5.0},
]


def named(options: dict[str, Any]) -> dict[str, Any]:
    """As FlashInfer calls them."""
    renamed = {"soft_cap": "logits_soft_cap", "alibi": "pos_encoding_mode"}
    if "rope" in options:
        scale, theta = options["rope"]
        options = {name: value for name, value in options.items() if name != "rope"} | {
            "rope_scale": scale,
            "rope_theta": theta,
            "pos_encoding_mode": "ROPE_LLAMA",
        }
    return {renamed.get(name, name): "ALIBI" if name == "alibi" else value for name, value in options.items()}


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("kv_layout", ["NHD", "HND"])
def test_single_prefill(device: str, options: dict[str, Any], kv_layout: str) -> None:
    batch = make_batch([17], [33], device=device)
    k, v = (x if kv_layout == "NHD" else x.transpose(0, 1).contiguous() for x in (batch.k, batch.v))
    found = flashinfer.single_prefill_with_kv_cache(
        batch.q, k, v, kv_layout=kv_layout, return_lse=True, **named(options)
    )
    check(found, attention(batch.q, batch.k, batch.v, **options))


def test_more_queries_than_tokens() -> None:
    batch = make_batch([5], [3])
    check(
        flashinfer.single_prefill_with_kv_cache_return_lse(batch.q, batch.k, batch.v, causal=True),
        attention(batch.q, batch.k, batch.v, causal=True),
    )


def runs(
    batch: Batch, device: str, layout: str = "NHD"
) -> list[tuple[Any, Callable[..., None], Callable[..., Any]]]:
    """(wrapper, its plan of the batch, its run): over pages, and over the same K and V stored
    contiguously."""
    paged = flashinfer.BatchPrefillWithPagedKVCacheWrapper(workspace(device), layout)
    ragged = flashinfer.BatchPrefillWithRaggedKVCacheWrapper(workspace(device), layout)
    k, v = (
        (batch.k, batch.v)
        if layout == "NHD"
        else (batch.k.transpose(0, 1).contiguous(), batch.v.transpose(0, 1).contiguous())
    )

    def plan_paged(**options: Any) -> None:
        paged.plan(batch.qo_indptr, *batch.tables(), *batch.shape, batch.page_size, **options)

    def plan_ragged(**options: Any) -> None:
        ragged.plan(batch.qo_indptr, batch.kv_indptr, *batch.shape, **options)

    return [
        (paged, plan_paged, lambda **options: paged.run(batch.q, batch.paged(layout), **options)),
        (ragged, plan_ragged, lambda **options: ragged.run(batch.q, k, v, **options)),
    ]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("kv_layout", ["NHD", "HND"])
def test_batches(device: str, options: dict[str, Any], kv_layout: str) -> None:
    batch = make_batch(Q_LENS, KV_LENS, device=device)
    for _, plan, run in runs(batch, device, kv_layout):
        plan(**named(options))
        check(run(return_lse=True), batch.expected(**options))
        lse = torch.full((len(batch.q), 4), torch.nan, device=device)
        check((run(lse=lse), lse), batch.expected(**options))  # written if passed, as in FlashInfer


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    "options", [{}, {"causal": True}, {"soft_cap": 5.0}, {"alibi": True, "causal": True}], ids=str
)
@pytest.mark.parametrize("kv_layout", ["NHD", "HND"])
def test_keys_of_no_tokens(device: str, options: dict[str, Any], kv_layout: str) -> None:
    """K and V without tokens, and caches without pages: outputs are 0 and lse is -inf, as in FlashInfer."""
    batch = make_batch([3, 1, 17], [0, 0, 0], device=device)
    batch.cache = batch.cache[:0]
    expected = (
        torch.zeros(21, 4, 64, dtype=torch.float64),
        torch.full((21, 4), -torch.inf, dtype=torch.float64),
    )
    for _, plan, run in runs(batch, device, kv_layout):
        plan(**named(options))
        check(run(return_lse=True), expected)
    k, v = (x if kv_layout == "NHD" else x.transpose(0, 1).contiguous() for x in (batch.k, batch.v))
    check(
        flashinfer.single_prefill_with_kv_cache(
            batch.q, k, v, kv_layout=kv_layout, return_lse=True, **named(options)
        ),
        expected,
    )
    of_decode = {name: value for name, value in named(options).items() if name != "causal"}
    o, lse = flashinfer.single_decode_with_kv_cache(batch.q[0], k, v, kv_layout, return_lse=True, **of_decode)
    check((o.unsqueeze(0), lse.unsqueeze(0)), (expected[0][:1], expected[1][:1]))


@pytest.mark.parametrize("device", DEVICES)
def test_options_in_forward(device: str) -> None:
    batch = make_batch(Q_LENS, KV_LENS, device=device)
    (paged, plan_paged, _), (ragged, plan_ragged, _) = runs(batch, device)
    plan_paged()
    plan_ragged()
    expected = batch.expected(causal=True, soft_cap=6.0, sm_scale=0.2)
    options = {"causal": True, "logits_soft_cap": 6.0, "sm_scale": 0.2}
    check(paged.forward(batch.q, batch.cache, **options), expected)
    check(ragged.forward_return_lse(batch.q, batch.k, batch.v, **options), expected)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("soft_cap", [0.0, 6.0])
def test_custom_masks(device: str, packed: bool, soft_cap: float) -> None:
    batch = make_batch(Q_LENS, KV_LENS, device=device)
    torch.manual_seed(0)
    masks = [torch.rand(q, k) < 0.6 for q, k in zip(Q_LENS, KV_LENS, strict=True)]
    flat = torch.cat([mask.flatten() for mask in masks])
    options: dict[str, Any] = {"custom_mask": flat.to(device)}
    if packed:
        bits = torch.tensor([0, *(mask.numel() for mask in masks)]).cumsum(0)
        options = {"packed_custom_mask": flashinfer.segment_packbits(flat, bits, "little")[0].to(device)}
    for _, plan, run in runs(batch, device):
        plan(causal=True, logits_soft_cap=soft_cap, **options)  # causal does not count
        check(run(return_lse=True), batch.expected(masks=masks, soft_cap=soft_cap))
    single = flashinfer.single_prefill_with_kv_cache(
        batch.q[4:21], batch.k[8:41], batch.v[8:41], custom_mask=masks[2].to(device)
    )
    assert isinstance(single, Tensor)
    check(single, attention(batch.q[4:21], batch.k[8:41], batch.v[8:41], mask=masks[2]))


@pytest.mark.parametrize("device", DEVICES)
def test_multi_item_scoring(device: str) -> None:
    batch = make_batch([9, 7], [12, 12], device=device)
    # Prompts of 3 and 5 tokens. Items of 3 and 4, and of 2 and 2 tokens, each after a delimiter, and one
    # delimiter at the end.
    positions = [[0, 1, 2, 3, 0, 1, 2, 3, 4], [0, 1, 2, 0, 1, 2, 0]]
    prefix_lens = [3, 5]
    masks = []
    for prefix, of_items, q_len in zip(prefix_lens, positions, (9, 7), strict=True):
        mask = torch.zeros(q_len, 12, dtype=torch.bool)
        for row in range(q_len):
            position = 12 - q_len + row
            before = of_items[position - prefix] if position >= prefix else None
            for token in range(position + 1):
                mask[row, token] = before is None or token < prefix or position - token < before
        masks.append(mask)
    of_items = torch.zeros(2, 9, dtype=torch.int32)
    for i, values in enumerate(positions):
        of_items[i, : len(values)] = torch.tensor(values)
    options = {
        "prefix_len_ptr": torch.tensor(prefix_lens).to(torch.uint32).to(device),
        "token_pos_in_items_ptr": of_items.flatten()[: 9 + 7].to(torch.uint16).to(device),
        "token_pos_in_items_len": 9,
        "max_item_len_ptr": torch.tensor([4, 2]).to(torch.uint16).to(device),
    }
    for _, plan, run in runs(batch, device):
        plan(causal=True, **options)
        check(run(return_lse=True), batch.expected(masks=masks))


def test_multi_item_scoring_of_one_request() -> None:
    batch = make_batch([4], [9])
    wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(workspace("cpu"))
    # as in FlashInfer's tests
    items = {
        "token_pos_in_items_ptr": torch.tensor([0, 1, 2, 0]).to(torch.uint16),
        "token_pos_in_items_len": 100,
    }
    wrapper.plan(
        batch.qo_indptr,
        *batch.tables(),
        *batch.shape,
        5,
        causal=True,
        prefix_len_ptr=torch.tensor(5).to(torch.uint32),
        **items,
    )
    mask = torch.tensor(
        [[1] * 5 + own for own in ([0, 0, 0, 0], [0, 1, 0, 0], [0, 1, 1, 0], [0, 0, 0, 0])], dtype=torch.bool
    )
    check(wrapper.run(batch.q, batch.cache), batch.expected(masks=[mask]))


def test_indptrs_that_do_not_start_at_0() -> None:
    batch = make_batch(Q_LENS, KV_LENS)
    q = torch.cat((torch.zeros(2, *batch.q.shape[1:], dtype=torch.float16), batch.q))
    k, v = (torch.cat((torch.zeros(3, *x.shape[1:], dtype=torch.float16), x)) for x in (batch.k, batch.v))
    wrapper = flashinfer.BatchPrefillWithRaggedKVCacheWrapper(workspace("cpu"))
    wrapper.plan(batch.qo_indptr + 2, batch.kv_indptr + 3, *batch.shape, causal=True)
    o, lse = wrapper.run(q, k, v, return_lse=True)
    assert not o[:2].any()
    check((o[2:], lse[2:]), batch.expected(causal=True))
    given = torch.full_like(lse, torch.nan)
    assert torch.equal(wrapper.run(q, k, v, lse=given), o)
    assert torch.equal(given[2:], lse[2:])


def test_plans_grow() -> None:
    wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(workspace("cpu"))
    for rows, requests in ((3, 2), (700, 3), (5, 90)):
        batch = make_batch([rows] * requests, [rows] * requests, heads=(1, 1, 8), seed=rows)
        wrapper.plan(batch.qo_indptr, *batch.tables(), *batch.shape, batch.page_size, causal=True)
        check(wrapper.run(batch.q, batch.cache), batch.expected(causal=True))


@pytest.mark.gpu
def test_indptrs_on_the_device_and_more_rows_than_expected() -> None:
    batch = make_batch([9000, 3], [9000, 3], heads=(1, 1, 64), device="cuda")
    wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(workspace("cuda"))
    wrapper.plan(batch.qo_indptr, *batch.tables(), *batch.shape, batch.page_size, causal=True)
    check(wrapper.run(batch.q, batch.cache), batch.expected(causal=True))


def test_buffers_of_cuda_graphs() -> None:
    buffers = [torch.zeros(size, dtype=torch.int32) for size in (6, 6, 100, 5)]
    masks = [torch.zeros(200, dtype=torch.uint8), torch.zeros(6, dtype=torch.int32)]
    wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(workspace("cpu"), "NHD", True, *buffers, *masks)
    batch, other = make_batch(Q_LENS, KV_LENS), make_batch([2] * 5, [9] * 5, seed=1)
    for planned in (batch, other):
        wrapper.plan(planned.qo_indptr, *planned.tables(), *planned.shape, planned.page_size, causal=True)
        check(wrapper.run(planned.q, planned.cache), planned.expected(causal=True))
        assert torch.equal(buffers[0], planned.qo_indptr)
    larger = make_batch([20] * 5, [20] * 5)
    with pytest.raises(ValueError, match=r"qo_indptr\[-1\] is 100, must be at most 23, as in the first plan"):
        wrapper.plan(larger.qo_indptr, *larger.tables(), *larger.shape, larger.page_size)


@pytest.mark.parametrize("device", DEVICES)
def test_sinks(device: str) -> None:
    batch = make_batch(Q_LENS, KV_LENS, device=device)
    sinks = torch.tensor([0.5, -1.0, 2.0, 0.0], device=device)
    expected = batch.expected(causal=True, sinks=sinks, sm_scale=0.2)
    jit_args = ["name", *[None] * 10, "AttentionSink", "C++"]
    paged = flashinfer.BatchAttentionWithAttentionSinkWrapper(workspace(device))
    ragged = flashinfer.BatchPrefillWithRaggedKVCacheWrapper(workspace(device), jit_args=jit_args)
    paged.plan(batch.qo_indptr, *batch.tables(), *batch.shape, batch.page_size, causal=True)
    ragged.plan(batch.qo_indptr, batch.kv_indptr, *batch.shape, causal=True)
    check(paged.run(batch.q, batch.cache, sinks, 0.2), expected)
    check(ragged.run(batch.q, batch.k, batch.v, sinks, 0.2), expected)


BATCH = make_batch([3, 2], [4, 6])


def plan(**options: Any) -> Any:
    wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(workspace("cpu"))
    wrapper.plan(BATCH.qo_indptr, *BATCH.tables(), *BATCH.shape, 5, **options)
    return wrapper


@pytest.mark.parametrize(
    ("error", "call", "message"),
    [
        (
            ValueError,
            lambda: plan().run(BATCH.q[:4], BATCH.cache),
            r"q.shape\[0\] is 4, must be qo_indptr\[-1\] = 5",
        ),
        (ValueError, lambda: plan(custom_mask=torch.ones(24)), "custom_mask is a float32 tensor"),
        (ValueError, lambda: plan(custom_mask=torch.ones(23, dtype=torch.bool)), r"indptr\[-1\] is 24"),
        (ValueError, lambda: plan(prefix_len_ptr=torch.ones(2)), "token_pos_in_items_ptr is None"),
        (NotImplementedError, lambda: plan(head_dim_vo=1024), "head_dim = 64_1024"),
        (NotImplementedError, lambda: plan(o_data_type="bfloat16"), "o_data_type = torch.bfloat16"),
        (NotImplementedError, lambda: plan().run(BATCH.q, BATCH.cache, torch.ones(4)), "the argument args"),
        (
            NotImplementedError,
            lambda: flashinfer.BatchPrefillWithPagedKVCacheWrapper(workspace("cpu"), backend="cudnn"),
            "backend = 'cudnn'",
        ),
        (
            NotImplementedError,
            lambda: flashinfer.single_prefill_with_kv_cache(BATCH.q, BATCH.k, BATCH.v, scale_q=torch.ones(4)),
            r"q_scale as a tensor of shape \[4\]",
        ),
    ],
)
def test_refusals(error: type[Exception], call: Callable[[], Any], message: str) -> None:
    with pytest.raises(error, match=message):
        call()


@pytest.mark.parametrize("device", DEVICES)
def test_heads_of_v_that_are_narrower(device: str) -> None:
    batch = make_batch([3, 17], [9, 33], heads=(4, 2, 192), device=device)
    k, v = batch.k, batch.v[..., :128].contiguous()
    expected = [
        attention(batch.q[q], k[kv], v[kv], causal=True)
        for q, kv in ((slice(3), slice(9)), (slice(3, 20), slice(9, 42)))
    ]
    ragged = flashinfer.BatchPrefillWithRaggedKVCacheWrapper(workspace(device))
    ragged.plan(batch.qo_indptr, batch.kv_indptr, *batch.shape, head_dim_vo=128, causal=True)
    check(
        ragged.run(batch.q, k, v, return_lse=True),
        (torch.cat([o for o, _ in expected]), torch.cat([lse for _, lse in expected])),
    )
    check(
        flashinfer.single_prefill_with_kv_cache(batch.q[:3], k[:9], v[:9], causal=True, return_lse=True),
        expected[0],
    )


@pytest.mark.parametrize("device", DEVICES)
def test_rotation_of_wide_heads(device: str) -> None:
    """On a Hopper GPU the generic kernel rotates them."""
    generator = torch.Generator().manual_seed(5)
    q, k, v = (
        torch.randn(rows, heads, 512, generator=generator).half().to(device)
        for rows, heads in ((5, 4), (40, 2), (40, 2))
    )
    found = flashinfer.single_prefill_with_kv_cache(
        q, k, v, causal=True, pos_encoding_mode="ROPE_LLAMA", rope_theta=500.0, return_lse=True
    )
    check(found, attention(q, k, v, causal=True, rope=(1.0, 500.0)), 4e-3)
