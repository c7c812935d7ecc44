// The device planner on a CPU, for ctypes: csrc/device/plan.cu with emulated/ in the place of CUDA. Its CTAs run one after another, the first one, which waits for the
// others, last.
#include <ucontext.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <vector>

#include "cuda_emulation.h"

Dimension threadIdx, blockIdx, gridDim, blockDim;
alignas(128) char memory[256 << 10];   // shared memory

namespace emulation {
namespace {

constexpr size_t kStackBytes = 64 << 10;
constexpr int32_t kMaxThreads = 1024;

struct Barrier {
  int32_t arrived;
  int64_t uses;
  bool any;
  bool result;
};

struct Warp {
  int32_t arrived;
  int64_t uses;
  const char* operation;
  uint64_t given[32];
  uint64_t taken[32];
};

ucontext_t scheduler;
ucontext_t fibers[kMaxThreads];
bool ended[kMaxThreads];
Barrier barriers[16];
Warp warps[kMaxThreads / 32];
int64_t progress;
uint32_t state = 1;
void (*body)();

void give_way() { swapcontext(&fibers[threadIdx.x], &scheduler); }

void run_thread() {
  body();
  ended[threadIdx.x] = true;
  ++progress;
  give_way();
}

}  // namespace

void fail(const char* what) {
  std::fprintf(stderr, "CTA %d, thread %d: %s\n", blockIdx.x, threadIdx.x, what);
  std::abort();
}

uint32_t random() {
  state = state * 1664525u + 1013904223u;
  return state >> 8;
}

bool barrier(int32_t id, int32_t threads, bool value) {
  Barrier& b = barriers[id];
  const int64_t use = b.uses;
  b.any |= value;
  if (++b.arrived == threads) {
    b.result = b.any;
    b.any = false;
    b.arrived = 0;
    ++b.uses;
    ++progress;
  }
  while (b.uses == use) give_way();
  return b.result;
}

const uint64_t* exchange(uint64_t value, const char* operation) {
  Warp& warp = warps[threadIdx.x / 32];
  const int64_t use = warp.uses;
  if (warp.arrived == 0) warp.operation = operation;
  if (std::strcmp(warp.operation, operation) != 0) fail("the lanes of a warp do different things together");
  warp.given[threadIdx.x % 32] = value;
  if (++warp.arrived == 32) {
    std::memcpy(warp.taken, warp.given, sizeof(warp.given));
    warp.arrived = 0;
    ++warp.uses;
    ++progress;
  }
  while (warp.uses == use) give_way();
  return warp.taken;
}

void run_cta(int32_t block, int32_t blocks, int32_t threads, uint32_t seed, void (*thread)()) {
  static std::vector<char> stacks(kMaxThreads * kStackBytes);
  std::memset(barriers, 0, sizeof(barriers));
  std::memset(warps, 0, sizeof(warps));
  std::memset(memory, 0xab, sizeof(memory));
  body = thread;
  state ^= seed;
  blockIdx.x = block;
  gridDim.x = blocks;
  blockDim.x = threads;
  for (int32_t i = 0; i < threads; ++i) {
    ended[i] = false;
    getcontext(&fibers[i]);
    fibers[i].uc_stack.ss_sp = &stacks[static_cast<size_t>(i) * kStackBytes];
    fibers[i].uc_stack.ss_size = kStackBytes;
    fibers[i].uc_link = nullptr;
    makecontext(&fibers[i], run_thread, 0);
  }
  for (int32_t left = threads; left > 0;) {
    const int64_t before = progress;
    const int32_t first = static_cast<int32_t>(random()) % (threads / 32) * 32;   // the warp that is the first to go on
    for (int32_t i = 0; i < threads; ++i) {
      threadIdx.x = (first + i) % threads;
      if (ended[threadIdx.x]) continue;
      swapcontext(&scheduler, &fibers[threadIdx.x]);
      left -= ended[threadIdx.x];
    }
    if (progress == before) fail("everybody waits");
  }
}

}  // namespace emulation

#include "attn/planning.h"

inline void __syncthreads() { emulation::barrier(0, blockDim.x, false); }
inline bool __syncthreads_or(bool value) { return emulation::barrier(0, blockDim.x, value); }

#include "device/plan.cu"
#include "plan_params.h"

namespace {

attn::PlanParams planned_params;

}  // namespace

/// As host_planner_plan (host_planner.cpp). `seed`: for the order of threads.
extern "C" int32_t device_planner_plan(const int32_t* config, void* workspace, const attn::PassedView* views, int32_t num_levels, uint32_t seed) {
  planned_params = attn::passed_params(config, workspace, views, num_levels);
  const int32_t blocks = attn::plan_ctas(planned_params);
  for (int32_t block = blocks - 1; block >= 0; --block) {
    emulation::run_cta(block, blocks, attn::plan_threads(planned_params), seed + static_cast<uint32_t>(block), [] { planned_params.seeks_forest ? plan_forest_kernel(planned_params) : plan_kernel(planned_params); });
  }
  const bool lists_rows = attn::last_level_lists_rows(planned_params);
  for (int32_t i = 0; i < attn::count_levels(planned_params); ++i) {
    const attn::Level got = planned_params.schedule.header->levels[i];
    attn::write_level(planned_params, i, !lists_rows);
    if (std::memcmp(&got, &planned_params.schedule.header->levels[i], sizeof(got)) != 0) emulation::fail("a level is not described");
  }
  for (int32_t i = 0; i < (planned_params.seeks_forest ? planned_params.levels[0].num_groups : 0); ++i) {
    const attn::Attachment& attachment = planned_params.schedule.attachments[i];
    if (attachment.leader != 0 || attachment.pages != 0) emulation::fail("a word is left for the next plan");
  }
  return lists_rows;
}
