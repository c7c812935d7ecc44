// As csrc/common/ptx/global_timer.cuh.
#pragma once

#include "cuda_emulation.h"

namespace attn::ptx {

inline uint64_t global_timer() { return emulation::time(); }

constexpr uint64_t kMaxWait = 4'000'000'000;

}  // namespace attn::ptx
