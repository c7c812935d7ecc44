// Fibers as the threads of a CTA, or of the CTAs of a cluster. They begin by ucontext and go on by the compiler's
// setjmp, which makes no system call and saves three registers.
#include <ucontext.h>

#include <algorithm>
#include <cstdio>
#include <cstring>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "cuda_emulation.h"

Dimension threadIdx{0, 0, 0}, blockIdx{0, 0, 0}, gridDim{1, 1, 1}, blockDim{1, 1, 1};

namespace emulation {
namespace {

constexpr size_t kStackBytes = 64 << 10;
constexpr int32_t kMaxThreads = 1024;
constexpr int32_t kMaxWarps = kMaxThreads / 32;
constexpr uint32_t kGranule = 16;  // bytes of shared memory of which one thread is the last that wrote them

struct Barrier {
  int32_t arrived;
  int32_t threads;
  int64_t uses;
  int32_t saying;
  int32_t result;
};

struct Warp {
  int32_t arrived;
  int64_t uses;
  const char* operation;
  Words words[2][32];  // of this use and the one before, which some lanes may still read
};

/// Of the phase that is not complete.
struct Mbarrier {
  int32_t arrivals_of_phase;
  int32_t arrivals;  // that are still to come
  int64_t bytes;     // that are still to come
  int64_t phase;
};

enum class Waiting { kForNothing, kAtBarrier, kForLanes, kForCluster, kAtMbarrier, kForRegisters };

using Place = void* [5];  // where a fiber goes on, of __builtin_setjmp()

struct Fiber {
  ucontext_t begin;
  Place place;
  bool begun;
  bool ended;
  int64_t cluster_use;  // of the cluster's barrier, to which it has come
  // What it waits for: that `*counter` is no longer `value`.
  Waiting waiting;
  const int64_t* counter;
  int64_t value;
  uint32_t number;                 // of the barrier
  int64_t pause_end;               // the round in which it goes on
  std::vector<uint32_t> unfenced;  // granules that it has written since its last fence
};

Place scheduler;
Fiber fibers[kMaxThreads];
Barrier barriers[kMaxWarps][16];  // of each CTA
Barrier cluster_barrier;
std::map<uint32_t, Mbarrier> mbarriers;
std::vector<std::function<void()>> works;  // under way
std::vector<uint16_t> writers;      // of each granule: 1 + the thread whose write no fence has followed yet, or 0
int64_t free_registers[kMaxWarps];  // of each CTA
int64_t rounds;                     // in which each warp that can has gone on
int32_t current;                    // fiber
int32_t num_ctas;
bool is_column_of_ctas;
bool in_fiber;
std::string failure;
Warp warps[kMaxWarps];
uint32_t state = 1;
void (*body)();

std::vector<Unit>& units() {
  static std::vector<Unit> all;
  return all;
}

// "noipa": callers must not count on registers that these functions leave alone, since others have run when they
// return.

/// A function of its own: __builtin_longjmp() goes to another one than the one that calls it.
[[noreturn]] __attribute__((noipa)) void go_to(Place& place) { __builtin_longjmp(place, 1); }

__attribute__((noipa)) void give_way() {
  if (__builtin_setjmp(fibers[current].place) == 0) go_to(scheduler);
}

/// Returns when the fiber gives way.
__attribute__((noipa)) void resume(Fiber& fiber) {
  in_fiber = true;
  if (__builtin_setjmp(scheduler) == 0) {
    if (fiber.begun) go_to(fiber.place);
    fiber.begun = true;
    setcontext(&fiber.begin);
  }
  in_fiber = false;
}

void run_thread() {
  body();
  fibers[current].ended = true;
  give_way();
}

void wait(Waiting what, const int64_t& counter, int64_t value, uint32_t number = 0) {
  Fiber& fiber = fibers[current];
  fiber.waiting = what;
  fiber.counter = &counter;
  fiber.value = value;
  fiber.number = number;
  while (counter == value) give_way();
  fiber.waiting = Waiting::kForNothing;
}

bool can_go_on(const Fiber& fiber) {
  return !fiber.ended && fiber.pause_end <= rounds &&
         (fiber.waiting == Waiting::kForNothing || *fiber.counter != fiber.value);
}

Mbarrier& mbarrier(uint32_t address) {
  const auto known = mbarriers.find(address);
  if (known == mbarriers.end()) fail("no mbarrier");
  return known->second;
}

bool has_ended(int32_t cta) {
  const int32_t first = cta * blockDim.x;
  return std::all_of(fibers + first, fibers + first + blockDim.x, [](const Fiber& fiber) { return fiber.ended; });
}

std::string described(int32_t number) {
  const Fiber& fiber = fibers[number];
  char text[200] = "";
  if (fiber.waiting == Waiting::kAtBarrier) {
    const Barrier& b = barriers[number / blockDim.x][fiber.number];
    std::snprintf(text, sizeof(text), "at barrier %u, to which %d of %d threads have come", fiber.number, b.arrived,
                  b.threads);
  } else if (fiber.waiting == Waiting::kForLanes) {
    const Warp& warp = warps[number / 32];
    std::snprintf(text, sizeof(text), "at %s, to which %d of 32 lanes have come", warp.operation, warp.arrived);
  } else if (fiber.waiting == Waiting::kForCluster) {
    std::snprintf(text, sizeof(text), "for the cluster, of which %d threads have come", cluster_barrier.arrived);
  } else if (fiber.waiting == Waiting::kAtMbarrier) {
    const Mbarrier& m = mbarriers.at(fiber.number);
    std::snprintf(text, sizeof(text), "at mbarrier %#x, whose phase %lld lacks %d of %d arrivals and %lld bytes",
                  fiber.number, static_cast<long long>(m.phase), m.arrivals, m.arrivals_of_phase,
                  static_cast<long long>(m.bytes));
  } else if (fiber.waiting == Waiting::kForRegisters) {
    std::snprintf(text, sizeof(text), "for registers, of which %lld are free",
                  static_cast<long long>(free_registers[number / blockDim.x]));
  }
  return text;
}

/// Where all threads wait.
std::string deadlock() {
  std::string text = "all threads wait:";
  const int32_t all = num_ctas * blockDim.x;
  for (int32_t first = 0, next; first < all; first = next) {
    next = first + 1;
    if (fibers[first].ended) continue;
    const std::string what = described(first);
    while (next < all && next % blockDim.x != 0 && !fibers[next].ended && described(next) == what) ++next;
    char threads[100];
    std::snprintf(threads, sizeof(threads), "\n  CTA %d, threads %d to %d: ", blockIdx.x + first / blockDim.x,
                  first % blockDim.x, (next - 1) % blockDim.x);
    text += threads + what;
  }
  return text;
}

/// Does one of the works that are under way.
void finish_some_work() {
  std::swap(works[random() % works.size()], works.back());
  const std::function<void()> work = std::move(works.back());
  works.pop_back();
  work();
}

/// Ends the pause of the thread that has waited longest. Returns whether any thread was pausing.
bool end_pause(int32_t all) {
  int64_t first = rounds;
  for (int32_t i = 0; i < all; ++i) {
    const Fiber& fiber = fibers[i];
    if (!fiber.ended && fiber.pause_end > rounds && (first == rounds || fiber.pause_end < first))
      first = fiber.pause_end;
  }
  return std::exchange(rounds, first) != first;
}

/// Lets each warp go on, or all but some of them. Returns whether any thread could.
bool run_round(int32_t all, bool leaves_some_out) {
  bool anyone = false;
  ++rounds;
  const int32_t num_warps = all / 32, first = static_cast<int32_t>(random()) % num_warps;
  for (int32_t w = 0; w < num_warps; ++w) {
    const int32_t warp = (first + w) % num_warps;
    if (leaves_some_out && random() % 4 == 0) continue;
    const int32_t first_lane = static_cast<int32_t>(random()) % 32;
    for (int32_t i = 0; i < 32; ++i) {
      Fiber& fiber = fibers[warp * 32 + (first_lane + i) % 32];
      if (!can_go_on(fiber)) continue;
      current = static_cast<int32_t>(&fiber - fibers);
      threadIdx.x = current % blockDim.x;
      if (is_column_of_ctas) blockIdx.y = cluster_rank();
      resume(fiber);
      if (!failure.empty()) throw Failure(std::exchange(failure, std::string()));
      anyone = true;
    }
  }
  return anyone;
}

}  // namespace

void fail(const char* what) {
  char where[100];
  std::snprintf(where, sizeof(where), "CTA %d, thread %d: ", blockIdx.x, threadIdx.x);
  if (!in_fiber) throw Failure(what);
  failure = std::string(where) + what;
  go_to(scheduler);
}

void set_random(uint32_t seed) { state = seed * 2654435761u + 1; }

uint32_t random() {
  state = state * 1664525u + 1013904223u;
  return state >> 8;
}

bool add_unit(Unit unit) {
  units().push_back(unit);
  return true;
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
  }
}

