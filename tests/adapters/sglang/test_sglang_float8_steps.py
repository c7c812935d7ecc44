"""All kinds of steps over e4m3 pools: Q keeps the model's type.

Compared with float64 attention over the stored values.
"""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("sglang.srt", reason="SGLang is not installed")

from fake_engine import FakeEngine, LayerShape, capture, plans_of
from sglang.srt.model_executor.forward_batch_info import ForwardMode
from sglang_float8 import engine_of
from sglang_steps import WINDOWED, check
from sglang_steps import step as checked_step
from torch import Tensor

from attn_backend.adapters.sglang import compat
from attn_backend.adapters.sglang.backend import SGLangAttentionBackend


@pytest.fixture(autouse=True)
def any_release_serves_on_cpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """These tests do not depend on the release."""
    monkeypatch.setattr(compat, "starts_triton_on_cpu", lambda name: False)


def step(
    engine: FakeEngine,
    backend: SGLangAttentionBackend,
    mode: ForwardMode,
    requests: list[int],
    new_lens: list[int],
    spec_info: object = None,
) -> None:
    """One step through all layers, compared with the reference."""
    checked_step(engine, backend, mode, requests, new_lens, spec_info)
    for plan in plans_of(backend).values():
        assert plan.current.q_dtype == engine.dtype
        assert plan.current is plan.attention


def serve(engine: FakeEngine) -> None:
    """Prompts, later chunks, decode steps, mixed steps, verified drafts and the steps after them."""
    backend = SGLangAttentionBackend(engine.runner())
    step(engine, backend, ForwardMode.EXTEND, [0, 1, 2], [33, 1, 16])
    step(engine, backend, ForwardMode.EXTEND, [0, 3, 1], [40, 15, 5])
    step(engine, backend, ForwardMode.EXTEND, [2], [9])
    for _ in range(2):
        step(engine, backend, ForwardMode.DECODE, [3, 0, 2, 1], [1, 1, 1, 1])
    step(engine, backend, ForwardMode.MIXED, [4, 0, 2], [50, 1, 1])
    step(
        engine,
        backend,
        ForwardMode.TARGET_VERIFY,
        [4, 0],
        [4, 4],
        SimpleNamespace(topk=1, draft_token_num=4, custom_mask=None),
    )
    step(engine, backend, ForwardMode.DRAFT_EXTEND_V2, [2, 3], [4, 4])
    step(engine, backend, ForwardMode.DECODE, [4], [1])


@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_serving(page_size: int, head_dim: int, dtype: torch.dtype) -> None:
    layers = tuple(LayerShape(head_dim=head_dim, v_head_dim=head_dim, logit_cap=cap) for cap in (0.0, 30.0))
    serve(engine_of(layers=layers, page_size=page_size, dtype=dtype))


@pytest.mark.parametrize("hybrid", [False, True])
def test_windows(hybrid: bool) -> None:
    serve(engine_of(layers=WINDOWED, page_size=16, hybrid=hybrid))


def test_variants() -> None:
    serve(engine_of(layers=(LayerShape(temperature_len=8, logit_cap=5.0),), page_size=16))


@pytest.mark.parametrize("page_size", [1, 64])
@pytest.mark.gpu
def test_full_size(page_size: int) -> None:
    """The heads of an 8B model: prompts that read a 16-bit copy of their tokens, a chunk after one, and
    short prompts, whose tokens are dequantized in the ring.
    """
    layers = (LayerShape(32, 8, 128, v_head_dim=128), LayerShape(32, 8, 128, v_head_dim=128, window=300))
    engine = engine_of(
        layers=layers, page_size=page_size, dtype=torch.bfloat16, device="cuda", max_tokens=2048
    )
    backend = SGLangAttentionBackend(engine.runner())
    step(engine, backend, ForwardMode.EXTEND, [0], [1500])
    step(engine, backend, ForwardMode.EXTEND, [1, 0, 2], [700, 300, 3])
    step(engine, backend, ForwardMode.MIXED, [3, 0, 1], [90, 1, 1])
    for _ in range(2):
        step(engine, backend, ForwardMode.DECODE, [0, 3, 2, 1], [1, 1, 1, 1])
    step(
        engine,
        backend,
        ForwardMode.TARGET_VERIFY,
        [0, 1],
        [4, 4],
        SimpleNamespace(topk=1, draft_token_num=4, custom_mask=None),
    )


