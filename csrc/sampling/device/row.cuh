// A row and the CTAs that share it, and the two reads of it: for candidates, for a race. Both find the largest value
// and the segments' masses.
#pragma once

#include "common/ptx/cluster.cuh"
#include "common/ptx/cp_async.cuh"
#include "common/ptx/prefetch.cuh"
#include "sampling/device/source.cuh"
#include "sampling/device/state.cuh"

namespace attn {

template <class Source>
struct Row {
  using Weights = typename Source::Weights;

  const SamplingParams& params;
  SamplingShared& shared;
  const Source& source;
  const RowSettings& settings;
  const int32_t row;
  const int32_t rank;
  const int32_t num_ctas;

  /// Without a barrier between: thread 0 has not yet written the settings and the segments.
  __device__ __forceinline__ Row(const SamplingParams& params, SamplingShared& shared, const Source& source,
                                 int32_t row)
      : params(params),
        shared(shared),
        source(source),
        settings(shared.settings),
        row(row),
        rank(ptx::cluster_rank()),
        num_ctas(ptx::cluster_size()) {}

  __device__ __forceinline__ Weights weights() const {
    return Weights(shared.reference, settings.scale, settings.floor);
  }

  __device__ __forceinline__ bool samples() const {
    return params.task == RowTask::kSample || params.task == RowTask::kSpeculate;
  }
  __device__ __forceinline__ bool filters() const { return settings.filters() && !(samples() && settings.greedy); }
  /// Whether top-p is a share of the whole row's mass.
  __device__ __forceinline__ bool top_p_of_all() const {
    return params.joint != 0 || (settings.top_k == 0 && settings.min_p == 0.0f);
  }

  __device__ __forceinline__ static int32_t lane() { return ptx::lane_id(); }
  __device__ __forceinline__ static int32_t warp() { return threadIdx.x / 32; }
  __device__ __forceinline__ int32_t num_segments() const { return ceil_div(params.vocab, kSegmentTokens); }
  __device__ __forceinline__ int32_t segments() const { return shared.segment_end - shared.segment_begin; }
  __device__ __forceinline__ uint64_t* mass_table(int32_t which) const {
    return shared.segment_mass(which, segments()) - shared.segment_begin;
  }
  __device__ __forceinline__ float* reference_table() const {
    return shared.segment_reference(segments()) - shared.segment_begin;
  }
  __device__ __forceinline__ const CtaSummary& summary_of(int32_t cta) const {
    return *ptx::cluster_pointer(&shared.summary, cta);
  }

  /// A barrier of all threads that work on the row.
  __device__ __forceinline__ void sync() const {
    if (num_ctas > 1)
      ptx::cluster_sync();
    else
      __syncthreads();
  }

  __device__ __forceinline__ static int32_t token(int32_t segment, int32_t i) { return lane_token<Source>(segment, i); }

  __device__ __forceinline__ int32_t warp_begin(int32_t of_warp) const {
    return shared.segment_begin + segments() * of_warp / kSamplingWarps;
  }

  /// x / num_ctas, which is a power of two.
  __device__ __forceinline__ int32_t share_of_cta(int32_t x) const { return x >> (31 - __clz(num_ctas)); }

  __device__ __forceinline__ int32_t cta_begin(int32_t of_cta) const { return share_of_cta(num_segments() * of_cta); }

  /// body(segment, values) for every segment of this warp, the next one being loaded meanwhile. first(has, values),
  /// which may hold barriers, is called once by every warp before its first segment's body.
  template <class First, class Body>
  __device__ __forceinline__ void for_segments(const First& first, const Body& body) const {
    const int32_t begin = warp_begin(warp());
    const int32_t end = warp_begin(warp() + 1);
    typename Source::Vector raw[Source::kVectors] =
        {};  // set, or registers would hold what was left from one read to the next
    float v[kLaneTokens] = {};
    // The round before the first only loads: one copy of the loading code.
#pragma unroll 1
    for (int32_t segment = begin - 1; segment < max_of(end, begin + 1); ++segment) {
      const bool works = segment >= begin && segment < end;
      if (works) values(raw, v);
      if (segment + 1 < end) load(segment + 1, raw);
      if (segment == begin) first(works, v);
      if (works) body(segment, v);
    }
  }

