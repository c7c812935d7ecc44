// Where the rows of a work item go: to O and lse, or to a partial state for the merge kernel; and what ends a row.
#pragma once

#include "attention/params.h"
#include "attention/tile/row_tile.cuh"
#include "attention/variant/variants.h"
#include "common/elements.cuh"
#include "common/math.h"
#include "common/ptx/math.cuh"

namespace attn {

/// Natural log of a state's sum of exponentials; `base` is the state's maximum as a logarithm to base 2. -inf for a row
/// that has seen nothing. `base` is a product, which the compiler would fuse with the sum for some rows of a lane and
/// not for others: a row's bits would depend on its place in the row tile.
__device__ __forceinline__ float state_lse(float base, float sum) {
  return sum > 0.0f ? __fadd_rn(base, ptx::lg2(sum)) * kLn2 : minus_infinity();
}

/// What a row's sum of values is multiplied by to become its output, and the row's lse.
struct RowEnd {
  float factor;
  float lse;
};

/// As state_lse(), with a sink (a natural logarithm) in the sum.
__device__ __forceinline__ RowEnd end_row(float base, float sum, float sink) {
  const float exponent = __fmul_rn(sink, kLog2E);
  const float maximum = fmaxf(base, exponent);
  if (maximum == minus_infinity()) return RowEnd{0.0f, minus_infinity()};
  const float correction = ptx::ex2(__fadd_rn(base, -maximum));
  const float total = __fmaf_rn(sum, correction, ptx::ex2(__fadd_rn(exponent, -maximum)));
  return RowEnd{__fdividef(correction, total), __fadd_rn(maximum, ptx::lg2(total)) * kLn2};
}

/// Where a row goes.
struct OutputPlace {
  char* o;     // of elements if the row is complete, of floats otherwise; nullptr: the row does not exist
  float* lse;  // nullptr: not wanted
};

/// Where a work item's rows go. Element_: of O.
template <class Element_, bool kManyLevels, class Variant = StandardVariant>
struct OutputTarget {
  using Element = Element_;
  static constexpr bool kHasScales = Variant::kHasScales && !VariantHooks<Variant>::kValue;
  static constexpr bool kRotates = Variant::kRotates;
  static constexpr bool kWritesFloat8 = Element::kBytes == 1;
  const AttentionParams& params;
  const RowTileRows<kManyLevels>& rows;
  int32_t group;
  int32_t kv_head;
  bool complete;            // o and lse; otherwise a partial state
  bool to_states;           // of a partial state: the rows' own states, not a partial slot
  int64_t partial_row;      // first row of the partial slot
  const int32_t* requests;  // as write_requests() leaves them
  float out_factor;         // of an output of 8 bits

  /// `starts_inside`, `ends_inside`: other CTAs compute KV tiles of the same pair before it, after it.
  __device__ __forceinline__ OutputTarget(const AttentionParams& params_, const RowTileRows<kManyLevels>& rows_,
                                          int32_t group_, int32_t kv_head_, bool starts_inside, bool ends_inside,
                                          const int32_t* requests_)
      : params(params_), rows(rows_), group(group_), kv_head(kv_head_), requests(requests_) {
    bool keeps_states = false;
    if constexpr (kManyLevels) keeps_states = rows.state_begin >= 0;
    complete = !keeps_states && !starts_inside && !ends_inside;
    if constexpr (kWritesFloat8) out_factor = params.out_factor();
    to_states = keeps_states && !starts_inside;
    partial_row = static_cast<int64_t>(partial_slot(blockIdx.x, starts_inside ? kStartsInside : kEndsInside)) *
                  params.max_tile_rows;
  }

  template <class Item>
  __device__ __forceinline__ OutputTarget(const AttentionParams& params_, const Item& item, const int32_t* requests_)
      : OutputTarget(params_, item.rows, item.group, item.kv_head, item.starts_inside, item.ends_inside, requests_) {}

  /// Row of partial_o and partial_lse for an existing row of the tile.
  __device__ __forceinline__ int64_t partial_index(const PackedRow& row, int32_t tile_row) const {
    if constexpr (kManyLevels) {
      if (to_states) return row_state_index(params, rows.state_begin + row.index, row.qo_head);
    }
    return partial_row + tile_row;
  }

  /// What natural logarithms are multiplied by where place() has them written. Partial states stay natural.
  __device__ __forceinline__ float lse_unit() const { return complete ? params.lse_unit : 1.0f; }

  __device__ __forceinline__ bool has_sinks() const {
    return Variant::kHasSinks && complete && params.sinks != nullptr;
  }

  /// The end of a row of the tile, if has_sinks().
  __device__ __forceinline__ RowEnd end_row_with_sink(float base, float sum, int32_t tile_row) const {
    const int32_t head = params.group_size.modulo(rows.packed_begin + tile_row);  // of those of the KV head
    return end_row(base, sum, __ldg(params.sinks + kv_head * params.group_size.divisor + head));
  }

  /// The factor of the outputs of a row of the tile: `factor` and V's scale. If kHasScales.
  __device__ __forceinline__ float with_scale(float factor, int32_t tile_row) const {
    const KvScale& scale = params.variant.as<typename Variant::Params>().scales.v;
    return factor * scale.of(scale.is_of_requests() ? requests[tile_row] : 0, kv_head);
  }

  /// Applies the variant's transform and the scale to outputs of a complete row. `column`: of the first value.
  template <int kValues>
  __device__ __forceinline__ void transform(float (&values)[kValues], int32_t tile_row, int32_t column) const {
    if constexpr (VariantHooks<Variant>::kOutput) {
      const Variant variant(params.variant.as<typename Variant::Params>(), kv_head);
      const ScoreRow row = score_row(params, rows, group, kv_head, tile_row);
#pragma unroll
      for (int i = 0; i < kValues; ++i) values[i] = variant.output(values[i], row, column + i);
    }
    if constexpr (kWritesFloat8) {
#pragma unroll
      for (int i = 0; i < kValues; ++i) values[i] *= out_factor;
    }
  }

  __device__ __forceinline__ OutputPlace place(int32_t tile_row) const {
    const PackedRow row(params, rows, kv_head, tile_row);
    if (!row.exists) return OutputPlace{nullptr, nullptr};
    if (complete) return OutputPlace{row.template o<Element>(params), row.lse(params)};
    const int64_t partial = partial_index(row, tile_row);
    return OutputPlace{reinterpret_cast<char*>(params.partial_o + partial * params.v_columns),
                       params.partial_lse + partial};
  }
};

/// A target's columns from `first_column` on, where warps share the columns of rows. The warps of the first columns
/// write the lse.
template <class Target, int kElementBytes>
struct TargetColumns : Target {
  int32_t first_column;

  __device__ __forceinline__ TargetColumns(const Target& target, int32_t first_column_)
      : Target(target), first_column(first_column_) {}

  __device__ __forceinline__ OutputPlace place(int32_t tile_row) const {
    OutputPlace place = Target::place(tile_row);
    if (place.o != nullptr)
      place.o += first_column * (this->complete ? kElementBytes : static_cast<int32_t>(sizeof(float)));
    if (first_column > 0) place.lse = nullptr;
    return place;
  }

  template <int kValues>
  __device__ __forceinline__ void transform(float (&values)[kValues], int32_t tile_row, int32_t column) const {
    Target::transform(values, tile_row, first_column + column);
  }
};

}  // namespace attn
