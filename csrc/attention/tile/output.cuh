// The end of a work item: the warps write their states to where an OutputTarget has them. Warps that do not share rows
// write them as they are. Warps that share rows first merge their states in shared memory.
#pragma once

#include "attention/tile/output_target.cuh"
#include "attention/tile/rotation.cuh"
#include "attention/tile/row_tile.cuh"
#include "attention/tile/shared_tile.cuh"
#include "attention/tile/warp_state.cuh"
#include "common/elements.cuh"
#include "common/ptx/barrier.cuh"
#include "common/ptx/math.cuh"
#include "common/ptx/mma.cuh"
#include "common/ptx/warp.cuh"

namespace attn {

/// Puts 16 complete rows of a warp, normalized, into rows `block_row` on of `staged`, a tile of layout Tile.
/// kFourColumns: they are outputs of dequantized_accumulate().
template <class Tile, bool kFourColumns = false, class Multiplied, int kColumns, int kRowBlocks, class Target>
__device__ __forceinline__ void stage_rows(const WarpState<Multiplied, kColumns, kRowBlocks>& state,
                                           const Target& target, int b, const float (&inverse)[2], int32_t block_row,
                                           char* staged) {
  using Element = typename Target::Element;
  const int lane = ptx::lane_id();
  if constexpr (kFourColumns || Target::kWritesFloat8) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = block_row + half * 8 + lane / 4;
#pragma unroll
      for (int n = 0; n < kColumns / 8; n += kFourColumns ? 2 : 1) {
        if constexpr (kFourColumns) {
          const float4 outputs = state.four_outputs(b, n, half, inverse[half]);
          float values[4] = {outputs.x, outputs.y, outputs.z, outputs.w};
          target.transform(values, row, n * 8 + lane % 4 * 4);
          char* const to = staged + (Target::kWritesFloat8 ? Tile::offset(row, n / 2) + lane % 4 * 4
                                                           : Tile::offset(row, n + lane % 4 / 2) + lane % 2 * 8);
          store_four<Element>(to, values);
        } else {
          float values[2] = {state.o[b][n][2 * half] * inverse[half], state.o[b][n][2 * half + 1] * inverse[half]};
          target.transform(values, row, n * 8 + lane % 4 * 2);
          *reinterpret_cast<uint16_t*>(staged + Tile::offset(row, n / 2) + n % 2 * 8 + lane % 4 * 2) =
              static_cast<uint16_t>(Element::pack(values[0], values[1]));
        }
      }
    }
    return;
  }
  const uint32_t fragments = ptx::shared_address(staged) + block_row * Tile::kRowBytes + Tile::rows_first(lane);
#pragma unroll
  for (int n = 0; n < kColumns / 8; n += 2) {
    uint32_t pairs[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      float values[2] = {state.o[b][n + i / 2][i % 2 * 2] * inverse[i % 2],
                         state.o[b][n + i / 2][i % 2 * 2 + 1] * inverse[i % 2]};
      target.transform(values, block_row + i % 2 * 8 + lane / 4, (n + i / 2) * 8 + lane % 4 * 2);
      pairs[i] = Element::pack(values[0], values[1]);
    }
    ptx::stmatrix_x4(Tile::block(fragments, 0, n / 2), pairs);
  }
}

/// Copies the 16 rows from row `block_row` on of `staged` to global memory, in chunks of 16 bytes. `o`: where row i
/// goes, in lanes i and i + 16; nullptr: it does not exist.
template <class Tile>
__device__ __forceinline__ void copy_staged_rows(const char* staged, int32_t block_row, char* o, int lane) {
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
        to[i] = shuffle_pointer(o, batch + i * kRowsPerPass + lane / Pieces::kChunks);
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
}