  /// The same with what comes next on its way to shared memory: for a body that needs the registers. Every lane copies
  /// what it reads itself.
  template <class Body>
  __device__ __forceinline__ void for_segments(const Body& body) const {
    const int32_t begin = warp_begin(warp()), end = warp_begin(warp() + 1);
    uint4* staged = shared.staged() + threadIdx.x;
    if (begin < end) stage(begin, staged);
#pragma unroll 1
    for (int32_t segment = begin; segment < end; ++segment) {
      typename Source::Vector raw[Source::kVectors];
      float v[kLaneTokens];
      if (is_staged(segment)) {
        ptx::cp_async_wait<0>();
#pragma unroll
        for (int32_t j = 0; j < Source::kVectors; ++j)
          source.take(segment, lane(), j, staged[j * kSamplingThreads], raw[j]);
      } else {
        load(segment, raw);
      }
      values(raw, v);
      if (segment + 1 < end) stage(segment + 1, staged);
      body(segment, v);
    }
  }

  __device__ __forceinline__ bool is_staged(int32_t segment) const {
    return !Source::kHasDraft && source.reader.reads_whole((segment + 1) * kSegmentTokens);
  }

  __device__ __forceinline__ void stage(int32_t segment, uint4* staged) const {
    if (!is_staged(segment)) return;
#pragma unroll
    for (int32_t j = 0; j < Source::kVectors; ++j) {
      ptx::cp_async_16(ptx::shared_address(staged + j * kSamplingThreads),
                       source.reader.row + Source::Reader::vector_token(segment, lane(), j));
    }
    ptx::cp_async_commit();
  }

  __device__ __forceinline__ void values(const typename Source::Vector (&raw)[Source::kVectors],
                                         float (&v)[kLaneTokens]) const {
    segment_values(source, raw, v);
  }
  __device__ __forceinline__ void load(int32_t segment, typename Source::Vector (&raw)[Source::kVectors]) const {
    load_segment(source, segment, lane(), raw);
  }

  /// Has a segment on its way to the L2 cache: registers for loading it ahead there are none.
  __device__ __forceinline__ void prefetch(int32_t segment) const {
    constexpr int32_t kLineTokens = 128 / static_cast<int32_t>(sizeof(*source.reader.row));
    const int32_t first = lane() * kLineTokens;
    if (first < kSegmentTokens && segment * kSegmentTokens + first < params.vocab)
      ptx::prefetch_l2(source.reader.row + segment * kSegmentTokens + first);
  }

  static constexpr int32_t kPrefetched = 3;  // segments of a warp on their way at a time

  /// Before the segments are set.
  __device__ __forceinline__ void prefetch_first() const {
    const int32_t begin = cta_begin(rank), count = cta_begin(rank + 1) - begin;
    const int32_t first = begin + count * warp() / kSamplingWarps, last = begin + count * (warp() + 1) / kSamplingWarps;
    for (int32_t segment = first; segment < min_of(last, first + kPrefetched); ++segment) prefetch(segment);
  }

  /// body(token, values of it and of the next three) for all tokens of this warp's segments, then end(segment): for
  /// passes that are rare, so it is small.
  template <class Body, class End>
  __device__ __forceinline__ void for_fours(const Body& body, const End& end) const {
    const int32_t last = warp_begin(warp() + 1);
    typename Source::Vector raw;
    float v[4];
#pragma unroll 1
    for (int32_t segment = warp_begin(warp()); segment < last; ++segment) {
      prefetch(segment + 1);
#pragma unroll 1
      for (int32_t i = 0; i < kLaneTokens; i += 4) {
        if (i % Source::kVectorTokens == 0)
          source.load(segment, lane(), i / Source::kVectorTokens, raw);
        else
          Source::skip_four(raw);
        source.four_values(raw, v);
        body(token(segment, i), v);
      }
      end(segment);
    }
  }

  template <class Body>
  __device__ __forceinline__ void for_fours(const Body& body) const {
    for_fours(body, [](int32_t) {});
  }

