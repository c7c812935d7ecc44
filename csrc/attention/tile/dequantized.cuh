// Rows of an 8-bit cache that are dequantized before they are multiplied.
#pragma once

#include "attention/variant/variants.h"
#include "cache/kv_cache.h"
#include "common/elements.cuh"
#include "common/math.h"

namespace attn {

/// Dequantizes sixteen stored numbers to two chunks of Element, times `scale`.
template <class Element, class Stored>
__device__ __forceinline__ void dequantize_sixteen(const uint4& bytes, float scale, uint4 (&wide)[2]) {
  const uint32_t words[4] = {bytes.x, bytes.y, bytes.z, bytes.w};
#pragma unroll
  for (int i = 0; i < 2; ++i)
    wide[i] = dequantize_eight<Element, Stored>(make_uint2(words[2 * i], words[2 * i + 1]), scale);
}

// ---- From one tile of shared memory to another: rows that a variant transforms, or that have scales, in the generic
// kernel ----

/// Dequantizes rows [row, row + kRows) of `from` to rows [to_row, to_row + kRows) of `to`; `thread` of kThreads. Rows
/// outside of `readable` become zeros: the cache may hold NaN there, which must not reach the output. Columns after the
/// head's that are multiplied are dequantized, too. Stored, Wide: the tiles. `scales`: of the rows of `from`, if
/// kScales; kScaleWords for each. `factor`: of scales of blocks.
template <class Stored, class Wide, class Element, class KvElement, int kRows, int kThreads, bool kScales = false,
          int kScaleWords = 1>
__device__ __forceinline__ void dequantize_tile_rows(const char* from, int row, char* to, int to_row, int thread,
                                                     const TokenRange& readable, const float* scales = nullptr,
                                                     float factor = 1.0f) {
  constexpr int kChunks = ceil_div(Stored::kHeadBytes, 16);  // of 16 elements; of 4 bits, 32
#pragma unroll 1
  for (int i = thread; i < kRows * kChunks; i += kThreads) {
    const int row_index = i / kChunks, chunk = i % kChunks;
    uint4 bytes = *reinterpret_cast<const uint4*>(from + Stored::offset(row + row_index, chunk));
    if (row + row_index < readable.begin || row + row_index >= readable.end) bytes = make_uint4(0, 0, 0, 0);
    if constexpr (kHas4Bits<KvElement>) {
      const uint32_t first = Wide::offset(to_row + row_index, chunk * 4);
      const uint32_t words[4] = {bytes.x, bytes.y, bytes.z, bytes.w};
      const int scale_word = has_block_scales(KvElement::kType) ? chunk / 2 : 0;
      const uint32_t scale = __float_as_uint(scales[(row + row_index) * kScaleWords + scale_word]);
#pragma unroll
      for (int w = 0; w < 4; ++w)
        *reinterpret_cast<uint4*>(to + (first ^ w << 4)) =
            KvElement::template dequantize<Element>(words[w], chunk % 2 * 4 + w, scale, factor);
    } else {
      const uint32_t target = Wide::offset(to_row + row_index, chunk * 2);
      uint4 wide[2];
      if constexpr (kScales) {
        dequantize_sixteen<Element, KvElement>(bytes, scales[(row + row_index) * kScaleWords], wide);
      } else {
        wide[0] = dequantize_eight<Element, KvElement>(make_uint2(bytes.x, bytes.y));
        wide[1] = dequantize_eight<Element, KvElement>(make_uint2(bytes.z, bytes.w));
      }
      *reinterpret_cast<uint4*>(to + target) = wide[0];
      *reinterpret_cast<uint4*>(to + (target ^ 16)) = wide[1];
    }
  }
}

// ---- From global to shared memory: wide heads, whose tiles leave no room for a second form ----

/// A row in global memory, which four lanes load piece by piece: of each block of 64 columns a lane loads the 16 of its
/// `quarter`. The block of the rotated part may be stored in the type that is multiplied; it then has two pieces.
template <class Element, class Stored, int kBlocks_>
struct StoredRow {
  using Latent = ScaledLatentRow;
  static constexpr int kBlocks = kBlocks_;
  static constexpr int kBlockColumns = 64;
  static constexpr int kNarrowBlocks =
      Stored::kRowsHaveScales ? min_of(kBlocks, Latent::kLatentColumns / kBlockColumns) : kBlocks;
  static constexpr int kPieces = kNarrowBlocks + 2 * (kBlocks - kNarrowBlocks);
  static constexpr int block_of(int piece) {
    return piece < kNarrowBlocks ? piece : kNarrowBlocks + (piece - kNarrowBlocks) / 2;
  }

  static constexpr int kBytes = Stored::kRowsHaveScales ? Latent::kBytes : kBlocks * kBlockColumns;

  const char* data;  // nullptr: zeros
  int quarter;

  __device__ __forceinline__ int byte_of(int piece) const {
    return piece < kNarrowBlocks ? piece * kBlockColumns + quarter * 16
                                 : Latent::kRopeAt + quarter * 32 + (piece - kNarrowBlocks) * 16;
  }

  __device__ __forceinline__ uint4 load(int piece) const {
    if (data == nullptr) return make_uint4(0, 0, 0, 0);
    return __ldg(reinterpret_cast<const uint4*>(data + byte_of(piece)));
  }

  /// Which scale a piece has. Pieces of the same 128 columns have the same scale. Pieces of the rotated part have none.
  static constexpr int scale_of(int piece) { return piece * kBlockColumns / Latent::kColumnsOfScale; }
  static constexpr bool is_first_of_scale(int piece) {
    return piece < kNarrowBlocks && piece % (Latent::kColumnsOfScale / kBlockColumns) == 0;
  }

  /// The scale of a piece of a row that has scales.
  __device__ __forceinline__ float scale(int piece) const {
    if (data == nullptr) return 0.0f;
    return __ldg(reinterpret_cast<const float*>(data + Latent::kScalesAt) + scale_of(piece));
  }

  /// Writes a piece to row number `row` of a tile of layout Wide.
  template <class Wide>
  __device__ __forceinline__ void store(char* tile, int row, int piece, const uint4& bytes, float scale) const {
    const uint32_t target = Wide::offset(row, block_of(piece) * 8 + quarter * 2);
    if (piece >= kNarrowBlocks) {
      *reinterpret_cast<uint4*>(tile + (target ^ (piece - kNarrowBlocks) * 16)) = bytes;
      return;
    }
    uint4 wide[2];
    dequantize_sixteen<Element, Stored>(bytes, scale, wide);
    *reinterpret_cast<uint4*>(tile + target) = wide[0];
    *reinterpret_cast<uint4*>(tile + (target ^ 16)) = wide[1];
  }
};

}  // namespace attn
