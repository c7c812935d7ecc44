"""Variants in FlashInfer's C++ (jit_args): a user's text is compiled unchanged."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from flashinfer_oracle import DEVICES, check, make_batch, workspace

from attn_backend import flashinfer
from attn_backend.flashinfer.jit.attention import (
    gen_customize_single_decode_module,
    gen_customize_single_prefill_module,
)
from attn_backend.flashinfer.utils import MaskMode

# Every second token, a number for each head, a factor on the output.
EVERY_SECOND = r"""
struct EverySecond : AttentionVariantBase {
  static constexpr bool use_softmax = true;
  uint32_t qo_len, kv_len, window_left;
  float sm_scale_log2;

  template <typename Params>
  __device__ __host__ EverySecond(const Params& params, uint32_t batch_idx, uint8_t* smem_ptr) {
    qo_len = params.get_qo_len(batch_idx);
    kv_len = params.get_kv_len(batch_idx);
    window_left = (params.window_left >= 0) ? params.window_left : kv_len;
    sm_scale_log2 = params.scale * math::log2e;
  }

  REGISTER_LOGITS_TRANSFORM(params, logits, batch_idx, qo_idx, kv_idx, qo_head_idx, kv_head_idx, {
    return logits + params.strength[qo_head_idx] * float(int(kv_idx) - int(kv_len - qo_len + qo_idx));
  });

  REGISTER_LOGITS_MASK(params, batch_idx, qo_idx, kv_idx, qo_head_idx, kv_head_idx, {
    return kv_idx % 2 == 0;
  })

  REGISTER_OUTPUT_TRANSFORM(params, output, batch_idx, qo_idx, qo_head_idx, m, d, scale, {
    float d_rcp = (m != -math::inf) ? math::ptx_rcp(d) : 0.f;
    return output * d_rcp * 3.0f;
  })
};
"""
# Without softmax, in the form that FlashInfer's Hopper kernels expect.
SILU = r"""
struct Silu : AttentionVariantBase {
  float scale;

  template <typename MainloopParams, typename BlockCoord>
  __device__ __host__ Silu(const MainloopParams& params, const BlockCoord& block_coord) {
    scale = params.additional_params.scale;
  }

  template <int NUM_ROWS_PER_THREAD>
  __device__ auto GetAttentionUpdater() {
    return DefaultUpdater<NUM_ROWS_PER_THREAD>();
  }

  REGISTER_LOGITS_TRANSFORM(params, logits, batch_idx, qo_idx, kv_idx, qo_head_idx, kv_head_idx, {
    return logits * scale * math::ptx_rcp(1.f + math::ptx_exp2(-float(logits * scale) * math::log2e));
  });
};
"""
SCALE = 0.09


# One 16-bit number for each KV head, read by the constructor, and one for each token.
OF_KV_HEADS = r"""
struct OfKvHeads : AttentionVariantBase {
  float sm_scale_log2, of_head;
  int qo_len, kv_len;

  template <typename MainloopParams, typename BlockCoord>
  __device__ __host__ OfKvHeads(const MainloopParams& params, const BlockCoord& block_coord) {
    auto [_, qo_head_idx, kv_head_idx, ___, ____, qo_len_, kv_len_, batch_idx] = block_coord;
    sm_scale_log2 = params.additional_params.scale * math::log2e;
    of_head = params.additional_params.of_heads[kv_head_idx];
    qo_len = qo_len_;
    kv_len = kv_len_;
  }

