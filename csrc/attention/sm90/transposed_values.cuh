// V of an e4m3 cache as wgmma takes it: products of 8-bit elements want the k dimension, here tokens, along the rows of
// both matrices.
#pragma once

#include "attention/sm90/swizzled_tile.cuh"
#include "common/elements.cuh"
#include "common/ptx/mma.cuh"
#include "common/ptx/warp.cuh"

namespace attn::sm90 {

/// A row for each column of V. Its tokens are permuted such that a lane's probabilities are four neighboring ones: of
/// every 16, number 4t + 2h + i is token 8h + 2t + i (t below 4, h and i below 2).
template <int kTokens, int kVColumns>
using TransposedValues = SwizzledTile<Float8E4M3, kTokens, kVColumns>;

/// Transposes V tiles; holds what a lane needs to know for that. ldmatrix with .trans moves pairs of columns, which are
/// then taken apart. Each of a warpgroup's four warps takes 32 tokens, in chunks of 16 columns. Of the eight rows that
/// stmatrix writes together the last four are of the other parity than the first four, so that all fall into different
/// banks.
template <class Values, class Transposed>
struct Transposition {
  static_assert(Transposed::kHeadColumns == 128 && Values::kBlocks == 1, "a row is 128 bytes");
  uint32_t from, to;  // bytes from the beginnings of the tiles
  uint32_t parity;    // selects the bytes of the lane's first word

  /// first: the chunk that run() counts from.
  __device__ __forceinline__ explicit Transposition(int first) {
    const int lane = ptx::lane_id();
    const int warp = ptx::thread_id() / 32 % 4;
    const int matrix = lane / 8, row = lane % 8;
    const int column = 2 * row + (matrix % 2 ^ row / 4);
    from = Values::offset(warp * 32 + lane, 0) ^ first << 4;
    to = Transposed::offset(column, warp * 2 + matrix / 2) + first * 16 * Transposed::kRowBytes;
    parity = lane < 16 ? 0x6420 : 0x7531;
    ptx::keep(from);
    ptx::keep(to);
    ptx::keep(parity);
  }

  /// Transposes kChunks chunks of columns of a V tile, from `first` on, by the four warps of a warpgroup. ldmatrix
  /// takes long: all chunks are loaded before the first is stored.
  template <int kChunks>
  __device__ __forceinline__ void run(const char* values, char* transposed, int first) const {
    const uint32_t source = ptx::shared_address(values) + (from ^ first << 4);
    const uint32_t target = ptx::shared_address(transposed) + to + first * 16 * Transposed::kRowBytes;
    const uint32_t other_parity = parity ^ 0x1111;
    uint32_t pairs[kChunks][4];  // of eight tokens each
#pragma unroll
    for (int chunk = 0; chunk < kChunks; ++chunk) ptx::ldmatrix_x4_trans(pairs[chunk], source ^ chunk << 4);
#pragma unroll
    for (int chunk = 0; chunk < kChunks; ++chunk) {
      const uint32_t (&of)[4] = pairs[chunk];
      const uint32_t words[4] = {__byte_perm(of[0], of[1], parity), __byte_perm(of[0], of[1], other_parity),
                                 __byte_perm(of[2], of[3], parity), __byte_perm(of[2], of[3], other_parity)};
      ptx::stmatrix_x4(target + chunk * 16 * Transposed::kRowBytes, words);
    }
  }
};

}  // namespace attn::sm90
