// Reading the row again, where the candidates do not reach down to the filters' threshold (a flat row, a large top-k)
// or do not fit (many equal values): a histogram of the row over the cluster, then the members of the few bins that may
// hold the threshold.
#pragma once

#include "sampling/device/row.cuh"

namespace attn {

template <class Source>
struct Rereader {
  using Weights = typename Source::Weights;

  const Row<Source>& row;
  SamplingShared& shared;

  __device__ __forceinline__ explicit Rereader(const Row<Source>& row) : row(row), shared(row.shared) {}

  // Bins are 1/256 of a power of two wide. Bin 0 has the largest values; the last one, which is not counted, takes what
  // lies deeper than 16 powers of two.

  struct LogitBins {
    float reference, per_logit, deepest;

    __device__ __forceinline__ explicit LogitBins(const LogitWeights& weights)
        : reference(weights.reference), per_logit(weights.scale * kOctaveBins), deepest((kBins - 1) / per_logit) {}

    __device__ __forceinline__ int32_t operator()(float value) const {
      constexpr float kMagic = 8388608.0f;  // 2^23: adding it rounds to an integer, which stands in the low bits
      return static_cast<int32_t>(
          __float_as_uint(fused_multiply_add(min_of(reference - value, deepest), per_logit, kMagic)) - 0x4b000000u);
    }

    /// What no member of the bin weighs more than.
    __device__ __forceinline__ static uint64_t most(int32_t bin) {
      return exp2_fixed(min_of(0.5f - static_cast<float>(bin), 0.0f), 1.0f / kOctaveBins);
    }
  };

  struct ProbBins {
    uint32_t best_key;
    Weights weights;

    __device__ __forceinline__ explicit ProbBins(const ProbWeights& weights)
        : best_key(order_key(weights.reference)), weights(weights) {}

    __device__ __forceinline__ int32_t operator()(float value) const {
      return static_cast<int32_t>(min_of((best_key - order_key(value)) >> kShift, static_cast<uint32_t>(kBins - 1)));
    }

    __device__ __forceinline__ uint64_t most(int32_t bin) const {
      return weights(key_value(best_key - (static_cast<uint32_t>(bin) << kShift)));
    }

    static constexpr int32_t kShift = 15;  // of 23 bits of a mantissa: 256 bins to an octave
  };

  __device__ __forceinline__ static LogitBins coarse_bins(const LogitWeights& weights) { return LogitBins(weights); }
  __device__ __forceinline__ static ProbBins coarse_bins(const ProbWeights& weights) { return ProbBins(weights); }

  /// Fine bins: a range of keys, -1 standing for what comes before. The last one takes the rest.
  __device__ __forceinline__ static int32_t fine_bin(uint32_t first_key, int32_t shift, float value) {
    const uint32_t key = order_key(value);
    return key > first_key ? -1
                           : static_cast<int32_t>(min_of((first_key - key) >> shift, static_cast<uint32_t>(kBins - 1)));
  }

  /// Counts the cluster's values by bins.
  __device__ __forceinline__ void count_values() const {
    for (int32_t i = threadIdx.x; i < kBins; i += kSamplingThreads) shared.bins[i] = 0;
    __syncthreads();
    const auto coarse_bin = coarse_bins(row.weights());
    const float least = key_value(shared.search.lowest);
    const int32_t shift = shared.search.shift;
    const uint32_t first_key = shared.search.ends[1];
    row.for_fours([&](int32_t, const float (&v)[4]) {
#pragma unroll
      for (int32_t i = 0; i < 4; ++i) {
        const int32_t bin = shift < 0 ? coarse_bin(v[i]) : fine_bin(first_key, shift, v[i]);
        if (bin >= 0 && bin < kBins - 1 && v[i] >= least) atomicAdd(&shared.bins[bin], 1u);
      }
    });
    row.sync();
    if (row.num_ctas == 1) return;
    // Each CTA adds up a part of the bins and gives it to all: nobody else reads or writes that part of anyone's bins.
    const int32_t end = kBins * (row.rank + 1) / row.num_ctas;
    for (int32_t bin = kBins * row.rank / row.num_ctas + static_cast<int32_t>(threadIdx.x); bin < end;
         bin += kSamplingThreads) {
      uint32_t sum = 0;
#pragma unroll 8
      for (int32_t cta = 0; cta < row.num_ctas; ++cta) sum += ptx::cluster_pointer(&shared, cta)->bins[bin];
#pragma unroll 8
      for (int32_t cta = 0; cta < row.num_ctas; ++cta) ptx::cluster_pointer(&shared, cta)->bins[bin] = sum;
    }
    row.sync();
  }

