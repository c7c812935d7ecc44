// Reading the row again, where the candidates do not reach down to the filters' threshold (a flat row, a large top-k) or do not fit (many equal values): a
// histogram over the cluster, then the members of the bin that holds the threshold.
#pragma once

#include "device/sampling_row.cuh"

namespace attn {

template <class Source>
struct Rereader {
  using Weights = typename Source::Weights;

  const Row<Source>& row;
  SamplingShared& shared;

  __device__ __forceinline__ explicit Rereader(const Row<Source>& row) : row(row), shared(row.shared) {}

  /// Bin of a value in the first histogram: the top one holds the largest value, they are 16 / 2048 powers of two wide, the lowest takes the rest.
  __device__ __forceinline__ static int32_t coarse_bin(const LogitWeights& of_row, float value) {
    return kBins - 1 - static_cast<int32_t>(min_of((of_row.reference - value) * (of_row.scale * (kBins / 16.0f)), static_cast<float>(kBins - 1)));
  }
  __device__ __forceinline__ static int32_t coarse_bin(const ProbWeights& of_row, float value) {
    return kBins - 1 - static_cast<int32_t>(min_of((order_key(of_row.reference) - order_key(value)) >> 17, static_cast<uint32_t>(kBins - 1)));
  }

  /// Histogram over the cluster of the values with low <= key < high: coarse bins, or bins of 2^shift keys.
  __device__ __forceinline__ void count_values(bool by_mass, bool is_coarse, uint32_t low, uint32_t high, int32_t shift) const {
    clear(shared.histogram);
    __syncthreads();
    const Weights weights = row.weights();
    row.for_vectors([&](int32_t, int32_t, const float (&v)[Source::kVectorTokens]) {
#pragma unroll
      for (int32_t i = 0; i < Source::kVectorTokens; ++i) {
        const uint32_t key = order_key(v[i]);
        const uint64_t weight = by_mass ? weights(v[i]) : 1;
        if (key >= low && key < high && weight != 0) {
          shared.histogram.add(is_coarse ? coarse_bin(weights, v[i]) : static_cast<int32_t>((key - low) >> shift), weight);
        }
      }
    });
    row.sync();
    if (row.num_ctas == 1) return;
    const int32_t end = kBins * (row.rank + 1) / row.num_ctas;
    for (int32_t bin = kBins * row.rank / row.num_ctas + static_cast<int32_t>(threadIdx.x); bin < end; bin += kSamplingThreads) {
      uint64_t sum = 0;
#pragma unroll 4
      for (int32_t cta = 0; cta < row.num_ctas; ++cta) sum += ptx::cluster_pointer(&shared.histogram, cta)->sum(bin);
#pragma unroll 4
      for (int32_t cta = 0; cta < row.num_ctas; ++cta) ptx::cluster_pointer(&shared.histogram, cta)->set(bin, sum);
    }
    row.sync();
  }

  /// Sets the segments' masses to those of values with a key of at least `lowest`; with a bin, of those in bins above it, while its members become candidates.
  __device__ __forceinline__ void sum_masses(uint32_t lowest, int32_t bin) const {
    uint32_t least = 0xffffffffu, most = 0;
    uint64_t sum = 0;
    const Weights weights = row.weights();
    row.for_vectors(
        [&](int32_t segment, int32_t j, const float (&v)[Source::kVectorTokens]) {
          uint32_t members = 0;
#pragma unroll
          for (int32_t i = 0; i < Source::kVectorTokens; ++i) {
            const uint32_t key = order_key(v[i]);
            bool counts = key >= lowest;
            if (bin >= 0 && counts) {
              const int32_t of_value = coarse_bin(weights, v[i]);
              counts = of_value > bin;
              if (of_value == bin) {
                members |= 1u << i;
                least = min_of(least, key);
                most = max_of(most, key);
              }
            }
            const uint64_t weight = weights(v[i]);
            sum += counts ? weight : 0;
          }
          if (members != 0) row.keep(members, segment, j);
        },
        [&](int32_t segment) {
          sum = ptx::warp_add(sum);
          if (row.lane() == 0) row.mass_table(0)[segment] = sum;
          sum = 0;
        });
    if (bin < 0) return;
    least = ptx::warp_min(least);
    most = ptx::warp_max(most);
    if (row.lane() == 0) {
      atomicMin(&shared.summary.least_key, least);
      atomicMax(&shared.summary.most_key, most);
    }
  }

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
    for (int32_t cta = 0; cta < row.num_ctas; ++cta) sum += row.summary_of(cta).mass;
    return sum;
  }

