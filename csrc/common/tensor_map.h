// A tensor as TMA sees it.
#pragma once

#include <cstdint>

namespace attn {

/// Encoded by the driver, read by the hardware (CUtensorMap).
struct alignas(64) TensorMap {
  uint64_t words[16];
};

}  // namespace attn
