// Rows of which top-k leaves few tokens, in batches so small that a row has many CTAs: there the time is that of the
// longest chain of dependent steps, so this way has few of them. Each warp takes a bound that a few of its lanes reach
// and sends what reaches it to the first CTA, which finds the survivors of all filters at one look at a histogram, one
// comparison of all pairs and one scan. Where that does not do (equal values, likely tokens all in one warp's lines),
// the row goes the usual way (sampling.cuh).
#pragma once

#include "common/ptx/cluster_mbarrier.cuh"
#include "common/ptx/named_barrier.cuh"
#include "sampling/device/candidates.cuh"

namespace attn {

template <class Source>
struct FewSurvivors {
  using Weights = typename Source::Weights;

  const Row<Source>& row;
  SamplingShared& shared;

  __device__ __forceinline__ explicit FewSurvivors(const Row<Source>& row) : row(row), shared(row.shared) {}

  static constexpr int32_t kMostTopK = 64;
  static constexpr int32_t kMostSurvivors = kSamplingThreads / 2;
  static constexpr int32_t kValueBins = 256;
  static constexpr int32_t kLaneBins = kValueBins / 32;
  static constexpr int32_t kMostWarps = kMaxClusterCtas * kSamplingWarps;
  static constexpr int32_t kListed = 2048;  // candidates that there is room for
  static constexpr int32_t kOfThread = kListed / kSamplingThreads;

  // Warps take the row's lines of 128 bytes in turn: the likely tokens of a model lie together, most at low ids.
  static constexpr int32_t kLineLanes = 8;
  static constexpr int32_t kLineTokens = kLineLanes * Source::kVectorTokens;
  static constexpr int32_t kRoundLines = kLaneTokens * 32 / kLineTokens;  // that a warp reads at a time

  /// What a warp tells the first CTA of its candidates, which lie in its part of the list.
  struct Told {
    uint32_t bound;  // they are complete from here on
    uint32_t best_key;
    uint64_t count;
  };

  /// Of a segment, for the mass of the row.
  struct SegmentMass {
    uint64_t mass;  // relative to its largest value
    uint64_t best_key;
  };

  /// In the place of candidates and bins: what warps send to the first CTA, and in each CTA a word of each thread.
  struct Memory {
    uint64_t list[kListed];  // key << 32 | token of each candidate
    uint32_t bins[kValueBins];
    Told told[kMostWarps];
    SegmentMass masses[kMostFewSegments * kMostWarps];
    uint32_t words[kSamplingThreads];
  };

  /// In the place of the list, once every thread has what it looks at.
  struct Survivors {
    float values[kMostSurvivors];  // -inf behind the last
    int32_t tokens[kMostSurvivors];
    Racer racers[kMostSurvivors];
    uint64_t weights[kMostTopK];  // of all that have this rank; 0: nobody has
    uint8_t survives[kMostSurvivors];
  };

  static_assert(sizeof(Memory) <= offsetof(SamplingShared, scratch) && sizeof(Survivors) <= sizeof(Memory::list),
                "they have that room");

  __device__ __forceinline__ Memory& memory() const { return *reinterpret_cast<Memory*>(shared.keys); }
  __device__ __forceinline__ Survivors& survivors() const { return *reinterpret_cast<Survivors*>(memory().list); }
  __device__ __forceinline__ uint32_t received_mbarrier() const {
    return ptx::shared_address(&shared.mbarriers[0]);
  }  // of candidates, in the first CTA
  __device__ __forceinline__ uint32_t answer_mbarrier() const {
    return ptx::shared_address(&shared.mbarriers[1]);
  }  // of whether they were enough, in the others
  /// Where something of this CTA's lies in the first one.
  template <class T>
  __device__ __forceinline__ static uint32_t in_first(const T* own) {
    return ptx::cluster_address(ptx::shared_address(own), 0);
  }

  __device__ __forceinline__ int32_t num_warps() const { return row.num_ctas * kSamplingWarps; }
  __device__ __forceinline__ int32_t warp_of_row() const { return row.rank * kSamplingWarps + row.warp(); }
  /// Candidates that a warp has room for.
  __device__ __forceinline__ int32_t room() const { return row.share_of_cta(kListed / kSamplingWarps); }

  /// Of the row; the host has looked at the launch (may_leave_few in csrc/runtime/sampling.cpp).
  __device__ __forceinline__ bool suits(const RowParameters& own) const {
    const bool is_valid = own.temperature > 0.0f && !is_nan(own.top_p) && !is_nan(own.min_p);
    return is_valid && own.top_k.value() > 0 && own.top_k.value() <= kMostTopK;
  }

