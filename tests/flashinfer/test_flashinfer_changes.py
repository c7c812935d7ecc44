"""Differences between two runs of one plan are detected, although layers repeat every step and views of their
K and V are cached.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
import torch
from flashinfer_oracle import Batch, check, make_batch, workspace
from torch import Tensor

from attn_backend import flashinfer
from attn_backend.flashinfer import arguments

# for K and V: two of a cache's dimensions may be exchanged without changing its shape
PAGE_SIZE = HEADS = 2


def decodes() -> Batch:
    return make_batch([1] * 3, [7, 1, 12], heads=(4, HEADS, 64), page_size=PAGE_SIZE)


def planned(
    batch: Batch, kv_layout: str = "NHD", **options: Any
) -> flashinfer.BatchDecodeWithPagedKVCacheWrapper:
    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(workspace("cpu"), kv_layout)
    wrapper.plan(*batch.tables(), *batch.shape, PAGE_SIZE, **options)
    return wrapper


def exchange(tensor: Tensor) -> None:
    tensor.transpose_(-3, -2)  # other strides, nothing else


def move(tensor: Tensor) -> None:
    tensor.data = tensor.flip(0)


def move_storage(tensor: Tensor) -> None:
    tensor.set_(tensor.flip(0))


def write(tensor: Tensor) -> None:
    tensor.mul_(0.5)


@pytest.mark.parametrize("change", [exchange, move, move_storage, write])
@pytest.mark.parametrize("kv_layout", ["NHD", "HND"])
@pytest.mark.parametrize("form", ["one", "k", "v"])
def test_a_cache_that_changes_in_place(change: Callable[[Tensor], None], kv_layout: str, form: str) -> None:
    batch = decodes()
    wrapper = planned(batch, kv_layout)
    cache = batch.cache if form == "one" else tuple(part.clone() for part in batch.cache.unbind(1))
    copied = cache.clone() if isinstance(cache, Tensor) else tuple(part.clone() for part in cache)
    before = wrapper.run(batch.q, cache)
    assert torch.equal(wrapper.run(batch.q, cache), before)
    for parts in (cache, copied):
        change(parts if isinstance(parts, Tensor) else parts["kv".index(form)])
    found = wrapper.run(batch.q, cache)
    assert torch.equal(found, planned(batch, kv_layout).run(batch.q, copied))
    assert not torch.equal(found, before)


@pytest.mark.parametrize("form", ["one", "k", "v"])
def test_a_cache_of_another_dtype(form: str) -> None:
    batch = decodes()
    wrapper = planned(batch)
    cache = batch.cache if form == "one" else tuple(batch.cache.unbind(1))
    wrapper.run(batch.q, cache)
    changed = cache if isinstance(cache, Tensor) else cache["kv".index(form)]
    changed.data = changed.view(torch.bfloat16)  # at the same place
    with pytest.raises(
        ValueError, match=rf"^kv\.{'v' if form == 'v' else 'k'}.dtype is bfloat16, must be float16"
    ):
        wrapper.run(batch.q, cache)


def test_caches_that_take_turns() -> None:
    """The caches of several layers, some sharing one of two tensors; (k, v) is always a new tuple."""
    batch = decodes()
    wrapper, (k, v) = planned(batch), batch.cache.unbind(1)
    other = v * 0.5
    for _ in range(2):
        for cache in ((k, v), (k, other), (v, other), batch.cache, (other, k)):
            copied = cache.clone() if isinstance(cache, Tensor) else (cache[0].clone(), cache[1].clone())
            assert torch.equal(wrapper.run(batch.q, cache), planned(batch).run(batch.q, copied))


def test_views_end_with_either_tensor() -> None:
    k, v = torch.zeros(3, PAGE_SIZE, HEADS, 64), torch.zeros(3, PAGE_SIZE, HEADS, 64)
    views = arguments.paged_cache((k, v), "NHD")
    assert arguments.paged_cache((k, v), "NHD") is views
    kept = weakref.ref(views)
    del v, views
    assert kept() is None
    kept = weakref.ref(arguments.paged_cache((k, torch.ones_like(k)), "NHD"))
    assert kept() is None


FLOAT8: dict[str, Any] = {"kv_data_type": torch.float8_e4m3fn}
NUMBERS: list[dict[str, Any]] = [
    {},
    {"q_scale": 0.5},
    {"q_scale": 0.5, "k_scale": 3.0},
    {"q_scale": 1.5, "k_scale": 1.5},
    {"k_scale": 0.5},
]
TENSORS: list[dict[str, Any]] = [
    {"k_scale": torch.tensor([0.5, 2.0])},
    {"k_scale": torch.tensor([3.0, 1.0]), "v_scale": torch.tensor([2.0, 0.5])},
]


@pytest.mark.parametrize(
    ("options", "given"),
    [
        ({}, [*NUMBERS, {"v_scale": 0.5}, {"v_scale": 2.0}]),
        (FLOAT8, [*NUMBERS, {"v_scale": 0.5}, {"v_scale": 2.0, "k_scale": 0.5}, {}, *TENSORS, {}]),
        ({"sm_scale": 0.3}, NUMBERS),
        ({"sm_scale": torch.tensor([0.1, 0.2, 0.7])}, NUMBERS),
    ],
)
def test_scales_of_runs(options: dict[str, Any], given: list[dict[str, Any]]) -> None:
    batch = decodes()
    cache = batch.cache.to(torch.float8_e4m3fn) if options is FLOAT8 else batch.cache
    wrapper = planned(batch, **options)
    found = [wrapper.run(batch.q, cache, **scales) for scales in given]
    for scales, output in zip(given, found, strict=True):
        assert torch.equal(output, planned(batch, **options).run(batch.q, cache.clone(), **scales))
    products = [
        scales.get("q_scale", 1.0) * scales.get("k_scale", 1.0)
        for scales in given
        if not any(isinstance(s, Tensor) for s in scales.values())
    ]
    assert len(set(products)) > 3  # factors with distinct products
    for (one, before), (other, after) in pairwise(zip(given, found, strict=True)):
        assert one == other or not torch.equal(before, after)


@pytest.mark.parametrize("options", [FLOAT8, {"sm_scale": torch.tensor([0.1, 0.2, 0.7])}])
def test_scales_that_change_in_place(options: dict[str, Any]) -> None:
    batch = decodes()
    cache = batch.cache.to(torch.float8_e4m3fn) if options is FLOAT8 else batch.cache
    scale = options["sm_scale"].clone() if "sm_scale" in options else torch.tensor([0.5, 2.0])
    wrapper = planned(batch, **(options | ({"sm_scale": scale} if "sm_scale" in options else {})))
    given = {} if "sm_scale" in options else {"k_scale": scale, "v_scale": scale}
    before = wrapper.run(batch.q, cache, **given)
    scale.mul_(0.5)
    after = wrapper.run(batch.q, cache, **given)
    assert not torch.equal(before, after)
    copied = {name: scale.clone() for name in given}
    fresh = planned(batch, **(options | ({"sm_scale": scale.clone()} if "sm_scale" in options else {})))
    assert torch.equal(after, fresh.run(batch.q, cache.clone(), **copied))


@pytest.mark.parametrize(("page_size", "heads"), [(1, 2), (3, 1), (1, 1)])
def test_refuses_a_head_dim_that_is_not_contiguous(page_size: int, heads: int) -> None:
    """Also where a dimension has one element."""
    batch = make_batch([1] * 2, [7, 5], heads=(4, heads, 64), page_size=page_size)
    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(workspace("cpu"))
    wrapper.plan(*batch.tables(), *batch.shape, page_size)
    wide = torch.zeros(*batch.cache.shape[:4], 128, dtype=torch.float16)
    for cache in (wide[..., ::2], tuple(wide[..., ::2].unbind(1))):
        with pytest.raises(ValueError, match=r"^kv\.k\.stride\(3\) is 2, must be 1"):
            wrapper.run(batch.q, cache)
    ragged = flashinfer.BatchPrefillWithRaggedKVCacheWrapper(workspace("cpu"))
    ragged.plan(batch.qo_indptr, batch.kv_indptr, *batch.shape)
    rows = torch.zeros(*batch.k.shape[:2], 128, dtype=torch.float16)[..., ::2]
    with pytest.raises(ValueError, match=r"^kv\.k\.stride\(3\) is 2, must be 1"):
        ragged.run(batch.q, rows, rows)


@pytest.mark.parametrize("heads", [1, 2])
@pytest.mark.parametrize("kv_len", [1, 7])
@pytest.mark.parametrize("kv_layout", ["NHD", "HND"])
def test_strides_of_ragged_keys(heads: int, kv_len: int, kv_layout: str) -> None:
    """Slices of a wider tensor; dimensions of one element may have any stride."""
    batch = make_batch([1], [kv_len], heads=(4, heads, 64))
    k, v = (torch.cat((part, part, part), 1)[:, :heads] for part in (batch.k, batch.v))
    strides = tuple(stride if size > 1 else 5 for size, stride in zip(k.shape, k.stride(), strict=True))
    k, v = k.as_strided(k.shape, strides), v.as_strided(v.shape, strides)
    cache = arguments.ragged_cache(k, v)
    assert cache.k.stride() == arguments.KVCache.from_ragged(k, v).k.stride()
    if kv_layout == "HND":
        k, v = k.transpose(0, 1), v.transpose(0, 1)
    check(
        flashinfer.single_prefill_with_kv_cache(
            batch.q, k, v, kv_layout=kv_layout, causal=True, return_lse=True
        ),
        batch.expected(causal=True),
    )
