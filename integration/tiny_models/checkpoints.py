"""Writes a family's checkpoint: configuration, random weights, tokenizer, and a processor if there is one, in
the form of published checkpoints.

python -m integration.tiny_models.checkpoints FOLDER [FAMILY ...]           # default: all of them; needs
transformers
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file, save_file

from integration.command_line import one_of
from integration.tiny_models.families import (
    AUDIO_SECONDS,
    COMMON,
    FAMILIES,
    GEMMA4_PATCHES,
    MEL_BINS,
    Family,
    Images,
)
from integration.tiny_models.hybrids import add_mtp_layer
from integration.tiny_models.tokenizer import write_tokenizer


def make_model(family: Family, folder: Path) -> None:
    """Writes a model of the family, with random weights large enough that every token matters."""
    config, model_class = family.make()
    torch.manual_seed(0)
    model = model_class._from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "vision_tower" in name and "mlp.fc2" in name:
                parameter.zero_()  # it follows an activation that differs in SGLang
            elif parameter.ndim >= 2:
                parameter.normal_(0, 1.2 * parameter.shape[-1] ** -0.5)
            elif "q_norm" in name and config.model_type == "gemma4":
                parameter.fill_(3 * parameter.shape[0] ** -0.5)  # nothing else scales its logits
            elif "sinks" in name:
                parameter.copy_(parameter.normal_(0, 2).bfloat16())  # SGLang stores them in bfloat16
            elif "bias" in name:
                parameter.normal_(0, 0.1)
    model.save_pretrained(folder)
    if config.model_type == "gemma4":
        _write_published_widths(folder / "config.json")
    if config.model_type in PUBLISHED_LAYERS:
        _write_published_layers(folder / "config.json")
    if family.name == "gemma3n" or config.model_type == "gemma4":
        _write_unread_weights(folder / "model.safetensors", config.get_text_config())
    write_tokenizer(folder, tells_texts=family.kind == "score")
    if family.name == "gemma3":
        # as in checkpoints; transformers reads both
        _rename_weights(folder / "model.safetensors", "vision_tower.", "vision_tower.vision_model.")
    if family.name == "qwen3_next_mtp":
        weights = load_file(folder / "model.safetensors")
        add_mtp_layer(weights)
        save_file(weights, folder / "model.safetensors", {"format": "pt"})
    if family.name == "kimi_linear":
        # the same, for layers without experts
        _rename_weights(folder / "model.safetensors", "block_sparse_moe.", "mlp.")
    if family.images is not None:
        PROCESSORS[config.model_type](family.images, folder).save_pretrained(folder)
    if family.pools_mean:
        _write_mean_pooling(folder)
    if family.kind == "audio":
        transformers.WhisperFeatureExtractor(
            feature_size=MEL_BINS, chunk_length=AUDIO_SECONDS
        ).save_pretrained(folder)


def _gemma3_processor(images: Images, folder: Path) -> Any:
    pixels = transformers.Gemma3ImageProcessor(size=dict(zip(("height", "width"), images.size, strict=True)))
    return transformers.Gemma3Processor(
        pixels, transformers.AutoTokenizer.from_pretrained(folder), image_seq_length=images.length
    )


def _gemma4_processor(images: Images, folder: Path) -> Any:
    # the processor insists on them
    unused = dict.fromkeys(("audio_token", "boa_token", "eoa_token"), "<unk>")
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder, **unused)
    patches = transformers.Gemma4ImageProcessor(max_soft_tokens=images.length, **GEMMA4_PATCHES)
    return transformers.Gemma4Processor(
        transformers.Gemma4AudioFeatureExtractor(), patches, tokenizer, transformers.Gemma4VideoProcessor()
    )


# makes tokens and pixels of prompts, by the model's type
PROCESSORS = {"gemma3": _gemma3_processor, "gemma4": _gemma4_processor}


def _write_published_widths(file: Path) -> None:
    """Writes the head widths of Gemma 4 as in published checkpoints. transformers reads this form, but writes
    a list of layers, which older engines do not know.
    """
    config = json.loads(file.read_text())
    text = config["text_config"]
    if layers := text.pop("per_layer_config", None):
        widths = next(iter(layers.values()))
        text |= {
            "global_head_dim": widths["head_dim"],
            "num_global_key_value_heads": widths["num_key_value_heads"],
        }
    file.write_text(json.dumps(config, indent=2) + "\n")


# transformers 5 has other names for layers, which older engines do not know; it reads these, too
PUBLISHED_LAYERS = {
    "granitemoehybrid": {"linear_attention": "mamba", "full_attention": "attention"},
    "nemotron_h": {"linear_attention": "M", "full_attention": "*", "mlp": "-"},
}


def _write_published_layers(file: Path) -> None:
    config = json.loads(file.read_text())
    names = PUBLISHED_LAYERS[config["model_type"]]
    if "layers_block_type" in config:  # Nemotron-H
        layers = config.pop("layers_block_type")
        config["hybrid_override_pattern"] = "".join(names[layer] for layer in layers)
        config["num_hidden_layers"] = len(layers)
        del config["mtp_layers_block_type"]
    else:
        config["layer_types"] = [names[layer] for layer in config["layer_types"]]
    file.write_text(json.dumps(config, indent=2) + "\n")


def _write_unread_weights(file: Path, config: Any) -> None:
    """Gives layers that read another layer's cache separate K and V, as in published checkpoints.

    They are not read, but vLLM 0.26 requires them.
    """
    weights, own = load_file(file), config.num_hidden_layers - config.num_kv_shared_layers
    for name, weight in list(weights.items()):
        before, _, after = name.partition("layers.")
        layer, _, part = after.partition(".")
        if "vision" not in before and part.startswith(("self_attn.k_", "self_attn.v_")) and int(layer) < own:
            weights[f"{before}layers.{int(layer) + own}.{part}"] = weight.clone()
    save_file(weights, file, {"format": "pt"})


def _write_mean_pooling(folder: Path) -> None:
    """Engines look there for the pooling of sentence-transformers."""
    modules = {"": "Transformer", "1_Pooling": "Pooling", "2_Normalize": "Normalize"}
    listed = [
        {"idx": i, "name": str(i), "path": path, "type": f"sentence_transformers.models.{module}"}
        for i, (path, module) in enumerate(modules.items())
    ]
    (folder / "modules.json").write_text(json.dumps(listed))
    (folder / "1_Pooling").mkdir(exist_ok=True)
    (folder / "1_Pooling" / "config.json").write_text(
        json.dumps({"word_embedding_dimension": COMMON["hidden_size"], "pooling_mode_mean_tokens": True})
    )


def _rename_weights(file: Path, old: str, new: str) -> None:
    weights = load_file(file)
    save_file(
        {name if new in name else name.replace(old, new): weight for name, weight in weights.items()},
        file,
        {"format": "pt"},
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path)
    parser.add_argument(
        "families", nargs="*", default=list(FAMILIES), metavar="FAMILY", type=one_of(FAMILIES)
    )
    arguments = parser.parse_args()
    for name in arguments.families:
        make_model(FAMILIES[name], arguments.folder / name)


if __name__ == "__main__":
    main()
