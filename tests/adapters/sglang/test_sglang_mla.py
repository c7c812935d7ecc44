"""Latents in SGLang's own pool, and both attention paths of its DeepSeek models, compared with float64
attention."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("sglang.srt", reason="SGLang is not installed")

from fake_engine import model_config, plans_of
from sglang.srt.configs.model_config import AttentionArch
from sglang.srt.model_executor.forward_batch_info import ForwardMode
from sglang.srt.models.deepseek_common import utils
from sglang_latents import HEADS, QK, Engine, V, step
from sglang_steps import TOLERANCE

from attn_backend.adapters.sglang.backend import SGLangAttentionBackend
from attn_backend.adapters.sglang.compat import NAME

CASES = [
    *(pytest.param("cpu", dtype, id=f"cpu-{dtype}".replace("torch.", "")) for dtype in TOLERANCE),
    *(
        pytest.param("cuda", dtype, id=f"cuda-{dtype}".replace("torch.", ""), marks=pytest.mark.gpu)
        for dtype in (torch.bfloat16, torch.float16)
    ),
]


pytestmark = pytest.mark.usefixtures("needs_a_release_that_serves_on_cpus")


@pytest.mark.parametrize("apart", [True, False])
@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize(("device", "dtype"), CASES)
def test_serving(page_size: int, device: str, dtype: torch.dtype, apart: bool) -> None:
    engine = Engine(page_size, dtype, device)
    backend = SGLangAttentionBackend(engine.runner())
    step(engine, backend, ForwardMode.EXTEND, [0, 1, 2], [33, 1, 16])  # decompressed
    # 0 and 1 have a prefix: all run over latents
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
    """A checkpoint's scales are ignored, since the models ignore them when they write latents."""
    engine = Engine(16, dtype, device, kv_dtype)
    for layer in engine.model:
        layer.attn_mqa.k_scale = layer.attn_mqa.v_scale = torch.tensor(0.5, device=device)  # type: ignore[union-attr]
    backend = SGLangAttentionBackend(engine.runner())
    assert {(key.of_this_step, key.kv_dtype) for key in plans_of(backend)} == {
        (False, kv_dtype),
        (True, None),
    }
    step(engine, backend, ForwardMode.EXTEND, [0, 1, 2], [33, 1, 16])
    step(engine, backend, ForwardMode.EXTEND, [0, 3, 1], [40, 15, 5])
    step(engine, backend, ForwardMode.DECODE, [3, 0, 2, 1], [1, 1, 1, 1])


def test_models_are_told_to_give_parts() -> None:
    """Not told: a model that scales whole queries, and a model with drafts of another kind."""
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
    keys = sorted(plans_of(backend))
    assert [(key.num_kv_heads, key.head_dim, key.head_dim_v, key.of_this_step) for key in keys] == [
        (1, 576, 512, False),
        (HEADS, QK, V, True),
    ]
    latents, decompressed = (plans_of(backend)[key] for key in keys)
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
    """Prompts attend to decompressed keys only if the host knows that no request has a prefix."""
    engine = Engine()
    backend = SGLangAttentionBackend(engine.runner())
    batch = engine.batch(ForwardMode.EXTEND, [0, 1], [3, 4])
    batch.extend_prefix_lens_cpu = prefix_lens
    backend.init_forward_metadata(batch)
    (decompressed,) = (plan for key, plan in plans_of(backend).items() if key.of_this_step)
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
