// Sampling: a thread block cluster takes a row, or a CTA where there are no clusters.
//
// One read of the row finds its largest value, the masses of its segments where they are needed, and the candidates: the tokens at or above a bound that the
// first segments give, some hundreds of the row's largest. The first CTA picks the threshold of the filters among the candidates and draws. Where they do not
// reach down to the threshold (a flat row, a large top-k) or do not fit (many equal values), the cluster reads the row again: a histogram, then the members of
// the bin that holds the threshold. docs/sampling.md has the whole of it. Every loop has a bound; nothing depends on the order in which threads run.
#pragma once

#include "device/ptx/cluster.cuh"
#include "device/sampling_select.cuh"
#include "device/sampling_source.cuh"

namespace attn {

constexpr uint32_t kNoBound = 0xffffffffu;              // no candidates are kept
constexpr uint32_t kWholeRow = kExcludedKey + 1;        // every token that can be drawn

/// What the CTAs of a cluster tell each other.
struct CtaSummary {
  uint64_t best;            // key of the largest value, then ~token: the first one among equals
  uint64_t mass;
  uint64_t logprob_mass;
  uint32_t bound;           // candidates are complete from this key on
  int32_t num_candidates;   // may exceed what there is room for
  uint32_t least_key;       // of the candidates, where those are the members of a bin
  uint32_t most_key;
};

/// What the first CTA tells the others.
struct Decision {
  uint64_t mass;            // of the survivors
  uint32_t threshold;
  bool settled;             // the candidates were enough
  bool has_top;             // also for the top log-probabilities
};

struct SamplingShared {
  uint32_t keys[kMaxCandidates];
  int32_t tokens[kMaxCandidates];
  Histogram histogram;
  SelectScratch scratch;
  CtaSummary summary;
  Decision decision;
  uint64_t warp_best[kSamplingWarps];
  int32_t result;

  /// Behind this struct: for each segment of this CTA, its mass, its mass for log-probabilities, its largest value.
  __device__ __forceinline__ uint64_t* segment_mass(int32_t which, int32_t segments) { return reinterpret_cast<uint64_t*>(reinterpret_cast<char*>(this) + kSamplingStateBytes) + which * segments; }
  __device__ __forceinline__ float* segment_reference(int32_t segments) { return reinterpret_cast<float*>(segment_mass(2, segments)); }
};

static_assert(sizeof(SamplingShared) <= kSamplingStateBytes && kSamplingStateBytes % 16 == 0, "");

template <class Source>
struct RowSampler {
  using Weights = typename Source::Weights;

  const SamplingParams& params;
  SamplingShared& shared;
  const Source& source;
  const RowSettings settings;
  const int64_t row;
  const int32_t rank;
  const int32_t num_ctas;
  int32_t segment_begin, segment_end;     // of this CTA
  int32_t table_segments;                 // that a CTA's tables have room for
  Weights weights{1.0f, 1.0f};            // relative to the row's largest value
  uint32_t best_key = 0;
  int32_t best_token = 0;

  __device__ __forceinline__ RowSampler(const SamplingParams& params, SamplingShared& shared, const Source& source, const RowSettings& settings, int64_t row)
      : params(params), shared(shared), source(source), settings(settings), row(row), rank(ptx::cluster_rank()), num_ctas(ptx::cluster_size()) {
    const int32_t segments = ceil_div(params.vocab, kSegmentTokens);
    segment_begin = segments * rank / num_ctas;
    segment_end = segments * (rank + 1) / num_ctas;
    table_segments = ceil_div(segments, num_ctas);
  }

  __device__ __forceinline__ int32_t lane() const { return ptx::lane_id(); }
  __device__ __forceinline__ int32_t warp() const { return threadIdx.x / 32; }
  __device__ __forceinline__ int32_t first_segment(int32_t of_warp) const { return segment_begin + (segment_end - segment_begin) * of_warp / kSamplingWarps; }
  __device__ __forceinline__ uint64_t* mass_table(int32_t which) const { return shared.segment_mass(which, table_segments) - segment_begin; }
  __device__ __forceinline__ float* reference_table() const { return shared.segment_reference(table_segments) - segment_begin; }
  __device__ __forceinline__ const CtaSummary& summary_of(int32_t cta) const { return *ptx::cluster_pointer(&shared.summary, cta); }

  /// A barrier of all threads that work on the row.
  __device__ __forceinline__ void row_sync() const {
    if (num_ctas > 1) ptx::cluster_sync();
    else __syncthreads();
  }

