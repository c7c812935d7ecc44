// Sampling: a thread block cluster takes a row, or a CTA where there are no clusters.
//
// A draw is a race of the tokens (csrc/sampling/sampling.h), which has the same winner whatever way leads to it. Rows
// of which most tokens survive race while they are read for the first time (with top-p: sampling_bands.cuh). Elsewhere
// that read collects the candidates: the tokens at or above a bound that the first segments give, some hundreds of the
// row's largest; the first CTA finds the threshold of the filters among them and has the survivors race. Where they do
// not reach down to the threshold or do not fit, the cluster reads the row again (sampling_again.cuh). docs/sampling.md
// has the whole of it. Every loop has a bound; nothing that is written depends on the order in which threads run.
//
// With a cold L2 the instructions come from memory too, so what is rare or not hot is kept small rather than unrolled.
#pragma once

#include "sampling/device/again.cuh"
#include "sampling/device/bands.cuh"
#include "sampling/device/candidates.cuh"
#include "sampling/device/few.cuh"

namespace attn {

template <class Source>
struct RowSampler : Row<Source> {
  using Base = Row<Source>;
  using Base::filters;
  using Base::for_fours;
  using Base::is_tempered;
  using Base::lane;
  using Base::logprob_of;
  using Base::num_ctas;
  using Base::params;
  using Base::rank;
  using Base::row;
  using Base::samples;
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
  using typename Base::Weights;

  using Base::Base;

