"""Text with an exact number of tokens under a given tokenizer, for workloads that prescribe lengths."""

from __future__ import annotations

import random
from pathlib import Path

POOL_SIZE = 1000


class TextMaker:
    """Makes random texts of single-token words, all different for all practical purposes."""

    def __init__(self, model_folder: Path, seed: int) -> None:
        from tokenizers import Tokenizer

        self.tokenizer = Tokenizer.from_file(str(model_folder / "tokenizer.json"))
        self.special_tokens = self.tokenizer.num_special_tokens_to_add(False)
        self.random = random.Random(seed)
        self.words = self._single_token_words()

    def _single_token_words(self) -> list[str]:
        ids = list(range(self.tokenizer.get_vocab_size()))
        random.Random(0).shuffle(ids)
        words: list[str] = []
        for token_id in ids:
            word = self.tokenizer.decode([token_id]).strip()
            if word.isascii() and word.isalnum() and self.tokenizer.encode(f" {word}", add_special_tokens=False).ids == [token_id]:
                words.append(word)
            if len(words) == POOL_SIZE:
                break
        if not words:
            raise ValueError("model: its tokenizer has no single-token words, so texts of prescribed lengths cannot be made")
        return words

    def text(self, num_tokens: int) -> str:
        """A text that the tokenizer turns into `num_tokens` tokens, those that it adds by itself not counted."""
        return "".join(f" {self.random.choice(self.words)}" for _ in range(num_tokens))

    def count(self, text: str) -> int:
        """Number of tokens of `text`, with those that the tokenizer adds by itself."""
        return len(self.tokenizer.encode(text).ids)