  /// The first CTA's part of find(): the threshold among a bin's members, told to all.
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
    const uint32_t key = bisect<uint64_t>(least, most + 1, target, true, [&](uint32_t from) {
      uint64_t sum = 0;
#pragma unroll
      for (int32_t i = 0; i < kHeld; ++i) sum += keys[i] >= from ? weight[i] : 0;
      return sums(sum);
    });
    if (static_cast<int32_t>(threadIdx.x) < row.num_ctas) ptx::cluster_pointer(&shared, threadIdx.x)->decision.threshold = key;
  }

  enum class Found { kNothing, kKey, kMasses };

  /// Largest key such that values at or above weigh, or count, at least `target`, none below `lowest` being looked at. kMasses: the segments' masses are then
  /// those of the values at or above.
  __device__ __forceinline__ Found find(bool by_mass, uint64_t target, uint32_t lowest, uint32_t& threshold) const {
    if (threadIdx.x == 0) {
      shared.summary.num_candidates = 0;
      shared.num_gathered = 0;
      shared.summary.least_key = 0xffffffffu;
      shared.summary.most_key = 0;
    }
    uint32_t low = lowest, high = kInfiniteKey;
    bool is_coarse = true;
#pragma unroll 1
    while (high - low > 1) {      // coarse bins, then at most three rounds of 11 bits
      const int32_t shift = max_of(32 - __clz(high - low - 1) - kBinBits, 0);
      count_values(by_mass, is_coarse, low, high, shift);
      const Crossing crossing = find_bin(shared.scratch, shared.histogram, target);
      if (!crossing.found) return Found::kNothing;
      target -= crossing.before;
      if (is_coarse) {
        is_coarse = false;
        sum_masses(lowest, crossing.index);
        row.sync();
        int32_t members = 0;
        uint32_t least = 0xffffffffu, most = 0;
        for (int32_t cta = 0; cta < row.num_ctas; ++cta) {
          const CtaSummary& other = row.summary_of(cta);
          members += other.num_candidates;
          least = min_of(least, other.least_key);
          most = max_of(most, other.most_key);
        }
        if (members <= kMaxCandidates) {
          row.gather_candidates(0);
          row.sync();
          if (row.rank == 0) select_member(by_mass, target, members, least, most);
          clear(shared.histogram);
          row.sync();
          threshold = shared.decision.threshold;
          add_members(threshold);
          return Found::kMasses;
        }
        low = least;
        high = most + 1;
      } else {
        low += static_cast<uint32_t>(crossing.index) << shift;
        high = min_of(high - low, 1u << shift) + low;
      }
      row.sync();                 // histograms are read until here
    }
    threshold = low;
    return Found::kKey;
  }

  /// The members that survive join the masses of their segments.
  __device__ __forceinline__ void add_members(uint32_t threshold) const {
    const int32_t own = shared.summary.num_candidates;
    for (int32_t i = threadIdx.x; i < own; i += kSamplingThreads) {
      if (shared.keys[i] >= threshold) shared.histogram.add(shared.tokens[i] / kSegmentTokens - row.segment_begin, row.weights()(key_value(shared.keys[i])));
    }
    __syncthreads();
    uint64_t* mass = row.mass_table(0);
    for (int32_t s = row.segment_begin + static_cast<int32_t>(threadIdx.x); s < row.segment_end; s += kSamplingThreads) {
      mass[s] += shared.histogram.sum(s - row.segment_begin);
    }
    __syncthreads();
  }

  /// Smallest surviving key and the survivors' mass; the segments' masses are then those of the survivors.
  __device__ __forceinline__ uint64_t filter(uint32_t& threshold) const {
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
        has_masses = find(is_top_p, target, threshold, threshold) == Found::kMasses;
      } else {
        if (!is_top_p && settings.has_top_p && row.top_p_of_all()) continue;
        if (!has_masses) sum_masses(threshold, -1);
        has_masses = true;
        mass = total_mass();
        if (!settings.has_top_p) break;
      }
    }
    return mass;
  }
};

}  // namespace attn
