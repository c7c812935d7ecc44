"""`attn-backend completion`: shell completion of the commands, their options and values."""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Iterable
from dataclasses import dataclass, field

from ..jit.manifest import ARCHS

EPILOG = """examples:
  eval "$(attn-backend completion bash)"     # in ~/.bashrc
  eval "$(attn-backend completion zsh)"      # in ~/.zshrc, after compinit
  attn-backend completion fish > ~/.config/fish/completions/attn-backend.fish
"""
SHELLS = ("bash", "zsh", "fish")
_VALUES = {"--arch": ("cpu", *ARCHS)}  # for options that also accept other values


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("shell", choices=SHELLS)


@dataclass
class Words:
    """The words that may follow a command.

    values: by option that takes one; empty: a file, a number or other text.
    """

    options: list[str] = field(default_factory=list)
    positional: list[str] = field(default_factory=list)
    values: dict[str, list[str]] = field(default_factory=dict)


def words_of(parser: argparse.ArgumentParser) -> dict[str, Words]:
    """The words of each command."""
    commands = next(
        action for action in parser._actions if isinstance(action, argparse._SubParsersAction)
    ).choices
    words = {name: Words() for name in commands}
    for name, command in commands.items():
        for action in command._actions:
            options = [option for option in action.option_strings if option.startswith("--")]
            choices = [str(choice) for choice in action.choices or ()]
            words[name].options += options
            if not action.option_strings:
                words[name].positional += choices
            elif action.nargs != 0:
                words[name].values |= {option: choices or [*_VALUES.get(option, ())] for option in options}
    return words


def script(shell: str, words: dict[str, Words]) -> str:
    """The script for one of SHELLS. If none of the words fits, it completes file names."""
    if shell == "fish":
        return _fish(words)
    return _bash(words) if shell == "bash" else f"autoload -Uz bashcompinit && bashcompinit\n{_bash(words)}"


def _fish(words: dict[str, Words]) -> str:
    lines = [f"complete -c attn-backend -n __fish_use_subcommand -f -a {_quoted(words)}"]
    for command, its in words.items():
        complete = f"complete -c attn-backend -n {shlex.quote(f'__fish_seen_subcommand_from {command}')}"
        for option in its.options:
            values = its.values.get(option)
            takes = "" if values is None else f" -x -a {_quoted(values)}" if values else " -r"
            lines.append(f"{complete} -l {option.removeprefix('--')}{takes}")
        lines += [f"{complete} -f -a {_quoted(its.positional)}"] if its.positional else []
    return "\n".join(lines) + "\n"


def _bash(words: dict[str, Words]) -> str:
    cases = [
        (f"{command} {option}", values)
        for command, its in words.items()
        for option, values in its.values.items()
    ]
    lines = [f"    {shlex.quote(typed)}) words={_quoted(values)} ;;" for typed, values in cases]
    lines += [
        f"    {shlex.quote(f'{command} ')}*) words={_quoted([*its.options, *its.positional])} ;;"
        for command, its in words.items()
    ]
    cases_text = "\n".join(lines)
    return f"""_attn_backend() {{
  local word="${{COMP_WORDS[COMP_CWORD]}}" before="${{COMP_WORDS[COMP_CWORD - 1]}}" words=
  if [ "$word" = "=" ]; then word=  # of --option=value, which bash takes for three words
  elif [ "$before" = "=" ]; then before="${{COMP_WORDS[COMP_CWORD - 2]}}"
  fi
  if [ "$COMP_CWORD" -eq 1 ]; then words={_quoted(words)}
  else case "${{COMP_WORDS[1]}} $before" in
{cases_text}
  esac; fi
  COMPREPLY=($(compgen -W "$words" -- "$word"))
}}
complete -o default -F _attn_backend attn-backend
"""


def _quoted(words: Iterable[str]) -> str:
    return shlex.quote(" ".join(words))