  /// The bins [first, last] that may hold the threshold, and how many values lie in the bins before.
  struct Window {
    uint64_t before;
    int32_t first;
    int32_t last;
  };

  /// A member of a bin weighs what its middle does, nearly: that suggests a window of few bins. What is sure is only
  /// that no member of a coarse bin weighs less than 2^(-1/256) = 1 - 0.0027 of what none weighs more than.
  __device__ __forceinline__ Window find_window() const {
    const Search& search = shared.search;
    const auto coarse_bin = coarse_bins(row.weights());
    const bool by_mass = search.by_mass;
    const uint64_t target = search.target - search.base;
    const auto most_of = [&](int32_t i) -> uint64_t {
      const int32_t bin = static_cast<int32_t>(threadIdx.x) * kThreadBins + i;
      const uint64_t count = bin < kBins - 1 ? shared.bins[bin] : 0;
      if (!by_mass || count == 0) return count;
      return count *
             (1 + (search.shift < 0
                       ? coarse_bin.most(bin)
                       : row.weights()(key_value(search.ends[1] - (static_cast<uint32_t>(bin) << search.shift)))));
    };
    // Of sums of what the members weigh at most: those of what they weigh are 0.00135 less by the middles of coarse
    // bins. A fine bin has no width to speak of.
    uint64_t low = target, high = target;
    if (by_mass) {
      const uint64_t middle =
          search.shift < 0 ? target + (target >> 10) + (target >> 11) - (target >> 13) : target;  // 1.00134
      low = search.is_wide ? target - (target >> 12) : middle - (target >> 12);
      high = search.is_wide ? target + (target >> 8) : middle + (target >> 12);
    }
    const Crossing first = find_crossing<kThreadBins>(shared.scratch, max_of<uint64_t>(low, 1), most_of);
    const Crossing last = find_crossing<kThreadBins>(shared.scratch, max_of<uint64_t>(high, 1), most_of);
    return Window{first.before, first.found ? first.index : kBins - 1, last.found ? last.index : kBins - 1};
  }

  /// Sets the segments' masses to those of values with a key of at least `lowest` in bins before window.first, or
  /// counts them; its members become candidates.
  __device__ __forceinline__ void sum_masses(uint32_t lowest, const Window& window, bool by_mass) const {
    uint32_t least = 0xffffffffu, most = 0;
    uint64_t sum = 0;
    const Weights weights = row.weights();
    const auto coarse_bin = coarse_bins(weights);
    const float least_value = key_value(lowest);
    const int32_t shift = shared.search.shift;
    const uint32_t first_key = shared.search.ends[1];
    row.for_fours(
        [&](int32_t token, const float (&v)[4]) {
          uint32_t members = 0;
#pragma unroll
          for (int32_t i = 0; i < 4; ++i) {
            const int32_t bin = shift < 0 ? coarse_bin(v[i]) : fine_bin(first_key, shift, v[i]);
            const bool counts = v[i] >= least_value;
            if (counts && bin >= window.first && bin <= window.last) members |= 1u << i;
            if (counts && bin < window.first) sum += by_mass ? weights(v[i]) : 1;
          }
#pragma unroll 1
          for (; members != 0; members &= members - 1) {
            const int32_t member = token + __ffs(static_cast<int32_t>(members)) - 1;
            const uint32_t key = order_key(row.source.one(member));
            least = min_of(least, key);
            most = max_of(most, key);
            row.keep(member, kMaxCandidates);
          }
        },
        [&](int32_t segment) {
          sum = ptx::warp_add(sum);
          if (row.lane() == 0) row.mass_table(0)[segment] = sum;
          sum = 0;
        });
    least = ptx::warp_min(least);
    most = ptx::warp_max(most);
    if (row.lane() == 0) {
      atomicMin(&shared.summary.least_key, least);
      atomicMax(&shared.summary.most_key, most);
    }
  }

