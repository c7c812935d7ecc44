r"""Are drafts verified as with the engine's own backend, and do they change no answer? ShareGPT prompts, to
one server after another.

    CONFIG='{"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_max": 4}'
    python -m integration.compare_speculation --engine vllm --sampling temperature=0.8,top_p=0.95 \
        --server-args "--speculative-config '$CONFIG'"
    python -m integration.compare_speculation --engine sglang --reference triton --model llama-3.1-8b \
        --server-args "--speculative-algorithm NGRAM --speculative-num-draft-tokens 8"

Options of --server-args that begin with --spec control speculation. There are three servers:

- `backend` and `reference` run the backends of those names, with all options.
- `plain` runs the first backend again, without speculation.

Pass --reference none if the engine's own backend verifies no drafts (SGLang's on a CPU).

The program checks:

- Greedy tokens, one prompt at a time and then all at once: the three servers give the same tokens. In 16 bits
  two answers may differ after a near tie of the two most probable tokens (see compare_tokens).
- Greedy accept lengths, one prompt at a time. The accept length is the number of tokens that an answer gains
  with each verified draft. `backend` and `reference` have equal accept lengths for equal answers. In 16 bits
  near ties of the draft model may change single lengths. The mean difference must then be 0 (sign-flip test,
  p > 0.001).
- Samples, with --sampling. Each of the first --sampled-prompts prompts gets --answers answers. Every server
  uses different seeds. For each prompt and position, the tokens of `backend` must have the same distribution
  as the tokens of `reference` and of `plain`. The test is a two-sample chi-square. It pools cells of fewer
  than 10 tokens and wants p > 0.001 divided by the number of tests.
- Sampled accept lengths. A round asks each of these prompts once, at the same time. The mean accept length of
  the rounds must be equal for `backend` and `reference` (permutation test, p > 0.001).

Exit status: 0 when all of this holds, 1 otherwise.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from statistics import fmean
from typing import Any

from integration.command_line import Comparison, comparison_parser, exit_with, sampling_argument
from integration.compare_tokens import ALTERNATIVES, Outcome, compare, generate_all, print_outcome
from integration.engines import ENGINES, Drafts, Engine, Launch, Sampling, Token
from integration.engines.base import STOCK
from integration.server import free_port, running_server
from integration.two_samples import chi_square, same_mean, zero_mean

NO_REFERENCE = "none"
SMALLEST_P = 0.001
SEEDS_OF_A_SERVER = 1_000_000
DRAFTED_TOKENS = 64  # at most: room after the longest answer for its last drafts


@dataclass(frozen=True)
class Sampled:
    """`answers`: of each round, in the order of the prompts. `rounds`: the outcome of its drafts."""

    answers: list[list[list[int]]]
    rounds: list[Drafts]


@dataclass(frozen=True)
class Answers:
    """The answers of one server. `drafts` belong to the answers one at a time."""

    one_at_a_time: list[list[Token]]
    at_once: list[list[Token]]
    drafts: list[Drafts]
    sampled: Sampled


@dataclass(frozen=True)
class Questions:
    """The requests to every server. sampling: None: only greedy answers."""

    prompts: list[list[int]]
    max_tokens: int
    sampling: Sampling | None
    sampled_prompts: int
    sampled_tokens: int
    rounds: int

    def ask(self, engine: Engine, url: str, concurrency: int, first_seed: int) -> Answers:
        answers, drafts = [], []
        for prompt in self.prompts:
            before = engine.drafts(url)
            answers.append(engine.generate(url, prompt, self.max_tokens, ALTERNATIVES))
            drafts.append(engine.drafts(url) - before)
        at_once = generate_all(engine, url, self.prompts, self.max_tokens, concurrency)
        return Answers(answers, at_once, drafts, self._ask_sampled(engine, url, first_seed))

    def _ask_sampled(self, engine: Engine, url: str, first_seed: int) -> Sampled:
        sampled = Sampled([], [])
        sampling = self.sampling
        if sampling is None:
            return sampled
        prompts = self.prompts[: self.sampled_prompts]
        with ThreadPoolExecutor(len(prompts)) as pool:
            for round_number in range(self.rounds):
                seeds = range(
                    first_seed + round_number * len(prompts), first_seed + (round_number + 1) * len(prompts)
                )
                before = engine.drafts(url)
                asked = pool.map(
                    lambda prompt, seed: engine.sample(
                        url, prompt, self.sampled_tokens, sampling, seed, logprobs=False
                    ),
                    prompts,
                    seeds,
                )
                sampled.answers.append(list(asked))
                sampled.rounds.append(engine.drafts(url) - before)
        return sampled


def without_speculation(arguments: Sequence[str]) -> list[str]:
    """A server's arguments without the options that begin with --spec, and their values."""
    kept, is_dropped = [], False
    for argument in arguments:
        if argument.startswith("-"):
            is_dropped = argument.startswith("--spec")
        if not is_dropped:
            kept.append(argument)
    return kept


