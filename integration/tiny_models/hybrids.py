"""Models that mix attention with layers that keep a state: linear attention, Mamba or short convolutions; and
one with a gate behind its attention.

States are small, so that the engines' blocks are shorter than the questions and prefixes are cached.
"""

from __future__ import annotations

from typing import Any

import torch
import transformers

Model = tuple[Any, Any]
LINEAR, FULL = "linear_attention", "full_attention"
ALIGN = {"enable_prefix_caching": True, "mamba_cache_mode": "align"}
# SGLang's prefix cache of states needs a GPU.
SGLANG_ON_CPU = {name: {"disable_radix_cache": True} for name in ("qwen3_next", "qwen3_5", "lfm2")}
GDN: dict[str, Any] = {
    "layer_types": [LINEAR, FULL] * 2,
    "full_attention_interval": 2,
    "head_dim": 256,
    "linear_key_head_dim": 64,
    "linear_value_head_dim": 64,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "tie_word_embeddings": False,
}


def _without_head_dim(common: dict[str, Any]) -> dict[str, Any]:
    """For configurations that compute the size of heads from hidden_size."""
    sizes = {name: value for name, value in common.items() if name != "head_dim"}
    return sizes | {"hidden_size": common["num_attention_heads"] * common["head_dim"]}


def qwen3_next(common: dict[str, Any]) -> Model:
    experts: dict[str, Any] = {
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
        "shared_expert_intermediate_size": 32,
    }
    return transformers.Qwen3NextConfig(**common | GDN | experts), transformers.Qwen3NextForCausalLM


def qwen3_next_mtp(common: dict[str, Any]) -> Model:
    config, model = qwen3_next(common)
    config.num_nextn_predict_layers = 1
    return config, model


def add_mtp_layer(weights: dict[str, torch.Tensor]) -> None:
    """Qwen3-Next's layer that drafts a second token: the last layer again, after an untrained projection."""
    hidden = weights["model.norm.weight"].shape[0]
    for name in [name for name in weights if name.startswith("model.layers.3.")]:
        weights[name.replace("model.layers.3.", "mtp.layers.0.")] = weights[name].clone()
    for name in ("norm", "pre_fc_norm_embedding", "pre_fc_norm_hidden"):
        weights[f"mtp.{name}.weight"] = torch.zeros(hidden)  # around 0
    made = torch.randn(hidden, 2 * hidden, generator=torch.Generator().manual_seed(4))
    weights["mtp.fc.weight"] = made * (2 * hidden) ** -0.5


def qwen3_5(common: dict[str, Any]) -> Model:
    return transformers.Qwen3_5TextConfig(**common | GDN), transformers.Qwen3_5ForCausalLM


def falcon_h1(common: dict[str, Any]) -> Model:
    config: dict[str, Any] = {
        "num_hidden_layers": 2,  # each has both
        "mamba_d_ssm": 128,
        "mamba_n_heads": 2,
        "mamba_d_state": 64,
        "mamba_chunk_size": 32,
    }
    return transformers.FalconH1Config(**common | config), transformers.FalconH1ForCausalLM


def granite4(common: dict[str, Any]) -> Model:
    config: dict[str, Any] = {
        "layer_types": [LINEAR, FULL] * 2,
        "num_local_experts": 0,
        "num_experts_per_tok": 0,
        "shared_intermediate_size": 64,
        "attention_multiplier": 0.125,
        "mamba_expand": 1,
        "mamba_n_heads": 4,
        "mamba_d_state": 64,
        "mamba_chunk_size": 32,
    }
    return (
        transformers.GraniteMoeHybridConfig(**_without_head_dim(common) | config),
        transformers.GraniteMoeHybridForCausalLM,
    )


def nemotron_h(common: dict[str, Any]) -> Model:
    config: dict[str, Any] = {
        "num_hidden_layers": 5,
        "layers_block_type": [LINEAR, FULL, "mlp", LINEAR, FULL],
        "mamba_num_heads": 8,
        "mamba_head_dim": 16,
        "ssm_state_size": 64,
        "n_groups": 8,  # SGLang's model reads another name, whose default is 8
        "chunk_size": 32,
    }
    return transformers.NemotronHConfig(**common | config), transformers.NemotronHForCausalLM


def lfm2(common: dict[str, Any]) -> Model:
    sizes = _without_head_dim(common)
    config: dict[str, Any] = {
        "layer_types": ["conv", FULL] * 2,
        "block_auto_adjust_ff_dim": False,
        # vLLM reads these
        "conv_dim": sizes["hidden_size"],
        "block_dim": sizes["hidden_size"],
    }
    return transformers.Lfm2Config(**sizes | config), transformers.Lfm2ForCausalLM


def kimi_linear(common: dict[str, Any]) -> Model:
    sizes = _without_head_dim(common)
    linear: dict[str, Any] = {
        "kda_layers": [1, 3],  # counted from 1
        "full_attn_layers": [2, 4],
        "head_dim": 64,
        "num_heads": 2,
        "short_conv_kernel_size": 4,
    }
    config: dict[str, Any] = {
        "linear_attn_config": linear,
        "num_key_value_heads": common["num_attention_heads"],
        "kv_lora_rank": 512,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
        "mla_use_nope": True,
        "first_k_dense_replace": common["num_hidden_layers"],
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
    }
    return transformers.KimiLinearConfig(**sizes | config), transformers.KimiLinearForCausalLM


def muse_glimmer(common: dict[str, Any]) -> Model:
    sizes: dict[str, Any] = {"hidden_size": 32, "intermediate_size": 32}
    vision: dict[str, Any] = sizes | {"num_attention_heads": 2, "num_hidden_layers": 1}
    vision |= {"output_dim": 128, "adapter_dim": 32}  # vLLM reads these
    config = transformers.MuseGlimmerConfig(
        text_config=_without_head_dim(common) | {"head_dim": common["head_dim"], "sliding_window": 24},
        vision_config=vision,
        out_hidden_size=128,
        projector_hidden_size=32,
        # tokens that the answers do not have: engines replace them by images
        image_token_id=0,
        video_token_id=5,
    )
    return config, transformers.MuseGlimmerForConditionalGeneration
