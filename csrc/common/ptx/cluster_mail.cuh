// Stores to the shared memory of another CTA of the cluster that count as they arrive: who waits for all of them needs
// no barrier of the cluster, which would wait for every store of every thread. Before Hopper there are no clusters:
// nothing is sent then.
#pragma once

#include "common/platform.h"
#include "common/ptx/global_timer.cuh"

namespace attn::ptx {

/// Where an address in this CTA's shared memory lies in the CTA of that rank.
__device__ __forceinline__ uint32_t cluster_address(uint32_t shared_address, uint32_t rank) {
  uint32_t address = shared_address;
#if __CUDA_ARCH__ >= 900
  asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(address) : "r"(shared_address), "r"(rank));
#endif
  return address;
}

/// `arrivals` announcements complete the mailbox's first phase, and all the bytes that they announce. Others may send
/// behind the cluster's next barrier.
__device__ __forceinline__ void mailbox_init(uint32_t mailbox, uint32_t arrivals) {
#if __CUDA_ARCH__ >= 900
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;\nfence.mbarrier_init.release.cluster;" ::"r"(mailbox),
               "r"(arrivals)
               : "memory");
#endif
}

/// Sends 8 bytes. Addresses are of the cluster.
__device__ __forceinline__ void mailbox_send(uint32_t mailbox, uint32_t address, uint64_t value) {
#if __CUDA_ARCH__ >= 900
  asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.b64 [%0], %1, [%2];" ::"r"(address), "l"(value),
               "r"(mailbox)
               : "memory");
#endif
}

/// Sends 16 bytes.
__device__ __forceinline__ void mailbox_send(uint32_t mailbox, uint32_t address, uint64_t low, uint64_t high) {
#if __CUDA_ARCH__ >= 900
  asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.v2.b64 [%0], {%1, %2}, [%3];" ::"r"(address),
               "l"(low), "l"(high), "r"(mailbox)
               : "memory");
#endif
}

/// Announces bytes that are sent in this phase, before or after. It orders nothing else: a release would wait for every
/// store to arrive first.
__device__ __forceinline__ void mailbox_announce(uint32_t mailbox, uint32_t bytes) {
#if __CUDA_ARCH__ >= 900
  asm volatile("mbarrier.arrive.expect_tx.relaxed.cluster.shared::cluster.b64 _, [%0], %1;" ::"r"(mailbox), "r"(bytes)
               : "memory");
#endif
}

/// Waits until all of the first phase has come to this CTA's mailbox. Returns false where it has not in ptx::kMostWait.
__device__ __forceinline__ bool mailbox_wait(uint32_t mailbox) {
  uint32_t done = 1;
#if __CUDA_ARCH__ >= 900
  const uint64_t begin = global_timer();
  do {
    asm volatile(
        "{\n"
        ".reg .pred done;\n"
        "mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 done, [%1], 0;\n"
        "selp.u32 %0, 1, 0, done;\n"
        "}"
        : "=r"(done)
        : "r"(mailbox)
        : "memory");
  } while (done == 0 && global_timer() - begin <= kMostWait);
#endif
  return done != 0;
}

}  // namespace attn::ptx
