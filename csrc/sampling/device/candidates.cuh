// The way for few survivors. Every CTA lists its tokens at or above a bound that is sure to leave enough. The first CTA
// finds in all lists which tokens survive, which one wins the race, and which are the most likely ones. In small
// batches these dependent steps take most of the time, so a list is sent by stores that an mbarrier counts as they
// arrive: a barrier of the cluster would first wait for every store of every thread.
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

  static constexpr int32_t kMaxFinalists = 256;
  static constexpr int32_t kFewFinalists = 128;                  // so few are not reduced any further
  static constexpr int32_t kPairThreads = kSamplingThreads / 2;  // compare; the others have the finalists race
  static constexpr int32_t kPairs = kSamplingThreads / 2;        // of lanes
  static constexpr int32_t kThreadCandidates = kMaxCandidates / kSamplingThreads;
  static constexpr int32_t kLaneBins = kCountBins / 32;

  /// Candidates that are compared with each other. In the place of the bins.
  struct Finalists {
    uint32_t keys[kMaxFinalists];
    uint64_t weights[kMaxFinalists];
    uint64_t above[kMaxFinalists];  // mass
    int32_t tokens[kMaxFinalists];
    Racer racers[kMaxFinalists];
    uint8_t survives[kMaxFinalists];
  };
  static_assert(sizeof(Finalists) <= sizeof(SamplingShared::bins), "they have that room");

  __device__ __forceinline__ Finalists& finalists() const { return *reinterpret_cast<Finalists*>(shared.bins); }
  /// Candidates of each CTA that the first one has room for.
  __device__ __forceinline__ int32_t room() const { return row.share_of_cta(kMaxCandidates); }

  /// Tokens that the lists must hold at least, for top-k and the most likely tokens.
  __device__ __forceinline__ int32_t wanted() const {
    return max_of(settings.greedy ? 0 : settings.top_k, row.params.num_top_logprobs);
  }
  /// Whether the token may be found among the finalists.
  __device__ __forceinline__ bool may_draw() const { return settings.top_k > 0 || settings.min_p > 0.0f; }
  /// Whether the finalists may be enough.
  __device__ __forceinline__ bool suits() const { return wanted() < kMaxFinalists && (may_draw() || wanted() > 0); }

  /// Pairs of lanes of a CTA that make its bound: as many as tokens are wanted, which leaves nothing to chance, if
  /// there is room for what else reaches it (q of 128 pairs are reached by 128 * ln(128 / (128 - q)) tokens).
  __device__ __forceinline__ int32_t pairs_at_bound() const {
    return min_of(wanted(), room() < 192 ? 54 : room() < 384 ? 86 : 114);
  }

  /// A key that `count` of the CTA's pairs of lanes reach: to 16 bits the count-th largest of their largest. Comparing
  /// all pairs takes less time than halving a range of keys, whose steps wait for each other.
  __device__ __forceinline__ uint32_t bound_of_pairs(uint32_t lane_key, int32_t count) const {
    const uint32_t pair = threadIdx.x / 2, half = threadIdx.x % 2;
    const uint32_t own = max_of(lane_key, __shfl_xor_sync(ptx::kAllLanes, lane_key, 1)) >> 16 << 8 | pair;
    shared.counts[pair] = own;
    __syncthreads();
    uint32_t before = 0;
    const uint32_t* others = shared.counts + half * (kPairs / 2);  // each of the two looks at half of them
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

  /// put(number, ranked()) for each of the CTA's tokens from `bound` on, which num_listed counts; there may be more of
  /// them if it is more than `room`. Only those chunks are read that reach the bound, each lane its own. lane_key: from
  /// read_values().
  template <class Put>
  __device__ __forceinline__ void list(uint32_t lane_key, uint32_t bound, int32_t room, const Put& put) const {
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
          if (at >= room) return;
          put(at, ranked(order_key(pick(v, i)), lane_token<Source>(segment, i)));
        }
      }
    }
  }

  /// Only min-p, whose threshold follows from the largest value: the survivors of each CTA race in it. Returns this
  /// thread's best. If there are more than there is room for, the race is invalid.
  __device__ __forceinline__ Racer race_from(uint32_t lane_key, uint32_t bound) const {
    list(lane_key, bound, kMaxCandidates, [&](int32_t at, uint64_t token) { shared.list[at] = token; });
    __syncthreads();
    const int32_t count = shared.num_listed;
    __syncthreads();
    if (threadIdx.x == 0) {
      shared.num_listed = 0;
      shared.board.is_invalid = count > kMaxCandidates;
    }
    const Weights weights = row.weights();
    Racer best = no_racer();
#pragma unroll 1
    for (int32_t i = threadIdx.x; i < min_of(count, kMaxCandidates); i += kSamplingThreads) {
      const uint64_t token = shared.list[i];
      const Racer own = enter_race(weights, shared.draw.seed, shared.draw.position, token_of(token),
                                   key_value(static_cast<uint32_t>(token >> 32)));
      if (own.beats(best)) best = own;
    }
    return best;
  }

  /// Takes all steps, after a read of the row. needs_token: the token is not known yet. Returns true if the token is
  /// found (in shared.token of the first CTA) or the row is not valid: the same in all CTAs, which then have the
  /// decision.
  __device__ __forceinline__ bool run(uint32_t lane_key, bool needs_token) const {
    uint32_t bound = kWholeRow;
    if (wanted() > 0) bound = bound_of_pairs(lane_key, pairs_at_bound());
    if (needs_token && settings.top_k == 0 && settings.min_p > 0.0f) {
      const uint32_t min_p = min_p_key(row.weights(), settings);
      bound = wanted() > 0 ? min_of(bound, min_p) : min_p;
    }
    uint64_t* places = shared.list + row.rank * room();
    list(lane_key, bound, room(), [&](int32_t at, uint64_t token) { row.send(0, 0, places + at, token); });
    __syncthreads();
    if (threadIdx.x == 0) {
      const int32_t count = shared.num_listed;
      row.send(0, 0, &shared.candidates[row.rank], CandidateResult{shared.best_key, bound, count, 0});
      row.arrive(0, 0, sizeof(CandidateResult) + sizeof(shared.list[0]) * min_of(count, room()));
      shared.num_listed = 0;
    }
    if (row.rank != 0) {  // waits for the decision
      if (!row.wait(1)) return false;
      return shared.decision.has_token;
    }
    shared.counts[threadIdx.x] = 0;
    const int32_t count = choose_finalists(needs_token && may_draw(), row.wait(0));
    if (threadIdx.x > 0 && static_cast<int32_t>(threadIdx.x) < row.num_ctas) {
      row.send(threadIdx.x, 1, &shared.decision, shared.decision);
      row.arrive(threadIdx.x, 1, sizeof(Decision));
    }
    if (shared.decision.has_token && count > 0) draw(count);
    if (shared.decision.has_top && row.params.num_top_logprobs > 0) write_top(count);
    return shared.decision.has_token;
  }

 private:
  /// The smallest key among the largest candidates, and how many these are.
  struct Cut {
    uint32_t key;
    int32_t count;
  };

  /// At least `wanted` of the candidates, and few more; all from `low` on, if these are fewer. candidates: this
  /// thread's. It looks at one digit of a radix at a time; usually one is enough. The counts are 0.
  __device__ __forceinline__ Cut cut(const uint64_t (&candidates)[kThreadCandidates], uint32_t low, uint32_t high,
                                     int32_t wanted) const {
    int32_t above = 0;
#pragma unroll 1
    while (true) {
      const int32_t shift = max_of(24 - __clz(static_cast<int32_t>(high - low)), 0);
#pragma unroll
      for (const uint64_t candidate : candidates) {
        const uint32_t key = static_cast<uint32_t>(candidate >> 32);
        if (key >= low && key <= high) atomicAdd(&shared.counts[(high - key) >> shift], 1u);
      }
      __syncthreads();
      // Each warp for itself: the bin in which the last of the wanted ones lies.
      const uint32_t* own = shared.counts + row.lane() * kLaneBins;
      int32_t counts[kLaneBins], sum = 0;
#pragma unroll
      for (int32_t i = 0; i < kLaneBins; ++i) sum += counts[i] = static_cast<int32_t>(own[i]);
      const int32_t through = above + ptx::warp_inclusive_sum(sum, row.lane());
      const uint32_t reached = __ballot_sync(ptx::kAllLanes, through >= wanted);
      if (reached == 0) return Cut{low, __shfl_sync(ptx::kAllLanes, through, 31)};
      int32_t taken = through - sum, bins = 0, last = 0;
#pragma unroll
      for (int32_t i = 0; i < kLaneBins; ++i) {
        if (taken >= wanted) continue;
        taken += last = counts[i];
        ++bins;
      }
      const int32_t lane = __ffs(static_cast<int32_t>(reached)) - 1;
      taken = __shfl_sync(ptx::kAllLanes, taken, lane);
      const int32_t bin = lane * kLaneBins + __shfl_sync(ptx::kAllLanes, bins, lane) - 1;
      high -= static_cast<uint32_t>(bin) << shift;
      const uint32_t width = (1u << shift) - 1;
      low = high - low > width ? high - width : low;
      if (shift == 0 || taken <= clamp(2 * wanted, kFewFinalists, kMaxFinalists)) return Cut{low, taken};
      above = taken - __shfl_sync(ptx::kAllLanes, last, lane);
      __syncthreads();
      shared.counts[threadIdx.x] = 0;
      __syncthreads();
    }
  }

  /// The first CTA's part: sets the decision. Returns the finalist count.
  __device__ __forceinline__ int32_t choose_finalists(bool draws, bool all_came) const {
    const CandidateResult own = shared.candidates[min_of(row.lane(), row.num_ctas - 1)];
    const uint32_t best = ptx::warp_max(own.best_key), bound = ptx::warp_max(own.bound);
    const bool fits = __all_sync(ptx::kAllLanes, own.count <= room());
    const bool is_valid = all_came && settings.valid && is_drawable(best);
    // The same few threads look at a CTA's candidates.
    const int32_t readers = row.share_of_cta(kSamplingThreads);
    const int32_t cta = static_cast<int32_t>(threadIdx.x) / readers,
                  first = static_cast<int32_t>(threadIdx.x) % readers;
    const int32_t cta_count = is_valid && fits ? shared.candidates[cta].count : 0;
    uint64_t candidates[kThreadCandidates];  // 0: none
#pragma unroll
    for (int32_t i = 0; i < kThreadCandidates; ++i)
      candidates[i] = first + i * readers < cta_count ? shared.list[cta * room() + first + i * readers] : 0;
    Cut finalists{bound, 0};
    if (is_valid && fits) finalists = cut(candidates, bound, best, wanted() > 0 ? wanted() : kMaxCandidates + 1);
    const int32_t count = finalists.count;
    const bool has_finalists = is_valid && fits && count <= kMaxFinalists && (count >= wanted() || bound == kWholeRow);
    const bool has_all = settings.top_k > 0 || finalists.key == bound;  // min-p may leave more
    if (threadIdx.x == 0)
      shared.decision = Decision{is_valid ? best : 0, !is_valid || (has_finalists && draws && has_all),
                                 has_finalists || row.params.num_top_logprobs == 0};
    if (has_finalists)
      list_finalists(candidates, finalists.key, count, Weights(key_value(best), settings.scale, settings.floor));
    __syncthreads();
    return has_finalists ? count : 0;
  }

  __device__ __forceinline__ void list_finalists(const uint64_t (&candidates)[kThreadCandidates], uint32_t least,
                                                 int32_t count, const Weights& weights) const {
    Finalists& all = finalists();
    if (static_cast<int32_t>(threadIdx.x) < 4 && count + static_cast<int32_t>(threadIdx.x) < kMaxFinalists)
      all.keys[count + threadIdx.x] = 0;  // four are compared at a time
    uint32_t chosen = 0;
#pragma unroll
    for (int32_t i = 0; i < kThreadCandidates; ++i)
      chosen |= static_cast<uint32_t>(candidates[i] >> 32) >= least ? 1u << i : 0u;
#pragma unroll 1
    for (; chosen != 0; chosen &= chosen - 1) {
      const uint64_t candidate = pick(candidates, __ffs(static_cast<int32_t>(chosen)) - 1);
      const int32_t at = atomicAdd(&shared.num_listed, 1);
      all.keys[at] = static_cast<uint32_t>(candidate >> 32);
      all.tokens[at] = token_of(candidate);
      all.weights[at] = settings.has_top_p ? weights(key_value(all.keys[at])) : 0;
    }
  }

  /// Whether a finalist survives depends on how many are above it and what they weigh. Half of the threads compare
  /// all pairs; the other half has them race.
  __device__ __forceinline__ void draw(int32_t count) const {
    Finalists& all = finalists();
    const Weights weights = row.weights();
    const uint32_t least = min_p_key(weights, settings);
    uint64_t kept = 0;
#pragma unroll 1
    for (int32_t i = static_cast<int32_t>(threadIdx.x) % kPairThreads; i < count; i += kPairThreads) {
      const uint32_t key = all.keys[i];
      if (threadIdx.x >= kPairThreads) {
        all.racers[i] =
            enter_race<kPhiloxRounds>(weights, shared.draw.seed, shared.draw.position, all.tokens[i], key_value(key));
        continue;
      }
      int32_t ahead = 0;
      uint64_t above = 0;
      const auto compare = [&](uint32_t other, uint64_t weight) {
        if (other > key) {
          ++ahead;
          above += weight;
        }
      };
#pragma unroll 2
      for (int32_t j = 0; j < count; j += 4) {
        const uint4 keys = *reinterpret_cast<const uint4*>(all.keys + j);
        compare(keys.x, all.weights[j]);
        compare(keys.y, all.weights[j + 1]);
        compare(keys.z, all.weights[j + 2]);
        compare(keys.w, all.weights[j + 3]);
      }
      const bool survives = key >= least && (settings.top_k == 0 || ahead < settings.top_k);
      all.above[i] = above;
      all.survives[i] = survives ? 1 : 0;
      if (survives) kept += all.weights[i];
    }
    uint64_t target = ~uint64_t{0};
    if (settings.has_top_p) {
      const uint64_t mass = row.block_sum(kept);
      target = top_p_target(settings, top_p_of_all(row.params, settings) ? shared.row_mass : mass);
    }
    __syncthreads();
    if (row.warp() != 0) return;
    Racer best = no_racer();
#pragma unroll 1
    for (int32_t i = row.lane(); i < count; i += 32) {
      if (all.survives[i] != 0 && all.above[i] < target && all.racers[i].beats(best)) best = all.racers[i];
    }
    best = best_of_warp(best);
    if (row.lane() == 0) shared.token = best.token;
  }

  /// The most likely tokens, in order. There are as many finalists, or all that can be drawn.
  __device__ __forceinline__ void write_top(int32_t count) const {
    const Finalists& all = finalists();
    const int32_t wanted = row.params.num_top_logprobs;
#pragma unroll 1
    for (int32_t i = threadIdx.x; i < max_of(count, wanted); i += kSamplingThreads) {
      const uint64_t own = i < count ? ranked(all.keys[i], all.tokens[i]) : 0;
      int32_t place = i < count ? 0 : i;
      for (int32_t j = 0; j < count && i < count; ++j) place += ranked(all.keys[j], all.tokens[j]) > own ? 1 : 0;
      if (place < wanted) row.store_top(place, own);
    }
    __syncthreads();  // the bins are used again
  }
};

}  // namespace attn
