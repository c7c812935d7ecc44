"""torch.compile(fullgraph=True) through run, append_kv, append_qkv, append_mla_kv and sample: the same bits
as eager.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from attn_backend import (
    Attention,
    BSRView,
    KVCache,
    PageTable,
    Rotary,
    Samples,
    Variant,
    append_kv,
    append_mla_kv,
    append_qkv,
    sample,
)
from attn_backend.variants import builtin

HEADS, KV_HEADS, HEAD_DIM, PAGE, VOCAB = 4, 2, 64, 16, 97
QO_LENS, KV_LENS = [1, 5, 1], [20, 40, 7]
WIDTH = HEADS * HEAD_DIM


def attention(device: torch.device, **options: object) -> Attention:
    made = Attention(HEADS, KV_HEADS, HEAD_DIM, device=device, max_rows=16, max_batch=4, **options)  # type: ignore[arg-type]
    pages = [-(-length // PAGE) for length in KV_LENS]
    table = torch.zeros(3, max(pages), dtype=torch.int32, device=device)
    for row, (count, first) in enumerate(zip(pages, (0, 2, 5), strict=True)):
        table[row, :count] = torch.arange(first, first + count)
    indptr = torch.tensor([0, *QO_LENS], device=device).cumsum(0).int()
    made.plan(
        BSRView(
            indptr,
            PageTable.block_table(table, torch.tensor(KV_LENS, dtype=torch.int32, device=device), PAGE),
        )
    )
    return made


class Layer(torch.nn.Module):
    """Projections, attention and sampling; `fused`: norm and rotary embedding in the append."""

    def __init__(self, attention: Attention, fused: bool, device: torch.device) -> None:
        super().__init__()
        self.attention, self.fused = attention, fused
        self.qkv = torch.nn.Linear(
            WIDTH, (HEADS + 2 * KV_HEADS) * HEAD_DIM, bias=False, device=device, dtype=torch.bfloat16
        )
        self.out = torch.nn.Linear(WIDTH, VOCAB, bias=False, device=device, dtype=torch.bfloat16)
        self.rotary = Rotary(builtin.rope_frequencies(HEAD_DIM).float().to(device))
        self.norm = torch.nn.Parameter(torch.randn(HEAD_DIM, device=device).bfloat16())

    def forward(
        self, x: Tensor, cache: Tensor, slots: Tensor, positions: Tensor, seeds: Tensor
    ) -> tuple[Tensor, Tensor, Samples]:
        kv = KVCache.from_tensor(cache)
        q, k, v = self.qkv(x).unflatten(-1, (-1, HEAD_DIM)).split([HEADS, KV_HEADS, KV_HEADS], dim=1)
        if self.fused:
            q = append_qkv(
                q,
                k,
                v,
                kv,
                slots,
                rotary=self.rotary,
                positions=positions,
                q_norm=self.norm,
                k_norm=self.norm,
            )
        else:
            append_kv(k, v, kv, slots)
        lse = torch.empty(len(x), HEADS, dtype=torch.float32, device=x.device)
        o = self.attention.run(q.contiguous(), kv, lse=lse, after_append=True)
        logits = self.out(torch.relu(o.flatten(1)) + x)
        return (
            o,
            lse,
            sample(
                logits,
                temperature=0.9,
                top_k=20,
                seed=seeds,
                position=positions,
                return_logprobs=True,
                num_top_logprobs=3,
            ),
        )


@pytest.fixture(autouse=True)
def no_gradients() -> object:
    with torch.no_grad():
        torch._dynamo.reset()
        yield


@pytest.mark.slow
@pytest.mark.parametrize("fused", [False, True])
def test_a_decoder_layer(device: torch.device, fused: bool) -> None:
    torch.manual_seed(0)
    layer = Layer(attention(device), fused, device)
    rows = sum(QO_LENS)
    x = torch.randn(rows, WIDTH, device=device).bfloat16()
    slots = torch.tensor([19, *range(2 * PAGE + 35, 2 * PAGE + 40), 5 * PAGE + 6], device=device)
    positions, seeds = torch.tensor([19, *range(35, 40), 6], device=device), torch.arange(rows, device=device)
    compiled = torch.compile(layer, fullgraph=True)
    cache = torch.randn(8, 2, PAGE, KV_HEADS, HEAD_DIM, device=device).bfloat16()
    for _ in range(2):
        caches = cache.clone(), cache.clone()
        o, lse, samples = layer(x, caches[0], slots, positions, seeds)
        compiled_o, compiled_lse, compiled_samples = compiled(x, caches[1], slots, positions, seeds)
        assert not torch.equal(caches[0], cache)
        for eager, of_graph in (caches, (o, compiled_o), (lse, compiled_lse)):
            assert torch.equal(eager, of_graph)
        for name in ("token_ids", "valid", "logprobs", "top_token_ids", "top_logprobs"):
            assert torch.equal(getattr(samples, name), getattr(compiled_samples, name)), name
        x = x.roll(1, 0)


@pytest.mark.slow
def test_a_variant_with_arguments(device: torch.device) -> None:
    variant = builtin.alibi() & builtin.causal()
    made = attention(device, variant=variant)
    q = torch.randn(sum(QO_LENS), HEADS, HEAD_DIM, device=device).bfloat16()
    cache = torch.randn(8, 2, PAGE, KV_HEADS, HEAD_DIM, device=device).bfloat16()
    slopes = builtin.alibi_slopes(HEADS).to(device)

    def attend(q: Tensor, cache: Tensor, slopes: Tensor) -> Tensor:
        return made.run(q + q, KVCache.from_tensor(cache), variant_args={"slopes": slopes}) + 1

    assert torch.equal(attend(q, cache, slopes), torch.compile(attend, fullgraph=True)(q, cache, slopes))


@pytest.mark.slow
def test_numbers_that_change_between_calls_keep_their_types(device: torch.device) -> None:
    """torch.compile turns changing numbers into symbols: an int parameter must stay an int."""
    variant = Variant.from_source(
        "float logits(float logit, const ScoreRow& row, int32_t kv_position) const { return logit + factor * "
        "(float)((kv_position + shift) % 7); }",
        {"factor": float, "shift": int},
        name="shifted",
    )
    made = attention(device, variant=variant)
    q = torch.randn(sum(QO_LENS), HEADS, HEAD_DIM, device=device).bfloat16()
    cache = torch.randn(8, 2, PAGE, KV_HEADS, HEAD_DIM, device=device).bfloat16()

    def attend(shift: int, factor: float, sm_scale: float) -> Tensor:
        return (
            made.run(
                q,
                KVCache.from_tensor(cache),
                sm_scale=sm_scale,
                variant_args={"factor": factor, "shift": shift},
            )
            * 2
        )

    compiled, outputs = torch.compile(attend, fullgraph=True), []
    for numbers in ((3, 0.5, 0.125), (4, 0.25, 0.1), (5, 2.0, 0.25), (-6, 2.0, 0.25)):
        outputs.append(attend(*numbers))
        assert torch.equal(outputs[-1], compiled(*numbers)), numbers
    assert not any(torch.equal(outputs[0], other) for other in outputs[1:])


@pytest.mark.slow
def test_q_is_written_where_no_out_is_given(device: torch.device) -> None:
    rotary = Rotary(builtin.rope_frequencies(HEAD_DIM).float().to(device))
    slots, positions = torch.tensor([3, 1, 20], device=device), torch.tensor([3, 1, 4], device=device)

    def layer(x: Tensor, cache: Tensor) -> tuple[Tensor, Tensor]:
        q, k, v = (x + x).split([HEADS, KV_HEADS, KV_HEADS], dim=1)
        returned = append_qkv(q, k, v, KVCache.from_tensor(cache), slots, rotary=rotary, positions=positions)
        return q + 1, returned * 2

    x, cache = (
        torch.randn(3, HEADS + 2 * KV_HEADS, HEAD_DIM, device=device).bfloat16(),
        torch.zeros(8, 2, PAGE, KV_HEADS, HEAD_DIM, device=device).bfloat16(),
    )
    caches = cache.clone(), cache.clone()
    eager, of_graph = layer(x, caches[0]), torch.compile(layer, fullgraph=True)(x, caches[1])
    assert not torch.equal(eager[0], (x + x)[:, :HEADS] + 1)
    assert all(torch.equal(*pair) for pair in (*zip(eager, of_graph, strict=True), caches))


@pytest.mark.slow
def test_an_8_bit_cache_with_scales(device: torch.device) -> None:
    """Scales as numbers and as tensors, which a graph reads on each run; V has a different width."""
    made = attention(device, kv_dtype=torch.float8_e4m3fn, head_dim_v=32)
    rows = sum(QO_LENS)
    q, k = (torch.randn(rows, heads, HEAD_DIM, device=device).bfloat16() for heads in (HEADS, KV_HEADS))
    caches = [
        [
            torch.zeros(8, PAGE, KV_HEADS, columns, device=device).to(torch.float8_e4m3fn)
            for columns in (HEAD_DIM, 32)
        ]
        for _ in range(2)
    ]
    slots, scale = torch.arange(rows, device=device), torch.tensor([0.5, 2.0], device=device)

    def layer(q: Tensor, k: Tensor, k_cache: Tensor, v_cache: Tensor, scale: Tensor) -> Tensor:
        kv = KVCache.from_pair(k_cache, v_cache, k_scale=0.25, v_scale=scale)
        append_kv(k, k[..., :32], kv, slots)
        return made.run(q, kv)

    compiled = torch.compile(layer, fullgraph=True)
    for factor in (1.0, 3.0):
        outputs = [
            function(q, k, *pair, scale * factor)
            for function, pair in ((layer, caches[0]), (compiled, caches[1]))
        ]
        assert outputs[0].shape == (rows, HEADS, 32)
        assert torch.equal(*outputs)
        assert outputs[0].abs().sum() > 0
        for one, other in zip(*caches, strict=True):
            assert torch.equal(one.view(torch.uint8), other.view(torch.uint8))


@pytest.mark.slow
@pytest.mark.parametrize("of_heads", [False, True])
def test_queries_of_8_bits(device: torch.device, of_heads: bool) -> None:
    """With their scale as a number, and as a tensor."""
    made = attention(device, kv_dtype=torch.float8_e4m3fn, q_dtype=torch.float8_e4m3fn)
    q, k, v = (
        torch.randn(shape, device=device).to(torch.float8_e4m3fn)
        for shape in ((sum(QO_LENS), HEADS, HEAD_DIM), *[(8, PAGE, KV_HEADS, HEAD_DIM)] * 2)
    )
    q_scale = torch.tensor([0.5, 2.0], device=device) if of_heads else 0.7

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return made.run(q, KVCache.from_pair(k, v), q_scale=q_scale) * 2

    eager = attend(q, k, v)
    assert eager.dtype == torch.bfloat16
    assert not torch.equal(eager, made.run(q, KVCache.from_pair(k, v)) * 2)
    assert torch.equal(eager, torch.compile(attend, fullgraph=True)(q, k, v))


@pytest.mark.slow
def test_values_of_another_width(device: torch.device) -> None:
    made = attention(device, head_dim_v=40)
    q = torch.randn(sum(QO_LENS), HEADS, HEAD_DIM, device=device).bfloat16()
    k, v = (torch.randn(8, PAGE, KV_HEADS, width, device=device).bfloat16() for width in (HEAD_DIM, 40))

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return made.run(q, KVCache.from_pair(k, v)) * 2

    eager = attend(q, k, v)
    assert eager.shape == (sum(QO_LENS), HEADS, 40)
    assert torch.equal(eager, torch.compile(attend, fullgraph=True)(q, k, v))


@pytest.mark.slow
def test_appended_latents(device: torch.device) -> None:
    caches = [torch.zeros(4, 4, 576, dtype=torch.bfloat16, device=device) for _ in range(2)]
    latent, rope = torch.randn(3, 512, device=device).bfloat16(), torch.randn(3, 64, device=device).bfloat16()
    slots = torch.tensor([5, -1, 11], device=device)

    def layer(cache: Tensor) -> None:
        k = cache.unsqueeze(2)
        append_mla_kv(latent * 2, rope, KVCache.unchecked(k, k[..., :512]), slots)

    layer(caches[0])
    torch.compile(layer, fullgraph=True)(caches[1])
    assert torch.equal(*caches)
    assert caches[0].abs().sum() > 0


@pytest.mark.slow
def test_draws_without_a_seed_are_refused_when_a_function_is_compiled() -> None:
    with pytest.raises(Exception, match="seed is None, must be given in a compiled function"):
        torch.compile(lambda logits: sample(logits).token_ids, fullgraph=True)(torch.randn(2, VOCAB))
