// As csrc/common/ptx/special_registers.cuh.
#pragma once

#include "cuda_emulation.h"

namespace attn::ptx {

inline int lane_id() { return emulated_lane(); }
inline int thread_id() { return threadIdx.x; }
inline uint32_t num_blocks() { return static_cast<uint32_t>(gridDim.x * gridDim.y); }
inline uint32_t block_id() { return static_cast<uint32_t>(blockIdx.y * gridDim.x + blockIdx.x); }

}  // namespace attn::ptx
