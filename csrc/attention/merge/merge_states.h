// The arguments of merging attention states that lie in tensors (the parts of a schedule are merged by merge.cuh).
#pragma once

#include "common/data_type.h"
#include "common/index_array.h"

namespace attn {

/// Threads of a block. A warp takes one row and head.
constexpr int32_t kMergeStatesThreads = 128;

/// Row r has the states [begin(r), end(r)): of `indptr`, where all rows' states lie one after another, or else
/// [0, num_states). State s of row r begins at r * row_stride + s * state_stride; with an indptr row_stride is 0.
struct MergeStatesParams {
  const void* o;
  const float* lse;
  int64_t o_row_stride, o_state_stride, o_head_stride;  // in elements; head_dim is contiguous
  int64_t lse_row_stride, lse_state_stride;             // heads are contiguous
  void* out;                                            // may be `o` itself
  float* out_lse;                                       // may be `lse` itself
  int64_t out_row_stride, out_head_stride, out_lse_row_stride;
  IndexArray indptr;    // [num_rows + 1]
  const uint8_t* mask;  // [num_rows]: rows with 0 are left alone; nullptr: none
  int32_t num_states;
  int32_t num_rows;
  int32_t num_heads;
  int32_t head_dim;
  float to_log2;  // lse times this is to base 2
  DataType dtype;

  ATTN_HD int64_t begin(int32_t row) const { return indptr ? indptr[row] : 0; }
  ATTN_HD int64_t end(int32_t row) const { return indptr ? indptr[row + 1] : num_states; }
};

}  // namespace attn
