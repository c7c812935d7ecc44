"""`attn-backend completion`: what makes a shell complete the commands and their options."""

from __future__ import annotations

import argparse
import shlex

_EPILOG = """examples:
  eval "$(attn-backend completion bash)"                                                     # in ~/.bashrc
  eval "$(attn-backend completion zsh)"                                                      # in ~/.zshrc, after compinit
  attn-backend completion fish > ~/.config/fish/completions/attn-backend.fish
"""
SHELLS = ("bash", "zsh", "fish")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.epilog = _EPILOG
    parser.add_argument("shell", choices=SHELLS)


def options_of(parser: argparse.ArgumentParser) -> dict[str, list[str]]:
    """The options of each command, and the choices of its positional arguments; "" has the commands."""
    commands = next(action for action in parser._actions if isinstance(action, argparse._SubParsersAction)).choices
    words: dict[str, list[str]] = {"": [*commands]}
    for name, command in commands.items():
        words[name] = [option for action in command._actions for option in action.option_strings if option.startswith("--")]
        words[name] += [str(choice) for action in command._actions if not action.option_strings for choice in action.choices or ()]
    return words


def script(shell: str, words: dict[str, list[str]]) -> str:
    """The script for one of SHELLS. Where nothing of ours fits, files are completed."""
    if shell == "fish":
        lines = [f"complete -c attn-backend -n __fish_use_subcommand -f -a {shlex.quote(' '.join(words['']))}"]
        for command, its_words in words.items():
            options = [word.removeprefix("--") for word in its_words if word.startswith("--")]
            if command:
                seen = shlex.quote(f"__fish_seen_subcommand_from {command}")
                lines += [f"complete -c attn-backend -n {seen} -l {option}" for option in options]
                choices = " ".join(word for word in its_words if not word.startswith("--"))
                lines += [f"complete -c attn-backend -n {seen} -f -a {shlex.quote(choices)}"] if choices else []
        return "\n".join(lines) + "\n"
    cases = "\n".join(f"    {command}) words={shlex.quote(' '.join(its_words))} ;;" for command, its_words in words.items() if command)
    bash = f"""_attn_backend() {{
  local words
  if [ "$COMP_CWORD" -eq 1 ]; then words={shlex.quote(" ".join(words[""]))}
  else case "${{COMP_WORDS[1]}}" in
{cases}
  esac; fi
  COMPREPLY=($(compgen -W "$words" -- "${{COMP_WORDS[COMP_CWORD]}}"))
}}
complete -o default -F _attn_backend attn-backend
"""
    return bash if shell == "bash" else f"autoload -Uz bashcompinit && bashcompinit\n{bash}"
