"""Writes a hybrid with random weights whose tokenizer can spell JSON, for soaks without a downloaded model.

    python -m integration.soak_model FOLDER [--family qwen3_next]
    python -m integration.soak --engine vllm --model FOLDER ...

Needs transformers, tokenizers and safetensors.
"""

from __future__ import annotations

import argparse
import itertools
import json
import string
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from integration.command_line import one_of
from integration.tiny_models import hybrids
from integration.tiny_models.compare import HYBRIDS

# muse_glimmer takes images
FAMILIES = {name: getattr(hybrids, name) for name in HYBRIDS if name != "muse_glimmer"}
SPECIAL = ("<pad>", "<s>", "</s>")
WORD = "Ġ"  # a space, in byte-level tokenizers
SIZES = {
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": 4096,
}


# Scales of a model with drafts: the next token then depends mostly on the last one.
EMBEDDING, DRAFTED_EMBEDDING = 64.0, 4.0
# GDN's: blocks are then shorter than prompts, and prefixes are cached
SMALL_STATES = {"linear_num_value_heads": 2}


def write_text_tokenizer(folder: Path) -> int:
    """Writes a tokenizer with a token for each printable character of ASCII, and for a space with one or two
    letters. Random models would write control characters, which JSON does not allow.

    Returns:
        The size of its vocabulary.
    """
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    letters = string.ascii_lowercase
    merges = [(WORD, letter) for letter in letters]
    merges += [(WORD + first, second) for first, second in itertools.product(letters, letters)]
    characters = [WORD, *map(chr, range(ord("!"), ord("~") + 1))]
    tokens = [*SPECIAL, *characters, *("".join(merge) for merge in merges)]
    model = models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=merges)
    tokenizer = Tokenizer(model)
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(name, special=True) for name in SPECIAL])
    tokenizer.save(str(folder / "tokenizer.json"))
    config = dict(zip(("pad_token", "bos_token", "eos_token"), SPECIAL, strict=True))
    config |= {"tokenizer_class": "PreTrainedTokenizerFast"}
    (folder / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")
    return len(tokens)


def add_drafts(folder: Path) -> None:
    """Adds a layer that drafts the next token from the last one, so that some drafts are accepted."""
    path = folder / "model.safetensors"
    weights = load_file(path)
    hybrids.add_mtp_layer(weights)
    fc = weights["mtp.fc.weight"]  # its inputs: the last token's embedding, then the model's state
    weights["mtp.fc.weight"] = DRAFTED_EMBEDDING * torch.eye(*fc.shape)
    save_file(weights, path, {"format": "pt"})


def make(folder: Path, family: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    pad, bos, eos = range(len(SPECIAL))
    special = {"pad_token_id": pad, "bos_token_id": bos, "eos_token_id": eos}
    config, kind = FAMILIES[family](SIZES | special | {"vocab_size": write_text_tokenizer(folder)})
    for name in SMALL_STATES.keys() & vars(config).keys():
        setattr(config, name, SMALL_STATES[name])
    torch.manual_seed(0)
    model = kind._from_config(config, dtype=torch.bfloat16)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim >= 2:
                parameter.normal_(0, 1.2 * parameter.shape[-1] ** -0.5)
        if family == "qwen3_next_mtp":
            model.get_input_embeddings().weight *= EMBEDDING
    model.save_pretrained(folder)
    if family == "qwen3_next_mtp":
        add_drafts(folder)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path)
    parser.add_argument("--family", default="qwen3_next", type=one_of(FAMILIES), help="default: %(default)s")
    given = parser.parse_args()
    make(given.folder, given.family)


if __name__ == "__main__":
    main()
