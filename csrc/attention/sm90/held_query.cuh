// Q where mma.sync multiplies it by K of an 8-bit cache that is dequantized in registers.
#pragma once

#include "attention/head_shape.h"
#include "attention/tile/warp_state.cuh"
#include "common/elements.cuh"
#include "common/math.h"
#include "common/platform.h"
#include "common/ptx/mma.cuh"

namespace attn::sm90 {

/// Rows of Q for dequantized_scores(): in registers, if the output leaves room. Then they are f16: fp8 -> f16 takes a
/// third of the instructions of fp8 -> bf16. Rows of 8 bits are dequantized here.
template <class Element, class Query, int kQkColumns, int kVColumns>
struct HeldQuery {
  static constexpr bool kIsHeld = leaves_registers(max_of(kQkColumns, kVColumns));
  static constexpr bool kIsFloat8 = Query::Element::kBytes == 1;
  static constexpr bool kConverts = kIsHeld && !kIsFloat8 && !is_same<Element, Float16>;
  static_assert(kIsHeld || !kIsFloat8, "dequantized once");
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
          dequantize<Float16, typename Query::Element>(ptx::load_word((q ^ d << 4) + half * 8 * Query::kRowBytes),
                                                       pairs);
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
    const uint32_t largest = largest_magnitude(rows, half);                                     // bits of a bf16
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