void cluster_wait() { wait(Waiting::kForCluster, cluster_barrier.uses, fibers[current].cluster_use); }

void pause() {
  Fiber& fiber = fibers[current];
  constexpr uint32_t kRounds = 128, kManyRounds = 4096;  // in which others multiply a few fragments, or whole tiles
  if (random() % 8 == 0) fiber.pause_end = rounds + random() % (random() % 8 == 0 ? kManyRounds : kRounds);
  while (rounds < fiber.pause_end) give_way();
}

void mbarrier_init(uint32_t address, int32_t arrivals) {
  if (!mbarriers.emplace(address, Mbarrier{arrivals, arrivals, 0, 0}).second) fail("an mbarrier is initialised twice");
}

void mbarrier_add(uint32_t address, int32_t arrivals, int64_t bytes) {
  Mbarrier& m = mbarrier(address);
  if (has_ended(static_cast<int32_t>(address / (shared_bytes / static_cast<size_t>(num_ctas)))))
    fail("an mbarrier of a CTA that has ended");
  m.arrivals -= arrivals;
  m.bytes += bytes;
  if (m.arrivals < 0) fail("more arrivals than the mbarrier was initialised for");
  if (m.arrivals == 0 && m.bytes == 0) {
    m.arrivals = m.arrivals_of_phase;
    ++m.phase;
  }
}

