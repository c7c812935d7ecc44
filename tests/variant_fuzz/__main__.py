"""Random batches under every variant of the tests, compared with float64.

    python -m tests.variant_fuzz                                     # on a CPU
    python -m tests.variant_fuzz --device cuda --cases 1500 --jobs 14
    python -m tests.variant_fuzz --variant tree_mask --case 412      # one case again, in this process
    python -m tests.variant_fuzz --functions 500     # traced functions of random conditions: only their hooks

Run from the root of the repository, with attn_backend installed. Each variant is compiled for one element
type, one head_dim and one kernel; built-ins for each kernel. The exit status is 1 if a case fails.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

TESTS = Path(__file__).resolve().parent.parent
# `python -m` looks for modules in the working directory first. It contains the source tree of attn_backend,
# without a built library.
if not getattr(sys.flags, "safe_path", False):
    del sys.path[0]
sys.path[:0] = [str(TESTS), str(TESTS / "helpers"), str(TESTS / "variants")]

import torch  # noqa: E402
from random_functions import wrong  # noqa: E402
from variant_fuzz.runner import run, run_case, tasks  # noqa: E402

FUNCTIONS_AT_ONCE = 50  # in one call of g++


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m tests.variant_fuzz",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--cases", type=int, default=1500, help="default: 1500")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument(
        "--jobs",
        type=int,
        default=os.cpu_count() or 1,
        help="processes, which compile and run; default: one a core",
    )
    parser.add_argument("--variant", action="append", help="only this one; repeatable")
    parser.add_argument("--case", type=int, metavar="K", help="only case number K of each")
    parser.add_argument(
        "--functions",
        type=int,
        metavar="N",
        help="no batches: N random functions (tests/variants/random_functions.py), in this process",
    )
    arguments = parser.parse_args()
    if arguments.device == "cuda" and torch.cuda.device_count() == 0:
        parser.error("--device is cuda, and torch sees no GPU")
    for name in ("cases", "jobs", "functions"):
        if getattr(arguments, name) is not None and getattr(arguments, name) < 1:
            parser.error(f"--{name} is {getattr(arguments, name)}, must be at least 1")
    return arguments


def compare_functions(count: int) -> int:
    """Exit status."""
    begin = time.monotonic()
    failed = 0
    for first in range(0, count, FUNCTIONS_AT_ONCE):
        with tempfile.TemporaryDirectory() as folder:
            found = wrong(range(first, min(first + FUNCTIONS_AT_ONCE, count)), Path(folder))
        failed += len(found)
        for seed, message in found.items():
            print(f"function {seed}: {message}", flush=True)
    print(f"{count} random functions: {failed} wrong; {time.monotonic() - begin:.0f} s")
    return int(failed > 0)


def main() -> int:
    arguments = parse()
    if arguments.functions is not None:
        return compare_functions(arguments.functions)
    begin = time.monotonic()
    chosen = tasks(torch.device(arguments.device), arguments.cases, arguments.variant)
    if arguments.case is not None:
        messages = [run_case(arguments.case, task.entry, task.form)[1] for task in chosen]
        print(
            "\n".join(
                f"{task.title}: {message or 'right'}" for task, message in zip(chosen, messages, strict=True)
            )
        )
        return int(any(messages))
    kinds: Counter[str] = Counter()
    failed = compiling = 0.0
    for result in run(chosen, arguments.jobs):
        kinds.update(result.kinds)
        compiling += result.compiling
        failed += len(result.failures)
        print(
            f"{result.task.title}: {sum(result.kinds.values())} cases, {len(result.failures)} wrong, "
            f"{result.seconds:.0f} s",
            flush=True,
        )
        for number, message in result.failures[:2]:
            print(
                f"    python -m tests.variant_fuzz --device {arguments.device} --variant "
                f"{result.task.entry.name} --case {number}",
                flush=True,
            )
            print("    " + message.replace("\n", "\n    "), flush=True)
    variants = len({task.place for task in chosen})
    print(f"\n{', '.join(f'{count} {kind}' for kind, count in sorted(kinds.items()))}")
    spent = (
        f"{time.monotonic() - begin:.0f} s, of the {arguments.jobs} processes {compiling:.0f} s in compilers"
    )
    print(f"{sum(kinds.values())} cases of {variants} variants: {failed:.0f} wrong; {spent}")
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
