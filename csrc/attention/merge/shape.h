// Shape of the merge kernel: what its launcher and the kernel must agree on.
#pragma once

#include "common/platform.h"

namespace attn {

/// One warp merges a row; the grid has a block for every kMergeRows rows of the largest row tile.
constexpr int32_t kMergeThreads = 256;
constexpr int32_t kMergeRows = 32;

}  // namespace attn
