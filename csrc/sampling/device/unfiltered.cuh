// Rows without filters: some CTAs read a row, and each tells the row's last one which of its tokens won. One read, one
// exchange, no cluster, which starts later and has at most sixteen CTAs; and little code, which comes from memory when
// the L2 is cold.
#pragma once

#include "common/launch_number.cuh"
#include "common/ptx/message.cuh"
#include "common/ptx/warp.cuh"
#include "sampling/device/race.cuh"

namespace attn {

struct UnfilteredShared {
  alignas(16) uint4 staged[2][4][kSamplingThreads];
  Racer lane_racers[kSamplingThreads];  // registers are short
  Racer warp_racers[kSamplingWarps];
  Draw draw;
  RaceBoard board;
};

template <class Source>
struct UnfilteredRow {
  const SamplingParams& params;
  const Source& source;
  UnfilteredShared& shared;
  const int32_t row;
  const int32_t rank;  // of the CTA among the row's
  const int32_t num_ctas;

  // A message holds the order of a racer, a tag, and below the tag the token. The tag is the number of the row's launch
  // and the row, so the receiver ignores everything else that the slot may hold.
  static constexpr uint32_t kTokenBits = 20;
  static constexpr uint32_t kInvalid = 1u << kTokenBits;  // the row holds an invalid value
  static constexpr uint32_t kArrived = 2u << kTokenBits;
  static constexpr int32_t kRowShift = kTokenBits + 2;
  static_assert(kMaxVocab < 1 << kTokenBits && kMaxSharedRows <= 1 << (32 - kRowShift),
                "a message has room for a token and a row");

  __device__ __forceinline__ LaunchNumber launch() const {
    return LaunchNumber{static_cast<uint32_t*>(params.workspace) + row};
  }
  __device__ __forceinline__ uint64_t tag(uint32_t number) const {
    return static_cast<uint64_t>(number) << 32 | static_cast<uint32_t>(row) << kRowShift | kArrived;
  }
  __device__ __forceinline__ ptx::Message* messages() const {
    return reinterpret_cast<ptx::Message*>(static_cast<uint32_t*>(params.workspace) + kMaxSharedRows) +
           static_cast<int64_t>(row) * (num_ctas - 1);
  }

  /// Receives the best racers of the other CTAs. Each lane of a warp has its share of them. Sets is_invalid if a
  /// message does not arrive in time.
  __device__ __forceinline__ void receive(uint32_t number, Racer& best, bool& is_invalid) const {
    const uint64_t begin = ptx::global_timer();
    bool has_all_messages = true;
#pragma unroll 1
    for (int32_t other = ptx::lane_id(); other < num_ctas - 1; other += 32) {
      ptx::Message message;
      bool has_arrived;
      do {
        message = ptx::receive(messages() + other);
        has_arrived = (message.high & ~static_cast<uint64_t>(kInvalid | (kInvalid - 1))) == tag(number);
      } while (!has_arrived && ptx::global_timer() - begin <= ptx::kMaxWait);
      const Racer racer{message.low, static_cast<int32_t>(static_cast<uint32_t>(message.high) & (kInvalid - 1)), 0};
      if (racer.beats(best)) best = racer;
      has_all_messages &= has_arrived;
      is_invalid |= !has_arrived || (message.high & kInvalid) != 0;
    }
    has_all_messages = __all_sync(ptx::kAllLanes, has_all_messages);
    if (ptx::lane_id() == 0) launch().advance(number, has_all_messages);
  }

  __device__ __forceinline__ void run() const {
    const int32_t warp = threadIdx.x / 32, lane = ptx::lane_id();
    uint32_t number = warp == 0 && num_ctas > 1 ? launch().read() : 0;
    const SegmentReader<Source> reader{source, shared.staged, params.vocab, rank * kSamplingWarps + warp,
                                       num_ctas * kSamplingWarps};
    reader.start();
    if (threadIdx.x == 0) {
      const float temperature = params.temperature[row], scale = temperature_scale(temperature);
      shared.draw =
          Draw{scale, LogitWeights::floor_of(scale), params.seed[row], params.position[row], temperature == 0.0f};
      shared.board.reset(temperature >= 0.0f);
    }
    __syncthreads();
    race_row(reader, shared.draw, shared.board, Everything{}, shared.lane_racers[threadIdx.x]);
    Racer best = best_of_warp(shared.lane_racers[threadIdx.x]);
    if (lane == 0) shared.warp_racers[warp] = best;
    __syncthreads();
    if (warp != 0) return;
    bool is_invalid = shared.board.is_invalid;
    best = best_of_warp(lane < kSamplingWarps ? shared.warp_racers[lane] : no_racer());
    if (rank + 1 < num_ctas) {
      if (lane == 0 && launch().wait_until_open(number))
        ptx::send(messages() + rank, ptx::Message{best.order, tag(number) | (is_invalid ? kInvalid : 0) |
                                                                  static_cast<uint32_t>(best.token)});
      return;
    }
    if (num_ctas > 1) {
      receive(launch().open(number), best, is_invalid);
      best = best_of_warp(best);
    }
    const bool is_valid = !__any_sync(ptx::kAllLanes, is_invalid) && best.token < params.vocab;
    const int32_t token = is_valid ? best.token : first_allowed(params, row);
    if (lane == 0) {
      store_token(params, row, token);
      params.valid[row] = is_valid ? 1 : 0;
    }
  }
};

template <class Source>
__device__ __forceinline__ void sample_unfiltered(const SamplingParams& params) {
  __shared__ UnfilteredShared shared;
  const int32_t row = blockIdx.y;
  const Source source(params, row);
  UnfilteredRow<Source>{params, source, shared, row, static_cast<int32_t>(blockIdx.x), static_cast<int32_t>(gridDim.x)}
      .run();
}

}  // namespace attn
