"""The public API under random calls: valid calls are compared with float64, invalid calls must be refused
with the name of the wrong argument.

    python -m tests.fuzz                                   # 60 seconds on a CPU
    python -m tests.fuzz --seed 3 --calls 200000
    python -m tests.fuzz --device cuda --calls 20000       # captured graphs, too
    python -m tests.fuzz --scenario float8_batches         # 8-bit caches alone
    python -m tests.fuzz --seed 3 --only 41227             # one call, in this process, with its traceback

Run from the root of the repository, with attn_backend installed. Each chunk of calls runs in a separate
process, so a crash or a hang is a finding like any other. The exit status is 1 with findings.
"""

from __future__ import annotations

import argparse
import contextlib
import faulthandler
import os
import sys
import time
from pathlib import Path

TESTS = Path(__file__).resolve().parent.parent
# `python -m` looks for modules in the working directory first. It contains the source tree of attn_backend,
# without a built library.
if not getattr(sys.flags, "safe_path", False):
    del sys.path[0]
sys.path[:0] = [str(TESTS), str(TESTS / "helpers")]

import torch  # noqa: E402
from fuzz.call import FINDINGS, GOOD  # noqa: E402
from fuzz.chunks import Chunk, Runner, Tally, run_call  # noqa: E402
from fuzz.scenarios import CALLS, NAMES, calls_of  # noqa: E402

import attn_backend  # noqa: E402


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m tests.fuzz", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--seconds",
        type=float,
        help="begin no scenario after so many seconds; default: 60, or no limit with --calls",
    )
    parser.add_argument("--calls", type=int, help="so many calls")
    parser.add_argument("--seed", type=int, default=0, help="every seed has other calls; default: 0")
    parser.add_argument(
        "--first", type=int, default=0, metavar="N", help="begin with the scenario of call number N"
    )
    parser.add_argument(
        "--only",
        type=int,
        metavar="K",
        help="make call number K, after those that share its objects, in this process; show its outcome",
    )
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument(
        "--scenario",
        action="append",
        default=[],
        choices=sorted(NAMES),
        help="may be given more than once; default: all",
    )
    parser.add_argument("--jobs", type=int, help="processes at a time; default: one a core, four on a GPU")
    parser.add_argument("--chunk", type=int, help="calls of one process; default: 500, on a GPU 2000")
    parser.add_argument(
        "--fresh",
        action="store_true",
        help="begin each process anew instead of forking it; always so on a GPU",
    )
    # for such a process
    parser.add_argument(
        "--work", nargs=3, type=int, metavar=("FIRST", "LAST", "EVENTS"), help=argparse.SUPPRESS
    )
    parser.add_argument(
        "--limit",
        type=float,
        help="seconds that a call may take; default: 60, on a GPU 300 (a kernel may have to be compiled)",
    )
    arguments = parser.parse_args()
    on_cuda = arguments.device == "cuda"
    if on_cuda and torch.cuda.device_count() == 0:
        parser.error("--device is cuda, and torch sees no GPU")
    for name, least in {
        "seconds": 0,
        "calls": 1,
        "first": 0,
        "only": 0,
        "jobs": 1,
        "chunk": 1,
        "limit": 0,
    }.items():
        value = getattr(arguments, name)
        if value is not None and value < least:
            parser.error(f"--{name} is {value}, must be at least {least}")
    if arguments.seconds is None and arguments.calls is None:
        arguments.seconds = 60.0
    arguments.jobs = arguments.jobs or (4 if on_cuda else os.cpu_count() or 1)
    arguments.chunk = arguments.chunk or (2000 if on_cuda else 500)
    arguments.limit = arguments.limit or (300.0 if on_cuda else 60.0)
    return arguments


