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
  const uint64_t bits = static_cast<uint64_t>(__double_as_longlong(race_value(weights.strength(value), race_word(seed, position, token))));
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

/// A little more than race_gain() of the word.
__device__ __forceinline__ float approximate_gain(uint32_t word) {
  constexpr uint32_t kOne = 0x3f800000u;        // 1.0f: the word's upper bits become the mantissa
  return -ptx::lg2(__uint_as_float(__funnelshift_r(word, kOne >> 23, 9)) - 1.0f);
}

/// What approximations may be wrong by, where it matters.
constexpr float kRaceTolerance = 1e-4f;

}  // namespace attn
