// Few survivors: every CTA lists, in the first one, its tokens at or above a bound that is sure to leave as many as are
// needed. The first one then selects the threshold from these lists as others do from the row, and has the survivors
// race.
#pragma once

#include "sampling/device/row.cuh"

namespace attn {

template <class Source>
struct Candidates {
  using Weights = typename Source::Weights;

  const Row<Source>& row;
  SamplingShared& shared;
  const RowSettings& settings;

  __device__ __forceinline__ explicit Candidates(const Row<Source>& row)
      : row(row), shared(row.shared), settings(row.settings) {}

  static constexpr int32_t kMostWanted = 256;

  /// Candidates of each CTA that the first one has room for.
  __device__ __forceinline__ int32_t room() const { return row.share_of_cta(kMaxCandidates); }
  /// Tokens that the lists must hold at least, for top-k and the most likely tokens.
  __device__ __forceinline__ int32_t wanted() const {
    return max_of(settings.greedy ? 0 : settings.top_k, row.params.num_top_logprobs);
  }
  /// Whether a token that is not known yet may be found among the candidates.
  __device__ __forceinline__ bool may_draw() const { return settings.top_k > 0 || settings.min_p > 0.0f; }
  /// Whether the candidates may be enough.
  __device__ __forceinline__ bool suits() const { return wanted() < kMostWanted && (may_draw() || wanted() > 0); }

  /// A key that as many pairs of the CTA's lanes reach as tokens are wanted, which leaves nothing to chance, if there
  /// is room for what else reaches it (q of 128 pairs are reached by 128 * ln(128 / (128 - q)) tokens).
  __device__ __forceinline__ uint32_t bound(uint32_t lane_key) const {
    if (wanted() == 0) return kWholeRow;
    return bound_of_pairs(lane_key, min_of(wanted(), room() < 192 ? 54 : room() < 384 ? 86 : 114));
  }

  /// Lists the tokens from a bound on in the first CTA. row_bound: the largest of all bounds; lane_key: from
  /// read_values(). False: there is no room for them, or they are too few.
  __device__ __forceinline__ bool list(uint32_t lane_key, uint32_t row_bound, bool draws) const {
    uint32_t least = row_bound;
    if (draws && settings.top_k == 0 && settings.min_p > 0.0f) {  // its threshold is known
      const uint32_t min_p = min_p_key(row.weights(), settings);
      least = wanted() > 0 ? min_of(least, min_p) : min_p;
    }
    list_from(least, lane_key, ptx::cluster_pointer(shared.list + row.rank * room(), 0));
    __syncthreads();
    row.tell_all(shared.counts[row.rank], shared.num_listed);
    row.sync();
    const int32_t count = row.lane() < row.num_ctas ? shared.counts[row.lane()] : 0;
    const bool fits = __all_sync(ptx::kAllLanes, count <= room()) != 0;
    const int32_t total = static_cast<int32_t>(ptx::warp_add(static_cast<uint32_t>(count)));
    return fits && (total >= wanted() || least == kWholeRow);
  }

  /// The first CTA's part, after list(): sets shared.token.
  __device__ __forceinline__ void draw() const {
    const Weights weights = row.weights();
    const float least = key_value(row.find_threshold(Listed{*this}, false).key);
    Racer best = no_racer();
    for_each([&](uint64_t candidate) {
      const float value = value_of(candidate);
      if (value < least) return;
      const Racer own = enter_race(weights, shared.draw.seed, shared.draw.position, token_of(candidate), value);
      if (own.beats(best)) best = own;
    });
    best = row.best_of_cta(best);
    if (threadIdx.x == 0) shared.token = best.token;
  }

  /// The most likely tokens, in order, by the first CTA after list(): the lists hold as many, or all that can be drawn.
  __device__ __forceinline__ void write_top() const {
    const int32_t wanted = row.params.num_top_logprobs;
    int32_t total = 0;
    for (int32_t cta = 0; cta < row.num_ctas; ++cta) total += shared.counts[cta];
    for_each([&](uint64_t candidate) {
      int32_t place = 0;
#pragma unroll 1
      for (int32_t cta = 0; cta < row.num_ctas; ++cta) {
        const uint64_t* others = shared.list + cta * room();
#pragma unroll 1
        for (int32_t i = 0; i < shared.counts[cta] && place < wanted; ++i) place += others[i] > candidate ? 1 : 0;
      }
      if (place < wanted) row.store_top(place, candidate);
    });
    for (int32_t place = total + threadIdx.x; place < wanted; place += kSamplingThreads) row.store_top(place, 0);
  }

