// The end of a work item: writes its state to o and lse, or to a partial slot for the merge kernel.
#pragma once

#include "attention/params.h"
#include "attention/score_row.h"
#include "attention/shared_tile.cuh"
#include "attention/warp_state.cuh"
#include "attention/work_cursor.cuh"
#include "common/elements.cuh"
#include "common/ptx/cp_async.cuh"
#include "common/ptx/ldmatrix.cuh"
#include "common/ptx/math.cuh"
#include "common/ptx/special_registers.cuh"

namespace attn {

/// Which row and head of Q and O a packed row of a row tile is.
struct OutputRow {
  bool exists;
  int32_t index;  // of the row in its group
  int32_t row;
  int32_t qo_head;

  OutputRow() = default;

  template <bool kManyLevels>
  __device__ __forceinline__ OutputRow(const AttentionParams& params, const RowTileRows<kManyLevels>& rows,
                                       int32_t kv_head, int32_t tile_row) {
    const int32_t packed = rows.packed_begin + tile_row;
    index = params.group_size.divide(packed);
    exists = tile_row < rows.count;
    row = rows.qo_begin + index;
    if constexpr (kManyLevels) {
      if (exists && rows.list != nullptr) row = __ldg(rows.list + row);
    }
    qo_head = kv_head * params.group_size.divisor + packed - index * params.group_size.divisor;
    exists = exists && row >= 0 && row < params.num_rows;
  }

  template <class Element>
  __device__ __forceinline__ char* o(const AttentionParams& params) const {
    return static_cast<char*>(params.o) +
           (row * params.o_row_stride + qo_head * params.o_head_stride) * Element::kBytes;
  }

  /// nullptr: not wanted.
  __device__ __forceinline__ float* lse(const AttentionParams& params) const {
    return params.lse == nullptr
               ? nullptr
               : params.lse + static_cast<int64_t>(row) * params.num_kv_heads * params.group_size.divisor + qo_head;
  }
};

/// A row of the row tile, as variants see it; the last one for rows that do not exist. `group`: of the tile.
template <bool kManyLevels>
__device__ __forceinline__ ScoreRow score_row(const AttentionParams& params, const RowTileRows<kManyLevels>& rows,
                                              int32_t group, int32_t kv_head, int32_t tile_row) {
  const OutputRow row(params, rows, kv_head, min_of(tile_row, rows.count - 1));
  return score_row(params.schedule, group, row.index, row.row, row.qo_head);
}

/// Writes the requests of all rows of a row tile to shared memory, if a scale of the cache depends on them: where
/// scores are computed there are no registers left to find them. `thread` of kThreads.
template <class Variant, int kRows, int kThreads, bool kManyLevels>
__device__ __forceinline__ void write_requests(const AttentionParams& params, const RowTileRows<kManyLevels>& rows,
                                               int32_t group, int32_t kv_head, int thread, int32_t* requests) {
  if constexpr (Variant::kHasScales) {
    const AttentionScales& scales = params.variant.as<typename Variant::Params>().scales;
    if (!scales.k.is_of_requests() && !scales.v.is_of_requests()) return;
    for (int row = thread; row < kRows; row += kThreads)
      requests[row] = score_row(params, rows, group, kv_head, row).request;
  }
}

/// The rows of a work item whose scores a lane holds, as variants see them: made once for an item, if the variant looks
/// at them.
template <class Variant, int kRowBlocks>
struct LaneRows {
  ScoreRow rows[kRowBlocks][2];
  float bias_slopes[kRowBlocks][2];  // of a variant that has them
  int32_t kv_offset = 0;             // token t of the row group is token kv_offset + t of the request
  TokenRange seen{0, 0};             // tokens of the row group that the variant lets all of the warp's rows see

  /// `first_row`: of the warp.
  template <bool kManyLevels>
  __device__ __forceinline__ LaneRows(const AttentionParams& params, const RowTileRows<kManyLevels>& of_tile,
                                      int32_t group, int32_t kv_head, int32_t first_row) {
    if constexpr (!Variant::kReadsRows) return;
    kv_offset = params.schedule.groups[group].kv_offset;
#pragma unroll
    for (int b = 0; b < kRowBlocks; ++b) {
#pragma unroll
      for (int half = 0; half < 2; ++half)
        rows[b][half] = score_row(params, of_tile, group, kv_head, first_row + b * 16 + half * 8 + ptx::lane_id() / 4);
    }
    if constexpr (VariantHooks<Variant>::kBiasSlope) {
      const Variant variant(params.variant.as<typename Variant::Params>(), kv_head);
#pragma unroll
      for (int b = 0; b < kRowBlocks; ++b) {
#pragma unroll
        for (int half = 0; half < 2; ++half) bias_slopes[b][half] = variant.bias_slope(rows[b][half]);
      }
    }
    if constexpr (VariantHooks<Variant>::kMask) find_seen(params, of_tile, group, first_row);
  }

