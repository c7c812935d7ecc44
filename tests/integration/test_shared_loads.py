"""Loads whose prompts share contexts, documents or recorded blocks: shared tokens, lengths, and seeds."""

from __future__ import annotations

import itertools
import json
import random
from pathlib import Path

import pytest

from attn_backend.cli.batches import TRACE_BLOCK
from integration.datasets import make_workload
from integration.text import TextMaker
from integration.tokenizer import write_word_tokenizer
from integration.trace import Trace

TRACE = Path(__file__).resolve().parents[2] / "benchmarks" / "traces" / "mooncake_synthetic.jsonl"


@pytest.fixture(params=["no special tokens", "a special token"])
def model_folder(request, tmp_path):
    """Models with tokenizers that add nothing to a text, and the token that begins it."""
    write_word_tokenizer(tmp_path, 5000, bos_token_id=4000, eos_token_id=4001)
    if request.param == "a special token":
        from tokenizers import Tokenizer, processors

        path = str(tmp_path / "tokenizer.json")
        tokenizer = Tokenizer.from_file(path)
        begin = tokenizer.id_to_token(4000)
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{begin} $A", special_tokens=[(begin, 4000)]
        )
        tokenizer.save(path)
    return tmp_path


def token_ids(workload, seed=0):
    tokenizer = TextMaker(workload.model_folder, 0).tokenizer
    return [tokenizer.encode(prompt.text).ids for prompt in workload.prompts(seed)]


def shared(one, other):
    """Length of the common prefix."""
    return next(
        (place for place, (a, b) in enumerate(zip(one, other, strict=False)) if a != b),
        min(len(one), len(other)),
    )


def trace_file(folder, lines):
    path = folder / "trace.jsonl"
    names = ("timestamp", "input_length", "output_length", "hash_ids")
    path.write_text("".join(json.dumps(dict(zip(names, line, strict=True))) + "\n" for line in lines))
    return path


def random_trace(seed, count):
    """Requests that continue others after some blocks, as conversations and common prompts do."""
    draw = random.Random(seed)
    ids, known, lines = itertools.count(1), [[]], []
    for number in range(count):
        before = draw.choice(known)
        hashes = before[: draw.randint(0, len(before))] + [next(ids) for _ in range(draw.randint(1, 3))]
        known.append(hashes)
        length = TRACE_BLOCK * (len(hashes) - 1) + draw.randint(2, TRACE_BLOCK)
        lines.append((1000 * number, length, draw.randint(2, 9), hashes))
    return lines


@pytest.mark.parametrize("seed", range(4))
def test_prompts_of_a_trace_share_the_blocks_whose_hashes_are_equal(model_folder, seed):
    lines = random_trace(seed, 24)
    path = trace_file(model_folder, lines)
    workload = make_workload(f"trace:{path}", len(lines), None, model_folder, 0, max_model_len=1 << 20)
    prompts = token_ids(workload)
    assert [len(prompt) for prompt in prompts] == [length for _, length, _, _ in lines]
    assert [prompt.output_len for prompt in workload.prompts(0)] == [output for _, _, output, _ in lines]
    for (a, (_, length, _, hashes)), (b, (_, other_length, _, others)) in itertools.combinations(
        enumerate(lines), 2
    ):
        in_blocks = min(shared(hashes, others) * TRACE_BLOCK, length, other_length)
        # two blocks may begin with the same word by chance
        assert in_blocks <= shared(prompts[a], prompts[b]) < in_blocks + 4, (hashes, others)


def test_the_recorded_trace_keeps_its_lengths_and_times(model_folder):
    workload = make_workload(f"trace:{TRACE}", 12, None, model_folder, 0, samples=2, max_model_len=8192)
    assert isinstance(workload, Trace)
    recorded = [json.loads(line) for line in TRACE.read_text().splitlines()]
    fit = [
        line
        for line in recorded
        if line["input_length"] + line["output_length"] <= 8192
        and min(line["input_length"], line["output_length"]) > 1
    ][:12]
    assert [len(prompt) for prompt in token_ids(workload)] == [line["input_length"] for line in fit]
    assert workload.arrivals == pytest.approx(
        [(line["timestamp"] - fit[0]["timestamp"]) / 1000 for line in fit]
    )
    assert workload.num_requests == 24
    given = make_workload(f"trace:{TRACE}", 12, "7", model_folder, 0, max_model_len=8192)
    assert {prompt.output_len for prompt in given.prompts(0)} == {7}


def test_requests_that_do_not_fit_are_passed_over(model_folder):
    path = trace_file(model_folder, [(0, 600, 9, [1, 2]), (5, 1, 9, [3]), (7, 20, 1, [4]), (8, 20, 3, [5])])
    workload = make_workload(f"trace:{path}", 1, None, model_folder, 0, max_model_len=600)
    assert [len(prompt) for prompt in token_ids(workload)] == [20]
    with pytest.raises(ValueError, match=r"num-prompts: 2, but .* holds 1 requests that can be used"):
        make_workload(f"trace:{path}", 2, None, model_folder, 0, max_model_len=600)


