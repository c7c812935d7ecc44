// The race that draws (csrc/sampling/sampling.h), on a warp. Approximations find the tokens that could win; only these
// are evaluated.
#pragma once

#include "common/ptx/math.cuh"
#include "common/ptx/warp.cuh"
#include "sampling/device/source.cuh"
#include "sampling/sampling.h"

namespace attn {

/// What approximations may be wrong by, where it matters.
constexpr float kRaceTolerance = 1e-4f;

/// Where a token ends in the race. `order` is in the order of race_value().
struct alignas(16) Racer {
  uint64_t order;
  int32_t token;
  uint32_t key;  // of its value

  __device__ __forceinline__ bool beats(const Racer& other) const {
    return order > other.order || (order == other.order && token < other.token);
  }
};

/// A racer that loses to every token: its order is -inf.
__device__ __forceinline__ Racer no_racer() { return Racer{0x000fffffffffffffull, kMaxVocab, 0}; }

/// Philox of two counters, in place.
template <int32_t kUnrolled>
__device__ __forceinline__ void philox_pair(int64_t seed, uint32_t (&a)[4], uint32_t (&b)[4]) {
  PhiloxKey key(seed);
#pragma unroll kUnrolled
  for (int32_t round = 0; round < kPhiloxRounds; ++round, key.next()) {
    philox_round(key, a[0], a[1], a[2], a[3]);
    philox_round(key, b[0], b[1], b[2], b[3]);
  }
}

/// kUnrolled: rounds of Philox that are written out. All of them is faster and more code.
template <int32_t kUnrolled = 1, class Weights>
__device__ __forceinline__ Racer enter_race(const Weights& weights, int64_t seed, int64_t position, int32_t token,
                                            float value) {
  uint32_t block[4], tail[4];
  set_counter(block, position, race_block(token), kDrawStream);
  set_counter(tail, position, static_cast<uint32_t>(token), kDrawTailStream);
  philox_pair<kUnrolled>(seed, block, tail);
  const uint32_t which = race_word(token);
  const uint32_t word = which == 0 ? block[0] : which == 1 ? block[1] : which == 2 ? block[2] : block[3];
  const uint64_t random = static_cast<uint64_t>(race_half(word, token)) << kRaceTailBits | tail[0];
  const uint64_t bits = static_cast<uint64_t>(__double_as_longlong(race_value(weights.strength(value), random)));
  return Racer{(bits >> 63) != 0 ? ~bits : bits | 1ull << 63, token, order_key(value)};
}

__device__ __forceinline__ double value_of(const Racer& racer) {
  return __longlong_as_double(
      static_cast<int64_t>((racer.order >> 63) != 0 ? racer.order & ~(1ull << 63) : ~racer.order));
}

/// The best of the lanes' racers, in all lanes. Mostly the upper halves of their orders tell: a reduction of a warp
/// costs some hundred cycles.
__device__ __forceinline__ Racer best_of_warp(const Racer& own) {
  const uint32_t high = static_cast<uint32_t>(own.order >> 32), low = static_cast<uint32_t>(own.order);
  uint32_t best = __ballot_sync(ptx::kAllLanes, high == ptx::warp_max(high));
  if ((best & (best - 1)) != 0) {
    const uint32_t lane_low = (best >> ptx::lane_id() & 1) != 0 ? low : 0;
    const uint32_t token = lane_low == ptx::warp_max(lane_low) && (best >> ptx::lane_id() & 1) != 0
                               ? static_cast<uint32_t>(own.token)
                               : 0xffffffffu;
    best = __ballot_sync(ptx::kAllLanes, token == ptx::warp_min(token));
  }
  const int32_t lane = __ffs(static_cast<int32_t>(best)) - 1;
  return Racer{__shfl_sync(ptx::kAllLanes, own.order, lane), __shfl_sync(ptx::kAllLanes, own.token, lane),
               __shfl_sync(ptx::kAllLanes, own.key, lane)};
}

/// What values weigh relative to the reference, to within a factor of 2^error.
template <class Weights>
struct ApproximateShare;

template <>
struct ApproximateShare<LogitWeights> {
  float scale, offset, error;

  __device__ __forceinline__ explicit ApproximateShare(const LogitWeights& weights)
      : scale(weights.scale),
        offset(-weights.reference * weights.scale),
        error(fused_multiply_add(fabsf(offset), 2.4e-7f, kRaceTolerance)) {}

  /// How many powers of two something of this strength is above the reference.
  __device__ __forceinline__ float above_reference(float strength) const { return strength + offset; }

  /// Powers of two between a value's weight and the reference's weight.
  __device__ __forceinline__ static float rise(const LogitWeights& weights, float logit) {
    return (logit - weights.reference) * weights.scale;
  }