/// Writes row block `b` of a warp to a partial state. `o`, `inverse`: as in copy_staged_rows() and stage_rows().
template <class Tile, bool kFourColumns, class Multiplied, int kColumns, int kRowBlocks>
__device__ __forceinline__ void write_partial_rows(const WarpState<Multiplied, kColumns, kRowBlocks>& state, int b,
                                                   const float (&inverse)[2], char* o, int lane) {
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    char* const to = shuffle_pointer(o, half * 8 + lane / 4);
    if (to == nullptr) continue;
    if constexpr (kFourColumns) {
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

/// The end of a row of a warp that has seen all tokens of the item; its factor includes V's scale. `tile_row`: its
/// number in the tile.
template <class Multiplied, int kColumns, int kRowBlocks, class Target>
__device__ __forceinline__ RowEnd end_of_row(const WarpState<Multiplied, kColumns, kRowBlocks>& state,
                                             const Target& target, int b, int half, int32_t tile_row) {
  const float sum = state.row_sum(b, half);
  const float base = state.maximum[b][half] * state.scale;
  RowEnd end{sum > 0.0f ? __fdividef(1.0f, sum) : 0.0f, state_lse(base, sum)};
  if (target.has_sinks()) end = target.end_row_with_sink(base, sum, tile_row);
  if constexpr (Target::kHasScales) end.factor = target.with_scale(end.factor, tile_row);
  return end;
}

/// Writes the rows of a warp that has seen all tokens of the item. Complete rows go through the warp's own rows of
/// `staged`, a tile of layout Tile. kFourColumns: as in stage_rows().
template <class Tile, bool kFourColumns = false, class Multiplied, int kColumns, int kRowBlocks, class Target>
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
      const RowEnd end = end_of_row(state, target, b, half, block_row + half * 8 + lane / 4);
      inverse[half] = end.factor;
      lse[half] = __shfl_sync(0xffffffffu, end.lse, lane % 8 * 4);
    }
    const auto store_lse = [&] {
      if (lane < 16 && place.lse != nullptr) *place.lse = (lane < 8 ? lse[0] : lse[1]) * target.lse_unit();
    };
    if constexpr (!Tile::kIsFilledByTma) store_lse();
    if (target.complete) {
      stage_rows<Tile, kFourColumns>(state, target, b, inverse, block_row, staged);
      // Before TMA fills the tile again. Nothing is stored to global memory before: the fence would wait (ADR 17).
      if constexpr (Tile::kIsFilledByTma) ptx::fence_async_proxy();
      __syncwarp();
      copy_staged_rows<Tile>(staged, block_row, place.o, lane);
    } else {
      write_partial_rows<Tile, kFourColumns>(state, b, inverse, place.o, lane);
    }
    if constexpr (Tile::kIsFilledByTma) store_lse();
  }
}

/// A number of each of the warps that share a row.
template <int kWarps>
struct alignas(kWarps < 4 ? 8 : 16) OfWarps {
  float by_warp[kWarps];
};

/// A row whose states several warps have.
struct MergedRow {
  float base;  // the sum's base: it is of exp2(score - base)
  float sum;
  float factor;      // normalizes the output of the calling warp
  RowEnd with_sink;  // of a target with sinks

  template <class Target>
  __device__ __forceinline__ float lse(const Target& target) const {
    return (target.has_sinks() ? with_sink.lse : state_lse(base, sum)) * target.lse_unit();
  }
};

/// Merges the states of row `tile_row`: `maxima` and `sums` of all warps. `own_maximum`: the calling warp's. Maxima are
/// scaled.
template <class Target, int kWarps>
__device__ __forceinline__ MergedRow merge_row(const Target& target, const OfWarps<kWarps>& maxima,
                                               const OfWarps<kWarps>& sums, float own_maximum, int tile_row) {
  MergedRow row{};
  float maximum = minus_infinity();
#pragma unroll
  for (int w = 0; w < kWarps; ++w) maximum = fmaxf(maximum, maxima.by_warp[w]);
  row.base = maximum == minus_infinity() ? 0.0f : maximum;
#pragma unroll
  for (int w = 0; w < kWarps; ++w) row.sum += sums.by_warp[w] * ptx::ex2(maxima.by_warp[w] - row.base);
  row.factor = row.sum > 0.0f ? __fdividef(ptx::ex2(own_maximum - row.base), row.sum) : 0.0f;
  if (target.has_sinks()) {
    row.with_sink = target.end_row_with_sink(maximum, row.sum, tile_row);
    row.factor = ptx::ex2(own_maximum - row.base) * row.with_sink.factor;
  }
  if constexpr (Target::kHasScales) row.factor = target.with_scale(row.factor, tile_row);
  return row;
}

/// Adds up the outputs of kWarps warps, and writes kRows rows of kChunks chunks of 4 columns. `tile_row(row)` says
/// which rows of the tile they are, `output_chunk(warp, row, chunk)` where their outputs are. kHeadColumns: that are
/// written.
template <class Block, int kWarps, int kRows, int kChunks, int kHeadColumns, class Target, class TileRow,
          class OutputChunk>
__device__ __forceinline__ void write_sums(const Target& target, const TileRow& tile_row,
                                           const OutputChunk& output_chunk) {
  using Element = typename Target::Element;
#pragma unroll 1  // unrolled, the rows' places take registers next to the state's
  for (int i = Block::thread(); i < kRows * kChunks; i += Block::kWarps * 32) {
    const int row = i / kChunks;
    char* const to = target.place(tile_row(row)).o;
    // Lanes that have nothing to write take part in rotating.
    if (!Target::kRotates && to == nullptr) continue;
    const int chunk = i % kChunks;
    if (!Target::kRotates && kHeadColumns < 4 * kChunks && chunk * 4 >= kHeadColumns) continue;
    float4 total = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
#pragma unroll
    for (int w = 0; w < kWarps; ++w) {
      const float4 part = *reinterpret_cast<const float4*>(output_chunk(w, row, chunk));
      total = make_float4(total.x + part.x, total.y + part.y, total.z + part.z, total.w + part.w);
    }
    if constexpr (Target::kRotates) {
      total = rotate_four_back<kHeadColumns>(total, chunk * 4);
      if (to == nullptr || chunk * 4 >= kHeadColumns) continue;
    }
    if (target.complete) {
      float values[4] = {total.x, total.y, total.z, total.w};
      target.transform(values, tile_row(row), chunk * 4);
      store_four<Element>(to + chunk * 4 * Element::kBytes, values);
    } else {
      reinterpret_cast<float4*>(to)[chunk] = total;
    }
  }
}

