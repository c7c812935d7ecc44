"""Backends and layers obey the rules of `attn-backend doctor --model`, and its facts about vLLM hold."""

from __future__ import annotations

from typing import Any

import model_configs as configs
import pytest

pytest.importorskip("vllm.v1", reason="needs vLLM")

from transformers import PretrainedConfig
from vllm.config import model as convertors  # not its home, which needs vllm.config first
from vllm.v1.attention.backend import AttentionType

from attn_backend.adapters.checkpoint import Checkpoint
from attn_backend.adapters.vllm import rules
from attn_backend.adapters.vllm.attention import AttnImpl
from attn_backend.adapters.vllm.backend import DiffKvBackend, DiffKvImpl

ALL = {
    name: config
    for name, config in {**vars(configs), "GEMMA_4": configs.gemma_4(None)}.items()
    if isinstance(config, dict) and "architectures" in config
} | {"GEMMA_4_VISION": configs.gemma_4("vision")}


def convertor(config: configs.Config) -> Any:
    """vLLM's reader of a configuration."""
    text = config.get("text_config")
    whole = PretrainedConfig(**{name: value for name, value in config.items() if name != "text_config"})
    whole.model_type = config["model_type"]
    language = whole
    if text is not None:
        language = PretrainedConfig(**text)
        language.model_type = text["model_type"]
    kind = convertors.MODEL_ARCH_CONFIG_CONVERTORS.get(
        config["model_type"], convertors.ModelArchConfigConvertorBase
    )
    return kind(whole, language)


@pytest.mark.parametrize("name", ALL)
def test_latents_and_images_are_read_as_vllm_reads_them(name: str) -> None:
    model, theirs = Checkpoint(ALL[name]), convertor(ALL[name])
    if "V4" in name and "DEEPSEEK" in name:
        pytest.skip("compressed rows, which are no latents of ours")
    assert rules.uses_latents(model) == theirs.is_deepseek_mla()
    assert rules.is_prefix_lm(model) == theirs.is_mm_prefix_lm()
    if rules.uses_latents(model):
        assert rules.head_size_of(model) == theirs.get_head_size()
    elif name not in ("MINICPM_3", "MAMBA", "GEMMA_4", "GEMMA_4_VISION"):
        assert {layer.heads.qk for layer in model.layers} == {theirs.get_head_size()}


@pytest.mark.parametrize("name", ALL)
def test_layers_refuse_what_the_rules_refuse(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for layer in Checkpoint(ALL[name]).layers:
        wanted = rules.unsupported_layer(layer.heads.qk, layer.heads.v, layer.attn_type)
        for argument, value in layer.arguments:
            wanted = wanted or rules.unsupported_argument(argument, value)
        is_square = layer.heads.qk == layer.heads.v
        monkeypatch.setattr(DiffKvBackend, "head_size_v", layer.heads.v)

        def make(kind: Any = AttnImpl if is_square else DiffKvImpl, layer: Any = layer) -> Any:
            return kind(32, layer.heads.qk, 1.0, 8, attn_type=layer.attn_type, **dict(layer.arguments))

        if wanted is None:
            assert make().spec.head_dim == layer.heads.qk
        else:
            with pytest.raises(NotImplementedError) as raised:
                make()
            assert wanted in str(raised.value)


def test_names_are_vllms() -> None:
    types = (AttentionType.DECODER, AttentionType.ENCODER_ONLY, AttentionType.ENCODER_DECODER)
    assert types == rules.ATTN_TYPES
