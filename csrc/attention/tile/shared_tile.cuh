// A tile of rows in shared memory. The 16-byte chunks of a row are permuted (chunk ^ row % 8), so that the eight rows
// of an ldmatrix, and the chunks of a row that cp.async writes, fall into different banks.
#pragma once

#include "attention/head_shape.h"
#include "common/elements.cuh"
#include "common/math.h"
#include "common/platform.h"
#include "common/ptx/copy.cuh"

namespace attn {

/// What tiles have in common: rows of Tile::kRowBytes, in which Tile::offset(row, chunk) permutes chunks by row % 8.
template <class Tile>
struct PermutedRows {
  /// Offset of the same chunk `rows` rows below; the row's number has no bits in common with `rows`.
  __device__ __forceinline__ static uint32_t below(uint32_t offset, int rows) {
    return (offset ^ ((rows & 7) << 4)) + rows * Tile::kRowBytes;
  }

  // Offsets that a lane gives to ldmatrix_x4 for a block of 16 rows x 16 columns whose first row is a multiple of 16.

  /// Matrices: upper left, lower left, upper right, lower right. The A operand; the B operand when rows are its k
  /// dimension (with .trans).
  __device__ __forceinline__ static uint32_t rows_first(int lane) { return Tile::offset(lane & 15, lane >> 4); }

  /// For 2-byte elements: the four columns of its row that a lane has of a dequantized cache.
  __device__ __forceinline__ static uint32_t four_columns(int lane) {
    return Tile::offset(lane / 4, lane % 4 / 2) + lane % 2 * 8;
  }

  /// The same for 1-byte elements.
  __device__ __forceinline__ static uint32_t four_bytes(int lane) { return Tile::offset(lane / 4, 0) + lane % 4 * 4; }

  /// Matrices: upper left, upper right, lower left, lower right. The B operand when columns are its k dimension.
  __device__ __forceinline__ static uint32_t columns_first(int lane) {
    return Tile::offset((lane & 7) + ((lane >> 4) << 3), (lane >> 3) & 1);
  }
};

/// How kThreads threads share the chunks of a tile's rows. They take some rows at a time, and of each row `kPieces`
/// pieces of `kChunks` chunks, a power of two, one after another.
template <class Tile, int kThreads>
struct RowPieces {
  // Wide rows take few chunks at a time, so that more rows share what is computed for a chunk.
  static constexpr int kChunks = Tile::kRowChunks > 32 ? 8 : min_of(Tile::kRowChunks & -Tile::kRowChunks, kThreads);
  static constexpr int kPieces = Tile::kRowChunks / kChunks;
  static constexpr int kRows = kThreads / kChunks;
};

/// A tile whose rows have kHeadColumns columns of a head, and perhaps room for more (tile_row_bytes()).
template <class Element_, int kHeadColumns_>
struct SharedTile : PermutedRows<SharedTile<Element_, kHeadColumns_>> {
  using Element = Element_;
  static constexpr bool kIsFilledByTma = false;
  static constexpr int kHeadColumns = kHeadColumns_;
  static constexpr int kRowBytes = tile_row_bytes(kHeadColumns, Element::kBytes);
  static constexpr int kRowChunks = kRowBytes / 16;
  static constexpr int kHeadBytes = kHeadColumns * Element::kBytes;
  static constexpr int kHeadChunks = kHeadBytes / 16;

  /// Byte offset of a 16-byte chunk.
  __device__ __forceinline__ static uint32_t offset(int row, int chunk) {
    return row * kRowBytes + ((chunk ^ (row & 7)) << 4);
  }

  /// The block of 16 rows x 16 columns (32 of a byte each) that is `rows` blocks below and `columns` blocks to the
  /// right of the first: both cost one instruction or none.
  __device__ __forceinline__ static uint32_t block(uint32_t first, int rows, int columns) {
    if constexpr ((kRowBytes & (kRowBytes - 1)) == 0) return (first ^ columns * 32) + rows * 16 * kRowBytes;
    return (first ^ columns % 4 * 32) + columns / 4 * 128 + rows * 16 * kRowBytes;
  }
};

/// Copies chunk number `chunk` of a head's row to a tile. Products may also take the first chunk after those of the
/// head, as they multiply 16 columns at a time: it becomes zeros. The others are left alone.
template <class Tile>
__device__ __forceinline__ void copy_chunk(uint32_t to, const char* from, int chunk) {
  if constexpr (Tile::kHeadBytes % 16 != 0) {  // rows of whole pieces of 8 bytes: they need not lie at multiples of 16
    if (chunk > Tile::kHeadChunks) return;
    ptx::cp_async_8_or_zero(to, from, true);
    ptx::cp_async_8_or_zero(to + 8, chunk < Tile::kHeadChunks ? from + 8 : from, chunk < Tile::kHeadChunks);
  } else if constexpr (Tile::kHeadChunks == Tile::kRowChunks) {
    ptx::cp_async_16(to, from);
  } else {
    const bool is_there = chunk < Tile::kHeadChunks;
    if (chunk < round_up(Tile::kHeadChunks, 2))
      ptx::cp_async_16_or_zero(to, is_there ? from : from - chunk * 16, is_there);
  }
}

}  // namespace attn
