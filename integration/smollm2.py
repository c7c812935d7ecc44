"""Copies of SmolLM2-135M-Instruct (integration/gguf_models.py) with more heads or fewer layers.

Two GPUs cannot share 9 heads. `--kv-heads 4` makes a copy with 12 query heads and 4 KV heads; the added ones
change nothing. `--draft` makes a copy without one layer. Its most probable token equals the model's seven
times in ten, so as a draft model it is neither always right nor always wrong. The engine's interpreter runs
this module: `python -m integration.smollm2`.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
from pathlib import Path

from integration.cache import cached_folder
from integration.gguf_models import MODELS, model_folder

CACHE_NAME = MODELS["smollm2"].cache_name
LEFT_OUT = 20  # the layer that the draft lacks
KV_HEADS = 3
WITH_MORE_HEADS = 4  # KV heads of the copy that two GPUs, or four, can share


def cache_name(kv_heads: int) -> str:
    return CACHE_NAME if kv_heads == KV_HEADS else f"{CACHE_NAME}-{kv_heads}-kv-heads"


def add_heads(model: Path, target: Path, kv_heads: int) -> None:
    """Copy a Llama of one safetensors file and give it `kv_heads` KV heads, with as many query heads for each
    as before. The added ones are zero, also in the output projection, so its answers stay the same.

    Raises:
        ValueError: it already has more KV heads.
    """
    import torch
    from safetensors.torch import load_file, save_file

    config = json.loads((model / "config.json").read_text())
    had = config["num_key_value_heads"]
    if kv_heads < had:
        raise ValueError(f"kv_heads: {kv_heads}, must be at least the {had} of {model}")
    shutil.copytree(model, target, dirs_exist_ok=True)
    head_dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    group = config["num_attention_heads"] // had
    config |= {"head_dim": head_dim, "num_attention_heads": group * kv_heads, "num_key_value_heads": kv_heads}
    (target / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    weights = load_file(model / "model.safetensors")
    for name, weight in weights.items():
        added = (kv_heads - had) * head_dim * (1 if ".k_proj." in name or ".v_proj." in name else group)
        if ".o_proj." in name:
            weights[name] = torch.cat([weight, weight.new_zeros(weight.shape[0], added)], 1)
        elif any(f".{projection}_proj." in name for projection in "qkv"):
            weights[name] = torch.cat([weight, weight.new_zeros(added, weight.shape[1])])
    save_file(weights, target / "model.safetensors", {"format": "pt"})


def leave_out_layer(model: Path, target: Path, layer: int) -> None:
    """Copy a Llama of one safetensors file without one of its layers."""
    from safetensors.torch import load_file, save_file

    def renumbered(name: str) -> str:
        parts = name.split(".")
        if ".layers." in name and int(parts[2]) > layer:
            parts[2] = str(int(parts[2]) - 1)
        return ".".join(parts)

    config = json.loads((model / "config.json").read_text())
    shutil.copytree(model, target, dirs_exist_ok=True)
    (target / "config.json").write_text(
        json.dumps(config | {"num_hidden_layers": config["num_hidden_layers"] - 1}, indent=2) + "\n",
        encoding="utf-8",
    )
    weights = {
        renumbered(name): weight
        for name, weight in load_file(model / "model.safetensors").items()
        if f".layers.{layer}." not in name
    }
    save_file(weights, target / "model.safetensors", {"format": "pt"})


def draft_folder() -> Path:
    return cached_folder(
        f"{CACHE_NAME}-draft", lambda folder: leave_out_layer(smollm2_folder(), folder, LEFT_OUT)
    )


def smollm2_folder(kv_heads: int = KV_HEADS) -> Path:
    """Folder with the model, downloaded and converted on the first call."""
    if kv_heads != KV_HEADS:
        return cached_folder(
            cache_name(kv_heads), lambda folder: add_heads(smollm2_folder(), folder, kv_heads)
        )

    return model_folder("smollm2")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--kv-heads",
        type=int,
        choices=[KV_HEADS, WITH_MORE_HEADS],
        default=KV_HEADS,
        help="default: %(default)s, what it was trained with",
    )
    parser.add_argument("--draft", action="store_true", help="the copy that lacks a layer")
    given = parser.parse_args()
    try:
        print(draft_folder() if given.draft else smollm2_folder(given.kv_heads))
    except RuntimeError as error:
        sys.exit(f"error: {error}")
    except KeyboardInterrupt:
        sys.exit(130)
