// As csrc/common/ptx/prefetch.cuh: there is no cache.
#pragma once

#include <cstdint>

namespace attn::ptx {

inline void prefetch_to_l2(const char*) {}
inline void prefetch_bytes_to_l2(const char*, uint32_t) {}

}  // namespace attn::ptx
