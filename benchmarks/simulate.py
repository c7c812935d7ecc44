"""The value of shared prefixes in serving: replays traces through continuous batching, and plans some of
their steps with and without cascade. No GPU.

    # the Mooncake trace, which is in the repository
    python -m benchmarks.simulate --out results
    # ShareGPT's conversations: downloads them when needed, and prints their FILE
    python -m integration.sharegpt
    python -m benchmarks.simulate --sharegpt FILE --out results

Plans are the host planner's for a GPU: 132 CTAs (one for each SM of an H100), 32/8 heads, head_dim 128, page
size 16.
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from attn_backend import Attention, BSRView
from attn_backend.cli.batches import TRACE_BLOCK, TraceRequest, read_trace
from attn_backend.cli.plan import check_matplotlib
from attn_backend.cli.planned import ScheduleCosts
from benchmarks.continuous_batching import Engine, Request
from benchmarks.report import table
from benchmarks.schedules import taken_prefixes

if TYPE_CHECKING:
    from matplotlib.figure import Figure

PAGE_SIZE = 16
NUM_QO_HEADS, NUM_KV_HEADS, HEAD_DIM = 32, 8, 128
NUM_CTAS = 132
TOKEN_BUDGET = 8192  # per step
MAX_CONVERSATION = 8192  # tokens; longer conversations are cut
# of ShareGPT under SmolLM2's tokenizer: gives the means and quantiles of prompts and answers within about 7 %
CHARACTERS_PER_TOKEN = 4.2
TRACE = Path(__file__).parent / "traces" / "mooncake_synthetic.jsonl"


def page_key(request: TraceRequest, page: int) -> tuple[int, int] | None:
    """A key that is equal for two requests that share this page; None if the input does not fill the page."""
    if (page + 1) * PAGE_SIZE > request.input_length:
        return None
    pages = TRACE_BLOCK // PAGE_SIZE
    return request.hash_ids[page // pages], page % pages


def mooncake(trace: list[TraceRequest]) -> list[Request]:
    """The trace's requests in order of arrival. Arrival times do not matter, since the queue is never
    empty.
    """
    return [Request(max(r.input_length, 1), max(r.output_length, 1), partial(page_key, r)) for r in trace]


def read_sharegpt(path: Path, conversations: int) -> list[list[tuple[int, int]]]:
    """(prompt, answer) tokens of the turns of `conversations` random conversations. The first of each two
    messages is the prompt, regardless of its author.

    Raises:
        ValueError: the file is not in ShareGPT's form.
    """
    try:
        found = [
            [len(turn["value"]) for turn in conversation["conversations"]]
            for conversation in json.loads(path.read_text())
        ]
    except (ValueError, KeyError, TypeError) as error:
        must_be = 'a JSON list of objects {"conversations": [{"value": TEXT}, ...]}'
        raise ValueError(
            f"{path} cannot be read ({type(error).__name__}: {error}), must be {must_be}"
        ) from None
    random.Random(0).shuffle(found)
    tokens = [
        [max(1, round(length / CHARACTERS_PER_TOKEN)) for length in lengths]
        for lengths in found[:conversations]
    ]
    pairs = [list(zip(lengths[::2], lengths[1::2], strict=False)) for lengths in tokens]
    if not any(pairs):
        raise ValueError(f"{path} holds no prompt with an answer")
    return pairs


def sharegpt(
    conversations: list[list[tuple[int, int]]], system_tokens: int = 0, samples: int = 1
) -> list[Request]:
    """The first turns; each is followed by the next, whose input is the conversation so far.

    Args:
        conversations: (prompt, answer) tokens of each turn.
        system_tokens: length of a system prompt that all conversations share.
        samples: answers to each prompt; the conversation continues from the first.
    """
    first_turns: list[Request] = []
    for number, turns in enumerate(conversations):
        queue, history = first_turns, system_tokens
        for prompt, answer in turns:
            if history + prompt + answer > MAX_CONVERSATION:
                break
            history += prompt
            branches = [
                Request(
                    history, answer, _conversation_key(number, system_tokens, history if sample else None)
                )
                for sample in range(samples)
            ]
            queue += branches
            queue, history = branches[0].follows, history + answer
    return first_turns


def _conversation_key(
    number: int, system_tokens: int, end: int | None
) -> Callable[[int], tuple[int, int] | None]:
    """`end`: only this sample has the tokens after it."""

    def key(page: int) -> tuple[int, int] | None:
        after = (page + 1) * PAGE_SIZE
        return None if end is not None and after > end else (-1 if after <= system_tokens else number, page)

    return key


@dataclass
class Measured:
    """The planned steps of one replay.

    Attributes:
        step, requests, kv_lens: number of the step, its requests, tokens of KV that they see.
        tokens, busiest, balance: with cascade off [0] and on [1]: tokens read for each KV head, cost of the
            busiest CTA, and that cost over the mean of all CTAs.
        taken: prefixes that became row groups.
    """

    found: float = 0.0
    step: list[int] = field(default_factory=list)
    requests: list[int] = field(default_factory=list)
    taken: list[int] = field(default_factory=list)
    tokens: tuple[list[int], list[int]] = field(default_factory=lambda: ([], []))
    busiest: tuple[list[int], list[int]] = field(default_factory=lambda: ([], []))
    balance: tuple[list[float], list[float]] = field(default_factory=lambda: ([], []))

    def add(self, step: int, view: BSRView, planners: list[Attention]) -> None:
        self.step.append(step)
        self.requests.append(view.batch_size)
        for i, planner in enumerate(planners):
            planner.plan(view)
            schedule = planner.schedule()
            costs = ScheduleCosts.of(schedule, NUM_KV_HEADS)
            self.tokens[i].append(costs.kv_tokens)
            self.busiest[i].append(int(costs.ctas.max()))
            self.balance[i].append(costs.balance)
        self.taken.append(taken_prefixes(schedule))

    @property
    def removed(self) -> float:
        """Part of the KV traffic that cascade removes."""
        return 1 - sum(self.tokens[1]) / sum(self.tokens[0])


def replay(requests: list[Request], batch_limit: int, cache_tokens: int, every: int) -> Measured:
    """Runs requests through the engine until none waits, so that the batch is as full as possible, and plans
    one step of `every`.
    """
    planners = [
        Attention(
            NUM_QO_HEADS,
            NUM_KV_HEADS,
            HEAD_DIM,
            device="cpu",
            max_rows=TOKEN_BUDGET + batch_limit,
            max_batch=batch_limit,
            num_ctas=NUM_CTAS,
            cascade=cascade,
            kernel="hopper",
        )
        for cascade in (False, True)
    ]
    engine, measured = Engine(requests, batch_limit, cache_tokens, PAGE_SIZE, TOKEN_BUDGET), Measured()
    while engine.waiting:
        step = engine.begin_step()
        if step and engine.steps % every == 0:
            measured.add(engine.steps, engine.view(step), planners)
        engine.end_step()
    measured.found = engine.found_tokens / engine.input_tokens
    return measured


def row(name: str, batch_limit: int, m: Measured) -> dict[str, str]:
    """One line of the table, by column."""
    balances = [f"{np.mean(balance):.3f} / {np.percentile(balance, 99):.3f}" for balance in m.balance]
    return {
        "workload": name,
        "batch limit": str(batch_limit),
        "steps planned": str(len(m.step)),
        "requests in a step": f"{np.mean(m.requests):.0f}",
        "prompt tokens found in the cache": f"{m.found:.0%}",
        "steps with cascade": f"{sum(count > 0 for count in m.taken) / len(m.taken):.0%}",
        "KV traffic removed": f"{m.removed:.1%}",
        "cost of the busiest CTA removed": f"{1 - sum(m.busiest[1]) / sum(m.busiest[0]):.1%}",
        "balance without, mean / p99": balances[0],
        "with": balances[1],
    }


def draw(results: dict[tuple[str, int], Measured]) -> Figure:
    """KV traffic of every replay over its steps: without cascade in gray, with it in color."""
    from matplotlib.ticker import EngFormatter

    from attn_backend.cli.picture import FAINT, new_figure

    names, limits = (
        list(dict.fromkeys(name for name, _ in results)),
        list(dict.fromkeys(limit for _, limit in results)),
    )
    figure = new_figure(60 + 370 * len(limits), 70 + 190 * len(names))
    figure.set_layout_engine("constrained")
    figure.suptitle("KV tokens that a step reads for each KV head, over the steps of a replay", fontsize=11)
    panels = figure.subplots(len(names), len(limits), squeeze=False)
    for (name, limit), m in results.items():
        axes = panels[names.index(name), limits.index(limit)]
        for tokens, color, label in zip(
            m.tokens, (FAINT, "#e6550d"), ("without cascade", "with cascade"), strict=True
        ):
            axes.plot(*zip(*_thinned(m.step, tokens, 60), strict=True), color=color, linewidth=1, label=label)
        axes.set_title(f"{name}\nbatch limit {limit}: {m.removed:.1%} removed", loc="left", fontsize=9)
        axes.set_xlim(left=0)
        axes.set_ylim(bottom=0)
        axes.yaxis.set_major_formatter(EngFormatter(sep=""))
        axes.locator_params(nbins=4)
        axes.tick_params(labelsize=8.5)
        axes.spines[["top", "right"]].set_visible(False)
    figure.legend(
        *panels[0, 0].get_legend_handles_labels(),
        loc="outside lower center",
        ncols=2,
        frameon=False,
        fontsize=10,
    )
    return figure


def _thinned(steps: list[int], values: list[int], most: int) -> Iterator[tuple[float, float]]:
    """Means of neighboring points: at most `most` of them."""
    for part in np.array_split(np.array([steps, values], float), min(most, len(steps)), axis=1):
        yield part[0].mean(), part[1].mean()


def at_least_1(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"is {number}, must be at least 1")
    return number


def new_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--sharegpt",
        type=Path,
        metavar="FILE",
        help="conversations in ShareGPT's JSON form (see above); default: only the Mooncake trace",
    )
    parser.add_argument("--conversations", type=at_least_1, default=1000, help="taken from it (%(default)s)")
    parser.add_argument(
        "--batch-limits",
        type=at_least_1,
        nargs="+",
        default=[16, 64, 256],
        help="most running requests; a line of the table each (16 64 256)",
    )
    parser.add_argument(
        "--cache-tokens",
        type=at_least_1,
        default=1 << 20,
        help="tokens in the KV cache (%(default)s: 128 GB of Llama 3.1 8B in bf16)",
    )
    parser.add_argument(
        "--request-steps",
        type=at_least_1,
        default=1600,
        help="plan about one step in REQUEST_STEPS / batch limit (%(default)s)",
    )
    parser.add_argument(
        "--out", type=Path, metavar="FOLDER", help="for simulate.md, simulate.svg and simulate.png"
    )
    return parser


def make_workloads(arguments: argparse.Namespace) -> dict[str, Callable[[], list[Request]]]:
    """Functions that make the requests, by name, since a replay consumes them."""
    trace = read_trace(TRACE)
    workloads: dict[str, Callable[[], list[Request]]] = {"Mooncake synthetic": lambda: mooncake(trace)}
    if arguments.sharegpt:
        conversations = read_sharegpt(arguments.sharegpt, arguments.conversations)
        workloads["ShareGPT, turns"] = lambda: sharegpt(conversations)
        workloads["ShareGPT, system prompt of 2048"] = lambda: sharegpt(conversations, system_tokens=2048)
        workloads["ShareGPT, 4 samples of each prompt"] = lambda: sharegpt(conversations, samples=4)
    return workloads


def run(arguments: argparse.Namespace) -> None:
    if arguments.out:
        check_matplotlib("--out")
        arguments.out.mkdir(parents=True, exist_ok=True)
    results: dict[tuple[str, int], Measured] = {}
    for name, make in make_workloads(arguments).items():
        for limit in arguments.batch_limits:
            results[name, limit] = replay(
                make(), limit, arguments.cache_tokens, max(1, arguments.request_steps // limit)
            )
            print(row(name, limit, results[name, limit]), flush=True)
    rows = [row(name, limit, measured) for (name, limit), measured in results.items()]
    text = table(list(rows[0]), [list(cells.values()) for cells in rows])
    print(text)
    if arguments.out:
        (arguments.out / "simulate.md").write_text(text + "\n")
        from attn_backend.cli.picture import write

        figure = draw(results)
        for suffix in ("svg", "png"):
            write(figure, arguments.out / f"simulate.{suffix}")


def main(argv: list[str] | None = None) -> None:
    parser = new_parser()
    try:
        run(parser.parse_args(argv))
    except (OSError, ValueError) as error:
        parser.error(str(error))


if __name__ == "__main__":
    main()
