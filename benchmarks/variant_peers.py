"""The peers' ways to change attention.

Raises ImportError if a peer is not installed; the lists omit unsupported cases.
"""

from __future__ import annotations

from functools import partial
from importlib import import_module
from typing import Any

import torch

from benchmarks.batches import Batch
from benchmarks.peers import Kernels, Run, flash_attention_3, page_table, workspace
from benchmarks.variant_cases import Meaning, visible

PAGE = 16  # page size with which kernels that need pages see contiguous K and V
# FlashInfer's interface for a variant (include/flashinfer/attention/variants.cuh), for weights without
# softmax.
SIGMOID = r"""
struct SigmoidWeights : AttentionVariantBase {
  static constexpr bool use_softmax = false;
  uint32_t qo_len, kv_len, window_left;
  float factor, offset;  // of the exponent of 2

  template <typename Params>
  __device__ __host__ SigmoidWeights(const Params& params, uint32_t request, uint8_t* /*shared*/)
      : qo_len(params.get_qo_len(request)), kv_len(params.get_kv_len(request)), window_left(kv_len),
        factor(-params.score_scale * math::log2e), offset(-params.score_bias * math::log2e) {}

  REGISTER_LOGITS_TRANSFORM(params, logits, batch_idx, qo_idx, kv_idx, qo_head_idx, kv_head_idx, {
    return math::ptx_rcp(1.f + math::ptx_exp2(static_cast<float>(logits) * factor + offset));
  });

  REGISTER_OUTPUT_TRANSFORM(params, output, batch_idx, qo_idx, qo_head_idx, m, d, scale, { return output; })
};
"""


def peers_of(batch: Batch, meaning: Meaning) -> dict[str, Kernels]:
    """The kernels of each peer that support a line's attention, by name; a peer's fastest counts."""
    peers: dict[str, Kernels] = {"FA3": {}, "FlashInfer": {}, "flex_attention": {}}
    if meaning.scales is not None:
        return peers
    if meaning.is_causal and meaning.uses_softmax and not meaning.is_alibi and meaning.rotate is None:
        peers["FA3"]["FA3"] = partial(
            flash_attention_3, batch, meaning.window - 1, meaning.cap, meaning.sinks
        )
    if meaning.uses_softmax and meaning.rotate is None:
        peers["flex_attention"]["compiled"] = partial(flex_attention, batch, meaning)
    if not meaning.uses_softmax:
        peers["FlashInfer"]["JIT, fa2"] = partial(flashinfer_sigmoid, batch, meaning)
    elif meaning.sinks is not None:
        peers["FlashInfer"] = {
            backend: partial(flashinfer_sinks, batch, meaning, backend) for backend in ("fa2", "fa3")
        }
    elif meaning.is_causal and max(batch.case.qo_lens) == 1:
        for name, use_tensor_cores in (("tensor cores", True), ("CUDA cores", False)):
            peers["FlashInfer"][name] = partial(flashinfer_decode, batch, meaning, use_tensor_cores)
    else:
        # FlashInfer's default never selects fa3 for positions in the kernel or custom masks; requesting it
        # would compile for minutes.
        backends = (
            ("fa2", "fa3")
            if meaning.is_causal and not meaning.is_alibi and meaning.rotate is None
            else ("fa2",)
        )
        peers["FlashInfer"] = {
            backend: partial(flashinfer_prefill, batch, meaning, backend) for backend in backends
        }
    return peers