  /// Goes on to a KV tile of kTokens tokens.
  template <int kTokens>
  __device__ __forceinline__ void enter(const KvTileStart& kv_tile) {
    if (kv_tile.is_seen) seen = TokenRange{kv_tile.token, kv_tile.token + kTokens};
  }

  /// How far the lane's first column of a warp's scores, which begin at `first_token`, lies after a row: what a
  /// variant's bias there is its slope times.
  __device__ __forceinline__ float bias_distance(int b, int half, int32_t first_token) const {
    return static_cast<float>(kv_offset + first_token + ptx::lane_id() % 4 * 2 - rows[b][half].position);
  }

 private:
  template <bool kManyLevels>
  __device__ __forceinline__ void find_seen(const AttentionParams& params, const RowTileRows<kManyLevels>& of_tile,
                                            int32_t group, int32_t first_row) {
    const Level& level = params.schedule.header->levels[params.schedule.groups[group].level];
    if (level.row_ranges == nullptr) return;
    int32_t begin = 0, end = static_cast<int32_t>(kMaxInt32);
    for (int32_t row = first_row + ptx::lane_id(); row < first_row + kRowBlocks * 16; row += 32) {
      const int32_t packed = of_tile.packed_begin + min_of(row, of_tile.count - 1);
      const RowRange range = level.row_ranges[of_tile.qo_begin + params.group_size.divide(packed)];
      begin = max_of(begin, range.full_begin);
      end = min_of(end, range.full_end);
    }
    seen =
        TokenRange{__reduce_max_sync(0xffffffffu, begin) - kv_offset, __reduce_min_sync(0xffffffffu, end) - kv_offset};
  }
};

/// Natural log of a state's sum of exponentials; `base` is the state's maximum as a logarithm to base 2. -inf for a row
/// that has seen nothing.
__device__ __forceinline__ float state_lse(float base, float sum) {
  return sum > 0.0f ? (base + ptx::lg2(sum)) * kLn2 : minus_infinity();
}

/// The end of a row: the factor that makes its output of its sum of values, and its lse.
struct RowEnd {
  float factor;
  float lse;
};

/// As state_lse(), with a sink (a natural logarithm) in the sum.
__device__ __forceinline__ RowEnd end_row(float base, float sum, float sink) {
  const float maximum = fmaxf(base, sink * kLog2E);
  if (maximum == minus_infinity()) return RowEnd{0.0f, minus_infinity()};
  const float correction = ptx::ex2(base - maximum);
  const float total = sum * correction + ptx::ex2(sink * kLog2E - maximum);
  return RowEnd{__fdividef(correction, total), (maximum + ptx::lg2(total)) * kLn2};
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
  static constexpr bool kIsOf8Bits = Element::kBytes == 1;
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
    if constexpr (kIsOf8Bits) out_factor = params.out_factor();
    to_states = keeps_states && !starts_inside;
    partial_row = static_cast<int64_t>(partial_slot(blockIdx.x, starts_inside ? kStartsInside : kEndsInside)) *
                  params.max_tile_rows;
  }

  /// Row of partial_o and partial_lse for an existing row of the tile.
  __device__ __forceinline__ int64_t partial_index(const OutputRow& row, int32_t tile_row) const {
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

  /// What the outputs of a row of the tile are multiplied by: `factor` and V's scale. If kHasScales.
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
    if constexpr (kIsOf8Bits) {
#pragma unroll
      for (int i = 0; i < kValues; ++i) values[i] *= out_factor;
    }
  }

