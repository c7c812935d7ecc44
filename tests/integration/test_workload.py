"""Data sets of the serving benchmark: a cut ShareGPT file, fixed lengths, and their names on the command
line.
"""

from __future__ import annotations

import json

import pytest

from integration.datasets import make_workload
from integration.sharegpt import first_exchanges, first_turns, parse_conversations, write_complete_file
from integration.text import TextMaker
from integration.tokenizer import write_word_tokenizer
from integration.workload import FileWorkload, SharedPrefix, ShareGPT


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
    published.write_text(
        json.dumps([conversation("a", "b"), conversation("alone"), conversation("c", "d")])[:-1]
    )
    assert write_complete_file(published, target) == 2
    assert [entry["conversations"][0]["value"] for entry in json.loads(target.read_text())] == ["a", "c"]
    assert first_turns(target) == ["a", "c"]
    assert first_exchanges(target) == [("a", "b"), ("c", "d")]


def test_texts_have_the_asked_number_of_tokens(model_folder):
    maker = TextMaker(model_folder, seed=1)
    assert [maker.count(maker.text(length)) for length in (1, 17, 4096)] == [1, 17, 4096]


def test_transformers_reads_the_words_as_one_token_each(tmp_path):
    transformers = pytest.importorskip("transformers")
    # special tokens whose names could be parts of other words
    write_word_tokenizer(tmp_path, 5000, bos_token_id=1, eos_token_id=2)
    text = TextMaker(tmp_path, seed=1).text(200) + " t0001 t0012 t1200"
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path)
    assert tokenizer(text).input_ids == TextMaker(tmp_path, seed=1).tokenizer.encode(text).ids
    assert tokenizer(text).input_ids[-3:] == [1, 12, 1200]


def test_uniform_lengths_reach_both_clients(model_folder):
    workload = make_workload("uniform:5-50", 20, "3-9", model_folder, seed=0)
    assert isinstance(workload, FileWorkload)
    assert set(workload.prompt_lens) <= set(range(5, 51))
    assert set(workload.output_lens) <= set(range(3, 10))
    count = TextMaker(model_folder, 0).count
    lines = [
        json.loads(line)
        for line in workload.write_vllm(model_folder / "vllm.jsonl", seed=0).read_text().splitlines()
    ]
    assert [count(line["prompt"]) for line in lines] == workload.prompt_lens
    assert [line["output_tokens"] for line in lines] == workload.output_lens
    entries = json.loads(workload.write_sharegpt(model_folder / "sglang.json", seed=0).read_text())
    lengths = [[count(turn["value"]) for turn in entry["conversations"]] for entry in entries]
    assert lengths == [list(pair) for pair in zip(workload.prompt_lens, workload.output_lens, strict=True)]


def sent_prompts(workload, path, seed=0):
    return [
        entry["conversations"][0]["value"]
        for entry in json.loads(workload.write_sharegpt(path, seed).read_text())
    ]


def test_a_shared_prefix_is_shared(model_folder):
    workload = make_workload("prefix:100+7", 5, "16", model_folder, seed=0)
    assert isinstance(workload, SharedPrefix)
    prompts = [prompt.split() for prompt in sent_prompts(workload, model_folder / "p.json")]
    assert {len(prompt) for prompt in prompts} == {107}
    assert len({tuple(prompt[:100]) for prompt in prompts}) == 1
    assert len({tuple(prompt[100:]) for prompt in prompts}) == 5


def test_lengths_come_from_a_table(model_folder):
    table = model_folder / "trace.csv"
    table.write_text(
        "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46.68,374,44\n2023-11-16 "
        "18:15:50.95,396,109\n"
    )
    workload = make_workload(f"lengths:{table}", 10, None, model_folder, seed=0)
    assert workload.num_prompts == 2
    assert workload.prompt_lens == [374, 396]
    assert workload.output_lens == [44, 109]


def test_sharegpt_takes_a_local_file(model_folder):
    path = model_folder / "chat.json"
    path.write_text("[]")
    workload = make_workload(str(path), 3, "8", model_folder, seed=0, samples=4)
    assert workload == ShareGPT(
        3, 4, "ShareGPT, first turns, 8 output tokens", model_folder, path.resolve(), 8
    )
    assert workload.num_requests == 12


