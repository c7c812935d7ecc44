// Fibers as the threads of a CTA, or of the CTAs of a cluster. They begin by ucontext and go on by setjmp, which makes
// no system call.
#include <setjmp.h>
#include <ucontext.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <vector>

#include "cuda_emulation.h"

Dimension threadIdx{0, 0}, blockIdx{0, 0}, gridDim{1, 1}, blockDim{1, 1};

namespace emulation {
namespace {

constexpr size_t kStackBytes = 64 << 10;
constexpr int32_t kMaxThreads = 1024;

struct Barrier {
  int32_t arrived;
  int64_t uses;
  int32_t saying;
  int32_t result;
};

struct Warp {
  int32_t arrived;
  int64_t uses;
  const char* operation;
  uint64_t given[32];
  uint64_t taken[32];
};

/// What is still to come.
struct Mbarrier {
  int32_t arrivals;
  int64_t bytes;
};

struct Fiber {
  ucontext_t begin;
  jmp_buf place;
  bool begun;
  bool ended;
  int64_t cluster_use;  // of the cluster's barrier, to which it has come
};

jmp_buf scheduler;
Fiber fibers[kMaxThreads];
Barrier barriers[kMaxThreads / 32][16];  // of each CTA
Barrier cluster_barrier;
std::map<uint32_t, Mbarrier> mbarriers;
int32_t current;  // fiber
int32_t num_ctas;
Warp warps[kMaxThreads / 32];
int64_t progress;
uint32_t state = 1;
void (*body)();

__attribute__((noinline)) void give_way() {
  if (_setjmp(fibers[current].place) == 0) _longjmp(scheduler, 1);
}

/// Returns when the fiber gives way.
__attribute__((noinline)) void resume(Fiber& fiber) {
  if (_setjmp(scheduler) != 0) return;
  if (fiber.begun) _longjmp(fiber.place, 1);
  fiber.begun = true;
  setcontext(&fiber.begin);
}

void run_thread() {
  body();
  fibers[current].ended = true;
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

int32_t fiber() { return current; }
int32_t cluster_rank() { return current / blockDim.x; }
int32_t cluster_size() { return num_ctas; }

void cluster_arrive() {
  Barrier& b = cluster_barrier;
  fibers[current].cluster_use = b.uses;
  if (++b.arrived == num_ctas * blockDim.x) {
    b.arrived = 0;
    ++b.uses;
    ++progress;
  }
}

void cluster_wait() {
  while (cluster_barrier.uses == fibers[current].cluster_use) give_way();
}

void mbarrier_init(uint32_t address, int32_t arrivals) {
  if (!mbarriers.emplace(address, Mbarrier{arrivals, 0}).second) fail("an mbarrier is initialised twice");
}

void mbarrier_add(uint32_t address, int32_t arrivals, int64_t bytes) {
  const auto known = mbarriers.find(address);
  if (known == mbarriers.end()) fail("no mbarrier");
  known->second.arrivals -= arrivals;
  known->second.bytes += bytes;
  ++progress;
  if (known->second.arrivals < 0) fail("more arrivals than the mbarrier was initialised for");
}

void mbarrier_wait(uint32_t address) {
  const auto known = mbarriers.find(address);
  if (known == mbarriers.end()) fail("no mbarrier");
  while (known->second.arrivals > 0 || known->second.bytes != 0) give_way();
}

int32_t barrier(int32_t id, int32_t threads, bool value) {
  Barrier& b = barriers[cluster_rank()][id];
  const int64_t use = b.uses;
  b.saying += value ? 1 : 0;
  if (++b.arrived == threads) {
    b.result = b.saying;
    b.saying = 0;
    b.arrived = 0;
    ++b.uses;
    ++progress;
  }
  while (b.uses == use) give_way();
  return b.result;
}

const uint64_t* exchange(uint64_t value, const char* operation) {
  Warp& warp = warps[current / 32];
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

void run_cluster(int32_t ctas, int32_t threads, uint32_t seed, void (*thread)()) {
  static std::vector<char> stacks(kMaxThreads * kStackBytes);
  std::memset(barriers, 0, sizeof(barriers));
  std::memset(&cluster_barrier, 0, sizeof(cluster_barrier));
  std::memset(warps, 0, sizeof(warps));
  mbarriers.clear();
  std::memset(shared_memory, 0xab, shared_bytes);
  body = thread;
  state ^= seed;
  blockDim.x = threads;
  num_ctas = ctas;
  const int32_t all = ctas * threads;
  if (all > kMaxThreads) fail("a cluster of too many threads");
  for (int32_t i = 0; i < all; ++i) {
    Fiber& fiber = fibers[i];
    fiber.begun = fiber.ended = false;
    getcontext(&fiber.begin);
    fiber.begin.uc_stack.ss_sp = &stacks[static_cast<size_t>(i) * kStackBytes];
    fiber.begin.uc_stack.ss_size = kStackBytes;
    fiber.begin.uc_link = nullptr;
    makecontext(&fiber.begin, run_thread, 0);
  }
  for (int32_t left = all; left > 0;) {
    const int64_t before = progress;
    const int32_t first = static_cast<int32_t>(random()) % (all / 32) * 32;  // the warp that is the first to go on
    for (int32_t i = 0; i < all; ++i) {
      current = (first + i) % all;
      threadIdx.x = current % threads;
      Fiber& fiber = fibers[current];
      if (fiber.ended) continue;
      resume(fiber);
      left -= fiber.ended;
    }
    if (progress == before) fail("everybody waits");
  }
}

void run_cta(int32_t block, int32_t blocks, int32_t threads, uint32_t seed, void (*thread)()) {
  blockIdx.x = block;
  gridDim.x = blocks;
  run_cluster(1, threads, seed, thread);
}

}  // namespace emulation
