// A row that the CTAs of a cluster share (one CTA, where there are no clusters): its first read, its race, and how CTAs
// tell each other what they found.
#pragma once

#include "common/ptx/cluster.cuh"
#include "sampling/device/race.cuh"

namespace attn {

constexpr int32_t kBinBits = 11;
constexpr int32_t kBins = 1 << kBinBits;
constexpr int32_t kChunkRows = 32;        // of a warp, in the table of chunks
constexpr int32_t kMaxCandidates = 1536;  // of all CTAs
constexpr int32_t kCountBins = kSamplingThreads;

/// Masses, about in units of the weight of Bands::reference: of all tokens, of those at or above Bands::low, and
/// Bands::high. Sums of segments' float sums: in float their error would be the largest of all.
struct BandMasses {
  double all = 0.0, low = 0.0, high = 0.0;
};

/// A thread's data in a race: in memory, as registers are short.
struct LaneRace {
  Racer best;
  BandMasses masses;
};

/// What each CTA tells all others in a race.
struct RaceResult {
  Racer best;
  BandMasses masses;
  bool is_invalid;
};

/// What each CTA tells the first one after the first read.
struct alignas(16) CandidateResult {
  uint32_t best_key;
  uint32_t bound;  // candidates are complete from here on
  int32_t count;   // may exceed what there is room for
  int32_t unused;
};

/// The first CTA's message to the others.
struct alignas(8) Decision {
  uint32_t best_key;
  bool has_token;  // the token is found
  bool has_top;    // the most likely tokens are written, if requested
};

/// Values about the threshold of top-p (top_p.cuh).
struct Bands {
  float reference;
  float low;                      // values at or above it race
  float high;                     // values at or above it are summed, too
  float sure;                     // values at or above it survive
  bool verifies_previous_winner;  // whether the winner before survives: `low` is the next value above its
};
enum class Verdict : int32_t { kKnown, kReadAgain, kUnknown };

struct SamplingShared {
  alignas(16) uint4 staged[2][4][kSamplingThreads];  // segments on their way
  alignas(16) uint64_t bins[kBins];                  // or chunk_keys(), or Finalists (candidates.cuh)
  alignas(16) uint64_t list[kMaxCandidates];         // ranked(), in the first CTA, from all; or LaneRace of each thread
  alignas(8) uint64_t mbarriers[2];  // for candidates, in the first CTA; for its decision, in the others
  uint64_t block_sums[2][kSamplingWarps];
  uint64_t crossing[3];
  RaceResult warp_results[kSamplingWarps];
  RaceResult cta_result;
  CandidateResult candidates[kMaxClusterCtas];  // in the first CTA
  Decision decision;
  RowSettings settings;
  Draw draw;
  RaceBoard board;
  Bands bands;
  Verdict verdict;
  uint64_t cta_mass[2];
  uint64_t row_mass;                        // at the row's temperature
  uint64_t logprob_mass;                    // at the temperature of log-probabilities
  alignas(16) uint32_t counts[kCountBins];  // of candidates; or the largest keys of pairs of lanes
  uint32_t best_key;                        // of this CTA
  uint32_t bound;
  int32_t num_listed;
  int32_t token;  // that is drawn; the first CTA knows it

  /// Of each lane and chunk (some segments of its warp): the upper half of the largest value's key.
  __device__ __forceinline__ uint16_t* chunk_keys() { return reinterpret_cast<uint16_t*>(bins); }
  /// After this struct, for each segment of this CTA: mass, mass for log-probabilities, largest value.
  __device__ __forceinline__ uint64_t* segment_mass(int32_t which, int32_t segments) {
    return reinterpret_cast<uint64_t*>(reinterpret_cast<char*>(this) + kSamplingStateBytes) + which * segments;
  }
  __device__ __forceinline__ float* segment_reference(int32_t segments) {
    return reinterpret_cast<float*>(segment_mass(2, segments));
  }
};

static_assert(sizeof(SamplingShared) <= kSamplingStateBytes && kSamplingStateBytes % 16 == 0, "the tables follow");
static_assert(sizeof(uint64_t) * kBins >= sizeof(uint16_t) * kSamplingThreads * kChunkRows,
              "chunks have the bins' room");

/// Tokens in the order of the most likely ones: by value, then by id. 0: none.
__device__ __forceinline__ uint64_t ranked(uint32_t key, int32_t token) {
  return static_cast<uint64_t>(key) << 32 | ~static_cast<uint32_t>(token);
}
__device__ __forceinline__ int32_t token_of(uint64_t ranked) {
  return static_cast<int32_t>(~static_cast<uint32_t>(ranked));
}

template <class Source>
struct Row {
  using Weights = typename Source::Weights;

