// The first CTA's part: what the candidates tell of the filters' threshold, the draw among them, the most likely
// tokens.
#pragma once

#include "sampling/device/row.cuh"

namespace attn {

/// A survivor, where there are few.
struct alignas(16) Survivor {
  uint64_t weight;
  uint32_t key;
  int32_t token;
};

template <class Source>
struct Candidates {
  const Row<Source>& row;
  SamplingShared& shared;
  BlockSums sums;
  const uint32_t bound;  // they are complete from here on
  uint32_t keys[kHeld];  // this thread's: shared.keys[threadIdx.x + i * kSamplingThreads]; 0: none, or below the bound

  /// Leaves zeros in the list where there is no candidate.
  __device__ __forceinline__ explicit Candidates(const Row<Source>& row)
      : row(row), shared(row.shared), sums(shared.scratch), bound(shared.bound) {
    const int32_t room = row.candidate_room();
#pragma unroll
    for (int32_t i = 0; i < kHeld; ++i) {
      const int32_t at = static_cast<int32_t>(threadIdx.x) + i * kSamplingThreads;
      const int32_t cta = at * shared.num_ctas / kMaxCandidates;
      const bool is_one = at - cta * room < shared.summaries[cta].num_candidates;
      const uint32_t key = is_one ? shared.keys[at] : 0;
      keys[i] = key >= bound ? key : 0;
      shared.keys[at] = keys[i];
    }
    __syncthreads();
  }

  __device__ __forceinline__ uint32_t best_key() const { return order_key(shared.reference); }

  __device__ __forceinline__ uint32_t count_from(uint32_t key) {
    uint32_t sum = 0;
#pragma unroll
    for (int32_t i = 0; i < kHeld; ++i) sum += keys[i] >= key ? 1 : 0;
    return sums(sum);
  }

  /// Smallest key with at least `wanted` candidates at or above it, which those at or above `from` are.
  __device__ __forceinline__ uint32_t key_of_count(uint32_t from, uint32_t wanted) {
    return bisect<uint32_t>(from, best_key() + 1, wanted, true, [&](uint32_t key) { return count_from(key); });
  }

  /// Smallest key that top-k and min-p leave, if the candidates tell; else something below the bound.
  __device__ __forceinline__ uint32_t settle_top_k() {
    const uint32_t min_p = min_p_key(row.weights(), row.settings);
    if (row.settings.top_k == 0) return min_p;
    const uint32_t from = max_of(min_p, bound);
    const uint32_t wanted = static_cast<uint32_t>(row.settings.top_k);
    return count_from(from) >= wanted ? key_of_count(from, wanted) : min_p;
  }

  /// Goes on with top-p. False if the candidates do not tell.
  __device__ __forceinline__ bool settle_top_p(uint32_t& threshold) {
    if (row.settings.has_top_p) {
      const bool of_all = row.top_p_of_all();
      if (!of_all && threshold < bound) return false;
      uint64_t weight[kHeld];
#pragma unroll
      for (int32_t i = 0; i < kHeld; ++i)
        weight[i] = keys[i] >= max_of(threshold, 1u) ? row.weights()(key_value(keys[i])) : 0;
      const auto mass_from = [&](uint32_t key) {
        uint64_t sum = 0;
#pragma unroll
        for (int32_t i = 0; i < kHeld; ++i) sum += keys[i] >= key ? weight[i] : 0;
        return sums(sum);
      };
      const uint32_t from = max_of(threshold, bound);
      const uint64_t available = mass_from(from);
      const uint64_t target = top_p_target(row.settings, of_all ? shared.row_mass : available);
      if (available >= target) threshold = bisect<uint64_t>(from, best_key() + 1, target, true, mass_from);
    }
    return threshold >= bound;
  }

  __device__ __forceinline__ uint64_t mass_from(uint32_t threshold) {
    uint64_t sum = 0;
#pragma unroll
    for (int32_t i = 0; i < kHeld; ++i) sum += keys[i] >= max_of(threshold, 1u) ? row.weights()(key_value(keys[i])) : 0;
    return sums(sum);
  }

