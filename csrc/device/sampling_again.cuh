// Reading the row again, where the candidates do not reach down to the filters' threshold (a flat row, a large top-k) or do not fit (many equal values): a
// histogram of the row over the cluster, then the members of the few bins that may hold the threshold.
#pragma once

#include "device/sampling_row.cuh"

namespace attn {

template <class Source>
struct Rereader {
  using Weights = typename Source::Weights;

  const Row<Source>& row;
  SamplingShared& shared;

  __device__ __forceinline__ explicit Rereader(const Row<Source>& row) : row(row), shared(row.shared) {}

  // Bins are 1/256 of a power of two wide. Bin 0 has the largest values; the last one, which is not counted, takes what lies deeper than 16 powers of two.

  struct LogitBins {
    float reference, per_logit, deepest;

    __device__ __forceinline__ explicit LogitBins(const LogitWeights& weights)
        : reference(weights.reference), per_logit(weights.scale * kOctaveBins), deepest((kBins - 1) / per_logit) {}

    __device__ __forceinline__ int32_t operator()(float value) const {
      constexpr float kMagic = 8388608.0f;      // 2^23: adding it rounds to an integer, which stands in the low bits
      return static_cast<int32_t>(__float_as_uint(fused_multiply_add(min_of(reference - value, deepest), per_logit, kMagic)) - 0x4b000000u);
    }

    /// What no member of the bin weighs more than.
    __device__ __forceinline__ static uint64_t most(int32_t bin) { return exp2_fixed(min_of(0.5f - static_cast<float>(bin), 0.0f), 1.0f / kOctaveBins); }
  };

  struct ProbBins {
    uint32_t best_key;
    Weights weights;

    __device__ __forceinline__ explicit ProbBins(const ProbWeights& weights) : best_key(order_key(weights.reference)), weights(weights) {}

    __device__ __forceinline__ int32_t operator()(float value) const {
      return static_cast<int32_t>(min_of((best_key - order_key(value)) >> kShift, static_cast<uint32_t>(kBins - 1)));
    }

    __device__ __forceinline__ uint64_t most(int32_t bin) const { return weights(key_value(best_key - (static_cast<uint32_t>(bin) << kShift))); }

    static constexpr int32_t kShift = 15;       // of 23 bits of a mantissa: 256 bins to an octave
  };

  __device__ __forceinline__ static LogitBins bins_of(const LogitWeights& weights) { return LogitBins(weights); }
  __device__ __forceinline__ static ProbBins bins_of(const ProbWeights& weights) { return ProbBins(weights); }

