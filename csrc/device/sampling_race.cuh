// The race that draws (csrc/include/attn/sampling.h), on a warp: which tokens could win is told by approximations, only those are evaluated.
#pragma once

#include "attn/sampling.h"
#include "device/ptx/math.cuh"
#include "device/ptx/warp.cuh"

namespace attn {

/// Where a token ends in the race. `order` is in the order of race_value().
struct alignas(16) Racer {
  uint64_t order;
  int32_t token;
  uint32_t key;       // of its value

  __device__ __forceinline__ bool beats(const Racer& other) const { return order > other.order || (order == other.order && token < other.token); }
};

/// Behind every token: order -inf.
__device__ __forceinline__ Racer nobody() { return Racer{0x000fffffffffffffull, kMaxVocab, 0}; }

template <class Weights>
__device__ __forceinline__ Racer enter_race(const Weights& weights, int64_t seed, int64_t position, int32_t token, float value) {
  const uint64_t bits = static_cast<uint64_t>(__double_as_longlong(race_value(weights.strength(value), race_bits(seed, position, token))));
  return Racer{(bits >> 63) != 0 ? ~bits : bits | 1ull << 63, token, order_key(value)};
}

__device__ __forceinline__ double value_of(const Racer& racer) {
  return __longlong_as_double(static_cast<int64_t>((racer.order >> 63) != 0 ? racer.order & ~(1ull << 63) : ~racer.order));
}

/// Puts the best of the lanes' racers into `best`, if it beats what is there.
__device__ __forceinline__ void keep_best(Racer& best, const Racer& own) {
  const uint32_t high = static_cast<uint32_t>(own.order >> 32);
  const uint32_t most_high = ptx::warp_max(high);
  const uint32_t most_low = ptx::warp_max(high == most_high ? static_cast<uint32_t>(own.order) : 0);
  const bool is_most = high == most_high && static_cast<uint32_t>(own.order) == most_low;
  const uint32_t token = ptx::warp_min(is_most ? static_cast<uint32_t>(own.token) : 0xffffffffu);
  if (is_most && static_cast<uint32_t>(own.token) == token && own.beats(best)) best = own;
  __syncwarp();
}

/// Powers of two between a value's weight and that of the reference, nearly.
__device__ __forceinline__ float approximate_rise(const LogitWeights& weights, float value) { return (value - weights.reference) * weights.scale; }
__device__ __forceinline__ float approximate_rise(const ProbWeights& weights, float value) { return ptx::lg2(value) - ptx::lg2(weights.reference); }

/// A little more than race_gain(), less 32, of bits that begin with the upper half of `word`, whose lower half is 0.
__device__ __forceinline__ float approximate_gain(uint32_t word) { return -ptx::lg2(__uint2float_rn(word)); }

/// The words of two blocks of a request's draw.
__device__ __forceinline__ void race_words(int64_t seed, int64_t position, uint32_t first, uint32_t second, uint32_t (&a)[4], uint32_t (&b)[4]) {
  set_counter(a, position, first, kDrawStream);
  set_counter(b, position, second, kDrawStream);
  PhiloxKey key(seed);
#pragma unroll 2
  for (int32_t round = 0; round < kPhiloxRounds; ++round, key.next()) {
    philox_round(key, a[0], a[1], a[2], a[3]);
    philox_round(key, b[0], b[1], b[2], b[3]);
  }
}

/// What approximations may be wrong by, where it matters.
constexpr float kRaceTolerance = 1e-4f;

}  // namespace attn
