"""float8_e4m3fn outputs, the default for float8_e4m3fn queries, compared with float64."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from flashinfer_oracle import DEVICES, Batch, attention, make_batch, workspace
from float8_outputs import check_rounded
from torch import Tensor

from attn_backend import flashinfer

E4M3 = torch.float8_e4m3fn
Found = Tensor | tuple[Tensor, Tensor]


def of(q_lens: list[int], kv_lens: list[int], dtype: torch.dtype, device: str) -> Batch:
    batch = make_batch(q_lens, kv_lens, device=device)
    q, k, v, cache = (x.float().clamp(-400, 400).to(dtype) for x in (batch.q, batch.k, batch.v, batch.cache))
    return replace(batch, q=q, k=k, v=v, cache=cache)


def types(batch: Batch, default: bool) -> dict[str, Any]:
    """The types with which a plan asks for float8 outputs; only Q's type if float8 is then the default."""
    return {"q_data_type": batch.q.dtype, "kv_data_type": batch.k.dtype} | (
        {} if default else {"o_data_type": E4M3}
    )


def decode(batch: Batch, default: bool, **scales: Any) -> Found:
    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(workspace(batch.q.device.type))
    wrapper.plan(*batch.tables(), *batch.shape, batch.page_size, **types(batch, default))
    return wrapper.run(batch.q, batch.cache, return_lse=True, **scales)


def paged(batch: Batch, default: bool, **scales: Any) -> Found:
    wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(workspace(batch.q.device.type), "HND")
    wrapper.plan(
        batch.qo_indptr, *batch.tables(), *batch.shape, batch.page_size, causal=True, **types(batch, default)
    )
    return wrapper.run(batch.q, batch.paged("HND"), return_lse=True, **scales)


def ragged(batch: Batch, default: bool, **scales: Any) -> Found:
    """The first request does not begin at the first row, which belongs to no request."""
    wrapper = flashinfer.BatchPrefillWithRaggedKVCacheWrapper(workspace(batch.q.device.type))
    wrapper.plan(
        batch.qo_indptr.cpu() + 1, batch.kv_indptr.cpu(), *batch.shape, causal=True, **types(batch, default)
    )
    out, lse = wrapper.run(torch.cat((batch.q[:1], batch.q)), batch.k, batch.v, return_lse=True, **scales)
    assert not out[0].float().any()
    return out[1:], lse[1:]


def any_batch(batch: Batch, default: bool, k_scale: Any = None, v_scale: Any = None) -> Found:
    assert default
    wrapper = flashinfer.BatchAttention(device=batch.q.device.type)
    kv_lens = batch.kv_indptr[1:] - batch.kv_indptr[:-1]
    tables = (batch.qo_indptr, batch.page_indptr, batch.page_indices, kv_lens)
    wrapper.plan(
        *tables,
        *batch.shape,
        batch.shape[2],
        batch.page_size,
        causal=True,
        q_data_type=batch.q.dtype,
        kv_data_type=batch.k.dtype,
    )
    return wrapper.run(batch.q, batch.cache, k_scale=k_scale, v_scale=v_scale)


def cascade(batch: Batch, default: bool) -> Found:
    """Only one level has tokens; the other is empty."""
    assert default
    wrapper = flashinfer.MultiLevelCascadeAttentionWrapper(2, workspace(batch.q.device.type))
    rows = len(batch.q)
    nothing = [
        torch.tensor(values, dtype=torch.int32, device=batch.q.device)
        for values in ([0, rows], [0, 0], [], [0])
    ]
    levels = zip(nothing, (batch.qo_indptr, *batch.tables()), strict=True)
    wrapper.plan(
        *map(list, levels),
        *batch.shape,
        batch.page_size,
        causal=True,
        q_data_type=batch.q.dtype,
        kv_data_type=batch.k.dtype,
    )  # type: ignore[arg-type]
    return wrapper.run(batch.q, batch.cache)


Run = Callable[..., Found]
# queries of each request; whether a plan may name the output type
RUNS: dict[str, tuple[Run, list[int], bool]] = {
    "decode": (decode, [1, 1, 1], True),
    "paged prefill": (paged, [5, 1, 9], True),
    "ragged prefill": (ragged, [5, 1, 9], True),
    "BatchAttention": (any_batch, [5, 1, 9], False),
    "cascade": (cascade, [5, 1, 9], False),
}
CASES = [
    (name, dtype, default)
    for name, (_, _, may_name) in RUNS.items()
    for dtype, default in ((torch.float16, False), (E4M3, False), (E4M3, True))
    if default or may_name
]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("name", "dtype", "default"), CASES, ids=str)
def test_outputs_of_float8(device: str, name: str, dtype: torch.dtype, default: bool) -> None:
    run, q_lens, _ = RUNS[name]
    batch = of(q_lens, [7, 33, 20], dtype, device)
    found = run(batch, default)
    out, lse = found if isinstance(found, tuple) else (found, None)
    expected, expected_lse = replace(batch, **{x: getattr(batch, x).double() for x in "qkv"}).expected(
        causal=True
    )
    check_rounded(out, expected, 1.0, 2e-2 if dtype == E4M3 else 2e-3)
    if lse is not None:
        torch.testing.assert_close(lse.double().cpu(), expected_lse, rtol=0, atol=2e-2)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", ["decode", "paged prefill", "ragged prefill"])