bool mbarrier_test(uint32_t address, uint32_t parity) { return (mbarrier(address).phase & 1) != parity; }

void mbarrier_wait(uint32_t address, uint32_t parity) {
  const Mbarrier& m = mbarrier(address);
  while ((m.phase & 1) == parity) wait(Waiting::kAtMbarrier, m.phase, m.phase, address);
}

void barrier_arrive(int32_t id, int32_t threads, bool value) {
  Barrier& b = barriers[cluster_rank()][id];
  if (b.arrived == 0) b.threads = threads;
  if (b.threads != threads || threads % 32 != 0) fail("threads come to a barrier with another number of them");
  b.saying += value ? 1 : 0;
  if (++b.arrived == threads) {
    b.result = b.saying;
    b.saying = 0;
    b.arrived = 0;
    ++b.uses;
  }
}

int32_t barrier(int32_t id, int32_t threads, bool value) {
  Barrier& b = barriers[cluster_rank()][id];
  const int64_t use = b.uses;
  barrier_arrive(id, threads, value);
  wait(Waiting::kAtBarrier, b.uses, use, static_cast<uint32_t>(id));
  return b.result;
}

const Words* exchange(const Words& given, const char* operation, void (*together)(const Words* lanes)) {
  Warp& warp = warps[current / 32];
  const int64_t use = warp.uses;
  Words* const words = warp.words[use % 2];
  if (warp.arrived == 0) warp.operation = operation;
  if (warp.operation != operation && std::strcmp(warp.operation, operation) != 0)
    fail("the lanes of a warp do different things together");
  words[threadIdx.x % 32] = given;
  if (++warp.arrived == 32) {
    if (together != nullptr) together(words);
    warp.arrived = 0;
    ++warp.uses;
  }
  wait(Waiting::kForLanes, warp.uses, use);
  return words;
}