  /// The first CTA's part of find(): the threshold among the window's members, told to all; 0 if it is not among them.
  __device__ __forceinline__ void select_member(uint64_t target, int32_t members) const {
    BlockSums sums(shared.scratch);
    const uint32_t least = shared.search.ends[0], most = shared.search.ends[1];
    const bool by_mass = shared.search.by_mass;
    uint32_t keys[kHeld];
    uint64_t weight[kHeld];
#pragma unroll
    for (int32_t i = 0; i < kHeld; ++i) {
      const int32_t at = static_cast<int32_t>(threadIdx.x) + i * kSamplingThreads;
      keys[i] = at < members ? shared.keys[at] : 0;
      weight[i] = at >= members ? 0 : by_mass ? row.weights()(key_value(keys[i])) : 1;
    }
    const auto sum_from = [&](uint32_t from) {
      uint64_t sum = 0;
#pragma unroll
      for (int32_t i = 0; i < kHeld; ++i) sum += keys[i] >= from ? weight[i] : 0;
      return sums(sum);
    };
    const uint32_t key = sum_from(least) >= target ? bisect<uint64_t>(least, most + 1, target, true, sum_from) : 0;
    if (static_cast<int32_t>(threadIdx.x) < row.num_ctas)
      ptx::cluster_pointer(&shared, threadIdx.x)->decision.threshold = key;
  }

  /// The members that survive join the masses of their segments.
  __device__ __forceinline__ void add_members(uint32_t threshold) const {
    const int32_t own = shared.summary.num_candidates;
    unsigned long long* mass = reinterpret_cast<unsigned long long*>(row.mass_table(0));
    for (int32_t i = threadIdx.x; i < own; i += kSamplingThreads) {
      const unsigned long long weight = row.weights()(key_value(shared.keys[i]));
      if (shared.keys[i] >= threshold) atomicAdd(&mass[shared.tokens[i] / kSegmentTokens], weight);
    }
    __syncthreads();
  }

  enum class Look { kFound, kTooMany, kMissed };

  /// Looks for the threshold among the window's members, before which values weigh or count `above`. Found: it is in
  /// the decision, and the masses are complete. Else the search has the members' ends.
  __device__ __forceinline__ Look look_at_members(uint64_t above) const {
    int32_t members = 0;
    uint32_t least = 0xffffffffu, most = 0;
#pragma unroll 4
    for (int32_t cta = 0; cta < row.num_ctas; ++cta) {
      const CtaSummary& other = row.summary_of(cta);
      members += other.num_candidates;
      least = min_of(least, other.least_key);
      most = max_of(most, other.most_key);
    }
    __syncthreads();  // the ends were read
    if (threadIdx.x == 0) {
      shared.search.ends[0] = least;
      shared.search.ends[1] = most;
    }
    if (members == 0 || above >= shared.search.target) return Look::kMissed;
    if (members > kMaxCandidates) return Look::kTooMany;
    row.gather_candidates(0);
    row.sync();
    if (row.rank == 0) select_member(shared.search.target - above, members);
    row.sync();
    if (shared.decision.threshold == 0) return Look::kMissed;
    add_members(shared.decision.threshold);
    return Look::kFound;
  }

  enum class Found { kNothing, kKey, kMasses };

