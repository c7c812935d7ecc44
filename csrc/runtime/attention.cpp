// The state of an Attention, and the launches of plan and run.
#include "runtime/attention.h"

#include <pthread.h>

#include <cstring>

#include "attention/cpu/executor.h"
#include "attention/merge/shape.h"
#include "attention/variant/row_ranges.h"
#include "planner/forest.h"
#include "planner/host/planner.h"
#include "planner/params.h"
#include "runtime/checks.h"
#include "runtime/designs.h"

namespace attn {
namespace {

/// Row states that are kept for shared prefixes: four for each request, as a row of a decode has with three levels
/// above it, and room for a chunk or two of prompts next to a small batch.
int32_t cascade_states(const AttentionConfig& config) {
  const int64_t all = int64_t{config.max_rows} * kMaxLevels;
  return static_cast<int32_t>(min_of<int64_t>(max_of(4 * min_of(config.max_batch, kMaxForestRequests), 1024), all));
}

/// Requests that the device planner can seek a forest in, with so much shared memory for a block. Larger batches are
/// planned without.
constexpr int32_t max_forest_requests(int32_t shared_bytes) {
  int32_t requests = kMaxForestRequests;
  while (requests > 0 && plan_forest_shared_bytes(requests) > shared_bytes) requests -= 32;
  return requests;
}
static_assert(max_forest_requests(163 * 1024) == kMaxForestRequests && max_forest_requests(99 * 1024) == 736,
              "an A100's blocks, and those of GPUs with the least memory");

/// Bytes of a row of K or V in DequantizedKv.
int64_t dequantized_row_bytes(const AttentionConfig& config, int32_t head_columns) {
  return int64_t{config.num_kv_heads} * dequantized_columns(head_columns) * bytes_of(config.dtype);
}
int64_t dequantized_row_bytes(const AttentionConfig& config) {
  return dequantized_row_bytes(config, config.head_dim) + dequantized_row_bytes(config, config.head_dim_v);
}

/// CTAs that share an interval of the schedule.
int32_t ctas_of_interval(const AttentionConfig& config, const KernelDesign& design) {
  return design.halves_row_tiles(config.dims(), config.num_qo_heads / config.num_kv_heads) ? 2 : 1;
}

/// `forest_requests`: as many as a forest may be sought in.
ScheduleConfig make_schedule_config(const AttentionConfig& config, const KernelDesign& design,
                                    int32_t forest_requests) {
  ScheduleConfig schedule{};
  schedule.num_kv_heads = config.num_kv_heads;
  schedule.group_size = config.num_qo_heads / config.num_kv_heads;
  schedule.kv_tile = design.kv_tile(config.dims(), config.kv_form());
  const int32_t ctas = ctas_of_interval(config, design);
  // A row tile has twice the rows of the kind before, up to 128: two CTAs share one of the next kind.
  schedule.max_kind = design.max_kind(config.dims(), config.kv_form()) + ctas - 1;
  schedule.num_ctas = config.num_ctas;
  schedule.cascade = config.cascade;
  schedule.batch_invariant = config.batch_invariant;
  schedule.max_rows = config.max_rows;
  schedule.max_groups = config.max_batch * config.max_levels;
  int64_t group_rows = int64_t{config.max_rows} * config.max_levels;
  if (config.max_levels > 1) {
    schedule.max_links = config.max_levels;
    schedule.max_merge_rows = config.max_rows;
    schedule.max_states = narrow("max_rows * max_levels", int64_t{config.max_rows} * config.max_levels);
  }
  if (config.batch_invariant) {
    schedule.max_groups = config.max_batch * kMaxLinks;
    schedule.max_links = kMaxLinks;
    schedule.max_merge_rows = config.max_batch;
    schedule.max_states = schedule.max_groups;
  } else if (config.cascade != kCascadeOff) {
    const int32_t states = cascade_states(config);
    schedule.max_nodes = min_of(config.max_batch, forest_requests);
    schedule.max_groups = max_of(schedule.max_groups, config.max_batch + schedule.max_nodes);
    schedule.max_links = max_of(schedule.max_links, kMaxLevels);
    schedule.max_merge_rows = max_of(schedule.max_merge_rows, states / 2);
    schedule.max_states = max_of(schedule.max_states, states);
    group_rows += states;
  }
  schedule.max_tiles = narrow("row tiles of max_rows * max_levels * (query heads of one KV head)",
                              max_row_tiles(schedule.max_groups, group_rows, schedule.group_size, schedule.max_kind));
  const KernelCosts& costs = config.batch_invariant ? design.invariant_costs : design.costs;
  schedule.min_queue_pairs = costs.min_queue_pairs;
  const HeadDims dims = config.dims();
  const int32_t row_columns = stored_columns(dims.qk, side_type(config.kv_dtype, false)) +
                              stored_columns(dims.v, side_type(config.kv_dtype, true));
  schedule.section_tokens = costs.section_bytes / (row_columns * bytes_of(config.kv_dtype));
  schedule.min_share = costs.min_share;
  schedule.min_dequantized_rows = design.min_dequantized_rows(dims, config.kv_form());
  if (schedule.min_dequantized_rows > 0 && packed_rows_of(schedule, config.max_rows) >= schedule.min_dequantized_rows) {
    const int64_t rows = min_of(config.dequantized_bytes / dequantized_row_bytes(config), kMaxInt32);
    schedule.dequantized_tokens = static_cast<int32_t>(rows / kDequantizedRows * kDequantizedRows);
  }
  // Costs are times of an interval, in which two CTAs do twice as much as one. Two halves take as long as one of them.
  schedule.state_cost = costs.state / ctas;
  schedule.cascade_cost = costs.forest / ctas;
  for (int32_t kind = 0; kind < kNumCostKinds; ++kind) {
    const int32_t cta_kind = kind % kNumTileKinds == schedule.max_kind ? kind - (ctas - 1) : kind;
    schedule.kv_tile_cost[kind] = costs.kv_tile[cta_kind];
    schedule.pair_cost[kind] = costs.pair[cta_kind];
  }
  return schedule;
}

/// The Params of the variant after a cache's scales, as WithScales and WithTokenScales have them.
template <class Scales>
VariantParams with_scales(const VariantParams& variant, const Scales& scales) {
  VariantParams both{};
  std::memcpy(both.bytes, &scales, sizeof(scales));
  std::memcpy(both.bytes + kScalesBytes, variant.bytes, VariantParams::kBytes - kScalesBytes);
  return both;
}

/// Whether a row group has tokens beyond the last row of ragged K and V: lengths that far out would be read one by one.
bool leads_beyond_ragged(const Schedule& schedule, int32_t num_rows) {
  const ScheduleHeader& header = *schedule.header;
  for (int32_t i = 0; i < header.num_groups; ++i) {
    const RowGroup& group = schedule.groups[i];
    if (header.levels[group.level].indices == nullptr && group.kv_len > 0 &&
        group.table_begin + group.kv_len > num_rows)
      return true;
  }
  return false;
}

const std::string& file_of(const KernelFiles& files, const std::string& kernel) {
  const auto file = files.find(kernel);
  if (file == files.end()) refuse("files[\"" + kernel + "\"]", "missing", "the path of a cubin");
  return file->second;
}

}  // namespace

Attention::Attention(const AttentionConfig& config, const KernelFiles& files)
    : config_(config),
      design_(*kDesigns[config.design]),
      is_interpreted_(!config.on_cuda && config.has_variant && files.empty()),
      schedule_config_(),
      layout_(schedule_config_) {
  int32_t forest_requests = kMaxForestRequests;
  if (config.on_cuda) {
    forest_requests = max_forest_requests(driver::max_shared_bytes(config.device));
    load_kernels(files, forest_requests);
  } else if (is_interpreted_) {
    // Python interprets the variant: this object plans, and checks what runs are given.
  } else if (config.has_variant) {
    cpu_kernels_ = cpu::load_variant(file_of(files, "variant").c_str());
  }
  if (config_.num_ctas == 0) {
    config_.num_ctas = config.on_cuda
                           ? driver::multiprocessor_count(config.device) *
                                 driver::ctas_per_multiprocessor(kernels_.attention[0],
                                                                 design_.threads(config.dims(), config.kv_form())) /
                                 ctas_of_interval(config_, design_)
                           : cpu::kCtas;
  }
  schedule_config_ = make_schedule_config(config_, design_, forest_requests);
  layout_ = ScheduleLayout(schedule_config_);
}

void Attention::load_kernels(const KernelFiles& files, int32_t forest_requests) {
  const int32_t device = config_.device;
  const ScheduleConfig schedule = make_schedule_config(config_, design_, forest_requests);
  const std::string& plan_file = file_of(files, "plan");
  plan_kernel_ = driver::load_kernel(plan_file, "plan_kernel", device, plan_shared_bytes(schedule.max_groups, 0));
  if (schedule.max_nodes > 0)
    plan_forest_kernel_ =
        driver::load_kernel(plan_file, "plan_forest_kernel", device, plan_forest_shared_bytes(schedule.max_nodes));
  if (schedule.dequantized_tokens > 0)
    dequantize_kernel_ = driver::load_kernel(file_of(files, "dequantize"), "dequantize_kernel", device, 0);
  if (config_.has_mask)
    row_ranges_kernel_ = driver::load_kernel(file_of(files, "row_ranges"), "row_ranges_kernel", device, 0);
  load_output_kernels(files, "", kernels_);
  if (config_.float8_out) load_output_kernels(files, kFloat8Out, float8_kernels_);
}

void Attention::load_output_kernels(const KernelFiles& files, const std::string& prefix, OutputKernels& kernels) {
  kernels.merge = driver::load_kernel(file_of(files, prefix + "merge"), "merge_kernel", config_.device, 0);
  if (design_.prefetches_code) kernels.merge_code = driver::find_code(kernels.merge);
  for (int32_t i = 0; i < kMaxDesignKernels && design_.kernels[i] != nullptr; ++i) {
    const std::string name = prefix + design_.kernels[i];
    const bool widens_on_load = is_wide(config_.dims()) && is_in_bytes(config_.kv_dtype);  // in one kernel
    const bool comes_later = i > 0 && (config_.has_variant || widens_on_load) && files.count(name) == 0;
    if (!comes_later) load_attention_kernel(kernels, i, file_of(files, name));
  }
}

void Attention::load_attention_kernel(OutputKernels& kernels, int32_t kernel, const std::string& file) {
  kernels.attention[kernel] = driver::load_kernel(file, "attention_kernel", config_.device,
                                                  design_.shared_bytes(config_.dims(), config_.kv_form()));
  if (design_.prefetches_code) kernels.codes[kernel] = driver::find_code(kernels.attention[kernel]);
}

void Attention::load_kernel(const std::string& kernel, const std::string& file) {
  const std::lock_guard<Attention> in_use(*this);
  for (int32_t i = 0; i < kMaxDesignKernels && design_.kernels[i] != nullptr; ++i) {
    if (kernel == design_.kernels[i]) return load_attention_kernel(kernels_, i, file);
    if (kernel == kFloat8Out + std::string(design_.kernels[i])) return load_attention_kernel(float8_kernels_, i, file);
  }
  refuse("kernel", kernel, "one of the design");
}

void Attention::set_variant_params(const void* params, size_t bytes) {
  const std::lock_guard<Attention> in_use(*this);
  const size_t room = VariantParams::kBytes - (is_in_bytes(config_.kv_dtype) ? kScalesBytes : 0);
  if (!config_.has_variant || bytes > room)
    refuse("bytes of the variant's Params", bytes,
           "at most " + std::to_string(room) + " with this kv_dtype, and there must be a variant");
  std::memcpy(variant_params_.bytes, params, bytes);
  has_variant_params_ = true;
}

WorkspaceSize Attention::workspace_size() const {
  const int64_t slot_rows = int64_t{schedule_config_.num_ctas} * kSlotsPerCta * tile_rows(schedule_config_.max_kind);
  const int64_t rows = slot_rows + int64_t{schedule_config_.max_states} * config_.num_qo_heads;
  return WorkspaceSize{
      layout_.bytes, rows * config_.head_dim_v * static_cast<int64_t>(sizeof(float)),
      rows * static_cast<int64_t>(sizeof(float)),
      row_ranges_bytes() + int64_t{config_.max_levels} * num_kv_tile_lists() * static_cast<int64_t>(sizeof(KvTileList)),
      schedule_config_.dequantized_tokens * dequantized_row_bytes(config_)};
}

int64_t Attention::row_ranges_bytes() const {
  return config_.has_mask ? int64_t{config_.max_rows} * config_.max_levels * static_cast<int64_t>(sizeof(RowRange)) : 0;
}

int32_t Attention::num_kv_tile_lists() const {
  if (!config_.skips_kv_tiles) return 0;
  return static_cast<int32_t>(
      max_row_tiles(config_.max_batch, config_.max_rows, schedule_config_.group_size, schedule_config_.max_kind));
}

void Attention::set_workspace(void* schedule, void* partial_o, void* partial_lse, void* row_ranges, void* dequantized) {
  schedule_ = Schedule(schedule, layout_);
  partial_o_ = static_cast<float*>(partial_o);
  partial_lse_ = static_cast<float*>(partial_lse);
  row_ranges_ = static_cast<RowRange*>(row_ranges);
  const int32_t rows = schedule_config_.dequantized_tokens;
  const int64_t k_bytes = rows * dequantized_row_bytes(config_, config_.head_dim);
  dequantized_ = DequantizedKv{dequantized, static_cast<char*>(dequantized) + k_bytes, config_.dtype, rows};
}

bool Attention::try_lock() {
  uintptr_t user = 0;
  const uintptr_t self = static_cast<uintptr_t>(pthread_self());
  return user_.compare_exchange_strong(user, self, std::memory_order_acquire) || user == self;
}

void Attention::lock() {
  if (try_lock()) return;
  TVM_FFI_THROW(InUseError) << "this Attention is in use by another thread: plan() and run() of one object must "
                               "follow one another; give each thread an object of its own";
}

void Attention::begin_plan() {
  lock();
  planned_page_size_ = 0;
}

void Attention::abandon_plan() {
  if (!try_lock()) return;
  planned_page_size_ = 0;
  unlock();
}

void Attention::find_row_ranges(int32_t level_number, driver::Stream stream) {
  PlanLevel& level = plan_params_.levels[level_number];
  RowRange* const row_ranges = row_ranges_ + int64_t{level_number} * config_.max_rows;
  const int32_t num_lists = num_kv_tile_lists();
  KvTileList* const all_lists =
      reinterpret_cast<KvTileList*>(reinterpret_cast<char*>(row_ranges_) + row_ranges_bytes());
  KvTileList* const lists = num_lists > 0 ? all_lists + int64_t{level_number} * num_lists : nullptr;
  const RowRangeParams params{plan_params_,         level_number, variant_params_, row_ranges,
                              config_.num_kv_heads, lists,        num_lists};
  level.row_ranges = row_ranges;
  level.kv_tile_lists = lists;
  level.num_kv_tile_lists = num_lists;
  if (!config_.on_cuda) return cpu_kernels_.find_row_ranges(params);
  constexpr uint32_t kCtasPerMultiprocessor = 4;
  const uint32_t multiprocessors = static_cast<uint32_t>(driver::multiprocessor_count(config_.device));
  const uint32_t ctas = min_of(static_cast<uint32_t>(config_.max_rows), kCtasPerMultiprocessor * multiprocessors);
  driver::launch(row_ranges_kernel_, driver::Launch{ctas, num_lists > 0 ? 2u : 1u, kRowRangeThreads}, &params, stream);
}

uint32_t Attention::plan(int32_t num_levels, bool finds_row_ranges, bool seeks_prefixes, driver::Stream stream) {
  const std::lock_guard<Attention> in_use(*this);
  PlanParams& params = plan_params_;
  params.num_levels = num_levels;
  params.config = schedule_config_;
  params.schedule = schedule_;
  prepare_plan(params, seeks_prefixes);
  if (finds_row_ranges && config_.has_mask && has_variant_params_ && !is_interpreted_) {
    for (int32_t level = 0; level < num_levels; ++level) find_row_ranges(level, stream);
  }
  uint32_t errors = 0;
  if (config_.on_cuda) {
    driver::Launch shape{static_cast<uint32_t>(plan_ctas(params)), 1, kPlanThreads};
    if (params.seeks_forest) shape.shared_bytes = plan_forest_shared_bytes(params.levels[0].num_groups);
    driver::launch(params.seeks_forest ? plan_forest_kernel_ : plan_kernel_, shape, &params, stream);
  } else {
    plan_on_host(params);
    errors = schedule_.header->errors;
    // Where page ids may still change (then no prefixes are sought), a run clamps and reports those that it reads.
    if (errors == 0 && seeks_prefixes && has_negative_page(params)) errors = kPageIndexInvalid;
  }
  if (errors == 0) planned_page_size_ = params.levels[0].table.page_size;
  return errors;
}

bool Attention::has_slots() const {
  bool some = false;
  for (int32_t level = 0; level < plan_params_.num_levels; ++level) some |= has_slots_[level];
  return some;
}

PlannedSelection Attention::planned_selection(int32_t level) const {
  PlannedSelection plan{};
  plan.schedule = schedule_;
  plan.is_planned = 1;
  plan.level = level;
  for (int32_t i = 0; i < level; ++i) plan.group_begin += plan_params_.levels[i].num_groups;
  plan.num_requests = plan_params_.levels[level].num_groups;
  plan.row_stride = plan_params_.levels[level].table.row_stride;
  plan.has_chunks = schedule_config_.batch_invariant;
  plan.group_size = schedule_config_.group_size;
  plan.kv_tile = schedule_config_.kv_tile;
  return plan;
}

void Attention::select(const Selection& selection, int32_t num_rows, driver::Stream stream) {
  const std::lock_guard<Attention> in_use(*this);
  const DLDevice device = config_.dl_device();
  if (selection.indices.has_value() && (plan_params_.num_levels != 1 || !has_slots_[0]))
    refuse("selected", "given", "None, or the plan of a BSRView.selected");
  if (!config_.on_cuda) schedule_.header->errors &= ~static_cast<uint32_t>(kSelectionTooLong);  // of an earlier run
  for (int32_t level = 0; level < plan_params_.num_levels; ++level) {
    if (!has_slots_[level]) continue;
    const PageTable& table = plan_params_.levels[level].table;
    const int32_t batch = plan_params_.levels[level].num_groups;
    SelectionParams params{};
    if (selection.indices.has_value()) {
      params = selection_params(selection, device);
      if (params.num_rows < min_of(num_rows, batch))
        refuse("indices.shape[0]", params.num_rows, "at least the rows of q: " + std::to_string(num_rows));
      if (params.num_indices > table.row_entries)
        refuse("indices.shape[1]", params.num_indices,
               "at most that of the plan's slots: " + std::to_string(table.row_entries));
      params.num_rows = min_of(params.num_rows, batch);
    } else {
      params.indices = table.indices;
      params.indices_stride = table.row_stride;
      params.num_rows = batch;
      params.num_indices = table.row_entries;
    }
    params.slots = const_cast<int32_t*>(table.indices);  // BSRView.selected says that they are written
    params.slots_stride = table.row_stride;
    params.num_slots = table.row_entries;
    params.plan = planned_selection(level);
    check_apart(params);
    launch_selection(params, device, stream);
  }
}

bool Attention::may_have_long_groups(int32_t num_rows) const {
  if (schedule_config_.dequantized_tokens == 0) return false;
  int32_t longest = 0;
  for (int32_t i = 0; i < plan_params_.num_levels; ++i) {
    const PlanLevel& level = plan_params_.levels[i];
    // If each row group has a row, which need not be so. The launch is not worth its time in a batch of decodes.
    longest = max_of(longest, min_of(num_rows, level.max_rows) - (level.num_groups - 1));
  }
  return packed_rows_of(schedule_config_, longest) >= schedule_config_.min_dequantized_rows;
}

void Attention::dequantize(const AttentionParams& params, const AttentionTokenScales& scales,
                           driver::Stream stream) const {
  DequantizeParams dequantize{};
  dequantize.schedule = schedule_;
  dequantize.page_size = params.page_size;
  dequantize.num_pages = params.num_pages;
  dequantize.num_kv_heads = params.num_kv_heads;
  dequantize.k = DequantizedTensor(params.k, scales.k, scales.k_factor, config_.head_dim, dequantized_.k);
  dequantize.v = DequantizedTensor(params.v, scales.v, scales.v_factor, config_.head_dim_v, dequantized_.v);
  dequantize.row_chunks =
      FastDivisor((dequantize.k.head_chunks.divisor + dequantize.v.head_chunks.divisor) * params.num_kv_heads);
  const int32_t ctas = kDequantizeCtasPerMultiprocessor * driver::multiprocessor_count(config_.device);
  driver::launch(dequantize_kernel_, driver::Launch{static_cast<uint32_t>(ctas), 1, kDequantizeThreads, true},
                 &dequantize, stream);
}

uint32_t Attention::run(LatentAttentionParams params, const AttentionScales& scales,
                        const AttentionTokenScales& token_scales, driver::Stream stream) {
  const bool has_scales = is_in_bytes(config_.kv_dtype);
  params.schedule = schedule_;
  params.partial_o = partial_o_;
  params.partial_lse = partial_lse_;
  params.adds_up = config_.has_variant && !config_.uses_softmax;
  params.num_kv_heads = config_.num_kv_heads;
  params.v_columns = config_.head_dim_v;
  params.kv_tile = schedule_config_.kv_tile;
  params.num_ctas = schedule_config_.num_ctas;
  params.max_merge_rows = schedule_config_.max_merge_rows;
  params.max_tile_rows = tile_rows(schedule_config_.max_kind);
  params.group_size = FastDivisor(schedule_config_.group_size);
  params.page_size = FastDivisor(planned_page_size_);
  if (!config_.on_cuda) {
    uint32_t& errors = schedule_.header->errors;
    errors &= ~static_cast<uint32_t>(kPageIndexInvalid);  // left by an earlier run, with another cache
    if (leads_beyond_ragged(schedule_, params.num_pages))
      errors |= kPageIndexInvalid;
    else if (!is_interpreted_) {
      if (has_scales) params.variant = with_scales(params.variant, scales);
      cpu::run_attention(params, token_scales, config_.dtype, config_.kv_dtype, config_.dims(), config_.rotation,
                         config_.has_variant ? &cpu_kernels_ : nullptr);
    }
    return errors;
  }
  const bool dequantizes = may_have_long_groups(params.num_rows);
  if (dequantizes) {
    dequantize(params, token_scales, stream);
    params.after_append = 1;  // it waited for all before it
  }
  const uint32_t ctas = static_cast<uint32_t>(params.num_ctas);
  const bool float8_out = params.has_out_scale();
  const OutputKernels& kernels = float8_out ? float8_kernels_ : kernels_;
  const LaunchContext context{plan_params_.levels,
                              plan_params_.num_levels,
                              float8_out ? DataType::kFloat8E4M3 : config_.dtype,
                              config_.q_dtype,
                              config_.kv_dtype,
                              config_.dims(),
                              kernels.codes,
                              kernels.merge_code,
                              driver::encode,
                              config_.kv_form(),
                              dequantizes ? dequantized_ : DequantizedKv{}};
  KernelArguments arguments;
  LatentAttentionParams attention_params = params;  // the merge kernel's variant has no scales
  if (has_scales)
    attention_params.variant =
        config_.token_scales ? with_scales(params.variant, token_scales) : with_scales(params.variant, scales);
  const int32_t kernel = design_.make_arguments(attention_params, context, arguments);
  if (kernel == kRowsTooFarApart)
    refuse("k.stride(0)", params.k.page_stride,
           "smaller, or of a larger power of two: a row lies too far from the first");
  if (!kernels.attention[kernel])  // Python loads it
    TVM_FFI_THROW(MissingKernelError) << (float8_out ? kFloat8Out : "") << design_.kernels[kernel];
  const uint32_t halves = static_cast<uint32_t>(ctas_of_interval(config_, design_));
  driver::Launch attention{ctas, halves, static_cast<uint32_t>(design_.threads(config_.dims(), config_.kv_form())),
                           true};
  if (halves > 1 && design_.forms_clusters(config_.kv_form())) attention.cluster_y = halves;
  driver::launch(kernels.attention[kernel], attention, &arguments, stream);
  driver::Launch merge{ctas, static_cast<uint32_t>(ceil_div(params.max_tile_rows, kMergeRows)), kMergeThreads, true};
  merge.grid_z = static_cast<uint32_t>(ceil_div(params.v_columns, kMergeColumns));
  driver::launch(kernels.merge, merge, &params, stream);
  return 0;
}

}  // namespace attn