  /// Whether top-p is a share of the whole row's mass.
  __device__ __forceinline__ bool needs_row_mass(const RowParameters& own) const {
    return own.top_p < 1.0f && row.params.joint != 0;
  }

  /// Before the cluster's first barrier.
  __device__ __forceinline__ void prepare() const {
    if (row.rank == 0) memory().bins[threadIdx.x] = 0;
    if (threadIdx.x == 0) {
      ptx::cluster_mbarrier_init(received_mbarrier(), num_warps());
      ptx::cluster_mbarrier_init(answer_mbarrier(), 1);
      shared.num_listed = 0;
    }
  }

  /// First token of this lane's vector j in a round of reading.
  __device__ __forceinline__ int32_t vector_token(int32_t round, int32_t j) const {
    const int32_t line = round * kRoundLines + j * (32 / kLineLanes) + row.lane() / kLineLanes;
    return (line * num_warps() + warp_of_row()) * kLineTokens + row.lane() % kLineLanes * Source::kVectorTokens;
  }

  __device__ __forceinline__ int32_t num_rounds() const {
    return row.share_of_cta(ceil_div(row.params.vocab, kSamplingWarps * kRoundLines * kLineTokens) + row.num_ctas - 1);
  }

  __device__ __forceinline__ void load(int32_t round, typename Source::Vector (&raw)[Source::kVectors]) const {
    load_vectors(row.source, [&](int32_t j) { return vector_token(round, j); }, raw);
  }

  /// A value that `wanted` of the warp's lanes have reached: the wanted-th largest of the lanes' largest, or a little
  /// less. Every lane counts who is before it, by the signs of differences of numbers of 31 bits.
  __device__ __forceinline__ uint32_t warp_bound(uint32_t lane_key, int32_t wanted) const {
    uint32_t* of_warp = memory().words + row.warp() * 32;
    const uint32_t own = lane_key >> 6 << 5 | static_cast<uint32_t>(row.lane());
    of_warp[row.lane()] = own;
    __syncwarp();
    uint4 others[8];
#pragma unroll
    for (int32_t i = 0; i < 8; ++i) others[i] = reinterpret_cast<const uint4*>(of_warp)[i];
    uint32_t before[4] = {};
#pragma unroll
    for (const uint4& four : others) {
      before[0] += (own - four.x) >> 31;
      before[1] += (own - four.y) >> 31;
      before[2] += (own - four.z) >> 31;
      before[3] += (own - four.w) >> 31;
    }
    const uint32_t which = __ballot_sync(
        ptx::kAllLanes, before[0] + before[1] + before[2] + before[3] + 1 == static_cast<uint32_t>(wanted));
    return max_of(__shfl_sync(ptx::kAllLanes, own, __ffs(static_cast<int32_t>(which)) - 1) >> 5 << 6, kWholeRow);
  }

  /// v[i]; registers have no index.
  template <class T, int32_t kCount>
  __device__ __forceinline__ static T pick(const T (&v)[kCount], int32_t i) {
    T picked = v[0];
#pragma unroll
    for (int32_t j = 1; j < kCount; ++j) picked = i == j ? v[j] : picked;
    return picked;
  }

  /// How many lanes make a warp's bound: so many that hardly ever as many as these of the k largest lie in one warp's
  /// lines. With more the lists are longer.
  __device__ __forceinline__ int32_t lanes_at_bound(int32_t top_k) const {
    return 5 + row.share_of_cta(ceil_div(3 * top_k, kSamplingWarps) + row.num_ctas - 1);
  }

