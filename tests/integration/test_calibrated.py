"""A copy of a model with scales for an e4m3 cache."""

from __future__ import annotations

import json

import pytest
import torch
import transformers
from safetensors.torch import load_file
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from integration.features.float8 import LARGEST, calibrate
from integration.features.model import LLAMA
from integration.tiny_models.checkpoints import make_model

TEXTS = [[1, 5, 7, 9], [4, 6, 11]]


@pytest.fixture
def model(tmp_path):
    make_model(LLAMA, tmp_path / "model")
    return tmp_path / "model"


def largest_of_first_layer(folder, texts):
    """The largest K and V, computed from the projections without attention. K is after RoPE."""
    model = transformers.LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32)
    layer, largest = model.model.layers[0], [0.0, 0.0]
    for text in texts:
        x = layer.input_layernorm(model.model.embed_tokens(torch.tensor([text])))
        heads = (1, len(text), -1, model.config.head_dim)
        k, v = (
            projection(x).view(heads).transpose(1, 2)
            for projection in (layer.self_attn.k_proj, layer.self_attn.v_proj)
        )
        _, k = apply_rotary_pos_emb(k, k, *model.model.rotary_emb(x, torch.arange(len(text))[None]))
        largest = [max(old, float(new.abs().max())) for old, new in zip(largest, (k, v), strict=True)]
    return largest


@torch.no_grad()
def test_scales_map_the_largest_numbers(model, tmp_path):
    for name, texts in (("copy", TEXTS), ("fewer", TEXTS[1:])):
        calibrate(model, tmp_path / name, texts)
        weights, copied = (load_file(folder / "model.safetensors") for folder in (model, tmp_path / name))
        scales = {key: float(value) for key, value in copied.items() if key not in weights}
        layers = json.loads((model / "config.json").read_text())["num_hidden_layers"]
        assert len(scales) == 2 * layers
        assert all(torch.equal(weight, copied[key]) for key, weight in weights.items())
        first = [scales[f"model.layers.0.self_attn.{side}_proj.{side}_scale"] for side in "kv"]
        assert [scale * LARGEST for scale in first] == pytest.approx(largest_of_first_layer(model, texts))
    config = json.loads((tmp_path / "copy" / "config.json").read_text())
    assert config["quantization_config"]["kv_cache_scheme"]["num_bits"] == 8
