"""8-bit K and V under 16-bit queries, with scales, against float64."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from flashinfer_oracle import DEVICES, Batch, check, make_batch, workspace

from attn_backend import flashinfer

DTYPES = [torch.float8_e4m3fn, torch.float8_e5m2]
SCALES = {"k_scale": 0.5, "v_scale": 0.25}


def make_float8(q_lens: list[int], kv_lens: list[int], dtype: torch.dtype, device: str, q_dtype: torch.dtype = torch.float16) -> tuple[Batch, Batch]:
    """The batch with K and V of 8 bits; with what these stand for, for expected()."""
    batch = make_batch(q_lens, kv_lens, dtype=q_dtype, device=device)
    k, v, cache = (x.float().clamp(-400, 400).to(dtype) for x in (batch.k, batch.v, batch.cache))
    return replace(batch, k=k, v=v, cache=cache), replace(batch, k=k.double() * SCALES["k_scale"], v=v.double() * SCALES["v_scale"])


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kv_layout", ["NHD", "HND"])
def test_decode(device: str, dtype: torch.dtype, kv_layout: str) -> None:
    batch, meaning = make_float8([1] * 5, [7, 1, 33, 0, 20], dtype, device)
    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(workspace(device), kv_layout)
    wrapper.plan(*batch.tables(), *batch.shape, batch.page_size, q_data_type=torch.float16, kv_data_type=dtype)
    check(wrapper.run(batch.q, batch.paged(kv_layout), return_lse=True, **SCALES), meaning.expected(causal=True))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("q_dtype", [torch.float16, torch.bfloat16], ids=str)
def test_prefill(device: str, dtype: torch.dtype, q_dtype: torch.dtype) -> None:
    batch, meaning = make_float8([5, 1, 40, 3], [7, 1, 63, 20], dtype, device, q_dtype)
    expected, tolerance = meaning.expected(causal=True), 2e-3 if q_dtype == torch.float16 else 2e-2
    paged = flashinfer.BatchPrefillWithPagedKVCacheWrapper(workspace(device))
    paged.plan(batch.qo_indptr, *batch.tables(), *batch.shape, batch.page_size, causal=True, q_data_type=q_dtype, kv_data_type=dtype)
    check(paged.run(batch.q, batch.cache, return_lse=True, **SCALES), expected, tolerance)
    ragged = flashinfer.BatchPrefillWithRaggedKVCacheWrapper(workspace(device))
    ragged.plan(batch.qo_indptr, batch.kv_indptr, *batch.shape, causal=True, q_data_type=q_dtype, kv_data_type=dtype)
    check(ragged.run(batch.q, batch.k, batch.v, return_lse=True, **SCALES), expected, tolerance)


@pytest.mark.parametrize("device", DEVICES)
def test_single(device: str) -> None:
    batch, meaning = make_float8([6], [37], DTYPES[0], device)
    found = flashinfer.single_prefill_with_kv_cache(batch.q, batch.k, batch.v, causal=True, return_lse=True)
    unscaled = replace(meaning, k=batch.k.double(), v=batch.v.double())
    check(found, unscaled.expected(causal=True))
    one = flashinfer.single_decode_with_kv_cache(batch.q[5], batch.k, batch.v, return_lse=True, **SCALES)
    check((one[0].unsqueeze(0), one[1].unsqueeze(0)), tuple(x[5:] for x in meaning.expected(causal=True)))


@pytest.mark.parametrize("device", DEVICES)
def test_append(device: str) -> None:
    """Of 16 bits: rounded; of 8: copied."""
    batch, _ = make_float8([3, 2], [7, 12], DTYPES[0], device)
    seq_lens = flashinfer.get_seq_lens(batch.page_indptr, batch.last_page_len, batch.page_size)
    requests, positions = flashinfer.get_batch_indices_positions(batch.qo_indptr, seq_lens, 5)
    k, v = (torch.randn(5, 2, 64, device=device).half() for _ in range(2))
    for dtype in (torch.float16, DTYPES[0]):
        cache = torch.zeros_like(batch.cache)
        flashinfer.append_paged_kv_cache(k.to(dtype), v.to(dtype), requests, positions, cache, batch.page_indices, batch.page_indptr, batch.last_page_len)
        for token, (request, position) in enumerate(zip(requests.tolist(), positions.tolist(), strict=True)):
            page = int(batch.page_indices[int(batch.page_indptr[request]) + position // batch.page_size])
            at = cache[page, :, position % batch.page_size].float()
            assert torch.equal(at, torch.stack([k[token], v[token]]).to(DTYPES[0]).float())


def test_rope_copies_the_cache() -> None:
    batch, meaning = make_float8([1, 1], [7, 30], DTYPES[0], "cpu")
    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(workspace("cpu"))
    with pytest.warns(UserWarning, match="each run copies all of them to torch.float16"):
        wrapper.plan(*batch.tables(), *batch.shape, batch.page_size, pos_encoding_mode="ROPE_LLAMA", kv_data_type=DTYPES[0], rope_theta=5e3)
    check(wrapper.run(batch.q, batch.cache, return_lse=True, **SCALES), meaning.expected(causal=True, rope=(1.0, 5e3)))


def test_scales_that_kernels_do_not_take() -> None:
    """Negative ones, and a tensor on the host of a cache of 16 bits."""
    batch, meaning = make_float8([1, 1], [7, 30], DTYPES[0], "cpu")
    o, lse = meaning.expected(causal=True)
    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(workspace("cpu"))
    wrapper.plan(*batch.tables(), *batch.shape, batch.page_size, kv_data_type=DTYPES[0])
    check(wrapper.run(batch.q, batch.cache, k_scale=0.5, v_scale=-0.25, return_lse=True), (-o, lse))
    plain = make_batch([1, 1], [7, 30])
    wrapper.plan(*plain.tables(), *plain.shape, plain.page_size)
    check(wrapper.run(plain.q, plain.cache, v_scale=torch.tensor([0.5])), (plain.expected(causal=True)[0] / 2, lse))


def test_what_there_is_not() -> None:
    batch, _ = make_float8([1], [7], DTYPES[0], "cpu")
    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(workspace("cpu"))
    for options, message in (
        ({"q_data_type": DTYPES[0]}, "q_data_type = torch.float8_e4m3fn"),
        ({"q_data_type": torch.float16, "o_data_type": DTYPES[0]}, "o_data_type = torch.float8_e4m3fn"),
    ):
        with pytest.raises(NotImplementedError, match=message):
            wrapper.plan(*batch.tables(), *batch.shape, batch.page_size, kv_data_type=DTYPES[0], **options)
