"""FlashInfer features that this package lacks. Using one raises an error with its name."""

from __future__ import annotations

from functools import cache
from typing import Any, NoReturn

# Names that every `import flashinfer` has and this package lacks: quantized products, mixtures of experts,
# norms, activations, linear attention, other libraries.
#
# Some FlashInfer names are optional: they need another package (`CuteDslMoEWrapper`) or a newer release
# (`gdn_fused_decode_step`). Scripts check for them, so they are not listed and do not exist here.
_MISSING = """
ActivationType RecurrentKDAPrefillWorkspace RecurrentKDAPrefillWrapper RoutingMethodType SegmentGEMMWrapper
SfLayout TopKTieBreak autotune block_scale_interleave bmm_bf16 bmm_fp8 bmm_mxfp8 cutlass_fused_moe
e2m1_and_ufp8sf_scale_to_float fi_trace fp4_quantize fused_add_rmsnorm fused_add_rmsnorm_quant
fused_dit_gate_residual_layernorm_gamma_beta fused_dit_gate_residual_layernorm_scale_shift
fused_dit_residual_layernorm_scale_shift fused_kda_decode fused_qk_rmsnorm_rope fused_rmsnorm_silu
gelu_and_mul gelu_tanh_and_mul gemma_fused_add_rmsnorm gemma_rmsnorm get_fp4_quantization_module
grouped_mm_bf16 grouped_mm_fp4 grouped_mm_fp8 grouped_mm_mxfp8 is_gated_activation layernorm layernorm_quant
mm_bf16 mm_bf16_fp4 mm_fp4 mm_fp8 mm_mxfp8 mm_nvfp4_svdquant mxfp4_dequantize mxfp4_dequantize_host
mxfp4_quantize mxfp8_dequantize_host mxfp8_grouped_quantize mxfp8_quantize nvfp4_attention_sm120_fwd
nvfp4_attention_sm120_quantize_qkv nvfp4_batched_quantize nvfp4_block_scale_interleave nvfp4_kv_dequantize
nvfp4_kv_dequantize_paged nvfp4_kv_quantize nvfp4_quantize nvfp4_quantize_paged_kv_cache nvfp4_quantize_smooth
packed_kda_decode prepare_bf16_fp4_weights prepare_low_latency_gemm_weights recurrent_kda
reorder_rows_for_gated_act_gemm rmsnorm rmsnorm_quant scaled_fp4_grouped_quantize shuffle_matrix_a
shuffle_matrix_sf_a silu_and_mul silu_and_mul_nvfp4_quantize silu_and_mul_scaled_nvfp4_experts_quantize
svdquant_linear tgv_gemm_sm100 top_k top_k_page_table_transform top_k_ragged_transform top_k_varlen
trtllm_bf16_moe trtllm_bf16_routed_moe trtllm_fmha_v2_prefill trtllm_fp4_block_scale_moe
trtllm_fp4_block_scale_routed_moe trtllm_fp8_block_scale_moe trtllm_fp8_block_scale_routed_moe
trtllm_fp8_per_tensor_scale_moe trtllm_fp8_per_tensor_scale_routed_moe trtllm_sage_attention_quantize xqa
xqa_mla
"""
MISSING = frozenset(_MISSING.split())


def not_supported(feature: str) -> NoReturn:
    raise NotImplementedError(_refusal(feature))


def _refusal(feature: str) -> str:
    return f"{feature} is not supported by attn_backend.flashinfer (docs/flashinfer.md lists what is)"


def refuse_given(**arguments: object) -> None:
    """Refuses the first argument that is given, that is, not None or False."""
    for name, value in arguments.items():
        if value is not None and value is not False:
            not_supported(f"the argument {name}")


class _Missing(type):
    """The metaclass of missing classes.

    An enumeration's members are missing as well: reading one raises, and `hasattr` is False.
    """

    def __getattr__(cls, member: str) -> NoReturn:
        raise AttributeError(_refusal(f"{cls.__name__}.{member}"))


@cache
def missing(name: str) -> Any:
    """A FlashInfer function that refuses every call, or, if the name is a class's, a class that cannot be
    instantiated. The class can be imported, used in annotations and isinstance, and derived from.
    """

    def refuse(*_arguments: Any, **_options: Any) -> NoReturn:
        not_supported(name)

    last = name.rsplit(".", 1)[-1]
    doc = f"Raises NotImplementedError: {name} is not supported."
    if last[0].isupper():
        return _Missing(last, (), {"__init__": refuse, "__doc__": doc})
    refuse.__name__ = refuse.__qualname__ = last
    refuse.__doc__ = doc
    return refuse


# module -> names that engines import from it unconditionally if flashinfer is installed (vLLM 0.26 to 0.33,
# SGLang 0.5.17 to 0.5.23)
NAMES = {
    "comm.mnnvl": ("CommBackend",),
    "fp4_quantization": ("block_scale_interleave",),
    "fused_moe": (
        "convert_to_block_layout",
        "trtllm_fp4_block_scale_moe",
        "trtllm_fp4_block_scale_routed_moe",
        "trtllm_mxint4_block_scale_moe",
    ),
    "fused_moe.core": ("_maybe_get_cached_w3_w1_permute_indices", "get_w2_permute_indices_with_cache"),
    "gemm": ("fp8_blockscale_gemm_sm90", "gemm_fp8_nt_groupwise"),
}


def names_of(module: str) -> dict[str, Any]:
    """The contents of the alias's module `flashinfer.<module>`."""
    return {name: missing(f"{module}.{name}") for name in NAMES[module]}
