// Types that instructions take.
#pragma once

#include "common/platform.h"

namespace attn::ptx {

/// The types that tensor cores multiply.
enum class MmaType { kFloat16, kBFloat16, kFloat8E4M3 };

/// How long the L2 cache keeps what a copy reads: the values that createpolicy makes, for all lines of a copy.
enum CachePolicy : uint64_t {
  kKeepNormally = 0x1000000000000000,  // evict_normal
  kEvictFirst = 0x12f0000000000000,
};

/// A matrix in shared memory, as wgmma finds it: rows of 128 bytes, whose chunks are permuted in groups of 8 rows that
/// follow one another. Only the lower half of its descriptor varies.
struct MatrixDescriptor {
  uint32_t low;

  MatrixDescriptor() = default;

  /// `block_stride`: bytes from 64 columns to the next 64, of a matrix whose rows are the k dimension. The same for all
  /// threads of a warp: through the shuffle the compiler knows it, and keeps it in a uniform register.
  __device__ __forceinline__ MatrixDescriptor(uint32_t shared, uint32_t block_stride)
      : low(__shfl_sync(0xffffffffu, (block_stride >> 4) << 16 | (shared & 0x3ffff) >> 4, 0)) {}

  /// The same matrix `bytes` further on.
  __device__ __forceinline__ MatrixDescriptor advanced(uint32_t bytes) const {
    MatrixDescriptor next;
    next.low = low + (bytes >> 4);
    return next;
  }

  __device__ __forceinline__ uint64_t value() const {
    constexpr uint32_t kGroupBytes = 1024, kSwizzle128 = 1u << 30;
    return static_cast<uint64_t>(kSwizzle128 | kGroupBytes >> 4) << 32 | low;
  }
};

}  // namespace attn::ptx
