"""Do two backends generate the same tokens? Greedy answers to ShareGPT prompts, through the engine's server,
compared token by token.

    python -m integration.compare_tokens --engine vllm --backend attn_backend --reference stock \\
        --dtype float32 --num-prompts 64 --max-tokens 64
    python -m integration.compare_tokens --engine vllm --model smollm2-4-kv-heads --reference attn_backend \\
        --tensor-parallel-size 2 --reference-tensor-parallel-size 1 --side-by-side \\
        --server-args='--gpu-memory-utilization 0.2'
    python -m integration.compare_tokens --engine vllm --backend FLASHINFER-on-attn_backend \\
        --reference FLASHINFER --side-by-side --server-args='--gpu-memory-utilization 0.2'
    python -m integration.compare_tokens --engine vllm --model llama-3.1-8b-1-kv-head \\
        --reference attn_backend --tensor-parallel-size 2 \\
        --server-args='--decode-context-parallel-size 2' --reference-args=''

In float32 the answers must be equal. In 16 bits two correct backends round differently, and a near tie
between the two most probable tokens can fall either way. Every first difference of an answer is printed with
its logit gaps: by how much the reference prefers its token to the other one, and the reverse in the backend.
After the first difference the contexts differ, and nothing is compared.

Random weights (a shape of integration/models) differ for another number of GPUs, so both servers must have
the same --tensor-parallel-size. With --side-by-side both servers start at once, on the same GPUs. Use
--server-args to limit each to its share of the memory.

Exit status: 0 if all answers are equal or every first difference is a near tie (16 bits only), 1 otherwise.
"""

from __future__ import annotations

import argparse
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from attn_backend.cli.demo import split_arguments
from integration.command_line import Comparison, comparison_parser, exit_with
from integration.engines import ENGINES, Engine, Launch, Token
from integration.engines.base import STOCK
from integration.server import Server, ServerError, free_port, print_tail, running_server

ALTERNATIVES = 10


@dataclass(frozen=True)
class Difference:
    """The first place where two answers to one prompt differ.

    `reference_gap`: by how much the reference prefers its own token to the backend's (natural log).
    `backend_gap`: the same in the backend's view, for its own token. None: the other's token is not among the
    alternatives, so the gap is larger than theirs.
    """

    prompt: int
    position: int
    reference_token: int
    backend_token: int
    reference_gap: float | None
    backend_gap: float | None

    def is_near_tie(self, largest_gap: float) -> bool:
        # Gaps are differences of float32 log probabilities, slightly off the logits' own steps.
        return all(
            gap is not None and gap <= largest_gap + 1e-4 for gap in (self.reference_gap, self.backend_gap)
        )


@dataclass(frozen=True)
class Outcome:
    """Counts over all prompts.

    `largest_logprob_difference` covers tokens that both chose in the same context.
    """

    prompts: int
    equal: int
    tokens_compared: int
    largest_logprob_difference: float
    differences: list[Difference]


def generate_all(
    engine: Engine, url: str, prompts: list[list[int]], max_tokens: int, concurrency: int
) -> list[list[Token]]:
    """Answers in the order of the prompts, with `concurrency` requests in flight, so that they are
    batched."""
    with ThreadPoolExecutor(concurrency) as pool:
        return list(pool.map(lambda prompt: engine.generate(url, prompt, max_tokens, ALTERNATIVES), prompts))


def serve_and_generate(
    engine: Engine,
    launch: Launch,
    prompts: list[list[int]],
    max_tokens: int,
    log: Path,
    timeout_s: float = 900,
) -> list[list[Token]]:
    """Start the server, generate, stop it.

    As many requests are in flight as the server takes (`launch.max_num_seqs`).
    """
    with running_server(engine, launch, log, timeout_s) as url:
        begin = time.monotonic()
        answers = generate_all(engine, url, prompts, max_tokens, launch.max_num_seqs)
        print(
            f"{engine.name} with {launch.backend}: {len(answers)} answers in {time.monotonic() - begin:.0f} "
            f"s",
            flush=True,
        )
    return answers


def serve_side_by_side(
    servers: list[tuple[Engine, Launch, Path]],
    prompts: list[list[int]],
    max_tokens: int,
    timeout_s: float = 900,
) -> list[list[list[Token]]]:
    """Like serve_and_generate, for each (engine, launch, log): all start at once, and then answer one after
    another.
    """
    with ExitStack() as stack:
        started: list[Server] = []
        for engine, launch, log in servers:
            started.append(Server(engine, replace(launch, cache=log.with_suffix(".cache")), log))
            stack.callback(started[-1].stop)
        answers = []
        for server in started:
            try:
                server.wait_until_ready(timeout_s)
                answers.append(
                    generate_all(server.engine, server.url, prompts, max_tokens, server.launch.max_num_seqs)
                )
            except (ServerError, RuntimeError):
                print_tail(server.log)
                raise
        return answers