  /// body(segment, values) for every segment of this warp, the next one being loaded meanwhile. Warps make the same number of calls of before_first().
  template <class BeforeFirst, class Body>
  __device__ __forceinline__ void for_segments(const BeforeFirst& before_first, const Body& body) const {
    int32_t segment = first_segment(warp());
    const int32_t end = first_segment(warp() + 1);
    typename Source::Raw raw;
    float v[kLaneTokens];
    if (segment < end) source.load(segment, lane(), raw);
    bool is_first = true;
    do {
      const bool works = segment < end;
      if (works) {
        source.values(raw, v);
        if (segment + 1 < end) source.load(segment + 1, lane(), raw);
      }
      if (is_first) before_first(works, v);
      is_first = false;
      if (works) body(segment, v);
    } while (++segment < end);
  }

  template <class Body>
  __device__ __forceinline__ void for_segments(const Body& body) const {
    for_segments([](bool, const float (&)[kLaneTokens]) {}, body);
  }

  __device__ __forceinline__ static uint32_t lane_max_key(const float (&v)[kLaneTokens]) {
    float most = v[0];
#pragma unroll
    for (int32_t i = 1; i < kLaneTokens; ++i) most = ptx::max_nan(most, v[i]);
    return order_key(most);       // a NaN's is above all others: max_nan gives the positive one
  }

  /// A key that at least `wanted` lanes of the block have something at or above: to 16 bits the wanted-th largest of the lanes' maxima.
  __device__ __forceinline__ uint32_t bound_of(uint32_t lane_key, int32_t wanted) const {
    uint32_t prefix = 0;
#pragma unroll 1
    for (uint32_t bit = 0x8000; bit != 0; bit >>= 1) {
      if (__syncthreads_count((lane_key >> 16) >= (prefix | bit)) >= wanted) prefix |= bit;
    }
    return max_of(prefix << 16, kWholeRow);
  }

  __device__ __forceinline__ void keep(uint32_t key, int32_t token) const {
    const int32_t i = atomicAdd(&shared.summary.num_candidates, 1);
    if (i < kMaxCandidates) {
      shared.keys[i] = key;
      shared.tokens[i] = token;
    }
  }

  /// How many of the lanes' maxima in the row's first segments make a bound that some hundreds of tokens reach; 0: no candidates.
  __device__ __forceinline__ int32_t lanes_at_bound() const {
    const int32_t needed = max_of(settings.top_k, params.num_top_logprobs);
    const bool has_use = params.num_top_logprobs > 0 || (!settings.greedy && settings.filters());
    if (!has_use || settings.top_k > kMaxCandidates / 2) return 0;
    const int32_t wanted = clamp(3 * needed, 512, kMaxCandidates * 3 / 4);
    const int32_t share = min_of(segment_end - segment_begin, kSamplingWarps) * kSegmentTokens;     // tokens that the lanes' maxima are of
    return clamp(static_cast<int32_t>(static_cast<int64_t>(wanted) * share / params.vocab), 8, kSamplingThreads / 2);
  }

  /// The read of the row. logprob_scale: 0 if there is no use for a second mass.
  __device__ __forceinline__ void read_row(bool needs_mass, const Weights& first, const Weights* second) {
    const int32_t lanes = lanes_at_bound();
    uint32_t bound = lanes > 0 ? kWholeRow : kNoBound;
    if (threadIdx.x == 0) shared.summary.num_candidates = 0;
    uint64_t* mass = mass_table(0);
    uint64_t* logprob_mass = mass_table(1);
    float* references = reference_table();
    uint32_t warp_best_key = 0;
    int32_t warp_best_token = 0;
    for_segments(
        [&](bool works, const float (&v)[kLaneTokens]) {
          if (lanes > 0 && params.vocab > kMaxCandidates) bound = bound_of(works ? lane_max_key(v) : 0, lanes);
          else __syncthreads();       // num_candidates is 0
        },
        [&](int32_t segment, const float (&v)[kLaneTokens]) {
          const uint32_t lane_key = lane_max_key(v);
          const uint32_t key = ptx::warp_max(lane_key);
          const float reference = key_value(key);
          if (key > warp_best_key) {
            warp_best_key = key;
            uint32_t first_token = 0xffffffffu;
#pragma unroll
            for (int32_t i = kLaneTokens - 1; i >= 0; --i) {
              if (v[i] == reference) first_token = source.token(segment, lane(), i);
            }
            warp_best_token = static_cast<int32_t>(ptx::warp_min(first_token));
          }
          if (lane() == 0) references[segment] = reference;
          if (lane_key >= bound) {
            const float least = key_value(bound);
#pragma unroll
            for (int32_t i = 0; i < kLaneTokens; ++i) {
              if (v[i] >= least) keep(order_key(v[i]), source.token(segment, lane(), i));
            }
          }
          if (!needs_mass) return;
          const bool has_mass = key > kExcludedKey && key < kInfiniteKey;
#pragma unroll 1
          for (int32_t which = 0; which < 2; ++which) {
            if (which == 1 && second == nullptr) break;
            uint64_t sum = 0;
            if (has_mass) {
              const Weights local(reference, which == 0 ? first : *second);
#pragma unroll
              for (int32_t i = 0; i < kLaneTokens; ++i) sum += local(v[i]);
            }
            sum = ptx::warp_add(sum);
            if (lane() == 0) (which == 0 ? mass : logprob_mass)[segment] = sum;
          }
        });
    if (lane() == 0) shared.warp_best[warp()] = static_cast<uint64_t>(warp_best_key) << 32 | ~static_cast<uint32_t>(warp_best_token);
    __syncthreads();
    if (threadIdx.x == 0) {
      uint64_t best = 0;
#pragma unroll
      for (int32_t w = 0; w < kSamplingWarps; ++w) best = max_of(best, shared.warp_best[w]);
      shared.summary.best = best;
      shared.summary.bound = bound;
    }
  }

