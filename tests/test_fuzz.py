"""The fuzz finds the faults that it should find, and repeats the same calls."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import cases
import numpy
import pytest
import torch
from fuzz.call import (
    ACCEPTED,
    BROKEN,
    CRASH,
    HANG,
    REFUSED,
    RIGHT,
    UNNAMED,
    VALID_REFUSED,
    WRONG_RESULT,
    Call,
    IntArgument,
    Wrong,
    is_named,
    judge,
)
from fuzz.chunks import Runner
from fuzz.mutations import OF_TENSORS
from fuzz.scenarios import CALLS, SCENARIOS, calls_of

import attn_backend

ROOT = Path(__file__).resolve().parent.parent
CPU = torch.device("cpu")
pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")  # torch's, about sparse and quantized tensors


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """As in the fuzz: its tensors are small."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def call_of(function: Callable[..., object], wrong: bool = False, result: object = None) -> Call:
    def check(given: dict[str, Any], returned: object) -> None:
        assert returned == result, "another result"

    of = Call("f", function, {"n": 3}, {"n": IntArgument()}, check)
    return replace(of, wrong=Wrong("n", "out of range", 3, ("n",))) if wrong else of


def refusing(message: str) -> Callable[..., object]:
    def function(n: int) -> object:
        raise ValueError(message)

    return function


SCRIPT = [
    (RIGHT, call_of(lambda n: None)),
    (WRONG_RESULT, call_of(lambda n: None, result=1)),
    (VALID_REFUSED, call_of(refusing("n is 3, must be 4"))),
    (REFUSED, call_of(refusing("n is 3, must be 4"), wrong=True)),
    (UNNAMED, call_of(refusing("invalid argument n"), wrong=True)),
    (UNNAMED, call_of(lambda n: n.nothing, wrong=True)),
    (ACCEPTED, call_of(lambda n: None, wrong=True)),
    (CRASH, call_of(lambda n: os.abort())),
    (CRASH, call_of(lambda n: os._exit(3))),
    (HANG, call_of(lambda n: time.sleep(60))),
]


