// Only top-p, where thousands of tokens may survive: a survey of some segments estimates the threshold, and one read of
// the row proves the result. Values at or above a limit a little below the threshold race. Two sums prove that all
// survivors were in the race and that its winner is one. They are float sums: a sum within their error proves nothing,
// and the row is selected exactly (threshold.cuh).
#pragma once

#include "sampling/device/row.cuh"

namespace attn {

/// The value whose weight is about 2^-depth of the reference's.
__device__ __forceinline__ float value_at(const LogitWeights& weights, float depth) {
  return weights.reference - depth / weights.scale;
}
__device__ __forceinline__ float value_at(const ProbWeights& weights, float depth) {
  return weights.reference * ptx::ex2(-depth);
}

/// What races in a read, and the masses of this thread.
template <class Weights>
struct BandRace {
  static constexpr bool kHasLeast = true;
  const Bands& bands;
  const ApproximateShare<Weights> share;
  BandMasses& masses;

  __device__ __forceinline__ float least() const { return bands.low; }
  __device__ __forceinline__ void look(const float (&v)[kLaneTokens]) const {
    float all_mass = 0.0f, low_mass = 0.0f, high_mass = 0.0f;
#pragma unroll
    for (int32_t i = 0; i < kLaneTokens; ++i) {
      const float part = share(v[i]);
      all_mass += part;
      if (v[i] >= bands.high) high_mass += part;
      if (v[i] >= bands.low) low_mass += part;
    }
    const BandMasses own{all_mass, low_mass, high_mass};
    masses.all += own.all;
    masses.low += own.low;
    masses.high += own.high;
  }
};

template <class Source>
struct TopP {
  using Weights = typename Source::Weights;

  const Row<Source>& row;
  SamplingShared& shared;

  __device__ __forceinline__ explicit TopP(const Row<Source>& row) : row(row), shared(row.shared) {}

  static constexpr int32_t kSurveyTokens = kSamplingWarps * kSegmentTokens;
  static constexpr int32_t kDepthBins = kBins / 4;  // deeper values are in the last one
  static constexpr float kOctaveBins = 16.0f;       // to a power of two
  static constexpr float kUnit = 524288.0f;         // 2^19: what the reference weighs
  static constexpr int32_t kMaxReads = 6;

  enum class Found { kNothing, kToken, kInvalid };

  __device__ __forceinline__ bool suits() const {
    const RowSettings& s = row.settings;
    return s.has_top_p && s.top_k == 0 && s.min_p == 0.0f && row.params.vocab >= 4 * kSurveyTokens;
  }

  /// Takes all steps, after reader.start(). The token is then in shared.token.
  __device__ __forceinline__ Found run() const {
    if (!survey()) return Found::kNothing;
#pragma unroll 1
    for (int32_t read = 0; read < kMaxReads; ++read) {
      const ApproximateShare<Weights> share(Weights(shared.bands.reference, row.settings.scale, row.settings.floor));
      const RaceResult result = row.race(BandRace<Weights>{shared.bands, share, row.lane_race().masses});
      if (result.is_invalid) return Found::kInvalid;
      if (threadIdx.x == 0) shared.verdict = verdict_of(result);
      __syncthreads();
      if (shared.verdict == Verdict::kKnown) return Found::kToken;
      if (shared.verdict == Verdict::kUnknown) break;
      row.start_again();
    }
    return Found::kNothing;
  }

 private:
  __device__ __forceinline__ float top_p() const {
    return static_cast<float>(row.settings.top_p) * 5.42101086e-20f;  // times 2^-64
  }

  /// Sets the bands from a segment for each warp, the same ones in every CTA. False: they can tell nothing.
  __device__ __forceinline__ bool survey() const {
    uint32_t* bins = reinterpret_cast<uint32_t*>(shared.bins);
    for (int32_t i = threadIdx.x; i < kDepthBins; i += kSamplingThreads) bins[i] = 0;
    float v[kLaneTokens];
    load_values(row.source, row.reader.num_segments() * row.warp() / kSamplingWarps, v);
    const uint32_t warp_key = ptx::warp_max(lane_max_key(v));
    if (row.lane() == 0) atomicMax(&shared.bound, warp_key);
    __syncthreads();
    const uint32_t key = shared.bound;
    const Weights weights(key_value(key), row.settings.scale, row.settings.floor);
    const ApproximateShare<Weights> share(weights);
    if (!is_drawable(key) || !(share.error < 0.01f)) return false;
    uint32_t mass = 0;
    float squares = 0.0f;
#pragma unroll 1
    for (int32_t i = 0; i < kLaneTokens; ++i) {
      const float part = share(v[0]);
      const uint32_t units = integer_of(part * kUnit);
      const float depth = fmaxf(ptx::lg2(part) * -kOctaveBins, 0.0f);
      if (units > 0) atomicAdd(&bins[min_of(integer_of(depth), static_cast<uint32_t>(kDepthBins - 1))], units);
      mass += units;
      squares = fused_multiply_add(part, part, squares);
#pragma unroll
      for (int32_t j = 1; j < kLaneTokens; ++j) v[j - 1] = v[j];
    }
    constexpr float kSquareUnit = 4096.0f;
    const uint64_t both = row.block_sum(static_cast<uint64_t>(squares * kSquareUnit) << 32 | mass);
    const float total = static_cast<float>(static_cast<uint32_t>(both)), whole = total / kUnit;
    // The share of the sum above a value is known as well as if it were a sum of this many equal numbers.
    const float count = whole * whole * kSquareUnit / static_cast<float>(static_cast<uint32_t>(both >> 32) + 1);
    const float unsure = 2.5f * sqrtf(top_p() * (1.0f - top_p()) / count) + 0.005f;
    const float low = depth_of(bins, (top_p() + unsure) * total, 0.5f, weights, kMinusInfinity);
    const float high = depth_of(bins, (top_p() - unsure) * total, -0.5f, weights, -kMinusInfinity);
    if (threadIdx.x == 0) shared.bands = Bands{key_value(key), low, high, -kMinusInfinity, false};
    __syncthreads();
    return true;
  }

