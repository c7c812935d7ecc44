// How a row ends, how its output is written, and how its states are merged.
#pragma once

#include <cmath>

#include "attention/cpu/kernels.h"
#include "attention/cpu/work_item.h"
#include "attention/params.h"
#include "attention/variant/coordinates.h"
#include "attention/variant/variants.h"
#include "common/cpu/elements.h"
#include "common/math.h"
#include "planner/schedule.h"

namespace attn::cpu {

template <class Engine, class Variant>
class RowStates {
  using Isa = typename Engine::Isa;
  using Float = typename Isa::Float;
  using Element = typename Engine::Element;

 public:
  static void merge_pair(const CpuAttentionParams& params, HeadDims dims, const SplitPair& pair, Scratch& scratch) {
    const WorkItem item{pair.tile, pair.head, 0, 0, kWhole};
    const ItemRows rows(params, item);
    const int parts = pair.last_cta - pair.first_cta + 1;
    for (int r = 0; r < rows.existing; ++r) {
      const PackedRow place(params, rows, item.head, r);
      if (!place.exists) continue;
      for (int part = 0; part < parts; ++part) {
        const int32_t slot = partial_slot(pair.first_cta + part, part == 0 ? kEndsInside : kStartsInside);
        scratch.states[part] = int64_t{slot} * params.max_tile_rows + r;
      }
      merge_states(params, dims.v, parts, params.schedule.tiles[pair.tile].group, place, scratch);
    }
  }

  /// Merges all heads of a row: number `merge_row` of those that are in several row groups.
  static void merge_row(const CpuAttentionParams& params, HeadDims dims, int32_t merge_row, Scratch& scratch) {
    const ScheduleHeader& header = *params.schedule.header;
    const int32_t group_size = params.group_size.divisor;
    for (int32_t head = 0; head < params.num_kv_heads * group_size; ++head) {
      int parts = 0;
      PackedRow place;
      place.row = -1;
      place.qo_head = head;
      int32_t group_number = 0;
      for (int32_t i = 0; i < header.num_links; ++i) {
        const RowLink link = params.schedule.links[int64_t{i} * params.max_merge_rows + merge_row];
        if (link.group < 0) continue;
        const RowGroup& group = params.schedule.groups[link.group];
        const int32_t packed = link.index * group_size + head % group_size;
        const int32_t tile_index = row_tile_of(static_cast<uint32_t>(packed), group.kind);
        const int32_t tile = group.tile_begin + tile_index;
        if (tile >= header.num_tiles) continue;
        if (place.row < 0) {
          const int32_t* const list = header.levels[group.level].rows;
          place.row = list != nullptr ? list[group.qo_begin + link.index] : group.qo_begin + link.index;
          place.index = link.index;
          group_number = link.group;
        }
        scratch.states[parts++] = row_state_index(params, group.state_begin + link.index, head);
        const CtaRange inside = ctas_inside(params.schedule, tile, group.state_begin, params.num_kv_heads,
                                            head / group_size, params.num_ctas);
        for (int32_t cta = inside.begin; cta < inside.end; ++cta) {
          scratch.states[parts++] = int64_t{partial_slot(cta, kStartsInside)} * params.max_tile_rows + packed -
                                    tile_index * tile_rows(group.kind);
        }
      }
      if (place.row < 0 || place.row >= params.num_rows) return;
      merge_states(params, dims.v, parts, group_number, place, scratch);
    }
  }

 protected:
  /// The end of a row: the factor of its sum of values, and its lse.
  struct RowEnd {
    float factor;
    float lse;
  };

  /// `maximum`: a natural logarithm that `sum` is relative to; `is_complete`: the sink counts.
  static RowEnd end_row(const AttentionParams& params, float maximum, float sum, int64_t head, bool is_complete) {
    if (!Variant::kUsesSoftmax) return RowEnd{1.0f, 0.0f};
    if (is_complete && params.sinks != nullptr) {
      const float highest = max_of(maximum, params.sinks[head]);
      if (highest == -INFINITY) return RowEnd{0.0f, -INFINITY};
      const float correction = expf(maximum - highest);
      const float total = sum * correction + expf(params.sinks[head] - highest);
      return RowEnd{correction / total, highest + logf(total)};
    }
    return sum == 0.0f ? RowEnd{0.0f, -INFINITY} : RowEnd{1.0f / sum, maximum + logf(sum)};
  }

  /// Writes a complete row, whose outputs become what the variant's transform makes of them. `group`: a row group that
  /// the row is in.
  static void write_complete_row(const CpuAttentionParams& params, float* o, int32_t columns, float lse, int32_t group,
                                 const PackedRow& place) {
    if constexpr (VariantHooks<Variant>::kOutput) {
      const Variant variant(params.variant.as<typename Variant::Params>(), params.group_size.divide(place.qo_head));
      const ScoreRow row = attn::score_row(params.schedule, group, place.index, place.row, place.qo_head);
      for (int32_t i = 0; i < columns; ++i) o[i] = variant.output(o[i], row, i);
    }
    if (float* const to_lse = place.lse(params)) *to_lse = lse * params.lse_unit;
    const int64_t element = place.row * params.o_row_stride + place.qo_head * params.o_head_stride;
    if (params.has_out_scale()) {
      const float factor = params.out_factor();
      Float8E4M3* const out = static_cast<Float8E4M3*>(params.o) + element;
      for (int32_t i = 0; i < columns; ++i) from_float(o[i] * factor, out[i]);
    } else if (params.is_mixed) {
      store_elements(o, columns, static_cast<OtherElement<Element>*>(params.o) + element);
    } else {
      store_elements(o, columns, static_cast<Element*>(params.o) + element);
    }
  }

  /// Merges the first `count` of scratch.states. `group`: a row group that the row is in.
  static void merge_states(const CpuAttentionParams& params, int32_t columns, int count, int32_t group,
                           const PackedRow& place, Scratch& scratch) {
    float largest = -INFINITY;
    for (int i = 0; i < count; ++i) largest = max_of(largest, params.partial_lse[scratch.states[i]]);
    float sum = 0.0f;
    for (int part = 0; part < count; ++part) {
      const int64_t state = scratch.states[part];
      const float weight = largest == -INFINITY ? 0.0f : expf(params.partial_lse[state] - largest);
      sum += weight;
      for (int i = 0; i < columns; i += Isa::kWidth) {
        const Float before = part == 0 ? Isa::zero() : Isa::load(scratch.o + i);
        Isa::store(scratch.o + i,
                   Isa::fma(Isa::splat(weight), Isa::load_elements(params.partial_o + state * columns + i, columns - i),
                            before));
      }
    }
    const RowEnd end = end_row(params, largest, sum, place.qo_head, true);
    for (int i = 0; i < columns; i += Isa::kWidth)
      Isa::store(scratch.o + i, Isa::load(scratch.o + i) * Isa::splat(end.factor));
    write_complete_row(params, scratch.o, columns, end.lse, group, place);
  }

 private:
  template <class OutElement>
  static void store_elements(const float* o, int32_t columns, OutElement* out) {
    for (int i = 0; i < columns; i += Isa::kWidth) Isa::store_elements(out + i, Isa::load(o + i), columns - i);
  }
};

}  // namespace attn::cpu
