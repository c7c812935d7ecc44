"""Random batches under every variant of the tests, against float64.

    python -m tests.variant_fuzz                                     # on a CPU
    python -m tests.variant_fuzz --device cuda --cases 1500 --jobs 14
    python -m tests.variant_fuzz --variant tree_mask --case 412      # one case again, in this process

Run from the root of the repository, with attn_backend installed. Each variant is compiled for one element type, one head_dim and one kernel; built-ins for each
kernel. The exit status is 1 where a case fails.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections import Counter
from pathlib import Path

TESTS = Path(__file__).resolve().parent.parent
# `python -m` looks for modules in the working directory first: there is the source tree of attn_backend, which has no built library.
if not getattr(sys.flags, "safe_path", False):
    del sys.path[0]
sys.path.insert(0, str(TESTS))

import torch  # noqa: E402
from variant_fuzz.runner import run, run_case, tasks  # noqa: E402


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.variant_fuzz", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=int, default=1500, help="default: 1500")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="processes, which compile and run; default: one a core")
    parser.add_argument("--variant", action="append", help="only this one; repeatable")
    parser.add_argument("--case", type=int, metavar="K", help="only case number K of each")
    arguments = parser.parse_args()
    if arguments.device == "cuda" and torch.cuda.device_count() == 0:
        parser.error("--device is cuda, and torch sees no GPU")
    for name in ("cases", "jobs"):
        if getattr(arguments, name) < 1:
            parser.error(f"--{name} is {getattr(arguments, name)}, must be at least 1")
    return arguments


def main() -> int:
    arguments = parse()
    begin = time.monotonic()
    chosen = tasks(torch.device(arguments.device), arguments.cases, arguments.variant)
    if arguments.case is not None:
        messages = [run_case(arguments.case, task.entry, task.form)[1] for task in chosen]
        print("\n".join(f"{task.title}: {message or 'right'}" for task, message in zip(chosen, messages, strict=True)))
        return int(any(messages))
    kinds: Counter[str] = Counter()
    failed = compiling = 0.0
    for result in run(chosen, arguments.jobs):
        kinds.update(result.kinds)
        compiling += result.compiling
        failed += len(result.failures)
        print(f"{result.task.title}: {sum(result.kinds.values())} cases, {len(result.failures)} wrong, {result.seconds:.0f} s", flush=True)
        for number, message in result.failures[:2]:
            print(f"    python -m tests.variant_fuzz --device {arguments.device} --variant {result.task.entry.name} --case {number}", flush=True)
            print("    " + message.replace("\n", "\n    "), flush=True)
    variants = len({task.place for task in chosen})
    print(f"\n{', '.join(f'{count} {kind}' for kind, count in sorted(kinds.items()))}")
    spent = f"{time.monotonic() - begin:.0f} s, of the {arguments.jobs} processes {compiling:.0f} s in compilers"
    print(f"{sum(kinds.values())} cases of {variants} variants: {failed:.0f} wrong; {spent}")
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
