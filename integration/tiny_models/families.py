"""The families: their demands on attention, models like them, and the configuration of a tiny model, a few
layers deep.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import transformers

from attn_backend.adapters.own_kernels import ENGINE_NAMES
from integration.tiny_models import hybrids
from integration.tiny_models.tokenizer import BOS, EOS, IMAGE_TOKENS, NEWLINES, PAD, VOCAB

WINDOW = 24
CHUNK = 32
AUDIO_SECONDS = 1
MEL_BINS = 16
COMMON: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": 512,
    "pad_token_id": PAD,
    "bos_token_id": BOS,
    "eos_token_id": EOS,
}
PLAIN_ROPE = {"rope_type": "default", "rope_theta": 10000.0}


@dataclass(frozen=True)
class Images:
    """
    Attributes:
        size: height and width of each, pixels.
        place: the token that marks an image in a prompt.
        tokens: the processor's replacement for that token.
    """

    size: tuple[int, int]
    place: int
    tokens: tuple[int, ...]

    @property
    def length(self) -> int:
        """The length of an image, in tokens."""
        return self.tokens.count(IMAGE_TOKENS[0])


_IMAGE, _BEFORE, _AFTER = IMAGE_TOKENS
GEMMA3_IMAGES = Images((32, 32), _BEFORE, (NEWLINES[1], _BEFORE, *[_IMAGE] * 16, _AFTER, NEWLINES[1]))
# Longer than a window, and as long as the processor's smallest limit. A shorter one is padded, and the vision
# tower of SGLang 0.5.23 counts the padding.
GEMMA4_IMAGES = Images((28, 40), _IMAGE, (_BEFORE, *[_IMAGE] * 70, _AFTER))
GEMMA4_PATCHES: dict[str, int] = {"patch_size": 2, "pooling_kernel_size": 2}


@dataclass(frozen=True)
class Family:
    """
    Attributes:
        asks: the demands on attention.
        models: that ask it; empty: not in the matrix.
        make: its configuration and its class.
        kind: "generate", "embed", "score" (documents to a query), "image", "audio", or "items": the tokens
            after each of several items are scored.
        stock: engines whose answers are compared with their own backend's, because their model is not quite
            transformers' (another GELU, another pooling).
        pools_mean: whether an embedding is the mean of a prompt's states, not its first token's.
        engines: options of the engines that have such models, as passed to LLM() or ServerArgs().
        images: of a family of kind "image".
        only_gpu: engines of `engines` that have no kernels for it on a CPU.
        refused: engines that have such models, in which our backend refuses them.
    """

    name: str
    asks: str
    models: str
    make: Callable[[], tuple[Any, Any]]
    kind: str = "generate"
    stock: tuple[str, ...] = ()
    pools_mean: bool = False
    engines: dict[str, dict[str, Any]] = field(default_factory=lambda: {"vllm": {}, "sglang": {}})
    images: Images | None = None
    only_gpu: tuple[str, ...] = ()
    refused: tuple[str, ...] = ()

    def runs_on_cpu(self, engine: str) -> bool:
        return engine in self.engines and engine not in self.only_gpu


def _gemma2() -> tuple[Any, Any]:
    config: dict[str, Any] = {
        "sliding_window": WINDOW,
        "query_pre_attn_scalar": 32,
        "attn_logit_softcapping": 5.0,
        "final_logit_softcapping": 10.0,
        "hidden_act": "gelu_pytorch_tanh",
    }
    return transformers.Gemma2Config(**COMMON, **config), transformers.Gemma2ForCausalLM


def _gpt_oss() -> tuple[Any, Any]:
    rope: dict[str, Any] = {
        "rope_type": "yarn",
        "rope_theta": 10000.0,
        "factor": 4.0,
        "original_max_position_embeddings": 128,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "truncate": False,
    }
    config: dict[str, Any] = {
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "sliding_window": WINDOW,
        "rope_parameters": rope,
        "tie_word_embeddings": False,
    }
    return transformers.GptOssConfig(**COMMON, **config), transformers.GptOssForCausalLM


def _bloom() -> tuple[Any, Any]:
    config = transformers.BloomConfig(
        vocab_size=VOCAB,
        hidden_size=256,
        n_layer=3,
        n_head=4,
        bos_token_id=BOS,
        eos_token_id=EOS,
        pad_token_id=PAD,
    )
    return config, transformers.BloomForCausalLM


def _bert_config(**more: Any) -> Any:
    names = (
        "vocab_size",
        "intermediate_size",
        "num_attention_heads",
        "max_position_embeddings",
        "pad_token_id",
    )
    layers: dict[str, Any] = {
        "hidden_size": 256,
        "num_hidden_layers": 3,
        "position_embedding_type": "absolute",
    }
    return transformers.BertConfig(**{name: COMMON[name] for name in names}, **layers, **more)


def _bert() -> tuple[Any, Any]:
    return _bert_config(), transformers.BertModel


def _reranker() -> tuple[Any, Any]:
    # The layer after the scores in sentence-transformers checkpoints; both engines read it.
    return _bert_config(
        num_labels=1, sbert_ce_default_activation_function="torch.nn.modules.linear.Identity"
    ), transformers.BertForSequenceClassification


def _modernbert() -> tuple[Any, Any]:
    names = (
        "vocab_size",
        "intermediate_size",
        "num_attention_heads",
        "max_position_embeddings",
        "pad_token_id",
        "bos_token_id",
        "eos_token_id",
    )
    special: dict[str, Any] = {"cls_token_id": BOS, "sep_token_id": EOS}
    layers: dict[str, Any] = {
        "hidden_size": 256,
        "num_hidden_layers": 4,
        "local_attention": 16,
        "global_attn_every_n_layers": 2,
    }
    return transformers.ModernBertConfig(
        **{name: COMMON[name] for name in names}, **special, **layers
    ), transformers.ModernBertModel


def _llama4() -> tuple[Any, Any]:
    config: dict[str, Any] = {
        "attention_chunk_size": CHUNK,
        "interleave_moe_layer_step": 100,
        "intermediate_size_mlp": 64,
        "no_rope_layers": [1, 1, 1, 0],
    }
    config |= {
        "num_local_experts": 2,
        "floor_scale": 16,
        "rope_parameters": PLAIN_ROPE,
        "tie_word_embeddings": False,
    }
    config |= {"attn_temperature_tuning": False}  # vLLM enables it by the longest context
    config |= {"use_qk_norm": False}  # SGLang's needs bfloat16 on a CPU
    return transformers.Llama4TextConfig(**COMMON, **config), transformers.Llama4ForCausalLM


def _gemma3_text_config() -> dict[str, Any]:
    layer_types = ["sliding_attention", "full_attention"] * 2
    return COMMON | {
        "sliding_window": WINDOW,
        "query_pre_attn_scalar": 32,
        "layer_types": layer_types,
        "sliding_window_pattern": 2,
    }


def _gemma3() -> tuple[Any, Any]:
    vision: dict[str, Any] = {
        "hidden_size": 32,
        "intermediate_size": 32,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "image_size": GEMMA3_IMAGES.size[0],
        "patch_size": 8,
    }
    vision |= {"vision_use_head": False}
    tokens: dict[str, Any] = {
        "eos_token_id": EOS,
        "image_token_index": IMAGE_TOKENS[0],
        "boi_token_index": IMAGE_TOKENS[1],
        "eoi_token_index": IMAGE_TOKENS[2],
    }
    config = transformers.Gemma3Config(
        text_config=_gemma3_text_config(),
        vision_config=vision,
        mm_tokens_per_image=GEMMA3_IMAGES.length,
        **tokens,
    )
    return config, transformers.Gemma3ForConditionalGeneration


def _embedding_gemma() -> tuple[Any, Any]:
    # The configuration counts the window on the left and right.
    return transformers.Gemma3TextConfig(
        **_gemma3_text_config(), use_bidirectional_attention=True
    ), transformers.Gemma3TextModel


def _gemma3n() -> tuple[Any, Any]:
    # No window: SGLang's is one token longer than transformers'.
    config: dict[str, Any] = {
        "sliding_window": 512,
        "vocab_size_per_layer_input": VOCAB,
        "hidden_size_per_layer_input": 16,
        "num_kv_shared_layers": 2,
        "laurel_rank": 8,
    }
    config |= {
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "activation_sparsity_pattern": [0.0] * 4,
    }
    return transformers.Gemma3nTextConfig(**COMMON, **config), transformers.Gemma3nForCausalLM


def _gemma4(**more: Any) -> tuple[Any, Any]:
    # The last two layers read the cache of the first two; layers with 512 columns compute V with the weights
    # of K.
    rope = {
        "sliding_attention": PLAIN_ROPE,
        "full_attention": {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1e6},
    }
    text: dict[str, Any] = {
        "head_dim": 256,
        "global_head_dim": 512,
        "attention_k_eq_v": True,
        "num_global_key_value_heads": 1,
        "num_kv_shared_layers": 2,
    }
    text |= {
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "sliding_window": WINDOW,
        "rope_parameters": rope,
    }
    text |= {"vocab_size_per_layer_input": VOCAB, "hidden_size_per_layer_input": 16, **more}
    # SGLang finds the two widths only in the configuration of the class with images; for text, an option
    # excludes images.
    vision: dict[str, Any] = {
        "hidden_size": 32,
        "intermediate_size": 32,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
    }
    vision |= {
        "head_dim": 16,
        "position_embedding_size": 32,
        "default_output_length": GEMMA4_IMAGES.length,
        **GEMMA4_PATCHES,
    }
    tokens: dict[str, Any] = {
        "image_token_id": IMAGE_TOKENS[0],
        "boi_token_id": IMAGE_TOKENS[1],
        "eoi_token_id": IMAGE_TOKENS[2],
    }
    config = transformers.Gemma4Config(text_config=COMMON | text, vision_config=vision, **tokens)
    return config, transformers.Gemma4ForConditionalGeneration


def _gemma4_images() -> tuple[Any, Any]:
    return _gemma4(use_bidirectional_attention="vision")


def _stablelm() -> tuple[Any, Any]:
    sizes = {"hidden_size": 4 * 80, "num_hidden_layers": 2, "partial_rotary_factor": 0.25}
    config = {name: value for name, value in COMMON.items() if name != "head_dim"} | sizes
    return transformers.StableLmConfig(**config), transformers.StableLmForCausalLM


def _phi3() -> tuple[Any, Any]:
    config = {name: value for name, value in COMMON.items() if name != "head_dim"} | {
        "hidden_size": 4 * 96,
        "num_hidden_layers": 2,
    }
    return transformers.Phi3Config(**config), transformers.Phi3ForCausalLM


def _items() -> tuple[Any, Any]:
    return transformers.Qwen2Config(**COMMON, tie_word_embeddings=False), transformers.Qwen2ForCausalLM


def _deepseek() -> tuple[Any, Any]:
    # Widths of V2-Lite; no experts.
    names = (
        "vocab_size",
        "hidden_size",
        "intermediate_size",
        "num_attention_heads",
        "max_position_embeddings",
        "pad_token_id",
        "bos_token_id",
        "eos_token_id",
    )
    latent: dict[str, Any] = {
        "q_lora_rank": None,
        "kv_lora_rank": 512,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
    }
    rope: dict[str, Any] = {
        "rope_type": "yarn",
        "rope_theta": 10000.0,
        "factor": 4.0,
        "original_max_position_embeddings": 128,
    }
    rope |= {"beta_fast": 32.0, "beta_slow": 1.0, "mscale": 0.707, "mscale_all_dim": 0.707}
    layers: dict[str, Any] = {
        "num_hidden_layers": 3,
        "first_k_dense_replace": 3,
        "moe_layer_freq": 1,
        "num_key_value_heads": 4,
        "rope_parameters": rope,
    }
    layers |= {
        "n_routed_experts": 4,
        "n_shared_experts": 1,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
        "tie_word_embeddings": False,
    }
    return transformers.DeepseekV2Config(
        **{name: COMMON[name] for name in names}, **latent, **layers
    ), transformers.DeepseekV2ForCausalLM


def _deepseek_v32() -> tuple[Any, Any]:
    # The sizes of an indexer that the engines' kernels take; it selects all tokens of these short prompts.
    sizes = {name: value for name, value in COMMON.items() if name != "head_dim"}
    sizes |= {"hidden_size": 256, "num_hidden_layers": 3, "num_key_value_heads": 4, "q_lora_rank": 64}
    sizes |= {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
    sizes |= {"n_group": 1, "topk_group": 1, "first_k_dense_replace": 3, "rope_parameters": PLAIN_ROPE}
    published: dict[str, Any] = {"topk_method": "noaux_tc", "scoring_func": "sigmoid", "moe_layer_freq": 1}
    return transformers.DeepseekV32Config(**sizes, **published), transformers.DeepseekV32ForCausalLM


def _mimo() -> tuple[Any, Any]:
    # Only dense layers. The engines read the checkpoint's names, transformers its own.
    layer_types = ["full_attention", "sliding_attention"] * 2
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5}
    config: dict[str, Any] = {
        "v_head_dim": 32,
        "sliding_window": WINDOW,
        "layer_types": layer_types,
        "mlp_layer_types": ["dense"] * 4,
        "rms_norm_eps": 1e-5,
    }
    config |= {
        "attention_value_scale": 0.7,
        "rope_parameters": dict.fromkeys(layer_types[:2], rope),
        "tie_word_embeddings": False,
    }
    heads = {name: COMMON[name] for name in ("num_attention_heads", "num_key_value_heads", "head_dim")} | {
        "v_head_dim": config["v_head_dim"]
    }
    heads["num_key_value_heads"] *= 2  # for layers with a window, in transformers
    named: dict[str, Any] = {f"swa_{name}": value for name, value in heads.items()}
    named |= {
        "swa_rope_theta": 10000.0,
        "rope_theta": 10000.0,
        "partial_rotary_factor": 0.5,
        "layernorm_epsilon": 1e-5,
        "sliding_window_size": WINDOW,
    }
    named |= {
        "hybrid_layer_pattern": [0, 1] * 2,
        "moe_layer_freq": [0] * 4,
        "add_swa_attention_sink_bias": True,
        "add_full_attention_sink_bias": False,
    }
    return transformers.MiMoV2FlashConfig(**COMMON, **config, **named), transformers.MiMoV2FlashForCausalLM


def _whisper() -> tuple[Any, Any]:
    sizes: dict[str, Any] = {
        "d_model": 128,
        "encoder_layers": 1,
        "decoder_layers": 2,
        "encoder_attention_heads": 2,
        "decoder_attention_heads": 2,
    }
    sizes |= {
        "encoder_ffn_dim": 64,
        "decoder_ffn_dim": 64,
        "num_mel_bins": MEL_BINS,
        "max_source_positions": 50 * AUDIO_SECONDS,
        "max_target_positions": 128,
    }
    special: dict[str, Any] = {
        "decoder_start_token_id": BOS,
        "bos_token_id": BOS,
        "eos_token_id": EOS,
        "pad_token_id": PAD,
        "suppress_tokens": None,
        "begin_suppress_tokens": None,
    }
    return transformers.WhisperConfig(
        vocab_size=VOCAB, **sizes, **special
    ), transformers.WhisperForConditionalGeneration


WHOLE_PROMPTS = {"chunked_prefill_size": -1, "disable_radix_cache": True}
ENGINES_OF_ENCODERS: dict[str, dict[str, Any]] = {
    "vllm": {},
    "sglang": WHOLE_PROMPTS | {"is_embedding": True},
}
GDN_ASKS = "linear attention (GDN), head size 256"
ENGINES_OF_GDN: dict[str, dict[str, Any]] = {
    "vllm": hybrids.ALIGN | {"dtype": "bfloat16"},  # vLLM's GDN on a CPU takes no other type
    "sglang": {},
}
FAMILIES = {
    family.name: family
    for family in (
        Family("gemma2", "soft cap, sliding window", "Gemma 2, Grok 1", _gemma2),
        Family("gpt_oss", "attention sinks, sliding window", "gpt-oss", _gpt_oss),
        Family(
            "bloom",
            "ALiBi",
            "BLOOM, Falcon-RW",
            _bloom,
            stock=("vllm",),
            engines={"vllm": {}},
        ),
        Family(
            "bert", "bidirectional", "BERT, RoBERTa, BGE, E5", _bert, "embed", engines=ENGINES_OF_ENCODERS
        ),
        Family(
            "reranker",
            "bidirectional, query and document as one sequence",
            "BERT rerankers: MS MARCO MiniLM",
            _reranker,
            "score",
            engines=ENGINES_OF_ENCODERS,
        ),
        Family(
            "modernbert",
            "bidirectional, two-sided window",
            "ModernBERT, GTE",
            _modernbert,
            "embed",
            ("vllm",),
            engines={"vllm": {}},
        ),
        Family(
            "embedding_gemma",
            "bidirectional decoder, two-sided window",
            "EmbeddingGemma",
            _embedding_gemma,
            "embed",
            (),
            True,
            ENGINES_OF_ENCODERS,
        ),
        Family("llama4", "chunked local attention", "Llama 4", _llama4),
        Family(
            "gemma3",
            "bidirectional within images",
            "Gemma 3 with images",
            _gemma3,
            "image",
            engines={
                "vllm": {"disable_chunked_mm_input": True},
                "sglang": WHOLE_PROMPTS | {"enable_multimodal": True},
            },
            images=GEMMA3_IMAGES,
        ),
        Family("gemma3n", "layers that share another layer's cache", "Gemma 3n", _gemma3n),
        Family(
            "gemma4",
            "head sizes 256 and 512 in one model",
            "Gemma 4",
            _gemma4,
            engines={
                "vllm": {"hf_overrides": {"architectures": ["Gemma4ForCausalLM"]}},
                "sglang": {"json_model_override_args": json.dumps({"language_model_only": True})},
            },
        ),
        Family(
            "gemma4_images",
            "bidirectional within images and the window",
            "larger Gemma 4 with images",
            _gemma4_images,
            "image",
            engines={
                "vllm": {"disable_chunked_mm_input": True, "limit_mm_per_prompt": {"video": 0}},
                "sglang": WHOLE_PROMPTS,
            },
            images=GEMMA4_IMAGES,
        ),
        Family("stablelm", "head size 80", "StableLM 3B, Phi-2", _stablelm),
        Family("phi3", "head size 96", "Phi-3 mini", _phi3),
        Family("deepseek", "multi-head latent attention (MLA)", "DeepSeek V2, V3 and R1, Kimi K2", _deepseek),
        Family(
            "deepseek_v32",
            "sparse MLA",
            "",
            _deepseek_v32,
            only_gpu=("vllm", "sglang"),
        ),
        Family(
            "mimo",
            "different head sizes of K and V, sinks, sliding window",
            "MiMo V2",
            _mimo,
            engines={
                # SGLang's window excludes the query, and it does not know the nested form of these
                # parameters, transformers' own.
                "vllm": {},
                "sglang": {
                    "json_model_override_args": json.dumps(
                        {"sliding_window_size": WINDOW - 1, "rope_parameters": PLAIN_ROPE}
                    )
                },
            },
        ),
        Family("whisper", "cross attention", "Whisper", _whisper, "audio"),
        Family(
            "items",
            "multi-item scoring",
            "any generative model with `--enable-mis`",
            _items,
            "items",
            engines={"sglang": {"enable_mis": True}},
        ),
        Family(
            "qwen3_next",
            GDN_ASKS,
            "Qwen3-Next",
            partial(hybrids.qwen3_next, COMMON),
            stock=("vllm",),
            engines=ENGINES_OF_GDN,
        ),
        Family(
            "qwen3_next_mtp",
            GDN_ASKS,
            "",
            partial(hybrids.qwen3_next_mtp, COMMON),
            stock=("vllm",),
            engines={
                # cached prefixes with drafts need Triton (vllm_runner.py)
                "vllm": {
                    "dtype": "bfloat16",
                    "enable_prefix_caching": False,
                    "speculative_config": {"method": "mtp", "num_speculative_tokens": 2},
                },
                "sglang": {
                    "speculative_algorithm": "NEXTN",
                    "speculative_num_steps": 2,
                    "speculative_eagle_topk": 1,
                    "speculative_num_draft_tokens": 3,
                },
            },
            only_gpu=("sglang",),
        ),
        Family(
            "qwen3_5",
            GDN_ASKS,
            "Qwen3.5",
            partial(hybrids.qwen3_5, COMMON),
            stock=("vllm",),
            engines=ENGINES_OF_GDN,
        ),
        *(
            Family(
                name,
                "Mamba-2 layers",
                models,
                partial(make, COMMON),
                engines={"vllm": hybrids.ALIGN, "sglang": {}},
                only_gpu=("sglang",),  # SGLang imports its Mamba kernels only there
            )
            for name, models, make in (
                ("falcon_h1", "Falcon-H1", hybrids.falcon_h1),
                ("granite4", "Granite 4", hybrids.granite4),
                ("nemotron_h", "Nemotron-H", hybrids.nemotron_h),
            )
        ),
        Family(
            "lfm2",
            "short convolutions",
            "LFM2",
            partial(hybrids.lfm2, COMMON),
            # On a CPU, the convolutions of vLLM 0.32 depend on the other requests of a batch.
            stock=("vllm",),
            engines={"vllm": {"enable_prefix_caching": False}, "sglang": {}},
        ),
        Family(
            "kimi_linear",
            "linear attention (KDA), MLA without RoPE",
            "Kimi Linear",
            partial(hybrids.kimi_linear, COMMON),
            engines={"vllm": hybrids.ALIGN},
            only_gpu=("vllm",),  # KDA is a Triton kernel
            refused=("sglang",),
        ),
        Family(
            "muse_glimmer",
            "sliding window, layers without RoPE",
            "Muse Glimmer",
            partial(hybrids.muse_glimmer, COMMON),
        ),
    )
}


def matrix() -> str:
    """The served families, as a Markdown table (docs/engines.md). Families that run only on a GPU were served
    on an H200 (docs/reports/models.md). Neighbors with the same demands and answers share a row.
    """
    lines = ["| models | attention | vLLM | SGLang |", "|---|---|---|---|"]
    rows: dict[tuple[str, ...], list[str]] = {}
    for family in [family for family in FAMILIES.values() if family.models]:
        cells = [_cell(family, engine) for engine in ENGINE_NAMES]
        rows.setdefault((family.asks, *cells), []).append(family.models)
    lines += [f"| {', '.join(models)} | {' | '.join(cells)} |" for cells, models in rows.items()]
    return "\n".join(lines)


def _cell(family: Family, engine: str) -> str:
    if engine in family.refused:
        return "refused"
    return "yes" if engine in family.engines else f"not in {ENGINE_NAMES[engine]}"
