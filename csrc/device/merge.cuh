// Merges the partial states of the (row tile, head) pairs that several CTAs share, in the order of the CTAs.
//
// Block (x, y) serves the pair in whose middle CTA x's interval ends, if that is where the pair's first part ends; one warp a row, and rows of the tile round
// robin over the blocks of a column. Any grid with num_ctas columns works.
#pragma once

#include "attn/params.h"
#include "attn/tile.h"
#include "device/element.cuh"
#include "device/output.cuh"
#include "device/ptx/grid_dependency.cuh"
#include "device/ptx/math.cuh"
#include "device/work.cuh"

namespace attn {

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

__device__ __forceinline__ float warp_max(float x) {
#pragma unroll
  for (int offset = 16; offset > 0; offset /= 2) x = fmaxf(x, __shfl_xor_sync(0xffffffffu, x, offset));
  return x;
}

__device__ __forceinline__ float warp_sum(float x) {
#pragma unroll
  for (int offset = 16; offset > 0; offset /= 2) x += __shfl_xor_sync(0xffffffffu, x, offset);
  return x;
}

/// The parts of a pair: number 0 ends inside CTA `cta`'s interval, number i starts CTA cta + i's.
struct PartialStates {
  const AttentionParams& params;
  int32_t cta;
  int32_t count;

  __device__ __forceinline__ int64_t row(int32_t part, int32_t tile_row) const {
    const int32_t slot = part == 0 ? partial_slot(cta, kEndsInside) : partial_slot(cta + part, kStartsInside);
    return static_cast<int64_t>(slot) * params.max_tile_rows + tile_row;
  }
};

/// Merges one row; a warp's work. Lane i holds columns [4i, 4i + 4) of each group of 128 columns.
template <class Element, int kColumnGroups>
__device__ __forceinline__ void merge_row(const PartialStates& parts, int32_t tile_row, const OutputRow& row) {
  const AttentionParams& params = parts.params;
  constexpr int kBatch = 4;   // parts whose loads are under way together
  const int32_t lane = threadIdx.x % 32;
  float4 o[kColumnGroups];
#pragma unroll
  for (int c = 0; c < kColumnGroups; ++c) o[c] = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
  float maximum = minus_infinity();   // of the parts' lse, to base 2
  float sum = 0.0f;                   // of exp2(lse - maximum)

  for (int32_t first = 0; first < parts.count; first += 32) {
    // Lane i weighs part first + i.
    const float lse = first + lane < parts.count ? params.partial_lse[parts.row(first + lane, tile_row)] * kLog2E : minus_infinity();
    const float new_maximum = fmaxf(maximum, warp_max(lse));
    const float base = new_maximum == minus_infinity() ? 0.0f : new_maximum;
    const float weight = ptx::ex2(lse - base);
    const float correction = ptx::ex2(maximum - base);
    sum = sum * correction + warp_sum(weight);
    maximum = new_maximum;
#pragma unroll
    for (int c = 0; c < kColumnGroups; ++c) o[c] = make_float4(o[c].x * correction, o[c].y * correction, o[c].z * correction, o[c].w * correction);

    const int32_t count = min_of(parts.count - first, 32);
    for (int32_t i = 0; i < count; i += kBatch) {
      float4 x[kBatch][kColumnGroups];
#pragma unroll
      for (int j = 0; j < kBatch; ++j) {
        const float* part = params.partial_o + parts.row(first + i + j, tile_row) * params.head_dim;
#pragma unroll
        for (int c = 0; c < kColumnGroups; ++c) {
          const int32_t column = c * 128 + lane * 4;
          x[j][c] = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
          if (i + j < count && column < params.head_dim) x[j][c] = *reinterpret_cast<const float4*>(part + column);
        }
      }
#pragma unroll
      for (int j = 0; j < kBatch; ++j) {
        const float w = __shfl_sync(0xffffffffu, weight, i + j);   // 0 behind the last part
#pragma unroll
        for (int c = 0; c < kColumnGroups; ++c) {
          o[c] = make_float4(o[c].x + w * x[j][c].x, o[c].y + w * x[j][c].y, o[c].z + w * x[j][c].z, o[c].w + w * x[j][c].w);
        }
      }
    }
  }

  const float inverse = sum > 0.0f ? __fdividef(1.0f, sum) : 0.0f;
#pragma unroll
  for (int c = 0; c < kColumnGroups; ++c) {
    const int32_t column = c * 128 + lane * 4;
    if (column < params.head_dim) {
      *reinterpret_cast<uint2*>(row.o(params) + column * kElementBytes) =
          make_uint2(Element::pack(o[c].x * inverse, o[c].y * inverse), Element::pack(o[c].z * inverse, o[c].w * inverse));
    }
  }
  if (lane == 0) row.write_lse(params, state_lse(maximum, sum));
}

template <class Element>
__device__ __forceinline__ void merge(const AttentionParams& params) {
  // The schedule was complete before the attention kernel started: it is read while that one still runs.
  const Schedule& schedule = params.schedule;
  const int32_t cta = blockIdx.x;
  const Position pair = schedule.positions[cta + 1];
  const bool has_pair = pair.kv_tile > 0 && !is_inside(schedule.positions[cta], pair);
  if (!has_pair) {
    ptx::wait_for_previous_grid();   // every block waits: what follows this grid may rely on the attention kernel's output
    return;
  }
  const PartialStates parts{params, cta, 1 + count_parts_behind(params, cta, pair)};
  const RowTileRows rows(schedule, pair.tile, params.group_size.divisor);
  ptx::wait_for_previous_grid();

  constexpr int kWarpsPerBlock = kMergeThreads / 32;
  for (int32_t tile_row = blockIdx.y * kWarpsPerBlock + threadIdx.x / 32; tile_row < rows.count; tile_row += gridDim.y * kWarpsPerBlock) {
    const OutputRow row(params, rows, pair.head, tile_row);
    if (!row.exists) continue;
    if (params.head_dim <= 128) {
      merge_row<Element, 1>(parts, tile_row, row);
    } else {
      merge_row<Element, 2>(parts, tile_row, row);
    }
  }
}

}  // namespace attn
