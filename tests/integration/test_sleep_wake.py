"""Sleeps, wakes and comparisons around a fake engine."""

from __future__ import annotations

import pytest

from integration import sleep_wake
from integration.model import Model


class Engine:
    """Answers from its weights, which level 2 discards; `forgets`: the sleep after which its answers differ
    permanently.
    """

    def __init__(self, forgets=None):
        self.calls, self.sleeps, self.weights, self.offset, self.forgets = [], 0, 7, 0, forgets

    def sleep(self, level):
        self.sleeps += 1
        self.calls.append(f"sleep {level}")
        self.weights = 7 if level == 1 else None
        self.offset += self.sleeps == self.forgets

    def wake_up(self):
        self.calls.append("wake")

    def collective_rpc(self, method):
        assert method == "reload_weights"
        self.calls.append("reload")
        self.weights = 7

    def answers(self, prompts, max_tokens):
        return [
            [self.weights + len(prompt) + self.offset * (prompt == "bb")] * max_tokens for prompt in prompts
        ]


@pytest.fixture
def tool(monkeypatch, tmp_path):
    """Runs the command with these arguments and this engine; `taken`: workspaces allocated in sleep mode's
    memory."""

    def run(engine, *arguments, taken=0, held=6, random_weights=False):
        model = Model("model", tmp_path, random_weights)
        monkeypatch.setattr(sleep_wake, "resolve_model", lambda name, python: model)
        monkeypatch.setattr(sleep_wake, "make_prompts", lambda model, count, prefix: ["a", "bb", "ccc"])
        monkeypatch.setattr(sleep_wake, "start", lambda given, model: engine)
        monkeypatch.setattr(
            sleep_wake, "generate", lambda llm, prompts, max_tokens: llm.answers(prompts, max_tokens)
        )
        monkeypatch.setattr(sleep_wake, "workspaces_taken_away", lambda: (held, taken))
        return sleep_wake.run(sleep_wake.parse_arguments(list(arguments)))

    return run


def test_levels_alternate_and_level_2_reads_the_weights_again(tool, capsys):
    engine = Engine()
    assert tool(engine, "--times", "3")
    assert engine.calls == ["sleep 1", "wake", "sleep 2", "wake", "reload", "sleep 1", "wake"]
    assert "slept 3 times: 9 answers of 64 tokens, 0 differ" in capsys.readouterr().out


def test_other_answers_fail_and_are_counted(tool, capsys):
    assert not tool(Engine(forgets=2), "--times", "3", "--levels", "1")
    out = capsys.readouterr().out
    assert "2 of 3, level 1: 3 answers, 1 differ [1]" in out
    assert "9 answers of 64 tokens, 2 differ" in out


@pytest.mark.parametrize("counts", [{"taken": 1}, {"held": 0}])
def test_workspaces_in_sleep_modes_memory_fail_whatever_the_answers(tool, counts):
    assert not tool(Engine(), "--times", "1", **counts)


def test_random_weights_cannot_be_read_again(tool):
    with pytest.raises(ValueError, match="--levels 1"):
        tool(Engine(), random_weights=True)
    assert tool(Engine(), "--levels", "1", random_weights=True)


def test_prompts_begin_alike(tmp_path):
    from integration.tokenizer import write_word_tokenizer

    write_word_tokenizer(tmp_path, 4096, None, 1)
    prompts = sleep_wake.make_prompts(Model("model", tmp_path, random_weights=True), 5, 30)
    assert len({" ".join(prompt.split()[:30]) for prompt in prompts}) == 1
    assert len(set(prompts)) == 5
