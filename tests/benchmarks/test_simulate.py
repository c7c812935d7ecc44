"""The simulator's page cache and engine (benchmarks/continuous_batching.py), and its measurements."""

from __future__ import annotations

import json
import random
import sys
from pathlib import Path

import pytest

from attn_backend.cli.batches import TraceRequest, read_trace
from attn_backend.metadata.values import check_values
from benchmarks.continuous_batching import Engine, PageCache, Request
from benchmarks.simulate import TRACE, draw, main, mooncake, read_sharegpt, replay, row, sharegpt


def requests(lengths: list[tuple[int, int]], shared: int = 0) -> list[Request]:
    """Requests of (input, output) tokens; all share the first `shared` pages, and no others."""
    return [
        Request(*pair, lambda page, i=i: (-1 if page < shared else i, page)) for i, pair in enumerate(lengths)
    ]


# PageCache


def test_full_pages_are_found_until_they_are_needed() -> None:
    cache = PageCache(4)
    pages = cache.take([], 3)
    assert pages is not None
    for j, page in enumerate(pages[:2]):
        cache.fill(page, ("a", j))
    assert cache.match(lambda j: ("a", j), 9) == pages[:2]
    cache.release(pages)
    assert cache.available == 4
    assert cache.match(lambda j: ("a", j), 1) == pages[:1]
    again = cache.take(cache.match(lambda j: ("a", j), 2), 3)
    assert again is not None
    assert again[:2] == pages[:2]
    cache.release(again)
    taken = cache.take([], 3)  # two empty ones, and the least shared page: the last
    assert taken is not None
    assert pages[0] not in taken
    assert cache.match(lambda j: ("a", j), 9) == pages[:1]


def test_too_few_pages_change_nothing() -> None:
    cache = PageCache(4)
    held = cache.take([], 2)
    assert held is not None
    cache.fill(held[0], "a")
    assert cache.take([], 3) is None
    assert cache.take([held[0]], 4) is None
    assert cache.available == 2
    assert cache.take([held[0]], 3) is not None
    assert cache.available == 0
    cache.release(held)  # held[0] has another user
    assert cache.available == 1


def test_equal_pages_that_were_filled_beside_each_other_stay_two() -> None:
    cache = PageCache(2)
    pages = cache.take([], 2)
    assert pages is not None
    cache.fill(pages[0], "a")
    cache.fill(pages[1], "a")
    assert cache.match(lambda j: "a", 1) == [pages[0]]
    cache.release(pages)
    assert cache.available == 2


def test_pages_without_content_are_never_found() -> None:
    cache = PageCache(1)
    pages = cache.take([], 1)
    assert pages is not None
    cache.fill(pages[0], None)
    assert cache.match(lambda j: None, 1) == []


# Engine


def drain(engine: Engine, most: int = 10**5) -> list[list[tuple[int, int]]]:
    """(scheduled, computed before) of each request of each step."""
    steps = []
    while engine.waiting or engine.running or engine.returning:
        assert len(steps) < most
        step = engine.begin_step()
        steps.append([(request.scheduled, request.computed) for request in step])
        if step:
            check_values(engine.view(step), max_rows=engine.token_budget)
        engine.end_step()
    return steps


def test_prefills_in_chunks_and_decodes() -> None:
    steps = drain(Engine(requests([(100, 3), (30, 2)]), batch_limit=2, cache_tokens=1024, token_budget=64))
    assert steps == [[(64, 0)], [(36, 64), (28, 0)], [(1, 100), (2, 28)], [(1, 101), (1, 30)]]


def test_limits_hold_and_pages_come_back() -> None:
    generator = random.Random(1)
    lengths = [(generator.randint(1, 300), generator.randint(1, 40)) for _ in range(200)]
    engine = Engine(requests(lengths, shared=3), batch_limit=7, cache_tokens=1600, token_budget=100)
    seen = 0
    while engine.waiting or engine.running:
        step = engine.begin_step()
        assert 0 < sum(request.scheduled for request in step) <= 100
        assert len(step) <= len(engine.running) <= 7
        owned = [page for request in step for page in request.pages[3:].tolist()]
        assert len(owned) == len(set(owned))  # only the first three pages are shared
        seen += sum(request.scheduled for request in step)
        engine.end_step()
    assert engine.cache.available == 100
    assert engine.input_tokens == sum(length for length, _ in lengths)
    assert seen == sum(a + b - 1 for a, b in lengths) - engine.found_tokens
    assert engine.found_tokens > 0


def test_shared_pages_are_shared_in_the_step_that_fills_them() -> None:
    engine = Engine(requests([(64, 5), (64, 5), (48, 5)], shared=3), batch_limit=3, cache_tokens=1024)
    step = engine.begin_step()
    # 48 tokens are 3 pages, but the last token is always computed
    assert [request.scheduled for request in step] == [64, 16, 16]
    assert step[0].pages[:3].tolist() == step[1].pages[:3].tolist()
    assert step[0].pages[:2].tolist() == step[2].pages[:2].tolist()
    view = engine.view(step)
    assert view.qo_indptr.tolist() == [0, 64, 80, 96]
    assert view.table.last_page_len is not None
    assert view.table.last_page_len.tolist() == [16, 16, 16]


