// The function of attn_backend/kernels/states.py, bound with tvm-ffi: checks, then a launch or the CPU's loop.
#include <algorithm>
#include <cmath>

#include "attention/cpu/executor.h"
#include "runtime/arguments.h"
#include "runtime/checks.h"
#include "runtime/driver.h"

namespace attn {
namespace {

using tvm::ffi::String;

constexpr int64_t kMaxBlocks = 1 << 16;

/// The states of each row: one in o, the other in o_b, both [rows, heads, head_dim]; or those that indptr counts, of o
/// [states, heads, head_dim]; or o [rows, states, heads, head_dim].
#define MERGE_STATES_ARGUMENTS(ARGUMENT)        \
  ARGUMENT(TensorView, o)                       \
  ARGUMENT(TensorView, lse)                     \
  ARGUMENT(TensorView, out)                     \
  ARGUMENT(TensorView, out_lse)                 \
  ARGUMENT(bool, is_log2) /* lse and out_lse */ \
  ARGUMENT(String, file)  /* the cubin */       \
  ARGUMENT(Optional<TensorView>, o_b)           \
  ARGUMENT(Optional<TensorView>, lse_b)         \
  ARGUMENT(Optional<TensorView>, indptr)        \
  ARGUMENT(Optional<TensorView>, mask)
ATTN_ARGUMENTS(MergeStatesArguments, MERGE_STATES_ARGUMENTS);

/// Elements from one tensor to another: both become views of one tensor's states.
int64_t distance(const TensorView& from, const TensorView& to, int64_t element_bytes) {
  return static_cast<int64_t>(reinterpret_cast<intptr_t>(to.data_ptr()) - reinterpret_cast<intptr_t>(from.data_ptr())) /
         element_bytes;
}

/// The other state of each row: of the first one's shape, dtype and strides.
void check_other(const char* name, const TensorView& other, const TensorView& first, DLDevice device,
                 std::initializer_list<Dim> shape) {
  check_tensor(name, other, device);
  check_dtype(name, other, first.dtype());
  check_shape(name, other, shape);
  for (int32_t dim = 0; dim < other.ndim(); ++dim) {
    if (other.size(dim) > 1 && other.stride(dim) != first.stride(dim))
      refuse(std::string(name) + ".stride(" + std::to_string(dim) + ")", other.stride(dim), first.stride(dim));
  }
  const int64_t bytes = other.dtype().bits / 8;
  if (reinterpret_cast<uintptr_t>(other.data_ptr()) % bytes != reinterpret_cast<uintptr_t>(first.data_ptr()) % bytes)
    refuse(name, "not aligned", "aligned to its elements");
}

/// The states that are merged. Returns the number of rows.
int64_t set_states(MergeStatesParams& params, const MergeStatesArguments& given) {
  const TensorView &o = given.o, &lse = given.lse;
  const DLDevice device = o.device();
  const bool has_other = given.o_b.has_value(), is_counted = !has_other && given.indptr.has_value();
  const bool has_state_dim = !has_other && !is_counted;
  const char* const first = is_counted ? "states" : "rows";
  if (has_state_dim)
    check_shape("o", o, {{first}, {"states"}, {"heads"}, {"head_dim"}});
  else
    check_shape("o", o, {{first}, {"heads"}, {"head_dim"}});
  const int32_t last = o.ndim() - 1, state_dim = has_state_dim ? 1 : 0;
  check_contiguous_dim("o", o, last);
  const Dim rows{first, o.size(0)}, heads{"heads", o.size(last - 1)};
  if (has_state_dim)
    check_rows("lse", lse, device, kFloat32, {rows, {"states", o.size(1)}, heads});
  else
    check_rows("lse", lse, device, kFloat32, {rows, heads});
  params.o = o.data_ptr();
  params.lse = static_cast<const float*>(lse.data_ptr());
  params.o_head_stride = o.stride(last - 1);
  params.o_state_stride = o.stride(state_dim);
  params.lse_state_stride = lse.stride(state_dim);
  if (is_counted) {
    params.indptr = index_array("indptr", given.indptr.value(), device, 1);
    return given.indptr.value().size(0) - 1;
  }
  params.o_row_stride = o.stride(0);
  params.lse_row_stride = lse.stride(0);
  params.num_states = has_other ? 2 : narrow("o.shape[1] (states)", o.size(1));
  if (has_other) {
    if (!given.lse_b.has_value()) refuse("lse_b", "None", "a tensor with o_b");
    const TensorView &o_b = given.o_b.value(), &lse_b = given.lse_b.value();
    check_other("o_b", o_b, o, device, {rows, heads, {"head_dim", o.size(2)}});
    check_other("lse_b", lse_b, lse, device, {rows, heads});
    params.o_state_stride = distance(o, o_b, o.dtype().bits / 8);
    params.lse_state_stride = distance(lse, lse_b, 4);
  }
  return o.size(0);
}

void set_outputs(MergeStatesParams& params, const TensorView& out, const TensorView& out_lse, DLDevice device,
                 Dim head_dim) {
  const Dim rows{"rows", params.num_rows}, heads{"heads", params.num_heads};
  check_rows("out", out, device, dl_dtype(params.dtype), {rows, heads, head_dim});
  check_no_overlap("out", out);
  check_rows("out_lse", out_lse, device, kFloat32, {rows, heads});
  check_no_overlap("out_lse", out_lse);
  params.out = out.data_ptr();
  params.out_lse = static_cast<float*>(out_lse.data_ptr());
  params.out_row_stride = out.stride(0);
  params.out_head_stride = out.stride(1);
  params.out_lse_row_stride = out_lse.stride(0);
}

const uint8_t* mask_data(const TensorView& mask, DLDevice device, int64_t rows) {
  check_tensor("mask", mask, device);
  if (mask.dtype().bits != 8) refuse("mask.dtype", dtype_name(mask.dtype()), "bool or uint8");
  check_shape("mask", mask, {{"rows", rows}});
  check_contiguous_dim("mask", mask, 0);
  return static_cast<const uint8_t*>(mask.data_ptr());
}

void merge_states(const MergeStatesArguments& given) {
  const TensorView& o = given.o;
  const DLDevice device = o.device();
  MergeStatesParams params{};
  params.dtype = float_dtype("o", o);
  check_memory("o", o);
  const int64_t rows = set_states(params, given);
  params.num_rows = narrow("rows", rows);
  params.num_heads = narrow("heads", o.size(o.ndim() - 2));
  params.head_dim = narrow("head_dim", o.size(o.ndim() - 1));
  set_outputs(params, given.out, given.out_lse, device, {"head_dim", params.head_dim});
  params.to_log2 = given.is_log2 ? 1.0f : static_cast<float>(M_LOG2E);
  if (given.mask.has_value()) params.mask = mask_data(given.mask.value(), device, rows);
  if (params.num_rows == 0 || params.num_heads == 0) return;
  if (device.device_type == kDLCPU) return cpu::merge_states(params);
  const driver::Kernel& kernel =
      driver::loaded_kernel({given.file.data(), given.file.size()}, "merge_states_kernel", device.device_id);
  const int64_t blocks = std::min(kMaxBlocks, ceil_div(rows * params.num_heads, int64_t{kMergeStatesThreads / 32}));
  driver::launch(kernel, driver::Launch{static_cast<uint32_t>(blocks), 1, kMergeStatesThreads, true}, &params,
                 driver::current_stream(device));
}

}  // namespace
}  // namespace attn

ATTN_EXPORT_BY_NAME(merge_states, MergeStatesArguments);
