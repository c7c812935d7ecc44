"""Facts about SGLang that `attn-backend doctor --model` relies on."""

from __future__ import annotations

import inspect
import re
from functools import cache
from pathlib import Path

import model_configs as configs
import pytest
import torch

pytest.importorskip("sglang.srt", reason="SGLang is not installed")

import sglang.srt
from sglang.srt.configs.model_config import AttentionArch, is_deepseek_dsa, is_hybrid_swa_model
from sglang.srt.layers.radix_attention import AttentionType
from sglang.srt.mem_cache import memory_pool
from transformers import PretrainedConfig

from attn_backend.adapters.checkpoint import DECODER, ENCODER_ONLY, Checkpoint
from attn_backend.adapters.sglang import compat, rules
from attn_backend.releases import RELEASES, SGLANG_ON_CPU_SINCE, is_before

LATENTS = [
    config
    for config in vars(configs).values()
    if isinstance(config, dict) and config.get("kv_lora_rank") and "architectures" in config
]


@cache
def sources_of_models() -> str:
    return "".join(file.read_text() for file in Path(sglang.srt.__path__[0], "models").rglob("*.py"))


def names(pool: type) -> list[str]:
    return [base.__name__ for base in pool.__mro__]


def test_names_are_sglangs() -> None:
    assert {name for name in rules.ARCHITECTURES if hasattr(AttentionArch, name)} == set(rules.ARCHITECTURES)
    assert "SSM" not in rules.ARCHITECTURES
    assert (AttentionType.DECODER.value, AttentionType.ENCODER_ONLY.value) == (DECODER, ENCODER_ONLY)


def test_pools_of_hybrids_are_refused() -> None:
    assert rules.unsupported_pool(names(memory_pool.MLATokenToKVPool)) is None
    assert rules.unsupported_pool(names(memory_pool.DSATokenToKVPool)) is None
    assert rules.unsupported_pool(names(memory_pool.HybridLinearKVPool)) == "latents in a HybridLinearKVPool"


@pytest.mark.parametrize("config", LATENTS, ids=lambda config: config["architectures"][0])
def test_indexers_are_found_where_sglang_finds_them(config: configs.Config) -> None:
    model = Checkpoint(config)
    assert model.latents is not None
    if f"class {model.architecture}" not in sources_of_models():
        pytest.skip("not in all releases")
    assert model.latents.is_sparse == is_deepseek_dsa(PretrainedConfig(**config))


def test_models_with_pools_of_windows_are_sglangs() -> None:
    """SGLang also has such pools for models that this backend does not serve, and for drafts."""
    not_ours = {"BeamForCausalLM", "EmbeddingGemma2Model", "DiffusionGemmaForBlockDiffusion"}
    source = inspect.getsource(is_hybrid_swa_model)
    names = {*re.findall(r'"(\w+(?:ForCausalLM|ForConditionalGeneration|Model|Diffusion))"', source)}
    names = {name for name in names if "DeepseekV4" not in name and is_hybrid_swa_model([name])}
    assert names - not_ours - {"LagunaForCausalLM"} <= set(rules.WINDOW_POOLS)
    if compat.release() == RELEASES["sglang"][-1]:
        assert all(is_hybrid_swa_model([name]) for name in rules.WINDOW_POOLS)


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU runs Triton")
def test_releases_that_start_triton_on_a_cpu() -> None:
    assert compat.starts_triton_on_cpu(compat.NAME) == is_before(compat.release(), SGLANG_ON_CPU_SINCE)
