"""Queries of extends over e4m3 pools, rounded to e4m3: the default on a Hopper GPU, enabled here on a CPU
too.

Compared with float64 attention over the stored values.
"""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("sglang.srt", reason="SGLang is not installed")

from fake_engine import FakeEngine, LayerShape, capture, plans_of
from sglang.srt.model_executor.forward_batch_info import ForwardMode
from sglang_float8 import E4M3, E5M2, engine_of
from sglang_steps import TOLERANCE, WINDOWED
from torch import Tensor

from attn_backend.adapters.layers import multiplies_float8
from attn_backend.adapters.sglang import backend as sglang_backend
from attn_backend.adapters.sglang import compat
from attn_backend.adapters.sglang import plan as sglang_plan
from attn_backend.adapters.sglang.backend import QueryRounder, SGLangAttentionBackend, quantize

MOST = 3.5e-2  # for rounded queries, and on a GPU rounded probabilities
EXTENDS = (ForwardMode.EXTEND, ForwardMode.MIXED, ForwardMode.DRAFT_EXTEND_V2)


@pytest.fixture(autouse=True)
def queries_of_8_bits(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> None:
    """The default on a Hopper GPU. Tests on a GPU request it themselves."""
    monkeypatch.delenv("ATTN_BACKEND_SGLANG_FP8_QUERIES", raising=False)
    monkeypatch.setattr(compat, "starts_triton_on_cpu", lambda name: False)
    if request.node.get_closest_marker("gpu") is None:
        monkeypatch.setattr(
            sglang_plan,
            "multiplies_float8",
            lambda float8, head_size, device: float8 == E4M3 and head_size in (64, 128),
        )
    elif not multiplies_float8(E4M3, 128, torch.device("cuda", 0)):
        pytest.skip("this GPU's kernels widen 8-bit queries")


def error(out: Tensor, expected: Tensor) -> float:
    return float((out.cpu().double() - expected).norm() / expected.norm())


def check_extend(
    engine: FakeEngine, out: Tensor, q: Tensor, requests: list[int], new_lens: list[int], layer_id: int
) -> None:
    """On a CPU, rounding is the only difference."""
    off = error(out, engine.reference(requests, new_lens, layer_id, q))
    assert off <= MOST
    if engine.device == "cpu":
        assert off > 2 * TOLERANCE[torch.bfloat16], "Q was not rounded"
        assert (
            error(out, engine.reference(requests, new_lens, layer_id, quantize(q, None, E4M3).to(q.dtype)))
            <= TOLERANCE[out.dtype]
        )


def step(
    engine: FakeEngine,
    backend: SGLangAttentionBackend,
    mode: ForwardMode,
    requests: list[int],
    new_lens: list[int],
    spec_info: object = None,
) -> None:
    """One step through all layers."""
    batch = engine.batch(mode, requests, new_lens, spec_info)
    backend.init_forward_metadata(batch)
    for layer_id, layer in enumerate(engine.model):
        q, k, v = engine.tensors(batch, layer_id)
        engine.remember(requests, new_lens, layer_id, k, v)
        before = q.clone()
        out = backend.forward(q, k, v, layer, batch)
        attention = backend._layers[layer].plan.current
        assert attention is not None
        assert out.dtype == engine.dtype
        assert torch.equal(q, before)
        if mode in EXTENDS:
            assert attention.q_dtype == E4M3
            check_extend(engine, out, q, requests, new_lens, layer_id)
        else:
            assert attention.q_dtype == engine.dtype
            assert error(out, engine.reference(requests, new_lens, layer_id, q)) <= TOLERANCE[out.dtype]
    engine.advance(requests, new_lens)


def serve(engine: FakeEngine) -> SGLangAttentionBackend:
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
    return backend


def extends_in_8_bits(backend: SGLangAttentionBackend) -> list[bool]:
    return [plan.of_extends is not None for plan in plans_of(backend).values()]


@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_serving(page_size: int, head_dim: int, dtype: torch.dtype) -> None:
    layers = tuple(LayerShape(head_dim=head_dim, v_head_dim=head_dim, logit_cap=cap) for cap in (0.0, 30.0))
    assert extends_in_8_bits(serve(engine_of(layers=layers, page_size=page_size, dtype=dtype))) == [
        True,
        True,
    ]


@pytest.mark.parametrize("scales", ["number", "none"])
def test_other_scales(scales: str) -> None:
    serve(engine_of(scales=scales, page_size=16))


@pytest.mark.parametrize("hybrid", [False, True])
def test_windows(hybrid: bool) -> None:
    serve(engine_of(layers=WINDOWED, page_size=16, hybrid=hybrid))


def test_variants() -> None:
    serve(engine_of(layers=(LayerShape(temperature_len=8, logit_cap=5.0),), page_size=16))


def test_pools_that_write_by_themselves(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compat, "copies_to_slots", lambda pool: False)
    serve(engine_of(page_size=16))


@pytest.mark.parametrize("page_size", [1, 64])
@pytest.mark.gpu
def test_full_size(page_size: int) -> None:
    """The heads of an 8B model: prompts that fill the largest row tiles, a chunk after one, and short
    prompts, whose row tiles dequantize Q.
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
            check_extend(engine, out[: sum(new_lens)], given[layer_id], requests, new_lens, layer_id)
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
    check_extend(engine, out[:27], q, [0, 1], [20, 7], 0)
    assert out[27:].isinf().all()


def test_batches_beyond_the_bounds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sglang_backend, "most_requests", lambda *_: 2)
    monkeypatch.setattr(sglang_backend, "longest_extend", lambda _: 18)
    engine = engine_of(layers=(LayerShape(),))
    backend = SGLangAttentionBackend(engine.runner())
    (plan,) = plans_of(backend).values()
    kept = plan.of_extends.attention
    step(engine, backend, ForwardMode.EXTEND, [0, 1, 2], [33, 1, 16])
    assert plan.current is not kept
    step(engine, backend, ForwardMode.EXTEND, [1, 0], [5, 6])
    assert plan.current is kept  # captured graphs may refer to it
    step(engine, backend, ForwardMode.DECODE, [1, 0], [1, 1])
    assert plan.current is plan.attention
    backend.init_cuda_graph_state(4, 60)
    step(engine, backend, ForwardMode.EXTEND, [0, 1, 2], [33, 10, 16])
    assert plan.current is plan.of_extends.attention


def test_a_layer_that_reads_another_ones_cache() -> None:
    """It appends nothing."""
    engine = engine_of(layers=(LayerShape(),))
    backend = SGLangAttentionBackend(engine.runner())
    batch = engine.batch(ForwardMode.EXTEND, [0], [30])
    backend.init_forward_metadata(batch)
    q, k, v = engine.tensors(batch, 0)
    engine.remember([0], [30], 0, k, v)
    backend.forward(q, k, v, engine.model[0], batch)
    check_extend(
        engine,
        backend.forward(q, None, None, LayerShape().build(0), batch, save_kv_cache=False),
        q,
        [0],
        [30],
        0,
    )


def test_queries_are_rounded_before_the_append(monkeypatch: pytest.MonkeyPatch) -> None:
    """run() may start while the launch before it runs, if that is the append."""
    engine = engine_of(layers=(LayerShape(),))
    backend = SGLangAttentionBackend(engine.runner())
    calls = []

    def noted(module: object, name: str) -> None:
        original = getattr(module, name)
        monkeypatch.setattr(
            module, name, lambda *args, **options: (calls.append(name), original(*args, **options))[1]
        )

    noted(sglang_backend, "append_rounded")
    noted(sglang_backend, "append_kv")
    step(engine, backend, ForwardMode.EXTEND, [0], [20])
    step(engine, backend, ForwardMode.DECODE, [0], [1])
    assert calls == ["append_rounded", "append_kv", "append_kv"]


def test_the_option_keeps_16_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ATTN_BACKEND_SGLANG_FP8_QUERIES", "0")
    engine = engine_of()
    backend = SGLangAttentionBackend(engine.runner())
    assert extends_in_8_bits(backend) == [False, False]
    batch = engine.batch(ForwardMode.EXTEND, [0, 1], [20, 7])
    backend.init_forward_metadata(batch)
    q, k, v = engine.tensors(batch, 0)
    engine.remember([0, 1], [20, 7], 0, k, v)
    assert (
        error(backend.forward(q, k, v, engine.model[0], batch), engine.reference([0, 1], [20, 7], 0, q))
        <= TOLERANCE[torch.float32]
    )


@pytest.mark.parametrize(
    ("kv_dtype", "layer"),
    [
        (E5M2, LayerShape()),
        (torch.float32, LayerShape()),
        (E4M3, LayerShape(head_dim=96, v_head_dim=96)),
        (E4M3, LayerShape(head_dim=128)),
    ],
    ids=["e5m2", "16 bits", "96 columns", "narrow V"],
)
def test_layers_without_a_kernel_keep_16_bits(kv_dtype: torch.dtype, layer: LayerShape) -> None:
    assert extends_in_8_bits(
        SGLangAttentionBackend(engine_of(kv_dtype, (layer,), scales="none").runner())
    ) == [False]


def test_a_cpu_keeps_16_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    monkeypatch.delenv("ATTN_BACKEND_SGLANG_FP8_QUERIES", raising=False)
    monkeypatch.setattr(compat, "starts_triton_on_cpu", lambda name: False)
    assert extends_in_8_bits(SGLangAttentionBackend(engine_of().runner())) == [False, False]


def test_deterministic_inference_keeps_16_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    """A decode has the same bits by itself and in a batch with a prompt."""
    monkeypatch.setattr(compat, "deterministic", lambda: True)
    engine = engine_of(layers=(LayerShape(),), page_size=16)
    backend = SGLangAttentionBackend(engine.runner())
    assert extends_in_8_bits(backend) == [False]
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


def test_draft_steps_make_no_plans_for_extends() -> None:
    assert extends_in_8_bits(SGLangAttentionBackend(engine_of().runner(), branches=1)) == [False, False]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_rounding(dtype: torch.dtype) -> None:
    """Same bits as append_kv: ties, values that are too large, the smallest values, rows beyond the buffer,
    no rows, and Q as a slice of other rows.
    """
    rounder = QueryRounder(8, torch.device("cpu"))
    generator = torch.Generator().manual_seed(0)
    for num_rows in (0, 1, 8, 30):
        whole = (
            torch.randn(num_rows, 6 * 64 + 40, generator=generator)
            * torch.logspace(-5, 5, max(num_rows, 1))[:num_rows, None]
        )
        q = whole.to(dtype)[:, : 6 * 64].view(num_rows, 6, 64)
        rounded = rounder.round(q, E4M3)
        assert rounded.shape == q.shape
        assert rounded.is_contiguous()
        assert torch.equal(rounded.view(torch.uint8), quantize(q, None, E4M3).view(torch.uint8))