  /// Masses of the segments in units of the row's; their sum goes to the summary.
  __device__ __forceinline__ void scale_segments(int32_t which, const Weights& of_row, uint64_t& total) {
    uint64_t* mass = mass_table(which);
    const float* references = reference_table();
    uint64_t sum = 0;
    for (int32_t s = segment_begin + static_cast<int32_t>(threadIdx.x); s < segment_end; s += kSamplingThreads) {
      const uint64_t scaled = references[s] > kMinusInfinity ? scale_mass(mass[s], segment_factor(of_row, references[s])) : 0;
      mass[s] = scaled;
      sum += scaled;
    }
    total = block_sum(shared.scratch, which, sum);
  }

  /// Brings the candidates of all CTAs, from `bound` on, to the first.
  __device__ __forceinline__ void gather_candidates(uint32_t bound) const {
    if (rank == 0) return;
    SamplingShared& first = *ptx::cluster_pointer(&shared, 0);
    const int32_t count = min_of(shared.summary.num_candidates, kMaxCandidates);
    for (int32_t i = threadIdx.x; i < count; i += kSamplingThreads) {
      if (shared.keys[i] < bound) continue;
      const int32_t at = atomicAdd(&first.summary.num_candidates, 1);
      if (at < kMaxCandidates) {
        first.keys[at] = shared.keys[i];
        first.tokens[at] = shared.tokens[i];
      }
    }
  }

  __device__ __forceinline__ uint64_t candidates_mass(int32_t count, uint32_t lowest) const {
    uint64_t sum = 0;
    for (int32_t i = threadIdx.x; i < count; i += kSamplingThreads) {
      if (shared.keys[i] >= lowest) sum += weights(key_value(shared.keys[i]));
    }
    __syncthreads();
    return block_sum(shared.scratch, 0, sum);
  }

  __device__ __forceinline__ uint64_t candidates_count(int32_t count, uint32_t lowest) const {
    uint64_t sum = 0;
    for (int32_t i = threadIdx.x; i < count; i += kSamplingThreads) sum += shared.keys[i] >= lowest;
    __syncthreads();
    return block_sum(shared.scratch, 0, sum);
  }

  __device__ __forceinline__ uint32_t select_candidate(int32_t count, uint32_t from, uint64_t target, bool by_mass) const {
    return select_key(shared.scratch, shared.histogram, count, from, best_key + 1, target, [&](int32_t i) { return shared.keys[i]; },
                      [&](int32_t i) { return by_mass ? weights(key_value(shared.keys[i])) : uint64_t{1}; });
  }

  /// Smallest key that survives the filters, if the candidates from `bound` on tell.
  __device__ __forceinline__ bool settle(int32_t count, uint32_t bound, uint64_t row_mass, uint32_t& threshold) const {
    threshold = min_p_key(weights, settings);
    const uint32_t from = max_of(threshold, bound);
    if (settings.top_k > 0) {
      const uint64_t available = candidates_count(count, from);
      if (available > static_cast<uint64_t>(settings.top_k)) threshold = select_candidate(count, from, settings.top_k, false);
      else if (available == static_cast<uint64_t>(settings.top_k)) threshold = max_of(threshold, from);
    }
    if (settings.has_top_p) {
      const bool of_all = top_p_of_all();
      if (!of_all && threshold < bound) return false;
      const uint32_t begin = max_of(threshold, bound);
      const uint64_t available = candidates_mass(count, begin);
      const uint64_t target = top_p_target(settings, of_all ? row_mass : available);
      if (available >= target) threshold = select_candidate(count, begin, target, true);
    }
    return threshold >= bound;
  }

