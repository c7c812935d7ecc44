"""FlashInfer's Python API on the kernels of this package: `import attn_backend.flashinfer as flashinfer`.

docs/flashinfer.md says what maps to what, what differs, and what is not there. What is not there raises NotImplementedError with its name.
"""

from __future__ import annotations

from . import attention, cascade, decode, logits_processor, page, pod, prefill, quantization, sampling, sparse, utils
from .attention import BatchAttention, BatchAttentionWithAttentionSinkWrapper
from .cascade import (
    BatchDecodeWithSharedPrefixPagedKVCacheWrapper,
    BatchPrefillWithSharedPrefixPagedKVCacheWrapper,
    MultiLevelCascadeAttentionWrapper,
    merge_state,
    merge_state_in_place,
    merge_states,
)
from .decode import (
    BatchDecodeMlaWithPagedKVCacheWrapper,
    BatchDecodeWithPagedKVCacheWrapper,
    CUDAGraphBatchDecodeWithPagedKVCacheWrapper,
    cudnn_batch_decode_with_kv_cache,
    fast_decode_plan,
    single_decode_with_kv_cache,
)
from .page import append_paged_kv_cache, append_paged_mla_kv_cache, get_batch_indices_positions, get_seq_lens
from .pod import BatchPODWithPagedKVCacheWrapper, PODWithPagedKVCacheWrapper
from .prefill import (
    BatchPrefillWithPagedKVCacheWrapper,
    BatchPrefillWithRaggedKVCacheWrapper,
    single_prefill_with_kv_cache,
    single_prefill_with_kv_cache_return_lse,
)
from .quantization import packbits, segment_packbits
from .sampling import (
    chain_speculative_sampling,
    min_p_sampling_from_probs,
    sampling_from_logits,
    sampling_from_probs,
    softmax,
    top_k_mask_logits,
    top_k_renorm_probs,
    top_k_sampling_from_probs,
    top_k_top_p_sampling_from_logits,
    top_k_top_p_sampling_from_probs,
    top_p_renorm_probs,
    top_p_sampling_from_probs,
)
from .sparse import BlockSparseAttentionWrapper, VariableBlockSparseAttentionWrapper
