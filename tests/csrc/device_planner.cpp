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
uint64_t now = 1;              // of this launch's first CTA when it begins, and then as it waits
uint64_t sent = 0;             // words that the others have stamped
int32_t lost_block = -1;
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

uint64_t time() { return blockIdx.x > 0 ? now + 2000 + ++sent : now += 1000; }

bool loses_mail() { return blockIdx.x == lost_block; }

/// Launches lie a millisecond apart.
void begin_launch(int32_t loses_mail_of) {
  now += 1'000'000;
  sent = 0;
  lost_block = loses_mail_of;
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

void run_cta(int32_t block, uint32_t seed) {
  emulation::run_cta(block, attn::plan_ctas(planned_params), attn::plan_threads(planned_params), seed + static_cast<uint32_t>(block),
                     [] { planned_params.seeks_forest ? plan_forest_kernel(planned_params) : plan_kernel(planned_params); });
}

}  // namespace

/// As host_planner_plan (host_planner.cpp). `seed`: for the order of threads. `searched`: what the CTAs that search for prefixes read, views of as many requests; `lost`: the CTA whose
/// words get lost, -1 for none. Returns whether the last level lists its rows.
extern "C" int32_t device_planner_plan(const int32_t* config, void* workspace, const attn::PassedView* views, int32_t num_levels, uint32_t seed, const attn::PassedView* searched,
                                       int32_t lost) {
  emulation::begin_launch(lost);
  planned_params = attn::passed_params(config, workspace, searched, num_levels);
  for (int32_t block = attn::plan_ctas(planned_params) - 1; block > 0; --block) run_cta(block, seed);
  planned_params = attn::passed_params(config, workspace, views, num_levels);
  run_cta(0, seed);
  attn::ptx::deliver_all();
  const bool lists_rows = attn::last_level_lists_rows(planned_params);
  for (int32_t i = 0; i < attn::count_levels(planned_params); ++i) {
    const attn::Level got = planned_params.schedule.header->levels[i];
    attn::write_level(planned_params, i, !lists_rows);
    if (std::memcmp(&got, &planned_params.schedule.header->levels[i], sizeof(got)) != 0) emulation::fail("a level is not described");
  }
  return lists_rows;
}
