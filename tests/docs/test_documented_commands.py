"""Commands in the documents are valid: each program's own parser reads them.

Nothing is run.
"""

from __future__ import annotations

import argparse
import re
import runpy
import shlex
import sys
from importlib import import_module
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
DOCUMENTS = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")])
OURS = (
    "attn_backend",
    "benchmarks",
    "integration",
    "release",
    "tests.faults",
    "tests.fuzz",
    "tests.variant_fuzz",
)
IMPORT_AN_ENGINE = {"integration.sglang_attention_kit", "integration.vllm_attention_kit"}  # before they parse


class Understood(BaseException):
    """Raised when a program has parsed its arguments; no program catches it."""


def commands() -> list[tuple[str, str]]:
    """(document, command) of all lines that call one of our programs; a trailing backslash continues a
    line."""
    found = []
    for path in DOCUMENTS:
        text = re.sub(r" *(\\\\|\\)\n *", " ", path.read_text())
        for line in map(str.strip, text.splitlines()):
            command = re.sub(r"^(\$ )?([A-Z_]+=\S* )*", "", line)
            module = re.match(r"python -m ([\w.]+) ", command + " ")
            if (module and module[1].startswith(OURS) and module[1] not in IMPORT_AN_ENGINE) or re.match(
                r"attn-backend [a-z]+( |$)", command
            ):
                found.append((str(path.relative_to(ROOT)), command))
    return sorted(set(found))


def understand(command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Parses a command as its program does, including the checks of its parse_arguments() if it has one.

    A wrong argument raises SystemExit or ValueError.
    """
    words = shlex.split(command, comments=True)
    name, arguments = (
        ("attn_backend.cli.main", words[1:]) if words[0] == "attn-backend" else (words[2], words[3:])
    )
    monkeypatch.setattr(sys, "argv", [name, *arguments])
    if hasattr(module := import_module(name), "parse_arguments"):
        module.parse_arguments()
        return
    parse_args = argparse.ArgumentParser.parse_args

    def parse(self, args=None, namespace=None):
        parse_args(self, args, namespace)
        raise Understood

    monkeypatch.setattr(argparse.ArgumentParser, "parse_args", parse)
    monkeypatch.delitem(sys.modules, name, raising=False)
    with pytest.raises(Understood):
        runpy.run_module(name, run_name="__main__")


@pytest.mark.parametrize(("document", "command"), commands())
def test_a_documented_command_is_understood(document, command, monkeypatch):
    understand(command, monkeypatch)


@pytest.mark.parametrize(
    ("command", "message"),
    [
        ("attn-backend doctor --jsn", "--jsn"),
        (
            "python -m integration.serve_benchmark --engine vllm --backends stock --dataset a.json b.json "
            "--num-prompts 1 2 3",
            "num-prompts",
        ),
    ],
)
def test_a_wrong_command_is_not(command, message, monkeypatch, capsys):
    with pytest.raises((SystemExit, ValueError)) as error:
        understand(command, monkeypatch)
    assert message in capsys.readouterr().err + str(error.value)


def test_all_kinds_of_programs_are_documented():
    programs = {
        shlex.split(command, comments=True)[2 if command.startswith("python") else 1]
        for _, command in commands()
    }
    assert {
        "bench",
        "compile",
        "demo",
        "doctor",
        "plan",
        "benchmarks.attention",
        "integration.serve_benchmark",
        "integration.soak",
    } <= programs
