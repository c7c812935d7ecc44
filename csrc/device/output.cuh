// The end of a work item: its state goes to o and lse, or to a partial slot for the merge kernel.
#pragma once

#include "attn/params.h"
#include "attn/tile.h"
#include "device/element.cuh"
#include "device/ptx/math.cuh"
#include "device/ptx/special_registers.cuh"
#include "device/shared_tile.cuh"
#include "device/warp_state.cuh"
#include "device/work.cuh"

namespace attn {

/// A packed row of a row tile as a row and a head of Q and O.
struct OutputRow {
  bool exists;
  int32_t index;      // of the row in its group
  int32_t row;
  int32_t qo_head;

  OutputRow() = default;

  template <bool kManyLevels>
  __device__ __forceinline__ OutputRow(const AttentionParams& params, const RowTileRows<kManyLevels>& rows, int32_t kv_head, int32_t tile_row) {
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

  __device__ __forceinline__ char* o(const AttentionParams& params) const {
    return static_cast<char*>(params.o) + (row * params.o_row_stride + qo_head * params.o_head_stride) * kElementBytes;
  }

  /// nullptr: not wanted.
  __device__ __forceinline__ float* lse(const AttentionParams& params) const {
    return params.lse == nullptr ? nullptr : params.lse + static_cast<int64_t>(row) * params.num_kv_heads * params.group_size.divisor + qo_head;
  }

  __device__ __forceinline__ void write_lse(const AttentionParams& params, float value) const {
    if (float* const to = lse(params); to != nullptr) *to = value;
  }
};

/// Natural log of a state's sum of exponentials; `base` is the state's maximum as a logarithm to base 2. -inf for a row that has seen nothing.
__device__ __forceinline__ float state_lse(float base, float sum) { return sum > 0.0f ? (base + ptx::lg2(sum)) * kLn2 : minus_infinity(); }

/// Where a work item's rows go.
template <bool kManyLevels>
struct OutputTarget {
  const AttentionParams& params;
  const RowTileRows<kManyLevels>& rows;
  int32_t kv_head;
  bool complete;           // o and lse; otherwise a partial state
  bool to_states;          // of a partial state: the rows' own states, not a partial slot
  int64_t partial_row;     // first row of the partial slot

  __device__ __forceinline__ OutputTarget(const AttentionParams& params_, const RowTileRows<kManyLevels>& rows_, const WorkCursor& cursor)
      : params(params_), rows(rows_), kv_head(cursor.now.head) {
    const RowTile& tile = params.schedule.tiles[cursor.now.tile];
    bool keeps_states = false;
    if constexpr (kManyLevels) keeps_states = rows.state_begin >= 0;
    complete = !keeps_states && cursor.now.kv_tile == 0 && cursor.last_kv_tile(tile.num_kv_tiles) == tile.num_kv_tiles;
    to_states = keeps_states && cursor.now.kv_tile == 0;
    partial_row = static_cast<int64_t>(partial_slot(blockIdx.x, cursor.now.kv_tile > 0 ? kStartsInside : kEndsInside)) * params.max_tile_rows;
  }

  /// Row of partial_o and partial_lse for an existing row of the tile.
  __device__ __forceinline__ int64_t partial_index(const OutputRow& row, int32_t tile_row) const {
    if constexpr (kManyLevels) {
      if (to_states) return row_state_index(params, rows.state_begin + row.index, row.qo_head);
    }
    return partial_row + tile_row;
  }

  __device__ __forceinline__ void write_lse(int32_t tile_row, float lse) const {
    const OutputRow row(params, rows, kv_head, tile_row);
    if (!row.exists) return;
    if (complete) row.write_lse(params, lse); else params.partial_lse[partial_index(row, tile_row)] = lse;
  }
};

/// Writes the rows of a warp that has seen all tokens of the item. On their way they are put into the warp's own rows of the Q tile, to be stored in chunks of
/// 16 bytes.
template <class Element, int kHeadDim, int kRowBlocks, bool kManyLevels>
__device__ __forceinline__ void write_warp_rows(WarpState<Element, kHeadDim, kRowBlocks>& state, const OutputTarget<kManyLevels>& target, int32_t first_row, char* shared) {
  using Tile = SharedTile<kHeadDim>;
  constexpr SharedLayout layout(kHeadDim);
  const AttentionParams& params = target.params;
  const int lane = ptx::lane_id();
  char* staged = shared + layout.q;

#pragma unroll
  for (int b = 0; b < kRowBlocks; ++b) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int32_t row = first_row + b * 16 + half * 8 + lane / 4;
      const float sum = state.row_sum(b, half);
      const float inverse = sum > 0.0f ? __fdividef(1.0f, sum) : 0.0f;
      if (lane % 4 == 0) target.write_lse(row, state_lse(state.maximum[b][half] * state.scale, sum));
      if (target.complete) {
#pragma unroll
        for (int n = 0; n < kHeadDim / 8; ++n) {
          *reinterpret_cast<uint32_t*>(staged + Tile::offset(row, n) + (lane % 4) * 4) =
              Element::pack(state.o[b][n][2 * half] * inverse, state.o[b][n][2 * half + 1] * inverse);
        }
      } else if (row < target.rows.count) {
        int64_t partial_row = target.partial_row + row;
        if constexpr (kManyLevels) {
          const OutputRow output(params, target.rows, target.kv_head, row);
          if (!output.exists) continue;
          partial_row = target.partial_index(output, row);
        }
        float* partial = params.partial_o + partial_row * kHeadDim + (lane % 4) * 2;
#pragma unroll
        for (int n = 0; n < kHeadDim / 8; ++n) {
          *reinterpret_cast<float2*>(partial + n * 8) = make_float2(state.o[b][n][2 * half] * inverse, state.o[b][n][2 * half + 1] * inverse);
        }
      }
    }
  }
  if (!target.complete) return;
  __syncwarp();
#pragma unroll 4
  for (int i = lane; i < kRowBlocks * 16 * Tile::kRowChunks; i += 32) {
    const int32_t tile_row = first_row + i / Tile::kRowChunks;
    const int chunk = i % Tile::kRowChunks;
    const OutputRow row(params, target.rows, target.kv_head, tile_row);
    if (row.exists) *reinterpret_cast<uint4*>(row.o(params) + chunk * 16) = *reinterpret_cast<const uint4*>(staged + Tile::offset(tile_row, chunk));
  }
}

