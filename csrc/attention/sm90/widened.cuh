// What the consumers need where the cache is of 8 bits.
#pragma once

#include "attention/sm90/shape.h"
#include "attention/sm90/tiles.cuh"
#include "attention/variants.h"
#include "attention/warp_state.cuh"
#include "common/elements.cuh"

namespace attn::sm90 {

/// Widens half of the rows of a tile, those from `first_row` on, by the four warps of a warpgroup. Rows outside of
/// `readable` become zeros: what the ring or the cache holds there (NaN, perhaps) must not reach the output.
template <class Stored, class Wide, class Traits>
__device__ __forceinline__ void widen_rows(const char* from, char* to, int first_row, const TokenRange& readable) {
  constexpr int kRows = kTuning<Traits>.kv_tile / 2;
  constexpr int kChunks = 4;    // of 16 elements: a block of the wide tile
  constexpr int kWarpRows = 8;  // that a warp takes at a time
  const int lane = ptx::lane_id();
  // Eight lanes take a pair of rows, chosen so that neither their loads nor their stores fall into the same banks.
  const int row_of_warp = ptx::thread_id() / 32 % 4 * kWarpRows + (lane / 8 ^ lane / 4 % 2 * 5);
  const int chunk = lane % kChunks;
#pragma unroll 1  // unrolled, it takes registers that the output needs
  for (int i = 0; i < kRows; i += 4 * kWarpRows) {
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

/// Rows of Q for widened_scores(): in registers, if these have room beside the output. Then they are f16, which numbers
/// of 8 bits become in a third of the instructions that bf16 takes. Rows of 8 bits are widened here.
template <class Element, class Query, int kQkColumns, int kVColumns>
struct HeldQuery {
  static constexpr bool kIsHeld = max_of(kQkColumns, kVColumns) <= 128;
  static constexpr bool kIsFloat8 = Query::Element::kBytes == 1;
  static constexpr bool kConverts = kIsHeld && !kIsFloat8 && !is_same<Element, Float16>;
  static_assert(kIsHeld || !kIsFloat8, "widened once");
  using Multiplied = typename Conditional<kIsHeld, Float16, Element>::Type;
  uint32_t rows[kIsHeld ? kQkColumns / 16 : 1][4];
  float to_score[2];  // if kConverts: what scores of this lane's rows are multiplied by

  /// The lane's offset in the tile.
  __device__ __forceinline__ static uint32_t offset(int lane) {
    return kIsFloat8 ? Query::four_bytes(lane) : Query::four_columns(lane);
  }

  __device__ __forceinline__ void load(uint32_t q) {
    if constexpr (kIsFloat8) {
#pragma unroll
      for (int d = 0; d < kQkColumns / 16; ++d) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          uint32_t pairs[2];
          widen<Float16, typename Query::Element>(ptx::load_word((q ^ d << 4) + half * 8 * Query::kRowBytes), pairs);
          rows[d][half] = pairs[0];
          rows[d][2 + half] = pairs[1];
        }
      }
    } else if constexpr (kIsHeld) {
#pragma unroll
      for (int d = 0; d < kQkColumns / 16; ++d) load_query<Query>(rows[d], q, 0, d);
    }
    if constexpr (kConverts) {
      convert_row(0);
      convert_row(1);
    }
  }

  /// Registers i = half and half + 2 of each block have row `half` of the lane. A power of 2 brings its largest number
  /// to [2^14, 2^15): f16 then holds all 8 bits of those that are not below 2^-17.
  __device__ __forceinline__ void convert_row(int half) {
    uint32_t largest = 0;  // bits of a bf16
#pragma unroll
    for (int d = 0; d < kQkColumns / 16; ++d) {
#pragma unroll
      for (int i = half; i < 4; i += 2)
        largest = max_of(largest, max_of(rows[d][i] & 0x7fffu, rows[d][i] >> 16 & 0x7fffu));
    }
    largest = max_of(largest, __shfl_xor_sync(0xffffffffu, largest, 1));
    largest = max_of(largest, __shfl_xor_sync(0xffffffffu, largest, 2));
    const int32_t exponent = min_of(127 + 14 + 127 - static_cast<int32_t>(largest >> 7), 253);  // biased
    const float factor = __uint_as_float(static_cast<uint32_t>(exponent) << 23);
    to_score[half] = __uint_as_float(static_cast<uint32_t>(254 - exponent) << 23);
#pragma unroll
    for (int d = 0; d < kQkColumns / 16; ++d) {
#pragma unroll
      for (int i = half; i < 4; i += 2) {
        const uint32_t pair = rows[d][i];
        rows[d][i] = Float16::pack(Element::unpack(pair) * factor, Element::unpack(pair >> 16) * factor);
      }
    }
  }

  template <int kBlocks>
  __device__ __forceinline__ void finish(float (&s)[1][kBlocks][4]) const {
    if constexpr (kConverts) {
#pragma unroll
      for (int n = 0; n < kBlocks; ++n) {
#pragma unroll
        for (int i = 0; i < 4; ++i) s[0][n][i] *= to_score[i / 2];
      }
    }
  }

  __device__ __forceinline__ void get(uint32_t (&a)[4], uint32_t q, int d) const {
    if constexpr (kIsHeld) {
#pragma unroll
      for (int i = 0; i < 4; ++i) a[i] = rows[d][i];
    } else {
      load_query<Query>(a, q, 0, d);
    }
  }
};

}  // namespace attn::sm90
