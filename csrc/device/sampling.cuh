// Sampling: a thread block cluster takes a row, or a CTA where there are no clusters.
//
// One read of the row finds its largest value, the masses of its segments where they are needed, and the candidates: the tokens at or above a bound that the
// first segments give, some hundreds of the row's largest. The first CTA picks the threshold of the filters among the candidates and draws. Where they do not
// reach down to the threshold or do not fit, the cluster reads the row again (sampling_again.cuh). docs/sampling.md has the whole of it. Every loop has a bound;
// nothing that is written depends on the order in which threads run.
//
// With a cold L2 the instructions come from memory too, so what is rare or not hot is kept small rather than unrolled.
#pragma once

#include "device/sampling_again.cuh"
#include "device/sampling_candidates.cuh"

namespace attn {

template <class Source>
struct RowSampler : Row<Source> {
  using Base = Row<Source>;
  using typename Base::Weights;
  using Base::filters;
  using Base::for_fours;
  using Base::is_tempered;
  using Base::lane;
  using Base::logprob_of;
  using Base::mass_table;
  using Base::num_ctas;
  using Base::params;
  using Base::rank;
  using Base::reference_table;
  using Base::row;
  using Base::samples;
  using Base::segment_begin;
  using Base::segment_end;
  using Base::settings;
  using Base::shared;
  using Base::source;
  using Base::store_token;
  using Base::store_top;
  using Base::summary_of;
  using Base::sync;
  using Base::wants_logprobs;
  using Base::warp;
  using Base::weights;

  using Base::Base;

  /// Draws by segments: the CTA that has the share-th part of the row finds the segment, then the token in it. Masses are scaled by the segment's factor where
  /// the row has no filters (`threshold` is kWholeRow), else relative to the row's largest value.
  __device__ __forceinline__ void draw_segment(uint64_t share, uint32_t threshold, bool is_filtered) {
    uint64_t before = 0;
    for (int32_t cta = 0; cta < rank; ++cta) before += summary_of(cta).mass;
    if (share < before || share - before >= shared.summary.mass) return;
    share -= before;
    constexpr int32_t kItems = kMaxVocab / kSegmentTokens / kSamplingThreads;
    const uint64_t* mass = mass_table(0);
    const Crossing crossing = find_crossing<kItems>(shared.scratch, share + 1, [&](int32_t i) {
      const int32_t s = segment_begin + static_cast<int32_t>(threadIdx.x) * kItems + i;
      return s < segment_end ? mass[s] : 0;
    });
    share -= crossing.before;
    const int32_t segment = segment_begin + crossing.index;
    if (warp() == 0) {
      const Weights of_row = weights();
      const float reference = is_filtered ? of_row.reference : reference_table()[segment];
      const uint64_t factor = is_filtered ? uint64_t{1} << kWeightBits : segment_factor(of_row, reference);
      const Weights local(reference, of_row);
      const int32_t begin = segment * kSegmentTokens + lane() * kLaneTokens;
      float v[kLaneTokens];
#pragma unroll
      for (int32_t i = 0; i < kLaneTokens; ++i) v[i] = source.one(begin + i);
      uint64_t mine = 0;
#pragma unroll
      for (int32_t i = 0; i < kLaneTokens; ++i) mine += order_key(v[i]) >= threshold ? local(v[i]) : 0;
      uint64_t sum = ptx::warp_inclusive_sum(mine, lane());
      const bool reaches = scale_mass(sum, factor) > share;
      sum -= mine;
      if (reaches && scale_mass(sum, factor) <= share) {
        int32_t token = begin;
#pragma unroll 1
        for (int32_t i = 0; i < kLaneTokens; ++i, ++token) {
          const float value = source.one(token);
          sum += order_key(value) >= threshold ? local(value) : 0;
          if (scale_mass(sum, factor) > share) break;
        }
        shared.token = token;
      }
    }
  }

  /// The same where the candidates do not tell: one read of the row for each. Rare (thousands of equal values, or a row in ascending order).
  __device__ __forceinline__ void write_top_again() const {
    uint64_t last = ~uint64_t{0};
#pragma unroll 1
    for (int32_t place = 0; place < params.num_top_logprobs; ++place) {
      uint64_t next = 0;
      if (last != 0) {
        for_fours([&](int32_t token, const float (&v)[4]) {
#pragma unroll
          for (int32_t i = 0; i < 4; ++i) {
            const uint64_t ranked = static_cast<uint64_t>(order_key(v[i])) << 32 | ~static_cast<uint32_t>(token + i);
            if (v[i] > kMinusInfinity && ranked < last) next = max_of(next, ranked);
          }
        });
      }
      const uint32_t key = ptx::warp_max(static_cast<uint32_t>(next >> 32));
      const uint32_t token = ptx::warp_max(static_cast<uint32_t>(next >> 32) == key ? static_cast<uint32_t>(next) : 0);
      if (lane() == 0) shared.warp_best[warp()] = static_cast<uint64_t>(key) << 32 | token;
      __syncthreads();
      if (threadIdx.x == 0) {
        uint64_t best = 0;
        for (int32_t w = 0; w < kSamplingWarps; ++w) best = max_of(best, shared.warp_best[w]);
        shared.summary.best = best;
      }
      sync();
      last = 0;
      for (int32_t cta = 0; cta < num_ctas; ++cta) last = max_of(last, summary_of(cta).best);
      sync();
      if (rank == 0 && threadIdx.x == 0) store_top(place, last);
    }
  }

