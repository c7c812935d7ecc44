// Registers: setmaxnreg, which moves them between the warpgroups of a CTA; numbers that are to stay in one.
#pragma once

#include "common/platform.h"

namespace attn::ptx {

/// Keeps a number that is cheap to compute: otherwise the compiler computes it again wherever it is used.
__device__ __forceinline__ void keep(uint32_t& number) { asm volatile("" : "+r"(number)); }

template <int kRegisters>
__device__ __forceinline__ void give_registers() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

template <int kRegisters>
__device__ __forceinline__ void take_registers() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

}  // namespace attn::ptx
