// K and V tiles of an 8-bit cache, widened to tiles that wgmma takes.
#pragma once

#include "attention/sm90/shape.h"
#include "attention/sm90/tiles.cuh"
#include "attention/variant/variants.h"
#include "common/elements.cuh"
#include "common/ptx/warp.cuh"

namespace attn::sm90 {

/// Widens half of the rows of a tile, those from `first_row` on, by the four warps of a warpgroup. Rows outside of
/// `readable` become zeros: the ring or the cache may hold NaN there, which must not reach the output.
template <class Stored, class Wide, class Traits>
__device__ __forceinline__ void widen_rows(const char* from, char* to, int first_row, const TokenRange& readable) {
  constexpr int kRows = kTuning<Traits>.kv_tile / 2;
  constexpr int kChunks = 4;      // of 16 elements: a block of the wide tile
  constexpr int kRowsOfWarp = 8;  // that a warp takes at a time
  const int lane = ptx::lane_id();
  // Eight lanes take a pair of rows, chosen so that neither their loads nor their stores fall into the same banks.
  const int row_of_warp = ptx::thread_id() / 32 % 4 * kRowsOfWarp + (lane / 8 ^ lane / 4 % 2 * 5);
  const int chunk = lane % kChunks;
#pragma unroll 1  // unrolled, it takes registers that the output needs
  for (int i = 0; i < kRows; i += 4 * kRowsOfWarp) {
    const int row = first_row + i + row_of_warp;
    const bool is_there = row >= readable.begin && row < readable.end;
#pragma unroll Wide::kBlocks <= 2 ? 2 : 1
    for (int block = 0; block < Wide::kBlocks; ++block) {
      uint4 bytes = *reinterpret_cast<const uint4*>(from + Stored::offset(row, block * kChunks + chunk));
      if (!is_there) bytes = make_uint4(0, 0, 0, 0);
      const uint32_t words[4] = {bytes.x, bytes.y, bytes.z, bytes.w};
      uint32_t wide[4][2];
#pragma unroll
      for (int w = 0; w < 4; ++w) widen<typename Traits::Element, typename Traits::KvElement>(words[w], wide[w]);
      const uint32_t target = Wide::offset(row, (block * kChunks + chunk) * 2);
      *reinterpret_cast<uint4*>(to + target) = make_uint4(wide[0][0], wide[0][1], wide[1][0], wide[1][1]);
      *reinterpret_cast<uint4*>(to + (target ^ 16)) = make_uint4(wide[2][0], wide[2][1], wide[3][0], wide[3][1]);
    }
  }
}

}  // namespace attn::sm90