  __device__ __forceinline__ static uint32_t lane_max_key(const float (&v)[kLaneTokens]) {
    float most = v[0];
#pragma unroll
    for (int32_t i = 1; i < kLaneTokens; ++i) most = ptx::max_nan(most, v[i]);
    return order_key(most);  // a NaN's is above all others: max_nan gives the positive one
  }

  /// A key that at least `wanted` lanes of the block have something at or above: to 16 bits the wanted-th largest of
  /// the lanes' maxima.
  __device__ __forceinline__ uint32_t bound_of(uint32_t lane_key, int32_t wanted) const {
    uint32_t prefix = 0;
#pragma unroll 1
    for (uint32_t bit = 0x8000; bit != 0; bit >>= 1) {
      if (__syncthreads_count((lane_key >> 16) >= (prefix | bit)) >= wanted) prefix |= bit;
    }
    return max_of(prefix << 16, kWholeRow);
  }

  /// How many of the lanes' maxima in the row's first segments make a bound that some hundreds of tokens reach; 0: no
  /// candidates.
  __device__ __forceinline__ int32_t lanes_at_bound() const {
    const int32_t top_k = filters() ? settings.top_k : 0;
    const int32_t needed = max_of(top_k, samples() ? params.num_top_logprobs : 0);
    if ((needed == 0 && !filters()) || top_k > kMaxCandidates / 3) return 0;
    const int32_t wanted = needed > 0 ? clamp(3 * needed, 480, kMaxCandidates / 2) : kMaxCandidates / 2;
    const int32_t share = min_of(segments(), kSamplingWarps) * kSegmentTokens;  // tokens that the lanes' maxima are of
    return clamp(static_cast<int32_t>(static_cast<int64_t>(wanted) * share / params.vocab), 4, kSamplingThreads / 2);
  }

  /// Keeps a candidate, if there is room: others write what lies behind. Its value comes from memory again (it is in
  /// the L1 cache): an array of registers has no index.
  __device__ __forceinline__ void keep(int32_t token, int32_t room) const {
    const int32_t at = atomicAdd(&shared.summary.num_candidates, 1);
    if (at < room) {
      shared.keys[at] = order_key(source.one(token));
      shared.tokens[at] = token;
    }
  }

  /// The segment's tokens in the race. `v` is used up.
  __device__ __forceinline__ void race(int32_t segment, float reference, float (&v)[kLaneTokens]) const {
    Racer& best = shared.lane_racers()[threadIdx.x];
    const Weights weights(reference, settings.scale, settings.floor);
    uint32_t known = 0;  // what the best of the CTA's racers has reached, about
    if (lane() == 0) known = atomicMax(&shared.race_bound, 0u);
    const int64_t seed = shared.seed, position = shared.position;
    uint32_t words[kLaneTokens / 2];
    first_bits<Source, Source::kVectorTokens == 4 ? kPhiloxRounds : 2>(seed, position, segment, words);
    known = __shfl_sync(ptx::kAllLanes, known, 0);
    const ApproximateShare<Weights> share(weights);
    const float most_bits = ptx::ex2(16.0f + share.error - share.above_reference(key_value(known)));
    const uint32_t magic = shared.race_magic;
    uint32_t lost = 0xffffffffu;
#pragma unroll
    for (int32_t i = 0; i < kLaneTokens; i += 2) {
      const uint32_t word = words[i / 2];
      lost &= has_lost<false>(share(v[i]), most_bits, word, magic) &
              has_lost<true>(share(v[i + 1]), most_bits, word, magic);
    }
    const bool tells = share.error < 1.0f;  // not with a temperature next to nothing
    if (!__any_sync(ptx::kAllLanes, (lost >> 31) == 0 || !tells)) return;
    uint32_t reached = known;
    race_segment(source, weights, seed, position, segment, words, v, reached, best);
    if (lane() == 0 && reached > known) atomicMax(&shared.race_bound, reached);
  }

  __device__ __forceinline__ static bool is_drawable(uint32_t key) { return key > kExcludedKey && key < kInfiniteKey; }

  /// What the warp's values of a segment weigh together.
  __device__ __forceinline__ static uint64_t warp_mass(const float (&v)[kLaneTokens], const Weights& weights) {
    uint64_t sum = 0;
#pragma unroll
    for (int32_t i = 0; i < kLaneTokens; ++i) sum += weights(v[i]);
    return ptx::warp_add(sum);
  }

