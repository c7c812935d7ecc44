// Shape of the merge kernel: what its launcher and the kernel itself must agree on.
#pragma once

#include <cstdint>

namespace attn {

/// Blocks of the merge kernel. One warp merges a row; the grid of the merge kernel has a block for every kMergeRows
/// rows of the largest row tile.
constexpr int32_t kMergeThreads = 256;
constexpr int32_t kMergeRows = 32;

}  // namespace attn