  const SamplingParams& params;
  const Source& source;
  SamplingShared& shared;
  const RowSettings& settings;
  const int32_t row;
  const int32_t rank;
  const int32_t num_ctas;  // a power of two
  const SegmentReader<Source> reader;

  __device__ __forceinline__ Row(const SamplingParams& params, const Source& source, SamplingShared& shared)
      : params(params),
        source(source),
        shared(shared),
        settings(shared.settings),
        row(ptx::cluster_id()),
        rank(ptx::cluster_rank()),
        num_ctas(ptx::cluster_size()),
        reader{source, shared.staged, params.vocab, rank * kSamplingWarps + warp(), num_ctas * kSamplingWarps} {}

  __device__ __forceinline__ static int32_t lane() { return ptx::lane_id(); }
  __device__ __forceinline__ static int32_t warp() { return threadIdx.x / 32; }
  /// x / num_ctas
  __device__ __forceinline__ int32_t share_of_cta(int32_t x) const { return x >> (31 - __clz(num_ctas)); }
  /// Segments of a warp, or one less.
  __device__ __forceinline__ int32_t rounds() const {
    return share_of_cta(ceil_div(reader.num_segments(), kSamplingWarps) + num_ctas - 1);
  }
  __device__ __forceinline__ bool wants_logprobs() const {
    return params.logprobs != nullptr || params.num_top_logprobs > 0;
  }
  __device__ __forceinline__ float reference() const { return key_value(shared.decision.best_key); }
  __device__ __forceinline__ Weights weights() const { return Weights(reference(), settings.scale, settings.floor); }

  /// A barrier of all threads that work on the row.
  __device__ __forceinline__ void sync() const {
    if (num_ctas > 1)
      ptx::cluster_sync();
    else
      __syncthreads();
  }

  /// The cluster address in CTA `cta` of what `own` is in this CTA's shared memory.
  __device__ __forceinline__ static uint32_t address_in(int32_t cta, const void* own) {
    return ptx::cluster_address(ptx::shared_address(own), cta);
  }

  /// Writes 8 or 16 bytes to where `own` lies in the CTA of that rank, counted by an mbarrier there.
  template <class T>
  __device__ __forceinline__ void send(int32_t cta, int32_t mbarrier, T* own, const T& value) const {
    uint64_t words[sizeof(T) / 8];
    memcpy(words, &value, sizeof(T));
    if (num_ctas == 1)
      *own = value;
    else if constexpr (sizeof(T) == 16)
      ptx::store_async(address_in(cta, &shared.mbarriers[mbarrier]), address_in(cta, own), words[0], words[1]);
    else
      ptx::store_async(address_in(cta, &shared.mbarriers[mbarrier]), address_in(cta, own), words[0]);
  }

  /// Arrives at an mbarrier of the CTA of that rank, to which this many bytes are sent.
  __device__ __forceinline__ void arrive(int32_t cta, int32_t mbarrier, uint32_t bytes) const {
    if (num_ctas > 1) ptx::cluster_mbarrier_arrive_expect(address_in(cta, &shared.mbarriers[mbarrier]), bytes);
  }

  /// Waits until all that is sent has arrived; also a barrier of the CTA. Returns false if it does not arrive in time.
  __device__ __forceinline__ bool wait(int32_t mbarrier) const {
    const bool has_come = num_ctas == 1 || ptx::cluster_mbarrier_wait(ptx::shared_address(&shared.mbarriers[mbarrier]));
    return __syncthreads_and(has_come) != 0;
  }