void begin_work(std::function<void()> work) { works.push_back(std::move(work)); }

void add_registers(int32_t count) { free_registers[cluster_rank()] += count; }

void take_registers(int32_t count) {
  int64_t& of_cta = free_registers[cluster_rank()];
  while (of_cta < count) wait(Waiting::kForRegisters, of_cta, of_cta);
  of_cta -= count;
}

void wrote_shared(const void* memory, size_t bytes) {
  const auto offset = static_cast<uint32_t>(static_cast<const char*>(memory) - shared_memory);
  for (uint32_t granule = offset / kGranule; granule * kGranule < offset + bytes; ++granule) {
    const auto writer = static_cast<uint16_t>(current + 1);
    if (writers[granule] != writer) fibers[current].unfenced.push_back(granule);
    writers[granule] = writer;
  }
}

void fence_shared() {
  for (const uint32_t granule : fibers[current].unfenced) {
    if (writers[granule] == current + 1) writers[granule] = 0;
  }
  fibers[current].unfenced.clear();
}

void replace_shared(uint32_t address, size_t bytes) {
  for (uint32_t granule = address / kGranule; granule * kGranule < address + bytes; ++granule) writers[granule] = 0;
}

int32_t unfenced_writer(uint32_t address, size_t bytes) {
  for (uint32_t granule = address / kGranule; granule * kGranule < address + bytes; ++granule) {
    if (writers[granule] != 0) return writers[granule] - 1;
  }
  return -1;
}

void run_cluster(int32_t ctas, int32_t threads, uint32_t seed, void (*thread)(), bool is_column) {
  static const std::unique_ptr<char[]> stacks(new char[kMaxThreads * kStackBytes]);  // only what is used takes memory
  const int32_t all = ctas * threads;
  if (all > kMaxThreads || threads % 32 != 0) fail("a cluster of too many threads, or of no whole warps");
  std::memset(barriers, 0, sizeof(barriers));
  std::memset(&cluster_barrier, 0, sizeof(cluster_barrier));
  std::memset(warps, 0, sizeof(warps));
  mbarriers.clear();
  works.clear();
  writers.assign(shared_bytes / kGranule, 0);
  std::memset(free_registers, 0, sizeof(free_registers));
  rounds = 0;
  std::memset(shared_memory, kUnwritten, shared_bytes);
  body = thread;
  state ^= seed;
  blockDim.x = threads;
  num_ctas = ctas;
  is_column_of_ctas = is_column;
  for (const Unit& unit : units()) unit.begin();
  for (int32_t i = 0; i < all; ++i) {
    Fiber& fiber = fibers[i];
    fiber.begun = fiber.ended = false;
    fiber.waiting = Waiting::kForNothing;
    fiber.pause_end = 0;
    fiber.unfenced.clear();
    getcontext(&fiber.begin);
    fiber.begin.uc_stack.ss_sp = &stacks[static_cast<size_t>(i) * kStackBytes];
    fiber.begin.uc_stack.ss_size = kStackBytes;
    fiber.begin.uc_link = nullptr;
    makecontext(&fiber.begin, run_thread, 0);
  }
  // Work beside the threads is done now and then, or only when no thread can continue without it.
  const bool is_late = random() % 2 == 0;
  while (true) {
    if (!works.empty() && !is_late && random() % 2 == 0) finish_some_work();
    if (run_round(all, true) || run_round(all, false)) continue;
    if ((works.empty() || random() % 2 == 0) && end_pause(all)) continue;
    if (!works.empty()) {
      finish_some_work();
      continue;
    }
    bool done = true;
    for (int32_t i = 0; i < all; ++i) done &= fibers[i].ended;
    if (done) break;
    fail(deadlock().c_str());
  }
  for (const Unit& unit : units()) unit.end();
}

void run_cta(int32_t block, int32_t blocks, int32_t threads, uint32_t seed, void (*thread)()) {
  blockIdx.x = block;
  gridDim.x = blocks;
  run_cluster(1, threads, seed, thread);
}

}  // namespace emulation
