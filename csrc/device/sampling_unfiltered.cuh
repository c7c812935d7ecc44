// Rows without filters in small batches: as many CTAs read a row as give each warp a segment, and tell the row's last CTA who won among theirs. One read, one
// exchange, no cluster, which starts later and has at most sixteen CTAs; and little code, which comes from memory when the L2 is cold.
#pragma once

#include "device/ptx/mail.cuh"
#include "device/sampling_race.cuh"
#include "device/sampling_source.cuh"

namespace attn {

template <class Source>
struct UnfilteredRow {
  using Weights = typename Source::Weights;

  const SamplingParams& params;
  const Source& source;
  const int32_t row;
  const int32_t rank;       // of the CTA among the row's

  static constexpr uint32_t kArrived = 1;       // of a mail's word: it is there, though 0 everywhere else
  static constexpr uint32_t kSpoilt = 2;        // a value that no row may hold was seen

  __device__ __forceinline__ static int32_t lane() { return ptx::lane_id(); }
  __device__ __forceinline__ static int32_t warp() { return threadIdx.x / 32; }
  __device__ __forceinline__ static int32_t token(int32_t segment, int32_t i) {
    return Source::Reader::vector_token(segment, lane(), i / Source::kVectorTokens) + i % Source::kVectorTokens;
  }

  /// Replaces `best` by this lane's best of the segment, if that is better: the largest value, the first among equals.
  __device__ __forceinline__ void take_largest(int32_t segment, const float (&v)[kLaneTokens], Racer& best) const {
    float most = v[0];
    int32_t index = 0;
#pragma unroll
    for (int32_t i = 1; i < kLaneTokens; ++i) {
      if (v[i] > most) {
        most = v[i];
        index = i;
      }
    }
    const Racer own{static_cast<uint64_t>(order_key(most)) << 32, token(segment, index), order_key(most)};
    if (most > kMinusInfinity && own.beats(best)) best = own;
  }

  /// The same of the race. `v` is used up. reached: what some racer of the warp has reached, or a little less.
  __device__ __forceinline__ void race(int32_t segment, const uint32_t (&words)[kLaneTokens / 2], const Weights& weights, int64_t seed, int64_t position,
                                       float (&v)[kLaneTokens], float& reached, Racer& best) const {
#pragma unroll
    for (int32_t i = 0; i < kLaneTokens; i += 2) {
      v[i] = approximate_rise(weights, v[i]) + approximate_gain(words[i / 2] << 16);
      v[i + 1] = approximate_rise(weights, v[i + 1]) + approximate_gain(words[i / 2] & 0xffff0000u);
    }
    float most = v[0];
#pragma unroll
    for (int32_t i = 1; i < kLaneTokens; ++i) most = fmaxf(most, v[i]);
    const double level = weights.strength(weights.reference);
    // Each round evaluates every lane's best. One is enough mostly.
#pragma unroll 1
    for (int32_t round = 0; round < kLaneTokens; ++round) {
      const float bound = __double2float_rd(static_cast<double>(reached) - level) - (32.0f + kRaceTolerance);
      const bool may_win = most >= bound && most > kMinusInfinity;
      if (__ballot_sync(ptx::kAllLanes, may_win) == 0) break;
      uint32_t of_lane = kExcludedKey;
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
        const int32_t entered = token(segment, max_of(index, 0));
        const Racer own = enter_race(weights, seed, position, entered, source.one(entered));
        if (own.beats(best)) best = own;
        of_lane = order_key(__double2float_rd(value_of(own)));
      }
      reached = fmaxf(reached, key_value(ptx::warp_max(of_lane)));
    }
  }

  /// The first bits of the segment's tokens; tokens i and i + 1 share a word.
  __device__ __forceinline__ static void first_bits(int64_t seed, int64_t position, int32_t segment, uint32_t (&words)[kLaneTokens / 2]) {
    if constexpr (Source::kVectorTokens == 4) {       // a block's tokens are in two of this lane's vectors
      uint32_t a[4], b[4];
      race_words<2>(seed, position, race_block(token(segment, 0)), race_block(token(segment, 8)), a, b);
#pragma unroll
      for (int32_t w = 0; w < 4; ++w) {
        words[w] = a[w];
        words[4 + w] = b[w];
      }
    } else {                                          // in vectors of two lanes
#pragma unroll
      for (int32_t i = 0; i < kLaneTokens; i += 8) {
        uint32_t a[4], b[4];
        race_words<2>(seed, position, race_block(token(segment, i)), race_block(token(segment, i + 4)), a, b);
        const bool is_first = race_word(token(segment, i)) == 0;
        words[i / 2] = is_first ? a[0] : a[2];
        words[i / 2 + 1] = is_first ? a[1] : a[3];
        words[i / 2 + 2] = is_first ? b[0] : b[2];
        words[i / 2 + 3] = is_first ? b[1] : b[3];
      }
    }
  }