def test_the_next_turn_finds_what_was_said() -> None:
    first_turns = sharegpt([[(50, 30), (20, 10)]])
    engine = Engine(first_turns, batch_limit=4, cache_tokens=1024, think_steps=10)
    steps = [step for step in drain(engine) if step]
    # 79 tokens fill 4 pages
    assert [step[0] for step in steps if step[0][0] > 1] == [(50, 0), (100 - 64, 64)]


def test_samples_share_the_prompt_only() -> None:
    branches = sharegpt([[(50, 30), (20, 10)]], samples=3)
    assert len(branches) == 3
    assert [len(branch.follows) for branch in branches] == [3, 0, 0]
    engine = Engine(branches, batch_limit=4, cache_tokens=1024)
    step = engine.begin_step()
    assert [request.scheduled for request in step] == [50, 2, 2]
    tables = [request.pages.tolist() for request in step]
    assert tables[0][:3] == tables[1][:3] == tables[2][:3]
    assert len({page for table in tables for page in table[3:]}) == 6


def test_system_prompt_is_everybody_s() -> None:
    turns = sharegpt([[(50, 30)], [(60, 10)]], system_tokens=40)
    assert [request.input_length for request in turns] == [90, 100]
    assert [turns[0].page_key(page) == turns[1].page_key(page) for page in range(4)] == [
        True,
        True,
        False,
        False,
    ]


# The replay


def test_trace_has_mooncake_s_structure() -> None:
    trace = read_trace(TRACE)
    assert len(trace) == 3993
    before: dict[int, int] = {}
    for request in trace:
        for previous, block in zip([-1, *request.hash_ids], request.hash_ids, strict=False):
            assert before.setdefault(block, previous) == previous  # equal ids imply equal ids before them


def test_replay_measures_what_is_shared() -> None:
    conversations = [[(64, 40)]] * 40
    alone, together = (
        replay(sharegpt(conversations, system_tokens=tokens), 8, 1 << 16, every=4) for tokens in (0, 6400)
    )
    assert alone.removed == 0
    assert not any(alone.taken)
    assert 0.5 < together.removed < 1
    assert any(together.taken)
    assert together.found > 0.8
    assert min(*together.balance[0], *together.balance[1]) >= 1
    assert row("system prompt", 8, together)["KV traffic removed"] == f"{together.removed:.1%}"
    panels = draw({("alone", 8): alone, ("system prompt", 8): together}).axes
    assert [panel.get_title("left").split("\n")[0] for panel in panels] == ["alone", "system prompt"]
    without, with_cascade = (line.get_ydata() for line in panels[1].lines)
    assert sum(with_cascade) < sum(without) / 2


def test_replay_of_a_trace() -> None:
    trace = [TraceRequest(0.0, 1000, 8, [1, 2 + i]) for i in range(30)]
    measured = replay(mooncake(trace), 4, 1 << 14, every=2)
    assert 0.4 < measured.found < 0.6  # one block of the two


def test_sharegpt_lengths(tmp_path: Path) -> None:
    path = tmp_path / "sharegpt.json"
    path.write_text(json.dumps([{"conversations": [{"value": "x" * n} for n in (42, 84, 420, 1, 7)]}]))
    assert read_sharegpt(path, 5) == [[(10, 20), (100, 1)]]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--sharegpt FOLDER/nowhere.json", "nowhere.json"),
        ("--sharegpt FOLDER/cut.json", "cut.json cannot be read (JSONDecodeError: "),
        (
            "--sharegpt FOLDER/other.json",
            "other.json cannot be read (KeyError: 'conversations'), must be a JSON list of objects",
        ),
        ("--sharegpt FOLDER/prompts.json", "prompts.json holds no prompt with an answer"),
        ("--conversations 0", "argument --conversations: is 0, must be at least 1"),
        ("--batch-limits 16 0", "argument --batch-limits: is 0, must be at least 1"),
        ("--batch-limits few", "argument --batch-limits: invalid"),
        ("--request-steps -1", "argument --request-steps: is -1, must be at least 1"),
        ("--cache-tokens 64", "cache_tokens is too small"),
        ("--out FOLDER/cut.json", "cut.json"),
    ],
)
def test_wrong_arguments_are_named(
    arguments: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, text in (
        ("cut", '[{"conversations": '),
        ("other", '[{"text": "x"}]'),
        ("prompts", '[{"conversations": [{"value": "x"}]}]'),
    ):
        (tmp_path / f"{name}.json").write_text(text)
    with pytest.raises(SystemExit, match="2"):
        main(arguments.replace("FOLDER", str(tmp_path)).split())
    assert message in capsys.readouterr().err


def test_says_what_pictures_need(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.backends.backend_agg", None)
    with pytest.raises(SystemExit, match="2"):
        main(["--out", str(tmp_path)])
    assert "pip install 'attn-backend[plot]'" in capsys.readouterr().err


def test_a_request_that_never_fits_is_refused() -> None:
    with pytest.raises(ValueError, match="cache_tokens is too small: a request of 1007 tokens"):
        replay(mooncake([TraceRequest(0.0, 1000, 8, [1, 2])]), 4, 64, every=1)
