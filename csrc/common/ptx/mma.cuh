// mma.sync m16n8k16, float32 accumulators.
//
// Lane (g, t) = (lane / 4, lane % 4) holds
// - of A (16 x 16): in a[0] row g, columns 2t and 2t + 1; in a[1] row g + 8; in a[2] row g, columns 2t + 8 and 2t + 9;
//   in a[3] row g + 8, the same columns;
// - of B (16 x 8): in b0 rows 2t and 2t + 1 of column g; in b1 rows 2t + 8 and 2t + 9 of column g;
// - of C (16 x 8): in c[0] and c[1] row g, columns 2t and 2t + 1; in c[2] and c[3] row g + 8.
#pragma once

#include "common/platform.h"

namespace attn::ptx {

__device__ __forceinline__ void mma_bf16(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, "
      "%3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

__device__ __forceinline__ void mma_f16(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, "
      "%3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

}  // namespace attn::ptx