  /// Whether top-p is a share of the whole row's mass.
  __device__ __forceinline__ bool top_p_of_all() const { return params.joint != 0 || (settings.top_k == 0 && settings.min_p == 0.0f); }

  /// The share-th token among the candidates that survive, by token order.
  __device__ __forceinline__ int32_t draw_candidate(int32_t count, uint32_t threshold, uint64_t share) const {
    const uint32_t key = select_key(shared.scratch, shared.histogram, count, 0, kMaxVocab, share + 1,
                                    [&](int32_t i) { return static_cast<uint32_t>(kMaxVocab - 1 - shared.tokens[i]); },
                                    [&](int32_t i) { return shared.keys[i] >= threshold ? weights(key_value(shared.keys[i])) : uint64_t{0}; });
    return kMaxVocab - 1 - static_cast<int32_t>(key);
  }

  // ---- Reading the row again ----

  /// Bin of a value in the first histogram: the top one holds the largest value, lower ones are 24 / 2048 powers of two apart, the lowest takes the rest.
  __device__ __forceinline__ static int32_t coarse_bin(const LogitWeights& of_row, float value) {
    return kBins - 1 - static_cast<int32_t>(min_of((of_row.reference - value) * (of_row.scale * (kBins / 24.0f)), static_cast<float>(kBins - 1)));
  }
  __device__ __forceinline__ static int32_t coarse_bin(const ProbWeights& of_row, float value) {
    return kBins - 1 - static_cast<int32_t>(min_of((order_key(of_row.reference) - order_key(value)) >> 17, static_cast<uint32_t>(kBins - 1)));
  }

  /// Sums the CTAs' histograms; each gets the sums.
  __device__ __forceinline__ void share_histogram() const {
    row_sync();
    if (num_ctas == 1) return;
    for (int32_t bin = kBins * rank / num_ctas + static_cast<int32_t>(threadIdx.x); bin < kBins * (rank + 1) / num_ctas; bin += kSamplingThreads) {
      uint64_t sum = 0;
      for (int32_t cta = 0; cta < num_ctas; ++cta) sum += ptx::cluster_pointer(&shared.histogram, cta)->sum(bin);
      for (int32_t cta = 0; cta < num_ctas; ++cta) ptx::cluster_pointer(&shared.histogram, cta)->set(bin, sum);
    }
    row_sync();
  }

  /// Histogram over the cluster of values with low <= key < high that `chosen` takes.
  template <class Chosen, class Bin>
  __device__ __forceinline__ void count_values(bool by_mass, const Chosen& chosen, const Bin& bin) const {
    clear(shared.histogram);
    __syncthreads();
    for_segments([&](int32_t, const float (&v)[kLaneTokens]) {
#pragma unroll
      for (int32_t i = 0; i < kLaneTokens; ++i) {
        const uint32_t key = order_key(v[i]);
        if (!chosen(key, v[i])) continue;
        const uint64_t weight = by_mass ? weights(v[i]) : 1;
        if (weight != 0) shared.histogram.add(bin(key, v[i]), weight);
      }
    });
    share_histogram();
  }

  /// The row's mass of values that `chosen` takes, by segments.
  template <class Chosen>
  __device__ __forceinline__ void sum_masses(const Chosen& chosen) const {
    uint64_t* mass = mass_table(0);
    for_segments([&](int32_t segment, const float (&v)[kLaneTokens]) {
      uint64_t sum = 0;
#pragma unroll
      for (int32_t i = 0; i < kLaneTokens; ++i) {
        if (chosen(segment, i, v[i])) sum += weights(v[i]);
      }
      sum = ptx::warp_add(sum);
      if (lane() == 0) mass[segment] = sum;
    });
  }

