// Host code that fills in TmaParams: whether TMA can load and store the tensors of a launch, and their maps.
#pragma once

#include <cstddef>
#include <cstdint>

#include "attention/feed/dequantized_kv.h"
#include "attention/feed/params.h"
#include "attention/feed/tuning.h"
#include "attention/kernel_design.h"
#include "common/math.h"
#include "common/tensor_map.h"

namespace attn::feed {

static_assert(offsetof(TmaParams, attention) + offsetof(AttentionParams, q) <= 192,
              "what a CTA reads first: the arguments begin 192 bytes before the end of a line");
static_assert(offsetof(TmaParams, v_packed) == offsetof(TmaParams, k) + 3 * sizeof(TensorMap), "cache_map()");

/// Largest power of two, up to 2^12, that divides the strides between rows of K and V; kRowsTooFarApart if a row lies
/// 2^32 of these units or more from the first.
inline int32_t unit_shift(const AttentionParams& params) {
  constexpr int32_t kMaxShift = 12;
  const int64_t strides = params.k.page_stride | params.k.token_stride | params.v.page_stride | params.v.token_stride;
  int32_t shift = 0;
  while (shift < kMaxShift && (strides >> shift & 1) == 0) ++shift;
  const int64_t extent = max_of(params.k.page_stride, params.v.page_stride) * params.num_pages;
  return extent >> shift >= int64_t{0xffffffff} ? kRowsTooFarApart : shift;
}

/// Encodes a map of Q or O, of type `dtype`, whose boxes are `packed_rows` rows of a row tile. Returns whether TMA can
/// load and store them.
inline bool encode_rows(const AttentionParams& params, const LaunchContext& context, const void* data, DataType dtype,
                        int32_t columns, int64_t row_stride, int64_t head_stride, int32_t packed_rows, TensorMap& map) {
  const int32_t group_size = params.group_size.divisor;
  // With wide heads a row tile may have only some heads of a row.
  const bool has_part_of_group = is_wide(context.dims) && group_size % packed_rows == 0;
  const int32_t box_heads = has_part_of_group ? packed_rows : group_size;
  if (packed_rows % box_heads != 0 || params.num_rows == 0) return false;
  const Tensor4d tensor{.data = data,
                        .dtype = dtype,
                        .sizes = {columns, int64_t{params.num_kv_heads} * group_size, params.num_rows, 1},
                        .strides = {head_stride, row_stride, row_stride * params.num_rows},
                        .box = {kBlockRowBytes / bytes_of(dtype), box_heads, packed_rows / box_heads, 1}};
  return context.encode(tensor, map);
}

/// Tokens of the boxes of K and V; 0: TMA cannot load them. A warp loads half a KV tile, which then consists of whole
/// boxes. `is_flat`: rows are all that there is between heads and columns.
inline int32_t box_tokens(const AttentionParams& params, bool is_flat) {
  const int32_t half_tile = params.kv_tile / 2, page_size = params.page_size.divisor;
  const int32_t tokens = is_flat ? half_tile : min_of(page_size, half_tile);
  constexpr int32_t kLeastTokens = 8;  // rows that a permutation of chunks goes through
  const bool is_whole = half_tile % tokens == 0 && (is_flat || page_size % tokens == 0);
  return tokens >= kLeastTokens && is_whole ? tokens : 0;
}

/// Encodes a map of K or V. A box's rows have row_bytes.
inline bool encode_cache(const AttentionParams& params, const LaunchContext& context, bool is_v, bool is_flat,
                         int32_t tokens, TensorMap& map, int32_t row_bytes = kBlockRowBytes) {
  const KvTensor& tensor = is_v ? params.v : params.k;
  const int32_t columns = is_v ? context.dims.v : context.dims.qk;
  const DataType dtype = side_type(context.kv_dtype, is_v);
  const Tensor4d described{
      .data = tensor.data,
      .dtype = dtype,
      .sizes = {stored_columns(columns, dtype), is_flat ? params.num_pages : params.page_size.divisor,
                params.num_kv_heads, is_flat ? 1 : params.num_pages},
      .strides = {is_flat ? tensor.page_stride : tensor.token_stride, tensor.head_stride, tensor.page_stride},
      .box = {row_bytes / bytes_of(dtype), tokens, 1, 1}};
  return context.encode(described, map);
}

/// The strides of TokenScales of K or V, if one copy can load the scales of a box, of `words` each. A dimension of size
/// 1 may have any stride.
inline ScaleStrides scale_strides(const AttentionParams& params, const TokenScales& scales, int64_t words) {
  constexpr int64_t kUnit = 16 / sizeof(float);
  const int64_t page = params.num_pages > 1 ? scales.page_stride : kUnit;
  const int64_t head = params.num_kv_heads > 1 ? scales.head_stride : 0;
  const int64_t extent = page * params.num_pages + head * params.num_kv_heads;
  if (scales.token_stride != words || page <= 0 || head < 0 || (page | head) % kUnit != 0 ||
      reinterpret_cast<uintptr_t>(scales.data) % 16 != 0 || extent / kUnit >= int64_t{1} << 32)
    return ScaleStrides{};
  return ScaleStrides{static_cast<uint32_t>(page / kUnit), static_cast<uint32_t>(head / kUnit)};
}

/// Finds whether one copy can load the TokenScales of a box. K's and V's must be alike, except for a pair's.
inline void find_scales(TmaParams& tma, const LaunchContext& context) {
  const KvForm& kv = context.kv_form;
  const auto& scales = tma.attention.variant.as<AttentionTokenScales>();
  const int32_t k_words = kv.scale_words(context.dims.qk, false), v_words = kv.scale_words(context.dims.v, true);
  const ScaleStrides k = scale_strides(tma.attention, scales.k, k_words);
  const ScaleStrides v = scale_strides(tma.attention, scales.v, v_words);
  const bool are_alike = k_words == v_words && k.page == v.page && k.head == v.head;
  if (k.page == 0 || v.page == 0 || !(are_alike || kv.is_pair())) return;
  tma.scale_strides = k;
  tma.v_scale_strides = v;
}

/// Encodes the maps of DequantizedKv, which TMA can always load. `parts`: of a stage.
inline void encode_dequantized(const LaunchContext& context, int32_t parts, TmaParams& tma) {
  const auto encode = [&](const void* data, int32_t head_columns, TensorMap& map) {
    const int32_t blocks = dequantized_columns(head_columns) / kBlockColumns;
    const int64_t row_stride = int64_t{kBlockColumns} * blocks * tma.attention.num_kv_heads;
    const Tensor4d tensor{
        .data = data,
        .dtype = context.dequantized.dtype,
        .sizes = {kBlockColumns, context.dequantized.rows, int64_t{blocks} * tma.attention.num_kv_heads, 1},
        .strides = {row_stride, kBlockColumns, row_stride * context.dequantized.rows},
        .box = {kBlockColumns, tma.attention.kv_tile / parts, parts > 1 ? 1 : blocks, 1}};
    context.encode(tensor, map);
  };
  encode(context.dequantized.k, context.dims.qk, tma.dequantized_k);
  encode(context.dequantized.v, context.dims.v, tma.dequantized_v);
}

/// Encodes the packed maps of K and V. Two tokens of a head that lie together, of 64 bytes each, are a row of 128
/// bytes, if a box then has eight rows or more.
inline bool encode_packed(const LaunchContext& context, bool is_flat, int32_t tokens, TmaParams& tma) {
  const AttentionParams& params = tma.attention;
  constexpr int32_t kBytes = 64;  // of a token of a pair
  const auto token_bytes = [&](bool is_v) { return packed_token_bytes(context.dims, context.kv_form, is_v); };
  const auto lie_in_pairs = [&](bool is_v) {
    const KvTensor& tensor = is_v ? params.v : params.k;
    const int32_t columns = is_v ? context.dims.v : context.dims.qk;
    return token_bytes(is_v) > kBytes ||
           (context.kv_form.stored_columns(columns, is_v) == kBytes && tensor.token_stride == kBytes);
  };
  tma.has_token_pairs = !is_flat && tokens >= 16 && lie_in_pairs(false) && lie_in_pairs(true);
  const auto encode = [&](bool is_v, TensorMap& map) {
    if (!tma.has_token_pairs || token_bytes(is_v) > kBytes)
      return encode_cache(params, context, is_v, is_flat, tokens, map, token_bytes(is_v));
    const KvTensor& tensor = is_v ? params.v : params.k;
    const Tensor4d pairs{.data = tensor.data,
                         .dtype = side_type(context.kv_dtype, is_v),
                         .sizes = {2 * kBytes, params.page_size.divisor / 2, params.num_kv_heads, params.num_pages},
                         .strides = {2 * kBytes, tensor.head_stride, tensor.page_stride},
                         .box = {2 * kBytes, tokens / 2, 1, 1}};
    return context.encode(pairs, map);
  };
  return encode(false, tma.k_packed) && encode(true, tma.v_packed);
}

/// Encodes the maps of K and V, if TMA can load them. `is_packed`: decodes read packed tiles.
inline void encode_caches(const LaunchContext& context, bool is_packed, TmaParams& tma) {
  const AttentionParams& params = tma.attention;
  const bool is_ragged = context.levels[0].table.indices == nullptr;
  for (int32_t level = 1; level < context.num_levels; ++level) {
    if ((context.levels[level].table.indices == nullptr) != is_ragged) return;
  }
  const bool is_flat = is_ragged || params.page_size.divisor == 1;
  const int32_t tokens = box_tokens(params, is_flat);
  if (tokens > 0 && encode_cache(params, context, false, is_flat, tokens, tma.k) &&
      encode_cache(params, context, true, is_flat, tokens, tma.v) &&
      (!is_packed || encode_packed(context, is_flat, tokens, tma)))
    (is_flat && !is_ragged ? tma.run_tokens : tma.box_tokens) = tokens;
  if (context.kv_form.has_token_scales && tma.box_tokens > 0 && !is_flat) find_scales(tma, context);
}

}  // namespace attn::feed
