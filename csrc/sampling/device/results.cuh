// What the kernels write for a row, whichever way they came to it.
#pragma once

#include "sampling/device/race.cuh"

namespace attn {

__device__ __forceinline__ void store_token(const SamplingParams& params, int64_t index, int32_t token) {
  if (params.token_ids_are_int64 != 0)
    static_cast<int64_t*>(params.token_ids)[index] = token;
  else
    static_cast<int32_t*>(params.token_ids)[index] = token;
}

/// The first token that the mask allows, or 0: of a row that cannot be sampled. For a warp.
__device__ __forceinline__ int32_t first_allowed(const SamplingParams& params, int32_t row) {
  uint32_t first = 0xffffffffu;
  if (params.token_mask != nullptr) {
    const uint32_t* words = params.token_mask + static_cast<int64_t>(row) * params.mask_stride;
#pragma unroll 1
    for (int32_t w = ptx::lane_id(); w < ceil_div(params.vocab, 32) && first == 0xffffffffu; w += 32) {
      const int32_t rest = params.vocab - 32 * w;
      const uint32_t bits = __ldg(words + w) & (rest >= 32 ? 0xffffffffu : (1u << rest) - 1);
      if (bits != 0) first = static_cast<uint32_t>(32 * w + __ffs(static_cast<int32_t>(bits)) - 1);
    }
  }
  first = ptx::warp_min(first);
  return first == 0xffffffffu ? 0 : static_cast<int32_t>(first);
}

}  // namespace attn
