"""`attn-backend doctor | plan | compile`."""

from __future__ import annotations

import argparse
import sys

from . import compile as compile_command
from . import doctor, plan


def main(argv: list[str] | None = None) -> int:
    """Entry point of the command; returns the exit status."""
    parser = argparse.ArgumentParser(prog="attn-backend", description="Attention backend for vLLM and SGLang.")
    parser.add_argument("--version", action="version", version=f"%(prog)s {doctor.version('attn-backend') or '(not installed)'}")
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("doctor", help="what is installed, what works, and what to do about what is missing")
    plan.add_arguments(commands.add_parser("plan", help="plan a batch on the host and show it: row groups, shared prefixes, the CTAs' balance"))
    compile_command.add_arguments(commands.add_parser("compile", help="compile the standard kernels, or a variant's, into the cache"))
    arguments = parser.parse_args(argv)
    if arguments.command == "doctor":
        return doctor.run()
    if arguments.command == "plan":
        return plan.run(arguments)
    return compile_command.run(arguments)


if __name__ == "__main__":
    sys.exit(main())
