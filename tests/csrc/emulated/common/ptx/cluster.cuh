// As csrc/common/ptx/cluster.cuh. A row of the grid is a cluster.
#pragma once

#include "cuda_emulation.h"

namespace attn::ptx {

inline uint32_t cluster_rank() { return emulation::cluster_rank(); }
inline uint32_t cluster_size() { return emulation::cluster_size(); }
inline uint32_t cluster_id() { return blockIdx.y; }
inline void cluster_arrive() { emulation::cluster_arrive(); }
inline void cluster_wait() { emulation::cluster_wait(); }
inline void cluster_sync() {
  cluster_arrive();
  cluster_wait();
}

template <class T>
T* cluster_pointer(T* pointer, uint32_t rank) {
  if (static_cast<int32_t>(rank) >= emulation::cluster_size()) emulation::fail("no CTA of the cluster");
  const auto distance = static_cast<ptrdiff_t>(emulation::shared_bytes) / emulation::cluster_size();
  return reinterpret_cast<T*>(reinterpret_cast<uintptr_t>(pointer) +
                              (static_cast<int32_t>(rank) - emulation::cluster_rank()) * distance);
}

}  // namespace attn::ptx
