"""Small models with random weights, and transformers' answers. A Llama whose heads two ranks can share, with
a LoRA adapter and EAGLE and DFLASH drafts; and a Llama with one KV head. A MiMo that predicts a second token
by itself (MTP), a DeepSeek (MLA), and a Llama with an 8-bit cache (integration/features/float8.py).
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file, save_file

from integration.compare_tokens import ALTERNATIVES
from integration.engines import Token
from integration.features.float8 import (
    largest_numbers,
    make_checkpoints,
    make_values_small,
    round_as,
    round_rows,
)
from integration.tiny_models.checkpoints import make_model
from integration.tiny_models.families import COMMON, FAMILIES, WINDOW, Family
from integration.tiny_models.tokenizer import FIRST_WORD, PAD, VOCAB

LLAMA = Family(
    "llama",
    "",
    "",
    lambda: (transformers.LlamaConfig(**COMMON, tie_word_embeddings=False), transformers.LlamaForCausalLM),
)
ONE_KV_HEAD = Family(
    "one-kv-head",
    "",
    "",
    lambda: (
        transformers.LlamaConfig(**(COMMON | {"num_key_value_heads": 1})),
        transformers.LlamaForCausalLM,
    ),
)
WIDE = COMMON | {"hidden_size": 4 * COMMON["head_dim"]}  # vLLM computes the head width
MIMO = Family(
    "mimo",
    "",
    "",
    lambda: (transformers.Qwen2Config(**WIDE, tie_word_embeddings=False), transformers.Qwen2ForCausalLM),
)
# 8-bit attention outputs exist for heads of 128 on a GPU.
WIDE_HEADS = COMMON | {"head_dim": 128}
FLOAT8 = Family(
    "float8",
    "",
    "",
    lambda: (
        transformers.LlamaConfig(**WIDE_HEADS, tie_word_embeddings=False),
        transformers.LlamaForCausalLM,
    ),
)
MODELS = {
    "model": LLAMA,
    "one-kv-head": ONE_KV_HEAD,
    "mimo": MIMO,
    "deepseek": FAMILIES["deepseek"],
    "float8": FLOAT8,
}
ROUNDED = ("float8-cache", "float8-outputs")  # checkpoints of "float8" with its roundings
# "model" over a cache of this dtype, with a scale for each token and head
TOKEN_SCALED = {"token-scales-int8": torch.int8, "token-scales-float8": torch.float8_e4m3fn}
PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj")
RANK = 8
ALPHA = 16


def make_models(folder: Path) -> None:
    """Writes MODELS and ROUNDED, and for `model` also `adapter`, `eagle`, `eagle-sglang`, `dflash` and
    `dflash-windows`. Weights are bfloat16 values, as on a GPU's server.
    """
    for name, family in MODELS.items():
        make_model(family, folder / name)
        _round(folder / name / "model.safetensors")
    _make_adapter(folder / "model", folder / "adapter")
    _make_eagle(folder / "model", folder / "eagle", "LlamaForCausalLM")
    _make_eagle(folder / "model", folder / "eagle-sglang", "LlamaForCausalLMEagle")
    _make_dflash(folder / "model", folder / "dflash", ["full_attention", "sliding_attention"])
    _make_dflash(folder / "model", folder / "dflash-windows", ["sliding_attention", "sliding_attention"])
    _add_mtp_layer(folder / "mimo")
    make_float8(folder)


@torch.no_grad()
def make_float8(folder: Path) -> None:
    """Writes ROUNDED from the model `float8`, and changes its weights."""
    make_values_small(folder / "float8")
    model = transformers.LlamaForCausalLM.from_pretrained(folder / "float8", dtype=torch.float32)
    largest = largest_numbers(
        model, lambda: [model(input_ids=torch.tensor([prompt]), use_cache=False) for prompt in make_prompts()]
    )
    make_checkpoints(folder / "float8", largest, *(folder / name for name in ROUNDED))


def _make_adapter(model: Path, adapter: Path) -> None:
    adapter.mkdir()
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "r": RANK,
        "lora_alpha": ALPHA,
        "lora_dropout": 0.0,
        "bias": "none",
    }
    config |= {"target_modules": list(PROJECTIONS), "base_model_name_or_path": "model"}
    (adapter / "adapter_config.json").write_text(json.dumps(config), encoding="utf-8")
    generator = torch.Generator().manual_seed(1)
    weights = {}
    for name, weight in _projections(model).items():
        rows, columns = weight.shape
        weights[f"base_model.model.{name}.lora_A.weight"] = (
            torch.randn(RANK, columns, generator=generator) * 0.1
        )
        weights[f"base_model.model.{name}.lora_B.weight"] = torch.randn(rows, RANK, generator=generator) * 0.1
    save_file(weights, adapter / "adapter_model.safetensors")
    _round(adapter / "adapter_model.safetensors")


def _make_eagle(model: Path, eagle: Path, architecture: str) -> None:
    """A draft with the model's first layer after an untrained layer: almost none of its tokens is
    accepted.
    """
    eagle.mkdir()
    config = json.loads((model / "config.json").read_text()) | {
        "num_hidden_layers": 1,
        "architectures": [architecture],
    }
    (eagle / "config.json").write_text(json.dumps(config), encoding="utf-8")
    weights = load_file(model / "model.safetensors")
    first_layer = {
        name.removeprefix("model."): weight
        for name, weight in weights.items()
        if ".layers.0." in name and "input_layernorm" not in name
    }
    hidden = config["hidden_size"]
    first_layer["fc.weight"] = (
        torch.randn(hidden, 2 * hidden, generator=torch.Generator().manual_seed(3)) * 0.1
    )
    save_file(first_layer, eagle / "model.safetensors")


def _make_dflash(model: Path, dflash: Path, layer_types: list[str]) -> None:
    """A draft with the model's first layers after an untrained projection of the output of two model layers:
    again almost no token is accepted. Tokens of a block see each other: SGLang reads that from `is_causal`,
    vLLM from `causal`.
    """
    dflash.mkdir()
    config = json.loads((model / "config.json").read_text())
    config |= {
        "architectures": ["DFlashDraftModel"],
        "num_hidden_layers": len(layer_types),
        "layer_types": layer_types,
        "sliding_window": WINDOW,
    }
    config |= {
        "is_causal": False,
        "dflash_config": {"mask_token_id": PAD, "target_layer_ids": [0, 2], "causal": False},
    }
    (dflash / "config.json").write_text(json.dumps(config), encoding="utf-8")
    hidden, head_dim = config["hidden_size"], config["head_dim"]
    weights = {
        name.removeprefix("model."): weight for name, weight in load_file(model / "model.safetensors").items()
    }
    layers = tuple(f"layers.{layer}." for layer in range(len(layer_types)))
    weights = {name: weight for name, weight in weights.items() if name.startswith(layers)}
    weights |= {
        f"{layer}self_attn.{norm}.weight": torch.ones(head_dim)
        for layer in layers
        for norm in ("q_norm", "k_norm")
    }
    weights |= {"hidden_norm.weight": torch.ones(hidden), "norm.weight": torch.ones(hidden)}
    weights["fc.weight"] = torch.randn(hidden, 2 * hidden, generator=torch.Generator().manual_seed(5)) * 0.1
    save_file(weights, dflash / "model.safetensors", {"format": "pt"})


def _add_mtp_layer(model: Path) -> None:
    """Turns a Qwen 2 into a MiMo: again the model's first layer, after an untrained projection."""
    config = json.loads((model / "config.json").read_text())
    config |= {"architectures": ["MiMoForCausalLM"], "num_nextn_predict_layers": 1}
    (model / "config.json").write_text(json.dumps(config), encoding="utf-8")
    weights, mtp = load_file(model / "model.safetensors"), "model.mtp_layers.0."
    hidden = config["hidden_size"]
    weights |= {
        name.replace("model.layers.0.", mtp): weight.clone()
        for name, weight in weights.items()
        if ".layers.0." in name
    }
    weights |= {
        f"{mtp}{name}.weight": torch.ones(hidden)
        for name in ("token_layernorm", "hidden_layernorm", "final_layernorm")
    }
    weights[f"{mtp}input_proj.weight"] = (
        torch.randn(hidden, 2 * hidden, generator=torch.Generator().manual_seed(4)) * 0.1
    )
    save_file(weights, model / "model.safetensors", {"format": "pt"})


