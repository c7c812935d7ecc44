"""flashinfer.rope: not there yet."""

from __future__ import annotations

from .features import missing

apply_llama31_rope = missing("apply_llama31_rope")
apply_llama31_rope_inplace = missing("apply_llama31_rope_inplace")
apply_llama31_rope_pos_ids = missing("apply_llama31_rope_pos_ids")
apply_llama31_rope_pos_ids_inplace = missing("apply_llama31_rope_pos_ids_inplace")
apply_rope = missing("apply_rope")
apply_rope_inplace = missing("apply_rope_inplace")
apply_rope_pos_ids = missing("apply_rope_pos_ids")
apply_rope_pos_ids_inplace = missing("apply_rope_pos_ids_inplace")
apply_rope_with_cos_sin_cache = missing("apply_rope_with_cos_sin_cache")
apply_rope_with_cos_sin_cache_inplace = missing("apply_rope_with_cos_sin_cache_inplace")
mla_rope_quantize_fp8 = missing("rope.mla_rope_quantize_fp8")
rope_quantize_fp8 = missing("rope.rope_quantize_fp8")
rope_quantize_fp8_append_paged_kv_cache = missing("rope.rope_quantize_fp8_append_paged_kv_cache")
