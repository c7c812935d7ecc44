// The rotation of heads that spreads large columns over a row before it is rounded, as vLLM's int4_per_token_head has
// it. Signs, then Sylvester's Hadamard matrix H without a factor, on each block of b columns. b is the largest power of
// 2 that divides a head's columns; all blocks have the same signs:
//
//     rotated(x) = H (signs * x)         K and V in the cache
//     x = signs * H rotated(x) / b       O, which is a sum of rows of V
//
// H is symmetric, and H H = b, so rotated(q) . rotated(k) = b (q . k): rows of Q are divided by b.
#pragma once

#include "common/math.h"
#include "common/platform.h"

namespace attn {

constexpr int32_t kMaxRotatedColumns = 256;  // of a head: the signs of a block

ATTN_HD constexpr int32_t rotation_block(int32_t columns) { return columns & -columns; }

/// Of columns 32 * word and more of a block; a bit is 1 where the sign is minus. torch.bernoulli with the seed
/// 0x9E3779B9 drew them. (Not an array: device code could not index an array of the host.)
ATTN_HD constexpr uint32_t rotation_signs(int32_t word) {
  return word == 0   ? 0x9a8ca6f2u
         : word == 1 ? 0x7f7fca4eu
         : word == 2 ? 0x59bbc293u
         : word == 3 ? 0x9480abc7u
         : word == 4 ? 0xb55b747eu
         : word == 5 ? 0x54503bbeu
         : word == 6 ? 0xcdf467b7u
                     : 0x05dfbc5fu;
}

/// x, with the sign changed if bit number `bit` of `signs` is 1.
ATTN_HD float with_sign(float x, uint32_t signs, int32_t bit) {
  return bits_float(float_bits(x) ^ (signs << (31 - bit) & 0x80000000u));
}

/// Signs * x, on a CPU. `columns`: a multiple of 8. `factor`: multiplies, too.
ATTN_HD void change_signs(float* x, int32_t columns, float factor) {
  const int32_t mask = rotation_block(columns) - 1;
  for (int32_t first = 0; first < columns; first += 8) {
    const int32_t column = first & mask;
    const uint32_t signs = rotation_signs(column / 32) >> column % 32;
    for (int32_t i = 0; i < 8; ++i) x[first + i] = with_sign(x[first + i] * factor, signs, i);
  }
}

/// H x, on a CPU.
ATTN_HD void multiply_by_hadamard(float* x, int32_t columns) {
  const int32_t block = rotation_block(columns);
  for (int32_t step = 1; step < block; step *= 2) {
    for (int32_t first = 0; first < columns; first += 2 * step) {
      for (int32_t i = first; i < first + step; ++i) {
        const float a = x[i], b = x[i + step];
        x[i] = a + b;
        x[i + step] = a - b;
      }
    }
  }
}

/// rotated(x) * factor, on a CPU.
ATTN_HD void rotate_row(float* x, int32_t columns, float factor = 1.0f) {
  change_signs(x, columns, factor);
  multiply_by_hadamard(x, columns);
}

/// The row that rotate_row() made x of, on a CPU.
ATTN_HD void rotate_row_back(float* x, int32_t columns) {
  multiply_by_hadamard(x, columns);
  change_signs(x, columns, 1.0f / static_cast<float>(rotation_block(columns)));
}

}  // namespace attn
