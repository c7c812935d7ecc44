"""Runs that take a single library call, with tensors exactly as passed: same results as Attention.run."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from flashinfer_oracle import make_batch, workspace
from torch import Tensor

from attn_backend import flashinfer
from attn_backend.flashinfer.arguments import ragged_cache
from attn_backend.kernels.attention import Attention
from attn_backend.kernels.native import MissingKernelError, library
from attn_backend.kernels.variant import AttentionVariant
from attn_backend.metadata import KVCache

Run = Callable[..., Any]
LATENT = 512


def decode(kv_layout: str, form: str, **planned: Any) -> Run:
    batch = make_batch([1] * 3, [7, 12, 5])
    cache = batch.paged(kv_layout)
    if "kv_data_type" in planned:
        cache = cache.to(planned["kv_data_type"])
    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(workspace("cpu"), kv_layout)
    wrapper.plan(*batch.tables(), *batch.shape, batch.page_size, **planned)
    return lambda **options: wrapper.run(
        batch.q, cache if form == "one" else tuple(cache.unbind(1)), **options
    )


def ragged(kv_layout: str, first: int = 0) -> Run:
    batch = make_batch([3, 1], [7, 9])
    wrapper = flashinfer.BatchPrefillWithRaggedKVCacheWrapper(workspace("cpu"), kv_layout)
    wrapper.plan(batch.qo_indptr, batch.kv_indptr + first, *batch.shape, causal=True)
    k, v = (torch.cat((part[:first], part)) for part in (batch.k, batch.v))
    k, v = (k, v) if kv_layout == "NHD" else (k.transpose(0, 1).contiguous(), v.transpose(0, 1).contiguous())
    return lambda **options: wrapper.run(batch.q, k, v, **options)


def mla(width: int = 576, kv_dtype: torch.dtype = torch.bfloat16) -> Run:
    wrapper = flashinfer.BatchMLAPagedAttentionWrapper(workspace("cpu"))
    tables = (torch.arange(3, dtype=torch.int32),) * 2 + (
        torch.arange(2, dtype=torch.int32),
        torch.tensor([4, 3], dtype=torch.int32),
    )
    wrapper.plan(*tables, 16, LATENT, width - LATENT, 4, True, 0.1, torch.bfloat16, kv_dtype)
    q, cache = torch.randn(2, 16, width).bfloat16(), torch.randn(2, 4, width).to(kv_dtype)
    sizes = (LATENT, width - LATENT)
    return lambda **options: wrapper.run(*q.split(sizes, -1), *cache.split(sizes, -1), **options)


FLOAT8 = {"q_data_type": torch.float16, "kv_data_type": torch.float8_e4m3fn}
OF_HEADS = {"k_scale": torch.tensor([0.5, 2.0]), "v_scale": torch.tensor([3.0, 0.25])}
RUNS: dict[str, tuple[Callable[[], Run], dict[str, Any]]] = {
    "NHD": (lambda: decode("NHD", "one"), {}),
    "HND": (lambda: decode("HND", "pair"), {}),
    "scales of 16 bits": (lambda: decode("NHD", "one"), {"q_scale": 0.5, "k_scale": 0.5, "v_scale": 0.5}),
    "float8": (lambda: decode("NHD", "one", **FLOAT8), {"k_scale": 0.5, "v_scale": 2.0}),
    "float8, scales of heads": (lambda: decode("HND", "pair", **FLOAT8), OF_HEADS),
    "sinks": (lambda: decode("NHD", "pair"), {"sinks": torch.tensor([0.0, 1.0, 2.0, -1.0])}),
    "ALiBi": (lambda: decode("NHD", "one", pos_encoding_mode="ALIBI"), {}),
    "ragged, NHD": (lambda: ragged("NHD"), {}),
    "ragged, HND": (lambda: ragged("HND"), {}),
    "ragged, NHD, from a token on": (lambda: ragged("NHD", 2), {}),
    "ragged, HND, from a token on": (lambda: ragged("HND", 2), {}),
    "MLA": (mla, {}),
    "MLA, base e": (mla, {"return_lse_base_on_e": True}),
    "MLA without rotated columns": (lambda: mla(LATENT), {}),
    "MLA over float8": (lambda: mla(kv_dtype=torch.float8_e4m3fn), {"ckv_scale": 0.5, "kpe_scale": 0.5}),
}


def _replace_run(monkeypatch: pytest.MonkeyPatch, run: Callable[..., Any]) -> None:
    """Attentions created from now on run this function instead of the library's."""
    monkeypatch.setattr("attn_backend.kernels.attention.in_order", lambda function, names: run)


