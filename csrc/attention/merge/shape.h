// Shape of the merge kernel: what its launcher and the kernel itself must agree on.
#pragma once

#include "common/math.h"
#include "common/platform.h"

namespace attn {

/// Blocks of the merge kernel. A warp merges some columns of a row.
constexpr int32_t kMergeThreads = 256;
constexpr int32_t kMergeColumns = 128;

/// Blocks that share a multiprocessor (ADR 22). Compiled for sm_80, the kernel needs the registers that three leave.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 900
constexpr int32_t kMergeBlocks = 3;
#else
constexpr int32_t kMergeBlocks = 4;
#endif

ATTN_HD constexpr int32_t merge_column_blocks(int32_t v_columns) { return ceil_div(v_columns, kMergeColumns); }

/// Blocks for each CTA of the attention kernel: one for every kMergeRows rows of the largest row tile.
ATTN_HD constexpr int32_t merge_blocks(int32_t max_tile_rows, int32_t v_columns) {
  constexpr int32_t kMergeRows = 32;
  return ceil_div(max_tile_rows * merge_column_blocks(v_columns), kMergeRows);
}

}  // namespace attn
