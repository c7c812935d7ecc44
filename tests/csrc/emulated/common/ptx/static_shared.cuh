// Static shared memory: the end of the emulated.
#pragma once

#include "cuda_emulation.h"

namespace attn::ptx {

template <int kBytes>
char* static_shared() {
  emulation::static_bytes = kBytes;
  return emulation::shared_memory + emulation::shared_bytes - kBytes;
}

}  // namespace attn::ptx
