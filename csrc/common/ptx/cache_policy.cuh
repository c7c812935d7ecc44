// How long the L2 cache keeps what a copy reads.
#pragma once

#include "common/platform.h"

namespace attn::ptx {

/// The values that createpolicy makes, for all lines of a copy.
enum CachePolicy : uint64_t {
  kKeepNormally = 0x1000000000000000,  // evict_normal
  kEvictFirst = 0x12f0000000000000,
};

}  // namespace attn::ptx
