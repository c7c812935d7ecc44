// Merges the partial states of the (row tile, head) pairs that several CTAs share, in the order of the CTAs.
//
// Block (x, y) serves the pair in whose middle CTA x's interval ends, if it starts there as well; one warp a row. Any grid with num_ctas columns works.
#pragma once

#include "attn/params.h"
#include "attn/tile.h"
#include "device/element.cuh"
#include "device/output.cuh"
#include "device/ptx/grid_dependency.cuh"
#include "device/ptx/math.cuh"
#include "device/work.cuh"

namespace attn {

constexpr int32_t kMaxMergeHeadDim = 256;

__device__ __forceinline__ bool is_inside(const Position& position, const Position& pair) {
  return position.tile == pair.tile && position.head == pair.head && position.kv_tile > 0;
}

/// CTAs behind `cta` whose intervals start inside `pair`. All lanes of the warp take part.
__device__ __forceinline__ int32_t count_parts_behind(const AttentionParams& params, int32_t cta, const Position& pair) {
  const int32_t lane = threadIdx.x % 32;
  for (int32_t first = cta + 1;; first += 32) {
    const bool inside = first + lane < params.num_ctas && is_inside(params.schedule.positions[first + lane], pair);
    const uint32_t outside = ~__ballot_sync(0xffffffffu, inside);
    if (outside != 0) return first - cta - 1 + __ffs(outside) - 1;
  }
}

template <class Element>
__device__ __forceinline__ void merge(const AttentionParams& params) {
  ptx::wait_for_previous_grid();
  const Schedule& schedule = params.schedule;
  const int32_t cta = blockIdx.x;
  const Position pair = schedule.positions[cta + 1];
  const Position begin = schedule.positions[cta];
  if (pair.kv_tile == 0 || is_inside(begin, pair)) return;

  const RowTile& tile = schedule.tiles[pair.tile];
  const RowTileRows rows(tile, schedule.groups[tile.group], params.group_size.divisor);
  const int32_t num_parts = 1 + count_parts_behind(params, cta, pair);
  const int32_t lane = threadIdx.x % 32;
  const auto part_row = [&](int32_t part, int32_t tile_row) {
    const int32_t slot = part == 0 ? partial_slot(cta, kEndsInside) : partial_slot(cta + part, kStartsInside);
    return static_cast<int64_t>(slot) * params.max_tile_rows + tile_row;
  };

  constexpr int kWarpsPerBlock = kMergeThreads / 32;
  for (int32_t tile_row = blockIdx.y * kWarpsPerBlock + threadIdx.x / 32; tile_row < rows.count; tile_row += gridDim.y * kWarpsPerBlock) {
    const OutputRow row(params, rows, pair.head, tile_row);
    if (!row.exists) continue;

    // Lane i holds columns [4i, 4i + 4) and those 128 further on.
    constexpr int kChunks = kMaxMergeHeadDim / 128;
    float4 o[kChunks];
#pragma unroll
    for (int c = 0; c < kChunks; ++c) o[c] = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
    float maximum = minus_infinity();   // of the parts' lse, to base 2
    float sum = 0.0f;                   // of exp2(lse - maximum)

    for (int32_t first = 0; first < num_parts; first += 32) {
      // Lane i weighs part first + i.
      const float lse = first + lane < num_parts ? params.partial_lse[part_row(first + lane, tile_row)] * kLog2E : minus_infinity();
      float lanes_maximum = lse;
#pragma unroll
      for (int offset = 16; offset > 0; offset /= 2) lanes_maximum = fmaxf(lanes_maximum, __shfl_xor_sync(0xffffffffu, lanes_maximum, offset));
      const float new_maximum = fmaxf(maximum, lanes_maximum);
      const float base = new_maximum == minus_infinity() ? 0.0f : new_maximum;
      const float weight = ptx::ex2(lse - base);
      const float correction = ptx::ex2(maximum - base);
      float weights = weight;
#pragma unroll
      for (int offset = 16; offset > 0; offset /= 2) weights += __shfl_xor_sync(0xffffffffu, weights, offset);
      sum = sum * correction + weights;
      maximum = new_maximum;
#pragma unroll
      for (int c = 0; c < kChunks; ++c) o[c] = make_float4(o[c].x * correction, o[c].y * correction, o[c].z * correction, o[c].w * correction);

      const int32_t count = min_of(num_parts - first, 32);
#pragma unroll 4
      for (int32_t i = 0; i < count; ++i) {
        const float w = __shfl_sync(0xffffffffu, weight, i);
        const float* part = params.partial_o + part_row(first + i, tile_row) * params.head_dim;
#pragma unroll
        for (int c = 0; c < kChunks; ++c) {
          const int32_t column = c * 128 + lane * 4;
          if (column >= params.head_dim) continue;
          const float4 x = *reinterpret_cast<const float4*>(part + column);
          o[c] = make_float4(o[c].x + w * x.x, o[c].y + w * x.y, o[c].z + w * x.z, o[c].w + w * x.w);
        }
      }
    }

    const float inverse = sum > 0.0f ? 1.0f / sum : 0.0f;
#pragma unroll
    for (int c = 0; c < kChunks; ++c) {
      const int32_t column = c * 128 + lane * 4;
      if (column >= params.head_dim) continue;
      *reinterpret_cast<uint2*>(row.o(params) + column * kElementBytes) =
          make_uint2(Element::pack(o[c].x * inverse, o[c].y * inverse), Element::pack(o[c].z * inverse, o[c].w * inverse));
    }
    if (lane == 0) row.write_lse(params, state_lse(maximum, sum));
  }
}

}  // namespace attn