  /// Puts the segment's masses relative to `reference` into the tables. key: of its largest value.
  __device__ __forceinline__ void sum_segment(int32_t segment, const float (&v)[kLaneTokens], uint32_t key,
                                              float reference) const {
    const ReadTask& task = shared.task;
#pragma unroll 1
    for (int32_t which = 0; which < (task.has_second ? 2 : 1); ++which) {
      const Weights local(reference, which == 0 ? task.scale : kLog2E,
                          which == 0 ? task.floor : LogitWeights::floor_of(kLog2E));
      const uint64_t sum = is_drawable(key) ? warp_mass(v, local) : 0;
      if (lane() == 0) mass_table(which)[segment] = sum;
    }
  }

  /// A read that looks for candidates, the largest value, masses. Sets the CTA's summary, without a barrier behind it.
  __device__ __forceinline__ void read_candidates() {
    const ReadTask& task = shared.task;
    const int32_t lanes = lanes_at_bound();
    uint32_t bound = lanes > 0 ? kWholeRow : kNoBound;
    if (threadIdx.x == 0) {
      shared.summary.num_candidates = 0;
      shared.num_gathered = 0;
    }
    if (lane() == 0) shared.warp_racers[warp()] = nobody();
    uint32_t best_key = 0;
    uint32_t best_token = 0;
    for_segments(
        [&](bool works, const float (&v)[kLaneTokens]) {
          if (lanes > 0 && params.vocab > kMaxCandidates)
            bound = bound_of(works ? lane_max_key(v) : 0, lanes);
          else
            __syncthreads();  // num_candidates is 0
        },
        [&](int32_t segment, const float (&v)[kLaneTokens]) {
          const uint32_t lane_key = lane_max_key(v);
          const uint32_t key = ptx::warp_max(lane_key);
          const float reference = key_value(key);
          if (key > best_key) {
            best_key = key;
            uint32_t first_token = 0xffffffffu;
#pragma unroll
            for (int32_t i = kLaneTokens - 1; i >= 0; --i) {
              if (v[i] == reference) first_token = token(segment, i);
            }
            best_token = ptx::warp_min(first_token);
          }
          if (lane() == 0) reference_table()[segment] = reference;
          if (lane_key >= bound) {
            const float least = key_value(bound);
            uint32_t chosen = 0;
#pragma unroll
            for (int32_t i = 0; i < kLaneTokens; ++i) chosen |= v[i] >= least ? 1u << i : 0u;
#pragma unroll 1
            for (; chosen != 0; chosen &= chosen - 1)
              keep(token(segment, __ffs(static_cast<int32_t>(chosen)) - 1), candidate_room());
          }
          if (task.needs_mass) sum_segment(segment, v, key, reference);
        });
    if (lane() == 0) shared.warp_best[warp()] = static_cast<uint64_t>(best_key) << 32 | ~best_token;
    set_summary(bound);
  }

  __device__ __forceinline__ static void exclude_below(float least, float (&v)[kLaneTokens]) {
#pragma unroll
    for (int32_t i = 0; i < kLaneTokens; ++i) v[i] = v[i] >= least ? v[i] : kMinusInfinity;
  }

  /// Adds the segment's masses to the lane's, and excludes what is below bands.low.
  __device__ __forceinline__ void sum_bands(float (&v)[kLaneTokens]) const {
    const float low = shared.bands.low, high = shared.bands.high;
    const ApproximateShare<Weights> share(Weights(shared.bands.reference, settings.scale, settings.floor));
    float of_all = 0.0f, of_low = 0.0f, of_high = 0.0f;
#pragma unroll
    for (int32_t i = 0; i < kLaneTokens; ++i) {
      const float part = share(v[i]);
      of_all += part;
      if (v[i] >= high) of_high += part;
      if (v[i] >= low)
        of_low += part;
      else
        v[i] = kMinusInfinity;
    }
    shared.lane_band_masses()[threadIdx.x].add(BandMasses{of_all, of_low, of_high});
  }

