// Merges the states of a row, one warp a row, head and kMergeColumns columns.
//
// Blocks (x, y, z) serve CTA x and columns [z * kMergeColumns, (z + 1) * kMergeColumns); any number of them in y works.
// Rows of one row group: the (row tile, head) pairs that several CTAs share are merged, by the warps of all CTAs whose
// intervals end inside the pair, round robin. Rows of several row groups have a state in each of them, and more parts
// where their row tile is shared by several CTAs. They are distributed round robin over all blocks, so that few rows
// with many parts use many multiprocessors. The order of merging is fixed: link by link, and in a row group in the
// order of the CTAs.
#pragma once

#include "attention/merge/shape.h"
#include "attention/params.h"
#include "attention/tile/output_target.cuh"
#include "attention/tile/row_tile.cuh"
#include "common/elements.cuh"
#include "common/ptx/grid_dependency.cuh"
#include "common/ptx/math.cuh"
#include "common/ptx/warp.cuh"

namespace attn {

__device__ __forceinline__ bool is_inside(const Position& position, const Position& pair) {
  return position.tile == pair.tile && position.head == pair.head && position.kv_tile > 0;
}

/// The first CTA, from `cta` on, whose interval does not start inside `pair`: going down if kStep is -1, up if it is 1.
/// All lanes of the warp take part. `position`: of CTA `cta` + kStep * lane, loaded beforehand because nothing would
/// hide the latency of a dependent load.
template <int32_t kStep>
__device__ __forceinline__ int32_t find_outside(const AttentionParams& params, int32_t cta, const Position& pair,
                                                Position position) {
  const int32_t step = kStep * static_cast<int32_t>(threadIdx.x % 32);
#pragma unroll 1
  while (true) {
    const bool is_between = kStep < 0 ? cta + step > 0 : cta + step < params.num_ctas;
    const uint32_t outside = ~__ballot_sync(0xffffffffu, is_between && is_inside(position, pair));
    if (outside != 0) return cta + kStep * (__ffs(outside) - 1);
    cta += kStep * 32;
    position = params.schedule.positions[kStep < 0 ? max_of(cta + step, 0) : min_of(cta + step, params.num_ctas)];
  }
}

/// The parts of a row's result for one head. Lane l of the warp handles link l: the parts of one row group, the
/// first in `first_state`, the others where the CTAs from `first_cta` on started. Rows of one row group have one link.
struct Parts {
  int32_t count;       // of all links
  int32_t end;         // of this lane's link and of those before it
  int32_t link_parts;  // of this lane's link; 0: there is none
  int32_t first_cta;
  int32_t tile_row;
  int32_t first_state;  // row of partial_o and partial_lse