def _by_attention_run(monkeypatch: pytest.MonkeyPatch) -> Run:
    """Attention._run_raw, implemented with Attention.run."""
    run_raw = Attention._run_raw

    def run(attention: Attention, *arguments: Any) -> Tensor | tuple[Tensor, Tensor]:
        given = inspect.signature(run_raw).bind(attention, *arguments).arguments
        del given["self"]
        k, v, k_rope, is_hnd = (given.pop(name) for name in ("k", "v", "k_rope", "is_hnd"))
        lse_to_base_2 = given.pop("lse_to_base_2")
        if k_rope is not None:
            k = torch.cat((k, k_rope), -1).unsqueeze(2)
            v = k[..., :LATENT]
        kv = KVCache.as_given(k, v) if k.ndim == 4 else ragged_cache(k, v, "HND" if is_hnd else "NHD")
        kv = kv.with_scales(given.pop("k_scale"), given.pop("v_scale"))
        with monkeypatch.context() as patch:
            patch.setattr(Attention, "_run_raw", run_raw)
            made: Tensor | tuple[Tensor, Tensor] = attention.run(kv=kv, **given)
        lse = made[1] if isinstance(made, tuple) else given["lse"]
        if lse is not None and lse_to_base_2:
            lse.mul_(math.log2(math.e))
        return made

    return run


