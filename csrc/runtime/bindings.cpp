// An Attention's life, bound with tvm-ffi for attn_backend/kernels/native.py: it is made, gets a workspace and kernels,
// and is destroyed. plan.cpp and run.cpp have its two operations.
#include <tvm/ffi/container/map.h>

#include "common/cpu/isa.h"
#include "runtime/attention.h"
#include "runtime/checks.h"
#include "runtime/designs.h"

namespace attn {
namespace {

using tvm::ffi::Bytes;
using tvm::ffi::Map;
using tvm::ffi::String;

/// A struct that Python reads.
template <class Struct>
Bytes pack(const Struct& value) {
  return Bytes(reinterpret_cast<const char*>(&value), sizeof(value));
}

/// `config`: AttentionConfig. `files`: KernelFiles.
int64_t attention_create(const Bytes& config, const Map<String, String>& files) {
  const AttentionConfig c = unpack<AttentionConfig>(config);
  narrow("num_qo_heads", c.num_qo_heads, 1, kMaxHeads);
  narrow("num_kv_heads", c.num_kv_heads, 1, kMaxHeads);
  narrow("head_dim", c.head_dim, 1);
  narrow("head_dim_v", c.head_dim_v, 1);
  narrow("max_rows", c.max_rows, 1);
  narrow("max_batch", c.max_batch, 1);
  narrow("max_levels", c.max_levels, 1, kMaxLevels);
  narrow("num_ctas", c.num_ctas);
  narrow("design", c.design, 0, kNumDesigns - 1);
  narrow("device.index", c.device);
  if (c.on_cuda && kDesigns[c.design]->make_arguments == nullptr)
    refuse("design", kDesigns[c.design]->name, "one for GPUs");
  KernelFiles paths;
  for (const auto& [kernel, file] : files) paths[kernel] = file;
  return reinterpret_cast<int64_t>(new Attention(c, paths));
}

/// The instruction set in use, by its name in ATTN_BACKEND_CPU_ISA.
String current_isa() { return cpu::kIsaNames[static_cast<int>(cpu::current_isa())]; }

void attention_destroy(int64_t handle) { delete &Attention::of(handle); }

/// WorkspaceSize.
Bytes workspace_size(int64_t handle) { return pack(Attention::of(handle).workspace_size()); }

void set_workspace(int64_t handle, TensorView schedule, TensorView partial_o, TensorView partial_lse,
                   TensorView row_ranges, TensorView dequantized) {
  Attention::of(handle).set_workspace(schedule.data_ptr(), partial_o.data_ptr(), partial_lse.data_ptr(),
                                      row_ranges.data_ptr(), dequantized.data_ptr());
}

/// ScheduleConfig, and ScheduleLayout: with them a reader can locate everything in the workspace.
Bytes schedule_config(int64_t handle) { return pack(Attention::of(handle).schedule_config()); }
Bytes schedule_layout(int64_t handle) { return pack(Attention::of(handle).layout()); }

/// Ends a plan that lacks levels; the previous plan is dropped, too.
void abandon_plan(int64_t handle) { Attention::of(handle).abandon_plan(); }

/// Sets the Params of the variant for all later runs.
void set_variant_params(int64_t handle, const Bytes& params) {
  Attention::of(handle).set_variant_params(params.data(), params.size());
}

/// Loads a kernel of the design that a run() found missing (MissingKernelError).
void load_attention_kernel(int64_t handle, String kernel, String file) {
  Attention::of(handle).load_kernel(kernel, file);
}

}  // namespace
}  // namespace attn

TVM_FFI_DLL_EXPORT_TYPED_FUNC(attention_create, attn::attention_create);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(attention_destroy, attn::attention_destroy);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(workspace_size, attn::workspace_size);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(set_workspace, attn::set_workspace);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(schedule_config, attn::schedule_config);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(schedule_layout, attn::schedule_layout);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(abandon_plan, attn::abandon_plan);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(set_variant_params, attn::set_variant_params);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(load_attention_kernel, attn::load_attention_kernel);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(current_isa, attn::current_isa);
