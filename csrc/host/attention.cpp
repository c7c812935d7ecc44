#include "host/attention.h"

#include "attn/forest.h"
#include "attn/planning.h"
#include "attn/tile.h"
#include "cpu/executor.h"
#include "host/planner.h"

namespace attn {
namespace {

/// Costs of each kind of row tile. On a GPU the small kinds wait for memory and cost the same; a pair of a large one costs as much as two or three of its KV
/// tiles more (docs/decisions.md). On a CPU cost follows the rows.
struct KindCosts {
  int32_t kv_tile[kNumTileKinds];
  int32_t pair[kNumTileKinds];
};
constexpr KindCosts kCudaCosts{{4, 4, 5, 7}, {2, 2, 8, 18}};
constexpr KindCosts kCpuCosts{{2, 4, 8, 16}, {0, 1, 2, 4}};

/// What a row state of one KV head costs, in 64ths of the above, and what a forest must save over all KV heads (benchmarks/cascade_costs.py).
struct CascadeCosts {
  int32_t state;
  int32_t forest;
};
constexpr CascadeCosts kCudaCascadeCosts{470, 5250};
constexpr CascadeCosts kCpuCascadeCosts{16, 0};

/// Row states that are kept for shared prefixes: four for each request, as a row of a decode has with three levels above it, and room for a chunk or two of prompts
/// beside a small batch.
int32_t cascade_states(const AttentionConfig& config) {
  const int64_t all = int64_t{config.max_rows} * kMaxLevels;
  return static_cast<int32_t>(min_of<int64_t>(max_of(4 * min_of(config.max_groups, kMaxForestRequests), 1024), all));
}

// Shares smaller than this are not worth a CTA: two KV tiles on a GPU; on a CPU, where a CTA is a task of a thread, 32 of the smallest kind.
constexpr int32_t kCudaMinShare = 8;
constexpr int32_t kCpuMinShare = 64;

// A CPU's CTAs are tasks that threads take one after another; fixed, so that results do not depend on the number of threads.
constexpr int32_t kCpuCtas = 32;

ScheduleConfig make_schedule_config(const AttentionConfig& config) {
  ScheduleConfig schedule{};
  schedule.num_kv_heads = config.num_kv_heads;
  schedule.group_size = config.num_qo_heads / config.num_kv_heads;
  schedule.kv_tile = kv_tile(config.head_dim);
  schedule.max_kind = config.cuda_costs ? max_kind(config.head_dim) : kNumTileKinds - 1;
  schedule.num_ctas = config.num_ctas;
  schedule.cascade = config.cascade;
  schedule.batch_invariant = config.batch_invariant;
  schedule.max_rows = config.max_rows;
  schedule.max_groups = config.max_groups * config.max_levels;
  int64_t group_rows = int64_t{config.max_rows} * config.max_levels;
  if (config.max_levels > 1) {
    schedule.max_links = config.max_levels;
    schedule.max_merge_rows = config.max_rows;
    schedule.max_states = config.max_rows * config.max_levels;
  }
  if (config.batch_invariant) {
    schedule.max_groups = config.max_groups * kMaxLinks;
    schedule.max_links = kMaxLinks;
    schedule.max_merge_rows = config.max_groups;
    schedule.max_states = schedule.max_groups;
  } else if (config.cascade != kCascadeOff) {
    const int32_t states = cascade_states(config);
    schedule.max_nodes = min_of(config.max_groups, kMaxForestRequests);
    schedule.max_groups = max_of(schedule.max_groups, config.max_groups + schedule.max_nodes);
    schedule.max_links = max_of(schedule.max_links, kMaxLevels);
    schedule.max_merge_rows = max_of(schedule.max_merge_rows, states / 2);
    schedule.max_states = max_of(schedule.max_states, states);
    group_rows += states;
  }
  schedule.max_tiles = max_row_tiles(schedule.max_groups, group_rows, schedule.group_size, schedule.max_kind);
  schedule.min_share = config.cuda_costs ? kCudaMinShare : kCpuMinShare;
  const KindCosts& costs = config.cuda_costs ? kCudaCosts : kCpuCosts;
  const CascadeCosts& cascade_costs = config.cuda_costs ? kCudaCascadeCosts : kCpuCascadeCosts;
  schedule.state_cost = cascade_costs.state;
  schedule.cascade_cost = cascade_costs.forest;
  for (int32_t kind = 0; kind < kNumTileKinds; ++kind) {
    schedule.kv_tile_cost[kind] = costs.kv_tile[kind];
    schedule.pair_cost[kind] = costs.pair[kind];
  }
  return schedule;
}

/// Dynamic shared memory of the device planner: the forest, what every plan needs, and the first row tile of each row group.
int32_t plan_shared_bytes(int32_t num_groups, int32_t num_requests) {
  return forest_shared_bytes(num_requests) + kPlanSharedBytes + num_groups * static_cast<int32_t>(sizeof(int32_t));
}

}  // namespace

Attention::Attention(const AttentionConfig& config, const KernelFiles& files) : config_(config), schedule_config_(), layout_(schedule_config_) {
  if (config.on_cuda) {
    const int32_t device = config.device;
    const ScheduleConfig schedule = make_schedule_config(config);
    plan_kernel_ = driver::load_kernel(files.plan, "plan_kernel", device, plan_shared_bytes(schedule.max_groups, schedule.max_nodes));
    attention_kernel_ = driver::load_kernel(files.attention, "attention_kernel", device, shared_bytes(config.head_dim));
    merge_kernel_ = driver::load_kernel(files.merge, "merge_kernel", device, 0);
    if (config_.num_ctas == 0) config_.num_ctas = driver::multiprocessor_count(device) * driver::ctas_per_multiprocessor(attention_kernel_, kThreads);
  } else if (config_.num_ctas == 0) {
    config_.num_ctas = kCpuCtas;
  }
  schedule_config_ = make_schedule_config(config_);
  layout_ = ScheduleLayout(schedule_config_);
}

WorkspaceSize Attention::workspace_size() const {
  const int64_t slot_rows = int64_t{schedule_config_.num_ctas} * kSlotsPerCta * tile_rows(schedule_config_.max_kind);
  const int64_t rows = slot_rows + int64_t{schedule_config_.max_states} * config_.num_qo_heads;
  return WorkspaceSize{layout_.bytes, rows * config_.head_dim * static_cast<int64_t>(sizeof(float)), rows * static_cast<int64_t>(sizeof(float))};
}

void Attention::set_workspace(void* schedule, void* partial_o, void* partial_lse) {
  schedule_ = Schedule(schedule, layout_);
  partial_o_ = static_cast<float*>(partial_o);
  partial_lse_ = static_cast<float*>(partial_lse);
}

uint32_t Attention::plan(int32_t num_levels, driver::Stream stream) {
  PlanParams& params = plan_params_;
  params.num_levels = num_levels;
  params.config = schedule_config_;
  params.schedule = schedule_;
  planned_page_size_ = 0;
  prepare_plan(params);
  uint32_t errors = 0;
  if (config_.on_cuda) {
    driver::Launch shape{static_cast<uint32_t>(plan_ctas(params)), 1, kPlanThreads};
    if (params.seeks_forest) {
      const int32_t num_requests = params.levels[0].num_groups;
      shape.shared_bytes = plan_shared_bytes(2 * num_requests, num_requests);
    }
    driver::launch(plan_kernel_, shape, &params, stream);
  } else {
    plan_on_host(params);
    errors = schedule_.header->errors;
  }
  if (errors == 0) planned_page_size_ = params.levels[0].table.page_size;
  return errors;
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
    cpu::run_attention(params, config_.dtype, config_.head_dim);
    return schedule_.header->errors;
  }
  const uint32_t ctas = static_cast<uint32_t>(params.num_ctas);
  driver::launch(attention_kernel_, driver::Launch{ctas, 1, kThreads}, &params, stream);
  driver::launch(merge_kernel_, driver::Launch{ctas, static_cast<uint32_t>(params.max_tile_rows / kMergeRows), kMergeThreads, -1, true}, &params, stream);
  return 0;
}

}  // namespace attn
