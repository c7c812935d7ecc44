// The arguments of append, append_latent and append_qkv.
#pragma once

#include "cache/kv_cache.h"
#include "common/index_array.h"
#include "common/math.h"

namespace attn {

/// Threads of a block of the append kernel.
constexpr int32_t kAppendThreads = 128;

/// Copies new tokens into the paged cache: token i goes to slot slots[i]; see CachePages.
struct AppendParams {
  HeadRows k;  // [num_tokens, num_kv_heads, columns of K]; V's may be others
  HeadRows v;
  KvTensor k_cache;  // written
  KvTensor v_cache;
  IndexArray slots;  // [num_tokens]
  int32_t num_tokens;
  CachePages pages;
  int32_t num_kv_heads;
  int32_t k_head_bytes;  // columns * sizeof(element)
  int32_t v_head_bytes;
  int32_t element_bytes;
};

/// Threads of a block of the kernel, which takes one token at a time: a warp for each scale.
constexpr int32_t kAppendLatentThreads = ScaledLatentRow::kScales * 32;

/// Writes bf16 latents and rotated parts to rows that carry their scales. A slot that is negative or beyond the cache
/// gets nothing.
struct LatentParams {
  const void* latent;  // [num_tokens, 512]
  const void* rope;    // [num_tokens, 64]
  int64_t latent_stride, rope_stride;
  KvTensor cache;  // written
  IndexArray slots;
  int32_t num_tokens;
  CachePages pages;

  /// Where the row of a token begins; nullptr: nowhere.
  ATTN_HD char* row(int32_t token) const {
    const int64_t slot = slots[token];
    if (!pages.has(slot)) return nullptr;
    return static_cast<char*>(const_cast<void*>(cache.data)) + cache.element(pages.place(static_cast<int32_t>(slot)));
  }
};

/// What numbers of this magnitude are divided by: the largest becomes the largest that e4m3 holds.
ATTN_HD float latent_scale(float largest) {
  constexpr float kLeast = 1.17549435e-38f;  // so that zeros are not divided by 0
  return max_of(largest / 448.0f, kLeast);
}

/// What gives the angle of pair i at a position.
enum class RotaryTable : int32_t {
  kNone,         // no rotation
  kFrequencies,  // float32 [rotary_dim / 2]: position * table[i]
  kCosSin,       // [positions, rotary_dim] of the element type: cosines, then sines
  kCosSinFloat32
};

/// Appends a projection's Q, K and V. Normalizes the heads of Q and K (RMS) and rotates them (RoPE). Writes Q to q_out,
/// and K and V to slot slots[token] of the cache, in the cache's type. Values for an 8-bit cache are divided by its
/// scales first. For a cache with TokenScales, a quantizer makes numbers and scales (quantizers.h). Negative slots and
/// slots beyond the cache are skipped.
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
  int32_t rotary_dim;      // the elements after them are left alone
  int32_t num_positions;   // of the table; other positions take the nearest
  float norm_eps;
  float norm_offset;  // added to weights
  int32_t num_tokens;
  int32_t num_qo_heads;
  int32_t num_kv_heads;
  int32_t head_dim;
  CachePages pages;
  KvScales scales;              // of an 8-bit cache, none of them of requests; its type, of any
  FastDivisor groups_of_token;  // set by divide_work(), for the kernels
  int32_t lane_bits;            // log2 of the lanes that have a head
  TokenScales k_token_scales;   // written; without data, for other caches
  TokenScales v_token_scales;
  float k_factor;  // of all scales of blocks
  float v_factor;
  int32_t rotates_rows;  // K and V, after RoPE (common/rotation.h), in kernels that are compiled for it
};

/// The kernels. kGeneral takes everything, a few bytes at a time. The others need aligned tensors, and angles from a
/// table. kRounded is for 8-bit caches without TokenScales, rotated rows, Q and angles.
enum class QkvKernel : int32_t { kPlain, kNormed, kGeneral, kRounded };