@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize("hybrid", [False, True])
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_captured_extends(page_size: int, hybrid: bool, device: str) -> None:
    """Captured with one prompt, replayed for others with padding rows and in other modes, like
    PrefillCudaGraphRunner. On a CPU the code just runs again.
    """
    rows, requests_at_most = 64, 4
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    engine = engine_of(
        layers=(LayerShape(), LayerShape(window=20)),
        page_size=page_size,
        hybrid=hybrid,
        dtype=dtype,
        device=device,
    )
    for layer_id in range(2):
        for buffer in engine.pool.get_kv_buffer(layer_id):
            buffer[:page_size] = 0.0  # padding rows write slot 0 and read the slots in row 0 of the table
    engine.req_to_token_pool.req_to_token[0] = 0
    backend = SGLangAttentionBackend(engine.runner())
    backend.init_cuda_graph_state(requests_at_most, rows)
    out_cache_loc = torch.zeros(rows, dtype=torch.int64, device=device)
    like = engine.batch(ForwardMode.EXTEND, [0], [1])
    inputs = [
        [torch.zeros(rows, *x.shape[1:], dtype=dtype, device=device) for x in engine.tensors(like, layer_id)]
        for layer_id in range(2)
    ]
    static = SimpleNamespace(out_cache_loc=out_cache_loc, _attn_output=None)

    def run() -> list[Tensor]:
        return [
            backend.forward_extend(*inputs[layer_id], layer, static)
            for layer_id, layer in enumerate(engine.model)
        ]

    def plan(batch: SimpleNamespace, in_capture: bool = False) -> None:
        """Appends empty requests to the batch."""
        size = batch.batch_size
        padded = SimpleNamespace(
            **vars(batch) | {"batch_size": requests_at_most, "out_cache_loc": out_cache_loc}
        )
        for name, padding in (("req_pool_indices", 0), ("seq_lens", 1), ("extend_seq_lens", 0)):
            given = getattr(batch, name)
            setattr(padded, name, torch.cat([given, given.new_full((requests_at_most - size,), padding)]))
        out_cache_loc.zero_()[: batch.out_cache_loc.shape[0]] = batch.out_cache_loc
        backend.init_forward_metadata_out_graph(padded, in_capture=in_capture)

    plan(engine.batch(ForwardMode.EXTEND, [0], [rows]), in_capture=True)
    replay = capture(run, device)

    for mode, requests, new_lens in [
        (ForwardMode.EXTEND, [0, 2], [33, 30]),
        (ForwardMode.MIXED, [1, 2, 0], [40, 1, 1]),
        (ForwardMode.DRAFT_EXTEND_V2, [1, 0], [4, 4]),
        (ForwardMode.EXTEND, [3], [64]),
    ]:
        batch = engine.batch(mode, requests, new_lens)
        given = []
        for layer_id in range(2):
            q, k, v = engine.tensors(batch, layer_id)
            engine.remember(requests, new_lens, layer_id, k, v)
            given.append(q)
            for buffer, tensor in zip(inputs[layer_id], (q, k, v), strict=True):
                buffer.zero_()[: sum(new_lens)] = tensor
        plan(batch)
        for layer_id, out in enumerate(replay()):
            check(out[: sum(new_lens)], engine.reference(requests, new_lens, layer_id, given[layer_id]))
        engine.advance(requests, new_lens)


def test_the_engines_output() -> None:
    """Between the captured pieces of a prefill, attention runs eagerly, over padding rows, into the engine's
    output.
    """
    engine = engine_of(layers=(LayerShape(),), dtype=torch.bfloat16)
    backend = SGLangAttentionBackend(engine.runner())
    batch = engine.batch(ForwardMode.EXTEND, [0, 1], [20, 7])
    backend.init_forward_metadata(batch)
    q, k, v = engine.tensors(batch, 0)
    engine.remember([0, 1], [20, 7], 0, k, v)
    padded = torch.full((32, *q.shape[1:]), torch.nan, dtype=q.dtype)
    padded[:27] = q
    batch._attn_output = torch.full((32, 384), torch.inf, dtype=q.dtype)
    out = backend.forward(padded, k, v, engine.model[0], batch)
    assert out.data_ptr() == batch._attn_output.data_ptr()
    check(out[:27], engine.reference([0, 1], [20, 7], 0, q))
    assert out[27:].isinf().all()


def test_bits_of_a_decode_do_not_depend_on_prompts(monkeypatch: pytest.MonkeyPatch) -> None:
    """In the engine's deterministic mode: a decode by itself and in a batch with a prompt."""
    monkeypatch.setattr(compat, "deterministic", lambda: True)
    engine = engine_of(layers=(LayerShape(),), page_size=16)
    backend = SGLangAttentionBackend(engine.runner())
    prompt = engine.batch(ForwardMode.EXTEND, [0], [40])
    backend.init_forward_metadata(prompt)
    backend.forward(*engine.tensors(prompt, 0), engine.model[0], prompt)
    engine.advance([0], [40])
    mixed, alone = (
        engine.batch(ForwardMode.MIXED, [0, 1], [1, 30]),
        engine.batch(ForwardMode.DECODE, [0], [1]),
    )
    q, k, v = engine.tensors(mixed, 0)
    outputs = []
    for batch, rows in ((mixed, 31), (alone, 1)):
        backend.init_forward_metadata(batch)
        outputs.append(backend.forward(q[:rows], k[:rows], v[:rows], engine.model[0], batch)[0])
    assert torch.equal(*outputs)
