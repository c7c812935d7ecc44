// Rows without filters in small batches: as many CTAs read a row as give each warp a segment, and tell the row's last
// CTA who won among theirs. One read, one exchange, no cluster, which starts later and has at most sixteen CTAs; and
// little code, which comes from memory when the L2 is cold.
#pragma once

#include "common/ptx/global_timer.cuh"
#include "common/ptx/mail.cuh"
#include "sampling/device/race.cuh"

namespace attn {

template <class Source>
struct UnfilteredRow {
  using Weights = typename Source::Weights;

  const SamplingParams& params;
  const Source& source;
  const int32_t row;
  const int32_t rank;  // of the CTA among the row's
  const int32_t num_ctas;

  // A mail is the order of a racer, and below its sender's sign the token. The sign tells a mail of this launch and row
  // from whatever else the slot held: the row, and the number of the row's launch, which its last CTA counts on when
  // all others have read it.
  static constexpr uint32_t kTokenBits = 20;
  static constexpr uint32_t kSpoilt = 1u << kTokenBits;  // a value that no row may hold was seen
  static constexpr uint32_t kArrived = 2u << kTokenBits;
  static constexpr int32_t kRowShift = kTokenBits + 2;
  static_assert(kMaxVocab < 1 << kTokenBits && kMostUnfilteredRows <= 1 << (32 - kRowShift),
                "a mail has room for a token and a row");

  __device__ __forceinline__ uint32_t* launch_number() const { return static_cast<uint32_t*>(params.workspace) + row; }
  __device__ __forceinline__ uint64_t sign(uint32_t launch) const {
    return static_cast<uint64_t>(launch) << 32 | static_cast<uint32_t>(row) << kRowShift | kArrived;
  }

  __device__ __forceinline__ static int32_t lane() { return ptx::lane_id(); }
  __device__ __forceinline__ static int32_t warp() { return threadIdx.x / 32; }

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
    const Racer own{static_cast<uint64_t>(order_key(most)) << 32, lane_token<Source>(segment, index), order_key(most)};
    if (most > kMinusInfinity && own.beats(best)) best = own;
  }

  /// The CTA's part of the row: the best of this lane's tokens, and whether it saw what no row may hold.
  __device__ __forceinline__ Racer read(bool& is_spoilt) const {
    const int32_t segments = ceil_div(params.vocab, kSegmentTokens), warps = num_ctas * kSamplingWarps;
    const int32_t first = rank * kSamplingWarps + warp();
    Racer best = nobody();
    uint32_t reached = kExcludedKey;
    float scale = 0.0f;
    int64_t seed = 0, position = 0;
    bool greedy = true;
    is_spoilt = false;
#pragma unroll 1
    for (int32_t segment = first; segment < segments; segment += warps) {
      typename Source::Vector raw[Source::kVectors];
      load_vectors(source, [&](int32_t j) { return Source::Reader::vector_token(segment, lane(), j); }, raw);
      if (segment == first) {  // what does not wait for the values
        const float temperature = params.temperature[row];
        seed = params.seed[row];
        position = params.position[row];
        greedy = temperature == 0.0f;
        scale = temperature_scale(temperature);
        is_spoilt = !(temperature >= 0.0f);
      }
      uint32_t words[kLaneTokens / 2] = {};
      if (!greedy) first_bits<Source, 2>(seed, position, segment, words);
      float v[kLaneTokens];
      segment_values(source, raw, v);
      float most = v[0];
#pragma unroll
      for (int32_t i = 1; i < kLaneTokens; ++i) most = ptx::max_nan(most, v[i]);
      const uint32_t lane_key = order_key(most);
      is_spoilt |= lane_key >= kInfiniteKey;
      if (greedy) {
        take_largest(segment, v, best);
        continue;
      }
      const uint32_t key = ptx::warp_max(lane_key);
      if (key > kExcludedKey && key < kInfiniteKey)
        race_segment(source, Weights(key_value(key), scale), seed, position, segment, words, v, reached, best);
    }
    return best;
  }

  __device__ __forceinline__ void run(Racer (&of_warps)[kSamplingWarps]) const {
    const uint32_t launch = warp() == 0 ? ptx::load_relaxed(launch_number()) : 0;
    bool is_spoilt;
    {
      const Racer of_warp = best_of_warp(read(is_spoilt));
      if (lane() == 0) of_warps[warp()] = of_warp;
    }
    is_spoilt = __syncthreads_or(is_spoilt) != 0;
    if (warp() != 0) return;
    Racer best = best_of_warp(lane() < kSamplingWarps ? of_warps[lane()] : nobody());
    ptx::Mail* mails = reinterpret_cast<ptx::Mail*>(static_cast<uint32_t*>(params.workspace) + kMostUnfilteredRows) +
                       static_cast<int64_t>(row) * (num_ctas - 1);
    if (rank + 1 < num_ctas) {
      if (lane() == 0)
        ptx::send(mails + rank,
                  ptx::Mail{best.order, sign(launch) | (is_spoilt ? kSpoilt : 0) | static_cast<uint32_t>(best.token)});
      return;
    }
    const uint64_t begin = ptx::global_timer();
#pragma unroll 1
    for (int32_t other = lane(); other < num_ctas - 1; other += 32) {
      ptx::Mail mail;
      bool is_there;
      do {
        mail = ptx::receive(mails + other);
        is_there = (mail.high & ~static_cast<uint64_t>(kSpoilt | (kSpoilt - 1))) == sign(launch);
      } while (!is_there && ptx::global_timer() - begin <= ptx::kMostWait);
      const Racer racer{mail.low, static_cast<int32_t>(static_cast<uint32_t>(mail.high) & (kSpoilt - 1)), 0};
      if (racer.beats(best)) best = racer;
      is_spoilt |= !is_there || (mail.high & kSpoilt) != 0;  // what does not come in time spoils the row, too
    }
    __syncwarp();  // the others of this warp still wait for theirs
    if (lane() == 0 && num_ctas > 1) ptx::store_relaxed(launch_number(), launch + 1);
    best = best_of_warp(best);
    const bool is_valid = !__any_sync(ptx::kAllLanes, is_spoilt) && best.token < params.vocab;
    const int32_t token = is_valid ? best.token : first_allowed();
    if (lane() == 0) {
      if (params.token_ids_are_int64 != 0)
        static_cast<int64_t*>(params.token_ids)[row] = token;
      else
        static_cast<int32_t*>(params.token_ids)[row] = token;
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
  __shared__ Racer of_warps[kSamplingWarps];
  const int32_t row = blockIdx.y;
  const Source source(params, row);
  UnfilteredRow<Source>{params, source, row, static_cast<int32_t>(blockIdx.x), static_cast<int32_t>(gridDim.x)}.run(
      of_warps);
}

}  // namespace attn