def _round(file: Path) -> None:
    save_file(
        {name: weight.bfloat16().float() for name, weight in load_file(file).items()}, file, {"format": "pt"}
    )


def make_prompts() -> list[list[int]]:
    """Four prompts share parts of prefixes; four share none, and the last of these is too long for vLLM to
    keep it in MLA's latents.
    """
    generator = torch.Generator().manual_seed(2)

    def words(count: int) -> list[int]:
        tokens: list[int] = torch.randint(FIRST_WORD, VOCAB, (count,), generator=generator).tolist()
        return tokens

    shared = words(100)
    return [shared[: 70 + 5 * i] + words(8 + 7 * i) for i in range(4)] + [
        words(20 + 50 * i) for i in range(4)
    ]


def base_of(asked: str) -> str:
    """The server's model for this request: one of MODELS or ROUNDED."""
    return "model" if asked == "adapter" or asked in TOKEN_SCALED else asked


@torch.no_grad()
def reference(folder: Path, asked: str, prompts: list[list[int]], num_tokens: int) -> list[list[Token]]:
    """Greedy answers: float32, eager attention, no cache. asked: one of MODELS, ROUNDED or
    TOKEN_SCALED, or "adapter".
    """
    base = "float8" if asked in ROUNDED else base_of(asked)
    model_class = MODELS[base].make()[1]  # for a MiMo, a class without the MTP layer
    model = model_class.from_pretrained(
        folder / base, dtype=torch.float32, attn_implementation="eager"
    ).eval()
    if asked == "adapter":
        weights = load_file(folder / "adapter" / "adapter_model.safetensors")
        for name in _projections(folder / "model"):
            a, b = (weights[f"base_model.model.{name}.lora_{part}.weight"] for part in "AB")
            model.get_submodule(name).weight += ALPHA / RANK * (b @ a)
    if asked == "deepseek":
        _scale_as_yarn(model)
    if asked in ROUNDED:
        round_as(model, folder / asked)
    if asked in TOKEN_SCALED:
        round_rows(model, TOKEN_SCALED[asked])
    answers = []
    for prompt in prompts:
        tokens: list[int] = list(prompt)
        answer: list[Token] = []
        for _ in range(num_tokens):
            logprobs = model(input_ids=torch.tensor([tokens]), use_cache=False).logits[0, -1].log_softmax(-1)
            top = logprobs.topk(ALTERNATIVES)
            alternatives = dict(zip(top.indices.tolist(), top.values.tolist(), strict=True))
            tokens.append(int(logprobs.argmax()))
            answer.append(Token(tokens[-1], float(logprobs[tokens[-1]]), alternatives))
        answers.append(answer)
    return answers


def _scale_as_yarn(model: torch.nn.Module) -> None:
    """Gives attention the softmax scale of YaRN (arXiv 2309.00071, with DeepSeek's `mscale_all_dim`), which
    transformers 5.12 omits in DeepSeek V2.
    """
    for layer in model.modules():
        if isinstance(layer, transformers.models.deepseek_v2.modeling_deepseek_v2.DeepseekV2Attention):
            rope: dict[str, Any] = dict(layer.config.rope_parameters or {})
            layer.scaling = (
                layer.qk_head_dim**-0.5 * (1 + 0.1 * rope["mscale_all_dim"] * math.log(rope["factor"])) ** 2
            )


def _projections(model: Path) -> dict[str, torch.Tensor]:
    """The weights that the adapter changes, by the names of their modules."""
    weights = load_file(model / "model.safetensors")
    return {
        name.removesuffix(".weight"): weight
        for name, weight in weights.items()
        if name.split(".")[-2] in PROJECTIONS
    }