  /// Largest key such that values at or above weigh, or count, at least `target`, none below `lowest` being looked at. The segments' masses are then those of
  /// the values at or above. False if there is no such key.
  __device__ __forceinline__ bool find_threshold(bool by_mass, uint64_t target, uint32_t lowest, uint32_t& threshold) const {
    const Weights of_row = weights;
    count_values(by_mass, [&](uint32_t key, float) { return key >= lowest; }, [&](uint32_t, float x) { return coarse_bin(of_row, x); });
    const Crossing crossing = find_bin(shared.scratch, shared.histogram, target);
    if (!crossing.found) return false;
    const int32_t bin = crossing.index;
    target -= crossing.above;
    if (threadIdx.x == 0) {
      shared.summary.num_candidates = 0;
      shared.summary.least_key = 0xffffffffu;
      shared.summary.most_key = 0;
    }
    row_sync();
    uint32_t least = 0xffffffffu, most = 0;
    sum_masses([&](int32_t segment, int32_t i, float x) {
      const uint32_t key = order_key(x);
      if (key < lowest) return false;
      const int32_t of_value = coarse_bin(of_row, x);
      if (of_value == bin) {
        least = min_of(least, key);
        most = max_of(most, key);
        keep(key, source.token(segment, lane(), i));
      }
      return of_value > bin;
    });
    least = ptx::warp_min(least);
    most = ptx::warp_max(most);
    if (lane() == 0) {
      atomicMin(&shared.summary.least_key, least);
      atomicMax(&shared.summary.most_key, most);
    }
    row_sync();
    int32_t members = 0;
    for (int32_t cta = 0; cta < num_ctas; ++cta) {
      const CtaSummary& other = summary_of(cta);
      members += other.num_candidates;
      least = cta == 0 ? other.least_key : min_of(least, other.least_key);
      most = cta == 0 ? other.most_key : max_of(most, other.most_key);
    }
    row_sync();
    if (members <= kMaxCandidates) {
      const int32_t own = shared.summary.num_candidates;
      __syncthreads();
      gather_candidates(0);
      row_sync();
      if (rank == 0) {
        const uint32_t key = select_key(shared.scratch, shared.histogram, members, least, most + 1, target, [&](int32_t i) { return shared.keys[i]; },
                                        [&](int32_t i) { return by_mass ? weights(key_value(shared.keys[i])) : uint64_t{1}; });
        if (static_cast<int32_t>(threadIdx.x) < num_ctas) ptx::cluster_pointer(&shared, threadIdx.x)->decision.threshold = key;
      }
      row_sync();
      threshold = shared.decision.threshold;
      // The members that survive join the masses of their segments: the first `own` candidates are this CTA's, and one thread of a segment adds its members up.
      uint64_t* mass = mass_table(0);
      for (int32_t s = segment_begin + static_cast<int32_t>(threadIdx.x); s < segment_end; s += kSamplingThreads) {
        uint64_t sum = mass[s];
        for (int32_t i = 0; i < own; ++i) {
          if (shared.tokens[i] / kSegmentTokens == s && shared.keys[i] >= threshold) sum += weights(key_value(shared.keys[i]));
        }
        mass[s] = sum;
      }
      return true;
    }
    uint32_t low = least, high = most + 1;
#pragma unroll 1
    while (high - low > 1) {      // at most three rounds
      const int32_t shift = max_of(32 - __clz(high - low - 1) - kBinBits, 0);
      count_values(by_mass, [&](uint32_t key, float) { return key >= low && key < high; }, [&](uint32_t key, float) { return (key - low) >> shift; });
      const Crossing finer = find_bin(shared.scratch, shared.histogram, target);
      target -= finer.above;
      low += static_cast<uint32_t>(finer.index) << shift;
      high = min_of(high - low, 1u << shift) + low;
      row_sync();                 // histograms are read by others until here
    }
    threshold = low;
    sum_masses([&](int32_t, int32_t, float x) { return order_key(x) >= low; });
    return true;
  }

  /// The row's mass from the segments' masses; every CTA's is then in its summary.
  __device__ __forceinline__ uint64_t total_mass() {
    const uint64_t* mass = mass_table(0);
    uint64_t sum = 0;
    __syncthreads();
    for (int32_t s = segment_begin + static_cast<int32_t>(threadIdx.x); s < segment_end; s += kSamplingThreads) sum += mass[s];
    sum = block_sum(shared.scratch, 0, sum);
    if (threadIdx.x == 0) shared.summary.mass = sum;
    row_sync();
    return sum_of_masses();
  }

  __device__ __forceinline__ uint64_t sum_of_masses() const {
    uint64_t sum = 0;
    for (int32_t cta = 0; cta < num_ctas; ++cta) sum += summary_of(cta).mass;
    return sum;
  }

