// The arguments of append_qkv.
#pragma once

#include "cache/kv_scales.h"
#include "cache/kv_tensor.h"
#include "common/index_array.h"
#include "common/math.h"

namespace attn {

/// Rows of heads: element (token, head, i) is data[token * token_stride + head * head_stride + i].
struct HeadRows {
  const void* data;
  int64_t token_stride;
  int64_t head_stride;
};

/// What gives the angle of pair i at a position.
enum class RotaryTable : int32_t {
  kNone,         // no rotation
  kFrequencies,  // float32 [rotary_dim / 2]: position * table[i]
  kCosSin,       // [positions, rotary_dim] of the element type: cosines, then sines
  kCosSinFloat32
};

/// Takes what a projection made of each token: normalises the heads of Q and K (RMS), rotates them (RoPE), writes Q to
/// q_out, K and V to the slots slots[token] of the cache (divided by its scales and rounded, if it is of 8 bits); a
/// slot that is negative or beyond the cache gets neither.
struct QkvParams {
  HeadRows q, k, v;
  HeadRows q_out;    // written; may be q
  KvTensor k_cache;  // written; without slots [num_tokens, num_kv_heads, head_dim], may be k
  KvTensor v_cache;
  IndexArray slots;      // [num_tokens], or none: K of a token goes to its row of k_cache, V nowhere
  IndexArray positions;  // [num_tokens]
  const void* table;
  int64_t table_stride;  // elements between two positions
  const void* q_norm;    // [head_dim] of the element type, or nullptr
  const void* k_norm;
  RotaryTable rotary;
  int32_t is_interleaved;  // a pair is (2i, 2i + 1); else (i, i + rotary_dim / 2)
  int32_t rotary_dim;      // the elements behind are left alone
  int32_t num_positions;   // of the table; other positions take the nearest
  float norm_eps;
  float norm_offset;  // added to weights
  int32_t num_tokens;
  int32_t num_pages;
  int32_t num_qo_heads;
  int32_t num_kv_heads;
  int32_t head_dim;
  FastDivisor page_size;
  KvScales scales;  // of an 8-bit cache, none of them of requests
};

/// Where the two halves of a chunk of 2 * `size` elements of a head begin. Chunks of rotated elements come first.
struct ChunkPlace {
  int32_t low;
  int32_t high;
  bool is_rotated;
};

ATTN_HD ChunkPlace place_of_chunk(const QkvParams& p, int32_t chunk, int32_t size) {
  const int32_t first = 2 * size * chunk;
  const bool is_rotated = first < p.rotary_dim;
  if (is_rotated && p.is_interleaved == 0) return ChunkPlace{first / 2, p.rotary_dim / 2 + first / 2, true};
  return ChunkPlace{first, first + size, is_rotated};
}

/// The row of a table of cosines and sines.
ATTN_HD int64_t table_row(const QkvParams& p, int64_t position) {
  return clamp<int64_t>(position, 0, p.num_positions - 1) * p.table_stride;
}

}  // namespace attn
