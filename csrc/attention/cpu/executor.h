// Attention on CPU threads, as the attention and merge kernels do it on a GPU.
#pragma once

#include "attention/cpu/kernels.h"
#include "attention/merge/merge_states.h"
#include "attention/params.h"
#include "common/data_type.h"

namespace attn::cpu {

/// Runs the schedule: every CTA's interval of work, then the merge of split tiles. All pointers are on the host.
/// `dims`: multiples of 8, at most kMaxHeadDim. The result's bits depend on the schedule and on the instruction set in
/// use (isa.h), not on the number of threads. Sets kPageIndexInvalid in the schedule's errors if a page id lay outside
/// the cache. `token_scales`: without data for other caches. `rotates`: K and V are rotated. `dtype`: of Q and O.
/// `variant_kernels`: kernels that replace the standard ones; may be nullptr.
void run_attention(const LatentAttentionParams& given, const AttentionTokenScales& token_scales, DataType dtype,
                   DataType kv_dtype, HeadDims dims, bool rotates, const Kernels* variant_kernels);

/// The kernels in a file with a VariantModule; it stays open until the process ends. Throws RuntimeError naming the
/// file and what is wrong with it.
Kernels load_variant(const char* file);

/// Merges attention states that lie in tensors.
void merge_states(const MergeStatesParams& params);

}  // namespace attn::cpu