  /// Before everything else. ahead: tokens, of the request's position.
  __device__ __forceinline__ void begin(int32_t ahead) const {
    if (num_ctas > 1) {
      if (threadIdx.x == 0) {
        ptx::cluster_mbarrier_init(ptx::shared_address(&shared.mbarriers[0]), num_ctas);
        ptx::cluster_mbarrier_init(ptx::shared_address(&shared.mbarriers[1]), 1);
      }
      ptx::cluster_arrive();
    }
    reader.start();
    if (threadIdx.x == 0) {
      const PendingInt seed = params.seed.load(row), position = params.position.load(row);
      shared.settings = row_settings(params, row);
      shared.draw = Draw{settings.scale, settings.floor, seed.value(), position.value() + ahead, settings.greedy};
      shared.board.reset(settings.valid);
      shared.decision = Decision{0, false, params.num_top_logprobs == 0};
      shared.best_key = shared.bound = 0;
      shared.num_listed = 0;
    }
    __syncthreads();
    if (num_ctas > 1) ptx::cluster_wait();  // the others' shared memory exists; the first segment is on its way
  }

  __device__ __forceinline__ uint64_t block_sum(uint64_t x) const {
    const uint64_t warp_sum = ptx::warp_add(x);
    __syncthreads();  // the sums before were read
    if (lane() == 0) shared.block_sums[0][warp()] = warp_sum;
    __syncthreads();
    uint64_t sum = 0;
#pragma unroll
    for (int32_t w = 0; w < kSamplingWarps; ++w) sum += shared.block_sums[0][w];
    return sum;
  }

  // ---- The first read ----

  /// Segments to a chunk: 1 << chunk_shift().
  __device__ __forceinline__ int32_t chunk_shift() const { return max_of(27 - __clz(max_of(rounds() - 1, 1)), 0); }

  __device__ __forceinline__ void sum_segment(int32_t which, int32_t at, const float (&v)[kLaneTokens],
                                              const Weights& local) const {
    uint64_t sum = 0;
#pragma unroll
    for (int32_t i = 0; i < kLaneTokens; ++i) sum += local(v[i]);
    sum = ptx::warp_add(sum);
    if (lane() == 0) shared.segment_mass(which, rounds() * kSamplingWarps)[at] = sum;
  }

  __device__ __forceinline__ Weights logprob_weights(float of) const {
    return Weights(of, is_tempered(params, settings) ? settings.scale : kLog2E);
  }

  /// After reader.start(): the largest values of lanes, chunks and the CTA, and the requested masses of segments.
  /// Returns this lane's largest key. No barrier after it.
  __device__ __forceinline__ uint32_t read_values(bool needs_mass, bool needs_logprobs) const {
    const int32_t shift = chunk_shift();
    uint32_t lane_key = 0, chunk_key = 0;
    int32_t round = 0;
    reader.for_each([&](int32_t, const float (&v)[kLaneTokens]) {
      const uint32_t own = lane_max_key(v);
      lane_key = max_of(lane_key, own);
      chunk_key = (round & ((1 << shift) - 1)) == 0 ? own : max_of(chunk_key, own);
      shared.chunk_keys()[(round >> shift) * kSamplingThreads + threadIdx.x] = static_cast<uint16_t>(chunk_key >> 16);
      if (needs_mass || needs_logprobs) {
        const uint32_t key = ptx::warp_max(own);
        const float segment_max = key_value(key);
        const int32_t at = round * kSamplingWarps + warp();
        if (lane() == 0)
          shared.segment_reference(rounds() * kSamplingWarps)[at] = is_drawable(key) ? segment_max : kMinusInfinity;
        if (is_drawable(key)) {
          if (needs_mass) sum_segment(0, at, v, Weights(segment_max, settings.scale, settings.floor));
          if (needs_logprobs) sum_segment(1, at, v, logprob_weights(segment_max));
        }
      }
      ++round;
    });
    const uint32_t warp_key = ptx::warp_max(lane_key);
    if (lane() == 0) atomicMax(&shared.best_key, warp_key);
    return lane_key;
  }

  /// The largest key of all CTAs goes to decision.best_key of each.
  __device__ __forceinline__ void exchange_best() const {
    sync();
    const uint32_t own = lane() < num_ctas ? *ptx::cluster_pointer(&shared.best_key, lane()) : 0;
    const uint32_t best = ptx::warp_max(own);
    if (threadIdx.x == 0) shared.decision.best_key = best;
    sync();
  }