  __device__ __forceinline__ float operator()(float logit) const {
    return ptx::ex2(fused_multiply_add(logit, scale, offset));
  }
};

template <>
struct ApproximateShare<ProbWeights> {
  float scale, offset, error;

  __device__ __forceinline__ explicit ApproximateShare(const ProbWeights& weights)
      : scale(1.0f / weights.reference), offset(-ptx::lg2(weights.reference)), error(kRaceTolerance) {}

  __device__ __forceinline__ float above_reference(float strength) const { return strength + offset; }

  __device__ __forceinline__ static float rise(const ProbWeights& weights, float prob) {
    return ptx::lg2(prob) - ptx::lg2(weights.reference);
  }

  __device__ __forceinline__ float operator()(float prob) const { return fmaxf(prob * scale, 0.0f); }
};

/// A little more than race_gain(), less 32, of bits that begin with the upper half of `word`, whose lower half is 0.
__device__ __forceinline__ float approximate_gain(uint32_t word) { return -ptx::lg2(__uint2float_rn(word)); }

/// The first bits of what this lane has of a segment; tokens i and i + 1 share a word.
template <class Source>
__device__ __forceinline__ void first_bits(int64_t seed, int64_t position, int32_t segment,
                                           uint32_t (&words)[kLaneTokens / 2]) {
  constexpr int32_t kUnrolled = Source::kVectorTokens == 4 ? kPhiloxRounds : 2;
#pragma unroll
  for (int32_t i = 0; i < kLaneTokens; i += Source::kVectorTokens == 4 ? kLaneTokens : 8) {
    uint32_t a[4], b[4];
    const int32_t next = i + (Source::kVectorTokens == 4 ? 8 : 4);
    set_counter(a, position, race_block(lane_token<Source>(segment, i)), kDrawStream);
    set_counter(b, position, race_block(lane_token<Source>(segment, next)), kDrawStream);
    philox_pair<kUnrolled>(seed, a, b);
    if constexpr (Source::kVectorTokens == 4) {  // a block's tokens are in two of this lane's vectors
#pragma unroll
      for (int32_t w = 0; w < 4; ++w) {
        words[w] = a[w];
        words[4 + w] = b[w];
      }
    } else {  // in vectors of two lanes
      const bool is_first = race_word(lane_token<Source>(segment, i)) == 0;
      words[i / 2] = is_first ? a[0] : a[2];
      words[i / 2 + 1] = is_first ? a[1] : a[3];
      words[i / 2 + 2] = is_first ? b[0] : b[2];
      words[i / 2 + 3] = is_first ? b[1] : b[3];
    }
  }
}

/// The sign bit is set if a token has lost for sure, that is if its first bits, a half of `word`, are more than share *
/// most. `magic` is the upper half of 2^23, in whose low bits integers stand: in a register, as PRMT has no room for
/// two constants.
template <bool kUpper>
__device__ __forceinline__ uint32_t has_lost(float share, float most, uint32_t word, uint32_t magic) {
  const float bits = __uint_as_float(__byte_perm(word, magic, kUpper ? 0x5432 : 0x5410));
  return __float_as_uint(fused_multiply_add(share, most, 8388608.0f) - bits);
}

/// A race's data that the warps of a CTA share.
struct RaceBoard {
  uint32_t reached;  // order_key() of what some racer has reached, or a little less
  uint32_t magic;    // 0x4b00, see has_lost()
  bool is_invalid;   // the row holds an invalid value, or a parameter

