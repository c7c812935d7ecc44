// Attention.plan (attn_backend/kernels/attention.py), bound with tvm-ffi: checks the levels of a composition.
// Attention::plan (attention.cpp) then launches the planner or runs it on the host.
#include "runtime/arguments.h"
#include "runtime/attention.h"
#include "runtime/checks.h"
#include "runtime/driver.h"

namespace attn {
namespace {

using tvm::ffi::Bytes;

/// A level of a composition, a BSR view.
#define PLAN_LEVEL_ARGUMENTS(ARGUMENT)          \
  ARGUMENT(int64_t, handle)                     \
  ARGUMENT(Bytes, options) /* LevelOptions */   \
  ARGUMENT(TensorView, qo_indptr)               \
  ARGUMENT(Optional<TensorView>, row_list)      \
  ARGUMENT(Optional<TensorView>, indices)       \
  ARGUMENT(Optional<TensorView>, indptr)        \
  ARGUMENT(Optional<TensorView>, last_page_len) \
  ARGUMENT(Optional<TensorView>, kv_lens)       \
  ARGUMENT(Optional<TensorView>, rows) /* of the table */
ATTN_ARGUMENTS(PlanLevelArguments, PLAN_LEVEL_ARGUMENTS);

/// The dense table or the CSR table of a level; nothing for ragged K and V.
void set_indices(PageTable& table, const TensorView& t, DLDevice device, bool is_csr, bool has_rows, int64_t batch) {
  const char* name = is_csr ? "kv_indices" : has_rows ? "req_to_token" : "block_table";
  check_tensor(name, t, device);
  check_dtype(name, t, kInt32);
  if (is_csr) {
    check_shape(name, t, {{"pages"}});
    table.num_entries = t.size(0);
  } else {
    check_shape(name, t, {{"rows"}, {"entries"}});
    table.num_rows = narrow(has_rows ? "req_to_token.shape[0]" : "block_table.shape[0]", t.size(0));
    table.row_entries = narrow(has_rows ? "req_to_token.shape[1]" : "block_table.shape[1]", t.size(1));
    table.row_stride = t.stride(0);
    table.num_entries = table.num_rows == 0 ? 0 : (table.num_rows - 1) * table.row_stride + table.row_entries;
    if (!has_rows) check_size("block_table", t, 0, batch, "batch = ");
    if (has_rows && batch > 0) check_size("req_to_token", t, 0, 1);
  }
  check_contiguous_dim(name, t, t.ndim() - 1);
  table.indices = static_cast<const int32_t*>(t.data_ptr());
}

/// Requests of a level, which `max_batch` bounds.
int64_t checked_batch(const TensorView& qo_indptr, int32_t max_batch) {
  const int64_t batch = qo_indptr.ndim() == 1 ? qo_indptr.size(0) - 1 : 0;
  if (batch < 0) refuse("qo_indptr.shape[0]", 0, "batch + 1");
  if (batch > max_batch)
    refuse("batch (qo_indptr.shape[0] - 1)", batch, "at most max_batch = " + std::to_string(max_batch));
  return batch;
}

/// Takes a level; with the last one, plans. The caller guarantees that index < num_levels <= max_levels, and calls
/// abandon_plan() if anything fails. Returns ScheduleError bits (always 0 on CUDA, where they stay on the device).
int64_t plan_level(const PlanLevelArguments& given) {
  Attention& attention = Attention::of(given.handle);
  const LevelOptions options = unpack<LevelOptions>(given.options);
  if (options.index == 0) attention.begin_plan();
  const DLDevice device = attention.config().dl_device();
  const int64_t batch = checked_batch(given.qo_indptr, attention.config().max_batch);
  if (options.page_size < 1 || options.page_size > kMaxInt32) refuse("page_size", options.page_size, "at least 1");
  if (options.window_left < -1 || options.window_left > kMaxInt32)
    refuse("window_left", options.window_left, "-1 (no window) or at least 0");

  PlanLevel level{};
  level.num_groups = static_cast<int32_t>(batch);
  level.visibility.causal = options.causal;
  level.visibility.window_left = static_cast<int32_t>(options.window_left);
  level.qo_indptr = index_array("qo_indptr", given.qo_indptr, device, batch + 1);
  level.max_rows = attention.config().max_rows;
  level.kv_offsets = options.kv_offsets;
  level.prompts = options.prompts;
  level.positions = options.positions;
  if (given.row_list.has_value()) {
    const IndexArray list = index_array("rows", given.row_list.value(), device, 0);
    if (list.is_int64) refuse("rows.dtype", "int64", "int32");
    level.rows = static_cast<const int32_t*>(list.data);
    level.max_rows = static_cast<int32_t>(min_of<int64_t>(level.max_rows, given.row_list.value().size(0)));
  }
  PageTable& table = level.table;
  table.page_size = static_cast<int32_t>(options.page_size);
  table.entry_step = options.entry_step;
  table.num_entries = kMaxInt32;  // ragged: bounded by the tensor that run() is given (a GPU clamps each token)
  if (given.indices.has_value())
    set_indices(table, given.indices.value(), device, given.indptr.has_value(), given.rows.has_value(), batch);
  if (given.indptr.has_value()) table.indptr = index_array("kv_indptr", given.indptr.value(), device, batch + 1);
  if (given.last_page_len.has_value())
    table.last_page_len = index_array("kv_last_page_len", given.last_page_len.value(), device, batch);
  if (given.kv_lens.has_value()) table.kv_lens = index_array("kv_lens", given.kv_lens.value(), device, batch);
  if (given.rows.has_value()) table.rows = index_array("rows", given.rows.value(), device, batch);
  if (options.has_slots && (!table.indices || table.indptr || table.rows || table.page_size != 1))
    refuse("has_slots", "true", "false, except with a block table of one-token pages");
  attention.level(options.index) = level;
  attention.set_has_slots(options.index, options.has_slots);
  if (options.index + 1 < options.num_levels) return 0;
  return attention.plan(options.num_levels, options.finds_row_ranges, !options.pages_change,
                        driver::current_stream(device));
}

}  // namespace
}  // namespace attn

ATTN_EXPORT_BY_NAME(plan_level, PlanLevelArguments);
