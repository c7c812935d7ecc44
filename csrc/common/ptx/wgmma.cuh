// wgmma: the four warps of a warpgroup multiply tiles together, asynchronously; float32 accumulators.
//
// A product of 64 rows x kColumns columns x 16 (of 8-bit elements: 32): warp w of the warpgroup holds rows [16w, 16w +
// 16) of A (when it lies in registers) and of the accumulators, each 8 columns of them like C of mma.cuh. Matrices in
// shared memory are given by descriptors; their rows of 128 bytes are swizzled as TMA does it.
//
// 8-bit elements: the columns of both matrices are the k dimension. A in registers: lane (g, t) = (lane / 4, lane % 4)
// has four bytes in each word, columns 4t to 4t + 3 of rows g and g + 8, then columns 16 + 4t to 16 + 4t + 3 of these
// rows. The accumulators hold float32, but tensor cores add with fewer bits (about 14 on Hopper): add long sums in
// other registers now and then.
#pragma once

#include "common/platform.h"
#include "common/ptx/types.cuh"

namespace attn::ptx {

/// Orders registers and shared memory before the wgmma that follow.
__device__ __forceinline__ void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }

__device__ __forceinline__ void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }

/// Waits until at most kPending committed groups are under way.
template <int kPending>
__device__ __forceinline__ void wgmma_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kPending) : "memory");
}

/// Keeps the compiler from moving computations with these values across this point. Used around waits for products.
template <int kBlocks>
__device__ __forceinline__ void wgmma_fence_operand(float (&c)[kBlocks][4]) {
#pragma unroll
  for (int n = 0; n < kBlocks; ++n)
    asm volatile("" : "+f"(c[n][0]), "+f"(c[n][1]), "+f"(c[n][2]), "+f"(c[n][3])::"memory");
}

// clang-format off

// Accumulators by columns of the product: their names in PTX, and the C++ values.

#define ATTN_WGMMA_REGISTERS_64 \
  "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15" \
  ", %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"

#define ATTN_WGMMA_REGISTERS_96 ATTN_WGMMA_REGISTERS_64 \
  ", %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47"

#define ATTN_WGMMA_REGISTERS_128 ATTN_WGMMA_REGISTERS_96 \
  ", %48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"

#define ATTN_WGMMA_REGISTERS_192 ATTN_WGMMA_REGISTERS_128 \
  ", %64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79" \
  ", %80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95"

#define ATTN_WGMMA_REGISTERS_256 ATTN_WGMMA_REGISTERS_192 \
  ", %96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, %111" \
  ", %112, %113, %114, %115, %116, %117, %118, %119, %120, %121, %122, %123, %124, %125, %126, %127"

#define ATTN_WGMMA_8_COLUMNS(n) "+f"(c[n][0]), "+f"(c[n][1]), "+f"(c[n][2]), "+f"(c[n][3])
#define ATTN_WGMMA_32_COLUMNS(n) \
  ATTN_WGMMA_8_COLUMNS(n), ATTN_WGMMA_8_COLUMNS(n + 1), ATTN_WGMMA_8_COLUMNS(n + 2), ATTN_WGMMA_8_COLUMNS(n + 3)
#define ATTN_WGMMA_VALUES_64 ATTN_WGMMA_32_COLUMNS(0), ATTN_WGMMA_32_COLUMNS(4)
#define ATTN_WGMMA_VALUES_96 ATTN_WGMMA_VALUES_64, ATTN_WGMMA_32_COLUMNS(8)
#define ATTN_WGMMA_VALUES_128 ATTN_WGMMA_VALUES_96, ATTN_WGMMA_32_COLUMNS(12)
#define ATTN_WGMMA_VALUES_192 ATTN_WGMMA_VALUES_128, ATTN_WGMMA_32_COLUMNS(16), ATTN_WGMMA_32_COLUMNS(20)
#define ATTN_WGMMA_VALUES_256 ATTN_WGMMA_VALUES_192, ATTN_WGMMA_32_COLUMNS(24), ATTN_WGMMA_32_COLUMNS(28)

// The instruction. `form`: the columns, registers and values, and the numbers of the operands after these. Transposes:
// 16-bit elements of a matrix whose rows are the k dimension.
#define ATTN_WGMMA_64(form, type, transposes) \
  form("64", ATTN_WGMMA_REGISTERS_64, (ATTN_WGMMA_VALUES_64), type, transposes, "%32", "%33", "%34", "%35", "%36", "%37")
#define ATTN_WGMMA_96(form, type, transposes) \
  form("96", ATTN_WGMMA_REGISTERS_96, (ATTN_WGMMA_VALUES_96), type, transposes, "%48", "%49", "%50", "%51", "%52", "%53")
#define ATTN_WGMMA_128(form, type, transposes) \
  form("128", ATTN_WGMMA_REGISTERS_128, (ATTN_WGMMA_VALUES_128), type, transposes, "%64", "%65", "%66", "%67", "%68", "%69")
