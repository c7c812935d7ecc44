"""A copy of a model with scales for an e4m3 cache."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_file

from integration.features.float8 import calibrate
from integration.tiny_models.checkpoints import make_model
from integration.tiny_models.families import FAMILIES


@pytest.fixture
def model(tmp_path):
    make_model(FAMILIES["phi3"], tmp_path / "model")
    return tmp_path / "model"


def test_scales_map_the_largest_numbers(model, tmp_path):
    calibrate(model, tmp_path / "copy", [[1, 5, 7, 9], [4, 6]])
    weights, copied = (load_file(tmp_path / name / "model.safetensors") for name in ("model", "copy"))
    scales = {name: value for name, value in copied.items() if name not in weights}
    layers = json.loads((model / "config.json").read_text())["num_hidden_layers"]
    assert len(scales) == 2 * layers
    assert all(value > 0 for value in scales.values())
    assert all(torch.equal(weights[name], copied[name]) for name in weights)
    config = json.loads((tmp_path / "copy" / "config.json").read_text())
    assert config["quantization_config"]["kv_cache_scheme"]["num_bits"] == 8
    calibrate(model, tmp_path / "half", [[1, 5, 7, 9]])
    fewer = load_file(tmp_path / "half" / "model.safetensors")
    assert all(fewer[name] <= value for name, value in scales.items())  # of fewer texts
