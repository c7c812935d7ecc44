// How many columns the heads have.
#pragma once

#include "common/data_type.h"
#include "common/math.h"
#include "common/platform.h"

namespace attn {

/// Columns of a head of Q and K, and of a head of V and O.
struct HeadDims {
  int32_t qk;
  int32_t v;

  ATTN_HD constexpr HeadDims(int32_t both) : qk(both), v(both) {}
  ATTN_HD constexpr HeadDims(int32_t qk_, int32_t v_) : qk(qk_), v(v_) {}

  ATTN_HD constexpr int32_t widest() const { return max_of(qk, v); }
};

/// The cache as the sizes of a design depend on it.
struct KvForm {
  int32_t element_bytes;
  bool multiplies_float8;  // prefill multiplies 8-bit elements as they are (sm90/float8_prefill.cuh)
  bool has_token_scales;   // TokenScales
  DataType dtype;          // kFloat32 if neither K nor V has a 4-bit type
  bool is_for_bf16;        // products take bf16 numbers
  ATTN_HD constexpr KvForm(int32_t element_bytes_, bool multiplies_float8_ = false, bool has_token_scales_ = false,
                           DataType dtype_ = DataType::kFloat32, bool is_for_bf16_ = false)
      : element_bytes(element_bytes_),
        multiplies_float8(multiplies_float8_),
        has_token_scales(has_token_scales_),
        dtype(attn::has_4_bits(side_type(dtype_, false)) || attn::has_4_bits(side_type(dtype_, true))
                  ? dtype_
                  : DataType::kFloat32),
        is_for_bf16(is_for_bf16_) {}

  /// K or V has.
  ATTN_HD constexpr bool has_4_bits() const { return dtype != DataType::kFloat32; }
  ATTN_HD constexpr bool is_pair() const { return stored_format(dtype).is_pair; }
  /// K's TokenScales are of blocks, or V's.
  ATTN_HD constexpr bool has_block_scales() const {
    return attn::has_block_scales(side_type(dtype, false)) || attn::has_block_scales(side_type(dtype, true));
  }
  /// Elements of a row of K or V.
  ATTN_HD constexpr int32_t stored_columns(int32_t columns, bool is_v) const {
    return attn::stored_columns(columns, side_type(dtype, is_v));
  }
  /// Of the TokenScales of a head of K or V.
  ATTN_HD constexpr int32_t scale_words(int32_t columns, bool is_v) const {
    return attn::scale_words(columns, attn::has_block_scales(side_type(dtype, is_v)));
  }
  /// The more of K's and V's.
  ATTN_HD constexpr int32_t scale_words(HeadDims dims) const {
    return max_of(scale_words(dims.qk, false), scale_words(dims.v, true));
  }
};

/// Bytes of a row in shared memory: whole runs of 128, within which chunks of 16 bytes are permuted. The columns after
/// the head's are not loaded, or are zeros.
ATTN_HD constexpr int32_t tile_row_bytes(int32_t columns, int32_t element_bytes) {
  return round_up(columns * element_bytes, 128);
}

/// Whether the output of a head is too wide for the registers of one warp, or of one warpgroup: several then share its
/// columns. KV tiles of an 8-bit cache are then widened while they are loaded: there is no room for tiles of both
/// widths.
ATTN_HD constexpr bool is_wide(HeadDims dims) { return dims.v > 256; }

/// Wide heads of MLA's latents: V is the first columns of K's.
ATTN_HD constexpr bool is_latent(HeadDims dims) { return is_wide(dims) && dims.qk > dims.v; }

/// Whether O with this number of columns leaves a warp registers for more than its products need: 16 rows of 128
/// columns take 64 of each thread's.
ATTN_HD constexpr bool leaves_registers(int32_t columns) { return columns <= 128; }

/// Bytes of an element of a KV tile in shared memory. `kv_element_bytes`: in the cache.
ATTN_HD constexpr int32_t tile_element_bytes(HeadDims dims, int32_t element_bytes, int32_t kv_element_bytes) {
  return is_wide(dims) ? element_bytes : kv_element_bytes;
}

/// HeadDims that a kernel is compiled for.
template <int kQk_, int kV_ = kQk_>
struct HeadShape {
  static constexpr int kQk = kQk_;
  static constexpr int kV = kV_;
  static constexpr HeadDims kDims{kQk_, kV_};
  static constexpr int kQkMultiplied = round_up(kQk_, 16);  // what products of Q and K take
  static constexpr int kVMultiplied = round_up(kV_, 32);    // what products of P and V make
  static_assert(kQk_ % 8 == 0 && kV_ % 8 == 0, "rows are moved in pieces of 16 bytes");
};

}  // namespace attn