ATTN_HD QkvKernel kernel_for(const QkvParams& p) {
  const auto address = [](const void* pointer) { return reinterpret_cast<uint64_t>(pointer); };
  const auto row_bits = [&](const HeadRows& rows) {
    return address(rows.data) | static_cast<uint64_t>((rows.token_stride | rows.head_stride) * 2);
  };
  // Rows of an 8-bit cache are moved 8 bytes at a time, all others 16.
  const uint64_t cache_address_scale = is_in_bytes(p.scales.element) ? 2 : 1;
  const auto cache_bits = [&](const KvTensor& cache) {
    return address(cache.data) * cache_address_scale |
           static_cast<uint64_t>((cache.page_stride | cache.token_stride | cache.head_stride) * 2);
  };
  const int64_t table_bytes = p.table_stride * (p.rotary == RotaryTable::kCosSinFloat32 ? 4 : 2);
  // A power of two divides all of them if it is at or below the lowest bit that is set.
  const uint64_t bits = row_bits(p.q) | row_bits(p.k) | row_bits(p.v) | row_bits(p.q_out) | cache_bits(p.k_cache) |
                        cache_bits(p.v_cache) | address(p.table) | static_cast<uint64_t>(table_bytes) |
                        address(p.q_norm) | address(p.k_norm);
  const bool is_aligned = bits % 16 == 0 && p.head_dim % 16 == 0 && p.rotary_dim % 16 == 0;
  if (!is_aligned || p.rotary == RotaryTable::kFrequencies) return QkvKernel::kGeneral;
  if (p.q_norm != nullptr || p.k_norm != nullptr) return QkvKernel::kNormed;
  const bool is_only_rounded = p.num_qo_heads == 0 && p.rotary == RotaryTable::kNone && is_in_bytes(p.scales.element) &&
                               !p.k_token_scales.exist() && p.rotates_rows == 0;
  return is_only_rounded ? QkvKernel::kRounded : QkvKernel::kPlain;
}

// A kernel divides its work into groups of heads: all heads of Q, of K or of V of one token. As many lanes as a head
// has chunks, rounded up to a power of two, take a group.

constexpr int32_t kAppendQkvThreads = 128;

/// Most heads of a group. With two, some 60 KB are in flight on a multiprocessor, more than the memory's latency needs,
/// and a decode of one token waits for few instructions.
constexpr int32_t kGroupHeads = 2;

enum class HeadKind : int32_t { kQ, kK, kV };

struct HeadGroup {
  int32_t token;
  HeadKind kind;
  int32_t first_head;
  int32_t heads;  // 0: there is no such group
};

ATTN_HD HeadGroup head_group(const QkvParams& p, int32_t group) {
  const int32_t token = p.groups_of_token.divide(group);
  if (token >= p.num_tokens) return HeadGroup{};
  const int32_t q_groups = ceil_div(p.num_qo_heads, kGroupHeads), k_groups = ceil_div(p.num_kv_heads, kGroupHeads);
  const int32_t token_group = group - token * p.groups_of_token.divisor;
  const HeadKind kind = token_group < q_groups              ? HeadKind::kQ
                        : token_group < q_groups + k_groups ? HeadKind::kK
                                                            : HeadKind::kV;
  const int32_t before = kind == HeadKind::kQ ? 0 : kind == HeadKind::kK ? q_groups : q_groups + k_groups;
  const int32_t first_head = (token_group - before) * kGroupHeads;
  const int32_t num_heads = kind == HeadKind::kQ ? p.num_qo_heads : p.num_kv_heads;
  return HeadGroup{token, kind, first_head, min_of(num_heads - first_head, kGroupHeads)};
}

/// Elements of half a chunk.
ATTN_HD constexpr int32_t half_chunk(QkvKernel kernel) { return kernel == QkvKernel::kGeneral ? 4 : 8; }

