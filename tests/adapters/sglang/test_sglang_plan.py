"""Page tables of the window pool and of encoder-decoder models, token by token, and cross attention compared
with float64.
"""

from __future__ import annotations

import random

import oracle
import pytest
import torch

pytest.importorskip("sglang.srt", reason="SGLang is not installed")

from fake_engine import MAX_TOKENS, FakeEngine, LayerShape, model_config
from sglang.srt.model_executor.forward_batch_info import ForwardMode
from sglang_steps import check

from attn_backend.adapters.sglang.backend import SGLangAttentionBackend
from attn_backend.adapters.sglang.plan import decoder_page_table, window_page_table


@pytest.mark.parametrize("page_size", [1, 4, 16])
@pytest.mark.parametrize("seed", range(12))
def test_window_pages_hold_what_a_query_sees(seed: int, page_size: int) -> None:
    """The table has every token that a query of the request sees, in the slot of the engine's mapping. Slots
    before the window may map anywhere.
    """
    draw = random.Random(seed)
    engine = FakeEngine((LayerShape(window=5), LayerShape()), page_size, hybrid=True)
    table, mapping = engine.req_to_token_pool.req_to_token, engine.pool.full_to_swa_index_mapping.clone()
    window, batch = draw.choice((0, 1, 5, 30)), draw.randint(1, 4)
    is_uniform = draw.random() < 0.5  # decodes, or drafts to verify
    qo_lens = [draw.randint(1, 9)] * batch if is_uniform else [draw.randint(1, 40) for _ in range(batch)]
    kv_lens = [draw.randint(qo_len, MAX_TOKENS) for qo_len in qo_lens]
    rows = torch.tensor(draw.sample(range(1, 7), batch))
    first_seen = [max(0, kv_len - qo_len - window) for kv_len, qo_len in zip(kv_lens, qo_lens, strict=True)]
    for row, first in zip(rows.tolist(), first_seen, strict=True):
        mapping[table[row, : first // page_size * page_size].long()] = -1
    given = qo_lens[0] if is_uniform else torch.tensor(qo_lens)
    for begins_at in (1, 16, 48):
        pages, before = window_page_table(
            table,
            rows,
            torch.tensor(kv_lens),
            given,
            max(qo_lens),
            window,
            mapping,
            page_size,
            begins_at=begins_at,
        )
        assert before.dtype == torch.int32
        assert not (before % begins_at).any()
        for i, (row, first, kv_len) in enumerate(zip(rows.tolist(), first_seen, kv_lens, strict=True)):
            begin = int(before[i])
            assert begin <= first
            assert int(pages.kv_lens[i]) == kv_len - begin
            assert (pages.indices[i, : -(-(kv_len - begin) // page_size)] >= 0).all()
            for token in range(first, kv_len):
                page, place = divmod(token - begin, page_size)
                assert int(pages.indices[i, page]) * page_size + place == int(mapping[table[row, token]])


@pytest.mark.parametrize("seed", range(6))
def test_tokens_of_a_decoder_follow_the_encoders(seed: int) -> None:
    draw = random.Random(seed)
    table = FakeEngine().req_to_token_pool.req_to_token
    rows = torch.tensor(draw.sample(range(1, 7), 3))
    encoder_lens = [draw.randint(0, MAX_TOKENS // 2) for _ in range(3)]
    kv_lens = [draw.choice((0, 1, MAX_TOKENS - encoder_len)) for encoder_len in encoder_lens]
    pages = decoder_page_table(table, rows, torch.tensor(kv_lens), torch.tensor(encoder_lens))
    assert pages.page_size == 1
    assert pages.kv_lens.tolist() == kv_lens
    for i, (row, encoder_len, kv_len) in enumerate(zip(rows.tolist(), encoder_lens, kv_lens, strict=True)):
        assert torch.equal(pages.indices[i, :kv_len], table[row, encoder_len : encoder_len + kv_len])


@pytest.mark.usefixtures("needs_a_release_that_serves_on_cpus")
def test_a_decoder_and_its_encoder() -> None:
    """Cross attention sees all tokens of the request's encoder and writes them once, with the prompt.

    Self attention sees the decoder's own tokens.
    """
    engine = FakeEngine((LayerShape(), LayerShape()), page_size=16)
    engine.model[1].is_cross_attention = True
    backend = SGLangAttentionBackend(engine.runner(model_config=model_config(is_encoder_decoder=True)))
    requests, encoder_lens = [0, 2, 1], [5, 17, 40]
    table = engine.req_to_token_pool.req_to_token
    rows = [engine.requests[i].row for i in requests]
    # K and V
    encoders = [
        torch.randn(2, encoder_len, 2, 64, generator=engine.generator) for encoder_len in encoder_lens
    ]
    for mode, new_lens in (
        (ForwardMode.EXTEND, [4, 1, 20]),
        (ForwardMode.DECODE, [1, 1, 1]),
        (ForwardMode.DECODE, [1, 1, 1]),
    ):
        batch = engine.batch(mode, requests, new_lens)
        begins = [
            encoder_len + engine.requests[i].length
            for i, encoder_len in zip(requests, encoder_lens, strict=True)
        ]
        batch.out_cache_loc = torch.cat(
            [table[row, begin : begin + new] for row, begin, new in zip(rows, begins, new_lens, strict=True)]
        ).long()
        batch.encoder_lens = torch.tensor(encoder_lens)
        batch.encoder_out_cache_loc = torch.cat(
            [table[row, :length] for row, length in zip(rows, encoder_lens, strict=True)]
        ).long()
        backend.init_forward_metadata(batch)
        q, k, v = engine.tensors(batch, 0)
        engine.remember(requests, new_lens, 0, k, v)
        check(backend.forward(q, k, v, engine.model[0], batch), engine.reference(requests, new_lens, 0, q))
        q, _, _ = engine.tensors(batch, 1)
        k, v = torch.cat(encoders, 1).unbind() if mode == ForwardMode.EXTEND else (None, None)
        out = backend.forward(q, k, v, engine.model[1], batch)
        expected = [
            oracle.attention(of_request.view(-1, 6, 64), *kv, causal=False)[0]
            for of_request, kv in zip(q.split(new_lens), encoders, strict=True)
        ]
        check(out, torch.cat(expected).flatten(1))
        engine.advance(requests, new_lens)