  /// The most likely tokens where the candidates do not tell: one read of the row for each. Rare (thousands of equal
  /// values, or a row in ascending order).
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
      for (int32_t w = static_cast<int32_t>(threadIdx.x); w < ceil_div(params.vocab, 32) && first == 0xffffffffu;
           w += kSamplingThreads) {
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
        if (masks)
          out[token] = survives || !is_valid ? v[i] : kMinusInfinity;
        else
          out[token] = survives ? normalised(of_row, v[i], of_row(v[i]), mass) : 0.0f;
      }
    });
  }

  /// All of it. kMayBeFew: FewSurvivors may be tried. token_index: where in token_ids the token goes. ahead: of the
  /// request's position, tokens.
  template <bool kMayBeFew>
  __device__ __forceinline__ void run(int64_t token_index, int32_t ahead) {
    if constexpr (kMayBeFew) FewSurvivors<Source>(*this).prepare();
    if (num_ctas > 1) ptx::cluster_arrive();
    if constexpr (kMayBeFew) {
      if (FewSurvivors<Source>(*this).run()) return;
      ptx::cluster_arrive();
    }
    this->prefetch_first();  // while the row's parameters are on their way too
    if (threadIdx.x == 0) {
      const RowParameters own(params, row);
      const RowDraw draw(params, row);
      shared.settings = row_settings(own, params.vocab);
      shared.seed = draw.seed.value();
      shared.position = draw.position.value() + ahead;
      shared.token_index = token_index;
      shared.task = first_task();
      shared.bands.used = false;
      shared.round = 0;
      shared.num_ctas = num_ctas;
      shared.segment_begin = this->cta_begin(rank);
      shared.segment_end = this->cta_begin(rank + 1);
    }
    __syncthreads();
    if constexpr (!Source::kHasDraft) {  // speculation has no filters
      if (may_have_bands()) {
        BandSearch<Source>(*this).survey();
        if (threadIdx.x == 0 && shared.bands.used) shared.task = band_task();
        __syncthreads();
      }
    }
    // One copy of the reads' code: it must be fetched, too.
#pragma unroll 1
    while (true) {
      if (shared.task.finds_candidates)
        this->read_candidates();
      else
        this->read_survivors();
      Next next = shared.round == 0 ? decide() : decide_again();
      if (next == Next::kSearch) {
        Rereader<Source>(*this).filter();
        next = samples() ? Next::kRace : Next::kFinish;
      }
      if (next == Next::kExit) return;
      if (next == Next::kFinish) break;
      sync();  // what the read left was read
      if (next == Next::kRestart && num_ctas > 1) ptx::cluster_arrive();
      if (threadIdx.x == 0) {
        shared.round = next == Next::kRestart ? 0 : shared.round + 1;
        if (next == Next::kRestart)
          shared.task = first_task();
        else if (next == Next::kBands)
          shared.task.least = shared.bands.low;
        else
          shared.task = ReadTask{settings.scale, settings.floor, key_value(shared.decision.threshold), false, false,
                                 false,          false};
        shared.task.needs_mass = next == Next::kRestart && shared.task.needs_mass;
      }
      __syncthreads();
    }
    __syncthreads();
    if (!samples()) {
      write_values(filters() ? shared.decision.threshold : kWholeRow,
                   filters() ? shared.decision.mass : shared.row_mass, true);
    } else if (threadIdx.x == 0 && rank == 0) {
      write_token();
    }
    if (wants_top() && !shared.decision.has_top) {
      sync();
      write_top_again();
    }
    sync();  // shared memory of every CTA is read until here
  }

  /// What comes behind a read.
  enum class Next {
    kExit,     // nothing
    kFinish,   // the results are written
    kBands,    // a read with the next bands
    kRestart,  // bands tell nothing: as if there had been none
    kRace,     // a read that has the survivors race
    kSearch,   // the threshold is searched, then as kRace
  };

  static constexpr float kFewMinP =
      0.02f;  // from here on min-p mostly leaves no more than there is room for among the candidates

  /// Rows of which most tokens survive race while they are read for the first time.
  __device__ __forceinline__ bool races_first() const {
    return samples() && !settings.greedy && !wants_top() && settings.top_k == 0 && !settings.has_top_p &&
           settings.min_p < kFewMinP;
  }

  /// With top-p alone, in rows long enough for a survey.
  __device__ __forceinline__ bool may_have_bands() const {
    return samples() && settings.valid && !settings.greedy && !wants_top() && settings.has_top_p &&
           settings.top_k == 0 && settings.min_p == 0.0f && params.vocab >= 4 * BandSearch<Source>::kSurveyTokens;
  }

  __device__ __forceinline__ ReadTask band_task() const {
    const float scale = is_tempered() ? settings.scale : kLog2E;
    return ReadTask{scale, LogitWeights::floor_of(scale), shared.bands.low, wants_logprobs(), false, false, true};
  }

  __device__ __forceinline__ ReadTask first_task() const {
    const bool needs_row_mass =
        filters() ? settings.has_top_p && this->top_p_of_all() : params.task == RowTask::kRenorm;
    const bool has_scale = needs_row_mass || is_tempered();
    ReadTask task;
    task.scale = has_scale ? settings.scale : kLog2E;
    task.floor = LogitWeights::floor_of(task.scale);
    task.least = kMinusInfinity;
    task.needs_mass = needs_row_mass || wants_logprobs();
    // The mass of log-probabilities is the row's own where both have one scale, or the row's is not needed.
    task.has_second = wants_logprobs() && needs_row_mass && !is_tempered();
    task.finds_candidates = !races_first();
    task.has_bands = false;
    return task;
  }

  /// Behind the first read.
  __device__ __forceinline__ Next decide() {
    this->exchange_summaries();
    const CtaSummary all = this->together(&shared.summaries[lane()]);
    const Racer racer = all.racer;
    const uint32_t best_key = static_cast<uint32_t>(all.best >> 32);
    if (!settings.valid || best_key <= kExcludedKey || best_key >= kInfiniteKey) {
      if (samples())
        write_invalid();
      else
        write_values(0, 1, false);
      return Next::kExit;
    }
    const bool is_greedy = samples() && settings.greedy;
    if (threadIdx.x == 0) {
      shared.reference = key_value(best_key);
      shared.bound = all.num_candidates <= this->candidate_room() ? all.bound : kNoBound;
      shared.token = is_greedy ? static_cast<int32_t>(~static_cast<uint32_t>(all.best)) : racer.token;
    }
    __syncthreads();
    const bool has_bands = shared.task.has_bands;
    bool is_drawn = is_greedy || (races_first() && racer.key >= min_p_key(weights(), settings));
    if (has_bands) is_drawn = BandSearch<Source>(*this).settle(racer, all.band_masses);
    if (is_drawn && !wants_logprobs()) {  // nobody looks into another CTA's shared memory any more
      if (rank == 0 && threadIdx.x == 0) write_token();
      return Next::kExit;
    }
    const bool asks = !races_first() && !has_bands && (filters() || wants_top());
    const ReadTask& task = shared.task;
    if (task.needs_mass) {
      BlockSums sums(shared.scratch);
      const uint64_t mass = this->scale_segments(sums, 0, Weights(shared.reference, task.scale, task.floor));
      const uint64_t second = task.has_second ? this->scale_segments(sums, 1, Weights(shared.reference, kLog2E)) : mass;
      if (threadIdx.x == 0) {
        shared.summary.mass = mass;
        shared.summary.logprob_mass = second;
      }
    }
    if (task.needs_mass) {
      sync();
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
    if (asks) {
      const auto is_done = [&] { return filters() && shared.decision.settled && samples() && !wants_top(); };
      if (rank == 0) {
        ask_candidates();
        if (is_done() && threadIdx.x == 0) write_token();
      }
      sync();
      if (is_done()) return Next::kExit;
    }
    if (is_drawn || (filters() ? asks && shared.decision.settled : !samples())) return Next::kFinish;
    if (has_bands) return shared.bands.used ? Next::kBands : Next::kRestart;
    if (threadIdx.x == 0) shared.decision.threshold = kWholeRow;
    return filters() ? Next::kSearch : Next::kRace;
  }

  /// Behind a read again.
  __device__ __forceinline__ Next decide_again() {
    sync();
    const CtaSummary all = this->together(&summary_of(min_of(lane(), num_ctas - 1)));
    if (shared.task.has_bands) {
      if (BandSearch<Source>(*this).settle(all.racer, all.band_masses)) return Next::kFinish;
      return shared.bands.used ? Next::kBands : Next::kRestart;
    }
    if (threadIdx.x == 0) shared.token = all.racer.token;
    return Next::kFinish;
  }

  __device__ __forceinline__ void write_token() const {
    store_token(shared.token_index, shared.token);
    params.valid[row] = 1;
    if (params.logprobs != nullptr) params.logprobs[row] = logprob_of(source.one(shared.token));
  }

  __device__ __forceinline__ bool wants_top() const { return samples() && params.num_top_logprobs > 0; }

  /// The first CTA's part: decides, draws if the candidates are enough, and tells the others.
  __device__ __forceinline__ void ask_candidates() {
    Decision& decision = shared.decision;  // in memory: registers are short here
    if (threadIdx.x == 0) decision = Decision{shared.row_mass, kWholeRow, false, !wants_top()};
    const uint32_t bound = shared.bound;
    if (bound != kNoBound) {
      Candidates<Source> candidates(*this);
      if (filters()) {
        uint32_t threshold = candidates.settle_top_k();
        const bool is_few = samples() && threshold >= bound && candidates.count_from(threshold) <= kSamplingThreads;
        if (is_few) candidates.list_few(threshold, settings.has_top_p);
        const bool settles = is_few || candidates.settle_top_p(threshold);
        if (settles && samples()) {
          candidates.draw(threshold, is_few);
        } else if (settles) {
          const uint64_t mass = candidates.mass_from(threshold);
          if (threadIdx.x == 0) decision.mass = mass;
        }
        if (threadIdx.x == 0) {
          decision.threshold = threshold;
          decision.settled = threshold >= bound;
        }
      }
      __syncthreads();  // the bins' room is used for other things
      if (wants_top()) {
        const bool has_top = candidates.write_top();
        if (threadIdx.x == 0) decision.has_top = has_top;
      }
    }
    __syncthreads();
    if (static_cast<int32_t>(threadIdx.x) > 0 && static_cast<int32_t>(threadIdx.x) < num_ctas)
      *ptx::cluster_pointer(&decision, threadIdx.x) = decision;
  }
};

template <class Source, bool kMayBeFew>
__device__ __forceinline__ void sample(const SamplingParams& params) {
  extern __shared__ __align__(16) char shared_bytes[];
  const int32_t row = ptx::cluster_id();
  const Source source(params, row);
  RowSampler<Source> sampler(params, *reinterpret_cast<SamplingShared*>(shared_bytes), source, row);
  sampler.template run<kMayBeFew>(row, 0);
}

}  // namespace attn