  __device__ __forceinline__ OutputPlace place(int32_t tile_row) const {
    const OutputRow row(params, rows, kv_head, tile_row);
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

/// The pointer that lane `source` has.
template <class T>
__device__ __forceinline__ T* shuffle_pointer(T* pointer, int source) {
  return reinterpret_cast<T*>(__shfl_sync(0xffffffffu, reinterpret_cast<unsigned long long>(pointer), source));
}

/// Puts 16 complete rows of a warp, normalised, into rows `block_row` on of `staged`, a tile of layout Tile. kFours:
/// they are outputs of widened_accumulate().
template <class Tile, bool kFours = false, class Multiplied, int kColumns, int kRowBlocks, class Target>
__device__ __forceinline__ void stage_rows(const WarpState<Multiplied, kColumns, kRowBlocks>& state,
                                           const Target& target, int b, const float (&inverse)[2], int32_t block_row,
                                           char* staged) {
  using Element = typename Target::Element;
  if constexpr (kFours) {
    const int lane = ptx::lane_id();
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = block_row + half * 8 + lane / 4;
#pragma unroll
      for (int n = 0; n < kColumns / 8; n += 2) {
        const float4 outputs = state.four_outputs(b, n, half, inverse[half]);
        float values[4] = {outputs.x, outputs.y, outputs.z, outputs.w};
        target.transform(values, row, n * 8 + lane % 4 * 4);
        char* const to = staged + (Target::kIsOf8Bits ? Tile::offset(row, n / 2) + lane % 4 * 4
                                                      : Tile::offset(row, n + lane % 4 / 2) + lane % 2 * 8);
        store_four<Element>(to, values);
      }
    }
    return;
  }
  if constexpr (Target::kIsOf8Bits) {
    const int lane = ptx::lane_id();
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = block_row + half * 8 + lane / 4;
#pragma unroll
      for (int n = 0; n < kColumns / 8; ++n) {
        float values[2] = {state.o[b][n][2 * half] * inverse[half], state.o[b][n][2 * half + 1] * inverse[half]};
        target.transform(values, row, n * 8 + lane % 4 * 2);
        *reinterpret_cast<uint16_t*>(staged + Tile::offset(row, n / 2) + n % 2 * 8 + lane % 4 * 2) =
            static_cast<uint16_t>(Element::pack(values[0], values[1]));
      }
    }
    return;
  }
  const uint32_t fragments =
      ptx::shared_address(staged) + block_row * Tile::kRowBytes + Tile::rows_first(ptx::lane_id());
#pragma unroll
  for (int n = 0; n < kColumns / 8; n += 2) {
    uint32_t pairs[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      float values[2] = {state.o[b][n + i / 2][i % 2 * 2] * inverse[i % 2],
                         state.o[b][n + i / 2][i % 2 * 2 + 1] * inverse[i % 2]};
      target.transform(values, block_row + i % 2 * 8 + ptx::lane_id() / 4, (n + i / 2) * 8 + ptx::lane_id() % 4 * 2);
      pairs[i] = Element::pack(values[0], values[1]);
    }
    ptx::stmatrix_x4(Tile::block(fragments, 0, n / 2), pairs);
  }
}

