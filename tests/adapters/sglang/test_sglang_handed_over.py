"""Other forms in which SGLang's models pass Q, K and V than one row a token without a gradient."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("sglang.srt", reason="SGLang is not installed")

from fake_engine import FakeEngine, LayerShape
from sglang.srt.layers.radix_attention import AttentionType
from sglang.srt.model_executor.forward_batch_info import ForwardMode
from torch import Tensor

from attn_backend.adapters.sglang.backend import SGLangAttentionBackend

SHAPE = LayerShape()

pytestmark = pytest.mark.usefixtures("needs_a_release_that_serves_on_cpus")


def as_gemma3(q: Tensor) -> Tensor:
    """[1, rows, heads, head_dim]: Q of Gemma 3 in SGLang 0.5.17."""
    return q.reshape(1, -1, SHAPE.num_qo_heads, SHAPE.head_dim)


@pytest.mark.parametrize(
    "attn_type", [AttentionType.DECODER, AttentionType.DECODER_BIDIRECTIONAL], ids=lambda kind: kind.value
)
def test_rows_in_the_second_dimension(attn_type: AttentionType) -> None:
    """Prompts and a decode step of Gemma 3 and EmbeddingGemma."""
    engine = FakeEngine((LayerShape(attn_type=attn_type),))
    backend, layer = SGLangAttentionBackend(engine.runner()), engine.model[0]
    steps = [(ForwardMode.EXTEND, [17, 5])] + [(ForwardMode.DECODE, [1, 1])] * (
        attn_type == AttentionType.DECODER
    )
    for mode, new_lens in steps:
        batch = engine.batch(mode, [0, 1], new_lens)
        backend.init_forward_metadata(batch)
        q, k, v = engine.tensors(batch, 0)
        engine.remember([0, 1], new_lens, 0, k, v)
        out = backend.forward(as_gemma3(q), k, v, layer, batch)
        torch.testing.assert_close(
            out.double(), engine.reference([0, 1], new_lens, 0, q), rtol=1e-5, atol=1e-5
        )
        engine.advance([0, 1], new_lens)


def test_padding_rows_in_the_second_dimension() -> None:
    """A prompt graph with more rows than tokens: SGLang cuts the padding off the first dimension of Q and of
    the output, which has no padding.
    """
    engine = FakeEngine()
    backend, layer = SGLangAttentionBackend(engine.runner()), engine.model[0]
    batch = engine.batch(ForwardMode.EXTEND, [0, 1], [17, 5])
    backend.init_forward_metadata(batch)
    q, k, v = engine.tensors(batch, 0)
    engine.remember([0, 1], [17, 5], 0, k, v)
    padded = as_gemma3(torch.cat([q, torch.zeros(10, q.shape[1])]))
    output = torch.full_like(padded, 7.0)
    batch._attn_output = output[:22]
    out = backend.forward(padded[:22], k, v, layer, batch)
    assert out.data_ptr() == output.data_ptr(), (
        "SGLang would copy it, in a form that these shapes do not have"
    )
    torch.testing.assert_close(
        output[0, :22].reshape(22, -1).double(), engine.reference([0, 1], [17, 5], 0, q), rtol=1e-5, atol=1e-5
    )
    assert bool((output[0, 22:] == 7.0).all()), "of padding nothing is computed"


@pytest.mark.parametrize("mode", [ForwardMode.EXTEND, ForwardMode.DECODE], ids=lambda mode: mode.name)
def test_a_model_that_is_not_under_no_grad(mode: ForwardMode) -> None:
    """Whisper, while decode graphs are captured: its weights require gradients."""
    engine = FakeEngine()
    backend, layer = SGLangAttentionBackend(engine.runner()), engine.model[0]
    batch = engine.batch(mode, [0, 1], [1, 1])
    backend.init_forward_metadata(batch)
    q, k, v = engine.tensors(batch, 0)
    expected = backend.forward(q, k, v, layer, batch)
    weight = torch.nn.Parameter(torch.ones(()))
    out = backend.forward(q * weight, k * weight, v * weight, layer, batch)
    assert torch.equal(out, expected)
    assert not out.requires_grad
