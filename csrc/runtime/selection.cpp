// What packs the tokens of sparse attention (attn_backend/kernels/selection.py), bound with tvm-ffi.
#include "runtime/selection.h"

#include <atomic>
#include <string>

#include "planner/host/planner.h"
#include "runtime/arguments.h"
#include "runtime/driver.h"

namespace attn {
namespace {

using tvm::ffi::String;

std::atomic<const driver::Kernel*> selection_kernels[driver::kMaxDevices];  // from load_selection(), which comes before

/// Loads the kernel for a CUDA device, before anything is packed there.
void load_selection(String file, int64_t device) {
  const int32_t id = narrow("device", device, 0, driver::kMaxDevices - 1);
  selection_kernels[id] = &driver::loaded_kernel({file.data(), file.size()}, "selected_slots_kernel", id);
}

#define SELECTED_SLOTS_ARGUMENTS(ARGUMENT)    \
  ARGUMENT(TensorView, indices)               \
  ARGUMENT(TensorView, out)                   \
  ARGUMENT(Optional<TensorView>, block_table) \
  ARGUMENT(Optional<TensorView>, requests)    \
  ARGUMENT(Optional<TensorView>, kv_lens)     \
  ARGUMENT(int64_t, page_size)                \
  ARGUMENT(int64_t, page_stride)
ATTN_ARGUMENTS(SelectedSlotsArguments, SELECTED_SLOTS_ARGUMENTS);

/// Packs slots into a tensor; there is no plan.
void selected_slots(const SelectedSlotsArguments& given) {
  const TensorView &indices = given.indices, &out = given.out;
  const DLDevice device = indices.device();
  SelectionParams params = selection_params(
      Selection{indices, given.block_table, given.requests, given.kv_lens, given.page_size, given.page_stride}, device);
  check_rows("out", out, device, kInt32, {{"rows", indices.size(0)}, {"topk", indices.size(1)}});
  check_no_overlap("out", out);
  params.slots = static_cast<int32_t*>(out.data_ptr());
  params.slots_stride = out.stride(0);
  params.num_slots = params.num_indices;
  check_apart(params);
  launch_selection(params, device, driver::current_stream(device));
}

}  // namespace

SelectionParams selection_params(const Selection& selection, DLDevice device) {
  const TensorView& indices = selection.indices.value();
  check_rows("indices", indices, device, kInt32, {{"rows"}, {"topk"}});
  SelectionParams params{};
  params.indices = static_cast<const int32_t*>(indices.data_ptr());
  params.indices_stride = indices.stride(0);
  params.num_rows = narrow("indices.shape[0]", indices.size(0));
  params.num_indices = narrow("indices.shape[1]", indices.size(1));
  params.page_size = FastDivisor(narrow("page_size", selection.page_size, 1));
  params.page_stride = narrow("page_stride", selection.page_stride, selection.page_size);
  if (selection.kv_lens.has_value())
    params.kv_lens = index_array("kv_lens", selection.kv_lens.value(), device, indices.size(0));
  if (!selection.block_table.has_value()) {
    if (selection.requests.has_value()) refuse("block_table", "None", "a tensor: requests is given");
    return params;
  }
  const TensorView& table = selection.block_table.value();
  check_rows("block_table", table, device, kInt32, {{"batch"}, {"max_pages"}});
  if (selection.requests.has_value())
    params.requests = index_array("requests", selection.requests.value(), device, indices.size(0));
  else if (table.size(0) != indices.size(0))
    refuse("requests", "None",
           "a tensor: block_table has " + std::to_string(table.size(0)) + " rows, indices " +
               std::to_string(indices.size(0)));
  const bool is_empty = table.numel() == 0;  // its address may belong to no table
  params.block_table = static_cast<const int32_t*>(is_empty ? indices.data_ptr() : table.data_ptr());
  params.table_stride = table.stride(0);
  params.table_rows = is_empty ? 0 : narrow("block_table.shape[0]", table.size(0));
  params.table_columns = narrow("block_table.shape[1]", table.size(1));
  return params;
}

void check_apart(const SelectionParams& p) {
  if (p.num_rows == 0 || p.num_indices == 0) return;
  const bool is_in_place = p.indices == p.slots && (p.num_rows == 1 || p.indices_stride == p.slots_stride);
  const int32_t* const indices_end = p.indices + (p.num_rows - 1) * p.indices_stride + p.num_indices;
  const int32_t* const slots_end = p.slots + (p.num_rows - 1) * p.slots_stride + p.num_slots;
  if (!is_in_place && p.indices < slots_end && p.slots < indices_end)
    refuse("indices", "a tensor that overlaps what is written", "the same, or memory of its own");
}

void launch_selection(const SelectionParams& params, DLDevice device, driver::Stream stream) {
  if (device.device_type == kDLCPU) return cpu::pack_selected_slots(params);
  const int32_t rows = max_of(params.num_rows, params.plan.is_planned != 0 ? params.plan.num_requests : 0);
  if (rows == 0) return;
  const driver::Kernel* const kernel =
      selection_kernels[narrow("device", device.device_id, 0, driver::kMaxDevices - 1)];
  if (kernel == nullptr)
    TVM_FFI_THROW(RuntimeError) << "selected_slots' kernel is not loaded on " << device_name(device);
  driver::launch(*kernel, driver::Launch{static_cast<uint32_t>(rows), 1, kSelectionThreads, true}, &params, stream);
}

}  // namespace attn

TVM_FFI_DLL_EXPORT_TYPED_FUNC(load_selection, attn::load_selection);
ATTN_EXPORT_BY_NAME(selected_slots, SelectedSlotsArguments);
