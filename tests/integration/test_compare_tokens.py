"""Answers are compared token by token up to the first difference, which may be a near tie."""

from __future__ import annotations

import sys
import time

import pytest
from health_server import SERVE_HEALTH

from integration import compare_tokens
from integration.compare_tokens import compare, serve_side_by_side
from integration.engines import Launch, Token
from integration.model import Model
from integration.server import ServerError, free_port


def answer(*ids, logprob=-1.0, alternatives=None):
    return [Token(token_id, logprob, {token_id: logprob, **(alternatives or {})}) for token_id in ids]


def test_equal_answers_are_counted():
    comparison = compare([answer(1, 2), answer(3, 4)], [answer(1, 2), answer(3, 4, logprob=-1.5)])
    assert (comparison.prompts, comparison.equal, comparison.tokens_compared, comparison.differences) == (
        2,
        2,
        4,
        [],
    )
    assert comparison.largest_logprob_difference == 0.5


def test_the_first_difference_ends_a_comparison_and_has_its_gaps():
    reference = answer(1, 2, 9, alternatives={7: -1.1})
    backend = answer(1, 7, 8, alternatives={2: -1.2})
    (difference,) = compare([reference], [backend]).differences
    assert (difference.prompt, difference.position, difference.reference_token, difference.backend_token) == (
        0,
        1,
        2,
        7,
    )
    assert difference.reference_gap == pytest.approx(0.1)
    assert difference.backend_gap == pytest.approx(0.2)
    assert difference.is_near_tie(0.25)
    assert not difference.is_near_tie(0.15)


def test_a_token_outside_the_alternatives_is_no_near_tie():
    (difference,) = compare([answer(1)], [answer(2)]).differences
    assert difference.reference_gap is None
    assert not difference.is_near_tie(100)


def test_answers_of_different_lengths_are_refused():
    with pytest.raises(ValueError, match="prompt 0"):
        compare([answer(1)], [answer(1, 2)])


SLOW_START = """
import sys, time
time.sleep(float(sys.argv[2]))
"""


class FakeEngine:
    """Servers of a few lines that need some time to start, or end at once.

    Token 0 of an answer is the server's port.
    """

    name = "fake"

    def server_command(self, launch):
        return [
            sys.executable,
            "-c",
            SLOW_START + SERVE_HEALTH if launch.backend == "answers" else "exit('no GPU')",
            str(launch.port),
            "1.0",
        ]

    def server_environment(self, launch):
        return {}

    def generate(self, url, prompt, max_tokens, alternatives):
        return answer(int(url.rpartition(":")[2]), *prompt)


@pytest.fixture
def side_by_side(tmp_path):
    """A function that makes two servers answer two prompts."""

    def answers(*backends):
        launches = [
            Launch(sys.executable, Model("none", tmp_path, True), backend, "cpu", free_port(), max_num_seqs=2)
            for backend in backends
        ]
        servers = [
            (FakeEngine(), launch, tmp_path / f"{number}.log") for number, launch in enumerate(launches)
        ]
        given = serve_side_by_side(servers, [[1, 2], [3]], 4, timeout_s=60)
        return [launch.port for launch in launches], given

    return answers


def test_servers_side_by_side_start_at_the_same_time(side_by_side, monkeypatch):
    made = []
    monkeypatch.setattr(
        compare_tokens,
        "generate_all",
        lambda *given, real=compare_tokens.generate_all: made.append(time.monotonic()) or real(*given),
    )
    ports, answers = side_by_side("answers", "answers")
    assert [[[token.token_id for token in one] for one in of_server] for of_server in answers] == [
        [[port, 1, 2], [port, 3]] for port in ports
    ]
    assert made[1] - made[0] < 0.9  # the second server was ready by then


def test_a_server_that_does_not_start_ends_a_comparison_side_by_side(side_by_side, capfd):
    with pytest.raises(ServerError, match="ended with exit status 1 before it was ready"):
        side_by_side("answers", "ends")
    assert "no GPU" in capfd.readouterr().err