  /// Row of partial_o and partial_lse that holds part number `part`, which may differ from lane to lane; all lanes take
  /// part.
  __device__ __forceinline__ int32_t state(int32_t part, int32_t max_tile_rows) const {
    int32_t link = 0;  // the first whose parts end after `part`
#pragma unroll
    for (int step = 16; step > 0; step /= 2) {
      if (__shfl_sync(0xffffffffu, end, link + step - 1) <= part) link += step;
    }
    const int32_t number = part - __shfl_sync(0xffffffffu, end - link_parts, link);
    const int32_t first = __shfl_sync(0xffffffffu, first_state, link);
    const int32_t cta = __shfl_sync(0xffffffffu, first_cta, link) + number - 1;
    const int32_t slot_row =
        partial_slot(cta, kStartsInside) * max_tile_rows + __shfl_sync(0xffffffffu, tile_row, link);
    return number == 0 ? first : slot_row;
  }
};

/// Merges kMergeColumns columns of one row, with one warp; lane i holds four from first_column + 4i on, or the last
/// four. `transform(values, column)` changes four columns of the output. If `waits`, it waits for the attention kernel
/// before it reads what that has written.
template <class Element, class Transform>
__device__ __forceinline__ void merge_row(const AttentionParams& params, const PackedRow& row, int32_t first_column,
                                          Parts parts, bool& waits, const Transform& transform) {
  constexpr int kBatch = 4;  // parts whose loads are under way together
  const int32_t lane = threadIdx.x % 32;
  const int32_t column = min_of<int32_t>(first_column + lane * 4, params.v_columns - 4);
  float4 o = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
  float maximum = minus_infinity();  // of the parts' lse, to base 2
  float sum = 0.0f;                  // of exp2(lse - maximum)
#pragma unroll 1
  for (int32_t first = 0; first < parts.count; first += 32) {
    // Lane i finds and weighs part first + i.
    const int32_t state = parts.state(min_of(first + lane, parts.count - 1), params.max_tile_rows);
    if (waits) ptx::wait_for_previous_grid();
    waits = false;
    const float lse = first + lane < parts.count ? params.partial_lse[state] * kLog2E : minus_infinity();
    const float new_maximum = fmaxf(maximum, ptx::warp_max(lse));
    const float base = new_maximum == minus_infinity() ? 0.0f : new_maximum;
    const float weight = ptx::ex2(lse - base);
    const float correction = ptx::ex2(maximum - base);
    sum = sum * correction + ptx::warp_add(weight);
    maximum = new_maximum;
    o = make_float4(o.x * correction, o.y * correction, o.z * correction, o.w * correction);

    const int32_t count = min_of(parts.count - first, 32);
#pragma unroll 1
    for (int32_t i = 0; i < count; i += kBatch) {
      float4 x[kBatch];
#pragma unroll
      for (int j = 0; j < kBatch; ++j) {
        // After the last part it is loaded again. A load with a condition also needs registers for zeros: ptxas then
        // let the first one arrive before it issued the others (ADR 22).
        const float* part =
            params.partial_o + static_cast<int64_t>(__shfl_sync(0xffffffffu, state, i + j)) * params.v_columns;
        x[j] = *reinterpret_cast<const float4*>(part + column);
      }
#pragma unroll
      for (int j = 0; j < kBatch; ++j) {
        const float w = __shfl_sync(0xffffffffu, weight, i + j);
        if (i + j < count) o = make_float4(o.x + w * x[j].x, o.y + w * x[j].y, o.z + w * x[j].z, o.w + w * x[j].w);
      }
    }
  }

  // Without sinks the same as with one of -infinity: one path needs fewer registers than two.
  const RowEnd end =
      end_row(maximum, sum, params.sinks == nullptr ? minus_infinity() : __ldg(params.sinks + row.qo_head));
  const float factor = params.adds_up ? 1.0f : end.factor;
  float values[4] = {o.x * factor, o.y * factor, o.z * factor, o.w * factor};
  transform(values, column);
  if constexpr (Element::kBytes == 1) {
    const float out_factor = params.out_factor();
#pragma unroll
    for (int i = 0; i < 4; ++i) values[i] *= out_factor;
  }
  store_four<Element>(row.template o<Element>(params) + column * Element::kBytes, values);
  float* const to_lse = row.lse(params);
  if (column == 0 && to_lse != nullptr) *to_lse = end.lse * params.lse_unit;
}

/// The parts of a row of several row groups. All lanes of the warp must call it. Also sets `row`. With kFindsGroup it
/// sets `group_number` to one of the row's row groups, and `row.index` to the row's place there.
template <bool kFindsGroup>
__device__ __forceinline__ Parts find_parts(const AttentionParams& params, int32_t merge_row, PackedRow& row,
                                            int32_t& group_number) {
  const ScheduleHeader& header = *params.schedule.header;
  const int32_t lane = threadIdx.x % 32;
  Parts parts{};
  row.row = -1;
  if (lane < header.num_links) {
    const RowLink link = params.schedule.links[static_cast<int64_t>(lane) * params.max_merge_rows + merge_row];
    if (link.group >= 0) {
      const RowGroup& group = params.schedule.groups[link.group];
      const int32_t packed = link.index * params.group_size.divisor + params.group_size.modulo(row.qo_head);
      const int32_t tile_index = row_tile_of(static_cast<uint32_t>(packed), group.kind);
      const int32_t tile = group.tile_begin + tile_index;
      parts.tile_row = packed - tile_index * tile_rows(group.kind);
      if (tile < header.num_tiles) {
        const CtaRange inside = ctas_inside(params.schedule, tile, group.state_begin, params.num_kv_heads,
                                            params.group_size.divide(row.qo_head), params.num_ctas);
        parts.link_parts = 1 + inside.end - inside.begin;
        parts.first_cta = inside.begin;
        parts.first_state = static_cast<int32_t>(row_state_index(params, group.state_begin + link.index, row.qo_head));
        const int32_t* list = header.levels[group.level].rows;
        row.row = group.qo_begin + link.index;
        row.index = link.index;
        group_number = link.group;
        if (list != nullptr) row.row = __ldg(list + row.row);
      }
    }
  }
  const uint32_t linked = __ballot_sync(0xffffffffu, parts.link_parts > 0);
  const int first_linked = linked == 0 ? 0 : __ffs(linked) - 1;
  row.row = __shfl_sync(0xffffffffu, row.row, first_linked);
  if constexpr (kFindsGroup) {
    row.index = __shfl_sync(0xffffffffu, row.index, first_linked);
    group_number = __shfl_sync(0xffffffffu, group_number, first_linked);
  }
  row.exists = row.row >= 0 && row.row < params.num_rows;
  parts.end = ptx::warp_inclusive_sum(parts.link_parts, lane);
  parts.count = __shfl_sync(0xffffffffu, parts.end, 31);
  return parts;
}

/// The pair that blocks (x, y, z) serve.
struct SharedPair {
  int32_t first_cta;
  int32_t parts;  // CTAs that share it; the blocks of all but the last serve it
  int32_t rows;   // to be merged; 0: there is no pair, or its rows are in several row groups

