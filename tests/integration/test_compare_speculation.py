"""The comparison of speculation with the engine's own backend: its requests, its counts, and its verdict. No
engine is started.
"""

from __future__ import annotations

import math
import random
from dataclasses import replace

import pytest

pytest.importorskip("torch")

from integration.compare_speculation import (
    Answers,
    Drafts,
    Questions,
    Sampled,
    judge,
    parse_arguments,
    run,
    without_speculation,
)
from integration.engines import ENGINES, Sampling, Token
from integration.two_samples import chi_square, same_mean, zero_mean


def test_chi_square_is_that_of_the_formula():
    """For one and two degrees of freedom, where the probabilities have a closed form."""
    one, other = [0] * 30 + [1] * 70, [0] * 50 + [1] * 50
    assert chi_square(one, other) == pytest.approx(math.erfc((400 / 80 + 400 / 120) ** 0.5 / 2**0.5))
    three = [0] * 20 + [1] * 30 + [2] * 50, [0] * 40 + [1] * 30 + [2] * 30
    assert chi_square(*three) == pytest.approx(math.exp(-(400 / 60 + 0 + 400 / 80) / 2))
    unequal = [0] * 60 + [1] * 140, [0] * 50 + [1] * 50  # 110 of 300 are 0
    cells = ((60, 200 * 110 / 300), (140, 200 * 190 / 300), (50, 100 * 110 / 300), (50, 100 * 190 / 300))
    assert chi_square(*unequal) == pytest.approx(
        math.erfc((sum((count - expected) ** 2 / expected for count, expected in cells) / 2) ** 0.5)
    )


def test_rare_values_share_a_cell():
    frequent = [0] * 40, [0] * 40
    assert chi_square(*frequent) is None
    # five rare ones go into the only other cell
    assert chi_square(frequent[0] + [1, 2, 3], frequent[1] + [4, 5]) is None
    one, other = frequent[0] + list(range(1, 11)), frequent[1] + list(range(20, 30))
    assert chi_square(one, other) == pytest.approx(1.0)  # ten and ten
    assert chi_square(one, frequent[1] + [0] * 10) == pytest.approx(
        math.erfc((100 / 90 + 100 / 10) ** 0.5 / 2**0.5)
    )


def test_chi_square_is_right_about_chance_and_sees_a_difference():
    draw = random.Random(1)

    def sample(weights):
        return draw.choices(range(len(weights)), weights, k=200)

    same = [chi_square(sample([8, 4, 2, 1, 1]), sample([8, 4, 2, 1, 1])) for _ in range(400)]
    assert 0.02 < sum(p < 0.05 for p in same) / 400 < 0.09
    other = [chi_square(sample([8, 4, 2, 1, 1]), sample([4, 8, 2, 1, 1])) for _ in range(50)]
    assert sum(p < 0.001 for p in other) > 45


def test_permutations_and_sign_flips_count_what_is_as_large():
    assert same_mean([1.0, 2.0], [2.0, 1.0]) == 1
    assert same_mean([0, 0, 0], [1, 1, 1]) == pytest.approx(2 / 20, abs=0.02)
    assert same_mean([0.0] * 20, [1.0] * 20) < 0.001
    assert zero_mean([0.0, 0.0]) == 1
    assert zero_mean([1, 1, 1, 1, 1]) == pytest.approx(2 / 32, abs=0.015)
    assert zero_mean([1.0, 1.5] * 10) < 0.001


def test_the_options_of_speculation_are_those_of_this_name():
    vllm = ["--enable-lora", "--speculative-config", '{"method": "ngram"}', "--seed", "3"]
    assert without_speculation(vllm) == ["--enable-lora", "--seed", "3"]
    assert without_speculation(
        ["--page-size=1", "--speculative-algorithm=NGRAM", "--speculative-eagle-topk", "2"]
    ) == ["--page-size=1"]


class CountingEngine:
    """Drafts two tokens for each requested one, and the second is wrong; counts like a server."""

    def __init__(self):
        self.counted, self.seeds = Drafts(3, 5), []

    def drafts(self, url):
        return self.counted

    def generate(self, url, prompt, max_tokens, alternatives):
        self.counted = Drafts(self.counted.passes + 4, self.counted.gained + 8)
        return [Token(token, -0.1, {}) for token in prompt[:max_tokens]]

    def sample(self, url, prompt, max_tokens, sampling, seed, logprobs):
        self.seeds.append(seed)
        return [prompt[0], seed][:max_tokens]


def test_what_a_server_is_asked():
    engine = CountingEngine()
    questions = Questions(
        [[1, 2], [3, 4], [5, 6]], 2, Sampling(), sampled_prompts=2, sampled_tokens=2, rounds=3
    )
    answers = questions.ask(engine, "url", 2, first_seed=100)
    assert answers.drafts == [Drafts(4, 8)] * 3
    assert answers.drafts[0].accept_length == 2
    assert [[token.token_id for token in answer] for answer in answers.at_once] == questions.prompts
    assert answers.sampled.answers == [[[1, seed], [3, seed + 1]] for seed in (100, 102, 104)]
    assert len(answers.sampled.rounds) == 3
    assert sorted(engine.seeds) == list(range(100, 106))
    assert replace(questions, sampling=None).ask(engine, "url", 2, 0).sampled == Sampled([], [])


def greedy(*ids, gap=0.1):
    """An answer in which the tokens 1 and 2 are `gap` apart at every place."""
    return [Token(token_id, -0.5, {token_id: -0.5, 3 - token_id: -0.5 - gap}) for token_id in ids]


