// Element types of tensors, as the CPU kernels see them.
#pragma once

#include <cstdint>

namespace attn::cpu {

struct Half {
  uint16_t bits;
};

struct BFloat16 {
  uint16_t bits;
};

}  // namespace attn::cpu
