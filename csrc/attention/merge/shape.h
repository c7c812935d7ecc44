// Shape of the merge kernel: what its launcher and the kernel itself must agree on.
#pragma once

#include "common/platform.h"

namespace attn {

constexpr int32_t kMergeThreads = 256;
constexpr int32_t kMergeColumns = 128;  // of a row, that a warp merges

/// Blocks that share a multiprocessor (ADR 22). Compiled for sm_80, the kernel needs the registers that three leave.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 900
constexpr int32_t kMergeBlocks = 3;
#else
constexpr int32_t kMergeBlocks = 4;
#endif

/// Blocks for each CTA of the attention kernel and kMergeColumns columns: one for every kMergeRows rows of the largest
/// row tile.
constexpr int32_t kMergeRows = 32;

}  // namespace attn