/// Writes the rows of a warp that has seen all tokens of the item. They are first staged in the warp's own rows of
/// `staged`, a tile of layout Tile, to be stored in chunks of 16 bytes. kFours: as in stage_rows().
template <class Tile, bool kFours = false, class Multiplied, int kColumns, int kRowBlocks, class Target>
__device__ __forceinline__ void write_warp_rows(WarpState<Multiplied, kColumns, kRowBlocks>& state,
                                                const Target& target, int32_t first_row, char* staged) {
  const int lane = ptx::lane_id();
#pragma unroll
  for (int b = 0; b < kRowBlocks; ++b) {
    const int32_t block_row = first_row + b * 16;
    // Lane i knows where row i of the block goes; row g of a half is in the registers of lanes 4g to 4g + 3.
    const OutputPlace place = target.place(block_row + lane % 16);
    float inverse[2], lse[2];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float sum = state.row_sum(b, half);
      const float base = state.maximum[b][half] * state.scale;
      RowEnd end{sum > 0.0f ? __fdividef(1.0f, sum) : 0.0f, state_lse(base, sum)};
      if (target.has_sinks()) end = target.end_row_with_sink(base, sum, block_row + half * 8 + lane / 4);
      inverse[half] = end.factor;
      if constexpr (Target::kHasScales) inverse[half] = target.with_scale(end.factor, block_row + half * 8 + lane / 4);
      lse[half] = __shfl_sync(0xffffffffu, end.lse, lane % 8 * 4);
    }
    if (lane < 16 && place.lse != nullptr) *place.lse = (lane < 8 ? lse[0] : lse[1]) * target.lse_unit();

    if (target.complete) {
      stage_rows<Tile, kFours>(state, target, b, inverse, block_row, staged);
      __syncwarp();
      using Pieces = RowPieces<Tile, 32>;
      constexpr int kRowsPerPass = Pieces::kRows;
      constexpr int kBatch = 8;  // passes that wait for shared memory together
#pragma unroll
      for (int piece = 0; piece < Pieces::kPieces; ++piece) {
        const int chunk = piece * Pieces::kChunks + lane % Pieces::kChunks;
        const uint32_t first = Tile::offset(block_row + lane / Pieces::kChunks, chunk);
#pragma unroll
        for (int batch = 0; batch < 16; batch += kBatch * kRowsPerPass) {
          char* to[kBatch];
          uint4 rows[kBatch];
#pragma unroll
          for (int i = 0; i < kBatch && batch + i * kRowsPerPass < 16; ++i) {
            to[i] = shuffle_pointer(place.o, batch + i * kRowsPerPass + lane / Pieces::kChunks);
            rows[i] = *reinterpret_cast<const uint4*>(staged + Tile::below(first, batch + i * kRowsPerPass));
          }
#pragma unroll
          for (int i = 0; i < kBatch && batch + i * kRowsPerPass < 16; ++i) {
            const bool is_there = Tile::kHeadChunks == Tile::kRowChunks || chunk < Tile::kHeadChunks;
            if constexpr (Tile::kHeadBytes % 16 == 0) {
              if (to[i] != nullptr && is_there) *reinterpret_cast<uint4*>(to[i] + chunk * 16) = rows[i];
            } else if (to[i] != nullptr && chunk <= Tile::kHeadChunks) {  // rows lie at multiples of 8 bytes
              *reinterpret_cast<uint2*>(to[i] + chunk * 16) = make_uint2(rows[i].x, rows[i].y);
              if (is_there) *reinterpret_cast<uint2*>(to[i] + chunk * 16 + 8) = make_uint2(rows[i].z, rows[i].w);
            }
          }
        }
      }
    } else {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        char* const to = shuffle_pointer(place.o, half * 8 + lane / 4);
        if (to == nullptr) continue;
        if constexpr (kFours) {
#pragma unroll
          for (int n = 0; n < Tile::kHeadColumns / 8; n += 2) {
            if (n * 8 + lane % 4 * 4 < Tile::kHeadColumns)
              *reinterpret_cast<float4*>(to + n * 32 + lane % 4 * 16) = state.four_outputs(b, n, half, inverse[half]);
          }
          continue;
        }
#pragma unroll
        for (int n = 0; n < Tile::kHeadColumns / 8; ++n) {
          *reinterpret_cast<float2*>(to + n * 32 + (lane % 4) * 8) =
              make_float2(state.o[b][n][2 * half] * inverse[half], state.o[b][n][2 * half + 1] * inverse[half]);
        }
      }
    }
  }
}

/// Merges the states of the warps that share rows, and writes them, eight of a warp's rows at a time: the first eight,
/// and the others if `halves` is 2. Their outputs meet in `outputs`, kBytes of memory that is free once all threads
/// have arrived here; `maxima` has room for two floats a row and warp, aligned to 16 bytes. `Block`: the threads that
/// take part. Short work items spend half of their time here, and nothing overlaps with it, so every barrier counts.
/// kHeadColumns: that are written. Layout::kFours: as in stage_rows().
template <class Block, class Layout, int kHeadColumns, int kBytes, class Multiplied, int kColumns, class Target>
__device__ __forceinline__ void write_merged_warps(WarpState<Multiplied, kColumns, 1>& state, const Target& target,
                                                   const Layout& warp, int halves, char* outputs, float* maxima) {
  using Element = typename Target::Element;
  constexpr int kKvWarps = Layout::kKvWarps;           // that share rows
  constexpr int kRows = Block::kWarps / kKvWarps * 8;  // at a time
  constexpr int kChunks = kColumns / 4;                // of 16 bytes
  constexpr int kStride = Block::kWarps * 32;
  static_assert(kKvWarps * kRows * kChunks * 16 <= kBytes && kChunks % 8 == 0, "they fit, permuted");
  struct alignas(kKvWarps < 4 ? 8 : 16) OfWarps {
    float of_warp[kKvWarps];
  };
  const int lane = ptx::lane_id();
  const int row_of_half = warp.first_row / 2 + lane / 4;           // of those kRows
  OfWarps* const row_maxima = reinterpret_cast<OfWarps*>(maxima);  // [row of the tile], scaled
  OfWarps* const row_sums = row_maxima + Block::kWarps * 16 / kKvWarps;

  // Outputs: [KV warp][row][column]; a row's chunks are permuted so that the rows which a store touches at once fall
  // into different banks.
  const auto output_chunk = [&](int kv_warp, int row, int chunk) {
    return reinterpret_cast<float*>(outputs + (kv_warp * kRows + row) * kChunks * 16 +
                                    ((chunk ^ ((row & 3) << 1)) << 4));
  };

#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int tile_row = warp.first_row + half * 8 + lane / 4;
    const float sum = state.row_sum(0, half);
    if (lane % 4 == 0) {
      row_maxima[tile_row].of_warp[warp.kv_warp] = state.maximum[0][half] * state.scale;
      row_sums[tile_row].of_warp[warp.kv_warp] = sum;
    }
  }
  Block::sync();

