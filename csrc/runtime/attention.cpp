#include "runtime/attention.h"

#include <pthread.h>

#include "attention/cpu/executor.h"
#include "attention/sm80/shape.h"
#include "attention/sm90/shape.h"
#include "planner/forest.h"
#include "planner/host/planner.h"
#include "planner/launch.h"
#include "runtime/checks.h"

namespace attn {
namespace {

/// Costs of a kernel. On a GPU the small kinds of row tiles wait for memory and cost about the same; a pair of a large
/// one costs as much as two of its KV tiles more, one whose rows leave states as three to six (docs/decisions.md). On a
/// CPU cost follows the rows.
struct Costs {
  int32_t kv_tile[kNumCostKinds];
  int32_t pair[kNumCostKinds];
  int32_t turns;      // longest pairs in a CTA's share with which pairs are taken in turn; 0: the kernel cannot
  int32_t min_share;  // shares smaller than this are not worth a CTA; on a CPU, where a CTA is a task of a thread, 32
                      // KV tiles of the smallest kind
  int32_t state;      // what a row state of one KV head costs, in 64ths of the above (benchmarks/cascade_costs.py)
  int32_t forest;     // what a forest must save over all KV heads
};
constexpr Costs kHopperCosts{{6, 6, 7, 9, 6, 6, 8, 9}, {11, 11, 14, 20, 10, 10, 25, 50}, 8, 12, 136, 1000};
constexpr Costs kGenericCosts{{4, 4, 5, 7, 4, 4, 5, 7}, {2, 2, 8, 18, 2, 2, 8, 18}, 0, 8, 470, 5250};
constexpr Costs kCpuCosts{{2, 4, 8, 16, 2, 4, 8, 16}, {0, 1, 2, 4, 0, 1, 2, 4}, 0, 64, 16, 0};

/// Of batch invariant plans, which cut no pair of a small row tile: what these cost was measured by itself
/// (docs/decisions.md).
constexpr Costs hopper_costs_of_whole_pairs() {
  Costs costs = kHopperCosts;
  costs.pair[0] = costs.pair[1] = costs.pair[kNumTileKinds] = costs.pair[kNumTileKinds + 1] = 8;
  costs.min_share = 9;
  return costs;
}
constexpr Costs kHopperInvariantCosts = hopper_costs_of_whole_pairs();

/// What the forest counts on: requests' KV tiles cost no less than those of the smallest kind.
constexpr bool smallest_kind_is_cheapest(const Costs& costs) {
  for (int32_t kind = 1; kind < kNumTileKinds; ++kind) {
    if (costs.kv_tile[kind] < costs.kv_tile[0]) return false;
  }
  return true;
}
static_assert(smallest_kind_is_cheapest(kHopperCosts) && smallest_kind_is_cheapest(kGenericCosts) &&
                  smallest_kind_is_cheapest(kCpuCosts),
              "node_cost_beside_none()");

const Costs& costs_of(KernelKind kernel, bool batch_invariant) {
  switch (kernel) {
    case KernelKind::kHopper:
      return batch_invariant ? kHopperInvariantCosts : kHopperCosts;
    case KernelKind::kGeneric:
      return kGenericCosts;
    default:
      return kCpuCosts;
  }
}

/// Largest kind of row tile, and tokens of a KV tile.
int32_t max_kind_of(const AttentionConfig& config) {
  return config.kernel == KernelKind::kGeneric ? max_kind(config.head_dim) : kNumTileKinds - 1;
}
int32_t kv_tile_of(const AttentionConfig& config) {
  return config.kernel == KernelKind::kHopper ? hopper::kv_tile(config.head_dim) : kv_tile(config.head_dim);
}

/// Row states that are kept for shared prefixes: four for each request, as a row of a decode has with three levels
/// above it, and room for a chunk or two of prompts beside a small batch.
int32_t cascade_states(const AttentionConfig& config) {
  const int64_t all = int64_t{config.max_rows} * kMaxLevels;
  return static_cast<int32_t>(min_of<int64_t>(max_of(4 * min_of(config.max_groups, kMaxForestRequests), 1024), all));
}

// A CPU's CTAs are tasks that threads take one after another; fixed, so that results do not depend on the number of
// threads.
constexpr int32_t kCpuCtas = 32;

/// Requests that the device planner can seek a forest in, with so much shared memory for a block. Larger batches are
/// planned without.
constexpr int32_t max_forest_requests(int32_t shared_bytes) {
  int32_t requests = kMaxForestRequests;
  while (requests > 0 && plan_forest_shared_bytes(requests) > shared_bytes) requests -= 32;
  return requests;
}
static_assert(max_forest_requests(163 * 1024) == kMaxForestRequests && max_forest_requests(99 * 1024) == 736,
              "an A100's blocks, and those of GPUs with the least memory");

/// `forest_requests`: as many as a forest may be sought in.
ScheduleConfig make_schedule_config(const AttentionConfig& config, int32_t forest_requests) {
  ScheduleConfig schedule{};
  schedule.num_kv_heads = config.num_kv_heads;
  schedule.group_size = config.num_qo_heads / config.num_kv_heads;
  schedule.kv_tile = kv_tile_of(config);
  schedule.max_kind = max_kind_of(config);
  schedule.num_ctas = config.num_ctas;
  schedule.cascade = config.cascade;
  schedule.batch_invariant = config.batch_invariant;
  schedule.max_rows = config.max_rows;
  schedule.max_groups = config.max_groups * config.max_levels;
  int64_t group_rows = int64_t{config.max_rows} * config.max_levels;
  if (config.max_levels > 1) {
    schedule.max_links = config.max_levels;
    schedule.max_merge_rows = config.max_rows;
    schedule.max_states = narrow("max_rows * max_levels", int64_t{config.max_rows} * config.max_levels);
  }
  if (config.batch_invariant) {
    schedule.max_groups = config.max_groups * kMaxLinks;
    schedule.max_links = kMaxLinks;
    schedule.max_merge_rows = config.max_groups;
    schedule.max_states = schedule.max_groups;
  } else if (config.cascade != kCascadeOff) {
    const int32_t states = cascade_states(config);
    schedule.max_nodes = min_of(config.max_groups, forest_requests);
    schedule.max_groups = max_of(schedule.max_groups, config.max_groups + schedule.max_nodes);
    schedule.max_links = max_of(schedule.max_links, kMaxLevels);
    schedule.max_merge_rows = max_of(schedule.max_merge_rows, states / 2);
    schedule.max_states = max_of(schedule.max_states, states);
    group_rows += states;
  }
  schedule.max_tiles = narrow("row tiles of max_rows * max_levels * (query heads of one KV head)",
                              max_row_tiles(schedule.max_groups, group_rows, schedule.group_size, schedule.max_kind));
  const Costs& costs = costs_of(config.kernel, config.batch_invariant);
  schedule.turns = costs.turns;
  schedule.min_share = costs.min_share;
  schedule.state_cost = costs.state;
  schedule.cascade_cost = costs.forest;
  for (int32_t kind = 0; kind < kNumCostKinds; ++kind) {
    schedule.kv_tile_cost[kind] = costs.kv_tile[kind];
    schedule.pair_cost[kind] = costs.pair[kind];
  }
  return schedule;
}

/// Whether a row group has tokens behind the last row of ragged K and V: lengths that far out would be read one by one.
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

/// Largest power of two, up to 2^12, that divides the strides between rows of K and V.
int32_t unit_shift(const AttentionParams& params) {
  constexpr int32_t kMaxShift = 12;
  const int64_t strides = params.k.page_stride | params.k.token_stride | params.v.page_stride | params.v.token_stride;
  int32_t shift = 0;
  while (shift < kMaxShift && (strides >> shift & 1) == 0) ++shift;
  const int64_t extent = max_of(params.k.page_stride, params.v.page_stride) * params.num_pages;
  if (extent >> shift >= int64_t{0xffffffff})
    refuse("k.stride(0)", params.k.page_stride,
           "smaller, or of a larger power of two: a row lies too far from the first");
  return shift;
}

}  // namespace

Attention::Attention(const AttentionConfig& config, const KernelFiles& files)
    : config_(config), schedule_config_(), layout_(schedule_config_) {
  int32_t forest_requests = kMaxForestRequests;
  if (config.on_cuda) {
    const int32_t device = config.device;
    forest_requests = max_forest_requests(driver::max_shared_bytes(device));
    const ScheduleConfig schedule = make_schedule_config(config, forest_requests);
    plan_kernel_ = driver::load_kernel(files.plan, "plan_kernel", device, plan_shared_bytes(schedule.max_groups, 0));
    if (schedule.max_nodes > 0)
      plan_forest_kernel_ =
          driver::load_kernel(files.plan, "plan_forest_kernel", device, plan_forest_shared_bytes(schedule.max_nodes));
    const bool hopper = config.kernel == KernelKind::kHopper;
    threads_ = hopper ? hopper::kThreads : kThreads;
    const int32_t attention_bytes =
        hopper ? hopper::SharedLayout(config.head_dim).bytes : shared_bytes(config.head_dim);
    attention_kernel_ = driver::load_kernel(files.attention, "attention_kernel", device, attention_bytes);
    merge_kernel_ = driver::load_kernel(files.merge, "merge_kernel", device, 0);
    if (hopper) {
      attention_rows_kernel_ = driver::load_kernel(files.attention_rows, "attention_kernel", device, attention_bytes);
      attention_code_ = driver::find_code(attention_kernel_);
      attention_rows_code_ = driver::find_code(attention_rows_kernel_);
      merge_code_ = driver::find_code(merge_kernel_);
    }
    if (config_.num_ctas == 0)
      config_.num_ctas =
          driver::multiprocessor_count(device) * driver::ctas_per_multiprocessor(attention_kernel_, threads_);
  } else if (config_.num_ctas == 0) {
    config_.num_ctas = kCpuCtas;
  }
  schedule_config_ = make_schedule_config(config_, forest_requests);
  layout_ = ScheduleLayout(schedule_config_);
}

WorkspaceSize Attention::workspace_size() const {
  const int64_t slot_rows = int64_t{schedule_config_.num_ctas} * kSlotsPerCta * tile_rows(schedule_config_.max_kind);
  const int64_t rows = slot_rows + int64_t{schedule_config_.max_states} * config_.num_qo_heads;
  return WorkspaceSize{layout_.bytes, rows * config_.head_dim * static_cast<int64_t>(sizeof(float)),
                       rows * static_cast<int64_t>(sizeof(float))};
}

void Attention::set_workspace(void* schedule, void* partial_o, void* partial_lse) {
  schedule_ = Schedule(schedule, layout_);
  partial_o_ = static_cast<float*>(partial_o);
  partial_lse_ = static_cast<float*>(partial_lse);
}

void Attention::enter() {
  uintptr_t user = 0;
  const uintptr_t self = static_cast<uintptr_t>(pthread_self());
  if (user_.compare_exchange_strong(user, self, std::memory_order_acquire) || user == self) return;
  TVM_FFI_THROW(RuntimeError) << "this Attention is in use by another thread: plan() and run() of one object must "
                                 "follow one another; give each thread an object of its own";
}

void Attention::begin_plan() {
  enter();
  planned_page_size_ = 0;
}

void Attention::abandon_plan() {
  uintptr_t user = 0;
  const uintptr_t self = static_cast<uintptr_t>(pthread_self());
  if (!user_.compare_exchange_strong(user, self, std::memory_order_acquire) && user != self) return;
  planned_page_size_ = 0;
  leave();
}

uint32_t Attention::plan(int32_t num_levels, driver::Stream stream) {
  const InUse in_use(*this);
  PlanParams& params = plan_params_;
  params.num_levels = num_levels;
  params.config = schedule_config_;
  params.schedule = schedule_;
  prepare_plan(params);
  uint32_t errors = 0;
  if (config_.on_cuda) {
    driver::Launch shape{static_cast<uint32_t>(plan_ctas(params)), 1, kPlanThreads};
    if (params.seeks_forest) shape.shared_bytes = plan_forest_shared_bytes(params.levels[0].num_groups);
    driver::launch(params.seeks_forest ? plan_forest_kernel_ : plan_kernel_, shape, &params, stream);
  } else {
    plan_on_host(params);
    errors = schedule_.header->errors;
    if (errors == 0 && has_negative_page(params)) errors = kPageIndexInvalid;
  }
  if (errors == 0) planned_page_size_ = params.levels[0].table.page_size;
  return errors;
}

/// Lets the copy engine know Q or O. A box is `packed_rows` rows of a row tile. Returns whether it can bring and store
/// them.
bool Attention::describe_rows(const void* data, int64_t row_stride, int64_t head_stride, int32_t num_rows,
                              int32_t packed_rows, TensorMap& map) const {
  const int32_t group_size = schedule_config_.group_size;
  if (packed_rows % group_size != 0 || num_rows == 0) return false;
  driver::Tensor4d t{};
  t.data = data;
  t.is_bf16 = config_.dtype == DataType::kBFloat16;
  t.sizes[0] = config_.head_dim;
  t.sizes[1] = config_.num_qo_heads;
  t.sizes[2] = num_rows;
  t.sizes[3] = 1;
  t.strides[0] = head_stride;
  t.strides[1] = row_stride;
  t.strides[2] = row_stride * num_rows;
  t.box[0] = hopper::kBlockColumns;
  t.box[1] = group_size;
  t.box[2] = packed_rows / group_size;
  t.box[3] = 1;
  return driver::encode(t, map);
}

/// Lets the copy engine know K and V, if it can bring them: half a KV tile then consists of whole boxes, each inside
/// one page.
HopperParams Attention::describe_tensors(const AttentionParams& params) const {
  HopperParams described{};
  described.attention = params;
  described.unit_shift = unit_shift(params);
  described.has_row_maps = describe_rows(params.q, params.q_row_stride, params.q_head_stride, params.num_rows,
                                         hopper::kQRows, described.q) &&
                           describe_rows(params.o, params.o_row_stride, params.o_head_stride, params.num_rows,
                                         hopper::kWarpRows, described.o);
  described.has_one_row_map = describe_rows(params.q, params.q_row_stride, params.q_head_stride, params.num_rows,
                                            schedule_config_.group_size, described.q_row);
  const bool ragged = plan_params_.levels[0].table.indices == nullptr;
  for (int32_t level = 1; level < plan_params_.num_levels; ++level) {
    if ((plan_params_.levels[level].table.indices == nullptr) != ragged) return described;
  }
  const int32_t half_tile = schedule_config_.kv_tile / 2;  // what a warp brings
  const bool is_flat = ragged || planned_page_size_ == 1;  // rows are all that there is between heads and columns
  const int32_t box_tokens = is_flat ? half_tile : min_of(planned_page_size_, half_tile);
  constexpr int32_t kLeastBoxTokens = 8;  // rows that a permutation of chunks goes through
  if (box_tokens < kLeastBoxTokens || half_tile % box_tokens != 0 || (!is_flat && planned_page_size_ % box_tokens != 0))
    return described;
  const auto encode = [&](const KvTensor& tensor, TensorMap& map) {
    driver::Tensor4d t{};
    t.data = tensor.data;
    t.is_bf16 = config_.dtype == DataType::kBFloat16;
    t.sizes[0] = config_.head_dim;
    t.sizes[1] = is_flat ? params.num_pages : planned_page_size_;
    t.sizes[2] = config_.num_kv_heads;
    t.sizes[3] = is_flat ? 1 : params.num_pages;
    t.strides[0] = is_flat ? tensor.page_stride : tensor.token_stride;
    t.strides[1] = tensor.head_stride;
    t.strides[2] = tensor.page_stride;
    t.box[0] = hopper::kBlockColumns;
    t.box[1] = box_tokens;
    t.box[2] = t.box[3] = 1;
    return driver::encode(t, map);
  };
  if (encode(params.k, described.k) && encode(params.v, described.v))
    (is_flat && !ragged ? described.run_tokens : described.box_tokens) = box_tokens;
  return described;
}

uint32_t Attention::run(AttentionParams params, driver::Stream stream) {
  params.schedule = schedule_;
  params.partial_o = partial_o_;
  params.partial_lse = partial_lse_;
  params.num_kv_heads = config_.num_kv_heads;
  params.head_dim = config_.head_dim;
  params.kv_tile = schedule_config_.kv_tile;
  params.num_ctas = schedule_config_.num_ctas;
  params.max_merge_rows = schedule_config_.max_merge_rows;
  params.max_tile_rows = tile_rows(schedule_config_.max_kind);
  params.group_size = FastDivisor(schedule_config_.group_size);
  params.page_size = FastDivisor(planned_page_size_);
  if (!config_.on_cuda) {
    uint32_t& errors = schedule_.header->errors;
    errors &= ~static_cast<uint32_t>(kPageIndexInvalid);  // of a run before, with another cache
    if (leads_beyond_ragged(schedule_, params.num_pages))
      errors |= kPageIndexInvalid;
    else
      cpu::run_attention(params, config_.dtype, config_.head_dim);
    return errors;
  }
  const uint32_t ctas = static_cast<uint32_t>(params.num_ctas);
  const driver::Launch shape{ctas, 1, static_cast<uint32_t>(threads_), -1, true};
  if (config_.kernel == KernelKind::kHopper) {
    HopperParams hopper_params = describe_tensors(params);
    const bool has_boxes = hopper_params.box_tokens > 0;
    hopper_params.code = has_boxes ? attention_code_ : attention_rows_code_;
    hopper_params.merge_code = merge_code_;
    driver::launch(has_boxes ? attention_kernel_ : attention_rows_kernel_, shape, &hopper_params, stream);
  } else {
    driver::launch(attention_kernel_, shape, &params, stream);
  }
  driver::launch(
      merge_kernel_,
      driver::Launch{ctas, static_cast<uint32_t>(params.max_tile_rows / kMergeRows), kMergeThreads, -1, true}, &params,
      stream);
  return 0;
}

}  // namespace attn
