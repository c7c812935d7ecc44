// How the producer loads the rows of Q that a row tile packs: by TMA, or chunk by chunk. For MLA's
// latents Q is two tensors: the columns that V has too, and the rotated ones. If Q is one tensor, the second one points
// into it.
#pragma once

#include "attention/feed/shared_memory.cuh"
#include "attention/feed/tiles.cuh"
#include "attention/feed/tuning.h"
#include "attention/feed/work_item.cuh"
#include "attention/tile/row_tile.cuh"
#include "common/elements.cuh"
#include "common/ptx/barrier.cuh"
#include "common/ptx/copy.cuh"
#include "common/ptx/warp.cuh"

namespace attn::feed {

constexpr int kFirstQueryThread = 32;  // of the warps that load Q: those that load V

/// With latents: the blocks of columns that V also has. They come first.
template <class Traits>
constexpr int kLatentBlocks = Traits::Shape::kV / kBlockColumns;

/// Rows of the Q tile that are multiplied for a kind of row tile: all of them must be written.
template <class Traits>
__device__ __forceinline__ int multiplied_rows(int32_t kind) {
  if (is_wide(Traits::Shape::kDims)) return SharedMemory<Traits>::kTileRows;
  return kind == 0 ? tile_rows(0) : max_of(tile_rows(kind), kWarpgroupRows);
}

/// Gathers pieces [first, end) of the rows of Q that a work item packs into `tile`, and dequantizes 8-bit rows, unless
/// they are multiplied as they are. Rows that do not exist become zeros. `part`: where these pieces lie. `half`: which
/// rows this warp takes. A lane knows one of up to 32 rows.
template <class Traits>
__device__ __forceinline__ void gather_pieces(const AttentionParams& params, const QueryPart& part, int first, int end,
                                              const WorkItem& item, char* tile, int half) {
  const uint32_t q = ptx::shared_address(tile);
  using Tile = QTile<Traits>;
  using Pieces = RowPieces<Tile, 32>;
  const int lane = ptx::lane_id();
  const int first_chunk = lane % Pieces::kChunks;
  constexpr int kMaxPiecesAtOnce = is_wide(Traits::Shape::kDims) ? 1 : 3;  // more take too many registers
  const int num_rows = multiplied_rows<Traits>(item.kind) / 2;
  const int end_row = (half + 1) * num_rows;
#pragma unroll 1
  for (int first_row = half * num_rows; first_row < end_row; first_row += 32) {
    const PackedRow mine(params, item.rows, item.kv_head, first_row + lane);
    const char* from = nullptr;
    if (mine.exists)
      from = static_cast<const char*>(part.data) +
             (mine.row * part.row_stride + mine.qo_head * part.head_stride) * Traits::QElement::kBytes;
#pragma unroll 1
    for (int pass = 0; pass < min_of(num_rows, 32); pass += Pieces::kRows) {
      const int row = pass + lane / Pieces::kChunks;
      const char* const source = shuffle_pointer(from, row);
#pragma unroll kMaxPiecesAtOnce
      for (int piece = 0; piece < end - first; ++piece) {
        const int part_chunk = piece * Pieces::kChunks + first_chunk;
        const int chunk = first * Pieces::kChunks + part_chunk;
        const bool is_there = source != nullptr && (Tile::kHeadChunks == Tile::kRowChunks || chunk < Tile::kHeadChunks);
        if constexpr (Traits::kDequantizesQuery) {
          uint4 elements = make_uint4(0, 0, 0, 0);
          if (is_there)
            elements = dequantize_eight<typename Traits::Element, typename Traits::QElement>(
                __ldg(reinterpret_cast<const uint2*>(source + part_chunk * 8)));
          *reinterpret_cast<uint4*>(tile + Tile::offset(first_row + row, chunk)) = elements;
          continue;
        }
        ptx::cp_async_16_or_zero(q + Tile::offset(first_row + row, chunk),
                                 is_there ? source + part_chunk * 16 : static_cast<const char*>(params.q), is_there);
      }
    }
  }
}

/// Gathers the rows of Q that a work item packs into `tile`.
template <class Traits>
__device__ __forceinline__ void gather_q(const typename Traits::Params& params, const WorkItem& item, char* tile,
                                         int half) {
  using Pieces = RowPieces<QTile<Traits>, 32>;
  const AttentionParams& attention = params.attention;
  if constexpr (Traits::kIsLatent) {
    static_assert(Pieces::kChunks * 16 == kBlockRowBytes, "a piece is a block of columns");
#pragma unroll 1  // a launch costs more the more code there is
    for (int is_rope = 0; is_rope < 2; ++is_rope) {
      const QueryPart part{is_rope ? params.q_rope.data : attention.q,
                           is_rope ? params.q_rope.row_stride : attention.q_row_stride,
                           is_rope ? params.q_rope.head_stride : attention.q_head_stride};
      gather_pieces<Traits>(attention, part, is_rope ? kLatentBlocks<Traits> : 0,
                            is_rope ? Pieces::kPieces : kLatentBlocks<Traits>, item, tile, half);
    }
  } else {
    gather_pieces<Traits>(attention, QueryPart{attention.q, attention.q_row_stride, attention.q_head_stride}, 0,
                          Pieces::kPieces, item, tile, half);
  }
}

/// Loads block number `block` of columns of Q by TMA. kIsTile: of all rows of a row tile; else of one row.
template <class Traits, bool kIsTile>
__device__ __forceinline__ void copy_q_block(const typename Traits::Params& params, int block, uint32_t to,
                                             uint32_t full, int32_t head, int32_t row) {
  constexpr int kColumns = QTile<Traits>::kBoxColumns;
  if constexpr (Traits::kIsLatent) {
    if (block >= kLatentBlocks<Traits>)
      return ptx::copy_box(to, kIsTile ? params.q_rope_tile : params.q_rope_row, full,
                           (block - kLatentBlocks<Traits>)*kColumns, head, row, 0, ptx::kKeepNormally);
  }
  ptx::copy_box(to, kIsTile ? params.q : params.q_row, full, block * kColumns, head, row, 0, ptx::kKeepNormally);
}

/// Loads Q of one of the largest row tiles by TMA, if its rows are consecutive; rows after the last may hold anything.
/// Called by one thread, before it arrives at `full`.
template <class Traits>
__device__ __forceinline__ void copy_q(const typename Traits::Params& params, const WorkItem& item, uint32_t q,
                                       uint32_t full) {
  const FastDivisor& group_size = params.attention.group_size;
  const int32_t row = item.rows.qo_begin + group_size.divide(item.rows.packed_begin);
  int32_t head = item.kv_head * group_size.divisor;
  if constexpr (is_wide(Traits::Shape::kDims)) head += group_size.modulo(item.rows.packed_begin);
  ptx::mbarrier_expect(full, SharedMemory<Traits>::kTileRows * QTile<Traits>::kBlocks * QTile<Traits>::kRowBytes);
#pragma unroll
  for (int block = 0; block < QTile<Traits>::kBlocks; ++block) {
    copy_q_block<Traits, true>(params, block, q + block * QTile<Traits>::kBlockBytes, full, head, row);
  }
}

/// Loads Q of a smaller row tile by TMA, if it holds the first rows of its group with all their heads: lane i asks for
/// row i. Rows after the last become zeros, except in the smallest kind. Called by one warp, before it arrives at
/// `full`.
template <class Traits>
__device__ __forceinline__ void copy_q_rows(const typename Traits::Params& params, const WorkItem& item, uint32_t q,
                                            uint32_t full) {
  const FastDivisor& group_size = params.attention.group_size;
  const int32_t num_rows = group_size.divide(item.rows.count);
  const int32_t all_rows = item.kind == 0 && !is_wide(Traits::Shape::kDims)
                               ? num_rows
                               : group_size.divide(multiplied_rows<Traits>(item.kind) + group_size.divisor - 1);
  if (ptx::lane_id() == 0)
    ptx::mbarrier_expect(full, all_rows * group_size.divisor * QTile<Traits>::kBlocks * QTile<Traits>::kRowBytes);
  __syncwarp();
#pragma unroll 1
  for (int32_t i = ptx::lane_id(); i < all_rows; i += 32) {
    int32_t row = item.rows.qo_begin + i;
    if (i >= num_rows) {
      row = params.attention.num_rows;  // outside
    } else if (item.rows.list != nullptr) {
      row = __ldg(item.rows.list + row);
    }
#pragma unroll
    for (int block = 0; block < QTile<Traits>::kBlocks; ++block) {
      copy_q_block<Traits, false>(
          params, block, q + block * QTile<Traits>::kBlockBytes + i * group_size.divisor * QTile<Traits>::kRowBytes,
          full, item.kv_head * group_size.divisor, row);
    }
  }
}

/// Whether rows of Q, with all their heads, go into a Q tile without reaching beyond it.
template <class Traits>
__device__ __forceinline__ bool has_room_for_whole_rows(const FastDivisor& group_size, int32_t kind) {
  if constexpr (is_wide(Traits::Shape::kDims)) return group_size.modulo(SharedMemory<Traits>::kTileRows) == 0;
  return kind < kTwoWarpgroupKind ||
         group_size.modulo(tile_rows(kTwoWarpgroupKind)) == 0;  // smaller kinds: half of the tile is room
}

/// Loads Q of a work item into `tile`. Called by the warps that load Q, before they arrive at `full`.
template <class Traits>
__device__ __forceinline__ void load_q(const typename Traits::Params& params, const WorkItem& item, char* tile,
                                       uint32_t full) {
  const uint32_t q = ptx::shared_address(tile);
  const FastDivisor& group_size = params.attention.group_size;
  const bool is_largest = item.kind == Traits::kTuning.max_kind;
  const bool holds_whole_rows = item.rows.packed_begin == 0 && group_size.modulo(item.rows.count) == 0 &&
                                has_room_for_whole_rows<Traits>(group_size, item.kind);
  if (Traits::kDequantizesQuery ||
      !(is_largest ? params.has_row_maps && item.rows.list == nullptr : params.has_one_row_map && holds_whole_rows)) {
    gather_q<Traits>(params, item, tile, ptx::thread_id() / 64);
  } else if (is_largest) {
    if (ptx::thread_id() == kFirstQueryThread) copy_q<Traits>(params, item, q, full);
  } else if (ptx::thread_id() < kFirstQueryThread + 32) {
    copy_q_rows<Traits>(params, item, q, full);
  }
}

}  // namespace attn::feed