  REGISTER_LOGITS_TRANSFORM(params, logits, batch_idx, qo_idx, kv_idx, qo_head_idx, kv_head, {
    float bias = __bfloat162float(params.additional_params.bias[(batch_idx * 2 + kv_head) * 64 + kv_idx]);
    return logits * of_head + (kv_idx < kv_len ? bias : 1e4f);
  });
};
"""


def jit_args(names: tuple[list[str], list[str], list[str], list[str]], variant: str, text: str) -> list[Any]:
    return ["uri", *[torch.float16] * 3, torch.int32, 64, 64, *names, variant, text]


SECOND_ARGS = (["strength"], ["float"], ["scale"], ["double"])
SILU_ARGS: tuple[list[str], list[str], list[str], list[str]] = ([], [], ["scale"], ["double"])


def every_second(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, strength: torch.Tensor, causal: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """o [q_len, heads, head_dim] and lse [q_len, heads] to base 2, in float64."""
    q_len, kv_len = q.shape[0], k.shape[0]
    query = torch.arange(q_len)[:, None] + kv_len - q_len
    token = torch.arange(kv_len)[None, :]
    mask = (token % 2 == 0) & ((token <= query) | (not causal))
    outputs = []
    for head in range(q.shape[1]):
        logits = q[:, head].double() @ k[:, head * k.shape[1] // q.shape[1]].double().T
        logits = (logits + float(strength[head]) * (token - query)) * SCALE
        logits = logits.masked_fill(~mask, -torch.inf)
        lse = logits.logsumexp(-1)
        weights = torch.where(mask, (logits - lse[:, None]).exp(), 0.0)
        outputs.append(
            (
                3 * weights @ v[:, head * k.shape[1] // q.shape[1]].double(),
                lse / torch.log(torch.tensor(2.0, dtype=torch.float64)),
            )
        )
    return torch.stack([o for o, _ in outputs], 1), torch.stack([lse for _, lse in outputs], 1)


def of_batch(batch: Any, strength: torch.Tensor, causal: bool) -> tuple[torch.Tensor, torch.Tensor]:
    parts = []
    for i in range(len(batch.qo_indptr) - 1):
        rows, tokens = (slice(int(p[i]), int(p[i + 1])) for p in (batch.qo_indptr, batch.kv_indptr))
        parts.append(
            every_second(
                batch.q[rows].cpu(), batch.k[tokens].cpu(), batch.v[tokens].cpu(), strength.cpu(), causal
            )
        )
    o, lse = zip(*parts, strict=True)
    return torch.cat(o), torch.cat(lse)


@pytest.mark.parametrize("device", DEVICES)
def test_every_wrapper_takes_the_text(device: str) -> None:
    args = jit_args(SECOND_ARGS, "EverySecond", EVERY_SECOND)
    strength = torch.tensor([0.1, 0.0, -0.2, 0.3], device=device)
    batch = make_batch([1, 1, 1], [40, 7, 130], device=device)
    decode = flashinfer.BatchDecodeWithPagedKVCacheWrapper(workspace(device), jit_args=args)
    decode.plan(*batch.tables(), *batch.shape, batch.page_size)
    check(
        decode.run(batch.q, batch.cache, strength, SCALE, return_lse=True),
        of_batch(batch, strength, True),
        4e-3,
    )

    batch = make_batch([3, 1, 20], [40, 7, 130], device=device)
    for causal in (False, True):
        paged = flashinfer.BatchPrefillWithPagedKVCacheWrapper(workspace(device), jit_args=args)
        paged.plan(batch.qo_indptr, *batch.tables(), *batch.shape, batch.page_size, causal=causal)
        expected = of_batch(batch, strength, causal)
        check(paged.run(batch.q, batch.cache, strength, SCALE, return_lse=True), expected, 4e-3)
        ragged = flashinfer.BatchPrefillWithRaggedKVCacheWrapper(workspace(device), jit_args=args)
        ragged.plan(batch.qo_indptr, batch.kv_indptr, *batch.shape, causal=causal)
        check(ragged.run(batch.q, batch.k, batch.v, strength, SCALE), expected, 4e-3)
    with pytest.raises(ValueError, match=r"len\(args\) is 1, must be 2: strength, scale"):
        paged.run(batch.q, batch.cache, strength)


@pytest.mark.parametrize("device", DEVICES)
def test_single_requests(device: str) -> None:
    batch = make_batch([9], [50], device=device)
    strength = torch.tensor([0.1, 0.0, -0.2, 0.3], device=device)
    module = gen_customize_single_prefill_module(
        "fa2",
        *jit_args(SECOND_ARGS, "EverySecond", EVERY_SECOND)[:4],
        64,
        64,
        *SECOND_ARGS,
        "EverySecond",
        EVERY_SECOND,
    )
    module = module.build_and_load()
    run = flashinfer.prefill.single_prefill_with_kv_cache_with_jit_module
    for mode in (MaskMode.NON_CAUSAL, MaskMode.CAUSAL):
        found = run(module, batch.q, batch.k, batch.v, strength, SCALE, mask_mode=mode.value)
        check(
            found,
            every_second(
                batch.q.cpu(), batch.k.cpu(), batch.v.cpu(), strength.cpu(), mode is MaskMode.CAUSAL
            ),
            4e-3,
        )
    module = gen_customize_single_decode_module("uri", *[torch.float16] * 3, 64, 64, *SILU_ARGS, "Silu", SILU)
    out = flashinfer.decode.single_decode_with_kv_cache_with_jit_module(
        module, batch.q[0], batch.k, batch.v, SCALE
    )
    k, v = (x.cpu().double().repeat_interleave(2, 1) for x in (batch.k, batch.v))
    logits = torch.einsum("hd,khd->hk", batch.q[0].cpu().double(), k) * SCALE
    check(out, (torch.einsum("hk,khd->hd", torch.nn.functional.silu(logits), v), torch.zeros(0)), 1e-2)


@pytest.mark.parametrize("device", DEVICES)
def test_kv_heads_and_tensors_of_16_bits(device: str) -> None:
    batch = make_batch([4, 9], [11, 50], device=device)
    of_heads, bias = (
        torch.tensor([0.5, -1.25], device=device).half(),
        torch.randn(2, 2, 64).bfloat16().to(device),
    )
    args = jit_args(
        (["of_heads", "bias"], ["half", "nv_bfloat16"], ["scale"], ["double"]), "OfKvHeads", OF_KV_HEADS
    )
    wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(workspace(device), jit_args=args)
    wrapper.plan(batch.qo_indptr, *batch.tables(), *batch.shape, batch.page_size)
    out, lse = wrapper.run(batch.q, batch.cache, of_heads, bias, SCALE, return_lse=True)
    k = batch.k.double().cpu() * of_heads.double().cpu()[:, None]
    for i in range(2):
        rows, tokens = (
            slice(*batch.qo_indptr[i : i + 2].tolist()),
            slice(*batch.kv_indptr[i : i + 2].tolist()),
        )
        q, keys, values = (x.double().cpu() for x in (batch.q[rows], k[tokens], batch.v[tokens]))
        keys, values = keys.repeat_interleave(2, 1), values.repeat_interleave(2, 1)
        biases = bias[i, :, : keys.shape[0]].double().cpu().repeat_interleave(2, 0)
        scores = (torch.einsum("qhd,khd->qhk", q, keys) + biases) * SCALE
        expected = (
            torch.einsum("qhk,khd->qhd", scores.softmax(-1), values),
            scores.logsumexp(-1) / math.log(2),
        )
        check((out[rows], lse[rows]), expected)


def test_the_mask_of_a_plan() -> None:
    """Names that FlashInfer fills in itself."""
    text = EVERY_SECOND.replace(
        "kv_idx % 2 == 0", "(mine[(qo_idx * kv_len + kv_idx) / 8] >> ((qo_idx * kv_len + kv_idx) % 8)) & 1"
    )
    text = text.replace("float sm_scale_log2;", "float sm_scale_log2; uint8_t* mine;").replace(" * 3.0f", "")
    text = text.replace(
        "qo_len = params",
        "mine = params.maybe_custom_mask + params.maybe_mask_indptr[batch_idx]; qo_len = params",
        1,
    )
    text = text.replace("params.strength[qo_head_idx]", "0.0f")
    args = jit_args(
        (["maybe_custom_mask", "maybe_mask_indptr"], ["uint8_t", "int32_t"], ["scale"], ["double"]),
        "EverySecond",
        text,
    )
    batch = make_batch([3, 5], [9, 40])
    masks = [torch.rand(3, 9) < 0.5, torch.rand(5, 40) < 0.5]
    for mask in masks:
        mask[:, 0] = True
    wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(workspace("cpu"), jit_args=args)
    custom_mask = torch.cat([mask.flatten() for mask in masks])
    wrapper.plan(batch.qo_indptr, *batch.tables(), *batch.shape, batch.page_size, custom_mask=custom_mask)
    check(wrapper.run(batch.q, batch.cache, SCALE), batch.expected(masks=masks, sm_scale=SCALE))


def test_sinks_of_decodes() -> None:
    batch, sinks = make_batch([1, 1], [30, 4]), torch.tensor([1.0, -2.0, 0.0, 3.0])
    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(
        workspace("cpu"), jit_args=jit_args(SECOND_ARGS, "AttentionSink", "")
    )
    wrapper.plan(*batch.tables(), *batch.shape, batch.page_size)
    check(wrapper.run(batch.q, batch.cache, sinks, SCALE), batch.expected(sinks=sinks, sm_scale=SCALE))


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (
            jit_args(SECOND_ARGS, "Mine", EVERY_SECOND + "REGISTER_QUERY_TRANSFORM(params, q, {})"),
            "'Mine', which has REGISTER_QUERY_TRANSFORM",
        ),
        (jit_args((["a"], ["float4"], [], []), "Mine", EVERY_SECOND), "a tensor of type 'float4'"),
        (
            jit_args(
                ([], [], [], []),
                "Mine",
                OF_KV_HEADS.replace("[_, ", "[tile, ").replace("= qo_len_", "= qo_len_ + tile"),
            ),
            "reads q_tile_idx .*, as tile",
        ),
        (
            jit_args(([], [], [], []), "Mine", OF_KV_HEADS + "auto [a, b] = other;"),
            "which has auto .* of something else than block_coord",
        ),
    ],
)
def test_what_has_no_counterpart(args: list[Any], message: str) -> None:
    with pytest.raises(NotImplementedError, match=message):
        flashinfer.BatchPrefillWithPagedKVCacheWrapper(workspace("cpu"), jit_args=args)


def test_too_few_arguments() -> None:
    with pytest.raises(ValueError, match=r"len\(jit_args\) is 1, must be 13"):
        flashinfer.BatchDecodeWithPagedKVCacheWrapper(workspace("cpu"), jit_args=[1])
