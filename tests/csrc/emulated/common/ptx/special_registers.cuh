// As csrc/common/ptx/special_registers.cuh.
#pragma once

#include "cuda_emulation.h"

namespace attn::ptx {

inline int lane_id() { return emulated_lane(); }
inline int thread_id() { return threadIdx.x; }

}  // namespace attn::ptx
