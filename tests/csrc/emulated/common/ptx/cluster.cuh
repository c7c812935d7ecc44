// As csrc/common/ptx/cluster.cuh.
#pragma once

#include "common/ptx/shared_address.h"
#include "cuda_emulation.h"

namespace attn::ptx {

// --- clusters
//
// A row of the grid is a cluster.

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

// --- stores and copies to another CTA
//
// What is stored is seen at once; the receiver counts it.

inline uint32_t cluster_address(uint32_t shared_address, uint32_t rank) {
  if (static_cast<int32_t>(rank) >= emulation::cluster_size()) emulation::fail("no CTA of the cluster");
  const auto distance = static_cast<int32_t>(emulation::shared_bytes) / emulation::cluster_size();
  return shared_address + (static_cast<int32_t>(rank) - emulation::cluster_rank()) * distance;
}

inline void cluster_mbarrier_init(uint32_t mbarrier, uint32_t arrivals) {
  emulation::mbarrier_init(mbarrier, static_cast<int32_t>(arrivals));
}

inline void store_async(uint32_t mbarrier, uint32_t address, uint64_t value) {
  std::memcpy(shared_pointer(address, sizeof(value)), &value, sizeof(value));
  emulation::mbarrier_add(mbarrier, 0, -static_cast<int64_t>(sizeof(value)));
}

inline void store_async(uint32_t mbarrier, uint32_t address, uint64_t low, uint64_t high) {
  shared_pointer(address, 16);
  store_async(mbarrier, address, low);
  store_async(mbarrier, address + 8, high);
}

inline void cluster_mbarrier_arrive_expect(uint32_t mbarrier, uint32_t bytes) {
  emulation::mbarrier_add(mbarrier, 1, bytes);
}

inline void cluster_mbarrier_arrive(uint32_t mbarrier) {
  emulation::mbarrier_add(mbarrier, 1, 0);
  emulation::pause();
}

inline bool cluster_mbarrier_wait(uint32_t mbarrier) {
  emulation::mbarrier_wait(mbarrier, 0);
  return true;
}

/// Read and written at any time after the instruction.
inline void copy_to_cta(uint32_t target, uint32_t from, uint32_t bytes, uint32_t mbarrier) {
  if (bytes % 16 != 0) emulation::fail("a copy of no whole chunks");
  if (emulation::unfenced_writer(from, bytes) >= 0) emulation::fail("a copy of what no fence.proxy.async has followed");
  if (emulation::unfenced_writer(target, bytes) >= 0)
    emulation::fail("a copy to what no fence.proxy.async has followed");
  std::memset(shared_pointer(target, 16), emulation::kUnwritten, bytes);
  emulation::replace_shared(target, bytes);
  emulation::begin_work([=] {
    std::memcpy(shared_pointer(target, 16), shared_pointer(from, 16), bytes);
    emulation::mbarrier_add(mbarrier, 0, -static_cast<int64_t>(bytes));
  });
}

}  // namespace attn::ptx
