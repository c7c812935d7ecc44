// As csrc/common/ptx/prefetch.cuh: there is no cache.
#pragma once

namespace attn::ptx {

inline void prefetch_to_l2(const char*) {}

}  // namespace attn::ptx
