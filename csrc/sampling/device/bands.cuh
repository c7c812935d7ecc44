// Top-p alone, where thousands of tokens survive: a survey of some segments tells about where the threshold is, and one
// read of the row proves what is needed. What is at or above a value a little below the threshold races; two sums say
// that all survivors were in the race and that its winner is one. They are float sums: what is within their error
// proves nothing, and the row takes another way (sampling.cuh).
#pragma once

#include "sampling/device/row.cuh"

namespace attn {

/// The value that weighs 2^-depth of what the reference does, nearly.
__device__ __forceinline__ float value_at(const LogitWeights& weights, float depth) {
  return weights.reference - depth / weights.scale;
}
__device__ __forceinline__ float value_at(const ProbWeights& weights, float depth) {
  return weights.reference * ptx::ex2(-depth);
}

template <class Source>
struct BandSearch {
  using Weights = typename Source::Weights;

  const Row<Source>& row;
  SamplingShared& shared;

  __device__ __forceinline__ explicit BandSearch(const Row<Source>& row) : row(row), shared(row.shared) {}

  static constexpr int32_t kSurveyTokens = kSamplingWarps * kSegmentTokens;
  static constexpr int32_t kDepthBins =
      512;  // to an octave there are kOctaveBands; what lies deeper is in the last one
  static constexpr float kOctaveBands = 16.0f;
  static constexpr float kUnit = 524288.0f;  // 2^19: what the reference weighs
  static constexpr float kFew = 384.0f;      // tokens of the row that are few enough for candidates
  static constexpr int32_t kMostReads = 6;

  /// Sets shared.bands from a segment for each warp, the same ones in every CTA of the row. `used` stays false where
  /// those that survive are few, or cannot be told.
  __device__ __forceinline__ void survey() const {
    Bands& bands = shared.bands;
    const int32_t segment = row.num_segments() * row.warp() / kSamplingWarps;
    for (int32_t i = threadIdx.x; i < kDepthBins; i += kSamplingThreads) shared.bins[i] = 0;
    {
      typename Source::Vector raw[Source::kVectors];
      float v[kLaneTokens];
      row.load(segment, raw);
      row.values(raw, v);
      const uint32_t own_key = ptx::warp_max(row.lane_max_key(v));
      if (row.lane() == 0) shared.warp_best[row.warp()] = own_key;
    }
    __syncthreads();
    uint32_t key = 0;
#pragma unroll
    for (int32_t w = 0; w < kSamplingWarps; ++w) key = max_of(key, static_cast<uint32_t>(shared.warp_best[w]));
    const Weights weights(key_value(key), row.settings.scale, row.settings.floor);
    const ApproximateShare<Weights> share(weights);
    if (!row.is_drawable(key) || !(share.error < 0.01f)) return;
    uint32_t mass = 0;
    float squares = 0.0f;
    typename Source::Vector raw;
#pragma unroll 1
    for (int32_t i = 0; i < kLaneTokens; i += 4) {  // from memory again (it is in the L1 cache): this is small
      if (i % Source::kVectorTokens == 0)
        row.source.load(segment, row.lane(), i / Source::kVectorTokens, raw);
      else
        Source::skip_four(raw);
      float v[4];
      row.source.four_values(raw, v);
#pragma unroll
      for (int32_t j = 0; j < 4; ++j) {
        const float part = share(v[j]);
        const uint32_t units = integer_of(part * kUnit);
        const float depth = fmaxf(ptx::lg2(part) * -kOctaveBands, 0.0f);
        if (units > 0) atomicAdd(&shared.bins[min_of(integer_of(depth), static_cast<uint32_t>(kDepthBins - 1))], units);
        mass += units;
        squares = fused_multiply_add(part, part, squares);
      }
    }
    constexpr float kSquareUnit = 4096.0f;
    BlockSums sums(shared.scratch);
    const uint64_t both = sums(static_cast<uint64_t>(squares * kSquareUnit) << 32 | mass);
    const float total = static_cast<float>(static_cast<uint32_t>(both));
    const float whole = total / kUnit;
    // Of a sum of n numbers the share above a value is known as well as of this many equal ones.
    const float count = whole * whole * kSquareUnit / static_cast<float>(static_cast<uint32_t>(both >> 32) + 1);
    const float top_p = share_of_top_p();
    const float unsure = 2.5f * sqrtf(top_p * (1.0f - top_p) / count) + 0.005f;
    if (threadIdx.x == 0)
      bands = Bands{key_value(key), kMinusInfinity, -kMinusInfinity, -kMinusInfinity, total, false, false};
    find_values(weights, (top_p + unsure) * total, (top_p - unsure) * total);
    // Candidates take exact masses: with many CTAs the time is latency, and another read is sooner done.
    if (threadIdx.x == 0) bands.used = row.num_ctas > 1 || bands.few < (0.5f + 0.5f * top_p) * total;
    __syncthreads();
  }

