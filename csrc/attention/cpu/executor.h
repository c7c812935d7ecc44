// Executes a schedule on CPU threads, as the attention and merge kernels do on a GPU.
#pragma once

#include "attention/cpu/kernels.h"
#include "attention/params.h"
#include "common/data_type.h"

namespace attn::cpu {

/// Runs the schedule: every CTA's interval of work, then the merge of split tiles. All pointers are on the host.
/// `dims`: multiples of 8, at most kMaxHeadDim. The result's bits depend on the schedule and on the instruction set in
/// use (isa.h), not on the number of threads. Sets kPageIndexInvalid in the schedule's errors if a page id lay outside
/// the cache. `dtype`: of Q and O. `variant_kernels`: kernels that replace the standard ones; may be nullptr.
void run_attention(const LatentAttentionParams& given, DataType dtype, DataType kv_dtype, HeadDims dims,
                   const Kernels* variant_kernels);

}  // namespace attn::cpu
