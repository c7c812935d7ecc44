// Rotated heads (common/rotation.h): rows of Q in shared memory before they are multiplied, and rows of O on their way
// out. The kernel's K and V are rotated already.
#pragma once

#include "attention/tile/warp_state.cuh"
#include "common/elements.cuh"
#include "common/math.h"
#include "common/platform.h"
#include "common/rotation.cuh"

namespace attn {

/// Rotates rows [first_row, end_row) of a tile of Q in place, divides them by b, and converts them from Other to
/// Element. `thread` of kThreads, which are whole warps. Eight columns a thread.
template <class Tile, class Element, class Other, int kColumns, int kThreads>
__device__ __forceinline__ void rotate_query_rows(char* tile, int first_row, int end_row, int thread) {
  constexpr int kBlock = rotation_block(kColumns), kChunks = kColumns / 8;
  static_assert(kBlock <= kMaxRotatedColumns && kThreads % 32 == 0, "a warp has whole blocks");
  const int count = (end_row - first_row) * kChunks;
#pragma unroll 2
  for (int begin = 0; begin < count; begin += kThreads) {
    const int i = begin + thread, chunk = i % kChunks;
    const bool exists = i < count;
    char* const place = tile + Tile::offset(first_row + (exists ? i / kChunks : 0), chunk);
    const uint4 pairs = *reinterpret_cast<const uint4*>(place);
    const uint32_t words[4] = {pairs.x, pairs.y, pairs.z, pairs.w};
    const int column = chunk * 8 % kBlock;  // of the block
    const uint32_t signs = rotation_signs(column / 32) >> column % 32;
    float x[8];
#pragma unroll
    for (int j = 0; j < 8; ++j) x[j] = with_sign(Other::unpack(words[j / 2] >> j % 2 * 16), signs, j);
    hadamard_of_registers<1>(x);
    hadamard_of_registers<2>(x);
    hadamard_of_registers<4>(x);
#pragma unroll
    for (int lanes = 1; lanes < kBlock / 8; lanes *= 2) hadamard_of_lanes(x, lanes);
    uint32_t rotated[4];
#pragma unroll
    for (int j = 0; j < 4; ++j)
      rotated[j] = pack_finite<Element>(x[2 * j] * (1.0f / kBlock), x[2 * j + 1] * (1.0f / kBlock));
    if (exists) *reinterpret_cast<uint4*>(place) = make_uint4(rotated[0], rotated[1], rotated[2], rotated[3]);
  }
}

/// Rotates a warp's outputs back. kFourColumns: they are outputs of dequantized_accumulate().
template <int kHeadColumns, bool kFourColumns, class Element, int kColumns, int kRowBlocks>
__device__ __forceinline__ void rotate_back(WarpState<Element, kColumns, kRowBlocks>& state) {
  constexpr int kBlock = rotation_block(kHeadColumns);
  // A column's bits come from n, the lane and j. With four columns, a lane has another bit than the lowest of n.
  constexpr bool kHasSixteen = kBlock >= 16;
  constexpr int kGroup = kFourColumns ? 2 : 1;  // of fragments, whose columns lie together
  constexpr int kFragments = round_up(kHeadColumns / 8, kGroup);
  static_assert(kColumns >= kFragments * 8);
  const int lane = ptx::lane_id() % 4 * (kFourColumns ? 4 : 2) % kBlock;  // its first column
  const uint32_t lane_bit = 1u << (31 - lane);
#pragma unroll
  for (int b = 0; b < kRowBlocks; ++b) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float x[kFragments * 2];
#pragma unroll
      for (int n = 0; n < kFragments; ++n) {
        x[2 * n] = state.o[b][n][2 * half];
        x[2 * n + 1] = state.o[b][n][2 * half + 1];
      }
      hadamard_of_registers<1>(x);
      hadamard_of_lanes(x, 1);
      if constexpr (kHasSixteen || !kFourColumns) hadamard_of_lanes(x, 2);
      if constexpr (kHasSixteen || kFourColumns) hadamard_of_registers<2>(x);
      if constexpr (kBlock >= 32) hadamard_of_registers<4>(x);
      if constexpr (kBlock >= 64) hadamard_of_registers<8>(x);
      if constexpr (kBlock >= 128) hadamard_of_registers<16>(x);
      if constexpr (kBlock >= 256) hadamard_of_registers<32>(x);
#pragma unroll
      for (int n = 0; n < kFragments; ++n) {
        const int first = n / kGroup * kGroup * 8 % kBlock;  // column of the block, if this were lane 0
#pragma unroll
        for (int j = 0; j < 2; ++j) {
          const uint32_t signs = rotation_signs(first / 32) >> (first % 32 + (kFourColumns ? 2 * j + n % 2 : j));
          // A constant times a power of 2: words that all lanes shift would take more registers.
          state.o[b][n][2 * half + j] = with_sign(x[2 * n + j], signs * lane_bit, 31) * (1.0f / kBlock);
        }
      }
    }
  }
}

/// The level of rotate_back() that joins the halves of blocks of 256 columns. Blocks of 128 are left. Others stay as
/// they are.
template <int kHeadColumns, class Element, int kColumns>
__device__ __forceinline__ void join_halves(WarpState<Element, kColumns, 1>& state) {
  if constexpr (rotation_block(kHeadColumns) == 256) {
#pragma unroll
    for (int n = 0; n < 16; ++n) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float a = state.o[0][n][i], b = state.o[0][n + 16][i];
        state.o[0][n][i] = a + b;
        state.o[0][n + 16][i] = a - b;
      }
    }
  }
}

/// Rotates a row of outputs back after join_halves(). Each lane has its columns [column, column + 4), its neighbors the
/// next ones.
template <int kHeadColumns>
__device__ __forceinline__ float4 rotate_four_back(const float4& columns, int column) {
  constexpr int kBlock = rotation_block(kHeadColumns);
  float x[4] = {columns.x, columns.y, columns.z, columns.w};
  hadamard_of_registers<1>(x);
  hadamard_of_registers<2>(x);
#pragma unroll
  for (int lanes = 1; lanes < min_of(kBlock / 4, 32); lanes *= 2) hadamard_of_lanes(x, lanes);
  const int of_block = column % kBlock;
  const uint32_t signs = rotation_signs(of_block / 32) >> of_block % 32;
#pragma unroll
  for (int j = 0; j < 4; ++j) x[j] = with_sign(x[j], signs, j) * (1.0f / kBlock);
  return make_float4(x[0], x[1], x[2], x[3]);
}

}  // namespace attn
