// As csrc/common/ptx/barrier.cuh.
#pragma once

#include "common/ptx/copy.cuh"
#include "cuda_emulation.h"

namespace attn::ptx {

// --- mbarrier

inline void mbarrier_init(uint32_t barrier, uint32_t arrivals) {
  shared_pointer(barrier, 8);
  emulation::mbarrier_init(barrier, static_cast<int32_t>(arrivals));
}

inline void fence_mbarrier_init() {}

inline void mbarrier_arrive(uint32_t barrier, uint32_t arrivals = 1) {
  emulation::mbarrier_add(barrier, static_cast<int32_t>(arrivals), 0);
  emulation::pause();
}
inline void mbarrier_arrive_expect(uint32_t barrier, uint32_t bytes) { emulation::mbarrier_add(barrier, 1, bytes); }
inline void mbarrier_expect(uint32_t barrier, uint32_t bytes) { emulation::mbarrier_add(barrier, 0, bytes); }

inline void mbarrier_arrive_after_cp_async(uint32_t barrier) {
  Copies& copies = own_copies();
  emulation::begin_work([&copies, count = copies.all.size(), barrier] {
    copies.finish(count);
    emulation::mbarrier_add(barrier, 1, 0);
  });
}

inline bool mbarrier_test(uint32_t barrier, uint32_t parity) { return emulation::mbarrier_test(barrier, parity); }
inline void mbarrier_wait(uint32_t barrier, uint32_t parity) {
  if (emulated_lane() == 0) emulation::pause();
  emulation::mbarrier_wait(barrier, parity);
}

inline void fence_async_proxy() { emulation::fence_shared(); }

// --- bar

inline void barrier_sync(int32_t id, int32_t threads) {
  emulation::barrier(id, threads, false);
  if (emulated_lane() == 0) emulation::pause();
}

inline void barrier_arrive(int32_t id, int32_t threads) { emulation::barrier_arrive(id, threads, false); }

template <int kBarrier, int kThreads>
void barrier_sync() {
  barrier_sync(kBarrier, kThreads);
}

}  // namespace attn::ptx
