"""Multi-item scoring (--enable-mis): tables and positions of random prompts compared with a loop over tokens,
and attention compared with float64.
"""

from __future__ import annotations

import random
from types import SimpleNamespace

import oracle
import pytest
import torch

pytest.importorskip("sglang.srt", reason="SGLang is not installed")

from fake_engine import FakeEngine, LayerShape
from sglang.srt.model_executor.forward_batch_info import ForwardMode
from sglang_steps import check, step

from attn_backend.adapters.sglang import compat
from attn_backend.adapters.sglang.backend import SGLangAttentionBackend
from attn_backend.adapters.sglang.masks import items_of


def make_step(
    new_lens: list[int],
    cached: list[int],
    delimiters: list[list[int]],
    mode: ForwardMode = ForwardMode.EXTEND,
) -> SimpleNamespace:
    return SimpleNamespace(
        forward_mode=mode,
        extend_seq_lens_cpu=new_lens,
        extend_prefix_lens_cpu=cached,
        multi_item_delimiter_indices=[torch.tensor(places, dtype=torch.int64) for places in delimiters],
        positions=torch.cat(
            [torch.arange(before, before + new) for new, before in zip(new_lens, cached, strict=True)]
        ),
    )


def places_in_items(new_len: int, delimiters: list[int]) -> list[int | None]:
    """The place of each new token in its item: 0 for the delimiter before the item, None in the prompt."""
    last = [
        max((delimiter for delimiter in delimiters if delimiter <= token), default=None)
        for token in range(new_len)
    ]
    return [None if delimiter is None else token - delimiter for token, delimiter in enumerate(last)]


@pytest.mark.parametrize("seed", range(40))
def test_tables_and_positions(seed: int) -> None:
    """Each item continues the prompt.

    The delimiter has the position of the prompt's last token; the item's first token has the next position.
    """
    draw = random.Random(seed)
    batch = draw.randint(1, 4)
    new_lens, cached = (
        [draw.randint(1, 20) for _ in range(batch)],
        [draw.choice((0, 0, 1, 7)) for _ in range(batch)],
    )
    delimiters = [sorted(draw.sample(range(new), draw.randint(0, min(new, 5)))) for new in new_lens]
    forward_batch = make_step(new_lens, cached, delimiters)
    items = items_of(forward_batch, batch, torch.device("cpu"))
    assert items.prefix_len.dtype == torch.int32
    assert items.token_pos_in_items.dtype == torch.uint16
    begin = 0
    for i, (new, before, places) in enumerate(zip(new_lens, cached, delimiters, strict=True)):
        in_items = places_in_items(new, places)
        prompt_len = before + (places[0] if places else new)
        positions = [
            before + token if place is None else prompt_len - 1 + place
            for token, place in enumerate(in_items)
        ]
        assert forward_batch.positions[begin : begin + new].tolist() == positions
        begin += new
        if not places:
            assert items.prefix_len[i] >= before + new, "everything belongs to the prompt"
            continue
        assert items.prefix_len[i] == prompt_len
        in_items = in_items[places[0] :]
        assert items.token_pos_in_items[i, : len(in_items)].tolist() == in_items


@pytest.mark.parametrize("mode", [ForwardMode.DECODE, ForwardMode.EXTEND])
def test_steps_without_items(mode: ForwardMode) -> None:
    forward_batch = make_step([4, 3], [2, 0], [[1], [0, 2]], mode)
    positions = forward_batch.positions.clone()
    if mode == ForwardMode.EXTEND:
        forward_batch.multi_item_delimiter_indices = None
    items = items_of(forward_batch, 2, torch.device("cpu"))
    assert torch.equal(forward_batch.positions, positions)
    assert int(items.prefix_len.min()) > 2**20
    assert items.token_pos_in_items.shape == (2, 1)


@pytest.mark.usefixtures("needs_a_release_that_serves_on_cpus")
def test_items_do_not_see_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """A token of an item sees the prompt and its item without the delimiter. A delimiter sees only the
    prompt.

    One request has a cached prefix, one no items. Decodes see everything.
    """
    monkeypatch.setattr(
        compat, "setting", lambda path, default: True if path == "exec.features.enable_mis" else default
    )
    engine = FakeEngine((LayerShape(logit_cap=5.0),), page_size=16)
    backend = SGLangAttentionBackend(engine.runner())
    original = engine.batch
    delimiters: list[list[int]] | None = None

    def batch_with_items(*arguments: object, **options: object) -> SimpleNamespace:
        batch = original(*arguments, **options)  # type: ignore[arg-type]
        batch.multi_item_delimiter_indices = (
            None if delimiters is None else [torch.tensor(places, dtype=torch.int64) for places in delimiters]
        )
        return batch

    monkeypatch.setattr(engine, "batch", batch_with_items)
    step(engine, backend, ForwardMode.EXTEND, [1], [20])
    requests, new_lens, delimiters = [0, 1, 2], [50, 40, 17], [[30, 31, 40, 49], [0, 12, 25], []]
    batch = engine.batch(ForwardMode.EXTEND, requests, new_lens)
    backend.init_forward_metadata(batch)
    for layer_id, layer in enumerate(engine.model):
        q, k, v = engine.tensors(batch, layer_id)
        engine.remember(requests, new_lens, layer_id, k, v)
        out = backend.forward(q, k, v, layer, batch)
        for i, places, rows, found in zip(
            requests, delimiters, q.split(new_lens), out.split(new_lens), strict=True
        ):
            before = engine.requests[i].length
            item_of = torch.tensor(
                [sum(place + before <= token for place in places) for token in range(before + len(rows))]
            )
            is_delimiter = torch.zeros(len(item_of), dtype=torch.bool)
            is_delimiter[torch.tensor(places, dtype=torch.int64) + before] = True

            def mask(
                pairs: oracle.Pairs,
                item_of: torch.Tensor = item_of,
                is_delimiter: torch.Tensor = is_delimiter,
            ) -> torch.Tensor:
                row, token = item_of[pairs.position], item_of[pairs.token]
                same = (row == token) & ~is_delimiter[pairs.position] & ~is_delimiter[pairs.token]
                return (pairs.token <= pairs.position) & ((token == 0) | same)

            keys, values = engine.requests[i].k[layer_id], engine.requests[i].v[layer_id]
            options = {
                "causal": False,
                "logits_soft_cap": engine.shapes[layer_id].logit_cap,
                "variant": oracle.Variant(mask=mask),
            }
            expected, _ = oracle.attention(rows.view(-1, 6, 64), keys, values, **options)
            check(found, expected.reshape(len(rows), -1))
    engine.advance(requests, new_lens)
    delimiters = None
    step(engine, backend, ForwardMode.DECODE, [2, 0, 1], [1, 1, 1])
