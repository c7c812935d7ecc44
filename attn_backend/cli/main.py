"""`attn-backend doctor | plan | compile`."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from ..kernels.cubins import ARCHS
from . import doctor, plan


def main(argv: list[str] | None = None) -> int:
    """Entry point of the command; returns the exit status."""
    parser = argparse.ArgumentParser(prog="attn-backend", description="Attention backend for vLLM and SGLang.")
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("doctor", help="what is installed, what works, and what to do about what is missing")
    plan.add_arguments(commands.add_parser("plan", help="plan a batch on the host and show it: row groups, shared prefixes, the CTAs' balance"))
    compiling = commands.add_parser("compile", help="compile the standard kernels into the cache (needs nvcc)")
    compiling.add_argument("--arch", action="append", choices=ARCHS, help="repeatable; default: all")
    compiling.add_argument("--jobs", type=int, default=2)
    compiling.add_argument("--out", type=Path, help="also copy the cubins to OUT/<arch>/<name>.cubin")
    arguments = parser.parse_args(argv)
    if arguments.command == "doctor":
        return doctor.run()
    if arguments.command == "plan":
        return plan.run(arguments)
    from ..kernels.build import build

    return 1 if build(arguments.arch or list(ARCHS), arguments.jobs, arguments.out) else 0


if __name__ == "__main__":
    sys.exit(main())
