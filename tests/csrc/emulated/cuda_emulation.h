// As much of CUDA as the device planner uses, on a CPU: the threads of a CTA are fibers that give way to others wherever threads wait for each other, at barriers and
// at what a warp does together. A CTA that waits for ever is reported.
#pragma once

#include <cstdint>

#define __global__
#define __device__
#define __shared__
#define __grid_constant__
#define __forceinline__ inline
#define __launch_bounds__(...)
#define __align__(bytes) __attribute__((aligned(bytes)))

struct Dimension {
  int32_t x;
};
extern Dimension threadIdx, blockIdx, gridDim, blockDim;

struct int2 {
  int32_t x, y;
};
struct alignas(16) int4 {
  int32_t x, y, z, w;
};

namespace emulation {

[[noreturn]] void fail(const char* what);

/// A number that depends on the seeds of the CTAs so far.
uint32_t random();

/// The global timer, in ns: the first CTA of a launch begins before the others send anything, and waits last.
uint64_t time();

/// Whether what this CTA sends gets lost, as if it never ran.
bool loses_mail();

/// Waits for `threads` threads at barrier `id`; returns whether any of them says so.
bool barrier(int32_t id, int32_t threads, bool value);

/// Exchanges a value of each lane of the calling thread's warp: returns those of all 32. `operation`: what the lanes must agree on.
const uint64_t* exchange(uint64_t value, const char* operation);

/// Runs `thread` as each of a CTA's threads, in an order that depends on `seed`.
void run_cta(int32_t block, int32_t blocks, int32_t threads, uint32_t seed, void (*thread)());

template <class T>
const uint64_t* exchange_bits(T value, const char* operation) {
  return exchange(static_cast<uint64_t>(value), operation);
}

}  // namespace emulation

inline int32_t emulated_lane() { return threadIdx.x % 32; }

inline void __syncwarp() { emulation::exchange(0, "syncwarp"); }

inline uint32_t __ballot_sync(uint32_t, bool predicate) {
  const uint64_t* lanes = emulation::exchange(predicate, "ballot");
  uint32_t result = 0;
  for (int32_t lane = 0; lane < 32; ++lane) result |= static_cast<uint32_t>(lanes[lane]) << lane;
  return result;
}
inline bool __any_sync(uint32_t mask, bool predicate) { return __ballot_sync(mask, predicate) != 0; }
inline bool __all_sync(uint32_t mask, bool predicate) { return __ballot_sync(mask, predicate) == 0xffffffffu; }

inline uint32_t __match_any_sync(uint32_t, int32_t value) {
  const uint64_t* lanes = emulation::exchange(static_cast<uint32_t>(value), "match");
  uint32_t result = 0;
  for (int32_t lane = 0; lane < 32; ++lane) result |= static_cast<uint32_t>(lanes[lane] == static_cast<uint32_t>(value)) << lane;
  return result;
}
inline uint32_t __match_all_sync(uint32_t mask, int32_t value, int* all) {
  const uint32_t same = __match_any_sync(mask, value);
  *all = same == 0xffffffffu;
  return *all ? same : 0;
}

template <class T>
T __shfl_sync(uint32_t, T value, int32_t lane) {
  return static_cast<T>(emulation::exchange_bits(value, "shfl")[lane % 32]);
}
template <class T>
T __shfl_up_sync(uint32_t, T value, int32_t distance) {
  const uint64_t* lanes = emulation::exchange_bits(value, "shfl_up");
  return emulated_lane() >= distance ? static_cast<T>(lanes[emulated_lane() - distance]) : value;
}

inline int32_t __reduce_add_sync(uint32_t, int32_t value) {
  const uint64_t* lanes = emulation::exchange(static_cast<uint32_t>(value), "add");
  uint32_t sum = 0;
  for (int32_t lane = 0; lane < 32; ++lane) sum += static_cast<uint32_t>(lanes[lane]);
  return static_cast<int32_t>(sum);
}
inline int32_t __reduce_min_sync(uint32_t, int32_t value) {
  const uint64_t* lanes = emulation::exchange(static_cast<uint32_t>(value), "min");
  int32_t smallest = value;
  for (int32_t lane = 0; lane < 32; ++lane) {
    const int32_t of_lane = static_cast<int32_t>(lanes[lane]);
    smallest = of_lane < smallest ? of_lane : smallest;
  }
  return smallest;
}

inline int32_t __reduce_max_sync(uint32_t, int32_t value) {
  const uint64_t* lanes = emulation::exchange(static_cast<uint32_t>(value), "max");
  int32_t largest = value;
  for (int32_t lane = 0; lane < 32; ++lane) {
    const int32_t of_lane = static_cast<int32_t>(lanes[lane]);
    largest = of_lane > largest ? of_lane : largest;
  }
  return largest;
}

inline int32_t __popc(uint32_t value) { return __builtin_popcount(value); }
inline int32_t __ffs(int32_t value) { return __builtin_ffs(value); }

template <class T>
T __ldg(const T* address) {
  return *address;
}

template <class T>
T atomicExch(T* address, T value) {
  const T was = *address;
  *address = value;
  return was;
}
template <class T>
T atomicMax(T* address, T value) {
  return *address < value ? atomicExch(address, value) : *address;
}
template <class T>
T atomicOr(T* address, T value) {
  return atomicExch(address, *address | value);
}