  /// Largest key such that values at or above weigh, or count, at least the target: goes to the decision. kMasses: the
  /// segments' masses are then those of the values at or above.
  __device__ __forceinline__ Found find() const {
    Search& search = shared.search;
    // Windows: the coarse bins', then that of fine bins between the ends of the first, if it has too many members; a
    // wide one, if the threshold is not in it. Then, where equal values are too many, or a sum is at the edge of a bin,
    // a bisection: a read of the row each round, first at the lowest key, then at the ends of the last window.
    constexpr int32_t kWindows = 4;
    bool counts = true;
    bool looks = true;
#pragma unroll 1
    for (int32_t round = -kWindows; round < 3 + 32; ++round) {  // from 0 on a bisection
      if (round < 0 && !looks) round = 0;
      looks = round < 0;
      uint32_t middle = search.lowest;
      Window window{0, kBins, kBins};  // everything is summed
      if (looks) {
        if (counts) count_values();
        window = find_window();
      } else {
        const uint32_t end = round == 1 ? search.ends[1] : round == 2 ? search.ends[0] : 0;
        if (round > 0)
          middle = end > search.low && end < search.high ? end : search.low + (search.high - search.low) / 2;
      }
      sum_masses(middle, window, search.by_mass || looks);
      const uint64_t sum = row.total_mass();  // its barrier is that of the members too
      if (looks) {
        const uint64_t above = search.by_mass ? sum : search.base + window.before;
        const Look look = look_at_members(above);
        if (look == Look::kFound) return Found::kMasses;
        __syncthreads();  // the ends are known
        const uint32_t range = search.ends[1] - search.ends[0];
        counts = look == Look::kTooMany && range > 0;
        looks = counts || (look == Look::kMissed && !search.is_wide && window.last < kBins - 1);
        row.sync();  // the search was read, and summaries by other CTAs
        if (threadIdx.x == 0) {
          search.is_wide = look == Look::kMissed;
          if (counts) {
            search.base = above;
            search.shift = max_of(32 - __clz(range) - 11, 0);  // at most 2048 bins
          }
          shared.num_gathered = 0;
          shared.summary.num_candidates = 0;
          shared.summary.least_key = 0xffffffffu;
          shared.summary.most_key = 0;
        }
        row.sync();
        continue;
      }
      const bool reaches = sum >= search.target;
      if (round == 0 && !reaches) return Found::kNothing;
      __syncthreads();  // the search was read
      if (threadIdx.x == 0) (reaches ? search.low : search.high) = middle;
      row.sync();  // so were the masses
      if (sum == search.target || search.high - search.low <= 1) break;
    }
    if (threadIdx.x == 0) shared.decision.threshold = search.low;
    __syncthreads();
    return Found::kKey;
  }

  /// Sets the decision's threshold to the smallest surviving key and, unless a token is to be drawn, its mass to the
  /// survivors'.
  __device__ __forceinline__ void filter() const {
    const RowSettings& settings = row.settings;
    bool has_masses = false;
    if (threadIdx.x == 0) shared.decision.threshold = min_p_key(row.weights(), settings);
    __syncthreads();
#pragma unroll 1
    for (int32_t step = 0; step < 4;
         ++step) {  // top-k, its masses, top-p, its masses: one copy of the code of each kind
      const bool is_top_p = step >= 2;
      if (step % 2 == 0) {
        if (is_top_p ? !settings.has_top_p : settings.top_k == 0) continue;
        row.sync();  // what the step before left was read
        if (threadIdx.x == 0) {
          shared.num_gathered = 0;
          shared.summary.num_candidates = 0;
          shared.summary.least_key = 0xffffffffu;
          shared.summary.most_key = 0;
          const uint32_t lowest = shared.decision.threshold;
          const uint64_t mass = row.top_p_of_all() ? shared.row_mass : shared.decision.mass;
          shared.search.target = is_top_p ? top_p_target(settings, mass) : static_cast<uint64_t>(settings.top_k);
          shared.search.lowest = shared.search.low = lowest;
          shared.search.high = order_key(shared.reference) + 1;
          shared.search.by_mass = is_top_p;
          shared.search.base = 0;
          shared.search.shift = -1;
          shared.search.is_wide = false;
        }
        __syncthreads();
        const Found found = find();
        has_masses = found == Found::kMasses;
        if (found == Found::kNothing) {
          __syncthreads();
          if (threadIdx.x == 0) shared.decision.threshold = shared.search.lowest;
          __syncthreads();
        }
      } else {
        if (!is_top_p && settings.has_top_p && row.top_p_of_all()) continue;
        if (row.samples() && (is_top_p || !settings.has_top_p)) break;  // the race needs no mass
        row.sync();                                                     // so were masses
        if (!has_masses) sum_masses(shared.decision.threshold, Window{0, kBins, kBins}, true);
        has_masses = true;
        const uint64_t mass = row.total_mass();
        if (threadIdx.x == 0) shared.decision.mass = mass;
        __syncthreads();
        if (!settings.has_top_p) break;
      }
    }
  }
};

}  // namespace attn