 private:
  __device__ __forceinline__ static float value_of(uint64_t candidate) {
    return key_value(static_cast<uint32_t>(candidate >> 32));
  }

  /// Each thread's part of the lists: the same few threads look at a CTA's candidates.
  template <class Body>
  __device__ __forceinline__ void for_each(const Body& body) const {
    const int32_t readers = row.share_of_cta(kSamplingThreads), thread = static_cast<int32_t>(threadIdx.x);
    const int32_t cta = thread * row.num_ctas / kSamplingThreads;
#pragma unroll 1
    for (int32_t i = thread & (readers - 1); i < shared.counts[cta]; i += readers) body(shared.list[cta * room() + i]);
  }

  /// What a threshold is selected from: see Row::AllTokens.
  struct Listed {
    static constexpr bool kAreOfAllCtas = false;
    const Candidates& candidates;

    template <class Body>
    __device__ __forceinline__ void for_each(const Body& body) const {
      candidates.for_each([&](uint64_t candidate) { body(value_of(candidate)); });
    }
  };

  /// A key that `count` of the CTA's pairs of lanes reach: to 16 bits the count-th largest of their largest. Comparing
  /// all pairs takes less time than halving a range of keys, whose steps wait for each other.
  __device__ __forceinline__ uint32_t bound_of_pairs(uint32_t lane_key, int32_t count) const {
    const uint32_t pair = threadIdx.x / 2, half = threadIdx.x % 2;
    const uint32_t own = max_of(lane_key, __shfl_xor_sync(ptx::kAllLanes, lane_key, 1)) >> 16 << 8 | pair;
    shared.pairs[pair] = own;
    __syncthreads();
    uint32_t before = 0;
    const uint32_t* others = shared.pairs + half * (kPairs / 2);  // each of the two looks at half of them
#pragma unroll 8
    for (int32_t i = 0; i < kPairs / 2; i += 4) {
      const uint4 four = *reinterpret_cast<const uint4*>(others + i);
      before += ((own - four.x) >> 31) + ((own - four.y) >> 31) + ((own - four.z) >> 31) + ((own - four.w) >> 31);
    }
    before += __shfl_xor_sync(ptx::kAllLanes, before, 1);
    if (static_cast<int32_t>(before) == count - 1) shared.bound = max_of(own >> 8 << 16, kWholeRow);
    __syncthreads();
    return shared.bound;
  }

  /// Puts the CTA's tokens from `bound` on into `places`, as long as there is room; num_listed counts them. Only those
  /// chunks are read that reach the bound, each lane its own.
  __device__ __forceinline__ void list_from(uint32_t bound, uint32_t lane_key, uint64_t* places) const {
    if (lane_key < bound) return;
    const int32_t shift = row.chunk_shift(), first = row.reader.first, step = row.reader.step;
    const int32_t num_segments = row.reader.num_segments();
    const float least = key_value(bound);
    uint32_t reached = 0;
#pragma unroll 1
    for (int32_t chunk = 0; first + (chunk << shift) * step < num_segments; ++chunk)
      reached |= shared.chunk_keys()[chunk * kSamplingThreads + threadIdx.x] >= bound >> 16 ? 1u << chunk : 0u;
#pragma unroll 1
    for (; reached != 0; reached &= reached - 1) {
      const int32_t chunk = __ffs(static_cast<int32_t>(reached)) - 1;
#pragma unroll 1
      for (int32_t round = chunk << shift; round < (chunk + 1) << shift; ++round) {
        const int32_t segment = first + round * step;
        if (segment >= num_segments) break;
        float v[kLaneTokens];
        row.reader.load_again(round, v);
        uint32_t chosen = 0;
#pragma unroll
        for (int32_t i = 0; i < kLaneTokens; ++i) chosen |= v[i] >= least ? 1u << i : 0u;
        // Most lanes have none or one.
#pragma unroll 1
        for (; chosen != 0; chosen &= chosen - 1) {
          const int32_t i = __ffs(static_cast<int32_t>(chosen)) - 1, at = atomicAdd(&shared.num_listed, 1);
          if (at >= room()) return;
          places[at] = ranked(order_key(pick(v, i)), lane_token(segment, i));
        }
      }
    }
  }
};

}  // namespace attn
