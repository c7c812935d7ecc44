// The function of attn_backend/kernels/states.py, bound with tvm-ffi: checks, then a launch or the CPU's loop.
#include <tvm/ffi/container/tensor.h>
#include <tvm/ffi/extra/c_env_api.h>
#include <tvm/ffi/function.h>
#include <tvm/ffi/optional.h>
#include <tvm/ffi/string.h>

#include <algorithm>
#include <cmath>
#include <map>
#include <mutex>

#include "attention/cpu/merge_states.h"
#include "runtime/checks.h"
#include "runtime/driver.h"

namespace attn {
namespace {

using tvm::ffi::Optional;
using tvm::ffi::String;

constexpr DLDataType kFloat{kDLFloat, 32, 1};
constexpr int64_t kMaxBlocks = 1 << 16;

DataType dtype_of(const char* name, const TensorView& tensor) {
  const DLDataType was = tensor.dtype();
  for (const DataType dtype : {DataType::kFloat32, DataType::kFloat16, DataType::kBFloat16}) {
    const DLDataType must = dl_dtype(dtype);
    if (was.code == must.code && was.bits == must.bits && was.lanes == 1) return dtype;
  }
  refuse(std::string(name) + ".dtype", dtype_name(was), "float32, float16 or bfloat16");
}

/// Elements from one tensor to another: both are seen as the states of one.
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

/// Merges the states of each row: with o_b and lse_b those in o and in o_b, [rows, heads, head_dim] each; with indptr
/// those that it counts, of o [states, heads, head_dim]; else those of o [rows, states, heads, head_dim].
void merge_states(TensorView o, TensorView lse, Optional<TensorView> o_b, Optional<TensorView> lse_b,
                  Optional<TensorView> indptr, Optional<TensorView> mask, TensorView out, TensorView out_lse,
                  bool is_log2, String file) {
  const DLDevice device = o.device();
  MergeStatesParams params{};
  params.dtype = dtype_of("o", o);
  check_memory("o", o);
  const bool has_states_dim = !o_b.has_value() && !indptr.has_value();
  if (has_states_dim) {
    check_shape("o", o, {{"rows"}, {"states"}, {"heads"}, {"head_dim"}});
  } else {
    check_shape("o", o, {{indptr.has_value() ? "states" : "rows"}, {"heads"}, {"head_dim"}});
  }
  const int32_t last = o.ndim() - 1;
  const Dim heads{"heads", o.size(last - 1)}, head_dim{"head_dim", o.size(last)};
  check_contiguous_dim("o", o, last);
  check_tensor("lse", lse, device);
  check_dtype("lse", lse, kFloat);
  if (has_states_dim) {
    check_shape("lse", lse, {{"rows", o.size(0)}, {"states", o.size(1)}, heads});
  } else {
    check_shape("lse", lse, {{indptr.has_value() ? "states" : "rows", o.size(0)}, heads});
  }
  check_contiguous_dim("lse", lse, lse.ndim() - 1);

  int64_t rows = o.size(0);
  params.o = o.data_ptr();
  params.lse = static_cast<const float*>(lse.data_ptr());
  params.o_head_stride = o.stride(last - 1);
  if (has_states_dim) {
    params.num_states = narrow("o.shape[1] (states)", o.size(1));
    params.o_row_stride = o.stride(0);
    params.o_state_stride = o.stride(1);
    params.lse_row_stride = lse.stride(0);
    params.lse_state_stride = lse.stride(1);
  } else if (indptr.has_value()) {
    params.indptr = index_array("indptr", indptr.value(), device, 1);
    rows = indptr.value().size(0) - 1;
    params.o_state_stride = o.stride(0);
    params.lse_state_stride = lse.stride(0);
  } else {
    if (!lse_b.has_value()) refuse("lse_b", "None", "a tensor with o_b");
    check_other("o_b", o_b.value(), o, device, {{"rows", rows}, heads, head_dim});
    check_other("lse_b", lse_b.value(), lse, device, {{"rows", rows}, heads});
    params.num_states = 2;
    params.o_row_stride = o.stride(0);
    params.o_state_stride = distance(o, o_b.value(), o.dtype().bits / 8);
    params.lse_row_stride = lse.stride(0);
    params.lse_state_stride = distance(lse, lse_b.value(), 4);
  }
  params.num_rows = narrow("rows", rows);
  params.num_heads = narrow("heads", heads.size);
  params.head_dim = narrow("head_dim", head_dim.size);

  check_rows("out", out, device, params.dtype, {"rows", rows}, heads, head_dim);
  check_no_overlap("out", out);
  check_tensor("out_lse", out_lse, device);
  check_dtype("out_lse", out_lse, kFloat);
  check_shape("out_lse", out_lse, {{"rows", rows}, heads});
  check_contiguous_dim("out_lse", out_lse, 1);
  check_no_overlap("out_lse", out_lse);
  params.out = out.data_ptr();
  params.out_lse = static_cast<float*>(out_lse.data_ptr());
  params.out_row_stride = out.stride(0);
  params.out_head_stride = out.stride(1);
  params.out_lse_row_stride = out_lse.stride(0);
  params.to_log2 = is_log2 ? 1.0f : static_cast<float>(M_LOG2E);
  if (mask.has_value()) {
    check_tensor("mask", mask.value(), device);
    const DLDataType was = mask.value().dtype();
    if (was.bits != 8) refuse("mask.dtype", dtype_name(was), "bool or uint8");
    check_shape("mask", mask.value(), {{"rows", rows}});
    check_contiguous_dim("mask", mask.value(), 0);
    params.mask = static_cast<const uint8_t*>(mask.value().data_ptr());
  }
  if (rows == 0 || heads.size == 0) return;
  if (device.device_type == kDLCPU) {
    cpu::merge_states(params);
    return;
  }
  static std::mutex mutex;
  static std::map<std::pair<int32_t, DataType>, driver::Kernel> kernels;
  driver::Kernel kernel;
  {
    std::lock_guard<std::mutex> lock(mutex);
    driver::Kernel& known = kernels[{device.device_id, params.dtype}];
    if (!known) known = driver::load_kernel(file, "merge_states_kernel", device.device_id, 0);
    kernel = known;
  }
  const int64_t blocks = std::min(kMaxBlocks, ceil_div(rows * heads.size, int64_t{kMergeStatesThreads / 32}));
  driver::launch(kernel, driver::Launch{static_cast<uint32_t>(blocks), 1, kMergeStatesThreads, -1, true}, &params,
                 TVMFFIEnvGetStream(device.device_type, device.device_id));
}

}  // namespace
}  // namespace attn

TVM_FFI_DLL_EXPORT_TYPED_FUNC(merge_states, attn::merge_states);
