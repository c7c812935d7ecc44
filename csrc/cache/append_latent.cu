// Quantizes new tokens of MLA to rows that carry their scales (ScaledLatentRow). Any grid works.

#include "cache/params.h"
#include "common/elements.cuh"
#include "common/ptx/grid_dependency.cuh"
#include "common/ptx/math.cuh"
#include "common/ptx/warp.cuh"

namespace attn {

/// A lane has four columns of the 128 of its warp's scale.
__device__ __forceinline__ void append_latent(const LatentParams& p) {
  using Row = ScaledLatentRow;
  constexpr int kColumns = Row::kColumnsOfScale / 32;
  const int32_t thread = static_cast<int32_t>(threadIdx.x), first = thread * kColumns;
  for (int32_t token = blockIdx.x; token < p.num_tokens; token += gridDim.x) {
    char* const row = p.row(token);
    if (row == nullptr) continue;
    const uint16_t* latent = static_cast<const uint16_t*>(p.latent) + token * p.latent_stride + first;
    float x[kColumns], largest = 0.0f;
#pragma unroll
    for (int i = 0; i < kColumns; ++i) {
      x[i] = BFloat16::unpack(latent[i]);
      largest = fmaxf(largest, fabsf(x[i]));
    }
    const float scale = latent_scale(ptx::warp_max(largest));
    const uint32_t low = ptx::pack_e4m3(x[0] / scale, x[1] / scale);
    const uint32_t high = ptx::pack_e4m3(x[2] / scale, x[3] / scale);
    *reinterpret_cast<uint32_t*>(row + first) = low | high << 16;
    if (thread % 32 == 0) *reinterpret_cast<float*>(row + Row::kScalesAt + thread / 32 * 4) = scale;
    if (thread < Row::kRopeColumns)
      reinterpret_cast<uint16_t*>(row + Row::kRopeAt)[thread] =
          (static_cast<const uint16_t*>(p.rope) + token * p.rope_stride)[thread];
  }
}

}  // namespace attn

extern "C" __global__ void __launch_bounds__(attn::kAppendLatentThreads)
    append_latent_kernel(const __grid_constant__ attn::LatentParams params) {
  attn::ptx::wait_for_previous_grid();
  attn::ptx::allow_next_grid();  // it waits for this one itself, before it reads the cache
  attn::append_latent(params);
}