@pytest.mark.parametrize(
    ("dataset", "num_prompts", "output_len"),
    [
        ("agents:3x200+10-30", 12, "4-9"),
        ("agents:2x100+20x3", 12, "5"),
        ("documents:100-300+9", 6, "4"),
        ("documents:150+5-9x4", 8, "4"),
        (f"trace:{TRACE}", 5, None),
    ],
)
def test_a_seed_decides_every_prompt(model_folder, dataset, num_prompts, output_len):
    def load():
        return make_workload(dataset, num_prompts, output_len, model_folder, 3, max_model_len=4096)

    assert load().prompts(1) == load().prompts(1)
    first, other = token_ids(load(), 1), token_ids(load(), 2)
    assert [len(prompt) for prompt in first] == [len(prompt) for prompt in other]
    # except for a special token, prompts of another seed share nothing with these
    assert all(shared(one, two) < 5 for one, two in itertools.product(first, other))


def test_agents_share_their_contexts(model_folder):
    workload = make_workload("agents:3x200+10-30", 12, "4-9", model_folder, 0)
    prompts = token_ids(workload)
    assert (
        workload.description
        == "turns of 12 agents over 3 contexts of 200 tokens, 10-30 own tokens, 4-9 output tokens"
    )
    assert [len(prompt) for prompt in prompts] == [200 + own for own in workload.own_lens]
    assert set(workload.own_lens) <= set(range(10, 31))
    assert {prompt.output_len for prompt in workload.prompts(0)} <= set(range(4, 10))
    for a, b in itertools.combinations(range(12), 2):
        same = a % 3 == b % 3
        assert (shared(prompts[a], prompts[b]) >= 200) == same
        assert shared(prompts[a], prompts[b]) < (205 if same else 5)


def test_a_turn_repeats_the_agents_earlier_ones(model_folder):
    workload = make_workload("agents:2x100+20x3", 12, "5", model_folder, 0)
    prompts = token_ids(workload)
    assert [len(prompt) for prompt in prompts] == [120] * 4 + [145] * 4 + [170] * 4  # four agents, in rounds
    for agent in range(4):
        first, second, third = prompts[agent::4]
        assert second[:120] == first
        assert third[:145] == second
    assert shared(prompts[0], prompts[2]) >= 100  # the same context
    assert shared(prompts[4], prompts[5]) < 5


def test_questions_about_a_document_are_neighbors(model_folder):
    workload = make_workload("documents:100-300+5-9x4", 8, "4", model_folder, 0)
    prompts = token_ids(workload)
    lengths = workload.context_lens
    assert len(lengths) == 2
    assert all(100 <= length <= 300 for length in lengths)
    assert [len(prompt) for prompt in prompts] == [
        lengths[number // 4] + own for number, own in enumerate(workload.own_lens)
    ]
    for a, b in itertools.combinations(range(8), 2):
        common = shared(prompts[a], prompts[b])
        assert (lengths[a // 4] <= common < lengths[a // 4] + 4) if a // 4 == b // 4 else common < 5


def test_turns_can_be_recorded_ones(model_folder, monkeypatch):
    chats = [
        {"conversations": [{"value": f"please write story {n} for me"}, {"value": "once upon a time " * n}]}
        for n in range(1, 9)
    ]
    path = model_folder / "chats.json"
    path.write_text(json.dumps(chats))
    monkeypatch.setattr("integration.datasets.dataset_file", lambda name: path)
    workload = make_workload("agents:2x50+recorded", 6, None, model_folder, 0)
    prompts = token_ids(workload)
    assert len({prompt.output_len for prompt in workload.prompts(0)}) == 6
    assert all(shared(prompts[a], prompts[a + 2]) >= 50 for a in range(4))
    given = make_workload("documents:50+recorded", 6, "7", model_folder, 0)
    assert {prompt.output_len for prompt in given.prompts(0)} == {7}


@pytest.mark.parametrize(
    ("dataset", "num_prompts", "output_len", "message"),
    [
        ("agents:3+20", 6, "4", "dataset: 'agents:3"),
        ("agents:0x20+20", 6, "4", "must be positive"),
        ("agents:2x20+20x4", 6, "4", "num-prompts: 6, must be a multiple of 4, the turns of an agent"),
        ("agents:2x20+20", 6, None, "output-len: missing"),
        ("agents:2x20+recorded", 6, "3-4", "takes one number"),
        ("documents:20", 6, "4", "dataset: 'documents:20'"),
        ("documents:20-10+3", 6, "4", "dataset: '20-10'"),
        ("documents:20+3x5", 6, "4", "num-prompts: 6, must be a multiple of 5, the questions to a document"),
        (f"trace:{TRACE}", 6, "4-5", "takes one number"),
    ],
)
def test_bad_names_are_refused(tmp_path, dataset, num_prompts, output_len, message):
    with pytest.raises(ValueError, match=message):
        make_workload(dataset, num_prompts, output_len, tmp_path, 0)


def test_prompts_longer_than_the_servers_limit_are_refused(model_folder):
    workload = make_workload("agents:2x100+20x3", 6, "5", model_folder, 0, max_model_len=174)
    with pytest.raises(
        ValueError, match="max-model-len: 174, but the longest prompt and its answer have 175"
    ):
        workload.prompts(0)


def test_only_a_trace_has_arrivals(model_folder):
    workload = make_workload("agents:2x100+20", 6, "5", model_folder, 0)
    with pytest.raises(ValueError, match="request-rate: recorded, but the data set has no times of arrival"):
        _ = workload.arrivals
