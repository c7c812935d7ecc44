// The functions that Python calls (attn_backend/kernels/library.py), bound with tvm-ffi: tensors arrive through DLPack,
// the stream is torch's current one.
#include <tvm/ffi/container/map.h>
#include <tvm/ffi/container/tensor.h>
#include <tvm/ffi/function.h>
#include <tvm/ffi/optional.h>
#include <tvm/ffi/string.h>

#include <cstring>
#include <limits>
#include <type_traits>

#include "attention/cpu/executor.h"
#include "cache/scaled_latent.h"
#include "common/cpu/isa.h"
#include "runtime/attention.h"
#include "runtime/checks.h"
#include "runtime/designs.h"
#include "runtime/kv_scales.h"
#include "runtime/stream.h"

namespace attn {
namespace {

using tvm::ffi::Bytes;
using tvm::ffi::Map;
using tvm::ffi::Optional;
using tvm::ffi::String;

Attention& object(int64_t handle) { return *reinterpret_cast<Attention*>(handle); }

DLDevice device_of(const AttentionConfig& config) { return DLDevice{config.on_cuda ? kDLCUDA : kDLCPU, config.device}; }

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
  narrow("max_batch", c.max_groups, 1);
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
String current_isa() {
  constexpr const char* kNames[] = {"baseline", "avx2", "avx512", "amx"};
  return kNames[static_cast<int>(cpu::current_isa())];
}

void attention_destroy(int64_t handle) { delete &object(handle); }

/// WorkspaceSize.
Bytes workspace_size(int64_t handle) { return pack(object(handle).workspace_size()); }

void set_workspace(int64_t handle, TensorView schedule, TensorView partial_o, TensorView partial_lse,
                   TensorView row_ranges) {
  object(handle).set_workspace(schedule.data_ptr(), partial_o.data_ptr(), partial_lse.data_ptr(),
                               row_ranges.data_ptr());
}

/// ScheduleConfig, and ScheduleLayout: with them a reader can locate everything in the workspace.
Bytes schedule_config(int64_t handle) { return pack(object(handle).schedule_config()); }
Bytes schedule_layout(int64_t handle) { return pack(object(handle).layout()); }

/// Ends a plan that lacks levels; the previous plan is dropped, too.
void abandon_plan(int64_t handle) { object(handle).abandon_plan(); }

/// The dense table or the CSR table of a level; nothing for ragged K and V.
void set_indices(PageTable& table, const TensorView& t, DLDevice device, bool is_csr, bool has_rows, int64_t batch) {
  const char* name = is_csr ? "kv_indices" : has_rows ? "req_to_token" : "block_table";
  check_tensor(name, t, device);
  check_dtype(name, t, DLDataType{kDLInt, 32, 1});
  if (is_csr) {
    check_shape(name, t, {{"pages"}});
    table.num_entries = t.size(0);
  } else {
    check_shape(name, t, {{"rows"}, {"entries"}});
    table.num_rows = narrow(has_rows ? "req_to_token.shape[0]" : "block_table.shape[0]", t.size(0));
    table.row_entries = narrow(has_rows ? "req_to_token.shape[1]" : "block_table.shape[1]", t.size(1));
    table.row_stride = t.stride(0);
    table.num_entries = table.num_rows == 0 ? 0 : (table.num_rows - 1) * table.row_stride + table.row_entries;
    if (!has_rows && table.num_rows < batch)
      refuse("block_table.shape[0]", table.num_rows, "at least batch = " + std::to_string(batch));
    if (has_rows && table.num_rows == 0 && batch > 0) refuse("req_to_token.shape[0]", 0, "at least 1");
  }
  check_contiguous_dim(name, t, t.ndim() - 1);
  table.indices = static_cast<const int32_t*>(t.data_ptr());
}

/// Requests of a level, which `max_groups` bounds.
int64_t checked_batch(const TensorView& qo_indptr, int32_t max_groups) {
  const int64_t batch = qo_indptr.ndim() == 1 ? qo_indptr.size(0) - 1 : 0;
  if (batch < 0) refuse("qo_indptr.shape[0]", 0, "batch + 1");
  if (batch > max_groups)
    refuse("batch (qo_indptr.shape[0] - 1)", batch, "at most max_batch = " + std::to_string(max_groups));
  return batch;
}

/// Takes a level of a composition, a BSR view: its LevelOptions and its tensors. With the last one, plans. The caller
/// sees to index < num_levels <= max_levels, and calls abandon_plan() if anything fails. Returns ScheduleError bits
/// (always 0 on CUDA, where they stay on the device).
int64_t plan_level(int64_t handle, const Bytes& level_options, TensorView qo_indptr, Optional<TensorView> row_list,
                   Optional<TensorView> indices, Optional<TensorView> indptr, Optional<TensorView> last_page_len,
                   Optional<TensorView> kv_lens, Optional<TensorView> rows) {
  Attention& attention = object(handle);
  const LevelOptions options = unpack<LevelOptions>(level_options);
  if (options.index == 0) attention.begin_plan();
  const DLDevice device = device_of(attention.config());
  const int64_t batch = checked_batch(qo_indptr, attention.config().max_groups);
  if (options.page_size < 1 || options.page_size > kMaxInt32) refuse("page_size", options.page_size, "at least 1");
  if (options.window_left < -1 || options.window_left > kMaxInt32)
    refuse("window_left", options.window_left, "-1 (no window) or at least 0");

  PlanLevel level{};
  level.num_groups = static_cast<int32_t>(batch);
  level.visibility.causal = options.causal;
  level.visibility.window_left = static_cast<int32_t>(options.window_left);
  level.qo_indptr = index_array("qo_indptr", qo_indptr, device, batch + 1);
  level.max_rows = attention.config().max_rows;
  level.kv_offsets = options.kv_offsets;
  level.positions = options.positions;
  if (row_list.has_value()) {
    const IndexArray list = index_array("rows", row_list.value(), device, 0);
    if (list.is_int64) refuse("rows.dtype", "int64", "int32");
    level.rows = static_cast<const int32_t*>(list.data);
    level.max_rows = static_cast<int32_t>(min_of<int64_t>(level.max_rows, row_list.value().size(0)));
  }
  PageTable& table = level.table;
  table.page_size = static_cast<int32_t>(options.page_size);
  table.entry_step = options.entry_step;
  table.num_entries = kMaxInt32;  // ragged: bounded by the tensor that run() is given (a GPU clamps each token)
  if (indices.has_value()) set_indices(table, indices.value(), device, indptr.has_value(), rows.has_value(), batch);
  if (indptr.has_value()) table.indptr = index_array("kv_indptr", indptr.value(), device, batch + 1);
  if (last_page_len.has_value())
    table.last_page_len = index_array("kv_last_page_len", last_page_len.value(), device, batch);
  if (kv_lens.has_value()) table.kv_lens = index_array("kv_lens", kv_lens.value(), device, batch);
  if (rows.has_value()) table.rows = index_array("rows", rows.value(), device, batch);
  if (options.has_slots && (!table.indices || table.indptr || table.rows || table.page_size != 1))
    refuse("has_slots", "true", "false but for a block table of pages of one token");
  attention.level(options.index) = level;
  attention.set_has_slots(options.index, options.has_slots);
  if (options.index + 1 < options.num_levels) return 0;
  return attention.plan(options.num_levels, options.finds_row_ranges, !options.pages_change, current_stream(device));
}

/// K or V of the cache of one layer.
KvTensor kv_tensor(const char* name, const TensorView& t, const AttentionConfig& config, Dim columns, Dim pages,
                   int64_t page_size) {
  check_tensor(name, t, device_of(config));
  check_dtype(name, t, dl_dtype(config.kv_dtype));
  check_shape(name, t, {pages, {"page_size", page_size}, {"num_kv_heads", config.num_kv_heads}, columns});
  check_contiguous_dim(name, t, 3);
  return KvTensor{t.data_ptr(), t.stride(0), t.stride(1), t.stride(2)};
}

/// Refuses latents in 8 bits whose K and V differ: a GPU's kernels widen and scale them once, while they load them.
void check_scaled_on_load(const AttentionParams& params, int64_t page_size, int64_t num_kv_heads,
                          const AttentionScales& scales) {
  if (!v_is_in_k(params.k, params.v, params.num_pages, page_size, num_kv_heads))
    refuse("kv.v", "a tensor of its own", "the first columns of kv.k, as KVCache.from_latent makes it");
  const auto is_one = [](const KvScale& scale) { return scale.head_stride == 0 && !scale.is_of_requests(); };
  if (!is_one(scales.k) || !is_one(scales.v) || scales.k.data != scales.v.data || scales.k.value != scales.v.value)
    refuse("kv.v_scale", "another one than kv.k_scale, or one of several",
           "kv.k_scale, one for all: K and V are the same bytes");
}

/// The Params of the variant: those of all runs until it is called again.
void set_variant_params(int64_t handle, const Bytes& params) {
  object(handle).set_variant_params(params.data(), params.size());
}

/// Loads a kernel of the design that a run() found missing ("kernel is not loaded: NAME").
void load_attention_kernel(int64_t handle, String kernel, String file) { object(handle).load_kernel(kernel, file); }

/// K's or V's scale. If requests have scales, all requests of the plan must.
KvScale checked_scale(const char* name, const Optional<TensorView>& scale, double value, const Attention& attention) {
  const AttentionConfig& config = attention.config();
  const KvScale made = kv_scale(name, scale, value, device_of(config), config.num_kv_heads);
  const bool is_short = made.is_of_requests() && made.num_requests < attention.planned_batch();
  if (is_short)
    refuse(std::string(name) + ".shape[0]", made.num_requests,
           "at least " + std::to_string(attention.planned_batch()) + ", the requests of the plan");
  return made;
}

/// Q's scale, the same for all requests.
KvScale checked_q_scale(const Optional<TensorView>& scale, double value, const Attention& attention) {
  const AttentionConfig& config = attention.config();
  if (!has_8_bits(config.q_dtype) && (scale.has_value() || value != 1.0))
    refuse("q_scale", scale.has_value() ? std::string("a tensor") : std::to_string(value), "None: q is not of 8 bits");
  const KvScale made = kv_scale("q_scale", scale, value, device_of(config), config.num_kv_heads);
  if (made.is_of_requests())
    refuse("q_scale.shape", shape_of(scale.value()),
           "[], [1] or [num_kv_heads = " + std::to_string(config.num_kv_heads) + "]");
  return made;
}

/// The scale of O in 8 bits: one number above 0, or a tensor of one.
void set_out_scale(const Optional<TensorView>& scale, double value, const Attention& attention,
                   AttentionParams& params) {
  if (!attention.config().float8_out)
    refuse("out_scale", scale.has_value() ? std::string("a tensor") : std::to_string(value),
           "None, or the Attention made with float8_out=True");
  if (!scale.has_value()) {
    params.out_scale = static_cast<float>(value);
    return;
  }
  const TensorView& t = scale.value();
  check_tensor("out_scale", t, device_of(attention.config()));
  check_dtype("out_scale", t, DLDataType{kDLFloat, 32, 1});
  if (t.numel() != 1) refuse("out_scale.shape", shape_of(t), "of one element");
  params.out_scale_data = static_cast<const float*>(t.data_ptr());
}

/// A contiguous float32 tensor of this shape.
float* float_data(const char* name, const TensorView& t, DLDevice device, std::initializer_list<Dim> dims) {
  check_tensor(name, t, device);
  check_dtype(name, t, DLDataType{kDLFloat, 32, 1});
  check_shape(name, t, dims);
  if (!t.IsContiguous()) refuse(name, "not contiguous", "contiguous");
  return static_cast<float*>(t.data_ptr());
}

/// A number above 0, or 0 if that is allowed, that a float32 holds.
float checked_float(const char* name, double value, bool zero_is_allowed, const char* must_be) {
  const bool is_large_enough = value > 0.0 || (zero_is_allowed && value == 0.0);
  if (!is_large_enough || value > std::numeric_limits<float>::max()) refuse(name, value, must_be);
  return static_cast<float>(value);
}

/// Q: one tensor, or its first columns, as many as V has, and in `q_rope` the others.
void set_q(const TensorView& q, const Optional<TensorView>& q_rope, const AttentionConfig& config,
           LatentAttentionParams& params) {
  const DLDevice device = device_of(config);
  const HeadDims dims = config.dims();
  const Dim heads{"num_qo_heads", config.num_qo_heads};
  if (q_rope.has_value() && (config.on_cuda ? !is_latent(dims) : dims.qk <= dims.v))
    refuse("q_rope", "a tensor",
           "None with head_dim = " + std::to_string(dims.qk) + " and head_dim_v = " + std::to_string(dims.v) +
               (config.on_cuda ? ": it is for 576 and 512" : ": q has all columns"));
  check_rows("q", q, device, config.q_dtype, {"rows"}, heads,
             q_rope.has_value() ? Dim{"head_dim_v", dims.v} : Dim{"head_dim", dims.qk});
  params.num_rows = narrow("q.shape[0] (rows)", q.size(0));
  params.q = q.data_ptr();
  params.q_row_stride = q.stride(0);
  params.q_head_stride = q.stride(1);
  if (config.on_cuda) check_alignment("q", q);
  if (!q_rope.has_value()) return;
  const TensorView& rope = q_rope.value();
  check_rows("q_rope", rope, device, config.q_dtype, {"rows", q.size(0)}, heads,
             {"head_dim - head_dim_v", dims.qk - dims.v});
  if (config.on_cuda) check_alignment("q_rope", rope);
  params.q_rope = QueryPart{rope.data_ptr(), rope.stride(0), rope.stride(1)};
}

/// O, of the rows of Q; e4m3 if it has a scale.
void set_out(const TensorView& out, int64_t num_rows, const AttentionConfig& config, AttentionParams& params) {
  const Dim head_dim_v{config.head_dim_v == config.head_dim ? "head_dim" : "head_dim_v", config.head_dim_v};
  const DataType o_dtype = params.has_out_scale() ? DataType::kFloat8E4M3 : config.dtype;
  check_rows("out", out, device_of(config), o_dtype, {"rows", num_rows}, {"num_qo_heads", config.num_qo_heads},
             head_dim_v);
  check_no_overlap("out", out);
  if (config.on_cuda) check_alignment("out", out);
  params.o = out.data_ptr();
  params.o_row_stride = out.stride(0);
  params.o_head_stride = out.stride(1);
}

void set_caches(const TensorView& k, const TensorView& v, const Attention& attention, AttentionParams& params) {
  const AttentionConfig& config = attention.config();
  const Dim k_columns = config.kv_dtype == DataType::kScaledLatent ? Dim{"bytes of a row", ScaledLatentRow::kBytes}
                                                                   : Dim{"head_dim", config.head_dim};
  const Dim v_columns{config.head_dim_v == config.head_dim ? "head_dim" : "head_dim_v", config.head_dim_v};
  params.k = kv_tensor("kv.k", k, config, k_columns, {"pages"}, attention.planned_page_size());
  params.v = kv_tensor("kv.v", v, config, v_columns, {"pages", k.size(0)}, attention.planned_page_size());
  if (k.size(0) < 1 || k.size(0) > kMaxInt32) refuse("kv.k.shape[0] (pages)", k.size(0), "at least 1 and below 2^31");
  params.num_pages = static_cast<int32_t>(k.size(0));
}

/// The Params of the object's variant, or of the standard one.
void set_variant(double logits_soft_cap, const Attention& attention, AttentionParams& params) {
  const float cap = checked_float("logits_soft_cap", logits_soft_cap, true, "0 (off) or above, and finite");
  if (!attention.config().has_variant) return params.variant.set(StandardVariant::Params{cap});
  if (logits_soft_cap != 0.0)
    refuse("logits_soft_cap", logits_soft_cap, "0 with a variant: combine the variant with soft_cap instead");
  if (!attention.has_variant_params()) TVM_FFI_THROW(RuntimeError) << "the variant's Params were not set";
  params.variant = attention.variant_params();
}

/// q_rope: the last columns of Q, if they are not in q. k_scale, v_scale: of an 8-bit cache; None: k_value and v_value
/// for all. q_scale: the same of Q of 8 bits. out_scale: of O in 8 bits; None: out_value; that is 0: O has the
/// Attention's dtype. indices and what follows: a Selection.
int64_t run_with_options(int64_t handle, TensorView q, Optional<TensorView> q_rope, TensorView k, TensorView v,
                         TensorView out, Optional<TensorView> lse, double sm_scale, double logits_soft_cap,
                         bool after_append, Optional<TensorView> sinks, Optional<TensorView> k_scale,
                         Optional<TensorView> v_scale, double k_value, double v_value, Optional<TensorView> q_scale,
                         double q_value, Optional<TensorView> out_scale, double out_value, Optional<TensorView> indices,
                         Optional<TensorView> block_table, Optional<TensorView> requests, Optional<TensorView> kv_lens,
                         int64_t page_size, int64_t page_stride) {
  Attention& attention = object(handle);
  const Attention::InUse in_use(attention);
  const AttentionConfig& config = attention.config();
  const DLDevice device = device_of(config);
  if (!attention.planned()) TVM_FFI_THROW(ValueError) << "run() before a successful plan()";
  LatentAttentionParams params{};
  if (out_scale.has_value() || out_value != 0.0) set_out_scale(out_scale, out_value, attention, params);
  set_q(q, q_rope, config, params);
  set_out(out, q.size(0), config, params);
  params.sm_scale = checked_float("sm_scale", sm_scale, false, "above 0 and finite");
  set_variant(logits_soft_cap, attention, params);
  set_caches(k, v, attention, params);
  if (config.on_cuda) {
    check_alignment("kv.k", k);
    check_alignment("kv.v", v);
  }
  const Dim heads{"num_qo_heads", config.num_qo_heads};
  if (lse.has_value()) {
    params.lse = float_data("lse", lse.value(), device, {{"rows", q.size(0)}, heads});
    if (config.has_variant && !config.uses_softmax)
      refuse("lse", "a tensor", "None: the variant does not use softmax, so its rows have no sum of exponentials");
  }
  if (sinks.has_value()) {
    if (!config.has_sinks) refuse("sinks", "a tensor", "None, or the Attention made with sinks=True");
    params.sinks = float_data("sinks", sinks.value(), device, {heads});
  }
  const bool has_slots = indices.has_value() || attention.has_slots();
  params.after_append = after_append && !has_slots;  // what packs the slots writes the schedule
  const AttentionScales scales{checked_scale("kv.k_scale", k_scale, k_value, attention),
                               checked_scale("kv.v_scale", v_scale, v_value, attention),
                               checked_q_scale(q_scale, q_value, attention), config.kv_dtype, config.q_dtype};
  if (config.on_cuda && has_8_bits(config.kv_dtype) && is_latent(config.dims()))
    check_scaled_on_load(params, attention.planned_page_size(), config.num_kv_heads, scales);
  if (params.num_rows == 0) return 0;  // every row of the plan is beyond q's
  if (has_slots)
    attention.select(Selection{indices, block_table, requests, kv_lens, page_size, page_stride}, params.num_rows,
                     current_stream(device));
  return attention.run(params, scales, current_stream(device));
}

int64_t run(int64_t handle, TensorView q, Optional<TensorView> q_rope, TensorView k, TensorView v, TensorView out,
            Optional<TensorView> lse, double sm_scale, double logits_soft_cap, bool after_append) {
  return run_with_options(handle, q, q_rope, k, v, out, lse, sm_scale, logits_soft_cap, after_append, std::nullopt,
                          std::nullopt, std::nullopt, 1.0, 1.0, std::nullopt, 1.0, std::nullopt, 0.0, std::nullopt,
                          std::nullopt, std::nullopt, std::nullopt, 1, 1);
}

}  // namespace
}  // namespace attn

TVM_FFI_DLL_EXPORT_TYPED_FUNC(attention_create, attn::attention_create);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(attention_destroy, attn::attention_destroy);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(workspace_size, attn::workspace_size);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(set_workspace, attn::set_workspace);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(schedule_config, attn::schedule_config);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(schedule_layout, attn::schedule_layout);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(plan_level, attn::plan_level);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(abandon_plan, attn::abandon_plan);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(set_variant_params, attn::set_variant_params);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(load_attention_kernel, attn::load_attention_kernel);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(current_isa, attn::current_isa);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(run, attn::run);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(run_with_options, attn::run_with_options);