#define ATTN_WGMMA_192(form, type, transposes) \
  form("192", ATTN_WGMMA_REGISTERS_192, (ATTN_WGMMA_VALUES_192), type, transposes, "%96", "%97", "%98", "%99", "%100", "%101")
#define ATTN_WGMMA_256(form, type, transposes) \
  form("256", ATTN_WGMMA_REGISTERS_256, (ATTN_WGMMA_VALUES_256), type, transposes, "%128", "%129", "%130", "%131", "%132", "%133")
#define ATTN_WGMMA_LIST(...) __VA_ARGS__
#define ATTN_WGMMA_SHARED(columns, registers, values, type, transposes, n0, n1, n2, n3, n4, n5) \
  asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, " n2 ", 0;\n" \
               "wgmma.mma_async.sync.aligned.m64n" columns type " {" registers "}, " n0 ", " n1 ", p, 1, 1" transposes ";\n}" \
               : ATTN_WGMMA_LIST values \
               : "l"(a.value()), "l"(b.value()), "r"(accumulates))
#define ATTN_WGMMA_A_IN_REGISTERS(columns, registers, values, type, transposes, n0, n1, n2, n3, n4, n5) \
  asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, " n5 ", 0;\n" \
               "wgmma.mma_async.sync.aligned.m64n" columns type " {" registers "}, {" n0 ", " n1 ", " n2 ", " n3 "}, " n4 \
               ", p, 1, 1" transposes ";\n}" \
               : ATTN_WGMMA_LIST values \
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b.value()), "r"(accumulates))

// For a number of columns, by type. The next line continues after `else`.
#define ATTN_WGMMA(columns, form, transposes) \
  if constexpr (kBlocks * 8 == columns && kType == MmaType::kBFloat16) { \
    ATTN_WGMMA_##columns(form, "k16.f32.bf16.bf16", transposes); \
  } else if constexpr (kBlocks * 8 == columns && kType == MmaType::kFloat16) { \
    ATTN_WGMMA_##columns(form, "k16.f32.f16.f16", transposes); \
  } else
#define ATTN_WGMMA_FLOAT8(columns, form) \
  if constexpr (kBlocks * 8 == columns && kType == MmaType::kFloat8E4M3) { \
    ATTN_WGMMA_##columns(form, "k32.f32.e4m3.e4m3", ""); \
  } else
#define ATTN_WGMMA_NO_OTHERS { static_assert(kBlocks == 0, "add the product to this list"); }

/// c = a * b^T (+ c if `accumulates`): the columns of both are the k dimension.
template <MmaType kType, int kBlocks>
__device__ __forceinline__ void wgmma_shared(float (&c)[kBlocks][4], MatrixDescriptor a, MatrixDescriptor b,
                                             int32_t accumulates) {
  ATTN_WGMMA(64, ATTN_WGMMA_SHARED, ", 0, 0")
  ATTN_WGMMA(128, ATTN_WGMMA_SHARED, ", 0, 0")
  ATTN_WGMMA_FLOAT8(128, ATTN_WGMMA_SHARED)
  ATTN_WGMMA_NO_OTHERS
}

/// c = a * b (+ c if `accumulates`): a's columns and b's rows are the k dimension.
template <MmaType kType, int kBlocks>
__device__ __forceinline__ void wgmma_shared_rows(float (&c)[kBlocks][4], MatrixDescriptor a, MatrixDescriptor b,
                                                  int32_t accumulates) {
  ATTN_WGMMA(128, ATTN_WGMMA_SHARED, ", 0, 1")
  ATTN_WGMMA_NO_OTHERS
}

/// c = a * b (+ c if `accumulates`): a in registers, b's rows are the k dimension. 8-bit elements: c = a * b^T.
template <MmaType kType, int kBlocks>
__device__ __forceinline__ void wgmma_registers(float (&c)[kBlocks][4], const uint32_t (&a)[4], MatrixDescriptor b,
                                                int32_t accumulates) {
  ATTN_WGMMA(64, ATTN_WGMMA_A_IN_REGISTERS, ", 1")
  ATTN_WGMMA(96, ATTN_WGMMA_A_IN_REGISTERS, ", 1")
  ATTN_WGMMA(128, ATTN_WGMMA_A_IN_REGISTERS, ", 1")
  ATTN_WGMMA(192, ATTN_WGMMA_A_IN_REGISTERS, ", 1")
  ATTN_WGMMA(256, ATTN_WGMMA_A_IN_REGISTERS, ", 1")
  ATTN_WGMMA_FLOAT8(64, ATTN_WGMMA_A_IN_REGISTERS)
  ATTN_WGMMA_FLOAT8(128, ATTN_WGMMA_A_IN_REGISTERS)
  ATTN_WGMMA_NO_OTHERS
}

// clang-format on

}  // namespace attn::ptx
