"""Writes a copy of a model with scales for an e4m3 KV cache: one for K and one for V of each layer. They map
the largest numbers of ShareGPT conversations to e4m3's largest number.

    python -m integration.calibrated FOLDER [--model smollm2] [--num-tokens 8192]
    python -m integration.perplexity --engine vllm --model FOLDER --kv-cache-dtypes bfloat16 fp8_e4m3

Conversations are taken from the end of the file: integration.perplexity scores the first ones.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from integration.model import resolve_model
from integration.perplexity import cut_texts
from integration.sharegpt import conversation_texts, dataset_file
from integration.text import tokenizer_of

LONGEST = 512  # tokens of a text


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path, help="for the copy; must not exist")
    parser.add_argument(
        "--model", default="smollm2", help="as of integration.perplexity; default: %(default)s"
    )
    parser.add_argument("--dataset", default="sharegpt", help="sharegpt, or FILE.json in its form")
    parser.add_argument("--num-tokens", type=int, default=8192, help="default: %(default)s")
    arguments = parser.parse_args()
    if arguments.folder.exists():
        parser.error(f"folder: {arguments.folder} exists, must be a new one")
    from integration.features.float8 import calibrate

    model = resolve_model(arguments.model, sys.executable).folder
    if not (model / "model.safetensors").is_file():
        parser.error(f"model: {model} has no model.safetensors, must have its weights in this one file")
    tokenizer = tokenizer_of(model)
    texts = (
        tokenizer.encode(text[: LONGEST * 16]).ids
        for text in reversed(conversation_texts(dataset_file(arguments.dataset)))
    )
    calibrate(model, arguments.folder, cut_texts(texts, arguments.num_tokens, LONGEST))
    print(arguments.folder)


if __name__ == "__main__":
    main()
