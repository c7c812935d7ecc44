"""What FlashInfer has and this package has not: refused by name, never computed wrongly."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

# Names that `import flashinfer` has, and that have no counterpart here: quantised products, mixtures of experts, norms, activations, linear attention,
# other libraries.
_MISSING = """
ActivationType B12xMoEWrapper CuteDslMoEWrapper CuteDslMxfp8Mxfp4MoEWrapper RecurrentKDAPrefillWorkspace
RecurrentKDAPrefillWrapper RoutingMethodType SegmentGEMMWrapper SfLayout TopKTieBreak add_rmsnorm_fp4quant autotune b12x_fused_moe
block_scale_interleave bmm_bf16 bmm_fp8 bmm_mxfp8 chunk_gated_delta_rule cute_dsl_fused_moe_mxfp8_mxfp4 cute_dsl_fused_moe_nvfp4 cutlass_fused_moe
e2m1_and_ufp8sf_scale_to_float fi_trace fp4_quantize fused_add_rmsnorm fused_add_rmsnorm_quant fused_dit_gate_residual_layernorm_gamma_beta
fused_dit_gate_residual_layernorm_scale_shift fused_dit_residual_layernorm_scale_shift fused_kda_decode fused_qk_rmsnorm_rope fused_rmsnorm_silu
gdn_fused_decode_step gdn_fused_decode_step_supported gelu_and_mul gelu_tanh_and_mul gemma_fused_add_rmsnorm gemma_rmsnorm get_fp4_quantization_module
grouped_mm_bf16 grouped_mm_fp4 grouped_mm_fp8 grouped_mm_mxfp8 is_gated_activation layernorm layernorm_quant mm_bf16 mm_bf16_fp4 mm_fp4 mm_fp8
mm_mxfp8 mm_nvfp4_svdquant mxfp4_dequantize mxfp4_dequantize_host mxfp4_quantize mxfp8_dequantize_host mxfp8_grouped_quantize mxfp8_quantize
nvfp4_attention_sm120_fwd nvfp4_attention_sm120_quantize_qkv nvfp4_batched_quantize nvfp4_block_scale_interleave nvfp4_kv_dequantize
nvfp4_kv_dequantize_paged nvfp4_kv_quantize nvfp4_quantize nvfp4_quantize_paged_kv_cache nvfp4_quantize_smooth packed_kda_decode
prepare_bf16_fp4_weights prepare_low_latency_gemm_weights recurrent_kda reorder_rows_for_gated_act_gemm rmsnorm rmsnorm_fp4quant rmsnorm_quant
scaled_fp4_grouped_quantize shuffle_matrix_a shuffle_matrix_sf_a silu_and_mul silu_and_mul_nvfp4_quantize silu_and_mul_scaled_nvfp4_experts_quantize
svdquant_linear tgv_gemm_sm100 top_k top_k_page_table_transform top_k_ragged_transform top_k_varlen trtllm_bf16_moe trtllm_bf16_routed_moe
trtllm_fmha_v2_prefill trtllm_fp4_block_scale_moe trtllm_fp4_block_scale_routed_moe trtllm_fp8_block_scale_moe trtllm_fp8_block_scale_routed_moe
trtllm_fp8_per_tensor_scale_moe trtllm_fp8_per_tensor_scale_routed_moe trtllm_sage_attention_quantize xqa xqa_mla
"""
MISSING = frozenset(_MISSING.split())


def not_supported(feature: str) -> NoReturn:
    """Raises NotImplementedError that names the feature."""
    raise NotImplementedError(f"{feature} is not supported by attn_backend.flashinfer (docs/flashinfer.md lists what is)")


def refuse_given(**arguments: object) -> None:
    """Refuses the first argument that is given, that is, not None or False."""
    for name, value in arguments.items():
        if value is not None and value is not False:
            not_supported(f"the argument {name}")


def missing(name: str) -> Callable[..., NoReturn]:
    """A function of FlashInfer's that refuses every call."""

    def refuse(*_arguments: Any, **_options: Any) -> NoReturn:
        not_supported(name)

    refuse.__name__ = refuse.__qualname__ = name.rsplit(".", 1)[-1]
    refuse.__doc__ = f"Raises NotImplementedError: {name} is not supported."
    return refuse