  /// A read that looks at all tokens for their masses, and at those from task.least on for who wins the race among
  /// them. Sets the CTA's summary, without a barrier behind it.
  __device__ __forceinline__ void read_survivors() {
    const ReadTask& task = shared.task;
    Racer& own = shared.lane_racers()[threadIdx.x];
    own = nobody();
    shared.lane_band_masses()[threadIdx.x] = BandMasses();
    if (threadIdx.x == 0) {
      shared.race_bound = kExcludedKey;
      shared.race_magic = 0x4b00;
    }
    __syncthreads();
    uint32_t best_key = 0;
    for_segments([&](int32_t segment, float (&v)[kLaneTokens]) {
      const uint32_t key = ptx::warp_max(lane_max_key(v));
      const float reference = key_value(key);
      best_key = max_of(best_key, key);
      if (task.needs_mass) {
        if (lane() == 0) reference_table()[segment] = reference;
        sum_segment(segment, v, key, reference);
      }
      if (task.has_bands)
        sum_bands(v);
      else if (task.least > kMinusInfinity)
        exclude_below(task.least, v);
      if (is_drawable(key) && reference >= task.least) race(segment, reference, v);
    });
    const Racer best = best_of_warp(own);
    if (task.has_bands) {
      BandMasses of_warp = shared.lane_band_masses()[threadIdx.x];
      of_warp = BandMasses{ptx::warp_add(of_warp.all), ptx::warp_add(of_warp.low), ptx::warp_add(of_warp.high)};
      if (lane() == 0) shared.warp_band_masses[warp()] = of_warp;
    }
    if (lane() == 0) {
      shared.warp_best[warp()] = static_cast<uint64_t>(best_key) << 32;
      shared.warp_racers[warp()] = best;
    }
    set_summary(kNoBound);
  }

  __device__ __forceinline__ void set_summary(uint32_t bound) const {
    __syncthreads();
    if (threadIdx.x == 0) {
      uint64_t best = 0;
      Racer racer = nobody();
#pragma unroll
      for (int32_t w = 0; w < kSamplingWarps; ++w) {
        best = max_of(best, shared.warp_best[w]);
        if (shared.warp_racers[w].beats(racer)) racer = shared.warp_racers[w];
      }
      shared.summary.best = best;
      shared.summary.bound = bound;
      shared.summary.racer = racer;
      if (shared.task.has_bands) {
        BandMasses masses;
        for (const BandMasses& of_warp : shared.warp_band_masses) masses.add(of_warp);
        shared.summary.band_masses = masses;
      }
    }
  }

  /// Candidates that a CTA has room for in the first CTA's list, where they are to be told without asking for room.
  __device__ __forceinline__ int32_t candidate_room() const { return share_of_cta(kMaxCandidates); }

  /// What all CTAs' summaries say together; a lane looks at one of them.
  __device__ __forceinline__ CtaSummary together(const CtaSummary* of_lane) const {
    CtaSummary all;
    const bool has = lane() < num_ctas;
    const uint64_t own = has ? of_lane->best : 0;
    const uint32_t key = ptx::warp_max(static_cast<uint32_t>(own >> 32));
    all.best = static_cast<uint64_t>(key) << 32 |
               ptx::warp_max(static_cast<uint32_t>(own >> 32) == key ? static_cast<uint32_t>(own) : 0);
    all.bound = ptx::warp_max(has ? of_lane->bound : 0);
    all.num_candidates = static_cast<int32_t>(
        ptx::warp_max(has ? static_cast<uint32_t>(of_lane->num_candidates) : 0));  // of the CTA with the most
    all.racer = best_of_warp(has ? of_lane->racer : nobody());
    if (shared.task.has_bands) {
      const BandMasses masses = has ? of_lane->band_masses : BandMasses();
      all.band_masses = BandMasses{ptx::warp_add(masses.all), ptx::warp_add(masses.low), ptx::warp_add(masses.high)};
    }
    return all;
  }

