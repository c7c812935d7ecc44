"""`attn-backend doctor | demo | bench | plan | compile | completion`."""

from __future__ import annotations

import argparse
import os
import sys
from types import ModuleType

from . import bench, completion, demo, doctor, plan
from . import compile as compile_command

_EPILOG = """examples:
  attn-backend doctor                                # check the installation
  attn-backend demo                                  # serve a small model with the installed engine
  attn-backend bench                                 # compare attention with the installed peers
  attn-backend plan --shared-prefix 128x8192+256     # show the plan of a batch

`attn-backend COMMAND --help` has examples of each.
"""

COMMANDS: dict[str, tuple[ModuleType, str]] = {
    "doctor": (doctor, "check the installation, or whether a model is supported, and print fixes"),
    "demo": (
        demo,
        "serve a small model with the installed engine, and compare latencies with the engine's default "
        "backend",
    ),
    "bench": (bench, "benchmark attention on this GPU or CPU against the installed peers"),
    "plan": (plan, "plan a batch on the host and print it: row groups, shared prefixes, CTA balance"),
    "compile": (compile_command, "compile standard kernels, or a variant's, ahead of time into the cache"),
    "completion": (completion, "print the completion script for bash, zsh or fish"),
}


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="attn-backend",
        description="Attention backend for vLLM and SGLang.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--version",
        action="version",
        version=f"%(prog)s {doctor.version('attn-backend') or '(not installed)'}",
    )
    commands = parser.add_subparsers(dest="command", required=True)
    for name, (module, description) in COMMANDS.items():
        command = commands.add_parser(
            name,
            help=description,
            description=f"{description[0].upper()}{description[1:]}.",
            epilog=module.EPILOG,
            formatter_class=parser.formatter_class,
        )
        module.add_arguments(command)
    return parser


def main(argv: list[str] | None = None) -> int:
    """Entry point of the command; returns the exit status."""
    parser = make_parser()
    words = sys.argv[1:] if argv is None else argv
    if not words:
        parser.print_help(sys.stderr)
        return 2
    arguments = parser.parse_args(_join_server_args(words))
    try:
        status = _run(arguments, parser)
        sys.stdout.flush()
    except BrokenPipeError:  # the reader of stdout, such as `head`, has exited
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    return status


def _join_server_args(words: list[str]) -> list[str]:
    """Joins --server-args and its text: argparse takes a text such as --enable-mis for an option."""
    joined: list[str] = []
    for word in words:
        if joined and joined[-1] == "--server-args":
            joined[-1] += f"={word}"
        else:
            joined.append(word)
    return joined


def _run(arguments: argparse.Namespace, parser: argparse.ArgumentParser) -> int:
    if arguments.command == "completion":
        print(completion.script(arguments.shell, completion.words_of(parser)), end="")
        return 0
    return COMMANDS[arguments.command][0].run(arguments)


if __name__ == "__main__":
    sys.exit(main())
