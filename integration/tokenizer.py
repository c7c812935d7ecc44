"""A word-level tokenizer for models without one (random weights, only a config): entry i is the word `t<i>`,
all with one length.

Every token decodes to visible text, so a client that waits for text sees each one, and a text of n words has
exactly n tokens. Words have one length because transformers also looks for special tokens inside words: it
would split `t1234` in two if `t1` were one.
"""

from __future__ import annotations

import json
from pathlib import Path


def write_word_tokenizer(
    folder: Path, vocab_size: int, bos_token_id: int | None = None, eos_token_id: int | None = None
) -> None:
    """Write `tokenizer.json` and `tokenizer_config.json` with `vocab_size` entries into `folder`."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    digits = len(str(vocab_size - 1))
    words = [f"t{i:0{digits}}" for i in range(vocab_size)]
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token=words[0]))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.save(str(folder / "tokenizer.json"))
    config: dict[str, object] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "unk_token": words[0],
        "model_max_length": 131072,
    }
    if bos_token_id is not None:
        config["bos_token"] = words[bos_token_id]
    if eos_token_id is not None:
        config["eos_token"] = words[eos_token_id]
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2), encoding="utf-8")