@dataclass
class Verdict:
    """The checks, in sentences, and whether each holds."""

    checks: list[tuple[bool, str]] = field(default_factory=list)

    def add(self, holds: bool, says: str) -> None:
        self.checks.append((holds, says))
        print(f"{'holds' if holds else 'DOES NOT HOLD'}: {says}", flush=True)

    @property
    def holds(self) -> bool:
        return bool(self.checks) and all(holds for holds, _ in self.checks)


def check_tokens(
    verdict: Verdict,
    name: str,
    expected: list[list[Token]],
    actual: list[list[Token]],
    near_tie: float | None,
) -> Outcome:
    """near_tie: the largest gap of a near tie; None: the tokens must be equal."""
    outcome = compare(expected, actual)
    if outcome.differences:
        print_outcome(outcome, near_tie or 0.0)
    holds = not outcome.differences or (
        near_tie is not None and all(difference.is_near_tie(near_tie) for difference in outcome.differences)
    )
    parted = (
        ""
        if not outcome.differences
        else ", the others part at near ties"
        if holds
        else ", others part where there is no near tie"
    )
    verdict.add(holds, f"{name}: {outcome.equal} of {outcome.prompts} greedy answers are equal{parted}")
    return outcome


def check_accept_lengths(verdict: Verdict, reference: Answers, backend: Answers, is_exact: bool) -> None:
    """For greedy answers that are equal."""
    same = [
        _ids(one) == _ids(other)
        for one, other in zip(reference.one_at_a_time, backend.one_at_a_time, strict=True)
    ]
    pairs = [
        (one.accept_length, other.accept_length)
        for one, other, is_same in zip(reference.drafts, backend.drafts, same, strict=True)
        if is_same
    ]
    if not pairs:
        verdict.add(False, "accept lengths: no answer has the tokens of the reference's")
        return
    means = (
        f"mean {fmean(other for _, other in pairs):.3f}, the reference's {fmean(one for one, _ in pairs):.3f}"
    )
    equal = sum(one == other for one, other in pairs)
    says = f"greedy accept lengths: {equal} of {len(pairs)} are equal; {means}"
    if is_exact or equal == len(pairs):
        verdict.add(equal == len(pairs), says)
    else:
        p = zero_mean([other - one for one, other in pairs])
        verdict.add(p > SMALLEST_P, f"{says}; p = {p:.4f} that the difference is chance")


def check_sampled_lengths(verdict: Verdict, reference: Sampled, backend: Sampled) -> None:
    lengths = [[of.accept_length for of in sampled.rounds] for sampled in (reference, backend)]
    p = same_mean(*lengths)
    says = (
        f"sampled accept lengths: mean of {len(lengths[1])} rounds {fmean(lengths[1]):.3f}, the "
        f"reference's {fmean(lengths[0]):.3f}; p = {p:.4f}"
    )
    verdict.add(p > SMALLEST_P and any(of.passes for of in backend.rounds), says)


def smallest_p(expected: Sampled, actual: Sampled) -> tuple[float, int]:
    """The smallest p of the chi-square tests for each prompt and position, and their number. NaN and 0 if no
    token is frequent enough for a test.
    """
    drawn = [
        [[answers[prompt][position] for answers in sampled.answers] for sampled in (expected, actual)]
        for prompt in range(len(actual.answers[0]))
        for position in range(len(actual.answers[0][prompt]))
    ]
    tests = [p for p in (chi_square(*pair) for pair in drawn) if p is not None]
    return min(tests, default=float("nan")), len(tests)


def check_distribution(verdict: Verdict, name: str, expected: Sampled, actual: Sampled) -> None:
    p, tests = smallest_p(expected, actual)
    if tests == 0:
        verdict.add(
            False,
            f"{name}: sampled answers have no two tokens that are frequent enough for a test; ask for more "
            f"--answers",
        )
    else:
        verdict.add(
            p > SMALLEST_P / tests,
            f"{name}: the smallest p of {tests} tests of sampled tokens is {p:.1e}, the limit "
            f"{SMALLEST_P / tests:.1e}",
        )


