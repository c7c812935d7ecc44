// Few survivors: every CTA lists the tokens at or above a bound that is sure to leave as many as are needed, the first
// one finds among all lists who survives, who wins the race, and which tokens are the most likely ones.
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

  static constexpr int32_t kMostFinalists = 256;
  static constexpr int32_t kPairThreads = kSamplingThreads / 2;  // compare; the others have the finalists race

  /// Candidates that are compared with each other. In the place of what is staged.
  struct Finalists {
    uint64_t weights[kMostFinalists];
    uint64_t above[kMostFinalists];  // mass
    uint32_t keys[kMostFinalists];
    int32_t tokens[kMostFinalists];
    Racer racers[kMostFinalists];
    uint8_t survives[kMostFinalists];
  };
  static_assert(sizeof(Finalists) <= sizeof(SamplingShared::staged), "they have that room");

  __device__ __forceinline__ Finalists& finalists() const { return *reinterpret_cast<Finalists*>(shared.staged); }
  /// Candidates that a CTA has room for.
  __device__ __forceinline__ int32_t room() const { return row.share_of_cta(kMaxCandidates); }

  /// Tokens that the lists must hold at least, for top-k and the most likely tokens.
  __device__ __forceinline__ int32_t wanted() const {
    return max_of(settings.greedy ? 0 : settings.top_k, row.params.num_top_logprobs);
  }
  __device__ __forceinline__ bool may_settle() const { return settings.top_k > 0 || settings.min_p > 0.0f; }
  /// Whether the finalists may be enough.
  __device__ __forceinline__ bool suits() const { return wanted() < kMostFinalists && (may_settle() || wanted() > 0); }
  /// Lanes of a CTA that make its bound: as many as tokens are wanted, which leaves nothing to chance, if there is room
  /// for what else reaches it (q lanes of 256 are reached by 256 * ln(256 / (256 - q)) tokens).
  __device__ __forceinline__ int32_t lanes_at_bound() const { return min_of(wanted(), min_of(room() * 5 / 8, 176)); }

  /// A key that `count` of the CTA's lanes reach: to 16 bits the count-th largest of their largest.
  __device__ __forceinline__ uint32_t bound_of_lanes(uint32_t lane_key, int32_t count) const {
    const uint32_t own = lane_key >> 16 << 8 | threadIdx.x;
    shared.lane_keys[threadIdx.x] = own;
    __syncthreads();
    uint32_t before = 0;
#pragma unroll 8
    for (int32_t i = 0; i < kSamplingThreads; i += 4) {
      const uint4 others = *reinterpret_cast<const uint4*>(shared.lane_keys + i);
      before +=
          ((own - others.x) >> 31) + ((own - others.y) >> 31) + ((own - others.z) >> 31) + ((own - others.w) >> 31);
    }
    if (static_cast<int32_t>(before) == count - 1) shared.bound = max_of(own >> 8 << 16, kWholeRow);
    __syncthreads();
    return shared.bound;
  }

  /// Lists the CTA's tokens from `bound` on in the first CTA: those of the chunks that reach it.
  __device__ __forceinline__ void list(uint32_t lane_key, uint32_t bound) const {
    if (lane_key < bound) return;
    const int32_t shift = row.chunk_shift(), first = row.reader.first, step = row.reader.step;
    const int32_t num_segments = row.reader.num_segments();
    const float least = key_value(bound);
    Candidate* to = ptx::cluster_pointer(shared.list, 0) + row.rank * room();
#pragma unroll 1
    for (int32_t chunk = 0; first + (chunk << shift) * step < num_segments; ++chunk) {
      if (shared.chunk_keys()[chunk * kSamplingThreads + threadIdx.x] < bound >> 16) continue;
#pragma unroll 1
      for (int32_t i = 0; i < 1 << shift; ++i) {
        const int32_t segment = first + ((chunk << shift) + i) * step;
        if (segment >= num_segments) break;
        float v[kLaneTokens];
        load_values(row.source, segment, v);
#pragma unroll
        for (int32_t j = 0; j < kLaneTokens; ++j) {
          if (!(v[j] >= least)) continue;
          const int32_t at = atomicAdd(&shared.num_listed, 1);
          if (at < room()) to[at] = Candidate{order_key(v[j]), lane_token<Source>(segment, j)};
        }
      }
    }
  }

  /// All of it, behind a read of the row. needs_token: it is not known yet. True: the token is found (in
  /// shared.token of the first CTA), or the row is not valid. The same in all CTAs, which have decision then.
  __device__ __forceinline__ bool run(uint32_t lane_key, bool needs_token) const {
    uint32_t bound = kWholeRow;
    if (wanted() > 0) bound = bound_of_lanes(lane_key, lanes_at_bound());
    if (needs_token && settings.top_k == 0 && settings.min_p > 0.0f) {
      const uint32_t min_p = min_p_key(row.weights(), settings);
      bound = wanted() > 0 ? min_of(bound, min_p) : min_p;
    }
    list(lane_key, bound);
    __syncthreads();
    if (threadIdx.x == 0)
      ptx::cluster_pointer(&shared, 0)->candidates[row.rank] =
          CandidateResult{shared.best_key, bound, shared.num_listed};
    row.sync();
    int32_t count = 0;
    if (row.rank == 0) {
      count = choose_finalists(needs_token && may_settle());
      if (threadIdx.x > 0 && static_cast<int32_t>(threadIdx.x) < row.num_ctas)
        *ptx::cluster_pointer(&shared.decision, threadIdx.x) = shared.decision;
    }
    // The others wait for the decision, the first CTA goes on.
    if (row.num_ctas > 1) {
      ptx::cluster_arrive_release();
      if (row.rank != 0) ptx::cluster_wait();
    }
    const bool is_settled = shared.decision.is_settled;
    if (row.rank == 0) {
      if (is_settled && count > 0) draw(count);
      if (shared.decision.has_top) write_top(count);
      if (row.num_ctas > 1) ptx::cluster_wait();
    }
    return is_settled;
  }

 private:
  /// The first CTA's part: sets the decision. Returns how many finalists there are, which it needs.
  __device__ __forceinline__ int32_t choose_finalists(bool settles) const {
    const CandidateResult* own = &shared.candidates[min_of(row.lane(), row.num_ctas - 1)];
    const uint32_t best = ptx::warp_max(own->best_key), bound = ptx::warp_max(own->bound);
    const uint32_t of_lane = row.lane() < row.num_ctas ? static_cast<uint32_t>(own->count) : 0;
    const bool fits = __all_sync(ptx::kAllLanes, static_cast<int32_t>(of_lane) <= room());
    const bool is_valid = settings.valid && is_drawable(best);
    uint64_t count = ptx::warp_add(of_lane);
    uint32_t least = bound;
    const auto visit = [&](const auto& use) {
#pragma unroll 1
      for (int32_t at = threadIdx.x; at < kMaxCandidates; at += kSamplingThreads) {
        const int32_t cta = row.num_ctas * at / kMaxCandidates;
        if (at - cta * room() < shared.candidates[cta].count && shared.list[at].key >= bound) use(shared.list[at]);
      }
    };
    bool is_enough = is_valid && fits;
    if (is_enough && wanted() > 0 && (count > kMostFinalists || lanes_at_bound() < wanted())) {
      const uint64_t target = static_cast<uint64_t>(wanted());
      const auto selected = row.select(bound, best, target, kMostFinalists, true, [&](const auto& add) {
        visit([&](const Candidate& candidate) { add(candidate.key, 1); });
      });
      least = selected.key;
      count = selected.sum;
      is_enough = count >= target || bound == kWholeRow;
      settles = settles && settings.top_k > 0;  // min-p may leave more
    }
    const bool has_finalists = is_enough && count <= kMostFinalists;
    __syncthreads();
    if (threadIdx.x == 0) {
      shared.decision =
          Decision{best, !is_valid || (has_finalists && settles), has_finalists && row.params.num_top_logprobs > 0};
      shared.num_listed = 0;
    }
    __syncthreads();
    if (!has_finalists) return 0;
    visit([&](const Candidate& candidate) {
      if (candidate.key < least) return;
      const int32_t at = atomicAdd(&shared.num_listed, 1);
      finalists().keys[at] = candidate.key;
      finalists().tokens[at] = candidate.token;
      finalists().weights[at] = settings.has_top_p ? row.weights()(key_value(candidate.key)) : 0;
    });
    __syncthreads();
    return shared.num_listed;
  }

  /// Who of the finalists survives is told by how many are above it and what they weigh. Half of the threads compare
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
#pragma unroll 4
      for (int32_t j = 0; j < count; ++j) {
        if (all.keys[j] > key) {
          ++ahead;
          above += all.weights[j];
        }
      }
      const bool survives = key >= least && (settings.top_k == 0 || ahead < settings.top_k);
      all.above[i] = above;
      all.survives[i] = survives ? 1 : 0;
      if (survives) kept += all.weights[i];
    }
    uint64_t target = ~uint64_t{0};
    if (settings.has_top_p) {
      const uint64_t mass = row.block_sum(kept);
      target = top_p_target(settings, row.top_p_of_all() ? shared.row_mass : mass);
    }
    __syncthreads();
    if (row.warp() != 0) return;
    Racer best = nobody();
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
  }
};

}  // namespace attn