def flex_attention(batch: Batch, meaning: Meaning) -> Run:
    """torch's flex_attention, compiled for this shape, with a precomputed block mask; requests of one length,
    each with contiguous K and V.
    """
    from torch.nn.attention.flex_attention import create_block_mask
    from torch.nn.attention.flex_attention import flex_attention as attend

    case = batch.case
    requests, qo_len, kv_len = len(case.qo_lens), case.qo_lens[0], case.kv_lens[0]
    first = kv_len - qo_len
    mask_mod, score_mod, sinks = meaning.mask_mod, meaning.score_mod, meaning.sinks

    def mask(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return mask_mod(b, h, q_idx + first, kv_idx)

    def score(value: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return score_mod(value, b, h, q_idx + first, kv_idx)  # type: ignore[misc]

    block_mask = create_block_mask(mask, requests, None, qo_len, kv_len, device="cuda")
    options: dict[str, Any] = {
        "score_mod": None if score_mod is None else score,
        "block_mask": block_mask,
        "enable_gqa": True,
    }

    def compute(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        if sinks is None:
            return attend(q, k, v, **options)
        out, lse = attend(q, k, v, return_lse=True, **options)
        return out * torch.sigmoid(lse - sinks[None, :, None])[..., None].to(out.dtype)

    torch._dynamo.reset()  # otherwise the limit on recompilations would stop it after some shapes
    compiled = torch.compile(compute, dynamic=False)
    q = batch.q.unflatten(0, (requests, qo_len)).transpose(1, 2)
    k, v = (
        torch.stack(of_requests).transpose(1, 2)
        for of_requests in zip(*map(batch.tokens, range(requests)), strict=True)
    )
    return lambda: compiled(q, k, v).transpose(1, 2).flatten(0, 1)


def _plan_options(batch: Batch, meaning: Meaning) -> dict[str, Any]:
    options: dict[str, Any] = {"q_data_type": torch.bfloat16, "kv_data_type": torch.bfloat16}
    options |= {"pos_encoding_mode": "ALIBI"} if meaning.is_alibi else {}
    options |= {"pos_encoding_mode": "ROPE_LLAMA"} if meaning.rotate is not None else {}
    options |= {"window_left": meaning.window - 1} if meaning.window else {}
    return options | ({"logits_soft_cap": meaning.cap} if meaning.cap else {})


def _heads(batch: Batch) -> tuple[int, int, int]:
    return batch.case.num_qo_heads, batch.case.num_kv_heads, batch.case.head_dim


def _pages(batch: Batch) -> tuple[Any, tuple[torch.Tensor, ...], int]:
    """(K and V, (kv_indptr, kv_indices, kv_last_page_len), page size) of a batch with pages; or ragged, in
    pages of PAGE tokens.
    """
    if not batch.case.ragged:
        return batch.cache, page_table(batch), batch.case.page_size
    if any(kv_len % PAGE for kv_len in batch.case.kv_lens):
        raise ValueError(f"kv_lens must be multiples of {PAGE}")
    k, v = (tokens.unflatten(0, (-1, PAGE)) for tokens in batch.cache)
    indices = torch.arange(len(k), dtype=torch.int32, device=batch.q.device)
    return (k, v), (batch.kv_indptr // PAGE, indices, torch.full_like(batch.kv_lens, PAGE)), PAGE


def flashinfer_decode(batch: Batch, meaning: Meaning, use_tensor_cores: bool) -> Run:
    flashinfer = import_module("flashinfer")
    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(
        workspace(), "NHD", use_tensor_cores=use_tensor_cores
    )
    cache, table, page_size = _pages(batch)
    wrapper.plan(*table, *_heads(batch), page_size, **_plan_options(batch, meaning))
    out = torch.empty_like(batch.q)
    return lambda: wrapper.run(batch.q, cache, out=out)


def flashinfer_prefill(batch: Batch, meaning: Meaning, backend: str) -> Run:
    """Masks that are not causal become custom masks."""
    flashinfer = import_module("flashinfer")
    case = batch.case
    options = {"causal": True} | _plan_options(batch, meaning)
    if not meaning.is_causal:
        masks = [
            visible(meaning, case, i, torch.arange(qo_len, device=batch.q.device)).flatten()
            for i, qo_len in enumerate(case.qo_lens)
        ]
        options |= {"causal": False, "custom_mask": torch.cat(masks)}
    out = torch.empty_like(batch.q)
    if case.ragged:
        ragged = flashinfer.BatchPrefillWithRaggedKVCacheWrapper(workspace(), "NHD", backend=backend)
        ragged.plan(batch.qo_indptr, batch.kv_indptr, *_heads(batch), **options)
        return lambda: ragged.run(batch.q, *batch.cache, out=out)
    wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(workspace(), "NHD", backend=backend)
    wrapper.plan(batch.qo_indptr, *page_table(batch), *_heads(batch), case.page_size, **options)
    return lambda: wrapper.run(batch.q, batch.cache, out=out)


def flashinfer_sinks(batch: Batch, meaning: Meaning, backend: str) -> Run:
    flashinfer = import_module("flashinfer")
    case = batch.case
    window = {"window_left": meaning.window - 1}
    dtypes = {"q_data_type": torch.bfloat16, "kv_data_type": torch.bfloat16}
    of_kernel = {"head_dim_qk": case.head_dim, "head_dim_vo": case.head_dim, **window, **dtypes}
    wrapper = flashinfer.BatchAttentionWithAttentionSinkWrapper(
        workspace(), "NHD", backend=backend, **of_kernel
    )
    cache, table, page_size = _pages(batch)
    wrapper.plan(batch.qo_indptr, *table, *_heads(batch), page_size, causal=True, **window, **dtypes)
    out = torch.empty_like(batch.q)
    return lambda: wrapper.run(batch.q, cache, meaning.sinks, case.head_dim**-0.5, out=out)


def flashinfer_sigmoid(batch: Batch, meaning: Meaning) -> Run:
    """A variant that FlashInfer's JIT compiles."""
    flashinfer = import_module("flashinfer")
    case = batch.case
    bf16, head_dim = torch.bfloat16, case.head_dim
    scalars = (["score_scale", "score_bias"], ["double", "double"])
    jit_args: tuple[Any, ...] = (
        f"sigmoid_weights_bf16_{head_dim}",
        bf16,
        bf16,
        bf16,
        torch.int32,
        head_dim,
        head_dim,
        [],
        [],
        *scalars,
        "SigmoidWeights",
        SIGMOID,
    )
    out = torch.empty_like(batch.q)
    values = (head_dim**-0.5, meaning.bias)
    dtypes = {"q_data_type": bf16, "kv_data_type": bf16}
    if case.ragged:
        ragged = flashinfer.BatchPrefillWithRaggedKVCacheWrapper(
            workspace(), "NHD", backend="fa2", jit_args=jit_args
        )
        ragged.plan(batch.qo_indptr, batch.kv_indptr, *_heads(batch), causal=True, **dtypes)
        return lambda: ragged.run(batch.q, *batch.cache, *values, out=out)
    wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(
        workspace(), "NHD", backend="fa2", jit_args=jit_args
    )
    wrapper.plan(batch.qo_indptr, *page_table(batch), *_heads(batch), case.page_size, causal=True, **dtypes)
    return lambda: wrapper.run(batch.q, batch.cache, *values, out=out)
