"""flashinfer.decode: one query, or a few, for each request."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from .arguments import Scale, check_kv_layout, pos_encoding, ragged_cache
from .batch_decode import (
    BatchDecodeWithPagedKVCacheWrapper,
    CUDAGraphBatchDecodeWithPagedKVCacheWrapper,
    fast_decode_plan,
)
from .features import missing
from .heads import heads_of
from .jit.attention import JitModule
from .planned_attention import Logits
from .prefill import single_prefill_with_kv_cache_with_jit_module, single_request
from .scales import scaled
from .utils import MaskMode

__all__ = [
    "BatchDecodeMlaWithPagedKVCacheWrapper",
    "BatchDecodeWithPagedKVCacheWrapper",
    "CUDAGraphBatchDecodeWithPagedKVCacheWrapper",
    "cudnn_batch_decode_with_kv_cache",
    "fast_decode_plan",
    "single_decode_with_kv_cache",
    "single_decode_with_kv_cache_with_jit_module",
    "trtllm_batch_decode_with_kv_cache",
    "trtllm_batch_decode_with_kv_cache_mla",
    "xqa_batch_decode_with_kv_cache",
]


def single_decode_with_kv_cache(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    kv_layout: str = "NHD",
    pos_encoding_mode: str = "NONE",
    use_tensor_cores: bool = False,
    q_scale: float | None = None,
    k_scale: float | None = None,
    v_scale: float | None = None,
    window_left: int = -1,
    logits_soft_cap: float | None = None,
    sm_scale: Scale | None = None,
    rope_scale: float | None = None,
    rope_theta: float | None = None,
    return_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """One query of one request.

    Args:
        q: [num_qo_heads, head_dim].
        k, v: NHD [kv_len, num_kv_heads, head_dim], HND [num_kv_heads, kv_len, head_dim].

    Returns:
        [num_qo_heads, head_dim]; with return_lse also float32 [num_qo_heads], to base 2.

    Raises:
        ValueError: an argument that is wrong. NotImplementedError: one that is not supported, by its name.
    """
    check_kv_layout(kv_layout)
    logits = Logits(logits_soft_cap or 0.0, pos_encoding(pos_encoding_mode, rope_scale, rope_theta))
    kv = ragged_cache(k, v, kv_layout)
    heads = heads_of(q.device, q.shape[0], kv.num_kv_heads, q.shape[-1], kv.v.shape[-1], q.dtype, k.dtype)
    scales = scaled(heads, 1, sm_scale, q_scale, k_scale)
    result = single_request(
        q.unsqueeze(0), kv, heads, logits, True, window_left, scales, return_lse, v_scale=v_scale
    )
    return (result[0].squeeze(0), result[1].squeeze(0)) if isinstance(result, tuple) else result.squeeze(0)


def single_decode_with_kv_cache_with_jit_module(
    jit_module: JitModule,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *args: Any,
    kv_layout: str = "NHD",
    window_left: int = -1,
    return_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """single_decode_with_kv_cache under a variant of one's own; args: what its jit_args name, tensors first.

    Raises:
        ValueError: an argument that is wrong. NotImplementedError: one that is not supported, by its name.
    """
    masked = MaskMode.CAUSAL.value
    result = single_prefill_with_kv_cache_with_jit_module(
        jit_module,
        q.unsqueeze(0),
        k,
        v,
        *args,
        kv_layout=kv_layout,
        mask_mode=masked,
        window_left=window_left,
        return_lse=return_lse,
    )
    return (result[0].squeeze(0), result[1].squeeze(0)) if isinstance(result, tuple) else result.squeeze(0)


BatchDecodeMlaWithPagedKVCacheWrapper = missing("BatchDecodeMlaWithPagedKVCacheWrapper")
cudnn_batch_decode_with_kv_cache = missing("cudnn_batch_decode_with_kv_cache")
trtllm_batch_decode_with_kv_cache = missing("trtllm_batch_decode_with_kv_cache")
trtllm_batch_decode_with_kv_cache_mla = missing("trtllm_batch_decode_with_kv_cache_mla")
xqa_batch_decode_with_kv_cache = missing("xqa_batch_decode_with_kv_cache")


def _grouped_size_compiled_for_decode_kernels(num_qo_heads: int, num_kv_heads: int) -> bool:
    """Engines choose use_tensor_cores by this, which makes no difference here."""
    return num_qo_heads // num_kv_heads in (1, 2, 4, 8)