#pragma unroll 1  // one copy of the code for both halves
  for (int half = 0;;) {
    const int tile_row = warp.first_row + half * 8 + lane / 4;
    const OfWarps of_maxima = row_maxima[tile_row];
    const OfWarps of_sums = row_sums[tile_row];
    float maximum = minus_infinity();
#pragma unroll
    for (int w = 0; w < kKvWarps; ++w) maximum = fmaxf(maximum, of_maxima.of_warp[w]);
    const float base = maximum == minus_infinity() ? 0.0f : maximum;
    float sum = 0.0f;
#pragma unroll
    for (int w = 0; w < kKvWarps; ++w) sum += of_sums.of_warp[w] * ptx::ex2(of_maxima.of_warp[w] - base);
    // The factor that normalises this warp's output.
    float factor = sum > 0.0f ? __fdividef(ptx::ex2(state.maximum[0][0] * state.scale - base), sum) : 0.0f;
    RowEnd with_sink{};
    if (target.has_sinks()) {
      with_sink = target.end_row_with_sink(maximum, sum, tile_row);
      factor = ptx::ex2(state.maximum[0][0] * state.scale - base) * with_sink.factor;
    }
    if constexpr (Target::kHasScales) factor = target.with_scale(factor, tile_row);
    if (const int32_t count = target.rows.count; tile_row < count) {  // read once, not for each store
      if constexpr (Layout::kFours) {
#pragma unroll
        for (int n = 0; n < kColumns / 8; n += 2) {
          float* chunk = output_chunk(warp.kv_warp, row_of_half, 2 * n + lane % 4);
          *reinterpret_cast<float4*>(chunk) = state.four_outputs(0, n, 0, factor);
        }
      } else {
#pragma unroll
        for (int n = 0; n < kColumns / 8; ++n) {
          float* chunk = output_chunk(warp.kv_warp, row_of_half, 2 * n + (lane % 4) / 2) + (lane % 2) * 2;
          *reinterpret_cast<float2*>(chunk) = make_float2(state.o[0][n][0] * factor, state.o[0][n][1] * factor);
        }
      }
    }
    Block::sync();
#pragma unroll 1  // unrolled, the rows' places take registers beside the state's
    for (int i = Block::thread(); i < kRows * kChunks; i += kStride) {  // 4 columns a thread
      const int row = i / kChunks;
      const int of_tile = row / 8 * 16 + half * 8 + row % 8;
      char* const to = target.place(of_tile).o;
      if (to == nullptr) continue;
      const int chunk = i % kChunks;
      if (kHeadColumns < kColumns && chunk * 4 >= kHeadColumns) continue;
      float4 total = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
#pragma unroll
      for (int w = 0; w < kKvWarps; ++w) {
        const float4 part = *reinterpret_cast<const float4*>(output_chunk(w, row, chunk));
        total = make_float4(total.x + part.x, total.y + part.y, total.z + part.z, total.w + part.w);
      }
      if (target.complete) {
        float values[4] = {total.x, total.y, total.z, total.w};
        target.transform(values, of_tile, chunk * 4);
        store_four<Element>(to + chunk * 4 * Element::kBytes, values);
      } else {
        reinterpret_cast<float4*>(to)[chunk] = total;
      }
    }
    // Done by a warp that usually has no outputs to add up.
    if (warp.kv_warp == kKvWarps - 1 && lane % 4 == 0) {
      if (float* const to = target.place(tile_row).lse; to != nullptr)
        *to = (target.has_sinks() ? with_sink.lse : state_lse(base, sum)) * target.lse_unit();
    }
    if (++half >= halves) break;
    Block::sync();  // before the other half's outputs take the place of these
    state.maximum[0][0] = state.maximum[0][1];
#pragma unroll
    for (int n = 0; n < kColumns / 8; ++n) {
      state.o[0][n][0] = state.o[0][n][2];
      state.o[0][n][1] = state.o[0][n][3];
    }
  }
}

}  // namespace attn
