// Merges the states of a row, one warp a row and head.
//
// One level: what is to be merged are the (row tile, head) pairs that several CTAs share. Block (x, y) serves the pair in whose middle CTA x's interval ends, if
// that is where the pair's first part ends; rows of the tile go round robin over the blocks of a column. Any grid with num_ctas columns works.
//
// Several levels: every row has a state in each level that it is in, and more parts where its row tile is shared by several CTAs. Rows go round robin over all
// warps. The order of merging is fixed: level by level, and in a level in the order of the CTAs.
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
struct PairStates {
  const AttentionParams& params;
  int32_t cta;
  int32_t count;
  int32_t tile_row;

  /// Row of partial_o and partial_lse that holds part number `part`.
  __device__ __forceinline__ int64_t row(int32_t part) const {
    const int32_t slot = part == 0 ? partial_slot(cta, kEndsInside) : partial_slot(cta + part, kStartsInside);
    return static_cast<int64_t>(slot) * params.max_tile_rows + tile_row;
  }

  /// The same for a part that is the same in all lanes.
  __device__ __forceinline__ int64_t uniform_row(int32_t part, int64_t) const { return row(part); }
};

/// The states of a row and head over all levels. Lane l of the warp looks after level l.
struct RowStates {
  const AttentionParams& params;
  int32_t count;           // of all levels; 0: the row is in none
  int32_t parts_before;    // of the levels before this lane's
  int32_t level_parts;     // of this lane's level; 0: the row is not in it
  int32_t first_cta;       // that starts inside the row's tile
  int32_t tile_row;
  int64_t first_state;

  /// Takes part as a whole warp.
  __device__ __forceinline__ RowStates(const AttentionParams& params_, int32_t row, int32_t qo_head) : params(params_) {
    const ScheduleHeader& header = *params.schedule.header;
    const int32_t level = threadIdx.x % 32;
    level_parts = first_cta = tile_row = 0;
    first_state = 0;
    if (level < header.num_levels) {
      const RowLink link = params.schedule.links[static_cast<int64_t>(level) * params.max_rows + row];
      if (link.group >= 0) {
        const RowGroup& group = params.schedule.groups[link.group];
        const int32_t kv_head = params.group_size.divide(qo_head);
        const int32_t packed = link.index * params.group_size.divisor + params.group_size.modulo(qo_head);
        tile_row = packed % tile_rows(group.kind);
        const int32_t tile = group.tile_begin + packed / tile_rows(group.kind);
        if (tile < header.num_tiles) {
          const CtaRange inside = ctas_inside(header, params.schedule.tiles[tile], kv_head, params.num_ctas);
          level_parts = 1 + inside.end - inside.begin;
          first_cta = inside.begin;
          first_state = row_state_index(params, level, row, qo_head);
        }
      }
    }
    int32_t total = level_parts;
#pragma unroll
    for (int offset = 1; offset < 32; offset *= 2) {
      const int32_t before = __shfl_up_sync(0xffffffffu, total, offset);
      if (level >= offset) total += before;
    }
    parts_before = total - level_parts;
    count = __shfl_sync(0xffffffffu, total, 31);
  }

  /// Row of partial_o and partial_lse that holds part number `part`, which may differ from lane to lane; all lanes take part.
  __device__ __forceinline__ int64_t row(int32_t part) const {
    int64_t result = 0;
#pragma unroll
    for (int level = 0; level < kMaxLevels; ++level) {
      const int32_t number = part - __shfl_sync(0xffffffffu, parts_before, level);
      const int32_t parts = __shfl_sync(0xffffffffu, level_parts, level);
      const int64_t state = __shfl_sync(0xffffffffu, first_state, level);
      const int64_t slot = partial_slot(__shfl_sync(0xffffffffu, first_cta, level) + number - 1, kStartsInside);
      const int32_t slot_row = __shfl_sync(0xffffffffu, tile_row, level);
      if (number >= 0 && number < parts) result = number == 0 ? state : slot * params.max_tile_rows + slot_row;
    }
    return result;
  }

  /// The same for a part that is the same in all lanes; `found`: what row() said of part number part % 32 there.
  __device__ __forceinline__ int64_t uniform_row(int32_t part, int64_t found) const { return __shfl_sync(0xffffffffu, found, part % 32); }
};

