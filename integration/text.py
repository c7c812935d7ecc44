"""Text with an exact number of tokens under a given tokenizer, and real text for tokenizers that cannot read
it.
"""

from __future__ import annotations

import random
import re
import zlib
from functools import cached_property
from pathlib import Path
from typing import Any

POOL_SIZE = 1000
# Splits text into about as many pieces as a trained tokenizer: on 1,500 ShareGPT exchanges 0.97 times
# SmolLM2's tokens, medians within 4 %.
PIECE = re.compile(r"[A-Za-z]{1,8}|[0-9]{1,3}|\S")


def tokenizer_of(model_folder: Path) -> Any:
    """The tokenizer of a model. Raises ValueError if its folder has none."""
    from tokenizers import Tokenizer

    file = model_folder / "tokenizer.json"
    if not file.is_file():
        raise ValueError(
            f"model: {model_folder} has no tokenizer.json, which is needed to count the tokens of prompts"
        )
    return Tokenizer.from_file(str(file))


class TextMaker:
    """Makes random texts of single-token words by `seed`, practically all different."""

    def __init__(self, model_folder: Path, seed: int) -> None:
        self.tokenizer = tokenizer_of(model_folder)
        self.special_tokens = self.tokenizer.num_special_tokens_to_add(False)
        self.random = random.Random(seed)

    @cached_property
    def words(self) -> list[str]:
        ids = list(range(self.tokenizer.get_vocab_size()))
        random.Random(0).shuffle(ids)
        words: list[str] = []
        for token_id in ids:
            word = self.tokenizer.decode([token_id]).strip()
            if (
                word.isascii()
                and word.isalnum()
                and self.tokenizer.encode(f" {word}", add_special_tokens=False).ids == [token_id]
            ):
                words.append(word)
            if len(words) == POOL_SIZE:
                break
        if not words:
            raise ValueError(
                "model: its tokenizer has no single-token words, so texts of prescribed lengths cannot be "
                "made"
            )
        return words

    @cached_property
    def reads_text(self) -> bool:
        """False for the tokenizer of integration/tokenizer.py, which maps every word of a real text to the
        same unknown token.
        """
        return (
            len(set(self.tokenizer.encode("The quick brown fox jumps over it", add_special_tokens=False).ids))
            > 1
        )

    def text(self, num_tokens: int) -> str:
        """A text that the tokenizer turns into `num_tokens` tokens, not counting those that it adds."""
        return "".join(f" {self.random.choice(self.words)}" for _ in range(num_tokens))

    def readable(self, text: str) -> str:
        """`text`; for a tokenizer that cannot read it, the same text in the tokenizer's words, one for each
        piece.

        Equal pieces become equal words, so two texts share the same prefix as before. Unchanged, all prompts
        would repeat one unknown token, each a prefix of the longer ones. The engines' prefix caches would
        then answer nearly all of every prompt.
        """
        if self.reads_text:
            return text
        return "".join(
            f" {self.words[zlib.crc32(piece.encode()) % len(self.words)]}" for piece in PIECE.findall(text)
        )

    def count(self, text: str) -> int:
        """Number of tokens of `text`, including those that the tokenizer adds."""
        return len(self.tokenizer.encode(text).ids)
