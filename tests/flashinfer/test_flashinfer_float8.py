"""8-bit K and V with 16-bit and 8-bit queries and scales, compared with float64."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from flashinfer_oracle import DEVICES, Batch, check, make_batch, workspace
from torch import Tensor

from attn_backend import flashinfer

DTYPES = [torch.float8_e4m3fn, torch.float8_e5m2]
SCALES = {"k_scale": 0.5, "v_scale": 0.25}


def make_float8(
    q_lens: list[int],
    kv_lens: list[int],
    dtype: torch.dtype,
    device: str,
    q_dtype: torch.dtype = torch.float16,
) -> tuple[Batch, Batch]:
    """The batch with 8-bit K and V, and with the values that they represent, for expected()."""
    batch = make_batch(q_lens, kv_lens, dtype=q_dtype, device=device)
    k, v, cache = (x.float().clamp(-400, 400).to(dtype) for x in (batch.k, batch.v, batch.cache))
    return replace(batch, k=k, v=v, cache=cache), replace(
        batch, k=k.double() * SCALES["k_scale"], v=v.double() * SCALES["v_scale"]
    )


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kv_layout", ["NHD", "HND"])
def test_decode(device: str, dtype: torch.dtype, kv_layout: str) -> None:
    batch, meaning = make_float8([1] * 5, [7, 1, 33, 0, 20], dtype, device)
    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(workspace(device), kv_layout)
    wrapper.plan(
        *batch.tables(), *batch.shape, batch.page_size, q_data_type=torch.float16, kv_data_type=dtype
    )
    check(
        wrapper.run(batch.q, batch.paged(kv_layout), return_lse=True, **SCALES), meaning.expected(causal=True)
    )


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("q_dtype", [torch.float16, torch.bfloat16], ids=str)
def test_prefill(device: str, dtype: torch.dtype, q_dtype: torch.dtype) -> None:
    batch, meaning = make_float8([5, 1, 40, 3], [7, 1, 63, 20], dtype, device, q_dtype)
    expected, tolerance = meaning.expected(causal=True), 2e-3 if q_dtype == torch.float16 else 2e-2
    paged = flashinfer.BatchPrefillWithPagedKVCacheWrapper(workspace(device))
    paged.plan(
        batch.qo_indptr,
        *batch.tables(),
        *batch.shape,
        batch.page_size,
        causal=True,
        q_data_type=q_dtype,
        kv_data_type=dtype,
    )
    check(paged.run(batch.q, batch.cache, return_lse=True, **SCALES), expected, tolerance)
    ragged = flashinfer.BatchPrefillWithRaggedKVCacheWrapper(workspace(device))
    ragged.plan(
        batch.qo_indptr, batch.kv_indptr, *batch.shape, causal=True, q_data_type=q_dtype, kv_data_type=dtype
    )
    check(ragged.run(batch.q, batch.k, batch.v, return_lse=True, **SCALES), expected, tolerance)


@pytest.mark.parametrize("device", DEVICES)
def test_single(device: str) -> None:
    batch, meaning = make_float8([6], [37], DTYPES[0], device)
    found = flashinfer.single_prefill_with_kv_cache(batch.q, batch.k, batch.v, causal=True, return_lse=True)
    unscaled = replace(meaning, k=batch.k.double(), v=batch.v.double())
    check(found, unscaled.expected(causal=True))
    one = flashinfer.single_decode_with_kv_cache(batch.q[5], batch.k, batch.v, return_lse=True, **SCALES)
    check((one[0].unsqueeze(0), one[1].unsqueeze(0)), tuple(x[5:] for x in meaning.expected(causal=True)))


FLOAT8_Q_SCALES = {
    "of all": (torch.tensor([0.5]), torch.tensor([0.25]), torch.tensor([2.0])),
    "of KV heads": (torch.tensor([0.5, 1.5]), torch.tensor([0.25, 0.75]), torch.tensor([2.0, 0.5])),
    "of query heads": (
        torch.tensor([0.5, 1.5, 0.125, 0.75]),
        torch.tensor([0.25, 0.75]),
        torch.tensor([2.0, 0.5]),
    ),
    "numbers": (0.5, 0.25, 2.0),
}


def make_float8_q(
    q_lens: list[int], kv_lens: list[int], dtype: torch.dtype, device: str, form: str
) -> tuple[Batch, Batch, tuple[Tensor | float, ...]]:
    """Like make_float8(), with 8-bit Q and scales of Q, K and V."""
    batch, _ = make_float8(q_lens, kv_lens, dtype, device)
    batch = replace(batch, q=batch.q.to(dtype))
    scales = tuple(
        scale.to(device) if isinstance(scale, Tensor) else scale for scale in FLOAT8_Q_SCALES[form]
    )

    def meaning(x: Tensor, scale: Tensor | float) -> Tensor:
        factor = torch.as_tensor(scale).double().cpu().reshape(-1)
        return x.cpu().double() * factor.repeat_interleave(x.shape[1] // len(factor))[:, None]

    meant = {name: meaning(getattr(batch, name), scale) for name, scale in zip("qkv", scales, strict=True)}
    return batch, replace(batch, **meant), scales


def close(found: Tensor | tuple[Tensor, Tensor], expected: tuple[Tensor, Tensor], device: str) -> None:
    """Kernels of a GPU may round probabilities to 8 bits."""
    assert (found[0] if isinstance(found, tuple) else found).dtype == torch.float16
    check(found, expected, 2e-3 if device == "cpu" else 1e-1)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("form", FLOAT8_Q_SCALES)
def test_float8_queries(device: str, dtype: torch.dtype, form: str) -> None:
    """For every wrapper with a choice of output type; scales by position after K and V, and by name."""
    batch, meaning, scales = make_float8_q([5, 1, 40, 3], [7, 1, 63, 20], dtype, device, form)
    types = {"q_data_type": dtype, "kv_data_type": dtype, "o_data_type": "float16"}
    expected = meaning.expected(causal=True)
    paged = flashinfer.BatchPrefillWithPagedKVCacheWrapper(workspace(device))
    paged.plan(batch.qo_indptr, *batch.tables(), *batch.shape, batch.page_size, causal=True, **types)  # type: ignore[arg-type]
    close(paged.run(batch.q, batch.cache, *scales, return_lse=True), expected, device)
    named = dict(zip(("q_scale", "k_scale", "v_scale"), scales, strict=True))
    close(paged.run(batch.q, batch.cache, **named, return_lse=True), expected, device)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"scale_k is .*, must be None with k_scale"):
        paged.run(batch.q, batch.cache, *scales, k_scale=0.5)
    ragged = flashinfer.BatchPrefillWithRaggedKVCacheWrapper(workspace(device))
    ragged.plan(batch.qo_indptr, batch.kv_indptr, *batch.shape, causal=True, **types)  # type: ignore[arg-type]
    close(ragged.run(batch.q, batch.k, batch.v, *scales, return_lse=True), expected, device)

    batch, meaning, scales = make_float8_q([1] * 5, [7, 1, 33, 0, 20], dtype, device, form)
    decode = flashinfer.BatchDecodeWithPagedKVCacheWrapper(workspace(device))
    decode.plan(*batch.tables(), *batch.shape, batch.page_size, logits_soft_cap=3.0, **types)  # type: ignore[arg-type]
    close(
        decode.run(batch.q, batch.cache, *scales, return_lse=True),
        meaning.expected(causal=True, soft_cap=3.0),
        device,
    )

    batch, meaning, scales = make_float8_q([6], [37], dtype, device, form)
    found = flashinfer.single_prefill_with_kv_cache(
        batch.q, batch.k, batch.v, *scales, torch.float16, causal=True, return_lse=True
    )  # type: ignore[arg-type]
    close(found, meaning.expected(causal=True), device)


@pytest.mark.parametrize("device", DEVICES)
def test_float8_queries_of_sparse_blocks(device: str) -> None:
    batch, meaning, scales = make_float8_q([8], [40], DTYPES[0], device, "of KV heads")
    sparse = flashinfer.BlockSparseAttentionWrapper(workspace(device))
    blocks = (
        torch.tensor([0, 2, 3], dtype=torch.int32, device=device),
        torch.tensor([1, 3, 0], dtype=torch.int32, device=device),
    )
    sparse.plan(*blocks, 8, 40, 4, 10, *batch.shape, q_data_type=DTYPES[0])
    mask = torch.zeros(8, 40, dtype=torch.bool)
    mask[:4, 10:20] = mask[:4, 30:] = mask[4:, :10] = True
    close(
        sparse.run(batch.q, batch.k, batch.v, *scales, return_lse=True),
        meaning.expected(masks=[mask]),
        device,
    )  # type: ignore[arg-type]


@pytest.mark.parametrize("device", DEVICES)
def test_float8_queries_under_rope(device: str) -> None:
    batch, meaning, scales = make_float8_q([1, 1], [7, 30], DTYPES[0], device, "of KV heads")
    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(workspace(device))
    wrapper.plan(
        *batch.tables(),
        *batch.shape,
        batch.page_size,
        "ROPE_LLAMA",
        q_data_type=DTYPES[0],
        kv_data_type=DTYPES[0],
        o_data_type="bfloat16",
        rope_theta=5e3,
    )
    o, lse = meaning.expected(causal=True, rope=(1.0, 5e3))
    o = o / torch.tensor([2.0, 2.0, 0.5, 0.5])[:, None]  # without the scale of V
    check(wrapper.run(batch.q, batch.cache, *scales[:2], 1.0, return_lse=True), (o, lse), 3e-2)


@pytest.mark.parametrize("device", DEVICES)
def test_scales_of_heads_under_16_bit_queries(device: str) -> None:
    batch, _ = make_float8([5, 1], [7, 30], DTYPES[0], device)
    k_scale, v_scale = torch.tensor([0.5, 2.0], device=device), torch.tensor([0.25, 3.0], device=device)
    meaning = replace(batch, k=batch.k.double() * k_scale[:, None], v=batch.v.double() * v_scale[:, None])
    wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(workspace(device))
    wrapper.plan(
        batch.qo_indptr, *batch.tables(), *batch.shape, batch.page_size, causal=True, kv_data_type=DTYPES[0]
    )
    check(
        wrapper.run(batch.q, batch.cache, k_scale=k_scale, v_scale=v_scale, return_lse=True),
        meaning.expected(causal=True),
        4e-3,
    )
    for name in ("q_scale", "k_scale", "v_scale"):
        with pytest.raises(NotImplementedError, match=rf"{name} as a tensor of shape \[3\]"):
            wrapper.run(batch.q, batch.cache, **{name: torch.ones(3, device=device)})


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("kv_layout", ["NHD", "HND"])
@pytest.mark.parametrize("form", ["decode", "prefill"])
def test_a_scale_for_each_token_and_head(device: str, kv_layout: str, form: str) -> None:
    q_lens, kv_lens = ([1] * 4, [7, 1, 33, 20]) if form == "decode" else ([5, 1, 30, 3], [7, 1, 33, 20])
    batch, _ = make_float8(q_lens, kv_lens, DTYPES[0], device)
    pages, _, page_size, heads = batch.cache.shape[:4]
    scales = torch.rand(2, pages, page_size, heads, device=device) + 0.25
    k_sf, v_sf = (scales if kv_layout == "NHD" else scales.transpose(2, 3).contiguous()).unbind()
    table = [batch.page_indices[begin:end] for begin, end in pairwise(batch.page_indptr)]
    of_k, of_v = (
        torch.cat([x[p].flatten(0, 1)[:n] for p, n in zip(table, kv_lens, strict=True)]) for x in scales
    )
    meaning = replace(batch, k=batch.k.double() * of_k[..., None], v=batch.v.double() * of_v[..., None])
    wrapper: flashinfer.BatchDecodeWithPagedKVCacheWrapper | flashinfer.BatchPrefillWithPagedKVCacheWrapper
    options = {"q_data_type": torch.float16, "kv_data_type": DTYPES[0], "use_token_head_sf": True}
    if form == "decode":
        wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(workspace(device), kv_layout)
        wrapper.plan(*batch.tables(), *batch.shape, batch.page_size, **options)
    else:
        wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(workspace(device), kv_layout)
        wrapper.plan(batch.qo_indptr, *batch.tables(), *batch.shape, batch.page_size, causal=True, **options)
    paged, expected = batch.paged(kv_layout), meaning.expected(causal=True)
    check(wrapper.run(batch.q, paged, kv_cache_sf=(k_sf, v_sf), return_lse=True), expected)
    doubled = wrapper.run(batch.q, paged, kv_cache_sf=(k_sf, v_sf / 2), v_scale=2.0, return_lse=True)
    check(doubled, expected)
    halved = wrapper.run(batch.q, paged, kv_cache_sf=(k_sf * 2, v_sf), k_scale=0.5, return_lse=True)
    check(halved, expected)
    for wrong in (None, k_sf, (k_sf, None), (k_sf[0], v_sf[0])):
        with pytest.raises(ValueError, match=r"kv_cache_sf .*must be .*two float32 tensors .pages"):
            wrapper.run(batch.q, paged, kv_cache_sf=wrong)
    with pytest.raises(ValueError, match=r"scale.* must be .*float32"):
        wrapper.run(batch.q, paged, kv_cache_sf=(k_sf.half(), v_sf.half()))


@pytest.mark.parametrize("device", DEVICES)
def test_append(device: str) -> None:
    """16-bit values are rounded, 8-bit values are copied."""
    batch, _ = make_float8([3, 2], [7, 12], DTYPES[0], device)
    seq_lens = flashinfer.get_seq_lens(batch.page_indptr, batch.last_page_len, batch.page_size)
    requests, positions = flashinfer.get_batch_indices_positions(batch.qo_indptr, seq_lens, 5)
    k, v = (torch.randn(5, 2, 64, device=device).half() for _ in range(2))
    for dtype in (torch.float16, DTYPES[0]):
        cache = torch.zeros_like(batch.cache)
        flashinfer.append_paged_kv_cache(
            k.to(dtype),
            v.to(dtype),
            requests,
            positions,
            cache,
            batch.page_indices,
            batch.page_indptr,
            batch.last_page_len,
        )
        for token, (request, position) in enumerate(zip(requests.tolist(), positions.tolist(), strict=True)):
            page = int(batch.page_indices[int(batch.page_indptr[request]) + position // batch.page_size])
            at = cache[page, :, position % batch.page_size].float()
            assert torch.equal(at, torch.stack([k[token], v[token]]).to(DTYPES[0]).float())


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rope(device: str, dtype: torch.dtype) -> None:
    """Keys are rotated when they are read; one scale for all heads, and one per head."""
    batch, meaning = make_float8([1, 1], [7, 30], dtype, device)
    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(workspace(device))
    wrapper.plan(
        *batch.tables(),
        *batch.shape,
        batch.page_size,
        pos_encoding_mode="ROPE_LLAMA",
        kv_data_type=dtype,
        rope_theta=5e3,
    )
    expected = meaning.expected(causal=True, rope=(1.0, 5e3))
    check(wrapper.run(batch.q, batch.cache, return_lse=True, **SCALES), expected)
    of_heads = {name: torch.full((2,), scale, device=device) for name, scale in SCALES.items()}
    check(wrapper.run(batch.q, batch.cache, return_lse=True, **of_heads), expected)


@pytest.mark.parametrize("device", DEVICES)
def test_the_scale_of_outputs(device: str) -> None:
    """It multiplies 16-bit outputs, like the scale of V."""
    batch, meaning = make_float8([5, 1, 9], [7, 33, 20], DTYPES[0], device)
    o, lse = meaning.expected(causal=True)
    wrapper = flashinfer.BatchPrefillWithRaggedKVCacheWrapper(workspace(device))
    wrapper.plan(batch.qo_indptr, batch.kv_indptr, *batch.shape, causal=True, kv_data_type=DTYPES[0])
    check(
        wrapper.run(batch.q, batch.k, batch.v, o_scale=1.7, return_lse=True, **SCALES), (o * 1.7, lse), 4e-3
    )
    check(
        wrapper.run(batch.q, batch.k, batch.v, k_scale=0.5, o_scale=1.7, return_lse=True),
        (o * 1.7 / SCALES["v_scale"], lse),
        1e-2,
    )
    of_heads = {name: torch.full((2,), scale, device=device) for name, scale in SCALES.items()}
    check(
        wrapper.run(batch.q, batch.k, batch.v, o_scale=1.7, return_lse=True, **of_heads), (o * 1.7, lse), 4e-3
    )
    plain = make_batch([5, 1, 9], [7, 33, 20], device=device)
    o, lse = plain.expected(causal=True)
    wrapper.plan(plain.qo_indptr, plain.kv_indptr, *plain.shape, causal=True)
    check(
        wrapper.run(plain.q, plain.k, plain.v, v_scale=0.5, o_scale=1.7, return_lse=True),
        (o * 0.85, lse),
        4e-3,
    )
    wrapper.plan(plain.qo_indptr, plain.kv_indptr, *plain.shape, causal=True, o_data_type=DTYPES[0])
    assert torch.equal(
        *(wrapper.run(plain.q, plain.k, plain.v, o_scale=scale).view(torch.uint8) for scale in (None, 1.0))
    )  # type: ignore[union-attr]
    with pytest.raises(
        NotImplementedError, match=r"^o_scale with o_data_type = torch\.float8_e4m3fn is not supported"
    ):
        wrapper.run(plain.q, plain.k, plain.v, o_scale=1.7)


def test_scales_that_kernels_do_not_take() -> None:
    """Negative scales, and a host tensor for a 16-bit cache."""
    batch, meaning = make_float8([1, 1], [7, 30], DTYPES[0], "cpu")
    o, lse = meaning.expected(causal=True)
    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(workspace("cpu"))
    wrapper.plan(*batch.tables(), *batch.shape, batch.page_size, kv_data_type=DTYPES[0])
    check(wrapper.run(batch.q, batch.cache, k_scale=0.5, v_scale=-0.25, return_lse=True), (-o, lse))
    plain = make_batch([1, 1], [7, 30])
    wrapper.plan(*plain.tables(), *plain.shape, plain.page_size)
    check(
        wrapper.run(plain.q, plain.cache, v_scale=torch.tensor([0.5])),
        (plain.expected(causal=True)[0] / 2, lse),
    )


def test_what_there_is_not() -> None:
    batch, _ = make_float8([1], [7], DTYPES[0], "cpu")
    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(workspace("cpu"))
    for options, message in (
        # Q's, as in FlashInfer
        ({"q_data_type": DTYPES[1], "kv_data_type": DTYPES[1]}, "o_data_type = torch.float8_e5m2"),
        (
            {"q_data_type": DTYPES[1], "o_data_type": torch.float16},
            "kv_data_type = torch.float8_e4m3fn with q_data_type = torch.float8_e5m2",
        ),
        ({"q_data_type": torch.float16, "o_data_type": DTYPES[1]}, "o_data_type = torch.float8_e5m2"),
        (
            {"q_data_type": torch.float16, "o_data_type": torch.bfloat16},
            "o_data_type = torch.bfloat16 with q_data_type = torch.float16",
        ),
    ):
        with pytest.raises(NotImplementedError, match=message):
            wrapper.plan(
                *batch.tables(), *batch.shape, batch.page_size, **({"kv_data_type": DTYPES[0]} | options)
            )
    for error, types, message in (
        (ValueError, (torch.float16, torch.float16), "kv_data_type .*float8_e4m3fn with use_token_head_sf"),
        (ValueError, (DTYPES[0], DTYPES[0]), "q_data_type .*bfloat16 with use_token_head_sf"),
        (NotImplementedError, (torch.float16, DTYPES[1]), "use_token_head_sf with .*float8_e5m2"),
    ):
        with pytest.raises(error, match=message):
            wrapper.plan(
                *batch.tables(),
                *batch.shape,
                batch.page_size,
                q_data_type=types[0],
                kv_data_type=types[1],
                use_token_head_sf=True,
            )
