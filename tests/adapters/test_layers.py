"""Bidirectional spans in rows of Q, compared with a loop over rows."""

from __future__ import annotations

import random

import pytest
import torch

from attn_backend.adapters.layers import Spans

MAX_ROWS = 40
CPU = torch.device("cpu")


def random_spans(draw: random.Random, batch: int, kv_lens: list[int]) -> list[tuple[int, int, int]]:
    """(request, first token, last token) of disjoint spans, including single tokens, in any order."""
    spans = []
    for request in range(batch):
        token = draw.randint(0, 4)
        while token < kv_lens[request]:
            last = min(token + draw.choice((0, 1, 3, 9)), kv_lens[request] - 1)
            spans.append((request, token, last))
            token = last + draw.randint(1, 5)
    draw.shuffle(spans)
    return spans


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("seed", range(20))
def test_steps_one_after_another(seed: int, dtype: torch.dtype) -> None:
    """Each step finds its spans in the same tensors, also after a step without spans.

    Spans may begin before the step's rows.
    """
    draw = random.Random(seed)
    spans = Spans(MAX_ROWS, CPU)
    addresses = spans.begin.data_ptr(), spans.end.data_ptr()
    for _ in range(4):
        batch = draw.randint(1, 3)
        qo_lens = [draw.randint(1, MAX_ROWS // 4) for _ in range(batch)]
        kv_lens = [qo_len + draw.choice((0, 0, 1, 12)) for qo_len in qo_lens]
        of_step = draw.choice(([], random_spans(draw, batch, kv_lens)))
        starts = [sum(qo_lens[:i]) for i in range(batch + 1)]
        spans.fill(of_step, torch.tensor(starts, dtype=dtype), torch.tensor(kv_lens, dtype=dtype))
        expected = [(0, 0)] * MAX_ROWS
        for request, first, last in of_step:
            for row in range(starts[request], starts[request + 1]):
                if first < last and first <= kv_lens[request] - starts[request + 1] + row <= last:
                    expected[row] = first, last + 1
        assert list(zip(spans.begin.tolist(), spans.end.tolist(), strict=True)) == expected
        assert addresses == (spans.begin.data_ptr(), spans.end.data_ptr())


@pytest.mark.parametrize("num_rows", [0, 3, MAX_ROWS, None])
def test_rows_that_are_cleared(num_rows: int | None) -> None:
    spans = Spans(MAX_ROWS, CPU)
    spans.fill([(0, 0, MAX_ROWS - 1)], torch.tensor([0, MAX_ROWS]), torch.tensor([MAX_ROWS]))
    spans.clear(num_rows)
    cleared = MAX_ROWS if num_rows is None else num_rows
    assert spans.end.tolist() == [0] * cleared + [MAX_ROWS] * (MAX_ROWS - cleared)