def compare(reference: list[list[Token]], backend: list[list[Token]]) -> Outcome:
    """Compare two lists of answers to the same prompts."""
    equal, compared, largest = 0, 0, 0.0
    differences = []
    for prompt, (expected, actual) in enumerate(zip(reference, backend, strict=True)):
        if len(expected) != len(actual):
            raise ValueError(
                f"prompt {prompt}: the reference generated {len(expected)} tokens, the backend {len(actual)}"
            )
        for position, (one, other) in enumerate(zip(expected, actual, strict=True)):
            compared += 1
            if one.token_id == other.token_id:
                largest = max(largest, abs(one.logprob - other.logprob))
                continue
            gaps = (_gap(one, other.token_id), _gap(other, one.token_id))
            differences.append(Difference(prompt, position, one.token_id, other.token_id, *gaps))
            break
        else:
            equal += 1
    return Outcome(len(reference), equal, compared, largest, differences)


def _gap(chosen: Token, other: int) -> float | None:
    return chosen.logprob - chosen.alternatives[other] if other in chosen.alternatives else None


def print_outcome(outcome: Outcome, largest_gap: float) -> None:
    print(
        f"\n{outcome.equal} of {outcome.prompts} answers are equal; {outcome.tokens_compared} tokens "
        f"compared; ",
        end="",
    )
    print(f"largest difference of a chosen token's log probability {outcome.largest_logprob_difference:.2e}")
    for difference in outcome.differences:
        gaps = [
            "> alternatives" if gap is None else f"{gap:.4f}"
            for gap in (difference.reference_gap, difference.backend_gap)
        ]
        kind = "near tie" if difference.is_near_tie(largest_gap) else "NOT A NEAR TIE"
        where = (
            f"prompt {difference.prompt}, token {difference.position}: reference "
            f"{difference.reference_token}, backend {difference.backend_token}"
        )
        print(f"  {where}; logit gap {gaps[0]} in the reference, {gaps[1]} in the backend: {kind}")


def parse_arguments() -> argparse.Namespace:
    parser = comparison_parser(__doc__, "tokens", num_prompts=64, longest_prompt=1024)
    parser.add_argument(
        "--reference",
        default=STOCK,
        help="the backend to compare with; default: stock, which the engine picks by itself",
    )
    parser.add_argument("--reference-engine", choices=sorted(ENGINES), help="default: the same engine")
    parser.add_argument(
        "--tensor-parallel-size", type=int, default=1, help="GPUs that share the model; default: %(default)s"
    )
    parser.add_argument(
        "--reference-tensor-parallel-size", type=int, help="of the reference; default: the same"
    )
    parser.add_argument(
        "--reference-args",
        type=split_arguments,
        help="server arguments of the reference, in the place of --server-args; default: the same",
    )
    parser.add_argument("--side-by-side", action="store_true", help="start both servers at once, see above")
    near_tie = (
        "largest logit gap of a near tie in 16 bits (bfloat16 logits of 16 to 32 are 0.125 apart); "
        "default: %(default)s"
    )
    parser.add_argument("--near-tie", type=float, default=0.25, help=near_tie)
    return parser.parse_args()


def launches(given: argparse.Namespace, launch: Launch) -> dict[str, tuple[Engine, Launch]]:
    """The servers of the reference and of the backend. launch: their common settings.

    Raises:
        ValueError: a model without weights, for different numbers of GPUs.
    """
    ranks = given.tensor_parallel_size
    reference_ranks = given.reference_tensor_parallel_size or ranks
    if launch.model.random_weights and reference_ranks != ranks:
        raise ValueError(
            f"reference-tensor-parallel-size: {reference_ranks}, must be {ranks} for {launch.model.name}, "
            f"whose weights are random"
        )
    arguments = given.server_arguments if given.reference_args is None else given.reference_args
    reference = replace(
        launch, backend=given.reference, tensor_parallel_size=reference_ranks, extra_arguments=arguments
    )
    backend = replace(launch, backend=given.backend, tensor_parallel_size=ranks)
    return {
        "reference": (ENGINES[given.reference_engine or given.engine], reference),
        "backend": (ENGINES[given.engine], backend),
    }


def run(given: argparse.Namespace) -> bool:
    setup = Comparison.make(given, "tokens")
    servers = [
        (
            engine,
            replace(launch, port=free_port()),
            setup.results / f"server-{role}-{engine.name}-{launch.backend}.log",
        )
        for role, (engine, launch) in launches(given, setup.launch).items()
    ]
    if given.side_by_side:
        answers = serve_side_by_side(servers, setup.prompts, given.max_tokens, given.start_timeout_s)
    else:
        answers = [
            serve_and_generate(engine, launch, setup.prompts, given.max_tokens, log, given.start_timeout_s)
            for engine, launch, log in servers
        ]
    outcome = compare(answers[0], answers[1])
    print_outcome(outcome, given.near_tie)
    is_exact = setup.launch.dtype == "float32"
    same = not outcome.differences or (
        not is_exact and all(difference.is_near_tie(given.near_tie) for difference in outcome.differences)
    )
    tokens = [[[token.token_id for token in answer] for answer in role] for role in answers]
    setup.write({"same": same, **asdict(outcome), "reference_tokens": tokens[0], "backend_tokens": tokens[1]})
    return same


def main() -> None:
    exit_with(lambda: run(parse_arguments()))


if __name__ == "__main__":
    main()
