"""How the engines' FlashInfer backends bypass the wrappers' public API, in every release: their functions,
read from the sources, run on our wrappers.
"""

from __future__ import annotations

import ast
import inspect
import re
import zipfile
from typing import Any, Optional, Union

import pytest
import torch
from flashinfer_oracle import Batch, attention, check, make_batch, workspace

from attn_backend import flashinfer
from attn_backend.releases import RELEASES
from integration.engine_sources import CannotFetch, sources

pytestmark = pytest.mark.slow  # the first run fetches 600 MB
NAMES = {
    "torch": torch,
    "Optional": Optional,
    "Union": Union,
    "fast_decode_plan": flashinfer.fast_decode_plan,
    # for a cache in flashinfer.utils; vLLM works without it if it is missing
    "pin_host_range_buf": lambda _length: None,
}
# Attributes of vLLM's own wrapper around two of FlashInfer's.
VLLMS_OWN = {"_context", "_new_tokens"}


def read(engine: str, version: str, file: str) -> str:
    try:
        with zipfile.ZipFile(sources(engine, version)) as archive:
            name = next(name for name in archive.namelist() if name.endswith(file))
            return archive.read(name).decode()
    except (CannotFetch, OSError) as error:
        pytest.skip(str(error))


def function(source: str, name: str) -> Any:
    """A single function of the engine."""
    node = next(
        (node for node in ast.parse(source).body if isinstance(node, ast.FunctionDef) and node.name == name),
        None,
    )
    if node is None:
        return None
    names = dict(NAMES)
    exec(compile(ast.Module([node], []), name, "exec"), names)
    return names[name]


def buffers(*lengths: int) -> list[torch.Tensor]:
    return [torch.zeros(length, dtype=torch.int32) for length in lengths]


@pytest.mark.parametrize("version", RELEASES["vllm"])
def test_what_vllm_reads(version: str) -> None:
    source = read("vllm", version, "v1/attention/backends/flashinfer.py")
    names = (
        set(re.findall(r"\b(?:prefill|decode)_wrapper(?:\._context|\._new_tokens)?\.(_\w+)", source))
        - VLLMS_OWN
    )
    assert names >= {"_window_left", "_logits_soft_cap", "_sm_scale", "_causal"}
    batch = make_batch([1, 1], [9, 20])
    decode = flashinfer.BatchDecodeWithPagedKVCacheWrapper(workspace("cpu"))
    decode.plan(*batch.tables(), *batch.shape, batch.page_size)
    prefill = flashinfer.BatchPrefillWithPagedKVCacheWrapper(workspace("cpu"))
    prefill.plan(batch.qo_indptr, *batch.tables(), *batch.shape, batch.page_size)
    assert all(hasattr(prefill, name) and (hasattr(decode, name) or name == "_causal") for name in names)


@pytest.mark.parametrize("version", RELEASES["vllm"])
def test_vllms_plan_of_decodes(version: str) -> None:
    """The first call plans; in later calls it has filled the buffers itself.

    It passes fixed_split_size = -1 and means none.
    """
    plan = function(read("vllm", version, "v1/attention/backends/flashinfer.py"), "fast_plan_decode")
    indptr, indices, last = buffers(4, 100, 3)
    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(
        workspace("cpu"), "NHD", True, True, indptr, indices, last
    )
    for lens in ([7, 20, 33], [12, 3, 40]):
        batch = make_batch([1, 1, 1], lens)
        for buffer, tensor in zip((indptr, indices, last), batch.tables(), strict=True):
            buffer[: len(tensor)].copy_(tensor)
        options: dict[str, object] = {
            "indptr_cpu": batch.page_indptr,
            "indices": indices,
            "last_page_len_cpu": batch.last_page_len,
        }
        options |= {
            "num_qo_heads": 4,
            "num_kv_heads": 2,
            "head_dim": 64,
            "page_size": batch.page_size,
            "seq_lens_cpu": torch.tensor(lens),
        }
        options |= {
            "sm_scale": 0.2,
            "q_data_type": batch.q.dtype,
            "kv_data_type": batch.q.dtype,
            "o_data_type": batch.q.dtype,
        }
        plan(
            wrapper,
            **{name: value for name, value in options.items() if name in inspect.signature(plan).parameters},
        )
        check(wrapper.run(batch.q, batch.cache, k_scale=1.0, v_scale=1.0), batch.expected(sm_scale=0.2))
        assert not wrapper._batch_invariant


@pytest.mark.parametrize("version", RELEASES["sglang"])
def test_sglangs_plan_of_graphs(version: str) -> None:
    plan = function(read("sglang", version, "layers/attention/flashinfer_backend.py"), "fast_prefill_plan")
    if plan is None:
        pytest.skip("this release has no plan of its own")
    first, second = (make_batch([2, 2, 2], lens, page_size=1) for lens in ([7, 20, 33], [12, 3, 40]))
    wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(
        workspace("cpu"), "NHD", True, *buffers(4, 4, 100, 3), backend="fa2"
    )
    wrapper.plan(first.qo_indptr, *first.tables(), *first.shape, 1, causal=True)
    host = {
        "qo_indptr_host": second.qo_indptr,
        "kv_indptr_host": second.page_indptr,
        "kv_lens_host": torch.tensor([12, 3, 40], dtype=torch.int32),
    }
    dtypes = {"q_data_type": second.q.dtype, "kv_data_type": second.q.dtype}
    plan(
        wrapper,
        second.qo_indptr,
        *second.tables(),
        *second.shape,
        1,
        causal=True,
        **dtypes,
        **host,
        max_q_len=2,
        max_kv_len=40,
    )
    check(wrapper.run(second.q, second.cache), second.expected(causal=True))


def latents(lens: list[int]) -> Batch:
    """Pages of one token with 576 columns; K and V of the batch are slices of them."""
    return make_batch([1] * len(lens), lens, heads=(16, 1, 576), page_size=1, dtype=torch.bfloat16)


@pytest.mark.parametrize("name", ["fast_mla_decode_plan", "fast_mla_prefill_plan"])
@pytest.mark.parametrize("version", RELEASES["sglang"])
def test_sglangs_plans_of_mla(version: str, name: str) -> None:
    plan = function(read("sglang", version, "layers/attention/flashinfer_mla_backend.py"), name)
    if plan is None:
        pytest.skip("this release has no such plan")
    tensors = buffers(3, 3, 100, 2)
    wrapper = flashinfer.BatchMLAPagedAttentionWrapper(workspace("cpu"), True, *tensors)
    for number, lens in enumerate(([5, 30], [40, 3])):
        batch = latents(lens)
        kv_lens = torch.tensor(lens, dtype=torch.int32)
        given = (batch.qo_indptr, batch.page_indptr, batch.page_indices, kv_lens)
        arguments = (*given, 16, 512, 64, 1, False, 0.07, torch.bfloat16, torch.bfloat16)
        if number == 0:
            wrapper.plan(*arguments)
        else:
            if name == "fast_mla_decode_plan":  # SGLang has filled the buffers
                for buffer, tensor in zip(tensors, given, strict=True):
                    buffer[: len(tensor)].copy_(tensor)
            plan(wrapper, *arguments)
        cache = batch.cache[:, 0, :, 0]
        found = wrapper.run(*batch.q.split([512, 64], -1), *cache.split([512, 64], -1), return_lse=True)
        tokens = batch.k.split(lens)
        parts = [
            attention(batch.q[i : i + 1], own, own[..., :512], sm_scale=0.07) for i, own in enumerate(tokens)
        ]
        check(found, (torch.cat([o for o, _ in parts]), torch.cat([lse for _, lse in parts])), 2e-2)
