"""The options and settings of the tools that measure servers with the engines' clients."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from attn_backend.cli.demo import split_arguments
from integration.benchmark import Load, Settings
from integration.command_line import sampling_argument
from integration.datasets import RECORDED
from integration.device import default_dtype


def rate_argument(text: str) -> float | None:
    """Prompts per second; None for `recorded`."""
    return None if text == RECORDED else float(text)


def add_serving_options(parser: argparse.ArgumentParser) -> None:
    """Adds what servers and clients have in common, after the options of new_parser()."""
    parser.add_argument(
        "--sampling",
        type=sampling_argument,
        help="e.g. temperature=0.8,top_p=0.95,top_k=40; also min_p; default: greedy",
    )
    parser.add_argument(
        "--n-best",
        action="store_true",
        help="ask for the answers to a prompt with one request with `n`, rather than with copies of it",
    )
    parser.add_argument("--max-concurrency", type=int, help="most requests in flight")
    parser.add_argument(
        "--seed",
        type=int,
        default=0,
        help="of what is drawn: prompts, lengths, and with --sampling the requests' seeds; default: "
        "%(default)s",
    )
    parser.add_argument(
        "--dtype",
        help="of the model, as the engine calls it; default: float32 on a CPU without bf16 instructions, "
        "otherwise auto",
    )
    parser.add_argument(
        "--max-model-len",
        type=int,
        help="most tokens of a prompt and its answer; default: 2048 on a CPU, 8192 on a GPU",
    )
    parser.add_argument(
        "--max-num-seqs",
        type=int,
        help="most requests that a server runs at once; default: 8 on a CPU, 256 on a GPU",
    )
    parser.add_argument(
        "--tensor-parallel-size",
        type=int,
        default=1,
        help="GPUs of a model (default: 1), without NVLink multicast where NCCL_NVLS_ENABLE is 0",
    )
    parser.add_argument(
        "--client-args",
        dest="client_arguments",
        type=split_arguments,
        default=[],
        help="more arguments for the client",
    )


def check_serving_options(parser: argparse.ArgumentParser, given: argparse.Namespace) -> None:
    """Ends the program where options do not go together."""
    if given.n_best and given.max_concurrency:
        parser.error("--n-best does not go with --max-concurrency, which could hold back a part of a request")
    if given.n_best and given.engine == "vllm" and not given.sampling:
        parser.error("--n-best needs --sampling: vLLM has no n for greedy answers")


def serving_settings(given: argparse.Namespace, loads: list[Load], results: Path, **more: Any) -> Settings:
    """Options have the names of Settings' fields. For omitted options its defaults apply, which are for a
    CPU.
    """
    values: dict[str, Any] = {"max_model_len": 8192, "max_num_seqs": 256} if given.device == "cuda" else {}
    values |= {
        name: value
        for name, value in vars(given).items()
        if name in Settings.__dataclass_fields__ and value is not None
    }
    values |= {"dtype": given.dtype or default_dtype(given.device), "loads": loads, "results": results} | more
    return Settings(**values)