  /// Sends the warp's candidates to the first CTA, with the bound from which on they are complete. v: of the last
  /// round. Returns how many bytes.
  __device__ __forceinline__ uint32_t send_candidates(int32_t top_k, uint32_t lane_key, float (&v)[kLaneTokens]) const {
    uint32_t bound = warp_bound(lane_key, lanes_at_bound(top_k));
    const uint32_t best_key = ptx::warp_max(lane_key);
    const float least = key_value(bound);
    const uint32_t to = ptx::cluster_address(received_mbarrier(), 0);
    const uint32_t places = in_first(memory().list + warp_of_row() * room());
    const uint32_t before = (1u << row.lane()) - 1;
    int32_t count = 0;
    uint32_t left_out = 0;  // the largest for which there was no room
#pragma unroll 1
    for (int32_t round = num_rounds() - 1;;) {
      uint32_t chosen = 0;
#pragma unroll
      for (int32_t i = 0; i < kLaneTokens; ++i) chosen |= v[i] >= least ? 1u << i : 0u;
      // Most lanes have none or one.
#pragma unroll 1
      for (uint32_t ones; (ones = __ballot_sync(ptx::kAllLanes, chosen != 0)) != 0; chosen &= chosen - 1) {
        const int32_t at = count + __popc(ones & before);
        if (chosen != 0) {
          const int32_t i = __ffs(static_cast<int32_t>(chosen)) - 1;
          const int32_t token = vector_token(round, i / Source::kVectorTokens) + i % Source::kVectorTokens;
          const uint32_t key = order_key(pick(v, i));
          if (at < room())
            ptx::store_async(to, places + at * 8, static_cast<uint64_t>(key) << 32 | static_cast<uint32_t>(token));
          else
            left_out = max_of(left_out, key);
        }
        count += __popc(ones);
      }
      if (--round < 0) break;
      typename Source::Vector raw[Source::kVectors];
      load(round, raw);
      row.values(raw, v);
    }
    if (count > room()) {
      bound = max_of(bound, ptx::warp_max(left_out) + 1);
      count = room();
    }
    if (row.lane() == 0)
      ptx::store_async(to, in_first(memory().told + warp_of_row()), static_cast<uint64_t>(best_key) << 32 | bound,
                       static_cast<uint64_t>(count));
    return sizeof(Told) + 8 * count;
  }

  /// Sends the masses of whole segments, which a warp reads one by one, to the first CTA: as they are defined. Returns
  /// how many bytes.
  __device__ __forceinline__ uint32_t send_masses(float temperature) const {
    const uint32_t to = ptx::cluster_address(received_mbarrier(), 0);
    uint32_t bytes = 0;
#pragma unroll 1
    for (int32_t segment = warp_of_row(); segment < row.num_segments(); segment += num_warps()) {
      typename Source::Vector raw[Source::kVectors];
      float v[kLaneTokens];
      row.load(segment, raw);
      row.values(raw, v);
      const uint32_t key = ptx::warp_max(row.lane_max_key(v));
      const uint64_t mass =
          row.is_drawable(key) ? row.warp_mass(v, Weights(key_value(key), temperature_scale(temperature))) : 0;
      if (row.lane() == 0) ptx::store_async(to, in_first(memory().masses + segment), mass, key);
      bytes += sizeof(SegmentMass);
    }
    return bytes;
  }

  /// The first CTA's part: the mass of the row.
  __device__ __forceinline__ uint64_t row_mass(const Weights& weights) const {
    uint64_t sum = 0;
#pragma unroll 1
    for (int32_t segment = threadIdx.x; segment < row.num_segments(); segment += kSamplingThreads) {
      const SegmentMass& own = memory().masses[segment];
      if (own.mass != 0)
        sum += scale_mass(own.mass, segment_factor(weights, key_value(static_cast<uint32_t>(own.best_key))));
    }
    return BlockSums(shared.scratch)(sum);
  }