def judge(answers: dict[str, Answers], near_tie: float | None) -> tuple[Verdict, dict[str, Outcome]]:
    """answers: of the servers `backend`, `plain` and, if there is one, `reference`. near_tie: see
    check_tokens(); None: float32.
    """
    verdict, outcomes = Verdict(), {}
    backend, reference = answers["backend"], answers.get("reference")
    others = {name: of for name, of in answers.items() if name != "backend"}
    for name, other in others.items():
        for how in ("one_at_a_time", "at_once"):
            beside = f"beside {name}, {how.replace('_', ' ')}"
            outcomes[f"{name}_{how}"] = check_tokens(
                verdict, beside, getattr(other, how), getattr(backend, how), near_tie
            )
    total = Drafts(sum(of.passes for of in backend.drafts), sum(of.gained for of in backend.drafts))
    verdict.add(
        total.passes > 0,
        f"drafts were verified: {total.passes} passes, in which answers gained {total.accept_length:.3f} "
        f"tokens each",
    )
    if reference is not None:
        check_accept_lengths(verdict, reference, backend, near_tie is None)
    if backend.sampled.answers:
        for name, other in others.items():
            check_distribution(verdict, f"beside {name}", other.sampled, backend.sampled)
    if backend.sampled.answers and reference is not None:
        check_sampled_lengths(verdict, reference.sampled, backend.sampled)
        p, tests = smallest_p(answers["plain"].sampled, reference.sampled)
        print(
            f"for comparison, reference and plain: smallest p of {tests} tests {p:.1e}; if it is small, "
            f"the engine itself changes what is sampled"
        )
    return verdict, outcomes


def parse_arguments() -> argparse.Namespace:
    parser = comparison_parser(__doc__, "speculation", num_prompts=16, longest_prompt=512)
    parser.add_argument(
        "--reference",
        default=STOCK,
        help="the backend to compare with, or none; default: stock, which the engine picks by itself",
    )
    parser.add_argument(
        "--near-tie",
        type=float,
        default=0.25,
        help="largest logit gap of a near tie in 16 bits (bfloat16 logits of 16 to 32 are 0.125 apart)",
    )
    parser.add_argument(
        "--sampling", type=sampling_argument, help='sampled answers, too, as in "temperature=0.8,top_p=0.95"'
    )
    parser.add_argument("--sampled-prompts", type=int, default=4, help="default: %(default)s")
    parser.add_argument(
        "--sampled-tokens", type=int, default=8, help="of each sampled answer; default: %(default)s"
    )
    parser.add_argument(
        "--answers", type=int, default=200, help="to each of these prompts; default: %(default)s"
    )
    return parser.parse_args()


def run(given: argparse.Namespace) -> bool:
    engine = ENGINES[given.engine]
    plain_arguments = without_speculation(given.server_arguments)
    if plain_arguments == given.server_arguments:
        raise ValueError(
            f"server-args: {given.server_arguments}, must have --speculative-config (vLLM) or "
            f"--speculative-algorithm (SGLang)"
        )
    if given.sampling is not None and given.engine == "sglang" and given.device == "cpu":
        raise ValueError("sampling: on a CPU SGLang verifies every draft greedily; leave it out")
    setup = Comparison.make(given, "speculation")
    questions = Questions(
        setup.prompts,
        given.max_tokens,
        given.sampling,
        given.sampled_prompts,
        given.sampled_tokens,
        given.answers,
    )
    launch = replace(setup.launch, max_model_len=setup.launch.max_model_len + DRAFTED_TOKENS)
    drafting, plain = (
        replace(launch, extra_arguments=[*engine.drafts_settings(), *options])
        for options in (given.server_arguments, plain_arguments)
    )
    launches = {"reference": replace(drafting, backend=given.reference), "backend": drafting, "plain": plain}
    if given.reference == NO_REFERENCE:
        del launches["reference"]
    answers = {}
    for number, (role, launch) in enumerate(launches.items()):
        answers[role] = _serve(
            engine,
            replace(launch, port=free_port()),
            role,
            questions,
            number * SEEDS_OF_A_SERVER,
            setup.results,
            given.start_timeout_s,
        )
    verdict, outcomes = judge(answers, None if setup.launch.dtype == "float32" else given.near_tie)
    setup.write(
        {
            "holds": verdict.holds,
            "checks": verdict.checks,
            "greedy": {name: asdict(outcome) for name, outcome in outcomes.items()},
        }
        | _report(answers)
    )
    return verdict.holds


def _serve(
    engine: Engine,
    launch: Launch,
    role: str,
    questions: Questions,
    first_seed: int,
    results: Path,
    timeout_s: float,
) -> Answers:
    with running_server(engine, launch, results / f"server-{role}-{launch.backend}.log", timeout_s) as url:
        begin = time.monotonic()
        answers = questions.ask(engine, url, launch.max_num_seqs, first_seed)
        print(
            f"{role} ({engine.name} with {launch.backend}): asked for {time.monotonic() - begin:.0f} s",
            flush=True,
        )
    return answers


def _report(answers: dict[str, Answers]) -> dict[str, Any]:
    return {
        role: {
            "tokens": [_ids(answer) for answer in of.one_at_a_time],
            "accept_lengths": [drafts.accept_length for drafts in of.drafts],
            "sampled_accept_lengths": [drafts.accept_length for drafts in of.sampled.rounds],
            "sampled_tokens": of.sampled.answers,
        }
        for role, of in answers.items()
    }


def _ids(answer: list[Token]) -> list[int]:
    return [token.token_id for token in answer]


def main() -> None:
    exit_with(lambda: run(parse_arguments()))


if __name__ == "__main__":
    main()
