"""Code that the command lines of this folder share: options, the results folder, the server and prompts of a
comparison, the exit status.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from attn_backend.cli.demo import split_arguments
from integration.client import ClientError
from integration.device import find_device
from integration.engines import ENGINES, Launch, Sampling
from integration.engines.base import OURS
from integration.model import CONVERTED, REPOSITORY, resolve_model
from integration.packages import DownloadError
from integration.server import ServerError, free_port, stop_on_signals
from integration.sharegpt import dataset_file, prompt_token_ids

KNOWN_ERRORS = (ServerError, ClientError, DownloadError, ValueError, FileNotFoundError, RuntimeError)


def new_parser(description: str | None, results: str) -> argparse.ArgumentParser:
    """A parser with the options of every tool that starts servers.

    `results`: the default of --results, for its help.
    """
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--engine", choices=sorted(ENGINES), required=True)
    parser.add_argument(
        "--model",
        default="smollm2",
        help=f"{', '.join(CONVERTED)}, a folder, or a name in integration/models; without weights in the "
        "folder they are random; default: %(default)s",
    )
    parser.add_argument(
        "--device", choices=["cpu", "cuda"], default=find_device(), help="default: cuda when there is one"
    )
    parser.add_argument(
        "--no-cuda-graphs",
        dest="cuda_graphs",
        action="store_false",
        help="have the engine launch every kernel by itself",
    )
    parser.add_argument(
        "--start-timeout",
        dest="start_timeout_s",
        type=float,
        default=900,
        help="seconds a server may take to come up; default: %(default)s",
    )
    parser.add_argument(
        "--python", default=sys.executable, help="the interpreter that has the engine; default: this one"
    )
    parser.add_argument(
        "--server-args",
        dest="server_arguments",
        type=split_arguments,
        default=[],
        help="more arguments for the server, in one string",
    )
    parser.add_argument(
        "--results", type=Path, help=f"folder for reports and logs; default: results/{results}-TIME"
    )
    return parser


def one_of(known: Collection[str]) -> Callable[[str], str]:
    """The type of an argument with any number of values, including none: argparse's `choices` would refuse
    the default.
    """

    def name(text: str) -> str:
        if text not in known:
            raise argparse.ArgumentTypeError(f"{text}; must be of {', '.join(known)}")
        return text

    return name


def sampling_argument(text: str) -> Sampling:
    try:
        return Sampling.parse(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def results_folder(given: argparse.Namespace, name: str) -> Path:
    folder: Path = given.results or REPOSITORY / "results" / f"{name}-{time.strftime('%Y%m%d-%H%M%S')}"
    return folder.resolve()


def comparison_parser(
    description: str | None, name: str, num_prompts: int, longest_prompt: int
) -> argparse.ArgumentParser:
    """A parser with the options of every tool that compares answers; the rest have defaults."""
    parser = new_parser(description, f"{name}-ENGINE")
    parser.add_argument(
        "--backend",
        default=OURS,
        help="whose answers are looked at: attn_backend (the default), stock, or a name that the engine "
        "knows",
    )
    parser.add_argument("--dataset", default="sharegpt", help="sharegpt, or FILE.json in its form")
    parser.add_argument("--num-prompts", type=int, default=num_prompts, help="default: %(default)s")
    parser.add_argument("--max-tokens", type=int, default=64, help="of each answer; default: %(default)s")
    parser.add_argument(
        "--longest-prompt",
        type=int,
        default=longest_prompt,
        help="tokens; longer prompts are passed over; default: %(default)s",
    )
    parser.add_argument(
        "--concurrency", type=int, default=8, help="most requests in flight; default: %(default)s"
    )
    parser.add_argument("--dtype", help="default: float32 on a CPU, bfloat16 on a GPU")
    return parser


@dataclass(frozen=True)
class Comparison:
    """The start of a comparison: the folder of its report, its prompts (token ids), and the server of
    --backend.
    """

    given: argparse.Namespace
    name: str
    results: Path
    prompts: list[list[int]]
    launch: Launch

    @classmethod
    def make(cls, given: argparse.Namespace, name: str) -> Comparison:
        dtype = given.dtype or ("float32" if given.device == "cpu" else "bfloat16")
        model = resolve_model(given.model, given.python)
        prompts = prompt_token_ids(
            model.folder, dataset_file(given.dataset), given.num_prompts, given.longest_prompt
        )
        longest = given.longest_prompt + given.max_tokens + 1
        launch = Launch(
            given.python,
            model,
            given.backend,
            given.device,
            free_port(),
            dtype,
            given.cuda_graphs,
            longest,
            given.concurrency,
            given.server_arguments,
        )
        return cls(given, name, results_folder(given, f"{name}-{given.engine}"), prompts, launch)

    def write(self, report: dict[str, Any]) -> None:
        settings = {name: str(value) for name, value in vars(self.given).items()} | {
            "dtype": self.launch.dtype
        }
        path = self.results / f"{self.name}.json"
        path.write_text(json.dumps({"settings": settings} | report) + "\n", encoding="utf-8")
        print(f"written: {path}")


def exit_with(command: Callable[[], bool]) -> NoReturn:
    """Runs a command and ends the process. Exit status: 0 if it returns True, 1 otherwise and for an expected
    error, 130 after an interrupt.
    """
    stop_on_signals()
    try:
        holds = command()
    except KNOWN_ERRORS as error:
        sys.exit(f"\nerror: {error}")
    except KeyboardInterrupt:
        sys.exit(130)
    sys.exit(0 if holds else 1)
