// Transforms of rows of Q, K and V (variants.h) in tiles of shared memory, once they have arrived there; and the
// conversion of Q to the cache's type.
//
// A thread keeps its columns and goes through the rows. Rows of 8-bit tensors have been dequantized by then. They are
// multiplied by their scale first, so that a hook sees the values that they stand for.
#pragma once

#include "attention/tile/row_tile.cuh"
#include "attention/variant/coordinates.h"
#include "attention/variant/variants.h"
#include "common/elements.cuh"
#include "common/math.h"
#include "common/platform.h"

namespace attn {

enum class RowHook { kQuery, kKey, kValue };

/// The hook of a variant for rows of Q, of K or of V. It keeps a reference to the variant.
template <class Variant_, RowHook kHook>
struct RowTransform {
  using Variant = Variant_;
  using Hooks = VariantHooks<Variant>;
  static constexpr bool kIsQuery = kHook == RowHook::kQuery, kIsKey = kHook == RowHook::kKey;
  using Place = typename Conditional<kIsQuery, ScoreRow, KvToken>::Type;
  static constexpr bool kExists = kIsQuery ? Hooks::kQuery : kIsKey ? Hooks::kKey : Hooks::kValue;
  static constexpr PairLayout kPairs = kIsQuery ? Variant::kQueryPairs
                                       : kIsKey ? Variant::kKeyPairs
                                                : Variant::kValuePairs;
  static constexpr bool kScales = kExists && (kIsQuery ? Variant::kHasQueryScale : Variant::kHasScales);

  const Variant& variant;
  float scale = 1.0f;  // if kScales

  __device__ __forceinline__ explicit RowTransform(const Variant& variant_, int32_t request = 0) : variant(variant_) {
    if constexpr (kScales) {
      const AttentionScales& scales = variant.scales;
      scale = (kIsQuery ? scales.q : kIsKey ? scales.k : scales.v).of(request, variant.kv_head);
    }
  }

  /// `tokens`: those whose rows are transformed.
  __device__ __forceinline__ RowTransform(const Variant& variant_, const KvTokens& tokens)
      : RowTransform(variant_, tokens.first.request) {}

