// The arguments of attention kernels that load by TMA.
#pragma once

#include "attention/params.h"
#include "common/kernel_code.h"
#include "common/tensor_map.h"

namespace attn {

/// Strides of TokenScales in units of 16 bytes. `page` is 0 if the scales of a box do not lie together: lanes then copy
/// one each.
struct ScaleStrides {
  uint32_t page;
  uint32_t head;
};

/// TMA loads boxes of `box_tokens` tokens x 64 columns; the maps' dimensions are
/// column, token (in its page; of a ragged tensor: row), head and page.
///
/// Fields that a CTA reads before its first load of K come first, up to `attention.q`: each line of constants costs one
/// cold miss. These bytes share a line of 256 bytes with constants that each kernel reads anyway.
struct TmaParams {
  KernelCode code;        // of this kernel
  KernelCode merge_code;  // of the merge kernel, which runs next
  int32_t box_tokens;     // 0: tokens are gathered one by one
  int32_t run_tokens;  // with box_tokens 0: the maps describe boxes of this many consecutive pages of one token each;
                       // 0: no map describes these tensors
  int32_t unit_shift;  // page and token strides of K and V are multiples of 2^unit_shift elements, and no row lies 2^32
                       // of these units from the first
  int32_t has_row_maps;  // 0: maps `o` and `q` describe nothing; the largest row tiles are gathered, and all are stored
                         // row by row
  int32_t has_one_row_map;  // 0: map `q_row` describes nothing; smaller row tiles are gathered
  /// 0: this run has filled no DequantizedKv, and ignores the plan's places there.
  int32_t has_dequantized;
  /// V's columns are the first of K's, in the same memory. Only kernels of wide heads read it.
  int32_t v_is_k;
  /// 1: a row of maps `k_packed` and `v_packed` holds two tokens of 64 bytes; 0: one.
  int32_t has_token_pairs;
  AttentionParams attention;
  ScaleStrides v_scale_strides;  // of a pair's V; where the maps leave a gap
  TensorMap k;
  TensorMap v;
  /// Maps for decodes from packed tiles, if K or V has 4 bits. A token takes 64 bytes of a tile, or 128. Where a page
  /// has one head after another, two tokens of 64 bytes are a box's row: TMA then has half as many reads on their way.
  TensorMap k_packed;
  TensorMap v_packed;
  /// Dimensions: column, head, row. A box has 64 columns and the 16 packed rows of a consumer warp.
  TensorMap o;
  /// Dimensions as `o`. A box has the packed rows of one of the largest row tiles.
  TensorMap q;
  /// A box has one row.
  TensorMap q_row;
  /// Of DequantizedKv, if there is one. Dimensions: column, row, block of 64 columns. A box is a KV tile of
  /// one head, or, if stages have two parts, one block of half a KV tile.
  TensorMap dequantized_k;
  TensorMap dequantized_v;
  ScaleStrides scale_strides;  // of K and V alike; of a pair's K

  /// The map of K or of V; the packed one, if is_packed. An index takes fewer registers than a choice.
  ATTN_HD const TensorMap& cache_map(bool is_v, bool is_packed) const {
    return (&k)[(is_v ? 1 : 0) + (is_packed ? 2 : 0)];
  }
  ATTN_HD bool scales_lie_together() const { return scale_strides.page != 0; }
  /// The first in a page.
  ATTN_HD const float* scales_of(const TokenScales& scales, const ScaleStrides& strides, int32_t page,
                                 int32_t head) const {
    return static_cast<const float*>(scales.data) +
           uint64_t{4} * (static_cast<uint32_t>(page) * strides.page + static_cast<uint32_t>(head) * strides.head);
  }
};

/// The arguments of kernels of MLA's latents, whose Q may be two tensors. Maps `q` and `q_row` describe the columns
/// that V also has, the maps below the others.
struct LatentTmaParams : TmaParams {
  QueryPart q_rope;
  TensorMap q_rope_tile;
  TensorMap q_rope_row;
};

}  // namespace attn