  __device__ __forceinline__ void reset(bool is_valid) {
    reached = kExcludedKey;
    magic = 0x4b00;
    is_invalid = !is_valid;
  }
};

/// The race of a warp's segment: evaluates what could win, and replaces `best` by this lane's best, if that is better.
/// words: of first_bits(). v: the segment's values, used up. The weights' reference: the segment's largest value.
template <class Source>
__device__ __forceinline__ void race_segment(const Source& source, const typename Source::Weights& weights,
                                             int64_t seed, int64_t position, int32_t segment,
                                             const uint32_t (&words)[kLaneTokens / 2], float (&v)[kLaneTokens],
                                             RaceBoard& board, Racer& best) {
  uint32_t known = 0;
  if (ptx::lane_id() == 0) known = atomicMax(&board.reached, 0u);
  known = __shfl_sync(ptx::kAllLanes, known, 0);
  const ApproximateShare<typename Source::Weights> share(weights);
  if (known > kExcludedKey && share.error < 1.0f) {  // most segments have no token that could win
    const float most_bits = ptx::ex2(16.0f + share.error - share.above_reference(key_value(known)));
    const uint32_t magic = board.magic;
    uint32_t lost = 0xffffffffu;
#pragma unroll
    for (int32_t i = 0; i < kLaneTokens; i += 2)
      lost &= has_lost<false>(share(v[i]), most_bits, words[i / 2], magic) &
              has_lost<true>(share(v[i + 1]), most_bits, words[i / 2], magic);
    if (!__any_sync(ptx::kAllLanes, (lost >> 31) == 0)) return;
  }
#pragma unroll
  for (int32_t i = 0; i < kLaneTokens; i += 2) {
    v[i] = share.rise(weights, v[i]) + approximate_gain(words[i / 2] << 16);
    v[i + 1] = share.rise(weights, v[i + 1]) + approximate_gain(words[i / 2] & 0xffff0000u);
  }
  float most = v[0];
#pragma unroll
  for (int32_t i = 1; i < kLaneTokens; ++i) most = fmaxf(most, v[i]);
  const double level = weights.strength(weights.reference);
  uint32_t reached = known;
  // Each round evaluates every lane's best. One is enough mostly.
#pragma unroll 1
  for (int32_t round = 0; round < kLaneTokens; ++round) {
    const float bound = __double2float_rd(static_cast<double>(key_value(reached)) - level) - (32.0f + kRaceTolerance);
    const bool may_win = most >= bound && most > kMinusInfinity;
    if (__ballot_sync(ptx::kAllLanes, may_win) == 0) break;
    uint32_t lane_key = kExcludedKey;
    if (may_win) {
      int32_t index = -1;
      float rest = kMinusInfinity;
#pragma unroll
      for (int32_t i = 0; i < kLaneTokens; ++i) {
        const bool is_it = index < 0 && v[i] == most;
        index = is_it ? i : index;
        v[i] = is_it ? kMinusInfinity : v[i];
        rest = fmaxf(rest, v[i]);
      }
      most = rest;
      const int32_t entered = lane_token<Source>(segment, max_of(index, 0));
      const Racer own = enter_race(weights, seed, position, entered, source.one(entered));
      if (own.beats(best)) best = own;
      lane_key = order_key(__double2float_rd(value_of(own)));
    }
    reached = max_of(reached, ptx::warp_max(lane_key));
  }
  if (ptx::lane_id() == 0 && reached > known) atomicMax(&board.reached, reached);
}

/// Replaces `best` by this lane's largest of the segment, if that is better; the first one among equals.
template <class Source>
__device__ __forceinline__ void take_largest(int32_t segment, const float (&v)[kLaneTokens], Racer& best) {
  float most = v[0];
  int32_t index = 0;
#pragma unroll
  for (int32_t i = 1; i < kLaneTokens; ++i) {
    if (v[i] > most) {
      most = v[i];
      index = i;
    }
  }
  const Racer own{static_cast<uint64_t>(order_key(most)) << 32, lane_token<Source>(segment, index), order_key(most)};
  if (most > kMinusInfinity && own.beats(best)) best = own;
}

/// The parameters of a row's draw.
struct Draw {
  float scale, floor;  // of LogitWeights
  int64_t seed, position;
  bool greedy;
};

/// Every token that can be drawn races.
struct Everything {
  static constexpr bool kHasLeast = false;
  __device__ __forceinline__ float least() const { return kMinusInfinity; }
  __device__ __forceinline__ void look(const float (&)[kLaneTokens]) const {}
};

/// Tokens with values from `from` on race.
struct Survivors {
  static constexpr bool kHasLeast = true;
  float from;
  __device__ __forceinline__ float least() const { return from; }
  __device__ __forceinline__ void look(const float (&)[kLaneTokens]) const {}
};

/// The race of what a CTA reads. `best`: this lane's, set; in memory where registers are short. racing.look() sees all
/// values, those below racing.least() do not race. After board.reset() and a barrier.
template <class Source, class Racing>
__device__ __forceinline__ void race_row(const SegmentReader<Source>& reader, const Draw& draw, RaceBoard& board,
                                         const Racing& racing, Racer& best) {
  using Weights = typename Source::Weights;
  best = no_racer();
  uint32_t words[kLaneTokens / 2] = {};
  reader.for_each(
      [&](int32_t segment) {
        if (!draw.greedy) first_bits<Source>(draw.seed, draw.position, segment, words);
      },
      [&](int32_t segment, float (&v)[kLaneTokens]) {
        const uint32_t lane_key = lane_max_key(v);
        if (lane_key >= kInfiniteKey) board.is_invalid = true;
        racing.look(v);
        if (draw.greedy) {
          take_largest<Source>(segment, v, best);
          return;
        }
        const uint32_t key = ptx::warp_max(lane_key);
        if (!is_drawable(key) || key_value(key) < racing.least()) return;
        if constexpr (Racing::kHasLeast) {
#pragma unroll
          for (int32_t i = 0; i < kLaneTokens; ++i) v[i] = v[i] >= racing.least() ? v[i] : kMinusInfinity;
        }
        race_segment(reader.source, Weights(key_value(key), draw.scale, draw.floor), draw.seed, draw.position, segment,
                     words, v, board, best);
      });
}

}  // namespace attn