  __device__ __forceinline__ Pair apply(Pair x, int32_t first, int32_t second, const Place& place) const {
    if constexpr (kScales) x = Pair{x.first * scale, x.second * scale};
    if constexpr (kIsQuery)
      return variant.query(x, first, second, place);
    else if constexpr (kIsKey)
      return variant.key(x, first, second, place);
    else
      return variant.value(x, first, second, place);
  }
};

template <class Variant>
using QueryTransform = RowTransform<Variant, RowHook::kQuery>;
template <class Variant>
using KeyTransform = RowTransform<Variant, RowHook::kKey>;
template <class Variant>
using ValueTransform = RowTransform<Variant, RowHook::kValue>;

/// Two elements, each times `scale`.
template <class Element>
__device__ __forceinline__ uint32_t scaled_pair(uint32_t pair, float scale) {
  return Element::pack(Element::unpack(pair) * scale, Element::unpack(pair >> 16) * scale);
}

/// Multiplies columns [kFirst, kEnd) of rows [first_row, end_row) of a tile by `scale`; `thread` of kThreads.
template <class Tile, class Element, int kFirst, int kEnd, int kThreads>
__device__ __forceinline__ void scale_columns(char* tile, int first_row, int end_row, int thread, float scale) {
  constexpr int kWordColumns = 4 / Element::kBytes, kChunkWords = 4;
  constexpr int kWords = (kEnd - kFirst) / kWordColumns;
#pragma unroll 1
  for (int i = thread; i < (end_row - first_row) * kWords; i += kThreads) {
    const int word = kFirst / kWordColumns + i % kWords;
    char* const chunk = tile + Tile::offset(first_row + i / kWords, word / kChunkWords);
    uint32_t& pair = reinterpret_cast<uint32_t*>(chunk)[word % kChunkWords];
    pair = scaled_pair<Element>(pair, scale);
  }
}

/// Converts rows [first_row, end_row) of a tile from another 16-bit type to Element, in place; `thread` of kThreads.
template <class Tile, class Element, class Other, int kThreads>
__device__ __forceinline__ void convert_rows(char* tile, int first_row, int end_row, int thread) {
  constexpr int kChunks = Tile::kRowChunks;
#pragma unroll 2
  for (int i = thread; i < (end_row - first_row) * kChunks; i += kThreads) {
    uint4& pairs = *reinterpret_cast<uint4*>(tile + Tile::offset(first_row + i / kChunks, i % kChunks));
    pairs = converted<Element, Other>(pairs);
  }
}

/// Transforms rows [first_row, end_row) of a tile in place; their number is a multiple of kMultiple. `thread` of
/// kThreads. `find(row, place)` says where a row is; if it returns false, the row does not exist and is not changed.
/// kColumns: of the head. A thread holds pieces of kWords words of kRows rows at a time, one of each row, or two where
/// the elements of a pair lie apart. It keeps its columns, so that a transform reads once what depends only on columns.
template <class Transform, class Tile, class Element, int kColumns, int kThreads, int kMultiple, int kRows, int kWords,
          class Find>
__device__ __forceinline__ void transform_rows(char* tile, int first_row, int end_row, int thread,
                                               const Transform& transform, const Find& find) {
  constexpr int kWordColumns = 4 / Element::kBytes;
  constexpr int kPieceColumns = kWords * kWordColumns;
  constexpr int kChunkPieces = 4 / kWords;  // of 16 bytes
  constexpr PairLayout kPairs = Transform::kPairs.for_head(kColumns);
  constexpr bool kNeighbors = kPairs.distance == 1;
  static_assert((kNeighbors || kPairs.distance % 8 == 0) && kPairs.columns % (2 * kPairs.distance) == 0 &&
                    kPairs.columns <= kColumns,
                "as PairLayout says, and no wider than the head");
  constexpr int kApart = kNeighbors ? kPieceColumns : kPairs.distance;  // columns of a run of pieces
  constexpr int kPieces = kNeighbors ? 1 : 2;
  constexpr int kUnits = ceil_div(kPairs.columns, kPieces * kPieceColumns);
  constexpr int kPassRows = kThreads / kUnits;
  constexpr bool kWholePasses = kMultiple % (kRows * kPassRows) == 0;
  constexpr int kPieceEnd = round_up(kPairs.columns, kPieceColumns);  // of the columns that are visited below
  if constexpr (Transform::kScales && kPieceEnd < kColumns)
    scale_columns<Tile, Element, kPieceEnd, kColumns, kThreads>(tile, first_row, end_row, thread, transform.scale);
  if (kThreads % kUnits != 0 && thread >= kPassRows * kUnits) return;
  // Unsigned: divisions by constants are shifts.
  const uint32_t unit = static_cast<uint32_t>(thread) % kUnits;
  const uint32_t column = unit * kPieceColumns / kApart * kPieces * kApart + unit * kPieceColumns % kApart;
  int row = first_row + static_cast<int>(static_cast<uint32_t>(thread) / kUnits);
  uint32_t offsets[kPieces];  // of the pieces of `row`
#pragma unroll
  for (int i = 0; i < kPieces; ++i) {
    const uint32_t number = column / kPieceColumns + i * (kApart / kPieceColumns);
    offsets[i] = Tile::offset(row, number / kChunkPieces) + number % kChunkPieces * (4 * kWords);
  }
  static_assert(kWords == 2 || kWords == 4);
  using Piece = typename Conditional<kWords == 4, uint4, uint2>::Type;
#pragma unroll 1
  for (; row < end_row; row += kRows * kPassRows) {
    Piece pieces[kRows][kPieces];
    typename Transform::Place place[kRows];
    bool exists[kRows];
    const auto piece_of = [&](int r, int i) -> Piece& {
      // Chunks are permuted by the last three bits of a row's number.
      uint32_t offset = offsets[i] + r * kPassRows * Tile::kRowBytes;
      if (kPassRows % 8 != 0 && r > 0) offset ^= ((row ^ (row + r * kPassRows)) & 7) << 4;
      return *reinterpret_cast<Piece*>(tile + offset);
    };
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      exists[r] = find(row + r * kPassRows, place[r]) & (kWholePasses || row + r * kPassRows < end_row);
#pragma unroll
      for (int i = 0; i < kPieces; ++i) {
        if (kWholePasses || r == 0 || exists[r]) pieces[r][i] = piece_of(r, i);
      }
    }
#pragma unroll
    for (int word = 0; word < kWords; ++word) {
      const int32_t first = static_cast<int32_t>(column) + word * kWordColumns;
      if (kPairs.columns % kPieceColumns != 0 && first >= kPairs.columns) {
        if constexpr (Transform::kScales) {
#pragma unroll
          for (int r = 0; r < kRows; ++r) {
            uint32_t& left_alone = reinterpret_cast<uint32_t*>(&pieces[r][0])[word];
            left_alone = scaled_pair<Element>(left_alone, transform.scale);
          }
          continue;
        } else {
          break;
        }
      }
#pragma unroll
      for (int r = 0; r < kRows; ++r) {
        uint32_t& low = reinterpret_cast<uint32_t*>(&pieces[r][0])[word];
        if constexpr (kNeighbors) {
          const Pair changed =
              transform.apply(Pair{Element::unpack(low), Element::unpack(low >> 16)}, first, first + 1, place[r]);
          low = Element::pack(changed.first, changed.second);
        } else {
          uint32_t& high = reinterpret_cast<uint32_t*>(&pieces[r][kPieces - 1])[word];
          const Pair even = transform.apply(Pair{Element::unpack(low), Element::unpack(high)}, first,
                                            first + kPairs.distance, place[r]);
          const Pair odd = transform.apply(Pair{Element::unpack(low >> 16), Element::unpack(high >> 16)}, first + 1,
                                           first + 1 + kPairs.distance, place[r]);
          low = Element::pack(even.first, odd.first);
          high = Element::pack(even.second, odd.second);
        }
      }
    }
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      if (!exists[r]) continue;
#pragma unroll
      for (int i = 0; i < kPieces; ++i) piece_of(r, i) = pieces[r][i];
    }
#pragma unroll
    for (int i = 0; i < kPieces; ++i) {
      offsets[i] += kRows * kPassRows * Tile::kRowBytes;
      if (kRows * kPassRows % 8 != 0) offsets[i] ^= ((row ^ (row + kRows * kPassRows)) & 7) << 4;
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
    const int32_t group_token = first_token + row;
    token = tokens.at(group_token);
    return group_token >= readable.begin && group_token < readable.end;
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
    place = score_row(params, rows, group, kv_head, row);
    return row < rows.count;
  }
};

}  // namespace attn
