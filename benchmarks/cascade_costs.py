"""Fits the constants of the cascade's cost model (csrc/planner/forest.h): when does it pay to read a shared
prefix once, as a separate row group?

Decode batches have `groups` groups of `requests` requests. They share `prefix` tokens in each group, and each
has `suffix` tokens in addition. They run with hand-made levels (on) and as one view of all requests (off). In
the schedule's cost units, over all row groups and KV heads, the model takes the levels where

    saved > state_cost / 64 * states + cascade_cost

`saved`: the work of the one view minus the work of the levels, from their schedules, as if requests' own
pairs cost the same in both. For a prefix of n KV tiles: n * the sum of the requests' kv_tile_cost, minus the
costs of the groups' row tiles (n * the sum of kv_tile_cost, plus the sum of pair_cost). `states`: two for
each row and KV head, one for each level.

Least squares: on - off [µs] = fixed - unit * (saved - state_cost / 64 * states) / num_ctas, each batch
weighted by 1 / off, and cascade_cost = fixed / unit * num_ctas. Regret: time lost compared with the better of
on and off, as the mean over batches of chosen / better - 1. The fit takes the state_cost and cascade_cost
with the least regret from a grid.

python -m benchmarks.cascade_costs [--requests N ...] [--prefixes N ...] [--suffixes N ...] [--groups N ...]
[--heads QO KV]
    [--repeats N] [--json FILE] [--markdown FILE]
"""

from __future__ import annotations

import argparse
import itertools
import math
from pathlib import Path
from typing import Any

import numpy as np

from attn_backend import Attention
from benchmarks.batches import SharedBatch, make_cache, prepare
from benchmarks.cases import SharedCase
from benchmarks.report import number, save, table
from benchmarks.schedules import taken_prefixes, total_cost
from benchmarks.timing import Timer, start

MAX_BATCH = 256
STATE_COSTS = np.arange(0, 1025, 16)  # grid of the regret fit, 64ths of a cost unit
CASCADE_COSTS = np.arange(0, 20001, 250)  # grid of the regret fit, cost units