/// Merges one row; a warp's work. Lane i holds columns [4i, 4i + 4) of each group of 128 columns.
template <class Element, int kColumnGroups, class States>
__device__ __forceinline__ void merge_row(const States& parts, const OutputRow& row) {
  const AttentionParams& params = parts.params;
  constexpr int kBatch = 4;   // parts whose loads are under way together
  const int32_t lane = threadIdx.x % 32;
  float4 o[kColumnGroups];
#pragma unroll
  for (int c = 0; c < kColumnGroups; ++c) o[c] = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
  float maximum = minus_infinity();   // of the parts' lse, to base 2
  float sum = 0.0f;                   // of exp2(lse - maximum)

  for (int32_t first = 0; first < parts.count; first += 32) {
    // Lane i finds and weighs part first + i.
    const int64_t state = parts.row(min_of(first + lane, parts.count - 1));
    const float lse = first + lane < parts.count ? params.partial_lse[state] * kLog2E : minus_infinity();
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
        const float* part = params.partial_o + parts.uniform_row(first + i + j, state) * params.head_dim;
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

template <class Element, class States>
__device__ __forceinline__ void merge_row_of_any_width(const States& parts, const OutputRow& row) {
  if (parts.params.head_dim <= 128) {
    merge_row<Element, 1>(parts, row);
  } else {
    merge_row<Element, 2>(parts, row);
  }
}

/// Merges the rows of the pair that block column x serves.
template <class Element, bool kManyLevels>
__device__ __forceinline__ void merge_pair(const AttentionParams& params) {
  // The schedule was complete before the attention kernel started: it is read while that one still runs.
  const Schedule& schedule = params.schedule;
  const int32_t cta = blockIdx.x;
  const Position pair = schedule.positions[cta + 1];
  const bool has_pair = pair.kv_tile > 0 && !is_inside(schedule.positions[cta], pair);
  if (!has_pair) {
    ptx::wait_for_previous_grid();   // every block waits: what follows this grid may rely on the attention kernel's output
    return;
  }
  const int32_t count = 1 + count_parts_behind(params, cta, pair);
  const RowTileRows<kManyLevels> rows(schedule, pair.tile, params.group_size.divisor);
  ptx::wait_for_previous_grid();

  constexpr int kWarpsPerBlock = kMergeThreads / 32;
  for (int32_t tile_row = blockIdx.y * kWarpsPerBlock + threadIdx.x / 32; tile_row < rows.count; tile_row += gridDim.y * kWarpsPerBlock) {
    const OutputRow row(params, rows, pair.head, tile_row);
    if (row.exists) merge_row_of_any_width<Element>(PairStates{params, cta, count, tile_row}, row);
  }
}

/// Merges rows over the levels.
template <class Element>
__device__ __forceinline__ void merge_levels(const AttentionParams& params) {
  constexpr int kWarpsPerBlock = kMergeThreads / 32;
  const int32_t num_qo_heads = params.num_kv_heads * params.group_size.divisor;
  const int64_t warps = static_cast<int64_t>(gridDim.x) * gridDim.y * kWarpsPerBlock;
  const int64_t warp = (static_cast<int64_t>(blockIdx.y) * gridDim.x + blockIdx.x) * kWarpsPerBlock + threadIdx.x / 32;
  const int32_t num_rows = min_of(params.num_rows, params.max_rows);
  ptx::wait_for_previous_grid();
  for (int64_t i = warp; i < static_cast<int64_t>(num_rows) * num_qo_heads; i += warps) {
    OutputRow row;
    row.exists = true;
    row.row = static_cast<int32_t>(i / num_qo_heads);
    row.qo_head = static_cast<int32_t>(i % num_qo_heads);
    const RowStates parts(params, row.row, row.qo_head);
    if (parts.count > 0) merge_row_of_any_width<Element>(parts, row);
  }
}

template <class Element, bool kManyLevels>
__device__ __forceinline__ void merge(const AttentionParams& params) {
  if constexpr (kManyLevels) {
    if (params.schedule.header->num_levels > 1) {
      merge_levels<Element>(params);
      return;
    }
  }
  merge_pair<Element, kManyLevels>(params);
}

}  // namespace attn
