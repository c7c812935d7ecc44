// As csrc/common/ptx/warp.cuh.
#pragma once

#include <algorithm>

#include "cuda_emulation.h"

namespace attn::ptx {

// --- reductions and scans

constexpr uint32_t kAllLanes = 0xffffffffu;

inline uint32_t warp_max(uint32_t x) { return __reduce_max_sync(kAllLanes, x); }
inline uint32_t warp_min(uint32_t x) { return __reduce_min_sync(kAllLanes, x); }

inline float warp_max(float x) {
  for (int32_t step = 16; step > 0; step /= 2) x = std::fmax(x, __shfl_xor_sync(kAllLanes, x, step));
  return x;
}

inline float quad_max(float x) {
  x = std::fmax(x, __shfl_xor_sync(kAllLanes, x, 1));
  return std::fmax(x, __shfl_xor_sync(kAllLanes, x, 2));
}

inline float quad_add(float x) {
  x += __shfl_xor_sync(kAllLanes, x, 1);
  return x + __shfl_xor_sync(kAllLanes, x, 2);
}

/// Of integers and floats.
template <class T>
T warp_add(T x) {
  for (int32_t step = 16; step > 0; step /= 2) x += __shfl_xor_sync(kAllLanes, x, step);
  return x;
}

template <class T>
T warp_inclusive_sum(T x, int32_t lane) {
  for (int32_t step = 1; step < 32; step *= 2) {
    const T before = __shfl_up_sync(kAllLanes, x, step);
    x += lane >= step ? before : 0;
  }
  return x;
}

/// The larger one; NaN if either is.
inline float max_nan(float a, float b) { return a != a || b != b ? NAN : std::fmax(a, b); }

// --- special registers

inline int lane_id() { return emulated_lane(); }
inline int thread_id() { return threadIdx.x; }
inline uint32_t num_blocks() { return static_cast<uint32_t>(gridDim.x * gridDim.y); }
inline uint32_t block_id() { return static_cast<uint32_t>(blockIdx.y * gridDim.x + blockIdx.x); }

// --- global timer

inline uint64_t global_timer() { return emulation::time(); }

constexpr uint64_t kMaxWait = 4'000'000'000;

// --- registers
//
// a warp waits until others have given what it takes.

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

// --- static shared memory
//
// Static shared memory: the end of the emulated.

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