  /// The first CTA's part. False, the same in all threads: the candidates do not tell.
  __device__ __forceinline__ bool list_survivors(const RowSettings& settings, int32_t& num_survivors,
                                                 float& reference) const {
    uint32_t bound = 0, best_key = 0;
#pragma unroll
    for (int32_t w = 0; w < kMostWarps; w += 32) {
      if (w >= num_warps()) break;
      bound = max_of(bound, memory().told[w + row.lane()].bound);
      best_key = max_of(best_key, memory().told[w + row.lane()].best_key);
    }
    bound = ptx::warp_max(bound);
    best_key = ptx::warp_max(best_key);
    if (best_key >= kInfiniteKey || best_key <= kExcludedKey) return false;
    reference = key_value(best_key);
    const float range = reference - key_value(bound);
    if (!(range < 1e30f)) return false;
    const float bins_of_one = range > 1e-30f ? __fdividef(kValueBins - 1, range) : 0.0f;
    // A warp's candidates are looked at by the same few threads, each of which has room for as many.
    const int32_t readers = row.share_of_cta(kSamplingThreads / kSamplingWarps),
                  first = static_cast<int32_t>(threadIdx.x) & (readers - 1);
    const int32_t sender = static_cast<int32_t>(threadIdx.x) * row.num_ctas / (kSamplingThreads / kSamplingWarps);
    const int32_t count = static_cast<int32_t>(memory().told[sender].count);
    uint64_t candidates[kOfThread];  // 0: none
#pragma unroll
    for (int32_t i = 0; i < kOfThread; ++i)
      candidates[i] = first + i * readers < count ? memory().list[sender * room() + first + i * readers] : 0;
    int32_t bin[kOfThread];
#pragma unroll
    for (int32_t i = 0; i < kOfThread; ++i) {
      const uint32_t key = static_cast<uint32_t>(candidates[i] >> 32);
      bin[i] = kValueBins;
      if (key >= bound) {
        bin[i] = static_cast<int32_t>((reference - key_value(key)) * bins_of_one);
        atomicAdd(&memory().bins[bin[i]], 1u);
      }
    }
    __syncthreads();
    // Each warp for itself: the bin in which the k-th largest lies.
    uint32_t counts[kLaneBins], sum = 0;
#pragma unroll
    for (int32_t i = 0; i < kLaneBins; ++i) {
      counts[i] = memory().bins[row.lane() * kLaneBins + i];
      sum += counts[i];
    }
    uint32_t through = sum;
#pragma unroll
    for (int32_t step = 1; step < 32; step *= 2) {
      const uint32_t before = __shfl_up_sync(ptx::kAllLanes, through, step);
      through += row.lane() >= step ? before : 0;
    }
    const uint32_t wanted = static_cast<uint32_t>(settings.top_k);
    uint32_t last = 0, listed = through - sum;  // of this lane
#pragma unroll
    for (int32_t i = 0; i < kLaneBins; ++i) {
      const bool before = listed < wanted;
      listed += before ? counts[i] : 0;
      last += before ? 1 : 0;
    }
    const uint32_t reached = __ballot_sync(ptx::kAllLanes, through >= wanted);
    if (reached == 0) return false;
    const int32_t lane = __ffs(static_cast<int32_t>(reached)) - 1;
    num_survivors = static_cast<int32_t>(__shfl_sync(ptx::kAllLanes, listed, lane));
    const int32_t last_bin = lane * kLaneBins + static_cast<int32_t>(__shfl_sync(ptx::kAllLanes, last, lane)) - 1;
    if (num_survivors > kMostSurvivors) return false;
    Survivors& out = survivors();
    if (threadIdx.x < kMostTopK) out.weights[threadIdx.x] = 0;
    uint32_t chosen = 0;
#pragma unroll
    for (int32_t i = 0; i < kOfThread; ++i) chosen |= bin[i] <= last_bin ? 1u << i : 0u;
#pragma unroll 1
    for (; chosen != 0; chosen &= chosen - 1) {
      const uint64_t one = pick(candidates, __ffs(static_cast<int32_t>(chosen)) - 1);
      const int32_t at = atomicAdd(&shared.num_listed, 1);
      out.values[at] = key_value(static_cast<uint32_t>(one >> 32));
      out.tokens[at] = static_cast<int32_t>(one);
    }
    if (static_cast<int32_t>(threadIdx.x) >= num_survivors && threadIdx.x < kMostSurvivors)
      out.values[threadIdx.x] = kMinusInfinity;
    return true;
  }

  /// Where rank and top-p end what survives: the first rank that does not. row_mass: if top-p is a share of it, else 0.
  /// The same in all lanes.
  __device__ __forceinline__ uint32_t end_of_top_p(const RowSettings& settings, uint64_t row_mass) const {
    const ulonglong2 own = *reinterpret_cast<const ulonglong2*>(survivors().weights + 2 * row.lane());
    const uint64_t through = ptx::warp_inclusive_sum(own.x + own.y, row.lane());
    const uint64_t total = row_mass != 0 ? row_mass : __shfl_sync(ptx::kAllLanes, through, 31);
    const uint64_t target = top_p_target(settings, total), before = through - own.x - own.y;
    return __popc(__ballot_sync(ptx::kAllLanes, before < target)) +
           __popc(__ballot_sync(ptx::kAllLanes, before + own.x < target));
  }

