// Threads of the executor.
//
// Tasks run on the OpenMP runtime that the process already has (torch brings one), without linking it: a second pool of
// threads would compete with that runtime's spinning workers. So torch.set_num_threads and OMP_NUM_THREADS are
// honored. A process without such a runtime gets its own small pool.
#pragma once

#include <atomic>
#include <cstdint>

#include "common/math.h"

namespace attn::cpu {

/// Runs task(context) once on each thread of the pool, the caller being one of them, and returns when all are done. May
/// be called from several threads at once and in a child after fork(). `task` must not throw.
void run_on_threads(void (*task)(void*), void* context);

/// Runs body(i) for each i in [0, count): on the caller only, or with threads taking the next index one after another.
template <class Body>
void parallel_for(int32_t count, bool use_threads, Body& body) {
  if (!use_threads || count <= 1) {
    for (int32_t i = 0; i < count; ++i) body(i);
    return;
  }
  struct Loop {
    std::atomic<int32_t> next;
    int32_t count;
    Body* body;
  } loop{{0}, count, &body};
  run_on_threads(
      [](void* context) {
        Loop& shared = *static_cast<Loop*>(context);
        for (int32_t i = shared.next.fetch_add(1, std::memory_order_relaxed); i < shared.count;
             i = shared.next.fetch_add(1, std::memory_order_relaxed)) {
          (*shared.body)(i);
        }
      },
      &loop);
}

/// Runs body(begin, end) for runs of `chunk` indices in [0, count): a thread takes one after another.
template <class Body>
void parallel_chunks(int32_t count, int32_t chunk, bool use_threads, const Body& body) {
  auto take_chunk = [&](int32_t i) { body(i * chunk, min_of(count, (i + 1) * chunk)); };
  parallel_for(ceil_div(count, chunk), use_threads, take_chunk);
}

}  // namespace attn::cpu
