"""Configurations of checkpoints: the fields that attention depends on, with the values that were published,
and fewer layers.
"""

from __future__ import annotations

from typing import Any

Config = dict[str, Any]


def plain(architecture: str, model_type: str, head_dim: int = 128, layers: int = 8, **more: Any) -> Config:
    return {
        "architectures": [architecture],
        "model_type": model_type,
        "hidden_size": 4096,
        "num_hidden_layers": layers,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": head_dim,
        **more,
    }


LATENTS: Config = {
    "kv_lora_rank": 512,
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 128,
    "v_head_dim": 128,
    "q_lora_rank": 1536,
}
NO_HEAD_DIM = {"head_dim": None}
WINDOWS = ["sliding_attention", "full_attention"] * 4
LINEAR = ["linear_attention", "linear_attention", "linear_attention", "full_attention"] * 2

LLAMA_3 = plain("LlamaForCausalLM", "llama")
GEMMA_2 = plain("Gemma2ForCausalLM", "gemma2", 256, attn_logit_softcapping=50.0, sliding_window=4096)
GEMMA_3: Config = {
    "architectures": ["Gemma3ForConditionalGeneration"],
    "model_type": "gemma3",
    "text_config": plain("", "gemma3_text", 256, layer_types=WINDOWS),
}


def gemma_4(sees_images: str | None) -> Config:
    text = plain("", "gemma4_text", 256, global_head_dim=512, layer_types=WINDOWS)
    return {
        "architectures": ["Gemma4ForConditionalGeneration"],
        "model_type": "gemma4",
        "text_config": text | {"use_bidirectional_attention": sees_images},
    }


GPT_OSS = plain("GptOssForCausalLM", "gpt_oss", 64, layer_types=WINDOWS)
MIMO_V2 = plain(
    "MiMoV2FlashForCausalLM",
    "mimo_v2_flash",
    192,
    v_head_dim=128,
    swa_head_dim=192,
    swa_v_head_dim=128,
    hybrid_layer_pattern=[0, 1] * 4,
)
DEEPSEEK_V2 = plain("DeepseekV2ForCausalLM", "deepseek_v2", **LATENTS) | NO_HEAD_DIM
DEEPSEEK_V3 = plain("DeepseekV3ForCausalLM", "deepseek_v3", **LATENTS) | NO_HEAD_DIM
DEEPSEEK_V32 = plain("DeepseekV32ForCausalLM", "deepseek_v32", index_topk=2048, **LATENTS) | NO_HEAD_DIM
GLM_5 = plain("GlmMoeDsaForCausalLM", "glm_moe_dsa", index_topk=2048, **LATENTS) | NO_HEAD_DIM
GLM_5_NEXT = (
    plain("Glm5NextForConditionalGeneration", "glm5_next", index_topk=2048, index_kpool=4)
    | LATENTS
    | {"qk_rope_head_dim": 0, **NO_HEAD_DIM}
)
DEEPSEEK_V4 = plain(
    "DeepseekV4ForCausalLM", "deepseek_v4", 512, qk_rope_head_dim=64, compress_ratios=[0, 4, 128] * 2 + [0, 0]
)
DEEPSEEK_V41 = DEEPSEEK_V4 | {"architectures": ["DeepseekV41ForCausalLM"], "model_type": "deepseek_v41"}
MINICPM_3 = (
    plain("MiniCPM3ForCausalLM", "minicpm3")
    | LATENTS
    | {"kv_lora_rank": 256, "qk_rope_head_dim": 32, "qk_nope_head_dim": 64, "v_head_dim": 64, **NO_HEAD_DIM}
)
QWEN_3_NEXT = plain("Qwen3NextForCausalLM", "qwen3_next", 256, full_attention_interval=4)
QWEN_3_5: Config = {
    "architectures": ["Qwen3_5ForConditionalGeneration"],
    "model_type": "qwen3_5",
    "text_config": plain("", "qwen3_5_text", 256, layer_types=LINEAR),
}
QWEN_4_EXP: Config = {
    "architectures": ["Qwen4ExpForConditionalGeneration"],
    "model_type": "qwen4_exp",
    "text_config": plain(
        "",
        "qwen4_exp_text",
        256,
        layer_types=["linear_attention", "linear_attention", "linear_attention", "qwen_sparse_attention"] * 2,
        indexer_n_heads=8,
    ),
}
KIMI_LINEAR = (
    plain(
        "KimiLinearForCausalLM",
        "kimi_linear",
        linear_attn_config={"full_attn_layers": [4, 8], "kda_layers": [1, 2, 3, 5, 6, 7]},
    )
    | LATENTS
)
MINIMAX_M3: Config = {
    "architectures": ["MiniMaxM3SparseForConditionalGeneration"],
    "model_type": "minimax_m3_vl",
    "text_config": plain(
        "", "minimax_m3", sparse_attention_config={"sparse_attention_freq": [0, 0, 0, 1, 1, 1, 1, 1]}
    ),
}
MINIMAX_M2 = plain("MiniMaxM2ForCausalLM", "minimax_m2", attn_type_list=[1] * 8)
STEP_5 = plain("Step5ForCausalLM", "step5", layer_types=WINDOWS)
HY_V4 = plain("HYV4ForCausalLM", "hy_v4", index_topk=2048, learnable_sink=True, **LATENTS) | NO_HEAD_DIM
DOTS_3 = plain("Dots3NoteForCausalLM", "dots3_note", index_topk=2048, **LATENTS) | NO_HEAD_DIM
INKLING = plain("InklingForConditionalGeneration", "inkling")
PANGU = plain("PanguProMoEV2ForCausalLM", "pangu_pro_moe_v2", v_head_dim=96, param_sink_number=128)
FALCON_H1 = plain("FalconH1ForCausalLM", "falcon_h1", mamba_d_state=256)
GRANITE_4 = plain("GraniteMoeHybridForCausalLM", "granitemoehybrid", layer_types=["mamba", "attention"] * 4)
NEMOTRON_H = plain("NemotronHForCausalLM", "nemotron_h", hybrid_override_pattern="M-M*M-M*")
# as transformers 5 writes it, without the number of layers
NEMOTRON_H_LISTED = plain(
    "NemotronHForCausalLM",
    "nemotron_h",
    num_hidden_layers=None,
    layers_block_type=["linear_attention", "full_attention", "mlp", "full_attention"],
)
LFM_2 = plain("Lfm2ForCausalLM", "lfm2", 64, layer_types=["conv", "full_attention"] * 4)
RNJ_1 = plain("Rnj1ForCausalLM", "rnj1", layer_types=["chunked_attention", "full_attention"] * 4)
BERT: Config = {
    "architectures": ["BertModel"],
    "model_type": "bert",
    "hidden_size": 768,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
}
EMBEDDING_GEMMA = plain(
    "Gemma3TextModel", "gemma3_text", 256, layer_types=WINDOWS, use_bidirectional_attention=True
)
MAMBA: Config = {
    "architectures": ["Mamba2ForCausalLM"],
    "model_type": "mamba2",
    "hidden_size": 2048,
    "num_hidden_layers": 24,
}
ODD_HEADS = plain("LlamaForCausalLM", "llama", 100)