  /// Smallest surviving key and the survivors' mass, by reading the row again; the segments' masses are then those of the survivors.
  __device__ __forceinline__ uint64_t filter_again(uint64_t row_mass, uint32_t& threshold) {
    threshold = min_p_key(weights, settings);
    bool has_masses = settings.top_k > 0 && find_threshold(false, settings.top_k, threshold, threshold);
    uint64_t mass = 0;
    if (!has_masses && (!settings.has_top_p || !top_p_of_all())) {
      const uint32_t lowest = threshold;
      sum_masses([&](int32_t, int32_t, float x) { return order_key(x) >= lowest; });
      has_masses = true;
    }
    if (has_masses) mass = total_mass();
    if (settings.has_top_p) {
      const uint32_t lowest = threshold;
      row_sync();
      has_masses = find_threshold(true, top_p_target(settings, top_p_of_all() ? row_mass : mass), lowest, threshold);
      if (!has_masses) sum_masses([&](int32_t, int32_t, float x) { return order_key(x) >= lowest; });
      mass = total_mass();
    }
    return mass;
  }

  // ---- Results ----

  __device__ __forceinline__ void store_token(int64_t index, int32_t token) const {
    if (params.token_ids_are_int64 != 0) static_cast<int64_t*>(params.token_ids)[index] = token;
    else static_cast<int32_t*>(params.token_ids)[index] = token;
  }

  __device__ __forceinline__ bool is_tempered() const { return params.tempered_logprobs != 0 && !settings.greedy; }

  __device__ __forceinline__ float logprob_of(float value, uint64_t mass) const {
    return logprob(value, weights.reference, is_tempered() ? settings.inverse_temperature : 1.0f, mass);
  }

  /// Draws by segments: the CTA that has the share-th part of the row finds the segment, then the token in it. Masses are scaled by the segment's factor where
  /// the row has no filters (`threshold` is kWholeRow), else relative to the row's largest value. Returns the token, or -1 in the other CTAs.
  __device__ __forceinline__ int32_t draw_segment(uint64_t share, uint32_t threshold, bool is_filtered) {
    uint64_t before = 0;
    for (int32_t cta = 0; cta < rank; ++cta) before += summary_of(cta).mass;
    if (share < before || share - before >= shared.summary.mass) return -1;
    share -= before;
    constexpr int32_t kItems = kMaxVocab / kSegmentTokens / kSamplingThreads;
    const uint64_t* mass = mass_table(0);
    uint64_t items[kItems];
#pragma unroll
    for (int32_t i = 0; i < kItems; ++i) {
      const int32_t s = segment_begin + static_cast<int32_t>(threadIdx.x) * kItems + i;
      items[i] = s < segment_end ? mass[s] : 0;
    }
    const Crossing crossing = find_crossing(shared.scratch, items, share + 1);
    share -= crossing.above;
    const int32_t segment = segment_begin + crossing.index;
    if (warp() == 0) {
      const float reference = is_filtered ? weights.reference : reference_table()[segment];
      const uint64_t factor = is_filtered ? uint64_t{1} << kWeightBits : segment_factor(weights, reference);
      const Weights local(reference, weights);
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
        bool found = false;
#pragma unroll
        for (int32_t i = 0; i < kLaneTokens; ++i) {
          sum += order_key(v[i]) >= threshold ? local(v[i]) : 0;
          if (!found && scale_mass(sum, factor) > share) {
            shared.result = begin + i;
            found = true;
          }
        }
      }
    }
    __syncthreads();
    return shared.result;
  }

  /// The top_count most likely tokens, from the candidates in the first CTA.
  __device__ __forceinline__ void write_top(int32_t count, uint32_t bound, uint64_t logprob_mass) const {
    const int32_t wanted = params.num_top_logprobs;
    const uint64_t available = candidates_count(count, bound);
    const uint32_t least = available > static_cast<uint64_t>(wanted) ? select_candidate(count, bound, wanted, false) : bound;
    uint64_t* ranked = reinterpret_cast<uint64_t*>(shared.histogram.low);      // key, then ~token
    __syncthreads();
    if (threadIdx.x == 0) shared.result = 0;
    __syncthreads();
    for (int32_t i = threadIdx.x; i < count; i += kSamplingThreads) {
      if (shared.keys[i] >= least) ranked[atomicAdd(&shared.result, 1)] = static_cast<uint64_t>(shared.keys[i]) << 32 | ~static_cast<uint32_t>(shared.tokens[i]);
    }
    __syncthreads();
    const int32_t found = shared.result;
    for (int32_t i = threadIdx.x; i < found; i += kSamplingThreads) {
      int32_t place = 0;
      for (int32_t j = 0; j < found; ++j) place += ranked[j] > ranked[i];
      if (place < wanted) store_top(place, ranked[i], logprob_mass);
    }
    for (int32_t place = found + static_cast<int32_t>(threadIdx.x); place < wanted; place += kSamplingThreads) store_top(place, 0, logprob_mass);
  }

