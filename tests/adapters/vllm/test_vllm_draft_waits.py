"""Planning and running the steps of a draft model never waits for the device."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor
from waits import NoHostReads, traced

pytest.importorskip("vllm.v1", reason="needs vLLM")

from vllm_float8 import layer_of
from vllm_latents import Problem
from vllm_layer import make_batch, make_builder, make_cache, make_impl, make_spec

from attn_backend.adapters.vllm.metadata import AttnMetadataBuilder
from attn_backend.adapters.vllm.rules import FLOAT8_CACHES

KV_LENS = [33, 64, 20]  # after the last step
STEPS = 4
DRAFTS = 20
CACHES = ["auto", "fp8"]

pytestmark = pytest.mark.usefixtures("vllm_as_it_was")


def drafting(device: str, kv_cache_dtype: str) -> tuple[AttnMetadataBuilder, Callable[[], None]]:
    """A draft model's builder, and a function that plans and runs all its steps through two layers. The
    inputs are already on the device.

    The first step is built; the others are replanned from the same tensors, as in vLLM's loop.
    """
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    batch = make_batch([1, 1, 1], KV_LENS)
    cm = batch.metadata
    slots = [
        torch.stack([of_request[step - STEPS] for of_request in batch.slots]).to(device)
        for step in range(STEPS)
    ]
    cm.query_start_loc, cm.seq_lens, cm.block_table_tensor = (
        x.to(device) for x in (cm.query_start_loc, cm.seq_lens, cm.block_table_tensor)
    )
    cm.slot_mapping = slots[0]
    first_lens = cm.seq_lens - (STEPS - 1)

    impls = [
        make_impl(kv_cache_dtype=kv_cache_dtype),
        make_impl(kv_cache_dtype=kv_cache_dtype, sliding_window=9),
    ]
    stored = FLOAT8_CACHES.get(kv_cache_dtype, dtype)
    caches = [
        make_cache("NHD", dtype=stored).view(torch.uint8).zero_().view(stored).to(device) for _ in impls
    ]
    model = SimpleNamespace(dtype=dtype, get_num_attention_heads=lambda config: 6)
    spec = make_spec(dtype=torch.uint8 if kv_cache_dtype in FLOAT8_CACHES else dtype)
    builder, layer = make_builder(list(impls), spec, device, model_config=model), layer_of().to(device)
    q, k, v = (torch.randn(len(KV_LENS), heads, 64).to(device, dtype) for heads in (6, 2, 2))
    outputs = [torch.full_like(q, torch.nan) for _ in impls]

    def run(of_step: Tensor, metadata: object) -> None:
        for impl, cache, output in zip(impls, caches, outputs, strict=True):
            impl.do_kv_cache_update(layer, k, v, cache, of_step)
            impl.forward(layer, q, k, v, cache, metadata, output)

    def draft() -> None:
        cm.seq_lens.copy_(first_lens)
        metadata = builder.build(0, cm)
        run(slots[0], metadata)
        for of_step in slots[1:]:
            cm.seq_lens += 1
            builder.update_draft_decode_metadata(metadata)
            run(of_step, metadata)

    draft()
    assert all(output.isfinite().all() for output in outputs)
    return builder, draft


@pytest.mark.parametrize("kv_cache_dtype", CACHES)
def test_nothing_is_read_on_the_host(kv_cache_dtype: str) -> None:
    _, draft = drafting("cpu", kv_cache_dtype)
    with NoHostReads():
        draft()


@pytest.mark.parametrize("cache_dtype", ["auto", "fp8"])
def test_nothing_of_latents_is_read_on_the_host(cache_dtype: str) -> None:
    """Our part of the MLA metadata. vLLM builds the rest from values that the host knows."""
    builder, cm = Problem(cache_dtype=cache_dtype).builder, make_batch([1, 1, 1], KV_LENS).metadata
    with NoHostReads():
        builder._build_decode(cm.block_table_tensor, cm.seq_lens, query_start_loc_device=cm.query_start_loc)


@pytest.mark.gpu
@pytest.mark.parametrize("kv_cache_dtype", CACHES)
def test_nothing_waits(kv_cache_dtype: str) -> None:
    builder, draft = drafting("cuda", kv_cache_dtype)
    names, waits = traced(draft, DRAFTS)
    plans = sum(name in ("plan_kernel", "plan_forest_kernel") for name in names)
    assert plans >= DRAFTS * STEPS * len(builder.planned), "the trace holds every plan"
    assert not waits, waits[:5]


@pytest.mark.parametrize("read", [torch.Tensor.item, torch.Tensor.tolist, torch.Tensor.cpu, bool, int])
@pytest.mark.parametrize("method", ["build", "update_draft_decode_metadata"])
def test_what_is_read_is_seen(
    method: str, read: Callable[[Tensor], object], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A builder that reads from the device while it plans."""
    builder, draft = drafting("cpu", "auto")
    plans = getattr(builder, method)

    def reads(*arguments: object) -> object:
        read(torch.ones(1))
        return plans(*arguments)

    monkeypatch.setattr(builder, method, reads)
    with pytest.raises(AssertionError, match=r"\(\)"), NoHostReads():
        draft()