  /// Counts the cluster's values with a key of at least `lowest` by bins.
  __device__ __forceinline__ void count_values(uint32_t lowest) const {
    for (int32_t i = threadIdx.x; i < kBins; i += kSamplingThreads) shared.bins[i] = 0;
    __syncthreads();
    const auto bin_of = bins_of(row.weights());
    const float least = key_value(lowest);
    row.for_fours([&](int32_t, const float (&v)[4]) {
#pragma unroll
      for (int32_t i = 0; i < 4; ++i) {
        const int32_t bin = bin_of(v[i]);
        if (bin < kBins - 1 && v[i] >= least) atomicAdd(&shared.bins[bin], 1u);
      }
    });
    row.sync();
    if (row.num_ctas == 1) return;
    // Each CTA adds up a part of the bins and gives it to all: nobody else reads or writes that part of anyone's bins.
    const int32_t end = kBins * (row.rank + 1) / row.num_ctas;
    for (int32_t bin = kBins * row.rank / row.num_ctas + static_cast<int32_t>(threadIdx.x); bin < end; bin += kSamplingThreads) {
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

  /// No member of a bin weighs less than 2^(-1/256) of what none weighs more than, so that two sums over the bins enclose the mass.
  __device__ __forceinline__ Window find_window(bool by_mass, uint64_t target) const {
    const auto bin_of = bins_of(row.weights());
    const auto most_of = [&](int32_t i) -> uint64_t {
      const int32_t bin = static_cast<int32_t>(threadIdx.x) * kThreadBins + i;
      const uint64_t count = bin < kBins - 1 ? shared.bins[bin] : 0;
      return by_mass ? count * (bin_of.most(bin) + 1) : count;
    };
    // Rounding is allowed for with 2^-12 of the target at either end: 2^(-1/256) is 1 - 0.0027.
    const Crossing first = find_crossing<kThreadBins>(shared.scratch, by_mass ? target - (target >> 12) : target, most_of);
    const Crossing last = find_crossing<kThreadBins>(shared.scratch, by_mass ? target + (target >> 8) : target, most_of);
    return Window{first.before, first.found ? first.index : kBins - 1, last.found ? last.index : kBins - 1};
  }

  /// Sets the segments' masses to those of values with a key of at least `lowest` in bins before window.first, or counts them; its members become candidates.
  __device__ __forceinline__ void sum_masses(uint32_t lowest, const Window& window, bool by_mass) const {
    uint32_t least = 0xffffffffu, most = 0;
    uint64_t sum = 0;
    const Weights weights = row.weights();
    const auto bin_of = bins_of(weights);
    const float least_value = key_value(lowest);
    row.for_fours(
        [&](int32_t token, const float (&v)[4]) {
          uint32_t members = 0;
#pragma unroll
          for (int32_t i = 0; i < 4; ++i) {
            const int32_t bin = bin_of(v[i]);
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
            row.keep(member);
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

  /// All values with a key of at least `lowest`.
  __device__ __forceinline__ void sum_all(uint32_t lowest, bool by_mass) const { sum_masses(lowest, Window{0, kBins, kBins}, by_mass); }

  /// The row's mass from the segments' masses; every CTA's is then in its summary.
  __device__ __forceinline__ uint64_t total_mass() const {
    BlockSums sums(shared.scratch);
    const uint64_t* mass = row.mass_table(0);
    uint64_t sum = 0;
    __syncthreads();
    for (int32_t s = row.segment_begin + static_cast<int32_t>(threadIdx.x); s < row.segment_end; s += kSamplingThreads) sum += mass[s];
    sum = sums(sum);
    if (threadIdx.x == 0) shared.summary.mass = sum;
    row.sync();
    sum = 0;
#pragma unroll 4
    for (int32_t cta = 0; cta < row.num_ctas; ++cta) sum += row.summary_of(cta).mass;
    return sum;
  }

  /// The first CTA's part of find(): the threshold among the window's members, told to all; 0 if it is not among them.
  __device__ __forceinline__ void select_member(bool by_mass, uint64_t target, int32_t members, uint32_t least, uint32_t most) const {
    BlockSums sums(shared.scratch);
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
    if (static_cast<int32_t>(threadIdx.x) < row.num_ctas) ptx::cluster_pointer(&shared, threadIdx.x)->decision.threshold = key;
  }

  /// The members that survive join the masses of their segments.
  __device__ __forceinline__ void add_members(uint32_t threshold) const {
    const int32_t own = shared.summary.num_candidates;
    unsigned long long* mass = reinterpret_cast<unsigned long long*>(row.mass_table(0));
    for (int32_t i = threadIdx.x; i < own; i += kSamplingThreads) {
      if (shared.keys[i] >= threshold) atomicAdd(&mass[shared.tokens[i] / kSegmentTokens], static_cast<unsigned long long>(row.weights()(key_value(shared.keys[i]))));
    }
    __syncthreads();
  }

  /// Whether the threshold is among the window's members, before which values weigh or count `above`; it is in the decision then, and the masses are complete.
  __device__ __forceinline__ bool look_at_members(bool by_mass, uint64_t target, uint64_t above) const {
    int32_t members = 0;
    uint32_t least = 0xffffffffu, most = 0;
#pragma unroll 4
    for (int32_t cta = 0; cta < row.num_ctas; ++cta) {
      const CtaSummary& other = row.summary_of(cta);
      members += other.num_candidates;
      least = min_of(least, other.least_key);
      most = max_of(most, other.most_key);
    }
    if (threadIdx.x == 0) {
      shared.ends[0] = least;
      shared.ends[1] = most;
    }
    if (members == 0 || members > kMaxCandidates || above >= target) return false;
    row.gather_candidates(0);
    row.sync();
    if (row.rank == 0) select_member(by_mass, target - above, members, least, most);
    row.sync();
    if (shared.decision.threshold == 0) return false;
    add_members(shared.decision.threshold);
    return true;
  }

  enum class Found { kNothing, kKey, kMasses };

  /// Largest key such that values at or above weigh, or count, at least `target`, none below `lowest` being looked at. kMasses: the segments' masses are then
  /// those of the values at or above.
  __device__ __forceinline__ Found find(bool by_mass, uint64_t target, uint32_t lowest, uint32_t best_key, uint32_t& threshold) const {
    if (threadIdx.x == 0) {
      shared.summary.num_candidates = 0;
      shared.num_gathered = 0;
      shared.summary.least_key = 0xffffffffu;
      shared.summary.most_key = 0;
    }
    count_values(lowest);
    const Window window = find_window(by_mass, target);
    uint32_t low = lowest, high = best_key + 1;
    // The first round looks into the window. Others only follow where thousands of equal values are in it, or a sum is at the edge of a bin: a bisection, each
    // round a read of the row, first at the lowest key, then at the ends of the window, where equal values lie.
#pragma unroll 1
    for (int32_t round = 0; round < 4 + 32 && (round < 2 || high - low > 1); ++round) {
      const uint32_t end = round == 2 ? shared.ends[1] : round == 3 ? shared.ends[0] : 0;
      const uint32_t middle = round < 2 ? lowest : end > low && end < high ? end : low + (high - low) / 2;
      sum_masses(middle, round == 0 ? window : Window{0, kBins, kBins}, by_mass || round == 0);
      const uint64_t sum = total_mass();      // its barrier is that of the members too
      if (round == 0) {
        if (look_at_members(by_mass, target, by_mass ? sum : window.before)) {
          threshold = shared.decision.threshold;
          return Found::kMasses;
        }
      } else if (sum >= target) {
        low = middle;
        if (sum == target) break;
      } else {
        if (round == 1) return Found::kNothing;
        high = middle;
      }
      row.sync();             // masses were read
    }
    threshold = low;
    return Found::kKey;
  }

  /// Smallest surviving key and the survivors' mass; the segments' masses are then those of the survivors.
  __device__ __forceinline__ uint64_t filter(uint32_t best_key, uint32_t& threshold) const {
    const RowSettings& settings = row.settings;
    threshold = min_p_key(row.weights(), settings);
    bool has_masses = false;
    uint64_t mass = 0;
#pragma unroll 1
    for (int32_t step = 0; step < 4; ++step) {      // top-k, its masses, top-p, its masses: one copy of the code of each kind
      const bool is_top_p = step >= 2;
      if (step % 2 == 0) {
        if (is_top_p ? !settings.has_top_p : settings.top_k == 0) continue;
        const uint64_t target = is_top_p ? top_p_target(settings, row.top_p_of_all() ? shared.row_mass : mass) : static_cast<uint64_t>(settings.top_k);
        row.sync();
        has_masses = find(is_top_p, target, threshold, best_key, threshold) == Found::kMasses;
      } else {
        if (!is_top_p && settings.has_top_p && row.top_p_of_all()) continue;
        row.sync();
        if (!has_masses) sum_all(threshold, true);
        has_masses = true;
        mass = total_mass();
        if (!settings.has_top_p) break;
      }
    }
    return mass;
  }
};

}  // namespace attn
