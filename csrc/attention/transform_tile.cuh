// Transforms of rows of Q, K and V (variants.h) in tiles of shared memory, once they have arrived there.
//
// A thread keeps to its columns, and goes through the rows: what a transform reads for a column alone is read once for
// some rows together.
#pragma once

#include "attention/kv_tokens.h"
#include "attention/output.cuh"
#include "attention/variants.h"

namespace attn {

// What the three hooks have in common.
template <class Variant_>
struct QueryTransform {
  using Variant = Variant_;
  using Place = ScoreRow;
  static constexpr bool kExists = VariantHooks<Variant>::kQuery;
  static constexpr PairLayout kPairs = Variant::kQueryPairs;

  __device__ __forceinline__ static Pair apply(const Variant& variant, Pair x, int32_t first, int32_t second,
                                               const ScoreRow& row) {
    return variant.query(x, first, second, row);
  }
};

template <class Variant_>
struct KeyTransform {
  using Variant = Variant_;
  using Place = KvToken;
  static constexpr bool kExists = VariantHooks<Variant>::kKey;
  static constexpr PairLayout kPairs = Variant::kKeyPairs;

  __device__ __forceinline__ static Pair apply(const Variant& variant, Pair x, int32_t first, int32_t second,
                                               const KvToken& token) {
    return variant.key(x, first, second, token);
  }
};

template <class Variant_>
struct ValueTransform {
  using Variant = Variant_;
  using Place = KvToken;
  static constexpr bool kExists = VariantHooks<Variant>::kValue;
  static constexpr PairLayout kPairs = Variant::kValuePairs;

  __device__ __forceinline__ static Pair apply(const Variant& variant, Pair x, int32_t first, int32_t second,
                                               const KvToken& token) {
    return variant.value(x, first, second, token);
  }
};

/// Rewrites rows [first_row, end_row) of a tile; `thread` of kThreads. `find(row, place)` says where a row of the tile
/// is; false: it does not exist, and is left alone. kColumns: of the head. kRows: that a thread has in registers.
template <class Transform, class Tile, class Element, int kColumns, int kThreads, int kRows, class Find>
__device__ __forceinline__ void transform_rows(char* tile, int first_row, int end_row, int thread,
                                               const typename Transform::Variant& variant, const Find& find) {
  constexpr int kChunkColumns = 16 / Element::kBytes;
  constexpr PairLayout kPairs = Transform::kPairs.of_head(kColumns);
  constexpr bool kNeighbours = kPairs.distance == 1;
  static_assert((kNeighbours || kPairs.distance % kChunkColumns == 0) && kPairs.columns % (2 * kPairs.distance) == 0 &&
                    kPairs.columns <= kColumns,
                "as PairLayout says, and no wider than the head");
  // Where pairs lie apart, a thread has two chunks, so many chunks apart.
  constexpr int kApart = kNeighbours ? 0 : kPairs.distance / kChunkColumns;
  constexpr int kUnits = kNeighbours ? ceil_div(kPairs.columns, kChunkColumns) : kPairs.columns / kChunkColumns / 2;
  constexpr int kPassRows = kThreads / kUnits;
  constexpr int kChunks = kNeighbours ? 1 : 2;
  if (thread >= kPassRows * kUnits) return;
  const int unit = thread % kUnits;
  const int chunk = kNeighbours ? unit : unit / max_of(kApart, 1) * 2 * kApart + unit % max_of(kApart, 1);
#pragma unroll 1
  for (int row = first_row + thread / kUnits; row < end_row; row += kRows * kPassRows) {
    uint4 chunks[kRows][kChunks];
    typename Transform::Place place[kRows];
    bool exists[kRows];
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      const int of_tile = row + r * kPassRows;
      exists[r] = of_tile < end_row && find(of_tile, place[r]);
      if (!exists[r]) continue;
#pragma unroll
      for (int c = 0; c < kChunks; ++c)
        chunks[r][c] = *reinterpret_cast<const uint4*>(tile + Tile::offset(of_tile, chunk + c * kApart));
    }
#pragma unroll
    for (int word = 0; word < 4; ++word) {
      const int32_t column = chunk * kChunkColumns + 2 * word;
      if (kNeighbours && kPairs.columns % kChunkColumns != 0 && column >= kPairs.columns) break;
#pragma unroll
      for (int r = 0; r < kRows; ++r) {
        if (!exists[r]) continue;
        uint32_t& low = reinterpret_cast<uint32_t*>(&chunks[r][0])[word];
        if constexpr (kNeighbours) {
          const Pair changed = Transform::apply(variant, Pair{Element::unpack(low), Element::unpack(low >> 16)}, column,
                                                column + 1, place[r]);
          low = Element::pack(changed.first, changed.second);
        } else {
          uint32_t& high = reinterpret_cast<uint32_t*>(&chunks[r][kChunks - 1])[word];
          const Pair even = Transform::apply(variant, Pair{Element::unpack(low), Element::unpack(high)}, column,
                                             column + kPairs.distance, place[r]);
          const Pair odd = Transform::apply(variant, Pair{Element::unpack(low >> 16), Element::unpack(high >> 16)},
                                            column + 1, column + 1 + kPairs.distance, place[r]);
          low = Element::pack(even.first, odd.first);
          high = Element::pack(even.second, odd.second);
        }
      }
    }
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      if (!exists[r]) continue;
#pragma unroll
      for (int c = 0; c < kChunks; ++c)
        *reinterpret_cast<uint4*>(tile + Tile::offset(row + r * kPassRows, chunk + c * kApart)) = chunks[r][c];
    }
  }
}

/// Where the rows of a KV tile are: row r is token `first_token` + r of the row group. Those outside of `readable` do
/// not exist.
struct TileTokens {
  KvTokens tokens;
  TokenRange readable;
  int32_t first_token;

  __device__ __forceinline__ bool operator()(int row, KvToken& token) const {
    const int32_t of_group = first_token + row;
    token = tokens.at(of_group);
    return of_group >= readable.begin && of_group < readable.end;
  }
};

/// Where the rows of a row tile are.
template <class Rows>
struct TileRows {
  const AttentionParams& params;
  const Rows& rows;  // RowTileRows
  int32_t group;
  int32_t kv_head;

  __device__ __forceinline__ bool operator()(int row, ScoreRow& place) const {
    if (row >= rows.count) return false;
    place = score_row(params, rows, group, kv_head, row);
    return true;
  }
};

}  // namespace attn
