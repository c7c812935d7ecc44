"""FlashInfer's wrappers over caches with the other 16-bit type than Q."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from flashinfer_oracle import DEVICES, Batch, check, make_batch, workspace
from mixed_cases import MIXTURES

from attn_backend import flashinfer

TOLERANCE = 2e-2
PAIRS = pytest.mark.parametrize("dtypes", MIXTURES, ids=str)


def make_mixed(
    q_lens: list[int], kv_lens: list[int], dtypes: tuple[torch.dtype, torch.dtype], device: str
) -> Batch:
    """Q is rounded to values that both types have."""
    batch = make_batch(q_lens, kv_lens, dtype=torch.bfloat16, device=device)
    return replace(
        batch,
        q=batch.q.to(dtypes[0]),
        **{name: getattr(batch, name).to(dtypes[1]) for name in ("k", "v", "cache")},
    )


@PAIRS
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("kv_layout", ["NHD", "HND"])
def test_decode(device: str, dtypes: tuple[torch.dtype, torch.dtype], kv_layout: str) -> None:
    batch = make_mixed([1] * 5, [7, 1, 33, 0, 20], dtypes, device)
    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(workspace(device), kv_layout)
    wrapper.plan(
        *batch.tables(), *batch.shape, batch.page_size, q_data_type=dtypes[0], kv_data_type=dtypes[1]
    )
    found = wrapper.run(batch.q, batch.paged(kv_layout), return_lse=True)
    assert found[0].dtype == dtypes[0]
    check(found, batch.expected(causal=True), TOLERANCE)
    doubled = wrapper.run(batch.q, batch.paged(kv_layout), v_scale=2.0)
    torch.testing.assert_close(doubled.float(), found[0].float() * 2, rtol=1e-2, atol=1e-3)


@PAIRS
@pytest.mark.parametrize("device", DEVICES)
def test_prefill(device: str, dtypes: tuple[torch.dtype, torch.dtype]) -> None:
    batch = make_mixed([5, 1, 40, 3], [7, 1, 63, 20], dtypes, device)
    expected = batch.expected(causal=True)
    paged = flashinfer.BatchPrefillWithPagedKVCacheWrapper(workspace(device))
    paged.plan(
        batch.qo_indptr,
        *batch.tables(),
        *batch.shape,
        batch.page_size,
        causal=True,
        q_data_type=dtypes[0],
        kv_data_type=dtypes[1],
    )
    check(paged.run(batch.q, batch.cache, return_lse=True), expected, TOLERANCE)
    ragged = flashinfer.BatchPrefillWithRaggedKVCacheWrapper(workspace(device))
    ragged.plan(
        batch.qo_indptr,
        batch.kv_indptr,
        *batch.shape,
        causal=True,
        q_data_type=dtypes[0],
        kv_data_type=dtypes[1],
    )
    check(ragged.run(batch.q, batch.k, batch.v, return_lse=True), expected, TOLERANCE)
    one = make_mixed([6], [37], dtypes, device)
    check(
        flashinfer.single_prefill_with_kv_cache(one.q, one.k, one.v, causal=True, return_lse=True),
        one.expected(causal=True),
        TOLERANCE,
    )


def test_refuses() -> None:
    batch = make_mixed([1], [9], MIXTURES[0], "cpu")
    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(workspace("cpu"))
    with pytest.raises(
        NotImplementedError, match=r"kv_data_type = torch.float16 with q_data_type = torch.float32"
    ):
        wrapper.plan(
            *batch.tables(),
            *batch.shape,
            batch.page_size,
            q_data_type=torch.float32,
            kv_data_type=torch.float16,
        )
    with pytest.raises(
        NotImplementedError, match=r"o_data_type = torch.bfloat16 with q_data_type = torch.float16"
    ):
        wrapper.plan(
            *batch.tables(),
            *batch.shape,
            batch.page_size,
            q_data_type="float16",
            kv_data_type="bfloat16",
            o_data_type="bfloat16",
        )
    wrapper.plan(
        *batch.tables(), *batch.shape, batch.page_size, q_data_type="float16", kv_data_type="bfloat16"
    )
    with pytest.raises(ValueError, match=r"dtype"):
        wrapper.run(batch.q, batch.cache.half())
