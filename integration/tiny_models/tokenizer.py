"""A tokenizer of words t008, t009, ..., with the special tokens that image and audio models look for."""

from __future__ import annotations

import json
from pathlib import Path

VOCAB = 128
PAD, BOS, EOS = 0, 1, 2
IMAGE_TOKENS = (3, 4, 5)  # of the image, before it, after it
NEWLINES = (6, 7)
FIRST_WORD = 12
_NAMES = [
    "<pad>",
    "<s>",
    "</s>",
    "<image>",
    "<begin_of_image>",
    "<end_of_image>",
    "\n",
    "\n\n",
    "\n\n\n",
    "\n\n\n\n",
    "<unk>",
    "<startoftranscript>",
]
_WORDS = _NAMES + [f"t{i:03}" for i in range(len(_NAMES), VOCAB)]


def text_of(tokens: list[int]) -> str:
    """The text that the tokenizer turns into these tokens."""
    return " ".join(_WORDS[token] for token in tokens)


def write_tokenizer(folder: Path, tells_texts: bool = False) -> None:
    """Writes `tokenizer.json` and `tokenizer_config.json`. tells_texts: marks the text that each token of a
    pair belongs to (`token_type_ids`).
    """
    from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers

    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(_WORDS)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.add_special_tokens([AddedToken(name, special=True, normalized=False) for name in _NAMES])
    tokenizer.save(str(folder / "tokenizer.json"))
    image = dict(zip(("image_token", "boi_token", "eoi_token"), _NAMES[3:6], strict=True))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": 512,
        "extra_special_tokens": image,
    }
    config |= {
        "pad_token": _NAMES[PAD],
        "bos_token": _NAMES[BOS],
        "eos_token": _NAMES[EOS],
        "unk_token": "<unk>",
        **image,
    }
    config |= {"model_input_names": ["input_ids", "token_type_ids", "attention_mask"]} if tells_texts else {}
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2), encoding="utf-8")