  /// Gives the CTA's summary, which thread 0 has set, to all CTAs of the row, and its candidates to the first.
  __device__ __forceinline__ void exchange_summaries() const {
    if (num_ctas > 1) ptx::cluster_wait();  // the others have started: their shared memory is there
    if (warp() == 0) {
      __syncwarp();
      if (lane() < num_ctas) ptx::cluster_pointer(&shared, lane())->summaries[rank] = shared.summary;
    }
    if (rank != 0 && shared.task.finds_candidates) {
      SamplingShared& first = *ptx::cluster_pointer(&shared, 0);
      const int32_t count = min_of(shared.summary.num_candidates, candidate_room());
      for (int32_t i = threadIdx.x; i < count; i += kSamplingThreads) {
        first.keys[rank * candidate_room() + i] = shared.keys[i];
        first.tokens[rank * candidate_room() + i] = shared.tokens[i];
      }
    }
    sync();
  }

  /// The sum of the segments' masses, of the whole row; every CTA's is then in its summary.
  __device__ __forceinline__ uint64_t total_mass() const {
    BlockSums sums(shared.scratch);
    const uint64_t* mass = mass_table(0);
    uint64_t sum = 0;
    __syncthreads();
    for (int32_t s = shared.segment_begin + static_cast<int32_t>(threadIdx.x); s < shared.segment_end;
         s += kSamplingThreads)
      sum += mass[s];
    sum = sums(sum);
    if (threadIdx.x == 0) shared.summary.mass = sum;
    sync();
    sum = 0;
#pragma unroll 4
    for (int32_t cta = 0; cta < num_ctas; ++cta) sum += summary_of(cta).mass;
    return sum;
  }

  /// Masses of the segments in units of the row's; their sum.
  __device__ __forceinline__ uint64_t scale_segments(BlockSums& sums, int32_t which, const Weights& of_row) const {
    uint64_t* mass = mass_table(which);
    const float* references = reference_table();
    uint64_t sum = 0;
#pragma unroll 1
    for (int32_t s = shared.segment_begin + static_cast<int32_t>(threadIdx.x); s < shared.segment_end;
         s += kSamplingThreads) {
      const uint64_t scaled =
          references[s] > kMinusInfinity ? scale_mass(mass[s], segment_factor(of_row, references[s])) : 0;
      mass[s] = scaled;
      sum += scaled;
    }
    return sums(sum);
  }

  /// Brings the members of all CTAs' lists, from `bound` on, to the first, behind its own.
  __device__ __forceinline__ void gather_candidates(uint32_t bound) const {
    if (rank == 0) return;
    SamplingShared& first = *ptx::cluster_pointer(&shared, 0);
    const int32_t own = first.summary.num_candidates;
    const int32_t count = min_of(shared.summary.num_candidates, kMaxCandidates);
#pragma unroll 1
    for (int32_t i = threadIdx.x; i < count; i += kSamplingThreads) {
      if (shared.keys[i] < bound) continue;
      const int32_t at = own + atomicAdd(&first.num_gathered, 1);
      if (at < kMaxCandidates) {
        first.keys[at] = shared.keys[i];
        first.tokens[at] = shared.tokens[i];
      }
    }
  }

  // ---- Results ----

  __device__ __forceinline__ void store_token(int64_t index, int32_t token) const {
    if (params.token_ids_are_int64 != 0)
      static_cast<int64_t*>(params.token_ids)[index] = token;
    else
      static_cast<int32_t*>(params.token_ids)[index] = token;
  }

  __device__ __forceinline__ bool wants_logprobs() const {
    return samples() && (params.logprobs != nullptr || params.num_top_logprobs > 0);
  }
  __device__ __forceinline__ bool is_tempered() const { return params.tempered_logprobs != 0 && !settings.greedy; }

  __device__ __forceinline__ float logprob_of(float value) const {
    return logprob(value, shared.reference, is_tempered() ? settings.inverse_temperature : 1.0f, shared.logprob_mass);
  }

  /// `ranked`: key and ~token; 0: no such token.
  __device__ __forceinline__ void store_top(int32_t place, uint64_t ranked) const {
    const int64_t at = static_cast<int64_t>(row) * params.num_top_logprobs + place;
    params.top_token_ids[at] = ranked == 0 ? 0 : static_cast<int32_t>(~static_cast<uint32_t>(ranked));
    params.top_logprobs[at] = ranked == 0 ? kMinusInfinity : logprob_of(key_value(static_cast<uint32_t>(ranked >> 32)));
  }
};

}  // namespace attn
