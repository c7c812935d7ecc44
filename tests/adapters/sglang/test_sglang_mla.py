"""Latents in SGLang's own pool, and both ways of its DeepSeek models, against attention in float64."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import latent_cases
import pytest
import torch

pytest.importorskip("sglang.srt", reason="SGLang is not installed")

from fake_engine import MAX_REQUESTS, MAX_TOKENS, FakeEngine, LayerShape, model_config
from sglang.srt.configs.model_config import AttentionArch
from sglang.srt.layers.radix_attention import RadixAttention
from sglang.srt.mem_cache.memory_pool import MLATokenToKVPool
from sglang.srt.model_executor.forward_batch_info import ForwardMode
from sglang.srt.models.deepseek_common import utils
from torch import Tensor, nn

from attn_backend.adapters.sglang.backend import SGLangAttentionBackend
from attn_backend.adapters.sglang.compat import NAME

HEADS, LATENT, ROPE, QK, V = 4, 512, 64, 192, 128
SCALE = 192**-0.5
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 5e-3, torch.float16: 1e-3}
CASES = [
    *(pytest.param("cpu", dtype, id=f"cpu-{dtype}".replace("torch.", "")) for dtype in TOLERANCE),
    *(
        pytest.param("cuda", dtype, id=f"cuda-{dtype}".replace("torch.", ""), marks=pytest.mark.gpu)
        for dtype in (torch.bfloat16, torch.float16)
    ),
]


pytestmark = pytest.mark.usefixtures("needs_a_release_that_serves_on_cpus")


class SelfAttention(nn.Module):
    """What a layer of DeepSeek has: attention in the latents, and in decompressed keys and values."""

    def __init__(self, layer_id: int) -> None:
        super().__init__()
        self.attn_mqa = RadixAttention(HEADS, LATENT + ROPE, SCALE, 1, layer_id, v_head_dim=LATENT)
        self.attn_mha = RadixAttention(HEADS, QK, SCALE, HEADS, layer_id, v_head_dim=V)


class Engine(FakeEngine):
    def __init__(
        self,
        page_size: int = 1,
        dtype: torch.dtype = torch.float32,
        device: str = "cpu",
        kv_dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__((LayerShape(),), page_size, dtype, device=device)
        size = MAX_REQUESTS * MAX_TOKENS
        self.kv_dtype = kv_dtype or dtype
        self.pool: Any = MLATokenToKVPool(size, page_size, self.kv_dtype, LATENT, ROPE, 2, device, False)
        for layer_id in range(2):
            self.pool.kv_buffer[layer_id].fill_(0x7F if kv_dtype else float("nan"))  # NaN, in 8 bits, too
        self.model = nn.ModuleList(SelfAttention(i) for i in range(2))
        self.latents: dict[tuple[int, int], Tensor] = {}  # of a request in a layer: float64 [tokens, 576]

    def runner(self, **changes: object) -> SimpleNamespace:
        config = model_config(
            attention_arch=AttentionArch.MLA,
            hf_config=SimpleNamespace(architectures=["DeepseekV2ForCausalLM"]),
        )
        return super().runner(**{"model_config": config, "kv_cache_dtype": self.kv_dtype, **changes})

    def randn(self, *shape: int) -> Tensor:
        return torch.randn(*shape, generator=self.generator).to(self.device, self.dtype)

    def remember_latents(self, requests: list[int], new_lens: list[int], layer_id: int, new: Tensor) -> None:
        for i, rows in zip(requests, new.cpu().double().split(new_lens), strict=True):
            before = self.latents.get((i, layer_id), rows[:0])
            self.latents[i, layer_id] = torch.cat([before, rows])


def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """float64 [rows, heads * columns of V]: the rows are the last tokens of k [tokens, heads, ...]."""
    scores = torch.einsum("qhd,khd->hqk", q.cpu().double(), k.cpu().double()) * SCALE
    hidden = torch.arange(len(k)) > torch.arange(len(k) - len(q), len(k))[:, None]
    return torch.einsum(
        "hqk,khd->qhd", scores.masked_fill(hidden, -torch.inf).softmax(-1), v.cpu().double()
    ).flatten(1)


def check(out: Tensor, expected: Tensor) -> None:
    assert out.shape == expected.shape
    assert (out.cpu().double() - expected).norm() / expected.norm() <= TOLERANCE[out.dtype]


def step(
    engine: Engine,
    backend: SGLangAttentionBackend,
    mode: ForwardMode,
    requests: list[int],
    new_lens: list[int],
    apart: bool = True,
) -> None:
    """apart: the model gives the parts of Q and K as they are."""
    batch = engine.batch(mode, requests, new_lens)
    backend.init_forward_metadata(batch)
    decompressed = mode == ForwardMode.EXTEND and sum(batch.extend_prefix_lens_cpu) == 0  # as SGLang decides
    rows = sum(new_lens)
    for layer_id, layer in enumerate(engine.model):
        latent = engine.randn(rows, 1, LATENT + ROPE)
        if engine.kv_dtype != engine.dtype:
            latent = latent.to(engine.kv_dtype).to(engine.dtype)  # what the pool holds of it
        engine.remember_latents(requests, new_lens, layer_id, latent[:, 0])
        if decompressed:
            q, k, v = (
                engine.randn(rows, HEADS, QK),
                engine.randn(rows, HEADS, QK),
                engine.randn(rows, HEADS, QK + V)[..., QK:],
            )
            # The model writes latents itself.
            engine.pool.kv_buffer[layer_id][batch.out_cache_loc] = latent.to(engine.kv_dtype).view(
                engine.pool.store_dtype
            )
            out = backend.forward(q, k, v, layer.attn_mha, batch, save_kv_cache=False)
            check(
                out,
                torch.cat(
                    [
                        attention(*parts)
                        for parts in zip(q.split(new_lens), k.split(new_lens), v.split(new_lens), strict=True)
                    ]
                ),
            )
            continue
        q = engine.randn(rows, HEADS, LATENT + ROPE)
        if apart:
            q_nope, q_rope = latent_cases.parts_of_q(q, "engine")
            k_nope, k_rope = latent.clone()[..., :LATENT], latent[..., LATENT:]
            out = backend.forward(q_nope, k_nope, k_nope, layer.attn_mqa, batch, q_rope=q_rope, k_rope=k_rope)
        else:
            out = backend.forward(q, latent, latent[..., :LATENT], layer.attn_mqa, batch)
        expected = []
        for i, q_of_request in zip(requests, q.split(new_lens), strict=True):
            k = engine.latents[i, layer_id][:, None].expand(-1, HEADS, -1)
            expected.append(attention(q_of_request, k, k[..., :LATENT]))
        check(out, torch.cat(expected))
    engine.advance(requests, new_lens)


@pytest.mark.parametrize("apart", [True, False])
@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize(("device", "dtype"), CASES)
def test_serving(page_size: int, device: str, dtype: torch.dtype, apart: bool) -> None:
    engine = Engine(page_size, dtype, device)
    backend = SGLangAttentionBackend(engine.runner())
    step(engine, backend, ForwardMode.EXTEND, [0, 1, 2], [33, 1, 16])  # decompressed
    # 0 and 1 have a prefix: all in the latents
    step(engine, backend, ForwardMode.EXTEND, [0, 3, 1], [40, 15, 5], apart)
    for _ in range(2):
        step(engine, backend, ForwardMode.DECODE, [3, 0, 2, 1], [1, 1, 1, 1], apart)
    step(engine, backend, ForwardMode.EXTEND, [4], [20])
    step(engine, backend, ForwardMode.DECODE, [4, 1], [1, 1], apart)
    written = sum(request.length for request in engine.requests)
    for layer_id in range(2):
        assert int(engine.pool.get_key_buffer(layer_id).isfinite().all(-1).sum()) == written, (
            "nothing else was written"
        )


@pytest.mark.parametrize("kv_dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
@pytest.mark.parametrize(("device", "dtype"), [case for case in CASES if "float32" not in case.id])
def test_serving_from_8_bit_latents(device: str, dtype: torch.dtype, kv_dtype: torch.dtype) -> None:
    """Scales of a checkpoint are left alone, as the models leave them alone that write latents."""
    engine = Engine(16, dtype, device, kv_dtype)
    for layer in engine.model:
        layer.attn_mqa.k_scale = layer.attn_mqa.v_scale = torch.tensor(0.5, device=device)  # type: ignore[union-attr]
    backend = SGLangAttentionBackend(engine.runner())
    assert {(key.of_this_step, key.kv_dtype) for key in backend._plans} == {(False, kv_dtype), (True, None)}
    step(engine, backend, ForwardMode.EXTEND, [0, 1, 2], [33, 1, 16])
    step(engine, backend, ForwardMode.EXTEND, [0, 3, 1], [40, 15, 5])
    step(engine, backend, ForwardMode.DECODE, [3, 0, 2, 1], [1, 1, 1, 1])


def test_models_are_told_to_give_parts() -> None:
    """Not one that scales whole queries, nor a model whose drafts are of another kind."""
    names = utils.FORWARD_ABSORB_CORE_ATTENTION_BACKENDS
    before = list(names)
    try:
        plain, scaled = Engine(), Engine()
        scaled.model[1].llama_4_scaling_config = {"beta": 0.1}  # type: ignore[assignment]
        for engine, changes, is_told in (
            (plain, {}, True),
            (plain, {}, True),
            (scaled, {}, False),
            (plain, {"is_draft_worker": True}, False),
            (plain, {}, True),
        ):
            SGLangAttentionBackend(engine.runner(**changes))
            assert names.count(NAME) == is_told
    finally:
        names[:] = before


def test_layers_share_two_plans() -> None:
    engine = Engine()
    backend = SGLangAttentionBackend(engine.runner())
    keys = sorted(backend._plans)
    assert [(key.num_kv_heads, key.head_dim, key.head_dim_v, key.of_this_step) for key in keys] == [
        (1, 576, 512, False),
        (HEADS, QK, V, True),
    ]
    latents, decompressed = (backend._plans[key] for key in keys)
    backend.init_forward_metadata(engine.batch(ForwardMode.EXTEND, [0], [7]))
    assert decompressed.current is decompressed.attention
    engine.advance([0], [7])
    backend.init_forward_metadata(engine.batch(ForwardMode.DECODE, [0], [1]))
    assert decompressed.current is None, "planned only where it is used"
    assert latents.current is latents.attention


@pytest.mark.parametrize(
    ("prefix_lens", "may_have_prefixes"), [(None, True), ([0, 0], False), ([0, 7], True), ([7, 0], True)]
)
def test_prefixes_that_the_host_may_not_know(prefix_lens: list[int] | None, may_have_prefixes: bool) -> None:
    """Prompts attend to decompressed keys only where the host knows that no request has a prefix."""
    engine = Engine()
    backend = SGLangAttentionBackend(engine.runner())
    batch = engine.batch(ForwardMode.EXTEND, [0, 1], [3, 4])
    batch.extend_prefix_lens_cpu = prefix_lens
    backend.init_forward_metadata(batch)
    (decompressed,) = (plan for key, plan in backend._plans.items() if key.of_this_step)
    assert (decompressed.current is None) == may_have_prefixes


def test_decompressed_keys_after_a_prefix_are_refused() -> None:
    engine = Engine()
    backend = SGLangAttentionBackend(engine.runner())
    engine.advance([0], [7])
    batch = engine.batch(ForwardMode.EXTEND, [0], [3])
    backend.init_forward_metadata(batch)
    with pytest.raises(ValueError, match="decompressed keys and values after a cached prefix"):
        backend.forward(
            engine.randn(3, HEADS, QK),
            engine.randn(3, HEADS, QK),
            engine.randn(3, HEADS, V),
            engine.model[0].attn_mha,
            batch,
            save_kv_cache=False,
        )


def test_refused_models() -> None:
    engine = Engine()
    sparse = model_config(
        attention_arch=AttentionArch.MLA,
        hf_config=SimpleNamespace(architectures=["DeepseekV32ForCausalLM"], index_topk=2048),
    )
    with pytest.raises(
        ValueError, match=r"sparse attention over latents on a CPU .*: use another --attention-backend"
    ):
        SGLangAttentionBackend(engine.runner(model_config=sparse))
    engine.pool.store_dtype = torch.uint8
    with pytest.raises(ValueError, match=r"latents of torch\.float32 stored as torch\.uint8"):
        SGLangAttentionBackend(engine.runner())