  /// The CTA's part of the row: the best of this lane's tokens, and the largest key of them, NaN's included.
  __device__ __forceinline__ Racer read(int32_t num_ctas, uint32_t& most_key) const {
    const int32_t segments = ceil_div(params.vocab, kSegmentTokens), warps = num_ctas * kSamplingWarps;
    const int32_t first = rank * kSamplingWarps + warp();
    Racer best = nobody();
    float reached = kMinusInfinity, scale = 0.0f;
    int64_t seed = 0, position = 0;
    bool greedy = true;
    most_key = 0;
#pragma unroll 1
    for (int32_t segment = first; segment < segments; segment += warps) {
      typename Source::Vector raw[Source::kVectors];
      load_segment(source, segment, lane(), raw);
      if (segment == first) {           // what does not wait for the values
        const float temperature = params.temperature[row];
        seed = params.seed[row];
        position = params.position[row];
        greedy = temperature == 0.0f;
        scale = temperature_scale(temperature);
        if (!(temperature >= 0.0f)) most_key = kInfiniteKey;
      }
      uint32_t words[kLaneTokens / 2] = {};
      if (!greedy) first_bits(seed, position, segment, words);
      float v[kLaneTokens];
      segment_values(source, raw, v);
      float most = v[0];
#pragma unroll
      for (int32_t i = 1; i < kLaneTokens; ++i) most = ptx::max_nan(most, v[i]);
      const uint32_t lane_key = order_key(most);
      most_key = max_of(most_key, lane_key);
      if (greedy) {
        take_largest(segment, v, best);
        continue;
      }
      const uint32_t key = ptx::warp_max(lane_key);
      if (key > kExcludedKey && key < kInfiniteKey) race(segment, words, Weights(key_value(key), scale), seed, position, v, reached, best);
    }
    return best;
  }

  struct Shared {
    Racer racers[kSamplingWarps];
    uint32_t most_keys[kSamplingWarps];
  };

  __device__ __forceinline__ void run(Shared& shared) const {
    const int32_t num_ctas = params.row_ctas;
    uint32_t most_key;
    {
      const Racer own = read(num_ctas, most_key);
      const Racer of_warp = best_of_warp(own);
      most_key = ptx::warp_max(most_key);
      if (lane() == 0) {
        shared.racers[warp()] = of_warp;
        shared.most_keys[warp()] = most_key;
      }
    }
    __syncthreads();
    if (warp() != 0) return;
    const bool has = lane() < kSamplingWarps;
    Racer best = best_of_warp(has ? shared.racers[lane()] : nobody());
    bool is_spoilt = ptx::warp_max(has ? shared.most_keys[lane()] : 0) >= kInfiniteKey;
    ptx::Mail* mails = static_cast<ptx::Mail*>(params.workspace) + static_cast<int64_t>(row) * (num_ctas - 1);
    if (rank + 1 < num_ctas) {
      if (lane() == 0) ptx::send(mails + rank, ptx::Mail{best.order, static_cast<uint64_t>(kArrived | (is_spoilt ? kSpoilt : 0)) << 32 | static_cast<uint32_t>(best.token)});
      return;
    }
#pragma unroll 1
    for (int32_t other = lane(); other < num_ctas - 1; other += 32) {
      ptx::Mail mail;
      do {
        mail = ptx::receive(mails + other);
      } while (mail.high == 0);
      ptx::send(mails + other, ptx::Mail{0, 0});      // for the next launch
      const Racer racer{mail.low, static_cast<int32_t>(static_cast<uint32_t>(mail.high)), 0};
      if (racer.beats(best)) best = racer;
      is_spoilt |= (mail.high >> 32 & kSpoilt) != 0;
    }
    best = best_of_warp(best);
    const bool is_valid = !__any_sync(ptx::kAllLanes, is_spoilt) && best.token < params.vocab;
    const int32_t token = is_valid ? best.token : first_allowed();
    if (lane() == 0) {
      if (params.token_ids_are_int64 != 0) static_cast<int64_t*>(params.token_ids)[row] = token;
      else static_cast<int32_t*>(params.token_ids)[row] = token;
      params.valid[row] = is_valid ? 1 : 0;
    }
  }

  /// The first token that the mask allows, or 0. For a warp.
  __device__ __forceinline__ int32_t first_allowed() const {
    uint32_t first = 0xffffffffu;
    if (params.token_mask != nullptr) {
      const uint32_t* words = params.token_mask + static_cast<int64_t>(row) * params.mask_stride;
#pragma unroll 1
      for (int32_t w = lane(); w < ceil_div(params.vocab, 32) && first == 0xffffffffu; w += 32) {
        const int32_t rest = params.vocab - 32 * w;
        const uint32_t bits = __ldg(words + w) & (rest >= 32 ? 0xffffffffu : (1u << rest) - 1);
        if (bits != 0) first = static_cast<uint32_t>(32 * w + __ffs(static_cast<int32_t>(bits)) - 1);
      }
    }
    first = ptx::warp_min(first);
    return first == 0xffffffffu ? 0 : static_cast<int32_t>(first);
  }
};

template <class Source>
__device__ __forceinline__ void sample_unfiltered(const SamplingParams& params) {
  __shared__ typename UnfilteredRow<Source>::Shared shared;
  const int32_t row = static_cast<int32_t>(blockIdx.x) / params.row_ctas;
  const Source source(params, row);
  UnfilteredRow<Source>{params, source, row, static_cast<int32_t>(blockIdx.x) - row * params.row_ctas}.run(shared);
}

}  // namespace attn