def test_everything_is_found() -> None:
    """Each call is a scenario.

    After calls that end their process, another process makes the next ones. The same holds after a failed
    scenario.
    """

    def calls(scenario: int) -> Iterator[Call]:
        yield SCRIPT[scenario][1] if scenario < len(SCRIPT) else SCRIPT[1000][1]

    runner = Runner(calls, 10, on_cuda=False, jobs=2, scenarios=7, limit=2.0)
    tally = runner.run(0, len(SCRIPT) + 2, None)
    kinds = [kind for kind, _ in SCRIPT] + [BROKEN] * 2
    assert {kind: count for (_, kind), count in tally.counts.items()} == {
        kind: kinds.count(kind) for kind in kinds
    }
    for finding in tally.findings.values():
        assert kinds[finding.call // 10] == finding.kind
    assert tally.findings[CRASH, "f"].count == 2
    assert "SIGABRT" in tally.findings[CRASH, "f"].message


def test_no_call_begins_after_the_last_second() -> None:
    runner = Runner(
        lambda scenario: iter([call_of(lambda n: time.sleep(0.01))]),
        10,
        on_cuda=False,
        jobs=2,
        scenarios=50,
        limit=60.0,
    )
    begin = time.monotonic()
    assert runner.run(0, None, 1.0).calls > 10
    assert time.monotonic() - begin < 30


@pytest.mark.parametrize(
    ("message", "names", "named"),
    [
        ("q.shape is [1], must be [2]", ("q",), True),
        ("qo_indptr[3] is 2, must be 3", ("qo_indptr",), True),
        ("levels[2]: kv_lens[0] is -1, must be at least 0", ("kv_lens",), True),
        ("levels[1].table.page_size is 3, must be 4", ("table",), True),
        ("len(parents) is 3, must be 4", ("parents",), True),
        ("qo_indptr decreases; a page id is outside the cache", ("a page id",), True),
        ("qo_indptr is wrong", ("q",), False),
        ("expected another q", ("q",), False),
        ("kv.k is a tensor", ("k",), False),
    ],
)
def test_names(message: str, names: tuple[str, ...], named: bool) -> None:
    assert is_named(message, names) == named


def test_the_same_seed_makes_the_same_calls() -> None:
    def titles(seed: int) -> list[str]:
        return [call.title for scenario in range(15) for call in calls_of(seed, scenario, CPU)]

    assert titles(5) == titles(5) != titles(6)


@pytest.mark.slow
def test_all_kinds_of_calls_are_made() -> None:
    """Every public function, and every kind of error that a CPU has."""
    calls = [call for scenario in range(400) for call in calls_of(0, scenario, CPU)]
    assert len(calls) == 400 * CALLS
    ways = {call.wrong.how for call in calls if call.wrong}
    of_values = {"high bits", "decreases", "a page id outside", "a slot outside", "beyond K"}
    assert ways >= {
        *OF_TENSORS,
        *of_values,
        "bool",
        "out of range",
        "another type",
        "NaN",
        "missing",
        "unknown",
    }
    surfaces = {call.surface for call in calls} | {call.blamed for call in calls if call.wrong}
    results = {"Samples", "SpeculativeSamples"}
    # tests/variants and tests/variant_fuzz
    of_variants = {"Param", "Variant", "packbits", "segment_packbits"}
    # tests/kernels/test_append_qkv, test_append_mla
    of_projections = {"Rotary", "rotate_qk", "append_mla_kv"}
    of_states = {"merge_state", "merge_states"}  # tests/kernels/test_merge_states
    of_selections = {"SelectedTokens"}  # tests/kernels/test_sparse_mla
    of_fp4 = {"BlockScales"}  # values of k_scale and v_scale
    assert {
        name
        for name in attn_backend.__all__
        if not any(surface.split(".")[0] == name for surface in surfaces)
    } == results | of_variants | of_projections | of_states | of_selections | of_fp4
    assert surfaces >= {f"PageTable.{form}" for form in cases.TABLE_FORMS} | {
        f"KVCache.from_{form}" for form in cases.CACHE_FORMS
    }


def spoiled(call: Call) -> Call:
    """The call, with a slightly wrong result."""

    def function(**given: Any) -> Any:
        result = call.function(**given)
        if result is None:  # from append_kv
            first = given["kv"].v[0, 0, 0, :1]
            first.copy_(-1 - first.nan_to_num())
        elif isinstance(result, attn_backend.KVCache):  # with rows from append_kv or append_qkv
            last_byte = result.v.element_size() - 1  # of the first element
            result.v.detach().view(torch.uint8)[0, 0, 0, last_byte] ^= 0x44
        elif isinstance(result, torch.Tensor) and result.dtype == torch.int32:  # from selected_slots
            result.add_(1)
        elif isinstance(result, torch.Tensor):
            with torch.no_grad():  # 8-bit values by more than rounding may
                result.copy_(result.float().mul(1.5)) if result.element_size() == 1 else result.mul_(1.05)
        elif isinstance(result, attn_backend.Samples | attn_backend.SpeculativeSamples):
            result.token_ids.add_(1)
        return result

    return replace(call, function=function)


@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda scenario: scenario.__name__)
def test_wrong_results_are_noticed(scenario: Callable[..., Iterator[Call]]) -> None:
    if scenario.__name__ in ("constructors", "structures"):
        pytest.skip("they compute nothing")
    seen = 0
    for call in itertools.islice(scenario(numpy.random.default_rng(1), CPU), 30):
        given = call.arguments
        computed = next(
            (
                len(given[name])
                for name in ("q", "logits", "probs", "draft_probs")
                if isinstance(given.get(name), torch.Tensor)
            ),
            1,
        )
        if call.wrong is not None or call.variant or computed == 0 or judge(call).kind != RIGHT:
            continue
        outcome = judge(spoiled(call))
        seen += outcome.kind == WRONG_RESULT
        # A row that sees nothing is 0 and stays 0.
        all_are_seen = scenario.__name__ in ("appends", "projections", "sampling")
        assert outcome.kind == WRONG_RESULT or not all_are_seen, outcome
    assert seen >= 5


@pytest.mark.slow
def test_as_a_program() -> None:
    """With newly started processes; `make fuzz` forks its processes."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONSAFEPATH"}
    command = [
        sys.executable,
        "-m",
        "tests.fuzz",
        "--calls",
        "20",
        "--jobs",
        "1",
        "--seed",
        "0",
        "--fresh",
        "--scenario",
        "sampling",
    ]
    done = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.stdout.startswith("seed 0, 1 processes"), done.stderr
    assert "20 calls in" in done.stdout, done.stdout + done.stderr
    assert ": 0 findings" in done.stdout, done.stdout + done.stderr
    assert "Attention" not in done.stdout, done.stdout
