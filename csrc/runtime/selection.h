// Packing the tokens of sparse attention, in a separate call or in a run.
#pragma once

#include <tvm/ffi/container/tensor.h>
#include <tvm/ffi/optional.h>

#include "planner/selection.h"
#include "runtime/checks.h"
#include "runtime/driver.h"

namespace attn {

/// SelectedTokens of attn_backend/kernels/selection.py.
struct Selection {
  tvm::ffi::Optional<TensorView> indices;  // int32 [rows, topk]
  tvm::ffi::Optional<TensorView> block_table;
  tvm::ffi::Optional<TensorView> requests;
  tvm::ffi::Optional<TensorView> kv_lens;
  int64_t page_size;
  int64_t page_stride;
};

/// Checks a selection that has indices. The caller says where its slots go.
SelectionParams selection_params(const Selection& selection, DLDevice device);

/// Refuses indices that overlap what is written, unless each row is packed in place.
void check_apart(const SelectionParams& params);

/// Launches the kernel, or packs now on a CPU.
void launch_selection(const SelectionParams& params, DLDevice device, driver::Stream stream);

}  // namespace attn
