// Element types of tensors.
#pragma once

#include "common/platform.h"

namespace attn {

/// The order matters. These functions compare the numbers:
/// - has_8_bits(): from kFloat8E4M3 on;
/// - is_integer in set_scales() (runtime/append.cpp), types whose caches always have TokenScales: from kInt8 on;
/// - has_4_bits(): from kInt4 on;
/// - has_block_scales(): from kNvFp4 on.
enum class DataType : int32_t {
  kFloat32 = 0,
  kFloat16 = 1,
  kBFloat16 = 2,
  kFloat8E4M3 = 3,  // without infinities; 0x7f and 0xff are NaN
  kFloat8E5M2 = 4,
  kScaledLatent = 5,  // bytes of rows of MLA's latents: cache/kv_cache.h
  kInt8 = 6,          // of caches with TokenScales
  // of caches with TokenScales; a byte has two columns
  kInt4 = 7,
  kNvFp4 = 8,  // e2m1; a block of columns has an e4m3 scale
  kMxFp4 = 9   // e2m1; a block of columns has an e8m0 scale
};

/// Types whose numbers are multiplied by scales: of a cache, and of Q and O used with it. They are stored in bytes.
ATTN_HD constexpr bool has_8_bits(DataType dtype) { return dtype >= DataType::kFloat8E4M3; }

/// Types with two columns in a byte.
ATTN_HD constexpr bool has_4_bits(DataType dtype) { return dtype >= DataType::kInt4; }

/// Types with a scale for each kScaleColumns columns.
ATTN_HD constexpr bool has_block_scales(DataType dtype) { return dtype >= DataType::kNvFp4; }
constexpr int32_t kScaleColumns = 16;

/// Words of TokenScales of a head: a float32 number, or the bytes of its blocks' scales.
ATTN_HD constexpr int32_t scale_words(int32_t columns, bool has_block_scales) {
  return has_block_scales ? columns / (4 * kScaleColumns) : 1;
}

/// Of what strides count: an element, or a byte with two columns.
ATTN_HD constexpr int32_t bytes_of(DataType dtype) {
  return dtype == DataType::kFloat32 ? 4 : has_8_bits(dtype) ? 1 : 2;
}

/// The same count for a row of `columns` columns.
ATTN_HD constexpr int32_t stored_columns(int32_t columns, DataType dtype) {
  return has_4_bits(dtype) ? columns / 2 : columns;
}

}  // namespace attn
