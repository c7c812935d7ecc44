// The exact threshold of a row's filters, whatever they are: found by the digits of a radix, with a read of the row for
// each.
#pragma once

#include "sampling/device/row.cuh"

namespace attn {

template <class Source>
struct ThresholdSearch {
  using Weights = typename Source::Weights;

  const Row<Source>& row;

  __device__ __forceinline__ explicit ThresholdSearch(const Row<Source>& row) : row(row) {}

  struct Selected {
    uint32_t key;
    uint64_t sum;  // of the weights from there on
  };

  /// The smallest key that survives all filters and, if requested, the survivors' mass, by reading the row repeatedly.
  /// row_mass is valid if it is needed.
  __device__ __forceinline__ Selected find_threshold(bool needs_mass) const {
    enum Step { kTopK, kMassOfTopK, kTopP, kMass };
    Selected survivors{min_p_key(row.weights(), row.settings), 0};
    uint64_t total = row.shared.row_mass;
#pragma unroll 1
    for (int32_t step = kTopK; step <= kMass; ++step) {  // one copy of the code
      if (step == kTopK && row.settings.top_k == 0) continue;
      if (step == kMassOfTopK && (!row.settings.has_top_p || top_p_of_all(row.params, row.settings))) continue;
      if (step == kTopP && !row.settings.has_top_p) continue;
      if (step == kMass && (!needs_mass || row.settings.has_top_p)) continue;
      const uint64_t target = step == kTopK   ? static_cast<uint64_t>(row.settings.top_k)
                              : step == kTopP ? top_p_target(row.settings, total)
                                              : ~uint64_t{0};  // never reached: the sum of all
      const Selected selected = select(survivors.key, target, step != kTopK);
      if (step == kMassOfTopK)
        total = selected.sum;
      else
        survivors = selected;
    }
    return survivors;
  }

 private:
  /// Adds to a bin, in two words: nvcc makes a loop of 64 bits.
  __device__ __forceinline__ static void add_to_bin(uint64_t& bin, uint64_t weight) {
    uint32_t* words = reinterpret_cast<uint32_t*>(&bin);
    const uint32_t low = static_cast<uint32_t>(weight), before = atomicAdd(&words[0], low);
    const uint32_t high = static_cast<uint32_t>(weight >> 32) + (before + low < low ? 1 : 0);
    if (high != 0) atomicAdd(&words[1], high);
  }

  /// Adds up the CTAs' bins. Each CTA adds up a part of them, and gives the sums to all.
  __device__ __forceinline__ void add_bins() const {
    row.sync();
    if (row.num_ctas == 1) return;
    const int32_t part = row.share_of_cta(kBins);
    for (int32_t bin = part * row.rank + static_cast<int32_t>(threadIdx.x); bin < part * (row.rank + 1);
         bin += kSamplingThreads) {
      uint64_t sum = 0;
      for (int32_t cta = 0; cta < row.num_ctas; ++cta) sum += ptx::cluster_pointer(row.shared.bins, cta)[bin];
      for (int32_t cta = 0; cta < row.num_ctas; ++cta) ptx::cluster_pointer(row.shared.bins, cta)[bin] = sum;
    }
    row.sync();
  }

  /// Where the running sum of the bins reaches `target`: bin (kBins: nowhere), sum before it, sum with it. The last two
  /// are the same if it is not reached.
  __device__ __forceinline__ void find_crossing(uint64_t target, uint64_t (&found)[3]) const {
    constexpr int32_t kThreadBins = kBins / kSamplingThreads;
    const uint64_t* own = row.shared.bins + threadIdx.x * kThreadBins;
    uint64_t mine = 0;
#pragma unroll 1
    for (int32_t i = 0; i < kThreadBins; ++i) mine += own[i];
    uint64_t through = ptx::warp_inclusive_sum(mine, row.lane());
    if (row.lane() == 31) row.shared.block_sums[1][row.warp()] = through;
    __syncthreads();
#pragma unroll 1
    for (int32_t w = 0; w < row.warp(); ++w) through += row.shared.block_sums[1][w];
    uint64_t before = through - mine;
    if (before < target && target <= through) {
      int32_t i = 0;
#pragma unroll 1
      for (; before + own[i] < target; ++i) before += own[i];
      row.shared.crossing[0] = threadIdx.x * kThreadBins + i;
      row.shared.crossing[1] = before;
      row.shared.crossing[2] = before + own[i];
    }
    if (threadIdx.x == kSamplingThreads - 1 && through < target) {
      row.shared.crossing[0] = kBins;
      row.shared.crossing[1] = row.shared.crossing[2] = through;
    }
    __syncthreads();
    for (int32_t i = 0; i < 3; ++i) found[i] = row.shared.crossing[i];
    __syncthreads();  // before it is written again
  }

  /// The largest key, not below `low`, such that the row's tokens at or above it sum up to `target`, by mass or by
  /// number; `low` if there is none. It is found digit by digit, with a read of the row for each, and is the same in
  /// all threads.
  __device__ __forceinline__ Selected select(uint32_t low, uint64_t target, bool by_mass) const {
    const Weights row_weights = row.weights();
    uint32_t high = row.shared.decision.best_key;
    uint64_t above = 0;
#pragma unroll 1
    while (true) {
      const int32_t shift = max_of(32 - kBinBits - __clz(static_cast<int32_t>(high - low)), 0);
      for (int32_t bin = threadIdx.x; bin < kBins; bin += kSamplingThreads) row.shared.bins[bin] = 0;
      __syncthreads();
      // Equal values that follow each other are added at once: rows may have nothing else.
      uint32_t run_bin = 0;
      uint64_t run_sum = 0;
      row.reader.start();
      row.reader.for_each([&](int32_t, float (&v)[kLaneTokens]) {
#pragma unroll 1
        for (int32_t i = 0; i < kLaneTokens; ++i) {  // rare, so it is small: registers move on instead of copies of it
          const uint32_t key = order_key(v[0]), bin = (high - key) >> shift;
          if (key >= low && key <= high) {
            if (bin != run_bin && run_sum != 0) {
              add_to_bin(row.shared.bins[run_bin], run_sum);
              run_sum = 0;
            }
            run_bin = bin;
            run_sum += by_mass ? row_weights(v[0]) : 1;
          }
#pragma unroll
          for (int32_t j = 1; j < kLaneTokens; ++j) v[j - 1] = v[j];
        }
      });
      if (run_sum != 0) add_to_bin(row.shared.bins[run_bin], run_sum);
      add_bins();
      uint64_t found[3];
      find_crossing(target - above, found);
      if (found[0] == kBins) return Selected{low, above + found[2]};
      high -= static_cast<uint32_t>(found[0]) << shift;
      const uint32_t width = (1u << shift) - 1;
      low = high - low > width ? high - width : low;
      if (shift == 0) return Selected{low, above + found[2]};
      above += found[1];
    }
  }
};

}  // namespace attn