class Bench:
    """The Attention objects and the cache that all batches use."""

    def __init__(self, largest: SharedCase, timer: Timer) -> None:
        case = largest.case
        room: dict[str, Any] = {"max_rows": MAX_BATCH, "max_batch": MAX_BATCH}
        heads = (case.num_qo_heads, case.num_kv_heads, case.head_dim)
        self.timer = timer
        self.num_qo_heads, self.num_kv_heads = case.num_qo_heads, case.num_kv_heads
        self.cache = make_cache(case, largest.pages)
        self.on = Attention(*heads, **room, max_levels=2, cascade=False)
        self.off = Attention(*heads, **room, cascade=False)
        self.automatic = Attention(*heads, **room, cascade=True)

    def measure(self, groups: int, requests: int, prefix: int, suffix: int) -> dict[str, Any]:
        """One batch; times in µs, costs in units."""
        shared = SharedCase(
            "", ((groups, prefix), (groups * requests, suffix)), self.num_qo_heads, self.num_kv_heads
        )
        batch = SharedBatch.make(shared, self.cache)
        prepared = {
            "on": prepare(self.on, batch.grouped, batch.levels),
            "off": prepare(self.off, batch.grouped, batch.grouped.view),
            "automatic": prepare(self.automatic, batch.grouped, batch.grouped.view),
        }
        times = dict(zip(prepared, self.timer.together([of.run for of in prepared.values()]), strict=True))
        on, off = self.on.schedule(), self.off.schedule()
        # The model ignores the change in cost of requests' own pairs when they leave states.
        own = (
            sum(
                off.pair_cost[kind] - on.pair_cost[kind + len(on.pair_cost) // 2]
                for kind in off.cost_kinds().tolist()
            )
            * self.num_kv_heads
        )
        return {
            "groups": groups,
            "requests": requests,
            "prefix": prefix,
            "suffix": suffix,
            **times,
            "saved": total_cost(off, self.num_kv_heads) - total_cost(on, self.num_kv_heads) - own,
            "states": 2 * groups * requests * self.num_kv_heads,
            "num_ctas": on.num_ctas,
            "prefixes taken": taken_prefixes(self.automatic.schedule()),
        }


def column(lines: list[dict[str, Any]], name: str) -> np.ndarray:
    """float64 [lines]."""
    return np.array([line[name] for line in lines], dtype=np.float64)


def takes(lines: list[dict[str, Any]], state_cost: float, cascade_cost: float) -> np.ndarray:
    """Whether the model takes the levels: bool [lines]."""
    return column(lines, "saved") > state_cost / 64 * column(lines, "states") + cascade_cost


def regrets(lines: list[dict[str, Any]], taken: np.ndarray) -> np.ndarray:
    """chosen / better - 1: float64 [lines]."""
    on, off = column(lines, "on"), column(lines, "off")
    return np.where(taken, on, off) / np.minimum(on, off) - 1


def least_squares(lines: list[dict[str, Any]]) -> dict[str, float]:
    """fixed [µs], unit [µs per cost unit of a CTA], the two constants, and the median of |error| / off."""
    on, off, ctas = column(lines, "on"), column(lines, "off"), column(lines, "num_ctas")
    features = np.stack(
        [np.ones(len(lines)), -column(lines, "saved") / ctas, column(lines, "states") / 64 / ctas], 1
    )
    weight = 1 / off
    solution, *_ = np.linalg.lstsq(features * weight[:, None], (on - off) * weight, rcond=None)
    residual = np.abs(features @ solution - (on - off)) / off
    fixed, unit, state = (float(value) for value in solution)
    usable = unit > 0  # otherwise less work took longer, and the constants mean nothing
    return {
        "fixed": fixed,
        "unit": unit,
        "state_cost": state / unit if usable else math.nan,
        "cascade_cost": fixed / unit * float(ctas[0]) if usable else math.nan,
        "residual": float(np.median(residual)),
    }


def regret_fit(lines: list[dict[str, Any]]) -> dict[str, Any]:
    """The constants with the least mean regret (the middle one of several equals), their largest regret, and
    the ranges of constants whose mean is within 0.1 % of it.
    """
    means = np.array(
        [
            [regrets(lines, takes(lines, float(state), float(cascade))).mean() for cascade in CASCADE_COSTS]
            for state in STATE_COSTS
        ]
    )
    best = np.argwhere(means <= means.min() + 1e-12)
    state_at, cascade_at = best[np.abs(best - np.median(best, 0)).sum(1).argmin()]
    state, cascade = float(STATE_COSTS[state_at]), float(CASCADE_COSTS[cascade_at])
    near = means <= means.min() + 1e-3
    near_states, near_cascades = STATE_COSTS[near.any(1)], CASCADE_COSTS[near.any(0)]
    return {
        "state_cost": state,
        "cascade_cost": cascade,
        "state_cost_range": [int(near_states.min()), int(near_states.max())],
        "cascade_cost_range": [int(near_cascades.min()), int(near_cascades.max())],
        "largest": float(regrets(lines, takes(lines, state, cascade)).max()),
    }


def mean_regrets(
    lines: list[dict[str, Any]], squares: dict[str, float], regret: dict[str, Any]
) -> dict[str, float]:
    """The mean regrets of both fits, and of the baselines."""
    everything = np.ones(len(lines), dtype=bool)
    better = np.minimum(column(lines, "on"), column(lines, "off"))
    return {
        "regret fit": float(
            regrets(lines, takes(lines, regret["state_cost"], regret["cascade_cost"])).mean()
        ),
        "least squares": float(
            regrets(lines, takes(lines, squares["state_cost"], squares["cascade_cost"])).mean()
        ),
        "always on": float(regrets(lines, everything).mean()),
        "always off": float(regrets(lines, ~everything).mean()),
        "automatic, with its constants": float((column(lines, "automatic") / better - 1).mean()),
    }


def break_even(prefixes: list[int], ratios: list[float]) -> str:
    """The prefix length from which on / off stays below 1, interpolated between two lengths of the sweep on a
    log scale. prefixes: ascending; ratios: on / off of each.
    """
    worse = [i for i, ratio in enumerate(ratios) if ratio >= 1]
    if not worse:
        return f"≤ {prefixes[0]}"
    last = worse[-1]
    if last == len(prefixes) - 1:
        return f"> {prefixes[-1]}"
    above, below = math.log(ratios[last]), math.log(ratios[last + 1])
    return str(round(prefixes[last] * (prefixes[last + 1] / prefixes[last]) ** (above / (above - below))))


def first_taken(prefixes: list[int], taken: np.ndarray) -> str:
    """The first length of the sweep from which the model takes the levels. taken: bool [prefixes]."""
    left = [i for i, take in enumerate(taken) if not take]
    if not left:
        return f"≤ {prefixes[0]}"
    return f"> {prefixes[-1]}" if left[-1] == len(prefixes) - 1 else str(prefixes[left[-1] + 1])


def break_evens(lines: list[dict[str, Any]], regret: dict[str, Any]) -> list[dict[str, Any]]:
    """The break-even of cascade for each number of requests and each suffix: measured, and by the regret
    fit.
    """
    result = []
    by = ("groups", "requests", "suffix")
    ordered = sorted(lines, key=lambda line: [line[name] for name in (*by, "prefix")])
    for key, same in itertools.groupby(ordered, key=lambda line: tuple(line[name] for name in by)):
        run = list(same)
        prefixes = [line["prefix"] for line in run]
        measured = break_even(prefixes, [line["on"] / line["off"] for line in run])
        model = first_taken(prefixes, takes(run, regret["state_cost"], regret["cascade_cost"]))
        result.append({**dict(zip(by, key, strict=True)), "measured": measured, "model": model})
    return result


def report(lines: list[dict[str, Any]], header: str) -> tuple[str, dict[str, Any]]:
    """Markdown, and the same as data."""
    squares, regret = least_squares(lines), regret_fit(lines)
    rules, evens = mean_regrets(lines, squares, regret), break_evens(lines, regret)
    in_us = regret["cascade_cost"] * squares["unit"] / lines[0]["num_ctas"]
    constants = [
        [
            "least squares",
            number(squares["state_cost"]),
            "",
            number(squares["cascade_cost"], 0),
            "",
            number(squares["fixed"], 2),
        ],
        [
            "regret",
            number(regret["state_cost"], 0),
            "{} to {}".format(*regret["state_cost_range"]),
            number(regret["cascade_cost"], 0),
            "{} to {}".format(*regret["cascade_cost_range"]),
            number(in_us, 2),
        ],
    ]
    suffixes = sorted({line["suffix"] for line in lines})
    rows = [
        [str(groups), str(requests), *(f"{even['measured']} ({even['model']})" for even in same)]
        for (groups, requests), same in itertools.groupby(
            evens, key=lambda even: (even["groups"], even["requests"])
        )
    ]
    text = "\n\n".join(
        [
            header,
            table(
                ["fit", "state_cost", "within 0.1 %", "cascade_cost", "within 0.1 %", "cascade_cost in µs"],
                constants,
            ),
            f"A cost unit takes a CTA {squares['unit']:.4f} µs. Least squares leave "
            f"{squares['residual']:.1%} of off (median). "
            f"Largest regret of the regret fit: {regret['largest']:.1%}.",
            table(["rule", "mean regret"], [[name, f"{value:.2%}"] for name, value in rules.items()]),
            "Prefix length from which levels are faster, measured (by the regret fit, in the lengths of the "
            "sweep):",
            table(["groups", "requests in each", *(f"suffix {suffix}" for suffix in suffixes)], rows),
        ]
    )
    return text + "\n", {
        "header": header,
        "least squares": squares,
        "regret": regret,
        "mean regret": rules,
        "break even": evens,
        "lines": lines,
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--requests", type=int, nargs="+", default=[2, 4, 8, 16, 32, 64, 128, 256], help="in each group"
    )
    parser.add_argument(
        "--prefixes",
        type=int,
        nargs="+",
        default=[64, 128, 256, 512, 1024, 2048, 4096, 8192],
        help="tokens, multiples of 64",
    )
    parser.add_argument("--suffixes", type=int, nargs="+", default=[64, 256, 1024, 2048], help="tokens")
    parser.add_argument(
        "--groups",
        type=int,
        nargs="+",
        default=[1, 16],
        help=f"batches of more than {MAX_BATCH} requests are left out",
    )
    parser.add_argument("--heads", type=int, nargs=2, default=[32, 8], metavar=("QO", "KV"))
    parser.add_argument("--repeats", type=int, default=30)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--markdown", type=Path)
    arguments = parser.parse_args()
    prefixes, suffixes = (sorted(set(values)) for values in (arguments.prefixes, arguments.suffixes))
    if any(prefix < 64 or prefix % 64 for prefix in prefixes):
        parser.error("--prefixes: must be multiples of 64, the KV tile")
    sizes = sorted(
        {
            (groups, requests)
            for groups in arguments.groups
            for requests in arguments.requests
            if groups * requests <= MAX_BATCH
        }
    )
    if not sizes:
        parser.error(f"--groups and --requests: no batch of at most {MAX_BATCH} requests")
    timer, machine = start(arguments.repeats)
    header = (
        f"{machine} Decode, bf16, {'/'.join(map(str, arguments.heads))} heads, head_dim 128, page 16, cold "
        f"L2, CUDA-graph replay, median of "
        f"{arguments.repeats}. state_cost in 64ths of a cost unit, for each row state of one KV head; "
        f"cascade_cost in cost units, over all KV heads."
    )
    print(header, flush=True)
    most_groups = max(groups for groups, _ in sizes)
    most_requests = max(groups * requests for groups, requests in sizes)
    bench = Bench(
        SharedCase("", ((most_groups, prefixes[-1]), (most_requests, suffixes[-1])), *arguments.heads), timer
    )
    lines: list[dict[str, Any]] = []
    print("on / off for prefixes of", *prefixes)
    for (groups, requests), suffix in itertools.product(sizes, suffixes):
        run = [bench.measure(groups, requests, prefix, suffix) for prefix in prefixes]
        lines += run
        print(
            f"{groups} x {requests}, suffix {suffix}:",
            *(f"{line['on'] / line['off']:.2f}" for line in run),
            flush=True,
        )
        save(arguments, "", {"header": header, "lines": lines})
    text, data = report(lines, header)
    print(text)
    save(arguments, text, data)


if __name__ == "__main__":
    main()