def sampled(seed, weights=(3, 2, 1), accepts=(4, 5, 6), rounds=100):
    draw = random.Random(seed)
    answers = [[draw.choices(range(len(weights)), weights, k=4) for _ in range(2)] for _ in range(rounds)]
    return Sampled(answers, [Drafts(2, draw.choice(accepts)) for _ in range(rounds)])


def answered(seed, **changes):
    tokens = [greedy(1, 2, 1), greedy(2, 2, 2)]
    return replace(Answers(tokens, tokens, [Drafts(2, 5), Drafts(4, 6)], sampled(seed)), **changes)


def verdict_of(near_tie=None, plain=None, **changes):
    plain = plain or answered(3, drafts=[Drafts(0, 0)] * 2)
    return judge({"reference": answered(1), "backend": answered(2, **changes), "plain": plain}, near_tie)[0]


def test_equal_servers_hold():
    verdict = verdict_of()
    assert verdict.holds
    # four for tokens, drafts, greedy and sampled accept lengths, two for distributions
    assert len(verdict.checks) == 9
    assert len(verdict_of(sampled=Sampled([], [])).checks) == 6


@pytest.mark.parametrize("where", ["one_at_a_time", "at_once"])
def test_another_token_is_seen(where):
    changes = {where: [greedy(1, 2, 2), greedy(2, 2, 2)]}
    assert not verdict_of(**changes).holds
    assert verdict_of(0.25, **changes).holds  # a near tie, in 16 bits
    assert not verdict_of(0.05, **changes).holds
    assert not verdict_of(plain=answered(3, **changes)).holds


def test_without_a_reference():
    servers = {"backend": answered(2), "plain": answered(3, drafts=[Drafts(0, 0)] * 2)}
    verdict = judge(servers, None)[0]
    assert verdict.holds
    assert len(verdict.checks) == 4  # two for tokens, drafts, one for distributions
    assert not judge(servers | {"backend": answered(2, drafts=[Drafts(0, 0)] * 2)}, None)[0].holds


def test_another_accept_length_is_seen():
    assert not verdict_of(drafts=[Drafts(2, 5), Drafts(4, 7)]).holds
    assert verdict_of(0.25, drafts=[Drafts(2, 5), Drafts(4, 7)]).holds  # one of two: chance
    assert not verdict_of(drafts=[Drafts(0, 0)] * 2).holds  # nothing was drafted
    many = {"one_at_a_time": [greedy(1)] * 20, "at_once": [greedy(1)] * 20}
    servers = {
        name: answered(1, drafts=[Drafts(4, 8)] * 20, **many) for name in ("reference", "backend", "plain")
    }
    servers["backend"] = replace(servers["backend"], drafts=[Drafts(4, 7)] * 20)
    assert not judge(servers, 0.25)[0].holds
    assert not verdict_of(sampled=sampled(2, accepts=(2, 3, 4))).holds


def test_answers_with_other_tokens_have_other_accept_lengths():
    """They are not compared, but some answer must be."""
    parted = [greedy(1, 2, 2), greedy(2, 2, 2)]
    assert verdict_of(0.25, one_at_a_time=parted, drafts=[Drafts(9, 9), Drafts(4, 6)]).holds
    assert not verdict_of(0.25, one_at_a_time=[greedy(2, 2, 1), greedy(1, 2, 2)]).holds


def test_another_distribution_is_seen():
    assert not verdict_of(sampled=sampled(2, weights=(2, 3, 1))).holds
    assert not verdict_of(plain=answered(3, sampled=sampled(3, weights=(1, 3, 2)))).holds
    assert not verdict_of(
        sampled=sampled(2, weights=(1,)), plain=answered(3, sampled=sampled(3, weights=(1,)))
    ).holds


def test_a_comparison_without_a_test_does_not_hold():
    one_token = {"sampled": sampled(1, weights=(1,))}
    assert not judge({name: answered(1, **one_token) for name in ("reference", "backend", "plain")}, None)[
        0
    ].holds


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--engine", "vllm", "--server-args", "--seed 3"], "server-args: .* must have --speculative-config"),
        (
            [
                "--engine",
                "sglang",
                "--device",
                "cpu",
                "--server-args",
                "--speculative-algorithm NGRAM",
                "--sampling",
                "",
            ],
            "sampling: on a CPU",
        ),
    ],
)
def test_what_is_refused(arguments, message, monkeypatch):
    monkeypatch.setattr("sys.argv", ["compare_speculation", *arguments])
    with pytest.raises(ValueError, match=message):
        run(parse_arguments())


@pytest.mark.parametrize(
    ("engine", "metrics", "expected"),
    [
        (
            "vllm",
            'vllm:spec_decode_num_drafts_total{engine="0"} '
            '3.0\nvllm:spec_decode_num_accepted_tokens_total{engine="0"} 4.0\n',
            Drafts(3, 7),
        ),
        (
            "sglang",
            'sglang:generation_tokens_total{a="b"} 20.0\nsglang:num_requests_total{a="b"} '
            '2.0\nsglang:num_requests_total{a="c"} 1.0\n'
            'sglang:spec_verify_calls_total{a="b"} 9.0\n',
            Drafts(9, 17),
        ),
        ("vllm", "vllm:spec_decode_num_drafts_total_of_another 3.0\n", Drafts(0, 0)),
    ],
)
def test_drafts_are_counted(engine, metrics, expected, monkeypatch):
    monkeypatch.setattr("integration.http.get_text", lambda url: metrics)
    assert ENGINES[engine].drafts("http://127.0.0.1:1") == expected