def only(arguments: argparse.Namespace) -> int:
    """One call, with all details about it."""
    faulthandler.enable()
    scenario, place = divmod(arguments.only, CALLS)
    for i, call in enumerate(
        calls_of(arguments.seed, scenario, torch.device(arguments.device), arguments.scenario)
    ):
        print(f"call {scenario * CALLS + i}: {call.title}", flush=True)
        outcome = run_call(call, arguments.device == "cuda")
        print(f"    {outcome.kind}{': ' if outcome.message else ''}{outcome.message}", flush=True)
        if i == place:
            print(outcome.details)
            return int(outcome.kind in FINDINGS)
    return 0


def warm_up() -> None:
    """Loads once, here, everything that each process needs.

    It computes nothing, so no threads or GPU state can be lost in a fork.
    """
    import torch._dynamo.source  # for fake tensors; the first one imports it

    assert torch._dynamo.source is not None
    with contextlib.suppress(ValueError):  # the first error from C++ imports the code that describes it
        attn_backend.sample(torch.zeros(1, 0))


def report(tally: Tally, options: list[str], seconds: float) -> None:
    classes = [kind for kind in (*GOOD, *FINDINGS) if any(known == kind for _, known in tally.counts)]
    surfaces = sorted({surface for surface, _ in tally.counts})
    print(f"\n{'':32s}" + "".join(f"{kind:>26s}" for kind in classes))
    for surface in surfaces:
        print(f"{surface:32s}" + "".join(f"{tally.counts[surface, kind]:26d}" for kind in classes))
    print(
        f"{'all':32s}"
        + "".join(f"{sum(tally.counts[surface, kind] for surface in surfaces):26d}" for kind in classes)
    )
    findings = sorted(
        tally.findings.values(), key=lambda finding: (FINDINGS.index(finding.kind), finding.title)
    )
    for finding in findings:
        print(f"\n{finding.count} x {finding.kind}: {finding.title}\n    {_shortened(finding.message)}")
        print(
            f"    python -m tests.fuzz {' '.join(options)} --only {finding.call}      # or, after others: "
            f"--first {finding.chunk}"
        )
    wrong = sum(finding.count for finding in findings)
    print(
        f"\n{tally.calls} calls in {seconds:.0f} s, {' '.join(options)}: {wrong} findings of {len(findings)} "
        f"kinds"
    )


def _shortened(message: str) -> str:
    """One line; if a process died, also its innermost frames."""
    first, *rest = message.split("\n")
    return "\n".join([first[:240], *(line for line in rest if line.startswith("        File "))])


def main() -> int:
    arguments = parse()
    device = torch.device(arguments.device)
    if arguments.only is not None:
        return only(arguments)
    options = [
        "--device",
        arguments.device,
        "--seed",
        str(arguments.seed),
        *(word for name in arguments.scenario for word in ("--scenario", name)),
    ]

    def command(chunk: Chunk, events: int, seconds: float | None) -> list[str]:
        own = [*options, "--work", str(chunk.next), str(chunk.last), str(events)]
        return [
            sys.executable,
            "-m",
            "tests.fuzz",
            *own,
            *(["--seconds", str(seconds)] if seconds is not None else ["--calls", "1"]),
        ]

    runner = Runner(
        lambda scenario: calls_of(arguments.seed, scenario, device, arguments.scenario),
        CALLS,
        on_cuda=device.type == "cuda",
        jobs=arguments.jobs,
        scenarios=max(arguments.chunk // CALLS, 1),
        limit=arguments.limit,
        command=command if arguments.fresh or arguments.device == "cuda" else None,
    )
    if arguments.work is not None:
        runner.work(
            Chunk(*arguments.work[:2]),
            arguments.work[2],
            None if arguments.seconds is None else time.monotonic() + arguments.seconds,
        )
    if runner.command is None:
        warm_up()
    print(f"seed {arguments.seed}, {arguments.jobs} processes", flush=True)
    first = arguments.first // CALLS
    last = None if arguments.calls is None else first + -(-arguments.calls // CALLS)
    begin = time.monotonic()
    tally = runner.run(first, last, arguments.seconds)
    report(tally, options, time.monotonic() - begin)
    return int(bool(tally.findings))


if __name__ == "__main__":
    sys.exit(main())
