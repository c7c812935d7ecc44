// Sampling with filters, log-probabilities, or both. The ways to a row's token, all with the same winner:
//
// - Top-k: the read finds the largest value of each chunk of tokens. They give a bound that the top-k largest are sure
//   to reach. Only their chunks are read again, and the few candidates go to the first CTA, which does the rest
//   (candidates.cuh). Min-p without other filters needs only its threshold, and no first CTA.
// - Only top-p, in long rows: a survey of some segments tells which tokens may survive. These race while the row is
//   read, and sums of the same read prove that the winner survives (top_p.cuh).
// - No filter: the whole row races while it is read (race.cuh).
// - The rest (a large top-k, top-p after a min-p that leaves many, thousands of equal values): an exact radix select,
//   one read of the row for each digit, then a race of the survivors (threshold.cuh).
//
// The CTAs of a row are a cluster, whose warps take the segments in turn: likely tokens lie together. Every loop has a
// bound, and nothing that is written depends on the order in which threads run. docs/sampling.md explains it.
#pragma once

#include "sampling/device/candidates.cuh"
#include "sampling/device/threshold.cuh"
#include "sampling/device/top_p.cuh"

namespace attn {

template <class Source>
struct RowSampler : Row<Source> {
  using Base = Row<Source>;
  using Base::params;
  using Base::rank;
  using Base::reader;
  using Base::row;
  using Base::settings;
  using Base::shared;
  using Base::source;
  using Base::wants_logprobs;

  using Base::Base;

  /// Writes the results of a row that cannot be sampled. token_index: where in token_ids the token goes.
  __device__ __forceinline__ void write_invalid(int64_t token_index) const {
    if (rank != 0) return;
    const int32_t first = this->warp() == 0 ? first_allowed(params, row) : 0;
    if (threadIdx.x == 0) {
      store_token(params, token_index, first);
      params.valid[row] = 0;
      if (params.logprobs != nullptr) params.logprobs[row] = kNaN;
    }
    for (int32_t i = threadIdx.x; i < params.num_top_logprobs; i += kSamplingThreads) {
      params.top_token_ids[static_cast<int64_t>(row) * params.num_top_logprobs + i] = 0;
      params.top_logprobs[static_cast<int64_t>(row) * params.num_top_logprobs + i] = kNaN;
    }
  }

  /// Writes shared.token and, if requested, its log-probability.
  __device__ __forceinline__ void write_token(int64_t token_index) const {
    if (rank != 0 || threadIdx.x != 0) return;
    store_token(params, token_index, shared.token);
    params.valid[row] = 1;
    if (params.logprobs != nullptr) params.logprobs[row] = this->logprob_of(source.one(shared.token));
  }

  /// Races the whole row, in its first read. Returns false if the row is not valid.
  __device__ __forceinline__ bool race_all() const {
    const RaceResult result = this->race(Everything{});
    take(result);
    return !result.is_invalid && result.best.token < params.vocab;
  }

  /// The most likely tokens where the candidates do not tell: one read of the row for each. Rare (thousands of equal
  /// values).
  __device__ __forceinline__ void write_top_again() const {
    uint64_t last = ~uint64_t{0};
#pragma unroll 1
    for (int32_t place = 0; place < params.num_top_logprobs; ++place) {
      uint32_t best_key = 0;
      int32_t best_token = 0;
      reader.start();
      reader.for_each([&](int32_t segment, const float (&v)[kLaneTokens]) {
#pragma unroll
        for (int32_t i = 0; i < kLaneTokens; ++i) {
          const uint32_t key = order_key(v[i]);
          const int32_t token = lane_token<Source>(segment, i);
          if (key > kExcludedKey && ranked(key, token) < last &&
              (best_key == 0 || ranked(key, token) > ranked(best_key, best_token))) {
            best_key = key;
            best_token = token;
          }
        }
      });
      // As in a race whose winner is the largest.
      Racer best = no_racer();
      if (best_key != 0) best = Racer{static_cast<uint64_t>(best_key) << 32, best_token, best_key};
      best = this->exchange(best, BandMasses()).best;
      last = best.key != 0 ? ranked(best.key, best.token) : 0;
      if (rank == 0 && threadIdx.x == 0) this->store_top(place, last);
    }
  }

