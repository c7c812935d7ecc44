// As csrc/common/ptx/shared_reduction.cuh.
#pragma once

#include <algorithm>
#include <cstdint>

namespace attn::ptx {

inline void shared_add(int32_t* address, int32_t value) { *address += value; }
inline void shared_max(int32_t* address, int32_t value) { *address = std::max(*address, value); }
inline void shared_min(int32_t* address, int32_t value) { *address = std::min(*address, value); }

}  // namespace attn::ptx
