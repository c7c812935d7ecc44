// Static shared memory: the end of the emulated.
#pragma once

#include "cuda_emulation.h"

namespace attn::ptx {

template <int kBytes>
char* static_shared() {
  emulation::static_bytes = kBytes;
  return emulation::shared_memory + emulation::shared_bytes - kBytes;
}

/// Of a cluster each CTA has a part.
inline char* own_shared(char* memory) {
  const size_t part = emulation::shared_bytes / static_cast<size_t>(emulation::cluster_size());
  return memory + static_cast<size_t>(emulation::cluster_rank()) * part;
}

}  // namespace attn::ptx