  /// Rows with top-k, the usual ones, take the candidate path if nothing else is needed of the row. Only that path is
  /// inlined. Mixed with the other 13,000 instructions it took 17 to 20 us instead of 9 to 15 with a cold L2, because
  /// instructions then come from memory (H100, 1 to 32 rows, ADR 32).
  __device__ __forceinline__ void run() const {
    this->begin(0);
    const Candidates<Source> candidates(*this);
    if (begins_with_candidates()) {
      const uint32_t lane_key = this->read_values(false, false);
      __syncthreads();  // best_key
      if (candidates.run(lane_key, true) && is_drawable(shared.decision.best_key)) {
        write_token(row);
        return;
      }
      reader.start();
    }
    run_others(params, shared);
  }

 private:
  __device__ __forceinline__ bool begins_with_candidates() const {
    return settings.valid && settings.top_k > 0 && !settings.greedy && !wants_logprobs() &&
           !(settings.has_top_p && top_p_of_all(params, settings)) && Candidates<Source>(*this).suits();
  }

  /// After reader.start().
  __device__ __noinline__ static void run_others(const SamplingParams& params, SamplingShared& shared) {
    const Source source(params, ptx::cluster_id());
    const RowSampler sampler(params, source, shared);
    if (sampler.find_token())
      sampler.write_token(sampler.row);
    else
      sampler.write_invalid(sampler.row);
  }

  /// After reader.start(). False: the row is not valid.
  __device__ __forceinline__ bool find_token() const {
    const bool filters = settings.filters() && !settings.greedy;
    const TopP<Source> top_p(*this);
    bool has_token = false;
    if (!filters) {
      if (!race_all()) return false;
      has_token = true;
    } else if (settings.valid && top_p.suits()) {
      const typename TopP<Source>::Found found = top_p.run();
      if (found == TopP<Source>::Found::kInvalid) return false;
      has_token = found == TopP<Source>::Found::kToken;
    } else {
      return read(false);
    }
    if (has_token && !wants_logprobs()) return true;
    reader.start();
    return read(has_token);
  }

  /// After reader.start(): all but the ways of the first read, see above. False: the row is not valid.
  __device__ __forceinline__ bool read(bool has_token) const {
    const bool needs_mass = !has_token && settings.has_top_p && top_p_of_all(params, settings);
    const uint32_t lane_key = this->read_values(needs_mass, wants_logprobs());
    this->exchange_best();
    if (!settings.valid || !is_drawable(shared.decision.best_key)) return false;
    if (needs_mass || wants_logprobs()) this->sum_masses(needs_mass, wants_logprobs());
    const Candidates<Source> candidates(*this);
    if (!has_token && settings.top_k == 0 && !settings.has_top_p) {
      const uint32_t threshold = min_p_key(this->weights(), settings);
      const RaceResult result = this->exchange(candidates.race_from(lane_key, threshold), BandMasses());
      take(result);
      has_token = !result.is_invalid;
    }
    if (!(has_token && shared.decision.has_top) && candidates.suits() && !begins_with_candidates()) {
      has_token |= candidates.run(lane_key, !has_token);
      if (!is_drawable(shared.decision.best_key)) return false;
    }
    if (!has_token) {
      const uint32_t threshold = ThresholdSearch<Source>(*this).find_threshold(false).key;
      this->start_again();
      take(this->race(Survivors{key_value(threshold)}));
    }
    if (!shared.decision.has_top) write_top_again();
    return true;
  }

  __device__ __forceinline__ void take(const RaceResult& result) const {
    if (threadIdx.x == 0) shared.token = result.best.token;
  }
};

template <class Source>
__device__ __forceinline__ void sample_filtered(const SamplingParams& params) {
  extern __shared__ __align__(16) char dynamic_shared[];
  const Source source(params, ptx::cluster_id());
  RowSampler<Source>(params, source, *reinterpret_cast<SamplingShared*>(dynamic_shared)).run();
}

}  // namespace attn