  __device__ __forceinline__ explicit SharedPair(const AttentionParams& params) : first_cta(0), parts(1), rows(0) {
    const int32_t cta = blockIdx.x, lane = threadIdx.x % 32;
    const Position pair = params.schedule.positions[cta + 1];
    const Position before = params.schedule.positions[max_of(cta - lane, 0)];
    const Position after = params.schedule.positions[min_of(cta + 1 + lane, params.num_ctas)];
    if (pair.kv_tile == 0) return;
    first_cta = find_outside<-1>(params, cta, pair, before);
    parts = find_outside<1>(params, cta + 1, pair, after) - first_cta;
    const RowTileRows<true> packed(params.schedule, pair.tile, params.group_size.divisor);
    rows = packed.state_begin >= 0 ? 0 : packed.count;
  }
};

/// Reports a plan whose requests have tokens if the cache has no pages: the attention kernel then reads nothing. It has
/// no registers for this.
__device__ __noinline__ void report_missing_pages(const AttentionParams& params) {
  ScheduleHeader& header = *params.schedule.header;
  for (int32_t i = static_cast<int32_t>(threadIdx.x); i < header.num_groups; i += kMergeThreads) {
    if (params.schedule.groups[i].kv_len > 0) atomicOr(&header.errors, kPageIndexInvalid);
  }
}

/// Merges this warp's rows: first rows of several row groups, then rows of the pair. One loop serves both: a launch
/// costs more the more code the kernel has (ADR 22). Element: of O.
template <class Element, class Variant = StandardVariant>
__device__ __forceinline__ void merge(const AttentionParams& params) {
  // The schedule was complete before the attention kernel started, so it may be read while that kernel still runs.
  constexpr int kWarpsPerBlock = kMergeThreads / 32;
  const int32_t num_qo_heads = params.num_kv_heads * params.group_size.divisor;
  const int32_t warp = blockIdx.y * kWarpsPerBlock + threadIdx.x / 32;  // of those of a CTA and its columns
  const int32_t warps = gridDim.y * kWarpsPerBlock;
  const int32_t first_column = blockIdx.z * kMergeColumns;
  const int32_t count = params.schedule.positions[blockIdx.x + 1].flags & kIsPlain
                            ? 0
                            : params.schedule.header->num_merge_rows * num_qo_heads;
  if (params.num_pages == 0 && blockIdx.x == 0) report_missing_pages(params);
  const SharedPair pair(params);
  int32_t i = warp * gridDim.x + blockIdx.x;
  int32_t pair_row = warp * (pair.parts - 1) + static_cast<int32_t>(blockIdx.x) - pair.first_cta;
  bool waits = true;
#pragma unroll 1
  while (i < count || pair_row < pair.rows) {
    PackedRow row;
    Parts parts;
    int32_t group = 0;
    if (i < count) {
      row.qo_head = i % num_qo_heads;
      row.index = 0;
      parts = find_parts<VariantHooks<Variant>::kOutput>(params, i / num_qo_heads, row, group);
      i += warps * gridDim.x;
    } else {
      const Position& position = params.schedule.positions[blockIdx.x + 1];  // read again: fewer registers
      const RowTileRows<true> rows(params.schedule, position.tile, params.group_size.divisor);
      row = PackedRow(params, rows, position.head, pair_row);
      group = params.schedule.tiles[position.tile].group;
      const int32_t first_state = partial_slot(pair.first_cta, kEndsInside) * params.max_tile_rows + pair_row;
      parts = Parts{pair.parts,         pair.parts, threadIdx.x % 32 == 0 ? pair.parts : 0,
                    pair.first_cta + 1, pair_row,   first_state};
      pair_row += warps * (pair.parts - 1);
    }
    if (row.exists) {
      merge_row<Element>(params, row, first_column, parts, waits, [&](float (&values)[4], int32_t column) {
        if constexpr (VariantHooks<Variant>::kOutput) {
          const Variant variant(params.variant.as<typename Variant::Params>(), params.group_size.divide(row.qo_head));
          const ScoreRow variant_row = score_row(params.schedule, group, row.index, row.row, row.qo_head);
          for (int i = 0; i < 4; ++i) values[i] = variant.output(values[i], variant_row, column + i);
        }
      });
    }
  }
  if (waits)
    ptx::wait_for_previous_grid();  // every block waits: grids after this one may rely on the attention kernel's
                                    // output
}

}  // namespace attn
