// As much of CUDA as the kernels use, on a CPU: the threads of a CTA are fibers that give way to others wherever
// threads wait for each other, at barriers and at what a warp does together. A CTA that waits for ever is reported,
// with what each thread waits for.
#pragma once

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <functional>
#include <stdexcept>
#include <string>

#define __global__
#define __device__
#define __shared__
#define __grid_constant__
#define __forceinline__ inline
#define __noinline__
#define __launch_bounds__(...)
#define __align__(bytes) __attribute__((aligned(bytes)))

struct Dimension {
  int32_t x, y, z;
};
extern Dimension threadIdx, blockIdx, gridDim,
    blockDim;  // run_cta() sets x; y and z are 0 of 1 unless a program says otherwise

namespace emulation {

/// Of the program that is emulated: its CTAs' dynamic shared memory, of which nothing is left when the next one begins.
extern char* const shared_memory;
extern const size_t shared_bytes;

/// Of them the last, which a kernel has as static shared memory (csrc/common/ptx/warp.cuh).
inline size_t static_bytes = 0;

/// The calling thread has written this, in shared memory.
void wrote_shared(const void* memory, size_t bytes);

/// A vector that several threads may write to shared memory. (Assignments are the only way by which kernels do that
/// themselves to what TMA or wgmma reads.)
template <class T>
void assign(T* to, const T& from) {
  std::memcpy(static_cast<void*>(to), &from, sizeof(T));
  if (static_cast<size_t>(reinterpret_cast<char*>(to) - shared_memory) < shared_bytes) wrote_shared(to, sizeof(T));
}

}  // namespace emulation

struct int2 {
  int32_t x, y;
};
struct alignas(16) int4 {
  int32_t x, y, z, w;
};
struct alignas(16) longlong2 {
  long long x, y;
};
struct alignas(8) uint2 {
  uint32_t x, y;
  uint2& operator=(const uint2& other) { return emulation::assign(this, other), *this; }
};
struct alignas(16) uint4 {
  uint32_t x, y, z, w;
  uint4& operator=(const uint4& other) { return emulation::assign(this, other), *this; }
};
struct alignas(8) float2 {
  float x, y;
  float2& operator=(const float2& other) { return emulation::assign(this, other), *this; }
};
struct alignas(16) float4 {
  float x, y, z, w;
  float4& operator=(const float4& other) { return emulation::assign(this, other), *this; }
};
inline uint2 make_uint2(uint32_t x, uint32_t y) { return {x, y}; }
inline uint4 make_uint4(uint32_t x, uint32_t y, uint32_t z, uint32_t w) { return {x, y, z, w}; }
inline float2 make_float2(float x, float y) { return {x, y}; }
inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }

namespace emulation {

/// What fail() throws, out of run_cta() and run_cluster().
struct Failure : std::runtime_error {
  using std::runtime_error::runtime_error;
};

[[noreturn]] void fail(const char* what);

/// Every byte of shared memory that a CTA has not written: as part of a floating-point number, NaN.
constexpr char kUnwritten = '\xff';

/// What follows depends on the seed alone.
void set_random(uint32_t seed);

/// A number that depends on the seeds of the CTAs so far.
uint32_t random();

/// The global timer, in ns: it moves whenever it is read.
uint64_t time();

/// Whether what this CTA sends gets lost, as if it never ran.
bool loses_messages();

/// Something that an instruction keeps for the CTAs that run. `begin` is called before they do, `end` afterwards: it
/// fails if something is still under way.
struct Unit {
  void (*begin)();
  void (*end)();
};
bool add_unit(Unit unit);

/// Waits for `threads` threads at barrier `id`; returns how many of them say so.
int32_t barrier(int32_t id, int32_t threads, bool value);
/// Counts as a thread that has come, but does not wait.
void barrier_arrive(int32_t id, int32_t threads, bool value);

struct Words {
  uint64_t word[4];
};

/// Exchanges words of each lane of the calling thread's warp: returns those of all 32, which stay until the lane's next
/// exchange. `operation`: what the lanes must agree on. `together`: done once, before any lane goes on.
const Words* exchange(const Words& given, const char* operation, void (*together)(const Words* lanes) = nullptr);

/// Of the running thread: its number, in its cluster; of its CTA, that of its cluster's CTAs.
int32_t fiber();
int32_t cluster_rank();
int32_t cluster_size();

/// The halves of a barrier of the cluster.
void cluster_arrive();
void cluster_wait();

/// The mbarriers at these addresses of shared memory. A phase is complete when all arrivals have come, and as many
/// bytes as were expected.
void mbarrier_init(uint32_t address, int32_t arrivals);
void mbarrier_add(uint32_t address, int32_t arrivals, int64_t bytes);
/// Whether the phase of this parity is complete: the one before the present one has the other parity.
bool mbarrier_test(uint32_t address, uint32_t parity);
void mbarrier_wait(uint32_t address, uint32_t parity);

/// Lets the others go on for a while, now and then: where a thread that is late may find that something has changed.
void pause();

/// Begins what goes on beside the threads. It is done in any order, at any time, perhaps only when all threads wait.
void begin_work(std::function<void()> work);

/// Registers that warps have given to their CTA.
void add_registers(int32_t count);
void take_registers(int32_t count);

/// What threads write to shared memory is read by TMA and wgmma (the async proxy) only after a fence of the thread
/// that wrote it. unfenced_writer(): one that has written some of these bytes and not fenced them, or -1.
/// replace_shared(): TMA or cp.async writes them.
void fence_shared();
int32_t unfenced_writer(uint32_t address, size_t bytes);
void replace_shared(uint32_t address, size_t bytes);

/// Runs `thread` as each thread of a cluster, in an order that depends on `seed`. Each CTA has a part of shared memory.
/// is_column: the CTAs differ in blockIdx.y, from 0 on.
void run_cluster(int32_t ctas, int32_t threads, uint32_t seed, void (*thread)(), bool is_column = false);

/// Runs `thread` as each of a CTA's threads, in an order that depends on `seed`.
void run_cta(int32_t block, int32_t blocks, int32_t threads, uint32_t seed, void (*thread)());

/// Calls run(), with random numbers that follow from `seed`. Returns what failed, until the next call, or nullptr.
template <class Run>
const char* failure_of(uint32_t seed, const Run& run) {
  static std::string what;
  set_random(seed);
  try {
    run();
  } catch (const Failure& failure) {
    what = failure.what();
    return what.c_str();
  }
  return nullptr;
}

template <class T>
uint64_t to_bits(T value) {
  static_assert(sizeof(T) <= sizeof(uint64_t));
  uint64_t bits = 0;
  std::memcpy(&bits, &value, sizeof(T));
  return bits;
}

template <class T>
T from_bits(uint64_t bits) {
  T value;
  std::memcpy(&value, &bits, sizeof(T));
  return value;
}

/// Of each lane of the warp: a value of at most 8 bytes.
template <class T>
class Lanes {
 public:
  Lanes(T value, const char* operation) : words_(exchange(Words{{to_bits(value)}}, operation)) {}
  T operator[](int32_t lane) const { return from_bits<T>(words_[lane].word[0]); }

 private:
  const Words* words_;
};

}  // namespace emulation

inline void __syncthreads() { emulation::barrier(0, blockDim.x, false); }
inline bool __syncthreads_or(bool value) { return emulation::barrier(0, blockDim.x, value) != 0; }
inline bool __syncthreads_and(bool value) { return emulation::barrier(0, blockDim.x, !value) == 0; }
inline int32_t __syncthreads_count(bool value) { return emulation::barrier(0, blockDim.x, value); }

inline int32_t emulated_lane() { return threadIdx.x % 32; }

inline void __syncwarp() { emulation::exchange({}, "syncwarp"); }

inline uint32_t __ballot_sync(uint32_t, bool predicate) {
  const emulation::Lanes<bool> lanes(predicate, "ballot");
  uint32_t result = 0;
  for (int32_t lane = 0; lane < 32; ++lane) result |= static_cast<uint32_t>(lanes[lane]) << lane;
  return result;
}
inline bool __any_sync(uint32_t mask, bool predicate) { return __ballot_sync(mask, predicate) != 0; }
inline bool __all_sync(uint32_t mask, bool predicate) { return __ballot_sync(mask, predicate) == 0xffffffffu; }

inline uint32_t __match_any_sync(uint32_t, int32_t value) {
  const emulation::Lanes<int32_t> lanes(value, "match");
  uint32_t result = 0;
  for (int32_t lane = 0; lane < 32; ++lane) result |= static_cast<uint32_t>(lanes[lane] == value) << lane;
  return result;
}
inline uint32_t __match_all_sync(uint32_t mask, int32_t value, int* all) {
  const uint32_t same = __match_any_sync(mask, value);
  *all = same == 0xffffffffu;
  return *all ? same : 0;
}

