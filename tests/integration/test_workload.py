"""The driver's data sets: a cut ShareGPT file, prescribed lengths, and their names on the command line."""

from __future__ import annotations

import json

import pytest

from integration.sharegpt import first_turns, parse_conversations, write_complete_file
from integration.text import TextMaker
from integration.tokenizer import write_word_tokenizer
from integration.workload import FileWorkload, SharedPrefix, ShareGPT, make_workload


def conversation(*turns):
    return {"id": "x", "conversations": [{"from": "human", "value": turn} for turn in turns]}


@pytest.fixture
def model_folder(tmp_path):
    write_word_tokenizer(tmp_path, 5000, bos_token_id=4000, eos_token_id=4001)
    return tmp_path


@pytest.mark.parametrize("cut", [1, 3, 30, 60])
def test_a_cut_file_gives_the_conversations_before_the_cut(cut):
    whole = [conversation("a [", "b"), conversation('c "quoted"'), conversation("d", "e", "f" * 60)]
    text = json.dumps(whole, indent=1)
    assert parse_conversations(text) == whole
    assert parse_conversations(text[:-cut]) == (whole if cut == 1 else whole[:2])


def test_a_file_without_a_whole_conversation_is_refused():
    with pytest.raises(ValueError, match="no whole conversation"):
        parse_conversations('[{"id": "x')


def test_the_complete_file_is_json_with_two_turns_each(tmp_path):
    published, target = tmp_path / "published.json", tmp_path / "complete.json"
    published.write_text(json.dumps([conversation("a", "b"), conversation("alone"), conversation("c", "d")])[:-1])
    assert write_complete_file(published, target) == 2
    assert [entry["conversations"][0]["value"] for entry in json.loads(target.read_text())] == ["a", "c"]
    assert first_turns(target) == ["a", "c"]


def test_texts_have_the_asked_number_of_tokens(model_folder):
    maker = TextMaker(model_folder, seed=1)
    assert [maker.count(maker.text(length)) for length in (1, 17, 4096)] == [1, 17, 4096]


def test_uniform_lengths_reach_both_clients(model_folder):
    workload = make_workload("uniform:5-50", 20, "3-9", model_folder, seed=0)
    assert isinstance(workload, FileWorkload)
    assert set(workload.prompt_lens) <= set(range(5, 51))
    assert set(workload.output_lens) <= set(range(3, 10))
    count = TextMaker(model_folder, 0).count
    lines = [json.loads(line) for line in workload.write_vllm(model_folder / "vllm.jsonl").read_text().splitlines()]
    assert [count(line["prompt"]) for line in lines] == workload.prompt_lens
    assert [line["output_tokens"] for line in lines] == workload.output_lens
    entries = json.loads(workload.write_sharegpt(model_folder / "sglang.json").read_text())
    lengths = [[count(turn["value"]) for turn in entry["conversations"]] for entry in entries]
    assert lengths == [list(pair) for pair in zip(workload.prompt_lens, workload.output_lens, strict=True)]


def test_a_shared_prefix_is_shared(model_folder):
    workload = make_workload("prefix:100+7", 5, "16", model_folder, seed=0)
    assert isinstance(workload, SharedPrefix)
    prompts = [entry["conversations"][0]["value"].split() for entry in json.loads(workload.write_sharegpt(model_folder / "p.json").read_text())]
    assert {len(prompt) for prompt in prompts} == {107}
    assert len({tuple(prompt[:100]) for prompt in prompts}) == 1
    assert len({tuple(prompt[100:]) for prompt in prompts}) == 5


def test_lengths_come_from_a_table(model_folder):
    table = model_folder / "trace.csv"
    table.write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46.68,374,44\n2023-11-16 18:15:50.95,396,109\n")
    workload = make_workload(f"lengths:{table}", 10, None, model_folder, seed=0)
    assert workload.num_prompts == 2
    assert workload.prompt_lens == [374, 396]
    assert workload.output_lens == [44, 109]


def test_sharegpt_takes_a_local_file(model_folder):
    path = model_folder / "chat.json"
    path.write_text("[]")
    workload = make_workload(str(path), 3, "8", model_folder, seed=0)
    assert workload == ShareGPT(3, "ShareGPT, first turns, 8 output tokens", path.resolve(), 8)


@pytest.mark.parametrize(
    ("dataset", "output_len", "message"),
    [
        ("nothing", "4", "dataset: 'nothing'"),
        ("uniform:9-3", "4", "dataset: '9-3'"),
        ("uniform:3-9", None, "output-len: missing"),
        ("uniform:3-9", "0", "output-len: '0'"),
        ("prefix:10", "4", "expected prefix:PREFIX"),
    ],
)
def test_bad_names_are_refused(model_folder, dataset, output_len, message):
    with pytest.raises(ValueError, match=message):
        make_workload(dataset, 2, output_len, model_folder, seed=0)
