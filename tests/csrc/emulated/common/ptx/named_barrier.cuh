// As csrc/common/ptx/named_barrier.cuh.
#pragma once

#include "cuda_emulation.h"

namespace attn::ptx {

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