def chat_file(folder, conversations):
    path = folder / "chat.json"
    path.write_text(json.dumps(conversations))
    return path


def test_copies_of_a_prompt_are_neighbours_in_both_clients_files(model_folder):
    path = chat_file(
        model_folder,
        [
            conversation(f"please write me story number {number}", "once upon a time " * number)
            for number in range(1, 40)
        ],
    )
    workload = make_workload(str(path), 6, None, model_folder, seed=0, samples=4)
    sent = sent_prompts(workload, model_folder / "sglang.json")
    lines = [
        json.loads(line)
        for line in workload.write_vllm(model_folder / "vllm.jsonl", seed=0).read_text().splitlines()
    ]
    assert len(sent) == 24
    assert all(len(set(sent[first : first + 4])) == 1 for first in range(0, 24, 4))
    assert len(set(sent)) == 6
    assert [line["prompt"] for line in lines] == sent
    assert sent_prompts(workload, model_folder / "again.json", seed=0) == sent
    assert set(sent_prompts(workload, model_folder / "other.json", seed=1)) != set(sent)


def test_copies_of_prescribed_lengths(model_folder):
    workload = make_workload("uniform:5-50", 3, "4", model_folder, seed=0, samples=16)
    sent = sent_prompts(workload, model_folder / "p.json")
    assert [len(prompt.split()) for prompt in sent[::16]] == workload.prompt_lens
    assert all(len(set(sent[first : first + 16])) == 1 for first in (0, 16, 32))


def test_conversations_outside_the_limits_are_not_sent(model_folder):
    usable = conversation("one two three four", "five six seven eight")
    short = [
        conversation("too short", "five six seven eight"),
        conversation("one two three four", "two words"),
    ]
    long = [
        conversation("word " * 1025, "five six seven eight"),
        conversation("word " * 1000, "word " * 1049),
    ]
    path = chat_file(model_folder, [*short, *long, usable])
    (prompt,) = make_workload(str(path), 1, None, model_folder, seed=0).prompts(seed=0)
    assert prompt.output_len == 4
    with pytest.raises(ValueError, match=r"num-prompts: 2, but .* holds 1 conversations"):
        make_workload(str(path), 2, None, model_folder, seed=0).prompts(seed=0)
    with pytest.raises(ValueError, match="holds 0 conversations"):
        make_workload(str(path), 1, None, model_folder, seed=0, max_model_len=7).prompts(seed=0)


def test_real_text_stays_text_for_a_word_tokenizer(model_folder):
    maker = TextMaker(model_folder, seed=0)
    one, other = "Tell me about the weather, in 2024!", "Tell me about an interpretation"
    assert not maker.reads_text
    assert set(maker.tokenizer.encode(one).ids) == {0}  # as the engines would tokenize it
    first, second = (
        maker.tokenizer.encode(maker.readable(one)).ids,
        maker.tokenizer.encode(maker.readable(other)).ids,
    )
    assert len(first) == len(["Tell", "me", "about", "the", "weather", ",", "in", "202", "4", "!"])
    assert len(set(first)) > 8
    assert first[:3] == second[:3]
    assert first[3] != second[3]
    assert maker.readable(one) == TextMaker(model_folder, seed=7).readable(one)


def test_a_tokenizer_that_reads_text_gets_it_unchanged(tmp_path):
    from tokenizers import Tokenizer, models, pre_tokenizers

    tokenizer = Tokenizer(models.WordLevel({"?": 0, "quick": 1, "fox": 2}, unk_token="?"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    assert TextMaker(tmp_path, seed=0).readable("Hello, world") == "Hello, world"


def test_a_model_without_a_tokenizer_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"no tokenizer\.json"):
        TextMaker(tmp_path, seed=0)


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


def test_no_answers_are_refused(model_folder):
    with pytest.raises(ValueError, match="samples: 0"):
        make_workload("uniform:3-9", 2, "4", model_folder, seed=0, samples=0)
