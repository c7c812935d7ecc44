"""A model of the Llama architecture in plain PyTorch: weights from a folder or the hub, or a small random
one. The caller provides attention.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from packages import needs
from torch import Tensor
from torch.nn.functional import linear, rms_norm, silu

from attn_backend.machine import VARIABLE, cache_folder
from attn_backend.variants import builtin

# (layer, q, k, v) -> attention output, all [tokens, heads, head_dim]
Attend = Callable[[int, Tensor, Tensor, Tensor], Tensor]

TINY = {
    "vocab_size": 256,
    "hidden_size": 192,
    "intermediate_size": 512,
    "num_hidden_layers": 4,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "max_position_embeddings": 256,
}


@dataclass
class Llama:
    """weights: by their names in a checkpoint. frequencies: float64 [head_dim / 2], radians per position."""

    config: dict[str, Any]
    weights: dict[str, Tensor]
    frequencies: Tensor
    encode: Callable[[str], list[int]]
    decode: Callable[[list[int]], str]

    @property
    def num_layers(self) -> int:
        return int(self.config["num_hidden_layers"])

    @property
    def heads(self) -> tuple[int, int, int]:
        """Query heads, KV heads, head_dim."""
        config = self.config
        num_heads = config["num_attention_heads"]
        return (
            num_heads,
            config.get("num_key_value_heads") or num_heads,
            config.get("head_dim") or config["hidden_size"] // num_heads,
        )

    @property
    def embedding(self) -> Tensor:
        return self.weights["model.embed_tokens.weight"]

    @torch.inference_mode()
    def forward(self, tokens: Tensor, attend: Attend, wanted: Tensor | None = None) -> Tensor:
        """Logits [rows of `wanted`, vocab] of tokens [tokens]; wanted: which rows; None: all."""
        head_dim = self.heads[2]
        hidden = self.embedding[tokens]
        for layer in range(self.num_layers):
            name = f"model.layers.{layer}."
            x = self._norm(hidden, f"{name}input_layernorm")
            q, k, v = (
                self._linear(x, f"{name}self_attn.{part}_proj").unflatten(1, (-1, head_dim)) for part in "qkv"
            )
            hidden = hidden + self._linear(attend(layer, q, k, v).flatten(1), f"{name}self_attn.o_proj")
            x = self._norm(hidden, f"{name}post_attention_layernorm")
            gated = silu(self._linear(x, f"{name}mlp.gate_proj")) * self._linear(x, f"{name}mlp.up_proj")
            hidden = hidden + self._linear(gated, f"{name}mlp.down_proj")
        hidden = self._norm(hidden if wanted is None else hidden[wanted], "model.norm")
        return linear(hidden, self.weights.get("lm_head.weight", self.embedding))

    def _linear(self, x: Tensor, name: str) -> Tensor:
        return linear(x, self.weights[f"{name}.weight"], self.weights.get(f"{name}.bias"))

    def _norm(self, x: Tensor, name: str) -> Tensor:
        return rms_norm(x, x.shape[-1:], self.weights[f"{name}.weight"], self.config["rms_norm_eps"])


def load(model: str | None, device: str) -> Llama:
    """model: a folder with config.json, *.safetensors and tokenizer.json, or a name on the hub; None: a small
    random model of bytes.
    """
    dtype = torch.bfloat16 if device.startswith("cuda") else torch.float32
    if model is None:
        print("A small random model, whose text is noise. --model takes a real one.\n", file=sys.stderr)
        return Llama(
            TINY,
            {name: w.to(device, dtype) for name, w in random_weights(TINY).items()},
            frequencies_of(TINY),
            byte_tokens,
            byte_text,
        )
    with needs("safetensors", "tokenizers"):
        from safetensors.torch import load_file
        from tokenizers import Tokenizer

    folder = Path(model)
    if not folder.is_dir():
        with needs("huggingface_hub"):
            from huggingface_hub import snapshot_download

        try:
            folder = Path(snapshot_download(model, allow_patterns=["*.json", "*.safetensors"]))
        except (OSError, ValueError) as error:
            sys.exit(
                f"error: --model is {model!r}, must be a folder, or a name that the hub gives: {error}\n"
                "Without the hub: pass a folder, or `--model random` to streaming_llm.py"
            )
    config = json.loads((folder / "config.json").read_text())
    weights: dict[str, Tensor] = {}
    for file in sorted(folder.glob("*.safetensors")):
        weights |= {name: w.to(device, dtype) for name, w in load_file(file).items()}
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    return Llama(
        config, weights, frequencies_of(config), lambda text: tokenizer.encode(text).ids, tokenizer.decode
    )


def frequencies_of(config: dict[str, Any]) -> Tensor:
    head_dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    scaling = config.get("rope_parameters") or config.get("rope_scaling") or {}
    theta = scaling.get("rope_theta") or config.get("rope_theta", 10000.0)
    kind = scaling.get("rope_type", "default")
    if kind == "llama3":
        names = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
        return builtin.llama3_frequencies(head_dim, theta, **{name: scaling[name] for name in names})
    if kind != "default":
        raise ValueError(
            f"rope_type of the model's config is {kind!r}; this example knows default and llama3"
        )
    return builtin.rope_frequencies(head_dim, theta)


def random_weights(config: dict[str, Any], seed: int = 0) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    q_size, kv_size = (
        config[f"num_{kind}_heads"] * config["head_dim"] for kind in ("attention", "key_value")
    )
    shapes = {
        "q_proj": (q_size, hidden),
        "k_proj": (kv_size, hidden),
        "v_proj": (kv_size, hidden),
        "o_proj": (hidden, q_size),
    }
    mlp = {"gate_proj": (inner, hidden), "up_proj": (inner, hidden), "down_proj": (hidden, inner)}

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator) * shape[-1] ** -0.5

    weights = {
        "model.embed_tokens.weight": torch.randn(config["vocab_size"], hidden, generator=generator),
        "model.norm.weight": torch.ones(hidden),
    }
    weights["lm_head.weight"] = random(config["vocab_size"], hidden)
    for layer in range(config["num_hidden_layers"]):
        name = f"model.layers.{layer}."
        weights |= {f"{name}self_attn.{part}.weight": random(*shape) for part, shape in shapes.items()}
        weights |= {f"{name}mlp.{part}.weight": random(*shape) for part, shape in mlp.items()}
        weights |= {
            f"{name}{norm}.weight": torch.ones(hidden)
            for norm in ("input_layernorm", "post_attention_layernorm")
        }
    return weights


def byte_tokens(text: str) -> list[int]:
    return list(text.encode())


def byte_text(tokens: list[int]) -> str:
    """Letters unchanged; a dot for bytes that a terminal may interpret, since a random model prints any
    byte.
    """
    return "".join(chr(token) if 32 <= token < 127 else "·" for token in tokens)


def small_model() -> str:
    """SmolLM2-135M: the folder that `make demo` filled, or its name on the hub."""
    folder = cache_folder(os.environ.get(VARIABLE)) / "models/smollm2-135m-instruct"
    return str(folder) if (folder / "config.json").is_file() else "HuggingFaceTB/SmolLM2-135M-Instruct"


def pick_device(wanted: str | None) -> str:
    return wanted or ("cuda" if torch.cuda.is_available() else "cpu")