/// Merges the states of the warps that share rows, and writes them, eight of a warp's rows at a time: the first eight,
/// and the others if `halves` is 2. Their outputs meet in `outputs`, kBytes of memory that is free once all threads
/// have arrived here; `maxima` has room for two floats a row and warp, aligned to 16 bytes. `Block`: the threads that
/// take part; its fence_outputs() comes before TMA fills `outputs` again, if it does. Short work items spend half of
/// their time here, and nothing overlaps with it, so every barrier counts. kHeadColumns: that are written.
/// Layout::kFourColumns: as in stage_rows().
template <class Block, class Layout, int kHeadColumns, int kBytes, class Multiplied, int kColumns, class Target>
__device__ __forceinline__ void write_merged_warps(WarpState<Multiplied, kColumns, 1>& state, const Target& target,
                                                   const Layout& warp, int halves, char* outputs, float* maxima) {
  constexpr int kKvWarps = Layout::kKvWarps;           // that share rows
  constexpr int kRows = Block::kWarps / kKvWarps * 8;  // at a time
  constexpr int kChunks = kColumns / 4;                // of 16 bytes
  static_assert(kKvWarps * kRows * kChunks * 16 <= kBytes && kChunks % 8 == 0, "they fit, permuted");
  if constexpr (Target::kRotates) join_halves<kHeadColumns>(state);
  const int lane = ptx::lane_id();
  const int row_of_half = warp.first_row / 2 + lane / 4;                  // of those kRows
  auto* const row_maxima = reinterpret_cast<OfWarps<kKvWarps>*>(maxima);  // [row of the tile], scaled
  auto* const row_sums = row_maxima + Block::kWarps * 16 / kKvWarps;

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
      row_maxima[tile_row].by_warp[warp.kv_warp] = state.maximum[0][half] * state.scale;
      row_sums[tile_row].by_warp[warp.kv_warp] = sum;
    }
  }
  Block::sync();

#pragma unroll 1  // one copy of the code for both halves
  for (int half = 0;;) {
    const int tile_row = warp.first_row + half * 8 + lane / 4;
    const MergedRow row =
        merge_row(target, row_maxima[tile_row], row_sums[tile_row], state.maximum[0][0] * state.scale, tile_row);
    if (const int32_t count = target.rows.count; tile_row < count) {  // read once, not for each store
      if constexpr (Layout::kFourColumns) {
#pragma unroll
        for (int n = 0; n < kColumns / 8; n += 2) {
          float* chunk = output_chunk(warp.kv_warp, row_of_half, 2 * n + lane % 4);
          *reinterpret_cast<float4*>(chunk) = state.four_outputs(0, n, 0, row.factor);
        }
      } else {
#pragma unroll
        for (int n = 0; n < kColumns / 8; ++n) {
          float* chunk = output_chunk(warp.kv_warp, row_of_half, 2 * n + (lane % 4) / 2) + (lane % 2) * 2;
          *reinterpret_cast<float2*>(chunk) = make_float2(state.o[0][n][0] * row.factor, state.o[0][n][1] * row.factor);
        }
      }
    }
    // Once is enough, since the second half's outputs lie where the first's did: for items of up to eight rows no store
    // to global memory is under way, which the fence would wait for (ADR 17).
    if (half + 1 >= halves) Block::fence_outputs();
    Block::sync();
    write_sums<Block, kKvWarps, kRows, kChunks, kHeadColumns>(
        target, [&](int row) { return row / 8 * 16 + half * 8 + row % 8; }, output_chunk);
    // Done by a warp that usually has no outputs to add up.
    if (warp.kv_warp == kKvWarps - 1 && lane % 4 == 0) {
      if (float* const to = target.place(tile_row).lse; to != nullptr) *to = row.lse(target);
    }
    if (++half >= halves) break;
    Block::sync();  // before the other half's outputs replace these
    state.maximum[0][0] = state.maximum[0][1];
#pragma unroll
    for (int n = 0; n < kColumns / 8; ++n) {
      state.o[0][n][0] = state.o[0][n][2];
      state.o[0][n][1] = state.o[0][n][3];
    }
  }
}

}  // namespace attn
