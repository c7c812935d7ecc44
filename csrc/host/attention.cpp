#include "host/attention.h"

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
  schedule.max_kind = config.on_cuda ? max_kind(config.head_dim) : kNumTileKinds - 1;
  schedule.num_ctas = config.num_ctas;
  schedule.max_groups = config.max_groups * config.max_levels;
  schedule.max_rows = config.max_rows;
  schedule.max_levels = config.max_levels;
  schedule.max_tiles = max_row_tiles(schedule.max_groups, config.max_rows, config.max_levels, schedule.group_size, schedule.max_kind);
  schedule.min_share = config.on_cuda ? kCudaMinShare : kCpuMinShare;
  const KindCosts& costs = config.on_cuda ? kCudaCosts : kCpuCosts;
  for (int32_t kind = 0; kind < kNumTileKinds; ++kind) {
    schedule.kv_tile_cost[kind] = costs.kv_tile[kind];
    schedule.pair_cost[kind] = costs.pair[kind];
  }
  return schedule;
}

}  // namespace

Attention::Attention(const AttentionConfig& config, const KernelFiles& files) : config_(config), schedule_config_(), layout_(schedule_config_) {
  if (config.on_cuda) {
    const int32_t device = config.device;
    plan_kernel_ = driver::load_kernel(files.plan, "plan_kernel", device, config.max_groups * config.max_levels * static_cast<int32_t>(sizeof(int32_t)));
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
  const int64_t states = config_.max_levels > 1 ? int64_t{config_.max_levels} * config_.max_rows * config_.num_qo_heads : 0;
  const int64_t rows = slot_rows + states;
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
  uint32_t errors = 0;
  if (config_.on_cuda) {
    driver::launch(plan_kernel_, driver::Launch{1, 1, kPlanThreads}, &params, stream);
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
  params.max_rows = config_.max_rows;
  params.max_tile_rows = tile_rows(schedule_config_.max_kind);
  params.group_size = FastDivisor(schedule_config_.group_size);
  params.page_size = FastDivisor(planned_page_size_);
  if (!config_.on_cuda) {
    cpu::run_attention(params, config_.dtype, config_.head_dim);
    return schedule_.header->errors;
  }
  const uint32_t ctas = static_cast<uint32_t>(params.num_ctas);
  driver::launch(attention_kernel_, driver::Launch{ctas, 1, kThreads}, &params, stream);
  driver::launch(merge_kernel_, driver::Launch{ctas, static_cast<uint32_t>(params.max_tile_rows / kMergeRows), kMergeThreads, true}, &params, stream);
  return 0;
}

}  // namespace attn
