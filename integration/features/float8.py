"""Models with an e4m3 KV cache and scales, as NVIDIA's ModelOpt writes them. Also transformers with the same
rounding, in float32.

One of the two small models also has e4m3 output projections. Their V is so small that without its scale it
would round to zero. K is unchanged: an engine may round queries without a scale, and queries would lose what
K gains.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import AutoModelForCausalLM
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

LARGEST = torch.finfo(torch.float8_e4m3fn).max
V_FACTOR = 2.0**-14  # exact in bfloat16; the output projection compensates for it
PROJECTIONS = ("q_proj", "k_proj", "v_proj", "qkv_proj", "gate_proj", "up_proj", "gate_up_proj", "down_proj")
ATTENTION = "attention_over_float8"
KV_SCALES = {"k": "k_proj.k_scale", "v": "v_proj.v_scale"}


def make_values_small(model: Path) -> None:
    """Changes weights of a Llama."""
    file = model / "model.safetensors"
    factors = {"v_proj": V_FACTOR, "o_proj": 1 / V_FACTOR}
    save_file(
        {name: weight * factors.get(name.split(".")[-2], 1) for name, weight in load_file(file).items()},
        file,
        {"format": "pt"},
    )


def make_checkpoints(model: Path, largest: dict[str, Tensor], cache: Path, with_outputs: Path) -> None:
    """Writes both checkpoints of a Llama.

    Args:
        model: its folder. Its output projections become the ones in `with_outputs`.
        largest: the largest value of K, V and the output projection's input in each layer, by the names of
            their scales.
        cache: a folder for the checkpoint with an 8-bit cache.
        with_outputs: a folder for the checkpoint that also has 8-bit output projections.
    """
    weights = load_file(model / "model.safetensors")
    scales = {name: value / LARGEST for name, value in largest.items()}
    quantized: dict[str, Tensor] = {}
    for name, weight in weights.items():
        if name.endswith("o_proj.weight"):
            scale = weight.abs().max() / LARGEST
            quantized |= {name: (weight / scale).to(torch.float8_e4m3fn), f"{name}_scale": scale}
            weights[name] = quantized[name].float() * scale
    save_file(weights, model / "model.safetensors", {"format": "pt"})
    kv_scales = {name: scale for name, scale in scales.items() if name.endswith(tuple(KV_SCALES.values()))}
    for folder, more, excluded in (
        (cache, kv_scales, ("o_proj", *PROJECTIONS)),
        (with_outputs, scales | quantized, PROJECTIONS),
    ):
        copy_with(model, weights | more, folder, excluded)


def copy_with(model: Path, weights: dict[str, Tensor], folder: Path, excluded: tuple[str, ...]) -> None:
    """Writes a copy of a model with other weights, which declares an e4m3 cache.

    Args:
        excluded: modules whose weights are not quantized.
    """
    folder.mkdir()
    for file in model.iterdir():
        if file.is_file() and file.name != "model.safetensors":
            (folder / file.name).write_bytes(file.read_bytes())
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    config = json.loads((model / "config.json").read_text())
    config["quantization_config"] = {
        "quant_method": "modelopt",
        "quant_algo": "FP8",
        "kv_cache_scheme": {"type": "float", "num_bits": 8, "dynamic": False},
        "ignore": ["lm_head", *(f"*{name}*" for name in excluded)],
    }
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")


def calibrate(model: Path, folder: Path, texts: list[list[int]]) -> None:
    """Writes a copy of a model whose scales map the largest K and V of each layer to e4m3's largest number.

    Args:
        texts: token ids.
    """
    with torch.no_grad():
        whole = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
        largest = largest_numbers(
            whole, lambda: [whole(input_ids=torch.tensor([text]), use_cache=False) for text in texts]
        )
    scales = {
        name: value / LARGEST for name, value in largest.items() if name.endswith(tuple(KV_SCALES.values()))
    }
    copy_with(model, load_file(model / "model.safetensors") | scales, folder, ("o_proj", *PROJECTIONS))


def largest_numbers(model: nn.Module, run: Callable[[], object]) -> dict[str, Tensor]:
    """The `largest` of make_checkpoints(). run: runs the model on calibration text."""
    largest: dict[str, Tensor] = {}

    def note(name: str, values: Tensor) -> None:
        largest[name] = torch.maximum(values.abs().max(), largest.get(name, torch.zeros(())))

    _round_in(model, note)
    run()
    return largest


def round_as(model: nn.Module, checkpoint: Path) -> None:
    """Applies the checkpoint's rounding: K and V, and the inputs of output projections."""
    scales = {
        name: scale.float()
        for name, scale in load_file(checkpoint / "model.safetensors").items()
        if name.endswith("scale")
    }

    def rounded(name: str, values: Tensor) -> Tensor | None:
        if name not in scales:
            return None
        return (values / scales[name]).clamp(-LARGEST, LARGEST).to(torch.float8_e4m3fn).float() * scales[name]

    _round_in(model, rounded)


def round_rows(model: nn.Module, dtype: torch.dtype) -> None:
    """Rounds K and V as a cache with a scale for each token and head does.

    Args:
        dtype: of the cache, int8 or float8_e4m3fn.
    """
    largest = float(torch.iinfo(dtype).max if dtype == torch.int8 else torch.finfo(dtype).max)

    def rounded(name: str, values: Tensor) -> Tensor | None:
        if not name.endswith(tuple(KV_SCALES.values())):
            return None
        scale = (values.abs().amax(-1, keepdim=True) / largest).clamp(min=1e-6)
        elements = values / scale
        return (elements.round() if dtype == torch.int8 else elements.to(dtype).float()) * scale

    _round_in(model, rounded)


def _round_in(model: nn.Module, change: Callable[[str, Tensor], Tensor | None]) -> None:
    """Calls change() with K, V and the output projection's input of each layer, and the names of their
    scales; it may replace them.
    """

    def attention(module: Any, query: Tensor, key: Tensor, value: Tensor, *rest: Any, **more: Any) -> Any:
        layer = f"model.layers.{module.layer_idx}.self_attn."
        kv = [change(f"{layer}{KV_SCALES[name]}", of) for name, of in (("k", key), ("v", value))]
        return sdpa_attention_forward(
            module, query, key if kv[0] is None else kv[0], value if kv[1] is None else kv[1], *rest, **more
        )

    def before_projection(name: str) -> Callable[[nn.Module, tuple[Tensor, ...]], Tensor | None]:
        return lambda module, inputs: change(f"{name}.input_scale", inputs[0])

    ALL_ATTENTION_FUNCTIONS[ATTENTION] = attention
    model.set_attn_implementation(ATTENTION)  # type: ignore[operator]
    for name, module in model.named_modules():
        if name.endswith("o_proj"):
            module.register_forward_pre_hook(before_projection(name))