  /// The value where the survey's running mass reaches `target`, lowered by `lower` bins; `otherwise` if it does not.
  __device__ __forceinline__ float depth_of(const uint32_t* bins, float target, float lower, const Weights& weights,
                                            float otherwise) const {
    constexpr int32_t kLaneBins = kDepthBins / 32;  // each warp for itself
    uint64_t own = 0;
#pragma unroll
    for (int32_t i = 0; i < kLaneBins; ++i) own += bins[row.lane() * kLaneBins + i];
    const uint64_t through = ptx::warp_inclusive_sum(own, row.lane());
    const auto first_to_reach = [&](uint64_t sum) {
      return __ffs(static_cast<int32_t>(__ballot_sync(ptx::kAllLanes, static_cast<float>(sum) >= target))) - 1;
    };
    const int32_t lane = first_to_reach(through);
    if (lane < 0 || !(target > 0.0f)) return otherwise;
    const uint64_t before = __shfl_sync(ptx::kAllLanes, through - own, lane);
    const uint64_t bin_mass = row.lane() < kLaneBins ? bins[lane * kLaneBins + row.lane()] : 0;
    const int32_t bin = lane * kLaneBins + first_to_reach(before + ptx::warp_inclusive_sum(bin_mass, row.lane()));
    return value_at(weights, (static_cast<float>(bin) + lower) / kOctaveBins);
  }

  /// What comes of a read with these sums and this winner: the token, or bands for another read. The same in all CTAs;
  /// a thread's part.
  __device__ __forceinline__ Verdict verdict_of(const RaceResult& result) const {
    Bands& bands = shared.bands;
    const Racer& winner = result.best;
    const BandMasses& masses = result.masses;
    const double target = static_cast<double>(row.settings.top_p) * 5.421010862427522e-20 * masses.all;  // times 2^-64
    // A mass and the row's, each to about 4e-6 of what the integers that decide say: a share's exponent and its power
    // of two (1.2e-6, more where exponents are large), the same of the integers' and what they round down (1.3e-6), a
    // float sum of 16 (0.9e-6).
    const double error = 8e-6 + 2e-7 * fabsf(ptx::lg2(static_cast<float>(masses.all)));
    const double under = target * (1.0 - error), over = target * (1.0 + error);
    const auto is_under = [&](double mass) { return mass < under || mass == 0.0; };  // 0: there is none
    const bool whole = bands.low == kMinusInfinity;
    const bool covers = whole || masses.low > over;      // no survivor is below
    const bool misses = !whole && is_under(masses.low);  // all that raced survive, others too
    if (is_under(masses.high)) bands.sure = min_of(bands.sure, bands.high);
    const float value = key_value(winner.key);
    if (!(masses.all < 1e30) || !(covers || misses)) return Verdict::kUnknown;
    if (bands.verifies_previous_winner && misses) return Verdict::kKnown;
    shared.token = winner.token;
    if (covers && value >= bands.sure) return Verdict::kKnown;
    bands.verifies_previous_winner = false;
    if (misses) {
      bands.sure = min_of(bands.sure, bands.low);
      bands.low = kMinusInfinity;
    } else if (masses.high > over && value < bands.high) {
      bands.low = bands.high;
    } else {  // the mass above the winner decides whether it survives; if not, the tokens above race
      bands.low = key_value(winner.key + 1);
      bands.verifies_previous_winner = true;
    }
    return Verdict::kReadAgain;
  }

  /// x rounded, if it is below 2^23; more otherwise.
  __device__ __forceinline__ static uint32_t integer_of(float x) {
    return __float_as_uint(x + 8388608.0f) - 0x4b000000u;
  }
};

}  // namespace attn