/// Sets groups_of_token and lane_bits.
ATTN_HD void divide_work(QkvParams& p, QkvKernel kernel) {
  const int32_t kinds_of_kv = p.v.data != nullptr ? 2 : 1;
  p.groups_of_token =
      FastDivisor(ceil_div(p.num_qo_heads, kGroupHeads) + kinds_of_kv * ceil_div(p.num_kv_heads, kGroupHeads));
  p.lane_bits = 0;
  while (2 * half_chunk(kernel) << p.lane_bits < p.head_dim) ++p.lane_bits;
}

/// CTAs, of kAppendQkvThreads threads each, once the work is divided.
ATTN_HD int64_t append_qkv_ctas(const QkvParams& p, QkvKernel kernel) {
  if (kernel == QkvKernel::kRounded) return p.num_tokens;
  return ceil_div<int64_t>(int64_t{p.num_tokens} * p.groups_of_token.divisor, kAppendQkvThreads >> p.lane_bits);
}

/// Of a cache whose K and V have different types: one launch, whose first CTAs take Q and K.
struct QkvPairParams {
  QkvParams k;  // without V
  QkvParams v;  // V as K, without Q
  int32_t v_first_cta;
};

/// V's part of `params`, as rows of K, without Q, norms and angles. Removes it from `params`.
inline QkvParams split_v(QkvParams& params, DataType v_dtype, int32_t v_columns) {
  QkvParams values = params;
  values.k = params.v;
  values.k_cache = params.v_cache;
  values.scales.element = v_dtype;
  values.scales.k = params.scales.v;
  values.k_token_scales = params.v_token_scales;
  values.k_factor = params.v_factor;
  values.head_dim = v_columns;
  values.q = values.q_out = HeadRows{};
  values.num_qo_heads = 0;
  values.positions = IndexArray{};
  values.table = values.q_norm = values.k_norm = nullptr;
  values.rotary = RotaryTable::kNone;
  values.rotary_dim = 0;
  params.v = values.v = HeadRows{};
  return values;
}

/// The kernel for V of a pair, next to the kernel for Q and K.
ATTN_HD constexpr QkvKernel kernel_of_v(QkvKernel kernel) {
  return kernel == QkvKernel::kGeneral ? kernel : QkvKernel::kPlain;
}

/// Divides the work of both. Returns the kernel.
ATTN_HD QkvKernel divide_pair(QkvPairParams& p) {
  const QkvKernel of_k = kernel_for(p.k);
  const QkvKernel kernel = kernel_for(p.v) == QkvKernel::kGeneral ? QkvKernel::kGeneral : of_k;
  divide_work(p.k, kernel);
  divide_work(p.v, kernel_of_v(kernel));
  p.v_first_cta = static_cast<int32_t>(append_qkv_ctas(p.k, kernel));
  return kernel;
}

ATTN_HD int64_t append_pair_ctas(const QkvPairParams& p, QkvKernel kernel) {
  return p.v_first_cta + append_qkv_ctas(p.v, kernel_of_v(kernel));
}

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
ATTN_HD int64_t table_row(const QkvParams& p, int32_t position) {
  return clamp(position, 0, p.num_positions - 1) * p.table_stride;
}

/// position * frequency, less whole turns: in [-pi, pi] except for rounding. The error is below 5e-7 for positions up
/// to 2^24; of a product that is rounded to a float32 it is 0.03 at position 10^6.
ATTN_HD float reduced_angle(int32_t position, float frequency) {
  constexpr float kTurn = 6.28318548f, kRest = -1.74845553e-7f;                   // 2 pi is their sum
  constexpr float kTurnsOfRadian = 0.159154943f, kRoundsToInteger = 12582912.0f;  // 1.5 * 2^23
  const float at = static_cast<float>(position);
  const float angle = at * frequency;
  const float rounding = fused_multiply_add(at, frequency, -angle);
  const float turns = fused_multiply_add(angle, kTurnsOfRadian, kRoundsToInteger) - kRoundsToInteger;
  return fused_multiply_add(-turns, kTurn, angle) + fused_multiply_add(-turns, kRest, rounding);
}

}  // namespace attn
