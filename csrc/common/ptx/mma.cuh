// mma.sync, and the moves between shared memory and its fragments.
#pragma once

#include "common/platform.h"

namespace attn::ptx {

/// c += a b.
#define ATTN_MMA(name, Sum, sum, instruction)                                                                       \
  __device__ __forceinline__ void name(Sum(&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {              \
    asm volatile("mma.sync.aligned." instruction " {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};" \
                 : sum(c[0]), sum(c[1]), sum(c[2]), sum(c[3])                                                       \
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));                                   \
  }

// --- mma.sync m16n8k16, float32 accumulators
//
// Lane (g, t) = (lane / 4, lane % 4) holds
// - of A (16 x 16): in a[0] row g, columns 2t and 2t + 1; in a[1] row g + 8; in a[2] row g, columns 2t + 8 and 2t + 9;
//   in a[3] row g + 8, the same columns;
// - of B (16 x 8): in b0 rows 2t and 2t + 1 of column g; in b1 rows 2t + 8 and 2t + 9 of column g;
// - of C (16 x 8): in c[0] and c[1] row g, columns 2t and 2t + 1; in c[2] and c[3] row g + 8.

ATTN_MMA(mma_bf16, float, "+f", "m16n8k16.row.col.f32.bf16.bf16.f32")
ATTN_MMA(mma_f16, float, "+f", "m16n8k16.row.col.f32.f16.f16.f32")

// --- mma.sync m16n8k32, int32 accumulators. Each word has four neighboring elements of 8 bits.
//
// Lane (g, t) holds
// - of A (16 x 32): in a[0] row g, columns 4t to 4t + 3; in a[1] row g + 8; in a[2] row g, columns from 4t + 16 on; in
//   a[3] row g + 8, the same columns;
// - of B (32 x 8): in b0 rows 4t to 4t + 3 of column g; in b1 rows from 4t + 16 on of column g;
// - of C: as above.

ATTN_MMA(mma_s8_s8, int32_t, "+r", "m16n8k32.row.col.s32.s8.s8.s32")
ATTN_MMA(mma_u8_s8, int32_t, "+r", "m16n8k32.row.col.s32.u8.s8.s32")
#undef ATTN_MMA

// --- ldmatrix, stmatrix: four 8x8 matrices of 16-bit elements from shared memory into the fragments of a warp, and
// back.
//
// Lane i gives the address of row i % 8 of matrix i / 8. Lane (g, t) = (i / 4, i % 4) receives elements 2t and 2t+1 of
// row g of each matrix; of column g if transposed.

__device__ __forceinline__ void ldmatrix_x4(uint32_t (&d)[4], uint32_t shared) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(d[0]), "=r"(d[1]), "=r"(d[2]), "=r"(d[3])
               : "r"(shared));
}

__device__ __forceinline__ void ldmatrix_x4_trans(uint32_t (&d)[4], uint32_t shared) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(d[0]), "=r"(d[1]), "=r"(d[2]), "=r"(d[3])
               : "r"(shared));
}

__device__ __forceinline__ uint32_t load_word(uint32_t shared) {
  uint32_t d;
  asm volatile("ld.shared.b32 %0, [%1];" : "=r"(d) : "r"(shared));
  return d;
}

/// Transposes a matrix of 8 x 8 elements of 16 bits. Lane (g, t) has elements 2t and 2t + 1 of row g.
__device__ __forceinline__ uint32_t transposed(uint32_t pair) {
  uint32_t d;
  asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(d) : "r"(pair));
  return d;
}

/// Two neighboring words, by each lane for itself.
__device__ __forceinline__ void load_words(uint32_t (&d)[2], uint32_t shared) {
  asm volatile("ld.shared.v2.b32 {%0, %1}, [%2];" : "=r"(d[0]), "=r"(d[1]) : "r"(shared));
}

/// Four neighboring words, by each lane for itself.
__device__ __forceinline__ void load_words(uint32_t (&d)[4], uint32_t shared) {
  asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];"
               : "=r"(d[0]), "=r"(d[1]), "=r"(d[2]), "=r"(d[3])
               : "r"(shared));
}

__device__ __forceinline__ void stmatrix_x4(uint32_t shared, const uint32_t (&d)[4]) {
#if __CUDA_ARCH__ >= 900
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(shared), "r"(d[0]), "r"(d[1]),
               "r"(d[2]), "r"(d[3])
               : "memory");
#else
  const int lane = static_cast<int>(threadIdx.x) % 32;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const uint32_t row = __shfl_sync(0xffffffffu, shared, i * 8 + lane / 4);
    asm volatile("st.shared.b32 [%0], %1;" ::"r"(row + lane % 4 * 4), "r"(d[i]) : "memory");
  }
#endif
}

}  // namespace attn::ptx