  /// `ranked`: key and ~token; 0: no such token.
  __device__ __forceinline__ void store_top(int32_t place, uint64_t ranked, uint64_t logprob_mass) const {
    const int64_t at = row * params.num_top_logprobs + place;
    params.top_token_ids[at] = ranked == 0 ? 0 : static_cast<int32_t>(~static_cast<uint32_t>(ranked));
    params.top_logprobs[at] = ranked == 0 ? kMinusInfinity : logprob_of(key_value(static_cast<uint32_t>(ranked >> 32)), logprob_mass);
  }

  /// The same where the candidates do not tell: one read of the row for each. Rare (thousands of equal values, or a row in ascending order).
  __device__ __forceinline__ void write_top_again(uint64_t logprob_mass) const {
    uint64_t last = ~uint64_t{0};
#pragma unroll 1
    for (int32_t place = 0; place < params.num_top_logprobs; ++place) {
      uint64_t next = 0;
      if (last != 0) {
        for_segments([&](int32_t segment, const float (&v)[kLaneTokens]) {
#pragma unroll
          for (int32_t i = 0; i < kLaneTokens; ++i) {
            const uint64_t ranked = static_cast<uint64_t>(order_key(v[i])) << 32 | ~static_cast<uint32_t>(source.token(segment, lane(), i));
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
      row_sync();
      last = 0;
      for (int32_t cta = 0; cta < num_ctas; ++cta) last = max_of(last, summary_of(cta).best);
      row_sync();
      if (rank == 0 && threadIdx.x == 0) store_top(place, last, logprob_mass);
    }
  }

  /// A row that cannot be sampled: its first token that the mask allows, else 0.
  __device__ __forceinline__ void write_invalid(int64_t token_index) const {
    if (rank != 0) return;
    uint32_t first = 0xffffffffu;
    if (params.token_mask != nullptr) {
      const uint32_t* words = params.token_mask + row * params.mask_stride;
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
      store_token(token_index, first == 0xffffffffu ? 0 : static_cast<int32_t>(first));
      params.valid[row] = 0;
      if (params.logprobs != nullptr) params.logprobs[row] = __uint_as_float(0x7fc00000u);
    }
    for (int32_t i = static_cast<int32_t>(threadIdx.x); i < params.num_top_logprobs; i += kSamplingThreads) {
      params.top_token_ids[row * params.num_top_logprobs + i] = 0;
      params.top_logprobs[row * params.num_top_logprobs + i] = __uint_as_float(0x7fc00000u);
    }
  }

  /// What kRenorm and kMaskLogits write.
  __device__ __forceinline__ void write_values(uint32_t threshold, uint64_t mass, bool is_valid) const {
    float* out = params.written + row * params.written_stride;
    const bool masks = params.task == RowTask::kMaskLogits;
    for_segments([&](int32_t segment, const float (&v)[kLaneTokens]) {
#pragma unroll
      for (int32_t i = 0; i < kLaneTokens; ++i) {
        const int32_t token = source.token(segment, lane(), i);
        if (token >= params.vocab) continue;
        const bool survives = is_valid && order_key(v[i]) >= threshold;
        if (masks) out[token] = survives || !is_valid ? v[i] : kMinusInfinity;
        else out[token] = survives ? normalised(weights, v[i], weights(v[i]), mass) : 0.0f;
      }
    });
  }

  /// All of it. token_index: where in token_ids the token goes.
  __device__ __forceinline__ void run(int64_t seed, int64_t position, int64_t token_index) {
    const bool samples = params.task == RowTask::kSample || params.task == RowTask::kSpeculate;
    const bool filters = settings.filters() && !(samples && settings.greedy);
    const bool wants_logprobs = samples && (params.logprobs != nullptr || params.num_top_logprobs > 0);
    const bool needs_row_mass = (samples && settings.greedy) ? false : filters ? settings.has_top_p && top_p_of_all() : params.task != RowTask::kMaskLogits;
    // The mass of log-probabilities is the row's own where both have one scale.
    const Weights logprob_weights(0.0f, is_tempered() ? settings.scale : kLog2E);
    const bool shares_mass = wants_logprobs && (!needs_row_mass || is_tempered());
    const Weights row_weights(0.0f, needs_row_mass ? settings.scale : is_tempered() ? settings.scale : kLog2E);
    const bool has_second = wants_logprobs && !shares_mass;
    read_row(needs_row_mass || wants_logprobs, row_weights, has_second ? &logprob_weights : nullptr);
    row_sync();
    uint64_t best = 0;
    uint32_t bound = 0;
    bool fits = true;
    for (int32_t cta = 0; cta < num_ctas; ++cta) {
      const CtaSummary& other = summary_of(cta);
      best = max_of(best, other.best);
      bound = max_of(bound, other.bound);
      fits = fits && other.num_candidates <= kMaxCandidates;
    }
    best_key = static_cast<uint32_t>(best >> 32);
    best_token = static_cast<int32_t>(~static_cast<uint32_t>(best));
    const bool is_valid = settings.valid && best_key > kExcludedKey && best_key < kInfiniteKey;
    if (!is_valid) {
      if (samples) write_invalid(token_index);
      else write_values(0, 1, false);
      row_sync();
      return;
    }
    weights = Weights(key_value(best_key), settings.scale);
    uint64_t row_mass = 0, logprob_mass = 0;
    const bool has_candidates = fits && bound != kNoBound;
    row_sync();       // num_candidates was read
    if (needs_row_mass || wants_logprobs) {
      uint64_t mass = 0, second = 0;
      scale_segments(0, Weights(weights.reference, row_weights), mass);
      if (has_second) scale_segments(1, Weights(weights.reference, logprob_weights), second);
      if (threadIdx.x == 0) {
        shared.summary.mass = mass;
        shared.summary.logprob_mass = has_second ? second : mass;
      }
    }
    if (has_candidates) gather_candidates(bound);
    row_sync();
    if (needs_row_mass || wants_logprobs) {
      for (int32_t cta = 0; cta < num_ctas; ++cta) {
        row_mass += summary_of(cta).mass;
        logprob_mass += summary_of(cta).logprob_mass;
      }
    }
    int32_t token = samples && settings.greedy ? best_token : -1;
    uint32_t threshold = kWholeRow;
    uint64_t mass = row_mass;
    bool has_top = params.num_top_logprobs == 0 || !samples;
    if (filters || !has_top) {
      if (rank == 0) {
        const int32_t count = min_of(shared.summary.num_candidates, kMaxCandidates);
        const bool complete = has_candidates && shared.summary.num_candidates <= kMaxCandidates;
        const bool settled = filters && complete && settle(count, bound, row_mass, threshold);
        if (settled) mass = candidates_mass(count, threshold);
        if (settled && samples) token = draw_candidate(count, threshold, draw_share(seed, position, mass));
        if (!has_top && complete && (bound == kWholeRow || candidates_count(count, bound) >= static_cast<uint64_t>(params.num_top_logprobs))) {
          write_top(count, bound, logprob_mass);
          has_top = true;
        }
        if (static_cast<int32_t>(threadIdx.x) < num_ctas) {
          ptx::cluster_pointer(&shared, threadIdx.x)->decision = Decision{mass, threshold, settled, has_top};
        }
      }
      row_sync();
      threshold = shared.decision.threshold;
      mass = shared.decision.mass;
      has_top = shared.decision.has_top;
      if (filters && !shared.decision.settled) {
        row_sync();           // decision was read
        mass = filter_again(row_mass, threshold);
        if (samples) token = draw_segment(draw_share(seed, position, mass), threshold, true);
      }
    } else if (samples && !settings.greedy) {
      token = draw_segment(draw_share(seed, position, mass), kWholeRow, false);
    }
    if (!samples) {
      write_values(threshold, mass, true);
    } else if (token >= 0 && threadIdx.x == 0 && (!settings.greedy || rank == 0)) {
      store_token(token_index, token);
      params.valid[row] = 1;
      if (params.logprobs != nullptr) params.logprobs[row] = logprob_of(source.one(token), logprob_mass);
    }
    if (!has_top) {
      row_sync();
      write_top_again(logprob_mass);
    }
    row_sync();               // shared memory of every CTA is read until here
  }
};

template <class Source>
__device__ __forceinline__ void sample(const SamplingParams& params) {
  extern __shared__ __align__(16) char shared_bytes[];
  const int64_t row = blockIdx.x / ptx::cluster_size();
  const Source source(params, row);
  RowSampler<Source> sampler(params, *reinterpret_cast<SamplingShared*>(shared_bytes), source, row_settings(params, row), row);
  sampler.run(params.seed[row], params.position[row], row);
}

}  // namespace attn