  /// A row that cannot be sampled: its first token that the mask allows, else 0.
  __device__ __forceinline__ void write_invalid() const {
    if (rank != 0) return;
    uint32_t first = 0xffffffffu;
    if (params.token_mask != nullptr) {
      const uint32_t* words = params.token_mask + static_cast<int64_t>(row) * params.mask_stride;
      for (int32_t w = static_cast<int32_t>(threadIdx.x); w < ceil_div(params.vocab, 32) && first == 0xffffffffu; w += kSamplingThreads) {
        const int32_t rest = params.vocab - 32 * w;
        const uint32_t bits = __ldg(words + w) & (rest >= 32 ? 0xffffffffu : (1u << rest) - 1);
        if (bits != 0) first = static_cast<uint32_t>(32 * w + __ffs(static_cast<int32_t>(bits)) - 1);
      }
    }
    first = ptx::warp_min(first);
    if (lane() == 0) shared.warp_best[warp()] = first;
    __syncthreads();
    if (threadIdx.x == 0) {
      for (int32_t w = 0; w < kSamplingWarps; ++w) first = min_of(first, static_cast<uint32_t>(shared.warp_best[w]));
      store_token(shared.token_index, first == 0xffffffffu ? 0 : static_cast<int32_t>(first));
      params.valid[row] = 0;
      if (params.logprobs != nullptr) params.logprobs[row] = __uint_as_float(0x7fc00000u);
    }
    for (int32_t i = static_cast<int32_t>(threadIdx.x); i < params.num_top_logprobs; i += kSamplingThreads) {
      params.top_token_ids[static_cast<int64_t>(row) * params.num_top_logprobs + i] = 0;
      params.top_logprobs[static_cast<int64_t>(row) * params.num_top_logprobs + i] = __uint_as_float(0x7fc00000u);
    }
  }

  /// What kRenorm and kMaskLogits write.
  __device__ __forceinline__ void write_values(uint32_t threshold, uint64_t mass, bool is_valid) const {
    float* out = params.written + static_cast<int64_t>(row) * params.written_stride;
    const bool masks = params.task == RowTask::kMaskLogits;
    const Weights of_row = weights();
    for_fours([&](int32_t first, const float (&v)[4]) {
#pragma unroll
      for (int32_t i = 0; i < 4; ++i) {
        const int32_t token = first + i;
        if (token >= params.vocab) continue;
        const bool survives = is_valid && order_key(v[i]) >= threshold;
        if (masks) out[token] = survives || !is_valid ? v[i] : kMinusInfinity;
        else out[token] = survives ? normalised(of_row, v[i], of_row(v[i]), mass) : 0.0f;
      }
    });
  }