  /// Lists the candidates from `threshold` on, at most kSamplingThreads, and takes out those that top-p removes, if it
  /// is to: a thread for each compares it with every other.
  __device__ __forceinline__ void list_few(uint32_t threshold, bool cuts_top_p) {
    Survivor* survivors = reinterpret_cast<Survivor*>(shared.bins);
    if (threadIdx.x == 0) shared.num_listed = 0;
    __syncthreads();
#pragma unroll 1
    for (int32_t at = threadIdx.x; at < kMaxCandidates; at += kSamplingThreads) {
      if (shared.keys[at] < threshold) continue;
      Survivor& survivor = survivors[atomicAdd(&shared.num_listed, 1)];
      survivor.key = shared.keys[at];
      survivor.token = shared.tokens[at];
    }
    __syncthreads();
    const int32_t num_survivors = shared.num_listed;
    if (cuts_top_p) {
      const bool is_one = static_cast<int32_t>(threadIdx.x) < num_survivors;
      const uint32_t own_key = is_one ? survivors[threadIdx.x].key : 0;
      const uint64_t weight = is_one ? row.weights()(key_value(own_key)) : 0;
      survivors[threadIdx.x].weight = weight;
      const uint64_t total = sums(weight);
      uint64_t above = 0;
      if (is_one) {
#pragma unroll 4
        for (int32_t i = 0; i < num_survivors; ++i) above += survivors[i].key > own_key ? survivors[i].weight : 0;
      }
      __syncthreads();
      if (is_one && above >= top_p_target(row.settings, row.top_p_of_all() ? shared.row_mass : total))
        survivors[threadIdx.x].key = 0;
    }
  }

  /// The race among the candidates from `threshold` on. is_few: those of the list.
  __device__ __forceinline__ void draw(uint32_t threshold, bool is_few) {
    const Survivor* survivors = reinterpret_cast<const Survivor*>(shared.bins);
    const uint32_t* of_keys = is_few ? &survivors->key : shared.keys;
    const int32_t* of_tokens = is_few ? &survivors->token : shared.tokens;
    const int32_t stride = is_few ? sizeof(Survivor) / sizeof(uint32_t) : 1;
    const int32_t number = is_few ? shared.num_listed : kMaxCandidates;
    Racer best = nobody();
#pragma unroll 1
    for (int32_t i = threadIdx.x; i < number; i += kSamplingThreads) {
      const uint32_t key = of_keys[i * stride];
      if (key < threshold) continue;
      const Racer racer =
          enter_race(row.weights(), shared.seed, shared.position, of_tokens[i * stride], key_value(key));
      if (racer.beats(best)) best = racer;
    }
    best = best_of_warp(best);
    if (row.lane() == 0) shared.warp_racers[row.warp()] = best;
    __syncthreads();
    if (row.warp() == 0) {
      best = best_of_warp(row.lane() < kSamplingWarps ? shared.warp_racers[row.lane()] : nobody());
      if (row.lane() == 0) shared.token = best.token;
    }
  }

  /// The most likely tokens, in order. False if the candidates do not tell.
  __device__ __forceinline__ bool write_top() {
    const uint32_t wanted = static_cast<uint32_t>(row.params.num_top_logprobs);
    const uint32_t available = count_from(bound);
    if (available < wanted && bound != kWholeRow) return false;
    const uint32_t least = available > wanted ? key_of_count(bound, wanted) : bound;
    uint64_t* ranked = reinterpret_cast<uint64_t*>(shared.bins);  // key, then ~token
    if (threadIdx.x == 0) shared.num_listed = 0;
    __syncthreads();
#pragma unroll 1
    for (int32_t i = threadIdx.x; i < kMaxCandidates; i += kSamplingThreads) {
      const uint64_t own = static_cast<uint64_t>(shared.keys[i]) << 32 | ~static_cast<uint32_t>(shared.tokens[i]);
      if (shared.keys[i] >= least) ranked[atomicAdd(&shared.num_listed, 1)] = own;
    }
    __syncthreads();
    const int32_t found = shared.num_listed;
#pragma unroll 1
    for (int32_t i = threadIdx.x; i < found; i += kSamplingThreads) {
      uint32_t place = 0;
#pragma unroll 4
      for (int32_t j = 0; j < found; ++j) place += ranked[j] > ranked[i] ? 1 : 0;
      if (place < wanted) row.store_top(static_cast<int32_t>(place), ranked[i]);
    }
    for (uint32_t place = found + threadIdx.x; place < wanted; place += kSamplingThreads)
      row.store_top(static_cast<int32_t>(place), 0);
    __syncthreads();
    return true;
  }
};

}  // namespace attn
