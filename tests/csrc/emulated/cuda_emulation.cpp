// Fibers as the threads of a CTA. They begin by ucontext and go on by setjmp, which makes no system call.
#include <setjmp.h>
#include <ucontext.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>
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

struct Fiber {
  ucontext_t begin;
  jmp_buf place;
  bool begun;
  bool ended;
};

jmp_buf scheduler;
Fiber fibers[kMaxThreads];
Barrier barriers[16];
Warp warps[kMaxThreads / 32];
int64_t progress;
uint32_t state = 1;
void (*body)();

__attribute__((noinline)) void give_way() {
  if (_setjmp(fibers[threadIdx.x].place) == 0) _longjmp(scheduler, 1);
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
  fibers[threadIdx.x].ended = true;
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
  std::memset(shared_memory, 0xab, shared_bytes);
  body = thread;
  state ^= seed;
  blockIdx.x = block;
  gridDim.x = blocks;
  blockDim.x = threads;
  for (int32_t i = 0; i < threads; ++i) {
    Fiber& fiber = fibers[i];
    fiber.begun = fiber.ended = false;
    getcontext(&fiber.begin);
    fiber.begin.uc_stack.ss_sp = &stacks[static_cast<size_t>(i) * kStackBytes];
    fiber.begin.uc_stack.ss_size = kStackBytes;
    fiber.begin.uc_link = nullptr;
    makecontext(&fiber.begin, run_thread, 0);
  }
  for (int32_t left = threads; left > 0;) {
    const int64_t before = progress;
    const int32_t first = static_cast<int32_t>(random()) % (threads / 32) * 32;  // the warp that is the first to go on
    for (int32_t i = 0; i < threads; ++i) {
      threadIdx.x = (first + i) % threads;
      Fiber& fiber = fibers[threadIdx.x];
      if (fiber.ended) continue;
      resume(fiber);
      left -= fiber.ended;
    }
    if (progress == before) fail("everybody waits");
  }
}

}  // namespace emulation