  /// All of it. token_index: where in token_ids the token goes.
  __device__ __forceinline__ void run(int64_t seed, int64_t position, int64_t token_index) {
    this->prefetch(Base::warp_begin(warp()));      // while the row's parameters are on their way too
    if (threadIdx.x == 0) {
      shared.settings = row_settings(params, row);
      shared.seed = seed;
      shared.position = position;
      shared.token_index = token_index;
      shared.token = -1;        // drawn by no CTA, or by another one
    }
    __syncthreads();
    const bool needs_row_mass =
        samples() && settings.greedy ? false : filters() ? settings.has_top_p && this->top_p_of_all() : params.task != RowTask::kMaskLogits;
    // The mass of log-probabilities is the row's own where both have one scale, or the row's is not needed.
    const bool has_second = wants_logprobs() && needs_row_mass && !is_tempered();
    const bool has_scale = needs_row_mass || is_tempered();
    const float scale = has_scale ? settings.scale : kLog2E, floor = has_scale ? settings.floor : LogitWeights::floor_of(kLog2E);
    const bool needs_mass = needs_row_mass || wants_logprobs();
    this->read(needs_mass, scale, floor, has_second);
    sync();
    uint64_t best = 0;
    uint32_t bound = 0;
    bool fits = true;
#pragma unroll 4
    for (int32_t cta = 0; cta < num_ctas; ++cta) {
      const CtaSummary& other = summary_of(cta);
      best = max_of(best, other.best);
      bound = max_of(bound, other.bound);
      fits = fits && other.num_candidates <= kMaxCandidates;
    }
    const uint32_t best_key = static_cast<uint32_t>(best >> 32);
    if (!settings.valid || best_key <= kExcludedKey || best_key >= kInfiniteKey) {
      if (samples()) write_invalid();
      else write_values(0, 1, false);
      sync();
      return;
    }
    const float reference = key_value(best_key);
    if (threadIdx.x == 0) shared.reference = reference;
    const bool has_candidates = fits && bound != kNoBound;
    if (needs_mass) {
      BlockSums sums(shared.scratch);
      const uint64_t mass = this->scale_segments(sums, 0, Weights(reference, scale, floor));
      const uint64_t second = has_second ? this->scale_segments(sums, 1, Weights(reference, kLog2E)) : mass;
      if (threadIdx.x == 0) {
        shared.summary.mass = mass;
        shared.summary.logprob_mass = second;
      }
    }
    if (has_candidates) this->gather_candidates(bound);
    sync();
    if (needs_mass) {
      uint64_t mass = 0, second = 0;
#pragma unroll 4
      for (int32_t cta = 0; cta < num_ctas; ++cta) {
        mass += summary_of(cta).mass;
        second += summary_of(cta).logprob_mass;
      }
      if (threadIdx.x == 0) {
        shared.row_mass = mass;
        shared.logprob_mass = second;
      }
      __syncthreads();
    }
    if (threadIdx.x == 0 && samples() && settings.greedy && rank == 0) shared.token = static_cast<int32_t>(~static_cast<uint32_t>(best));
    if (filters() || wants_top()) {
      if (rank == 0) ask_candidates(has_candidates, bound, best_key);
      sync();
      if (filters() && !shared.decision.settled) Rereader<Source>(*this).filter();
    }
    const uint32_t threshold = filters() ? shared.decision.threshold : kWholeRow;
    const uint64_t mass = filters() ? shared.decision.mass : shared.row_mass;
    if (!samples()) {
      write_values(threshold, mass, true);
    } else if (!settings.greedy && !(filters() && shared.decision.settled)) {
      draw_segment(draw_share(shared.seed, shared.position, mass), threshold, filters());
    }
    __syncthreads();
    if (threadIdx.x == 0 && shared.token >= 0) {
      store_token(shared.token_index, shared.token);
      params.valid[row] = 1;
      if (params.logprobs != nullptr) params.logprobs[row] = logprob_of(source.one(shared.token));
    }
    if (wants_top() && !shared.decision.has_top) {
      sync();
      write_top_again();
    }
    sync();                   // shared memory of every CTA is read until here
  }

  __device__ __forceinline__ bool wants_top() const { return samples() && params.num_top_logprobs > 0; }

  /// The first CTA's part: decides, draws if the candidates are enough, and tells the others.
  __device__ __forceinline__ void ask_candidates(bool has_candidates, uint32_t bound, uint32_t best_key) {
    const int32_t found = shared.summary.num_candidates + shared.num_gathered;
    Decision decision{shared.row_mass, kWholeRow, false, !wants_top()};
    if (has_candidates && found <= kMaxCandidates) {
      Candidates<Source> candidates(*this, found, bound, best_key);
      if (filters()) {
        decision.threshold = candidates.settle_top_k();
        const bool is_few = samples() && decision.threshold >= bound && candidates.count_from(decision.threshold) <= kSamplingThreads;
        decision.settled = is_few || candidates.settle_top_p(decision.threshold);
        if (decision.settled && (is_few || (samples() && candidates.count_from(decision.threshold) <= kSamplingThreads))) {
          candidates.draw_of_few(decision.threshold, is_few && settings.has_top_p);
        } else if (decision.settled) {
          decision.mass = candidates.mass_from(decision.threshold);
          if (samples()) candidates.draw_of_many(decision.threshold, draw_share(shared.seed, shared.position, decision.mass));
        }
      }
      __syncthreads();        // the bins' room is used for other things
      if (!decision.has_top) decision.has_top = candidates.write_top();
    }
    if (static_cast<int32_t>(threadIdx.x) < num_ctas) ptx::cluster_pointer(&shared, threadIdx.x)->decision = decision;
  }
};

template <class Source>
__device__ __forceinline__ void sample(const SamplingParams& params) {
  extern __shared__ __align__(16) char shared_bytes[];
  const int32_t row = blockIdx.x / ptx::cluster_size();
  const Source source(params, row);
  RowSampler<Source> sampler(params, *reinterpret_cast<SamplingShared*>(shared_bytes), source, row);
  sampler.run(params.seed[row], params.position[row], row);
}

}  // namespace attn
