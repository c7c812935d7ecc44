"""attn_backend.flashinfer.decode against float64."""

from __future__ import annotations

import weakref
from functools import partial

import pytest
import torch
from flashinfer_oracle import DEVICES, attention, check, make_batch, workspace

from attn_backend import flashinfer
from attn_backend.flashinfer import arguments

KV_LENS = [7, 1, 33, 0, 20]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("kv_layout", ["NHD", "HND"])
@pytest.mark.parametrize(
    "options",
    [{}, {"window_left": 4}, {"soft_cap": 5.0}, {"sm_scale": 0.3}, {"alibi": True, "soft_cap": 8.0}],
)
def test_single_decode(device: str, kv_layout: str, options: dict[str, object]) -> None:
    batch = make_batch([1], [37], device=device)
    k, v = (x if kv_layout == "NHD" else x.transpose(0, 1).contiguous() for x in (batch.k, batch.v))
    found = flashinfer.single_decode_with_kv_cache(
        batch.q[0], k, v, kv_layout, return_lse=True, **named(options)
    )
    expected = attention(batch.q, batch.k, batch.v, causal=True, **options)  # type: ignore[arg-type]
    check((found[0].unsqueeze(0), found[1].unsqueeze(0)), expected)


def named(options: dict[str, object]) -> dict[str, object]:
    """As FlashInfer calls them."""
    options = dict(options)
    if options.pop("alibi", False):
        options["pos_encoding_mode"] = "ALIBI"
    if "soft_cap" in options:
        options["logits_soft_cap"] = options.pop("soft_cap")
    return options


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("kv_layout", ["NHD", "HND"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("page_size", [1, 5, 16])
def test_batch_decode(device: str, kv_layout: str, dtype: torch.dtype, page_size: int) -> None:
    batch = make_batch([1] * 5, KV_LENS, dtype=dtype, page_size=page_size, device=device)
    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(workspace(device), kv_layout)
    wrapper.plan(*batch.tables(), *batch.shape, page_size, q_data_type=dtype)
    tolerance = 2e-3 if dtype == torch.float16 else 2e-2
    expected = batch.expected(causal=True)
    cache = batch.paged(kv_layout)
    check(wrapper.run(batch.q, cache, return_lse=True), expected, tolerance)
    check(wrapper.run_return_lse(batch.q, tuple(cache.unbind(1))), expected, tolerance)
    out, lse = torch.empty_like(batch.q), torch.empty(5, 4, device=device)
    assert wrapper.run(batch.q, cache, out=out, lse=lse, return_lse=True)[0] is out
    check((out, lse), expected, tolerance)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    "options",
    [
        {"window_left": 4},
        {"soft_cap": 5.0},
        {"sm_scale": 0.3},
        {"alibi": True},
        {"alibi": True, "soft_cap": 8.0},
    ],
)
def test_options_in_plan_and_in_forward(device: str, options: dict[str, object]) -> None:
    batch = make_batch([1] * 5, KV_LENS, device=device)
    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(workspace(device))
    expected = batch.expected(causal=True, **options)
    wrapper.plan(*batch.tables(), *batch.shape, batch.page_size, **named(options))
    check(wrapper.run(batch.q, batch.cache, return_lse=True), expected)
    wrapper.begin_forward(*batch.tables(), *batch.shape, batch.page_size)
    check(wrapper.forward_return_lse(batch.q, batch.cache, **named(options)), expected)
    check(wrapper.forward(batch.q, batch.cache), batch.expected(causal=True))
    wrapper.end_forward()


@pytest.mark.parametrize("device", DEVICES)
def test_several_queries_of_a_request(device: str) -> None:
    batch = make_batch([3] * 4, [7, 3, 33, 20], device=device)
    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(workspace(device), use_tensor_cores=True)
    wrapper.plan(*batch.tables(), *batch.shape, batch.page_size, q_len_per_req=3)
    check(wrapper.run(batch.q, batch.cache, return_lse=True), batch.expected(causal=True))


@pytest.mark.parametrize("device", DEVICES)
def test_scales_and_sinks(device: str) -> None:
    batch = make_batch([1] * 5, KV_LENS, device=device)
    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(workspace(device))
    wrapper.plan(*batch.tables(), *batch.shape, batch.page_size)
    o, lse = batch.expected(causal=True, sm_scale=64**-0.5 * 0.5 * 3)
    check(
        wrapper.run(batch.q, batch.cache, q_scale=0.5, k_scale=3.0, v_scale=2.0, return_lse=True),
        (o * 2, lse),
    )
    check(
        wrapper.run(
            batch.q, batch.cache, q_scale=torch.tensor(0.5), k_scale=torch.tensor([3.0]), return_lse=True
        ),
        (o, lse),
    )  # type: ignore[arg-type]
    sinks = torch.tensor([0.5, -1.0, 2.0, 0.0], device=device)
    check(
        wrapper.run(batch.q, batch.cache, sinks=sinks, return_lse=True),
        batch.expected(causal=True, sinks=sinks),
    )
    check(wrapper.run(batch.q, batch.cache), batch.expected(causal=True))


def test_plans_grow_and_shrink() -> None:
    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(workspace("cpu"))
    for size in (3, 200, 1500, 7):
        batch = make_batch(
            [1] * size, [1 + i % 9 for i in range(size)], heads=(1, 1, 8), page_size=4, seed=size
        )
        wrapper.plan(*batch.tables(), *batch.shape, 4)
        check(wrapper.run(batch.q, batch.cache), batch.expected(causal=True))


def test_a_table_that_does_not_start_at_0() -> None:
    batch = make_batch([1] * 5, KV_LENS)
    indices = torch.cat((torch.tensor([9999, 9999], dtype=torch.int32), batch.page_indices))
    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(workspace("cpu"))
    wrapper.plan(batch.page_indptr + 2, indices, batch.last_page_len, *batch.shape, batch.page_size)
    check(wrapper.run(batch.q, batch.cache), batch.expected(causal=True))


@pytest.mark.parametrize("device", DEVICES)
def test_buffers_of_cuda_graphs(device: str) -> None:
    indptr, last = (
        torch.zeros(6, dtype=torch.int32, device=device),
        torch.zeros(5, dtype=torch.int32, device=device),
    )
    indices = torch.zeros(100, dtype=torch.int32, device=device)
    wrapper = flashinfer.CUDAGraphBatchDecodeWithPagedKVCacheWrapper(
        workspace(device), indptr, indices, last, "NHD"
    )
    assert wrapper.is_cuda_graph_enabled
    for seed in (0, 1):
        batch = make_batch([1] * 5, KV_LENS[seed:] + [4] * seed, device=device, seed=seed)
        wrapper.plan(*batch.tables(), *batch.shape, batch.page_size)
        check(wrapper.run(batch.q, batch.cache), batch.expected(causal=True))
        assert torch.equal(indptr, batch.page_indptr)
    indices[: len(batch.page_indices)] = batch.page_indices
    flashinfer.fast_decode_plan(wrapper, indptr, indices, last, *batch.shape, batch.page_size)
    check(wrapper.run(batch.q, batch.cache), batch.expected(causal=True))
    wrapper.begin_forward = partial(flashinfer.fast_decode_plan, wrapper)  # type: ignore[method-assign]  # as SGLang does
    wrapper.plan = wrapper.begin_forward  # type: ignore[method-assign]
    wrapper.plan(indptr, indices, last, *batch.shape, batch.page_size, sm_scale=0.2)
    check(wrapper.run(batch.q, batch.cache), batch.expected(causal=True, sm_scale=0.2))
    del wrapper.plan
    smaller = make_batch([1], [4], device=device)
    with pytest.raises(ValueError, match=r"batch_size is 1, must be 5, that of the buffers"):
        wrapper.plan(*smaller.tables(), *smaller.shape, 5)
    with pytest.raises(ValueError, match=r"must be those of its first plan"):
        wrapper.plan(*batch.tables(), *batch.shape, batch.page_size, pos_encoding_mode="ALIBI")


@pytest.mark.gpu
def test_a_captured_run_serves_later_plans() -> None:
    buffers = [torch.zeros(size, dtype=torch.int32, device="cuda") for size in (6, 100, 5)]
    wrapper = flashinfer.CUDAGraphBatchDecodeWithPagedKVCacheWrapper(workspace("cuda"), *buffers)
    first, second = (make_batch([1] * 5, lens, device="cuda") for lens in (KV_LENS, [40, 2, 2, 9, 11]))
    q, cache = first.q.clone(), torch.zeros(100, *first.cache.shape[1:], dtype=torch.float16, device="cuda")
    wrapper.plan(*first.tables(), *first.shape, first.page_size)
    wrapper.run(q, cache)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = wrapper.run(q, cache)
    for batch in (first, second):
        wrapper.plan(*batch.tables(), *batch.shape, batch.page_size)
        q.copy_(batch.q)
        cache[: len(batch.cache)] = batch.cache
        graph.replay()
        check(out, batch.expected(causal=True))


def test_output_is_independent_of_the_batch() -> None:
    batch = make_batch([1] * 3, [3000, 5, 700], heads=(2, 1, 16), page_size=16)
    outputs = []
    for requests in (3, 1):
        wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(workspace("cpu"), use_tensor_cores=True)
        tables = (batch.page_indptr[: requests + 1], batch.page_indices, batch.last_page_len[:requests])
        wrapper.plan(*tables, *batch.shape, 16, fixed_split_size=8)
        outputs.append(wrapper.run(batch.q[:requests], batch.cache)[0])
    assert torch.equal(*outputs)


def test_views_of_a_cache_end_with_it() -> None:
    """Views are kept from run to run, but only for the same unchanged tensor."""
    cache = make_batch([1], [7]).cache
    views = arguments.paged_cache(cache, "NHD")
    assert arguments.paged_cache(cache, "NHD") is views
    assert arguments.paged_cache(cache, "HND") is not views
    assert arguments.paged_cache(cache.clone(), "NHD").k.data_ptr() != views.k.data_ptr()
    cache.resize_(1, 2, 5, 2, 64)
    assert arguments.paged_cache(cache, "NHD").num_pages == 1
    storage, kept = weakref.ref(cache.untyped_storage()), weakref.ref(arguments.paged_cache(cache, "NHD"))
    assert kept() is not None
    del cache, views
    assert storage() is None
    assert kept() is None


def test_fast_plan_has_every_option() -> None:
    batch = make_batch([1] * 3, [40, 7, 100])
    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(workspace("cpu"))
    options = {
        "pos_encoding_mode": "ROPE_LLAMA",
        "rope_scale": 2.0,
        "rope_theta": 5e3,
        "window_left": 20,
        "logits_soft_cap": 3.0,
        "sm_scale": 0.2,
    }
    flashinfer.fast_decode_plan(wrapper, *batch.tables(), *batch.shape, 5, **options)  # type: ignore[arg-type]
    check(
        wrapper.run(batch.q, batch.cache),
        batch.expected(causal=True, rope=(2.0, 5e3), window_left=20, soft_cap=3.0, sm_scale=0.2),
    )


@pytest.mark.parametrize("device", DEVICES)
def test_scales_of_requests(device: str) -> None:
    """In a plan, and in runs of a plan without scales; also with a soft cap, which applies to scaled
    logits."""
    batch = make_batch([1] * 3, [40, 7, 100], device=device)
    scales = torch.tensor([0.05, 0.3, 0.11], device=device)
    expected = [batch.expected(sm_scale=float(scale), soft_cap=2.0) for scale in scales]
    of_each = tuple(
        torch.cat([parts[which][i : i + 1] for i, parts in enumerate(expected)]) for which in (0, 1)
    )
    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(workspace(device))
    wrapper.plan(*batch.tables(), *batch.shape, 5, sm_scale=scales, logits_soft_cap=2.0)
    check(wrapper.run(batch.q, batch.cache, return_lse=True), of_each)
    check(
        wrapper.run(
            batch.q, batch.cache, k_scale=torch.tensor(2.0, device=device), q_scale=0.5, return_lse=True
        ),
        of_each,
    )
    wrapper.plan(*batch.tables(), *batch.shape, 5, sm_scale=0.2)
    check(wrapper.run(batch.q, batch.cache), batch.expected(sm_scale=0.2))
    if device == "cuda":  # on a CPU it is a number
        check(
            wrapper.run(batch.q, batch.cache, k_scale=torch.tensor([0.5], device=device)),
            batch.expected(sm_scale=0.1),
        )


BATCH = make_batch([1] * 2, [4, 6])
WRAPPER = flashinfer.BatchDecodeWithPagedKVCacheWrapper(workspace("cpu"))
WRAPPER.plan(*BATCH.tables(), *BATCH.shape, 5)


def plan(**options: object) -> None:
    flashinfer.BatchDecodeWithPagedKVCacheWrapper(workspace("cpu")).plan(
        *BATCH.tables(), *BATCH.shape, 5, **options
    )  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("error", "call", "message"),
    [
        (
            ValueError,
            lambda: WRAPPER.run(BATCH.q[:1], BATCH.cache),
            "q.shape.0. is 1, must be batch_size . q_len_per_req",
        ),
        (
            ValueError,
            lambda: WRAPPER.run(BATCH.q, BATCH.cache, window_left=3),
            "window_left is 3, must be -1",
        ),
        (ValueError, lambda: WRAPPER.run(BATCH.q, BATCH.cache[:, 0]), "paged_kv_cache is"),
        (ValueError, lambda: WRAPPER.run(BATCH.q.bfloat16(), BATCH.cache), "q.dtype is bfloat16"),
        (
            ValueError,
            lambda: flashinfer.BatchDecodeWithPagedKVCacheWrapper(workspace("cpu")).run(BATCH.q, BATCH.cache),
            "before a successful plan",
        ),
        (
            ValueError,
            lambda: flashinfer.BatchDecodeWithPagedKVCacheWrapper(workspace("cpu"), "DHN"),
            "kv_layout is 'DHN'",
        ),
        (
            ValueError,
            lambda: flashinfer.BatchDecodeWithPagedKVCacheWrapper(workspace("cpu"), use_cuda_graph=True),
            "paged_kv_indptr_buffer is None",
        ),
        (ValueError, lambda: plan(q_data_type="float17"), "q_data_type is 'float17'"),
        (ValueError, lambda: plan(q_len_per_req=2), "q_len_per_req is 2, must be 1 without use_tensor_cores"),
        (ValueError, lambda: plan(pos_encoding_mode="ROPE"), "pos_encoding_mode is 'ROPE'"),
        (NotImplementedError, lambda: plan(kv_data_type=torch.int8), "kv_data_type = torch.int8"),
        (NotImplementedError, lambda: plan(window_right=1), "window_right = 1"),
        (
            NotImplementedError,
            lambda: WRAPPER.run(BATCH.q, BATCH.cache.to(torch.int8)),
            "a KV-cache of torch.int8",
        ),
        (
            NotImplementedError,
            lambda: WRAPPER.run(BATCH.q, BATCH.cache, kv_cache_sf=BATCH.cache),
            "the argument kv_cache_sf",
        ),
        (
            NotImplementedError,
            lambda: WRAPPER.run(BATCH.q, BATCH.cache, k_scale=torch.ones(2)),
            r"k_scale as a tensor of shape \[2\]",
        ),
        (
            NotImplementedError,
            lambda: flashinfer.BatchDecodeWithPagedKVCacheWrapper(workspace("cpu"), backend="trtllm-gen"),
            "backend = 'trtllm-gen'",
        ),
    ],
)
def test_refusals(error: type[Exception], call: object, message: str) -> None:
    with pytest.raises(error, match=message):
        call()  # type: ignore[operator]
