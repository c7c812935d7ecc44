"""The SGLang backend inside a small engine, against attention in float64."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import oracle
import pytest
import torch

pytest.importorskip("sglang.srt", reason="SGLang is not installed")

from fake_engine import FakeEngine, LayerShape, capture, model_config, plans_of
from sglang.srt.layers.attention import hybrid_attn_backend
from sglang.srt.layers.attention.tbo_backend import TboAttnBackend
from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend
from sglang.srt.layers.radix_attention import AttentionType
from sglang.srt.model_executor.forward_batch_info import ForwardBatch, ForwardMode
from sglang_steps import CASES, WINDOWED, check, serve, serve_shared_prefix, step
from torch import Tensor

from attn_backend import Attention
from attn_backend.adapters.sglang import compat
from attn_backend.adapters.sglang.backend import SGLangAttentionBackend

pytestmark = pytest.mark.usefixtures("needs_a_release_that_serves_on_cpus")


@pytest.mark.parametrize("page_size", [1, 16, 64])
@pytest.mark.parametrize(("device", "dtype"), CASES)
def test_serving(page_size: int, device: str, dtype: torch.dtype) -> None:
    serve(FakeEngine((LayerShape(), LayerShape(logit_cap=30.0)), page_size, dtype, device=device))


def test_values_of_another_width() -> None:
    serve(
        FakeEngine(
            (LayerShape(head_dim=192, v_head_dim=128), LayerShape(head_dim=192, v_head_dim=128, window=20)),
            page_size=16,
        )
    )


def test_keys_and_values_of_another_type_are_converted(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = FakeEngine(dtype=torch.bfloat16)
    tensors = engine.tensors

    def wider(batch: SimpleNamespace, layer_id: int) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = tensors(batch, layer_id)
        return q, k.float(), v.float()

    monkeypatch.setattr(engine, "tensors", wider)
    serve(engine)


@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize("hybrid", [False, True])
@pytest.mark.parametrize(("device", "dtype"), CASES)
def test_sliding_windows(page_size: int, hybrid: bool, device: str, dtype: torch.dtype) -> None:
    serve(FakeEngine(WINDOWED, page_size, dtype, hybrid, device))


@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize("hybrid", [False, True])
def test_chunked_local_attention(page_size: int, hybrid: bool) -> None:
    """Llama 4: such layers have a separate pool, and its tables do not begin at token 0."""
    layers = (LayerShape(chunk=32, logit_cap=5.0), LayerShape(), LayerShape(chunk=32))
    serve(FakeEngine(layers, page_size, hybrid=hybrid), model_config=model_config(attention_chunk_size=32))


@pytest.mark.parametrize("hybrid", [False, True])
def test_temperature_that_grows_with_the_position(hybrid: bool) -> None:
    """Grok 2, with a soft cap: prompts, their later chunks, and decodes.

    Also with a separate pool for sliding-window layers, which holds only the end of a request.
    """
    layers = (LayerShape(temperature_len=8, logit_cap=5.0), LayerShape(temperature_len=30, window=20))
    serve(FakeEngine(layers, page_size=16, hybrid=hybrid))


def test_alibi_of_the_module_around() -> None:
    """Baichuan 13B keeps its slopes outside the attention layer, and passes them to only one of SGLang's
    backends."""
    engine, slopes = FakeEngine(), torch.tensor([0.5, 0.25, 0.125, 0.0625, 0.03, 0.02])
    engine.model.alibi_slopes = slopes
    backend = SGLangAttentionBackend(engine.runner())
    batch = engine.batch(ForwardMode.EXTEND, [0, 1], [20, 7])
    backend.init_forward_metadata(batch)
    q, k, v = engine.tensors(batch, 0)
    out = backend.forward(q, k, v, engine.model[0], batch)
    linear = oracle.Variant(
        logits=lambda logits, pairs: logits + slopes.double()[pairs.head] * (pairs.token - pairs.position)
    )
    for rows in (slice(0, 20), slice(20, 27)):
        expected, _ = oracle.attention(q[rows].reshape(-1, 6, 64), k[rows], v[rows], variant=linear)
        check(out[rows], expected.reshape(-1, 384))


@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize(
    ("device", "dtype", "cascade"),
    [
        ("cpu", torch.float32, True),
        ("cpu", torch.float32, "always"),
        ("cpu", torch.bfloat16, True),
        pytest.param("cuda", torch.float16, "always", marks=pytest.mark.gpu),
    ],
)
def test_shared_prefix(
    page_size: int, device: str, dtype: torch.dtype, cascade: bool | str, monkeypatch: pytest.MonkeyPatch
) -> None:
    layers = (LayerShape(), LayerShape(window=20))
    off, taken_off = serve_shared_prefix(
        FakeEngine(layers, page_size, dtype, device=device), False, monkeypatch
    )
    on, taken_on = serve_shared_prefix(
        FakeEngine(layers, page_size, dtype, device=device), cascade, monkeypatch
    )
    for out, expected in zip(on, off, strict=True):
        check(out, expected.cpu().double())
    assert taken_off == [[0, 0]] * 4
    # A window hides the prefix. On a CPU, where cost follows the rows, sharing it with a long chunk saves
    # nothing.
    assert taken_on == [[4, 0], [5, 0], [3 if cascade == "always" else 0, 0], [4, 0]]


def test_bits_do_not_depend_on_the_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    """In the engine's deterministic mode: each request by itself and in a batch."""
    monkeypatch.setattr(compat, "deterministic", lambda: True)
    engine = FakeEngine(page_size=16)
    backend = SGLangAttentionBackend(engine.runner())
    new_lens = [120, 1, 40, 190, 77]
    batch = engine.batch(ForwardMode.EXTEND, [0, 1, 2, 3, 4], new_lens)
    backend.init_forward_metadata(batch)
    q, k, v = engine.tensors(batch, 0)
    together = backend.forward(q, k, v, engine.model[0], batch).split(new_lens)
    for i, rows in enumerate(q.split(new_lens)):
        batch = engine.batch(ForwardMode.EXTEND, [i], new_lens[i : i + 1])
        backend.init_forward_metadata(batch)
        assert torch.equal(
            backend.forward(rows, None, None, engine.model[0], batch, save_kv_cache=False), together[i]
        )