@pytest.mark.parametrize("dtype", [torch.float16, E4M3], ids=str)
@pytest.mark.parametrize("form", ["numbers", "tensors"])
def test_scales(device: str, name: str, dtype: torch.dtype, form: str) -> None:
    """The scale of V multiplies outputs before they are rounded, also with a 16-bit cache."""
    run, q_lens, _ = RUNS[name]
    batch = of(q_lens, [7, 33, 20], dtype, device)
    numbers = {"k_scale": 0.5, "v_scale": 2.0**7}
    scales = (
        numbers
        if form == "numbers"
        else {name: torch.tensor([value], device=device) for name, value in numbers.items()}
    )
    found = run(batch, False, **scales)
    assert isinstance(found, tuple)
    expected, _ = replace(
        batch, q=batch.q.double(), k=batch.k.double() * 0.5, v=batch.v.double() * 2.0**7
    ).expected(causal=True)
    check_rounded(found[0], expected, 1.0, 2e-2 if dtype == E4M3 else 2e-3)
    assert float(found[0].float().abs().max()) > 100


@pytest.mark.parametrize("device", DEVICES)
def test_single_requests(device: str) -> None:
    batch = of([6], [37], torch.bfloat16, device)
    exact, _ = attention(batch.q, batch.k, batch.v, causal=True)
    out = flashinfer.single_prefill_with_kv_cache(batch.q, batch.k, batch.v, causal=True, o_dtype=E4M3)
    assert isinstance(out, Tensor)
    check_rounded(out, exact, 1.0, 1e-2)
    batch = of([6], [37], E4M3, device)
    exact, _ = attention(batch.q, batch.k, batch.v, causal=True)
    out = flashinfer.single_prefill_with_kv_cache(batch.q, batch.k, batch.v, causal=True)
    assert isinstance(out, Tensor)
    check_rounded(out, exact, 1.0, 2e-2)
    one = flashinfer.single_decode_with_kv_cache(batch.q[5], batch.k, batch.v)
    assert isinstance(one, Tensor)
    check_rounded(one, exact[5], 1.0, 2e-2)


@pytest.mark.parametrize("device", DEVICES)
def test_pod(device: str) -> None:
    """Outputs of the prefill and of the decodes have Q's type."""
    prefill, batch = of([6], [37], E4M3, device), of([1, 1], [7, 20], E4M3, device)
    wrapper = flashinfer.PODWithPagedKVCacheWrapper(workspace(device))
    wrapper.plan(*batch.tables(), *batch.shape, batch.page_size, q_data_type=E4M3, kv_data_type=E4M3)
    out_p, out_d = wrapper.run(prefill.q, prefill.k, prefill.v, batch.q, batch.cache, causal_p=True)
    check_rounded(out_p, attention(prefill.q, prefill.k, prefill.v, causal=True)[0], 1.0, 2e-2)
    check_rounded(
        out_d,
        replace(batch, q=batch.q.double(), k=batch.k.double(), v=batch.v.double()).expected(causal=True)[0],
        1.0,
        2e-2,
    )


def test_the_output_that_is_given() -> None:
    batch = of([1, 1], [7, 20], torch.float16, "cpu")
    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(workspace("cpu"))
    wrapper.plan(*batch.tables(), *batch.shape, batch.page_size, q_data_type=torch.float16, o_data_type=E4M3)
    out = torch.empty_like(batch.q).to(E4M3)
    assert wrapper.run(batch.q, batch.cache, out=out) is out
    assert torch.equal(wrapper.run(batch.q, batch.cache).view(torch.uint8), out.view(torch.uint8))  # type: ignore[union-attr]
    with pytest.raises(ValueError, match=r"^out.dtype is float16, must be float8_e4m3fn"):
        wrapper.run(batch.q, batch.cache, out=torch.empty_like(batch.q))
    with pytest.raises(ValueError, match=r"^v_scale is -0\.5, must be above 0 with outputs of float8_e4m3fn"):
        wrapper.run(batch.q, batch.cache, v_scale=-0.5)
