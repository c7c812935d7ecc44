// Element types of tensors, and how caches store them.
#pragma once

#include "common/platform.h"

namespace attn {

enum class DataType : int32_t {
  kFloat32,
  kFloat16,
  kBFloat16,
  kFloat8E4M3,  // without infinities; 0x7f and 0xff are NaN
  kFloat8E5M2,
  kScaledLatent,  // bytes of rows of MLA's latents: cache/kv_cache.h
  kInt8,
  kInt4,
  kNvFp4,     // e2m1
  kMxFp4,     // e2m1
  kInt8NvFp4  // a pair: K is kInt8, V kNvFp4
};

/// TokenScales of a type: a number for each token and head; after kFloat32, one for each kScaleColumns columns of
/// these.
enum class ScaleType : int32_t { kNone, kFloat32, kE4M3, kE8M0 };
constexpr int32_t kScaleColumns = 16;

/// What Hopper's decode multiplies if it reads packed tiles (attention/sm90/packed_decode.cuh).
enum class PackedProducts : int32_t { kNone, kF16, kBf16 };

struct StoredFormat {
  const char* name;                           // of the DataType, in Python
  int32_t bits;                               // of 4, a byte has two columns
  ScaleType token_scales = ScaleType::kNone;  // that caches always have; 8-bit floats may have kFloat32
  PackedProducts packed = PackedProducts::kNone;
  bool has_factor = false;  // of all scales of blocks
  // Of a pair: the formats of K and of V, whose rows have the types of scales and factors.
  bool is_pair = false;
  DataType k = DataType::kFloat32;
  DataType v = DataType::kFloat32;
};

constexpr int32_t kNumDataTypes = static_cast<int32_t>(DataType::kInt8NvFp4) + 1;

ATTN_HD constexpr StoredFormat stored_format(DataType dtype) {
  constexpr StoredFormat kFormats[] = {
      // in the order of DataType
      {"kFloat32", 32},
      {"kFloat16", 16},
      {"kBFloat16", 16},
      {"kFloat8E4M3", 8},
      {"kFloat8E5M2", 8},
      {"kScaledLatent", 8},
      {"kInt8", 8, ScaleType::kFloat32},
      {"kInt4", 4, ScaleType::kFloat32, PackedProducts::kF16},
      {"kNvFp4", 4, ScaleType::kE4M3, PackedProducts::kF16, true},
      {"kMxFp4", 4, ScaleType::kE8M0, PackedProducts::kBf16},
      {"kInt8NvFp4", 8, ScaleType::kNone, PackedProducts::kF16, false, true, DataType::kInt8, DataType::kNvFp4},
  };
  static_assert(sizeof(kFormats) / sizeof(kFormats[0]) == kNumDataTypes, "one for each type");
  return kFormats[static_cast<int32_t>(dtype)];
}

/// The type of K or of V in a cache of type `dtype`.
ATTN_HD constexpr DataType side_type(DataType dtype, bool is_v) {
  const StoredFormat format = stored_format(dtype);
  return !format.is_pair ? dtype : is_v ? format.v : format.k;
}

/// Types of 8 or 4 bits, whose numbers are multiplied by scales: of a cache, and of Q and O used with it.
ATTN_HD constexpr bool is_in_bytes(DataType dtype) { return stored_format(dtype).bits <= 8; }

/// Types with two columns in a byte.
ATTN_HD constexpr bool has_4_bits(DataType dtype) { return stored_format(dtype).bits == 4; }

/// Types with a scale for each kScaleColumns columns.
ATTN_HD constexpr bool has_block_scales(DataType dtype) {
  return stored_format(dtype).token_scales > ScaleType::kFloat32;
}

/// Words of TokenScales of a head: a float32 number, or the bytes of its blocks' scales.
ATTN_HD constexpr int32_t scale_words(int32_t columns, bool has_block_scales) {
  return has_block_scales ? columns / (4 * kScaleColumns) : 1;
}

/// Columns of heads of a 4-bit cache are a multiple: rows are moved in pieces of 16 bytes, scales of blocks in words.
ATTN_HD constexpr int32_t column_step(DataType dtype) { return has_block_scales(dtype) ? 4 * kScaleColumns : 32; }

/// Of what strides count: an element, or a byte with two columns.
ATTN_HD constexpr int32_t bytes_of(DataType dtype) {
  const int32_t bits = stored_format(dtype).bits;
  return bits < 8 ? 1 : bits / 8;
}

/// The same count for a row of `columns` columns.
ATTN_HD constexpr int32_t stored_columns(int32_t columns, DataType dtype) {
  return has_4_bits(dtype) ? columns / 2 : columns;
}

}  // namespace attn