@pytest.mark.parametrize("name", RUNS)
def test_gives_what_attention_run_gives(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    make, options = RUNS[name]
    torch.manual_seed(0)
    run = make()
    run(return_lse=True, **options)  # creates everything that it needs

    def refused(*_: Any, **__: Any) -> None:
        raise AssertionError("not by one call")

    with monkeypatch.context() as patch:
        patch.setattr(Attention, "run", refused)
        out, lse = run(return_lse=True, **options)
        assert torch.equal(run(**options), out)
        for return_lse in (True, False):  # lse is written if passed, as in FlashInfer
            given = torch.full_like(out, torch.nan), torch.full_like(lse, torch.nan)
            returned = run(return_lse=return_lse, out=given[0], lse=given[1], **options)
            assert (
                (returned[0] is given[0] and returned[1] is given[1]) if return_lse else returned is given[0]
            )
            assert torch.equal(given[0], out)
            assert torch.equal(given[1], lse)

    with monkeypatch.context() as patch:
        patch.setattr(Attention, "_run_raw", _by_attention_run(monkeypatch))
        wanted, wanted_lse = run(return_lse=True, **options)
        assert torch.equal(out, wanted)
        torch.testing.assert_close(lse, wanted_lse)
        run(lse=given[1].fill_(torch.nan), **options)
        assert torch.equal(given[1], wanted_lse)
        assert lse.isfinite().all()

    monkeypatch.setenv("ATTN_BACKEND_DEBUG", "1")  # another class of Attention
    torch.manual_seed(0)
    run = make()
    checked, checked_lse = run(return_lse=True, **options)
    assert torch.equal(out, checked)
    assert torch.equal(lse, checked_lse)


@pytest.mark.parametrize(
    ("kv_layout", "form"),
    [("NHD", r"\[tokens, num_kv_heads = 2, head_dim\]"), ("HND", r"\[num_kv_heads = 2, tokens, head_dim\]")],
)
def test_says_that_the_layout_is_another(kv_layout: str, form: str) -> None:
    batch = make_batch([3, 1], [7, 9])
    wrapper = flashinfer.BatchPrefillWithRaggedKVCacheWrapper(workspace("cpu"), kv_layout)
    wrapper.plan(batch.qo_indptr, batch.kv_indptr, *batch.shape)
    k, v = (batch.k, batch.v) if kv_layout == "HND" else (batch.k.transpose(0, 1), batch.v.transpose(0, 1))
    with pytest.raises(
        ValueError, match=rf"^k is a float16 tensor .*, must be {form}, as kv_layout = '{kv_layout}' has it$"
    ):
        wrapper.run(batch.q, k, v)


@pytest.mark.parametrize("name", ["q", "out", "lse", "sinks"])
def test_refuses_what_a_handle_does_not_tell(name: str) -> None:
    batch = make_batch([1] * 3, [7, 12, 5])
    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(workspace("cpu"))
    wrapper.plan(*batch.tables(), *batch.shape, batch.page_size)
    given: dict[str, Tensor] = {
        "q": batch.q,
        "out": torch.empty_like(batch.q),
        "lse": torch.empty(3, 4),
        "sinks": torch.zeros(4),
    }
    for change in (torch._neg_view, lambda tensor: tensor.clone().requires_grad_()):
        changed = given | {name: change(given[name])}
        with pytest.raises(ValueError, match=f"^{name} is .*(resolve_neg|gradient)"):
            wrapper.run(changed.pop("q"), batch.cache, return_lse=True, **changed)


@pytest.mark.parametrize(
    "make", [lambda: decode("NHD", "one"), lambda: ragged("NHD"), mla], ids=["decode", "ragged", "MLA"]
)
def test_an_error_of_the_one_call_is_the_error_of_the_run(
    make: Callable[[], Run], monkeypatch: pytest.MonkeyPatch
) -> None:
    def failing(*_: Any) -> None:
        raise RuntimeError("an error that no argument explains")

    _replace_run(monkeypatch, failing)
    with pytest.raises(RuntimeError, match="an error that no argument explains"):
        make()()


@pytest.mark.parametrize(
    ("make", "given", "message"),
    [
        (decode, {"out": torch.empty(3, 4, 32)}, r"out\.dtype is float32, must be float16"),
        (decode, {"out": [1.0]}, r"out is \[1\.0\], must be a tensor"),
        (
            decode,
            {"lse": torch.empty(2, 4)},
            r"lse\.shape is \[2, 4\], must be \[rows = 3, num_qo_heads = 4\]",
        ),
        (
            decode,
            {"sinks": torch.zeros(4).to_sparse()},
            r"sinks is a sparse_coo tensor, must be a dense tensor",
        ),
        (mla, {"out": torch.empty(2, 16, 512)}, r"out\.dtype is float32, must be bfloat16"),
    ],
)
def test_names_what_is_wrong(make: Any, given: dict[str, Any], message: str) -> None:
    run = make("NHD", "one") if make is decode else make()
    with pytest.raises(ValueError, match=f"^{message}"):
        run(return_lse=True, **given)


@pytest.mark.parametrize("name", ["q_nope", "q_pe"])
def test_refuses_parts_of_q_whose_sign_is_to_be_changed(name: str) -> None:
    wrapper = flashinfer.BatchMLAPagedAttentionWrapper(workspace("cpu"))
    indptr = torch.arange(3, dtype=torch.int32)
    wrapper.plan(
        indptr, indptr, indptr[:2], indptr[1:], 16, LATENT, 64, 4, True, 0.1, torch.bfloat16, torch.bfloat16
    )
    parts = dict(
        zip(("q_nope", "q_pe"), torch.randn(2, 16, 576).bfloat16().split((LATENT, 64), -1), strict=True)
    )
    caches = torch.randn(2, 4, 576).bfloat16().split((LATENT, 64), -1)
    parts[name] = torch._neg_view(parts[name])
    with pytest.raises(ValueError, match=f"^{name} is .*resolve_neg"):
        wrapper.run(parts["q_nope"], parts["q_pe"], *caches)


def test_names_a_page_beyond_the_cache() -> None:
    batch = make_batch([1] * 3, [7, 12, 5])
    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(workspace("cpu"))
    wrapper.plan(*batch.tables(), *batch.shape, batch.page_size)
    with pytest.raises(ValueError, match="kv_indices"):
        wrapper.run(batch.q, batch.cache[:1])


def test_runs_again_once_a_late_kernel_is_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels of variants that only some plans need are loaded by the first run that uses them."""
    run = decode("NHD", "one", pos_encoding_mode="ALIBI")
    expected, library_run, missing = run(), library().run, ["attention_late"]

    def late(*given: Any) -> Any:
        if missing:
            raise MissingKernelError(missing[0])
        return library_run(*given)

    _replace_run(monkeypatch, late)
    run = decode("NHD", "one", pos_encoding_mode="ALIBI")
    monkeypatch.setattr(AttentionVariant, "file_of", lambda _, name: f"{name}.cubin")
    monkeypatch.setattr(
        library(),
        "load_attention_kernel",
        lambda _, name, file: missing.remove(name) if file == f"{name}.cubin" else None,
    )
    assert torch.equal(run(), expected)
    assert not missing