  /// Tells who of those listed survives the filters, a thread for each; the other half of the CTA has them race.
  __device__ __forceinline__ void filter_and_race(const RowDraw& draw, const RowSettings& settings,
                                                  int32_t num_survivors, const Weights& weights,
                                                  uint64_t row_mass) const {
    Survivors& all = survivors();
    const int32_t at = static_cast<int32_t>(threadIdx.x) & (kMostSurvivors - 1);
    const float value = all.values[at];
    if (threadIdx.x >= kMostSurvivors) {
      if (at < num_survivors)
        all.racers[at] =
            enter_race<kPhiloxRounds>(weights, draw.seed.value(), draw.position.value(), all.tokens[at], value);
      return;
    }
    float ahead[4] = {}, equals[4] = {};  // floats: they are added without predicates
#pragma unroll 4
    for (int32_t i = 0; i < num_survivors; i += 4) {
      const float4 others = *reinterpret_cast<const float4*>(all.values + i);
      ahead[0] += others.x > value ? 1.0f : 0.0f;
      ahead[1] += others.y > value ? 1.0f : 0.0f;
      ahead[2] += others.z > value ? 1.0f : 0.0f;
      ahead[3] += others.w > value ? 1.0f : 0.0f;
      equals[0] += others.x == value ? 1.0f : 0.0f;
      equals[1] += others.y == value ? 1.0f : 0.0f;
      equals[2] += others.z == value ? 1.0f : 0.0f;
      equals[3] += others.w == value ? 1.0f : 0.0f;
    }
    const uint32_t rank = static_cast<uint32_t>(ahead[0] + ahead[1] + ahead[2] + ahead[3]);
    const uint32_t equal = static_cast<uint32_t>(equals[0] + equals[1] + equals[2] + equals[3]);
    bool survives = at < num_survivors && rank < static_cast<uint32_t>(settings.top_k) &&
                    order_key(value) >= min_p_key(weights, settings);
    if (settings.has_top_p) {
      if (survives) all.weights[rank] = weights(value) * equal;
      ptx::barrier_sync<1, kMostSurvivors>();
      survives &= rank < end_of_top_p(settings, row_mass);
    }
    all.survives[at] = survives ? 1 : 0;
  }

  /// All of it. True, the same in all threads of the row: the token is written. prepare() came before.
  __device__ __forceinline__ bool run() const {
    typename Source::Vector raw[Source::kVectors];
    load(0, raw);
    const RowParameters own(row.params, row.row);
    ptx::cluster_wait();  // the mbarriers are there
    float v[kLaneTokens];
    uint32_t lane_key = 0;
#pragma unroll 1
    for (int32_t round = 1;; ++round) {
      row.values(raw, v);
      lane_key = max_of(lane_key, row.lane_max_key(v));
      if (round >= num_rounds()) break;
      load(round, raw);
    }
    if (!suits(own)) return false;
    uint32_t bytes = send_candidates(static_cast<int32_t>(own.top_k.value()), lane_key, v);
    if (needs_row_mass(own)) bytes += send_masses(own.temperature);
    if (row.lane() == 0) ptx::cluster_mbarrier_arrive_expect(ptx::cluster_address(received_mbarrier(), 0), bytes);
    if (row.rank != 0) {
      const bool is_answered = ptx::cluster_mbarrier_wait(answer_mbarrier());
      return __syncthreads_and(is_answered) != 0 && shared.is_enough != 0;
    }
    const RowDraw draw(row.params, row.row);  // needed late
    const RowSettings settings = row_settings(own, row.params.vocab);
    __syncthreads();  // the bins are empty
    const bool all_came = __syncthreads_and(ptx::cluster_mbarrier_wait(received_mbarrier())) != 0;
    int32_t num_survivors = 0;
    float reference = 0.0f;
    const bool is_enough = all_came && list_survivors(settings, num_survivors, reference);
    if (is_enough) __syncthreads();                                              // survivors are listed
    const int32_t told_cta = row.warp() == kSamplingWarps - 1 ? row.lane() : 0;  // the last warp has the least to do
    if (0 < told_cta && told_cta < row.num_ctas) {
      const uint32_t to = ptx::cluster_address(answer_mbarrier(), told_cta);
      ptx::store_async(to, ptx::cluster_address(ptx::shared_address(&shared.is_enough), told_cta), is_enough ? 1 : 0);
      ptx::cluster_mbarrier_arrive_expect(to, 8);
    }
    if (!is_enough) return false;
    const Weights weights(reference, settings.scale, settings.floor);
    filter_and_race(draw, settings, num_survivors, weights, needs_row_mass(own) ? row_mass(weights) : 0);
    __syncthreads();
    if (row.warp() != 0) return true;
    Racer best = nobody();
#pragma unroll
    for (int32_t i = 0; i < kMostSurvivors; i += 32) {
      if (i >= num_survivors) break;
      const int32_t at = i + row.lane();
      const Racer racer = at < num_survivors && survivors().survives[at] != 0 ? survivors().racers[at] : nobody();
      if (racer.beats(best)) best = racer;
    }
    best = best_of_warp(best);
    if (row.lane() == 0) {
      row.store_token(row.row, best.token);
      row.params.valid[row.row] = 1;
    }
    return true;
  }
};

}  // namespace attn
