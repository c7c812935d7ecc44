// V of an e4m3 cache as wgmma takes it: products of 8-bit elements want the k dimension, here tokens, along the rows of
// both matrices.
#pragma once

#include "attention/sm90/swizzled_tile.cuh"
#include "common/elements.cuh"
#include "common/ptx/ldmatrix.cuh"
#include "common/ptx/special_registers.cuh"

namespace attn::sm90 {

/// A row for each column of V. Its tokens are permuted such that a lane's probabilities are four neighbouring ones: of
/// every 16, number 4t + 2h + i is token 8h + 2t + i (t below 4, h and i below 2).
template <int kTokens, int kVColumns>
using TransposedValues = SwizzledTile<Float8E4M3, kTokens, kVColumns>;

/// Transposes a V tile, by the four warps of a warpgroup. Each takes 32 tokens, 16 columns at a time: ldmatrix with
/// .trans moves pairs of columns, which are then taken apart. Of the eight rows that stmatrix writes together the last
/// four are of the other parity than the first four, so that all fall into different banks.
template <class Values, class Transposed>
__device__ __forceinline__ void transpose_values(const char* values, char* transposed) {
  static_assert(Transposed::kHeadColumns == 128 && Values::kBlocks == 1, "a row is 128 bytes");
  const int lane = ptx::lane_id();
  const int warp = ptx::thread_id() / 32 % 4;
  const uint32_t from = ptx::shared_address(values) + Values::offset(warp * 32 + lane, 0);
  const int matrix = lane / 8, row = lane % 8;
  const int column = 2 * row + (matrix % 2 ^ row / 4);
  const uint32_t to = ptx::shared_address(transposed) + Transposed::offset(column, warp * 2 + matrix / 2);
  const uint32_t first_parity = lane < 16 ? 0x6420 : 0x7531, second_parity = first_parity ^ 0x1111;
#pragma unroll
  for (int chunk = 0; chunk < Values::kHeadChunks; ++chunk) {
    uint32_t pairs[4];  // of eight tokens each
    ptx::ldmatrix_x4_trans(pairs, from ^ chunk << 4);
    const uint32_t words[4] = {
        __byte_perm(pairs[0], pairs[1], first_parity), __byte_perm(pairs[0], pairs[1], second_parity),
        __byte_perm(pairs[2], pairs[3], first_parity), __byte_perm(pairs[2], pairs[3], second_parity)};
    ptx::stmatrix_x4(to + chunk * 16 * Transposed::kRowBytes, words);
  }
}

}  // namespace attn::sm90