/// Merges the states of the warps that share rows, and writes them. Their outputs meet in the Q tile's memory, kColumns columns at a time.
template <class Element, int kHeadDim, class Layout, bool kManyLevels>
__device__ __forceinline__ void write_merged_warps(WarpState<Element, kHeadDim, 1>& state, const OutputTarget<kManyLevels>& target, const Layout& warp, char* shared) {
  constexpr SharedLayout layout(kHeadDim);
  constexpr int kRows = kWarps / Layout::kKvWarps * 16;
  constexpr int kColumns = min_of(kHeadDim, 128);
  static_assert(kWarps * 16 * kColumns * 4 <= layout.kv - layout.q, "the outputs fit into the Q tile");
  const AttentionParams& params = target.params;
  const int lane = ptx::lane_id();
  float* maxima = reinterpret_cast<float*>(shared + layout.row_states);   // [row][KV warp], scaled
  float* sums = maxima + kWarps * 16;
  char* outputs = shared + layout.q;                                      // [KV warp][row][column]

  // 16-byte chunk of a row, permuted so that the rows which a store touches at once fall into different banks.
  const auto output_chunk = [&](int kv_warp, int row, int chunk) {
    return reinterpret_cast<float*>(outputs + (kv_warp * kRows + row) * kColumns * 4 + ((chunk ^ ((row & 3) << 1)) << 4));
  };

#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int index = (warp.first_row + half * 8 + lane / 4) * Layout::kKvWarps + warp.kv_warp;
    const float sum = state.row_sum(0, half);
    if (lane % 4 == 0) {
      maxima[index] = state.maximum[0][half] * state.scale;
      sums[index] = sum;
    }
  }
  __syncthreads();

  float factor[2];   // from this warp's sum of exponentials to the normalised output
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int row = warp.first_row + half * 8 + lane / 4;
    float maximum = minus_infinity();
#pragma unroll
    for (int w = 0; w < Layout::kKvWarps; ++w) maximum = fmaxf(maximum, maxima[row * Layout::kKvWarps + w]);
    const float base = maximum == minus_infinity() ? 0.0f : maximum;
    float sum = 0.0f;
#pragma unroll
    for (int w = 0; w < Layout::kKvWarps; ++w) sum += sums[row * Layout::kKvWarps + w] * ptx::ex2(maxima[row * Layout::kKvWarps + w] - base);
    factor[half] = sum > 0.0f ? __fdividef(ptx::ex2(state.maximum[0][half] * state.scale - base), sum) : 0.0f;
    if (warp.kv_warp == 0 && lane % 4 == 0) target.write_lse(row, state_lse(base, sum));
  }

#pragma unroll
  for (int first_column = 0; first_column < kHeadDim; first_column += kColumns) {
    if (first_column > 0) __syncthreads();
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = warp.first_row + half * 8 + lane / 4;
#pragma unroll
      for (int n = 0; n < kColumns / 8; ++n) {
        const float* o = state.o[0][first_column / 8 + n];
        float* chunk = output_chunk(warp.kv_warp, row, 2 * n + (lane % 4) / 2) + (lane % 2) * 2;
        *reinterpret_cast<float2*>(chunk) = make_float2(o[2 * half] * factor[half], o[2 * half + 1] * factor[half]);
      }
    }
    __syncthreads();
#pragma unroll
    for (int i = threadIdx.x; i < kRows * kColumns / 8; i += kThreads) {   // 8 columns a thread
      const int tile_row = i / (kColumns / 8);
      const int column = i % (kColumns / 8) * 8;
      const OutputRow row(params, target.rows, target.kv_head, tile_row);
      if (!row.exists) continue;
      float4 sum[2] = {make_float4(0.0f, 0.0f, 0.0f, 0.0f), make_float4(0.0f, 0.0f, 0.0f, 0.0f)};
#pragma unroll
      for (int w = 0; w < Layout::kKvWarps; ++w) {
#pragma unroll
        for (int j = 0; j < 2; ++j) {
          const float4 part = *reinterpret_cast<const float4*>(output_chunk(w, tile_row, column / 4 + j));
          sum[j] = make_float4(sum[j].x + part.x, sum[j].y + part.y, sum[j].z + part.z, sum[j].w + part.w);
        }
      }
      if (target.complete) {
        *reinterpret_cast<uint4*>(row.o(params) + (first_column + column) * kElementBytes) =
            make_uint4(Element::pack(sum[0].x, sum[0].y), Element::pack(sum[0].z, sum[0].w), Element::pack(sum[1].x, sum[1].y),
                       Element::pack(sum[1].z, sum[1].w));
      } else {
        float4* partial = reinterpret_cast<float4*>(params.partial_o + target.partial_index(row, tile_row) * kHeadDim + first_column + column);
        partial[0] = sum[0];
        partial[1] = sum[1];
      }
    }
  }
}

}  // namespace attn
