// Rows of an 8-bit cache that are dequantized from one tile of shared memory to another: those that a variant
// transforms before they are multiplied.
#pragma once

#include "attention/variant/variants.h"
#include "common/elements.cuh"
#include "common/math.h"

namespace attn {

/// Dequantizes rows [row, row + kRows) of `from` to rows [to_row, to_row + kRows) of `to`; `thread` of kThreads. Rows
/// outside of `readable` become zeros: the cache may hold NaN there, which must not reach the output. Columns after the
/// head's that are multiplied are dequantized, too. Stored, Wide: the tiles.
template <class Stored, class Wide, class Element, class KvElement, int kRows, int kThreads>
__device__ __forceinline__ void dequantize_tile_rows(const char* from, int row, char* to, int to_row, int thread,
                                                     const TokenRange& readable) {
  constexpr int kChunks = ceil_div(Stored::kHeadBytes, 16);  // of 16 elements
#pragma unroll 1
  for (int i = thread; i < kRows * kChunks; i += kThreads) {
    const int row_index = i / kChunks, chunk = i % kChunks;
    uint4 bytes = *reinterpret_cast<const uint4*>(from + Stored::offset(row + row_index, chunk));
    if (row + row_index < readable.begin || row + row_index >= readable.end) bytes = make_uint4(0, 0, 0, 0);
    const uint32_t target = Wide::offset(to_row + row_index, chunk * 2);
    *reinterpret_cast<uint4*>(to + target) = dequantize_eight<Element, KvElement>(make_uint2(bytes.x, bytes.y));
    *reinterpret_cast<uint4*>(to + (target ^ 16)) = dequantize_eight<Element, KvElement>(make_uint2(bytes.z, bytes.w));
  }
}

}  // namespace attn
