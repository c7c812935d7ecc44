// The device planner on a CPU, for ctypes: csrc/planner/device/plan.cu with emulated/ instead of CUDA. Its CTAs run one
// after another.
#include <cstring>

#include "cuda_emulation.h"
#include "planner/params.h"

alignas(128) char memory[256 << 10];  // shared memory

namespace emulation {

char* const shared_memory = memory;
const size_t shared_bytes = sizeof(memory);

namespace {

uint64_t now = 0;
int32_t lost_block = -1;

}  // namespace

uint64_t time() { return now += 100'000; }

bool loses_messages() { return blockIdx.x == lost_block; }

}  // namespace emulation

#include "plan_params.h"
#include "planner/device/plan.cu"

namespace {

attn::PlanParams planned_params;

void run_cta(int32_t block, uint32_t seed) {
  emulation::run_cta(
      block, attn::plan_ctas(planned_params), attn::kPlanThreads, seed + static_cast<uint32_t>(block),
      [] { planned_params.seeks_forest ? plan_forest_kernel(planned_params) : plan_kernel(planned_params); });
  const int32_t bytes = planned_params.seeks_forest
                            ? attn::plan_forest_shared_bytes(planned_params.levels[0].num_groups)
                            : attn::plan_shared_bytes(planned_params.config.max_groups, 0);
  if (memory[bytes] != emulation::kUnwritten ||
      std::memcmp(memory + bytes, memory + bytes + 1, sizeof(memory) - bytes - 1) != 0)
    emulation::fail("more shared memory is used than asked for");
}

}  // namespace

/// Plans like host_planner_plan (host_planner.cpp).
/// seed: of the order of threads.
/// searched: the levels that the searching CTAs read, with as many requests.
/// lost: the CTA whose messages get lost, or -1.
/// order: the CTAs in the order in which they run. CTA 0 waits for the others: those that run after it are late.
/// nullptr: CTA 0 opens the launch number, then the others run, then CTA 0.
/// Returns whether the last level lists its rows.
extern "C" int32_t device_planner_plan(const attn::ScheduleConfig* config, void* workspace,
                                       const attn::PlanLevel* levels, int32_t num_levels, uint32_t seed,
                                       const attn::PlanLevel* searched, int32_t lost, const int32_t* order) {
  emulation::lost_block = lost;
  planned_params = attn::passed_params(*config, workspace, levels, num_levels);
  const int32_t num_ctas = attn::plan_ctas(planned_params);
  const attn::LaunchNumber launch = attn::launch(planned_params);
  if (order == nullptr && num_ctas > 1) launch.open(*launch.word);
  for (int32_t i = 0; i < num_ctas; ++i) {
    const int32_t block = order != nullptr ? order[i] : num_ctas - 1 - i;
    planned_params = attn::passed_params(*config, workspace, block == 0 ? levels : searched, num_levels);
    run_cta(block, seed);
  }
  planned_params = attn::passed_params(*config, workspace, levels, num_levels);
  attn::ptx::deliver_all();
  const bool lists_rows = attn::last_level_lists_rows(planned_params);
  for (int32_t i = 0; i < attn::count_levels(planned_params); ++i) {
    const attn::Level got = planned_params.schedule.header->levels[i];
    attn::write_level(planned_params, i, !lists_rows);
    if (std::memcmp(&got, &planned_params.schedule.header->levels[i], sizeof(got)) != 0)
      emulation::fail("a level is not described");
  }
  return lists_rows;
}
