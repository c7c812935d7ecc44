// As csrc/common/ptx/registers.cuh: a warp waits until others have given what it takes.
#pragma once

#include <algorithm>

#include "cuda_emulation.h"

namespace attn::ptx {

inline void keep(uint32_t&) {}

/// Of a thread, as launched: what a multiprocessor has, shared by the threads of one CTA, in steps of 8.
inline int32_t launched_registers() { return std::min((64 << 10) / blockDim.x / 8 * 8, 256); }

template <int kRegisters>
void give_registers() {
  static_assert(kRegisters % 8 == 0 && kRegisters >= 24);
  emulation::exchange({}, "setmaxnreg.dec", [](const emulation::Words*) {
    if (kRegisters > launched_registers()) emulation::fail("setmaxnreg.dec to more registers than there are");
    emulation::add_registers((launched_registers() - kRegisters) * 32);
  });
}

template <int kRegisters>
void take_registers() {
  static_assert(kRegisters % 8 == 0 && kRegisters <= 256);
  emulation::exchange({}, "setmaxnreg.inc");
  if (kRegisters < launched_registers()) emulation::fail("setmaxnreg.inc to fewer registers than there are");
  if (emulated_lane() == 0) emulation::take_registers((kRegisters - launched_registers()) * 32);
  __syncwarp();
}

}  // namespace attn::ptx