@pytest.mark.parametrize(
    ("device", "dtype"),
    [("cpu", torch.float32), pytest.param("cuda", torch.float16, marks=pytest.mark.gpu)],
)
@pytest.mark.parametrize(("page_size", "hybrid"), [(1, False), (16, True), (1, True)])
def test_bits_do_not_depend_on_the_cached_prefix(
    page_size: int, hybrid: bool, device: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the engine's deterministic mode: a whole prompt, and its last tokens after a cached prefix.

    A single token is a prompt, too, unless the step is a decode.
    """
    monkeypatch.setattr(compat, "deterministic", lambda: True)
    layers = (LayerShape(window=20), LayerShape(), LayerShape(window=7, logit_cap=5.0))
    engine = FakeEngine(layers, page_size, dtype, hybrid, device, max_tokens=1600)
    backend = SGLangAttentionBackend(engine.runner())
    lens = [1500, 70, 1]
    batch = engine.batch(ForwardMode.EXTEND, [0, 1, 2], lens)
    backend.init_forward_metadata(batch)
    given = [engine.tensors(batch, layer_id) for layer_id in range(len(layers))]
    whole = [
        backend.forward(*qkv, layer, batch).split(lens)
        for qkv, layer in zip(given, engine.model, strict=True)
    ]
    all_slots = engine.pool.full_to_swa_index_mapping.clone() if hybrid else None
    for rest in (1, 2, 15, 16, 17, 63, 64, 65, 700):
        new_lens = [min(rest, length) for length in lens]
        for request, length, new in zip(engine.requests, lens, new_lens, strict=False):
            request.length = length - new
            if hybrid:  # the engine has evicted the pages before the window: slot 0 has NaN
                seen_page = max(0, request.length - 20) // page_size * page_size
                slots = engine.req_to_token_pool.req_to_token[request.row].long()
                mapping = engine.pool.full_to_swa_index_mapping
                mapping[slots[:length]] = all_slots[slots[:length]]
                mapping[slots[:seen_page]] = 0
        batch = engine.batch(ForwardMode.EXTEND, [0, 1, 2], new_lens)
        backend.init_forward_metadata(batch)
        for (q, _, _), layer, expected in zip(given, engine.model, whole, strict=True):
            last = torch.cat([rows[-new:] for rows, new in zip(q.split(lens), new_lens, strict=True)])
            out = backend.forward(last, None, None, layer, batch, save_kv_cache=False).split(new_lens)
            for i, rows in enumerate(out):
                assert torch.equal(rows, expected[i][-len(rows) :]), (rest, i)


def test_layers_of_one_kind_share_a_plan() -> None:
    backend = SGLangAttentionBackend(FakeEngine(WINDOWED).runner())
    assert len(plans_of(backend)) == 3


def test_chain_verification() -> None:
    engine = FakeEngine((LayerShape(), LayerShape(window=9)), page_size=16)
    backend = SGLangAttentionBackend(engine.runner())
    step(engine, backend, ForwardMode.EXTEND, [0, 1], [30, 3])
    step(
        engine, backend, ForwardMode.TARGET_VERIFY, [1, 0], [4, 4], SimpleNamespace(topk=1, draft_token_num=4)
    )


@pytest.mark.parametrize(
    "attn_type",
    [AttentionType.ENCODER_ONLY, AttentionType.DECODER_BIDIRECTIONAL],
    ids=lambda kind: kind.value,
)
@pytest.mark.parametrize("hybrid", [False, True])
def test_encoder_sees_both_sides(attn_type: AttentionType, hybrid: bool) -> None:
    """Windows also extend left and right (EmbeddingGemma), including layers with a separate pool
    (EmbeddingGemma 2).
    """
    layers = (LayerShape(attn_type=attn_type), LayerShape(attn_type=attn_type, window=12))
    engine = FakeEngine(layers, page_size=16, hybrid=hybrid)
    step(engine, SGLangAttentionBackend(engine.runner()), ForwardMode.EXTEND, [0, 1], [17, 40])


def test_keys_written_by_the_model() -> None:
    """save_kv_cache=False: a fused rotary kernel has written K and V. K and V are None: the layer reads
    another layer's cache.
    """
    engine = FakeEngine()
    backend = SGLangAttentionBackend(engine.runner())
    batch = engine.batch(ForwardMode.EXTEND, [0], [12])
    backend.init_forward_metadata(batch)
    q, k, v = engine.tensors(batch, 0)
    expected = backend.forward(q, k, v, engine.model[0], batch)
    assert torch.equal(
        backend.forward(q, torch.full_like(k, 9.0), v, engine.model[0], batch, save_kv_cache=False), expected
    )
    assert torch.equal(backend.forward(q, None, None, engine.model[0], batch, save_kv_cache=False), expected)


def test_writes_into_the_buffer_that_the_engine_gives() -> None:
    engine = FakeEngine()
    backend = SGLangAttentionBackend(engine.runner())
    batch = engine.batch(ForwardMode.EXTEND, [0], [12])
    backend.init_forward_metadata(batch)
    q, k, v = engine.tensors(batch, 0)
    expected = backend.forward(q, k, v, engine.model[0], batch)
    batch._attn_output = torch.full_like(expected, float("nan"))
    out = backend.forward(q, k, v, engine.model[0], batch)
    assert out.data_ptr() == batch._attn_output.data_ptr()
    assert torch.equal(out, expected)


@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize("hybrid", [False, True])
@pytest.mark.parametrize("kv_dtype", [None, torch.float8_e4m3fn])
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_captured_decode(page_size: int, hybrid: bool, kv_dtype: torch.dtype | None, device: str) -> None:
    """Capture at one batch size, then replay other batches with padded requests, as DecodeCudaGraphRunner
    does. On a CPU the captured code just runs again.
    """
    dtype = torch.float32 if device == "cpu" else torch.float16 if kv_dtype is None else torch.bfloat16
    engine = FakeEngine((LayerShape(), LayerShape(window=20)), page_size, dtype, hybrid, device, kv_dtype)
    for layer_id, layer in enumerate(engine.model):
        if kv_dtype is not None:
            layer.k_scale, layer.v_scale = torch.tensor(0.05, device=device), torch.tensor(0.3, device=device)
        for buffer in engine.pool.get_kv_buffer(layer_id):
            buffer[:page_size] = 0.0  # padded requests write slot 0 and read the slots in row 0 of the table
    engine.req_to_token_pool.req_to_token[0] = 0
    backend = SGLangAttentionBackend(engine.runner())
    step(engine, backend, ForwardMode.EXTEND, [0, 1, 2], [33, 1, 16])

    size = 4
    fill = backend.get_cuda_graph_seq_len_fill_value()
    backend.init_cuda_graph_state(size, size)
    static = SimpleNamespace(
        forward_mode=ForwardMode.DECODE,
        batch_size=size,
        req_pool_indices=torch.zeros(size, dtype=torch.int64, device=device),
        seq_lens=torch.full((size,), fill, device=device),
        out_cache_loc=torch.zeros(size, dtype=torch.int64, device=device),
        spec_info=None,
        _attn_output=None,
    )
    like = engine.batch(ForwardMode.DECODE, [0], [1])
    inputs = [
        [torch.zeros(size, *x.shape[1:], dtype=dtype, device=device) for x in engine.tensors(like, layer_id)]
        for layer_id in range(2)
    ]

    def run() -> list[Tensor]:
        backend.init_forward_metadata_in_graph(static)
        return [
            backend.forward(*inputs[layer_id], layer, static) for layer_id, layer in enumerate(engine.model)
        ]

    backend.init_forward_metadata_out_graph(static, in_capture=True)
    replay = capture(run, device)

    for requests in ([2, 0, 1], [1], [0, 2], [2, 1, 0, 3]):
        ones = [1] * len(requests)
        batch = engine.batch(ForwardMode.DECODE, requests, ones)
        for name, padding in (("req_pool_indices", 0), ("seq_lens", fill), ("out_cache_loc", 0)):
            getattr(static, name).fill_(padding)[: len(requests)] = getattr(batch, name)
        expected = []
        for layer_id in range(2):
            q, k, v = engine.tensors(batch, layer_id)
            engine.remember(requests, ones, layer_id, k, v)
            expected.append(engine.reference(requests, ones, layer_id, q))
            for buffer, tensor in zip(inputs[layer_id], (q, k, v), strict=True):
                buffer.zero_()[: len(requests)] = tensor
        backend.init_forward_metadata_out_graph(SimpleNamespace(**vars(static)))
        for out, reference in zip(replay(), expected, strict=True):
            check(out[: len(requests)], reference)
            assert not out.isnan().any()
        engine.advance(requests, ones)


def test_idle_steps() -> None:
    engine = FakeEngine()
    backend = SGLangAttentionBackend(engine.runner())
    batch = engine.batch(ForwardMode.DECODE, [0], [1])
    batch.forward_mode = ForwardMode.IDLE
    backend.init_forward_metadata(batch)
    assert backend.forward(torch.zeros(1, 384), None, None, engine.model[0], batch).shape == (1, 384)
    backend.init_forward_metadata(SimpleNamespace(forward_mode=ForwardMode.IDLE, batch_size=0))


def test_window_slots_beyond_a_batch_are_nobodys() -> None:
    """A captured prefill also writes its padding rows. They must not go to the slots of an earlier, longer
    prefill."""
    engine = FakeEngine((LayerShape(window=20),), hybrid=True)
    backend = SGLangAttentionBackend(engine.runner())
    backend.init_forward_metadata(engine.batch(ForwardMode.EXTEND, [0, 1], [40, 10]))
    captured = backend._window_slots
    assert captured is not None
    assert (captured > 0).all()
    batch = engine.batch(ForwardMode.EXTEND, [2], [7])
    backend.init_forward_metadata(batch)
    assert torch.equal(captured[:7], engine.pool.full_to_swa_index_mapping[batch.out_cache_loc])
    assert captured[7:].tolist() == [0] * 43


def test_run_is_promised_an_append_where_there_was_one(monkeypatch: pytest.MonkeyPatch) -> None:
    promised: list[bool] = []
    monkeypatch.setattr(
        Attention, "run", lambda self, *tensors, after_append, **options: promised.append(after_append)
    )
    engine = FakeEngine()
    backend = SGLangAttentionBackend(engine.runner())
    batch = engine.batch(ForwardMode.EXTEND, [0], [12])
    backend.init_forward_metadata(batch)
    q, k, v = engine.tensors(batch, 0)
    backend.forward(q, k, v, engine.model[0], batch)
    # the model's rotary kernel has written them
    backend.forward(q, k, v, engine.model[0], batch, save_kv_cache=False)
    backend.forward(q, None, None, engine.model[0], batch)  # the layer reads another layer's cache
    backend.forward(q, k.double(), v.double(), engine.model[0], batch)  # the pool converts and writes them
    assert promised == [True, False, False, False]


def test_a_layer_that_the_model_does_not_show() -> None:
    engine = FakeEngine((LayerShape(), LayerShape(window=5)))
    backend = SGLangAttentionBackend(engine.runner(model=torch.nn.Module()))
    step(engine, backend, ForwardMode.EXTEND, [0], [33])
    step(engine, backend, ForwardMode.DECODE, [0], [1])


def test_steps_give_the_same_bits() -> None:
    outputs = []
    for _ in range(2):
        engine = FakeEngine((LayerShape(),), page_size=16, dtype=torch.bfloat16)
        backend = SGLangAttentionBackend(engine.runner())
        outputs.append(step(engine, backend, ForwardMode.EXTEND, [0, 1], [120, 70])[0])
    assert torch.equal(*outputs)


def test_halves_of_a_step_that_overlap() -> None:
    """Two-batch overlap: SGLang makes three of our backends and plans the whole step and both halves. Then it
    alternates between the halves, layer by layer.
    """
    engine = FakeEngine((LayerShape(), LayerShape(window=20)), page_size=16)
    overlapping = TboAttnBackend.init_new(lambda: SGLangAttentionBackend(engine.runner()))
    halves = [([0, 2], [33, 16]), ([1], [40])]
    for mode, new_lens in (
        (ForwardMode.EXTEND, None),
        (ForwardMode.EXTEND, [[3, 7], [5]]),
        (ForwardMode.DECODE, [[1, 1], [1]]),
    ):
        steps = [
            (requests, lens if new_lens is None else new_lens[half])
            for half, (requests, lens) in enumerate(halves)
        ]
        batch = engine.batch(
            mode,
            [i for requests, _ in steps for i in requests],
            [length for _, lens in steps for length in lens],
        )
        batch.tbo_children = [engine.batch(mode, *one) for one in steps]
        overlapping.init_forward_metadata(batch)
        for layer_id, layer in enumerate(engine.model):
            for child, of_half, (requests, lens) in zip(
                overlapping.children, batch.tbo_children, steps, strict=True
            ):
                q, k, v = engine.tensors(of_half, layer_id)
                engine.remember(requests, lens, layer_id, k, v)
                check(child.forward(q, k, v, layer, of_half), engine.reference(requests, lens, layer_id, q))
        for requests, lens in steps:
            engine.advance(requests, lens)


@pytest.mark.parametrize("hybrid", [False, True])
def test_a_prefix_that_is_still_being_loaded(hybrid: bool) -> None:
    """HiCache: a layer's KV is loaded from the host while earlier layers run. It is ready once the pool has
    waited for that layer.
    """
    engine = FakeEngine(
        (LayerShape(window=20), LayerShape(), LayerShape(window=20)), page_size=16, hybrid=hybrid
    )
    backend = SGLangAttentionBackend(engine.runner())
    step(engine, backend, ForwardMode.EXTEND, [0, 1], [40, 25])
    buffers = [engine.pool.get_kv_buffer(layer) for layer in range(len(engine.model))]
    on_host = [(k.clone(), v.clone()) for k, v in buffers]
    for buffer in (buffer for of_layer in buffers for buffer in of_layer):
        buffer.fill_(float("nan"))
    loaded: list[int] = []

    def wait_until(layer: int) -> None:
        if layer not in loaded:
            loaded.append(layer)
            for buffer, content in zip(buffers[layer], on_host[layer], strict=True):
                buffer.copy_(content)

    engine.pool.register_layer_transfer_counter(SimpleNamespace(wait_until=wait_until))
    step(engine, backend, ForwardMode.EXTEND, [1, 0], [3, 1])
    assert loaded == [0, 1, 2]


@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize("ours", ["prompts", "decodes"])
def test_prompts_and_decodes_on_different_backends(
    ours: str, page_size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """--prefill-attention-backend and --decode-attention-backend: each reads what the other has written."""
    settings = SimpleNamespace(speculative_attention_mode="prefill", speculative_algorithm=None)
    monkeypatch.setattr(hybrid_attn_backend, "get_spec", lambda: settings)
    engine = FakeEngine((LayerShape(), LayerShape(window=20)), page_size)
    runner: Any = engine.runner(kv_index_translator=None)
    both: list[Any] = [SGLangAttentionBackend(runner), TorchNativeAttnBackend(runner)]
    prefill, decode = both if ours == "prompts" else both[::-1]
    backend: Any = hybrid_attn_backend.HybridAttnBackend(runner, prefill, decode)
    step(engine, backend, ForwardMode.EXTEND, [0, 1, 2], [33, 1, 16])
    for _ in range(2):
        step(engine, backend, ForwardMode.DECODE, [2, 0, 1], [1, 1, 1])
    step(engine, backend, ForwardMode.EXTEND, [1, 3], [9, 20])
    step(engine, backend, ForwardMode.MIXED, [4, 0, 2], [17, 1, 1])  # --enable-mixed-chunk: still a prompt
    step(engine, backend, ForwardMode.DECODE, [0, 1, 2, 3, 4], [1] * 5)


def test_chunks_that_are_mixed_with_decodes() -> None:
    """--enable-mixed-chunk: a long prompt comes in chunks. Other requests decode in the same steps.

    SGLang's runner relabels such a step as a prompt.
    """
    engine = FakeEngine((LayerShape(), LayerShape(window=20)), page_size=16)
    backend = SGLangAttentionBackend(engine.runner())
    step(engine, backend, ForwardMode.EXTEND, [0, 1], [40, 7])
    for mode in (ForwardMode.MIXED, ForwardMode.EXTEND, ForwardMode.MIXED):
        step(engine, backend, mode, [2, 0, 1], [32, 1, 1])
        step(engine, backend, ForwardMode.DECODE, [1, 0], [1, 1])
    step(engine, backend, ForwardMode.MIXED, [2, 3, 0, 1], [5, 20, 1, 1])  # its last chunk, and a new prompt
    step(engine, backend, ForwardMode.DECODE, [2, 3, 0, 1], [1] * 4)


class EngineBatch(SimpleNamespace):
    """A ForwardBatch with the fields of FakeEngine.batch(); all others are None."""

    def __getattr__(self, name: str) -> None:
        return None

    def pad(self, backend: SGLangAttentionBackend, num_tokens: int, batch_size: int) -> None:
        """As SGLang pads the batch of a rank under DP attention."""
        self.batch_size = batch_size
        self.input_ids = torch.zeros_like(self.positions)
        self._pad_tensor_to_size = lambda *sizes, **value: ForwardBatch._pad_tensor_to_size(
            self, *sizes, **value
        )
        ForwardBatch._pad_inputs_to_size(self, SimpleNamespace(attn_backend=backend), num_tokens, batch_size)


def attend(
    engine: FakeEngine, backend: SGLangAttentionBackend, batch: Any
) -> list[tuple[Tensor, Tensor, Tensor, Tensor]]:
    """q, k, v and the output of each layer."""
    backend.init_forward_metadata(batch)
    found = []
    for layer_id, layer in enumerate(engine.model):
        q, k, v = engine.tensors(batch, layer_id)
        found.append((q, k, v, backend.forward(q, k, v, layer, batch)))
    return found


@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize("hybrid", [False, True])
def test_ranks_of_dp_attention(hybrid: bool, page_size: int) -> None:
    """SGLang pads all ranks to the same number of tokens. An idle rank only has padding."""
    engine = FakeEngine((LayerShape(window=20), LayerShape()), page_size, hybrid=hybrid)
    backend = SGLangAttentionBackend(engine.runner())
    for layer_id in range(2):
        for buffer in engine.pool.get_kv_buffer(layer_id):
            buffer[:page_size] = 0  # padding tokens go to slot 0, and the engine begins with zeros
    step(engine, backend, ForwardMode.EXTEND, [0, 1], [40, 9])

    # another rank has more requests
    batch = EngineBatch(**vars(engine.batch(ForwardMode.DECODE, [1, 0], [1, 1])))
    batch.pad(backend, 5, 5)
    for layer_id, (q, k, v, out) in enumerate(attend(engine, backend, batch)):
        engine.remember([1, 0], [1, 1], layer_id, k[:2], v[:2])
        check(out[:2], engine.reference([1, 0], [1, 1], layer_id, q[:2]))
    engine.advance([1, 0], [1, 1])

    # this rank is idle: others decode, or compute a prompt for which SGLang makes one up here
    nothing = EngineBatch(**vars(engine.batch(ForwardMode.DECODE, [0], [1])))
    for name in ("req_pool_indices", "seq_lens", "out_cache_loc", "positions"):
        setattr(nothing, name, getattr(nothing, name)[:0])
    kept = [buffer[page_size:].clone() for i in range(2) for buffer in engine.pool.get_kv_buffer(i)]
    for mode, batch_size in ((ForwardMode.IDLE, 5), (ForwardMode.EXTEND, 1)):
        batch = EngineBatch(**vars(nothing))
        batch.forward_mode = mode
        if mode == ForwardMode.EXTEND:
            batch.seq_lens = batch.seq_lens.new_tensor([5])
            batch.extend_seq_lens = torch.tensor([5], dtype=torch.int32)
            batch.extend_prefix_lens = batch.seq_lens.new_zeros(1)
            batch.extend_seq_lens_cpu, batch.extend_prefix_lens_cpu = [5], [0]
        batch.pad(backend, 5, batch_size)
        outputs = [out for *_, out in attend(engine, backend, batch)]
        assert {out.shape for out in outputs} == {(5, 6 * 64)}
        if mode == ForwardMode.EXTEND:
            assert all(out.isfinite().all() for out in outputs)
    now = [buffer[page_size:] for i in range(2) for buffer in engine.pool.get_kv_buffer(i)]
    assert all(torch.equal(a.nan_to_num(), b.nan_to_num()) for a, b in zip(now, kept, strict=True))
    step(engine, backend, ForwardMode.DECODE, [0, 1], [1, 1])