template <class T>
T __shfl_sync(uint32_t, T value, int32_t lane) {
  return emulation::Lanes<T>(value, "shfl")[lane % 32];
}
template <class T>
T __shfl_up_sync(uint32_t, T value, int32_t distance) {
  const emulation::Lanes<T> lanes(value, "shfl_up");
  return emulated_lane() >= distance ? lanes[emulated_lane() - distance] : value;
}
template <class T>
T __shfl_xor_sync(uint32_t, T value, int32_t mask) {
  return emulation::Lanes<T>(value, "shfl_xor")[emulated_lane() ^ mask];
}

inline int32_t __reduce_add_sync(uint32_t, int32_t value) {
  const emulation::Lanes<uint32_t> lanes(static_cast<uint32_t>(value), "add");
  uint32_t sum = 0;
  for (int32_t lane = 0; lane < 32; ++lane) sum += lanes[lane];
  return static_cast<int32_t>(sum);
}
template <class T>
T __reduce_min_sync(uint32_t, T value) {
  const emulation::Lanes<T> lanes(value, "min");
  T smallest = value;
  for (int32_t lane = 0; lane < 32; ++lane) smallest = lanes[lane] < smallest ? lanes[lane] : smallest;
  return smallest;
}
template <class T>
T __reduce_max_sync(uint32_t, T value) {
  const emulation::Lanes<T> lanes(value, "max");
  T largest = value;
  for (int32_t lane = 0; lane < 32; ++lane) largest = largest < lanes[lane] ? lanes[lane] : largest;
  return largest;
}

inline uint32_t __reduce_add_sync(uint32_t mask, uint32_t value) {
  return static_cast<uint32_t>(__reduce_add_sync(mask, static_cast<int32_t>(value)));
}

inline int32_t __clz(int32_t value) { return value == 0 ? 32 : __builtin_clz(static_cast<uint32_t>(value)); }
inline int32_t __popc(uint32_t value) { return __builtin_popcount(value); }
inline uint32_t __brev(uint32_t value) {
  uint32_t reversed = 0;
  for (int32_t bit = 0; bit < 32; ++bit) reversed |= (value >> bit & 1u) << (31 - bit);
  return reversed;
}
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
template <class T, class Value>
T atomicAdd(T* address, Value value) {
  return atomicExch(address, *address + static_cast<T>(value));
}
template <class T>
T atomicAdd(T* address, T value) {
  return atomicExch(address, static_cast<T>(*address + value));
}
inline uint32_t atomicInc(uint32_t* address, uint32_t most) {
  return atomicExch(address, *address >= most ? 0u : *address + 1);
}
template <class T>
T atomicMax(T* address, T value) {
  return *address < value ? atomicExch(address, value) : *address;
}
template <class T, class Bits>
T atomicOr(T* address, Bits value) {
  return atomicExch(address, *address | static_cast<T>(value));
}

inline float __uint_as_float(uint32_t bits) { return emulation::from_bits<float>(bits); }
inline uint32_t __float_as_uint(float x) { return static_cast<uint32_t>(emulation::to_bits(x)); }
inline int32_t __float2int_rn(float x) {
  if (x != x) return 0;
  return x >= 0x1p31f ? INT32_MAX : x < -0x1p31f ? INT32_MIN : static_cast<int32_t>(std::nearbyint(x));
}
inline int64_t __double_as_longlong(double x) { return static_cast<int64_t>(emulation::to_bits(x)); }
inline double __longlong_as_double(int64_t bits) { return emulation::from_bits<double>(static_cast<uint64_t>(bits)); }
inline float __uint2float_rn(uint32_t x) { return static_cast<float>(x); }
inline float __double2float_rd(double x) {
  const float nearest = static_cast<float>(x);
  return nearest > x ? std::nextafter(nearest, -HUGE_VALF) : nearest;
}
inline uint32_t __byte_perm(uint32_t low, uint32_t high, uint32_t selector) {
  const uint64_t both = static_cast<uint64_t>(high) << 32 | low;
  uint32_t result = 0;
  for (int32_t i = 0; i < 4; ++i) result |= static_cast<uint32_t>(both >> (selector >> 4 * i & 7) * 8 & 0xff) << 8 * i;
  return result;
}
inline float __int_as_float(uint32_t bits) { return emulation::from_bits<float>(bits); }
inline float __fdividef(float x, float y) { return x / y; }
inline float rsqrtf(float x) { return 1.0f / std::sqrt(x); }
inline float __fadd_rn(float x, float y) { return x + y; }
inline float __fmul_rn(float x, float y) { return x * y; }
inline float __fmaf_rn(float x, float y, float z) { return std::fma(x, y, z); }