  __device__ __forceinline__ uint64_t scaled_mass(int32_t which, const Weights& row_weights) const {
    const int32_t entries = rounds() * kSamplingWarps;
    const uint64_t* masses = shared.segment_mass(which, entries);
    const float* references = shared.segment_reference(entries);
    uint64_t sum = 0;
#pragma unroll 1
    for (int32_t at = threadIdx.x; at < entries; at += kSamplingThreads) {
      const int32_t segment = at / kSamplingWarps * reader.step + rank * kSamplingWarps + at % kSamplingWarps;
      if (segment < reader.num_segments() && references[at] > kMinusInfinity)
        sum += scale_mass(masses[at], segment_factor(row_weights, references[at]));
    }
    return block_sum(sum);
  }

  /// Sets row_mass and logprob_mass, from the segments' masses.
  __device__ __forceinline__ void sum_masses(bool needs_mass, bool needs_logprobs) const {
    const uint64_t own = needs_mass ? scaled_mass(0, weights()) : 0;
    const uint64_t own_logprobs = needs_logprobs ? scaled_mass(1, logprob_weights(reference())) : 0;
    if (threadIdx.x == 0) {
      shared.cta_mass[0] = own;
      shared.cta_mass[1] = own_logprobs;
    }
    sync();
    uint64_t mass = 0, logprob_mass = 0;
#pragma unroll 1
    for (int32_t cta = 0; cta < num_ctas; ++cta) {
      const uint64_t* other = ptx::cluster_pointer(shared.cta_mass, cta);
      mass += other[0];
      logprob_mass += other[1];
    }
    if (threadIdx.x == 0) {
      shared.row_mass = mass;
      shared.logprob_mass = logprob_mass;
    }
    sync();
  }

  // ---- The race ----

  __device__ __forceinline__ LaneRace& lane_race() const {
    return reinterpret_cast<LaneRace*>(shared.list)[threadIdx.x];
  }

  /// Puts together what the lanes of a warp have; `has`: this lane has something.
  __device__ __forceinline__ static RaceResult reduce_lanes(bool has, const RaceResult& own) {
    const BandMasses masses = has ? own.masses : BandMasses();
    return RaceResult{best_of_warp(has ? own.best : no_racer()),
                      BandMasses{ptx::warp_add(masses.all), ptx::warp_add(masses.low), ptx::warp_add(masses.high)},
                      __any_sync(ptx::kAllLanes, has && own.is_invalid) != 0};
  }

  /// Puts together what the lanes of all CTAs have, in all threads.
  __device__ __forceinline__ RaceResult exchange(const Racer& best, const BandMasses& masses) const {
    RaceResult all = reduce_lanes(true, RaceResult{best, masses, false});
    if (lane() == 0) shared.warp_results[warp()] = all;
    __syncthreads();
    all = reduce_lanes(lane() < kSamplingWarps, shared.warp_results[lane() % kSamplingWarps]);
    all.is_invalid = shared.board.is_invalid;
    if (num_ctas > 1) {
      if (threadIdx.x == 0) shared.cta_result = all;
      sync();
      all = reduce_lanes(lane() < num_ctas, *ptx::cluster_pointer(&shared.cta_result, lane() & (num_ctas - 1)));
    }
    sync();  // all has been read
    return all;
  }

  /// Before the next race.
  __device__ __forceinline__ void start_again() const {
    reader.start();
    if (threadIdx.x == 0) shared.board.reset(true);
    __syncthreads();
  }

  /// The race of a read. After reader.start().
  template <class Racing>
  __device__ __forceinline__ RaceResult race(const Racing& racing) const {
    LaneRace& own = lane_race();
    own.masses = BandMasses();
    race_row(reader, shared.draw, shared.board, racing, own.best);
    return exchange(own.best, own.masses);
  }

  // ---- Results ----

  __device__ __forceinline__ float logprob_of(float value) const {
    return logprob(value, reference(), is_tempered(params, settings) ? settings.inverse_temperature : 1.0f,
                   shared.logprob_mass);
  }

  __device__ __forceinline__ void store_top(int32_t place, uint64_t token) const {
    const int64_t at = static_cast<int64_t>(row) * params.num_top_logprobs + place;
    params.top_token_ids[at] = token == 0 ? 0 : token_of(token);
    params.top_logprobs[at] = token == 0 ? kMinusInfinity : logprob_of(key_value(static_cast<uint32_t>(token >> 32)));
  }
};

}  // namespace attn
