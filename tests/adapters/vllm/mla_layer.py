"""An MLA layer as vLLM makes it: its widths, its projection, and the attributes that its forward reads."""

from __future__ import annotations

from types import MethodType, SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from vllm.model_executor.layers.attention.mla_attention import MLAAttention
from vllm.v1.attention.backends.mla.prefill.base import MLAPrefillBackend
from vllm_layer import PAGE, Layer, make_config

HEADS, LATENT, NOPE, ROPE, V = 3, 512, 32, 64, 24
SCALE = (NOPE + ROPE) ** -0.5
WIDTHS = {
    "q_lora_rank": None,
    "kv_lora_rank": LATENT,
    "qk_nope_head_dim": NOPE,
    "qk_rope_head_dim": ROPE,
    "v_head_dim": V,
}
TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1e-2}


class Projection:
    """kv_b_proj: from a latent to K and V of each head."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.weight = (torch.randn(HEADS * (NOPE + V), LATENT) * LATENT**-0.5).to(dtype)
        self.params_dtype = dtype

    def __call__(self, x: Tensor) -> tuple[Tensor, None]:
        return x @ self.weight.T, None

    def parts(self, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """[heads, NOPE, LATENT] of K, [heads, V, LATENT] of V."""
        return self.weight.to(dtype).view(HEADS, NOPE + V, LATENT).split([NOPE, V], dim=1)  # type: ignore[return-value]


class Chosen(MLAPrefillBackend):
    """vLLM's choice for prefills: it must not be called."""

    @staticmethod
    def get_name() -> str:
        return "CHOSEN"

    def run_prefill_new_tokens(self, *arguments: Any, **options: Any) -> Any:
        raise AssertionError

    run_prefill_context_chunk = run_prefill_new_tokens


def impl_arguments(kv_b_proj: Any) -> dict[str, Any]:
    """The arguments that vLLM passes to an implementation, besides heads and scale."""
    of_all = {
        "alibi_slopes": None,
        "sliding_window": None,
        "kv_cache_dtype": "auto",
        "logits_soft_cap": None,
        "attn_type": "decoder",
    }
    return of_all | {
        "kv_sharing_target_layer_name": None,
        **WIDTHS,
        "qk_head_dim": NOPE + ROPE,
        "kv_b_proj": kv_b_proj,
        "indexer": None,
    }


def make_layer(impl: Any, projection: Projection, dtype: torch.dtype, cache_dtype: str, prefill: Any) -> Any:
    """The attributes that MLAAttention.forward_impl reads from its layer.

    Args:
        prefill: vLLM's prefill backend.
    """
    layer: Any = Layer(impl)
    w_uk, w_uv = projection.parts(dtype)
    of_layer = {
        "num_heads": HEADS,
        "head_size": LATENT + ROPE,
        "prefill_backend": prefill,
        "use_pcp": False,
        "kv_cache_dtype": cache_dtype,
        **WIDTHS,
    }
    of_layer |= {
        "q_pad_num_heads": None,
        "hisparse_cache": None,
        "W_UK_T": w_uk,
        "W_UV": w_uv.transpose(1, 2),
        "_k_scale": torch.tensor(0.25) if cache_dtype in ("fp8", "fp8_e4m3") else torch.ones(()),
    }
    of_layer |= {
        f"is_{what}_enabled": False for what in ("aiter_triton_fp4_bmm", "aiter_triton_fp8_bmm", "amx_bmm")
    }
    vars(layer).update(of_layer)
    layer._v_up_proj = MethodType(MLAAttention._v_up_proj, layer)
    return layer


def make_mla_config(
    layer: Any, dtype: torch.dtype, cache_dtype: str, chosen: Any = None, **changes: Any
) -> SimpleNamespace:
    """The parts of VllmConfig that are read; `changes` replaces whole parts.

    Args:
        chosen: the user's prefill backend.
    """
    model = SimpleNamespace(
        dtype=dtype,
        max_model_len=64,
        get_head_size=lambda: LATENT + ROPE,
        get_num_attention_heads=lambda _: HEADS,
    )
    parts = {
        "model_config": model,
        "cache_config": SimpleNamespace(block_size=PAGE, cache_dtype=cache_dtype),
        "attention_config": SimpleNamespace(use_prefill_query_quantization=False, mla_prefill_backend=chosen),
        "parallel_config": SimpleNamespace(
            decode_context_parallel_size=1,
            prefill_context_parallel_size=1,
            cp_kv_cache_interleave_size=1,
            tensor_parallel_size=1,
        ),
    }
    return make_config({"layer": layer}, **parts | changes)


def check(output: Tensor, expected: Tensor, dtype: torch.dtype) -> None:
    error = (output[: len(expected)].double() - expected).norm() / expected.norm()
    assert error <= TOLERANCE[dtype]
