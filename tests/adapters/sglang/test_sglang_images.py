"""Bidirectional image tokens in SGLang's prompts, compared with float64 attention."""

from __future__ import annotations

from types import SimpleNamespace

import oracle
import pytest
import torch

pytest.importorskip("sglang.srt", reason="SGLang is not installed")

from fake_engine import FakeEngine, LayerShape, model_config
from sglang.srt.managers.schedule_batch import Modality, MultimodalDataItem, MultimodalInputs
from sglang.srt.model_executor.forward_batch_info import ForwardMode
from sglang_steps import check, step

from attn_backend.adapters.sglang import compat
from attn_backend.adapters.sglang.backend import SGLangAttentionBackend

WINDOW = 12  # tokens before the query


class Gemma3ForConditionalGeneration(torch.nn.ModuleList):
    def prepare_attn_masks(self, forward_batch: object, input_ids: object, mask_dtype: object) -> None: ...


class Gemma4ForConditionalGeneration(Gemma3ForConditionalGeneration): ...


def images(*spans: tuple[int, int]) -> MultimodalInputs:
    """First and last tokens of some images, and of a video in the same place. Attention treats the video's
    tokens as text.
    """
    items = [
        MultimodalDataItem(modality=modality, offsets=list(spans))
        for modality in (Modality.IMAGE, Modality.VIDEO)
    ]
    items[1].offsets = [(0, 60)]
    return MultimodalInputs(mm_items=items)


@pytest.mark.parametrize(
    ("model_class", "hybrid"),
    [
        (Gemma3ForConditionalGeneration, False),
        (Gemma4ForConditionalGeneration, False),
        (Gemma4ForConditionalGeneration, True),
    ],
)
def test_images_see_both_sides(model_class: type[torch.nn.ModuleList], hybrid: bool) -> None:
    """Gemma 3: (causal and window) or the same image, in all layers.

    Gemma 4: (causal or the same image) and window; causal in layers without a window. The second request has
    a cached prefix, the third no image; later decodes see no span.
    """
    if compat.starts_triton_on_cpu(compat.NAME):
        pytest.skip(f"SGLang {compat.release()} starts Triton on a CPU for every backend but its own")
    engine = FakeEngine((LayerShape(window=WINDOW), LayerShape()), page_size=16, hybrid=hybrid)
    config = model_config(
        is_multimodal=True, hf_text_config=SimpleNamespace(use_bidirectional_attention="vision")
    )
    backend = SGLangAttentionBackend(engine.runner(model=model_class(engine.model), model_config=config))
    plain = engine.batch(ForwardMode.EXTEND, [1], [20])
    plain.mm_inputs = None
    backend.init_forward_metadata(plain)
    for layer_id, layer in enumerate(engine.model):
        q, k, v = engine.tensors(plain, layer_id)
        engine.remember([1], [20], layer_id, k, v)
        check(backend.forward(q, k, v, layer, plain), engine.reference([1], [20], layer_id, q))
    engine.advance([1], [20])

    requests, new_lens = [0, 1, 2], [50, 40, 17]
    of_requests = [[(3, 8), (10, 35)], [(25, 50)], []]  # some longer than the window
    batch = engine.batch(ForwardMode.EXTEND, requests, new_lens)
    batch.mm_inputs = [images(*of_requests[0]), images(*of_requests[1]), None]
    backend.init_forward_metadata(batch)
    for layer_id, layer in enumerate(engine.model):
        q, k, v = engine.tensors(batch, layer_id)
        engine.remember(requests, new_lens, layer_id, k, v)
        out = backend.forward(q, k, v, layer, batch)
        window = engine.shapes[layer_id].window
        for i, rows, found in zip(requests, q.split(new_lens), out.split(new_lens), strict=True):

            def mask(pairs: oracle.Pairs, i: int = i, window: int = window) -> torch.Tensor:
                near = (
                    (pairs.position - pairs.token <= window)
                    if window >= 0
                    else torch.ones_like(pairs.position - pairs.token, dtype=torch.bool)
                )
                causal, same = pairs.token <= pairs.position, torch.zeros_like(near)
                for first, last in of_requests[i]:
                    same = same | (
                        (pairs.position >= first)
                        & (pairs.position <= last)
                        & (pairs.token >= first)
                        & (pairs.token <= last)
                    )
                if model_class is Gemma3ForConditionalGeneration:
                    return (causal & near) | same
                return (causal | same) & near if window >= 0 else causal

            of_request = engine.requests[i]
            keys, values = of_request.k[layer_id], of_request.v[layer_id]
            expected, _ = oracle.attention(
                rows.view(-1, 6, 64), keys, values, causal=False, variant=oracle.Variant(mask=mask)
            )
            check(found, expected.reshape(len(rows), -1))
    engine.advance(requests, new_lens)
    step(engine, backend, ForwardMode.DECODE, [2, 0, 1], [1, 1, 1])