  /// What comes of a read with these sums and this winner. True: the row's token is known and in shared.token. Else
  /// there are bands for another read, or they are of no more use and bands.used is false. The same in all CTAs.
  __device__ __forceinline__ bool settle(const Racer& racer, const BandMasses& masses) const {
    const Bands bands = shared.bands;
    const Racer asked = shared.asked;
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
    const float sure = is_under(masses.high) ? min_of(bands.sure, bands.high) : bands.sure;
    const float value = key_value(racer.key);
    const bool asked_survives = bands.asks && misses;
    const bool is_known = masses.all < 1e30 && (asked_survives || (covers && value >= sure));
    __syncthreads();  // bands were read
    if (threadIdx.x == 0) {
      if (is_known) shared.token = asked_survives ? asked.token : racer.token;
      Bands& next = shared.bands;
      next.used = masses.all < 1e30 && (covers || misses) && shared.round + 1 < kMostReads;
      next.asks = false;
      if (misses) {
        next.low = kMinusInfinity;
        next.sure = min_of(sure, bands.low);
      } else if (masses.high > over && value < bands.high) {
        next.low = bands.high;
        next.sure = sure;
      } else {  // whether the winner survives is told by the mass above it; if not, those above race
        next.low = key_value(racer.key + 1);
        next.sure = sure;
        next.asks = true;
        shared.asked = racer;
      }
    }
    __syncthreads();
    return is_known;
  }

 private:
  /// x rounded, where it is below 2^23; more elsewhere.
  __device__ __forceinline__ static uint32_t integer_of(float x) {
    return __float_as_uint(x + 8388608.0f) - 0x4b000000u;
  }

  __device__ __forceinline__ float share_of_top_p() const {
    return static_cast<float>(row.settings.top_p) * 5.42101086e-20f;
  }  // times 2^-64

  /// Sets bands.low and .high to values where the survey has these masses, .few to the mass of as many tokens as kFew
  /// of the row's.
  __device__ __forceinline__ void find_values(const Weights& weights, float low_mass, float high_mass) const {
    Bands& bands = shared.bands;
    const int32_t first = 2 * static_cast<int32_t>(threadIdx.x);
    const uint32_t mass[2] = {shared.bins[first], shared.bins[first + 1]};
    // What a bin's members weigh tells how many they are.
    const float members = (static_cast<float>(mass[0]) + static_cast<float>(mass[1]) * 1.0443f) *
                          ptx::ex2(static_cast<float>(first) / kOctaveBands) / kUnit;
    const uint64_t own = static_cast<uint64_t>(members + 0.5f) << 32 | (mass[0] + mass[1]);
    const int32_t lane = row.lane();
    uint64_t through = ptx::warp_inclusive_sum(own, lane);
    __syncthreads();  // the sums were read
    if (lane == 31) shared.scratch.sums[0][row.warp()] = through;
    __syncthreads();
#pragma unroll
    for (int32_t w = 0; w < kSamplingWarps; ++w) through += w < row.warp() ? shared.scratch.sums[0][w] : 0;
    const float before = static_cast<float>(static_cast<uint32_t>(through - own)),
                end = static_cast<float>(static_cast<uint32_t>(through));
    const auto bin_of = [&](float target) {
      return static_cast<float>(before + static_cast<float>(mass[0]) >= target ? first : first + 1);
    };
    if (before < low_mass && low_mass <= end) bands.low = value_at(weights, (bin_of(low_mass) + 0.5f) / kOctaveBands);
    if (before < high_mass && high_mass <= end)
      bands.high = value_at(weights, (bin_of(high_mass) - 0.5f) / kOctaveBands);
    const uint32_t few =
        static_cast<uint32_t>(kFew * static_cast<float>(kSurveyTokens) / static_cast<float>(row.params.vocab)) + 1;
    if (static_cast<uint32_t>((through - own) >> 32) < few && few <= static_cast<uint32_t>(through >> 32))
      bands.few = before;
    __syncthreads();
  }
};

}  // namespace attn
