// Where the tokens of each request live.
#pragma once

#include "common/index_array.h"
#include "common/math.h"

namespace attn {

/// Where the tokens of each request live. Every engine's form reduces to one formula; page j of request i is
///     indices ? indices[begin(i) + j * entry_step] / entry_step : begin(i) + j
/// with begin(i) = indptr ? indptr[i] : (rows ? rows[i] : i) * row_stride, and its length is kv_lens[i], or from indptr
/// and last_page_len (CSR).
/// - CSR: indices, indptr, last_page_len; entry_step 1
/// - block table: indices [num_rows, row_stride], kv_lens; entry_step 1
/// - token slots: indices [num_rows, row_stride], rows, kv_lens; entry_step page_size: each token has an entry, and
///   every page_size-th entry is read
/// - ragged: indptr; page_size 1; pages are the tensor's rows
struct PageTable {
  const int32_t* indices = nullptr;
  IndexArray indptr;
  IndexArray last_page_len;
  IndexArray kv_lens;
  IndexArray rows;
  int64_t num_entries = 0;  // elements of `indices`; for ragged: rows of the tensor
  int64_t row_stride = 0;   // elements between two rows of a dense table
  int32_t num_rows = 0;     // rows of a dense table
  int32_t row_entries = 0;  // elements of a dense table's row that may be read
  int32_t page_size = 1;    // tokens
  int32_t entry_step = 1;
};

/// The page of a slot; a negative slot has a negative one, which does not exist.
ATTN_HD int32_t page_of_slot(int32_t slot, int32_t page_size) { return min_of(slot / page_size, slot); }

}  // namespace attn
