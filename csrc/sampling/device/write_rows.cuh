// Writes a value for every token of a row: softmax, renormalized survivors of top-k or top-p, logits that top-k masks.
#pragma once

#include "sampling/device/threshold.cuh"

namespace attn {

template <class Source>
__device__ __forceinline__ void write_rows(const SamplingParams& params, const Source& source, SamplingShared& shared) {
  const Row<Source> row(params, source, shared);
  const RowSettings& settings = row.settings;
  row.begin(0);
  const bool masks = params.task == RowTask::kMaskLogits, filters = settings.filters();
  const bool needs_mass = filters ? settings.has_top_p : !masks;
  row.read_values(needs_mass, false);
  row.exchange_best();
  const bool is_valid = settings.valid && is_drawable(shared.decision.best_key);
  uint32_t threshold = kWholeRow;
  uint64_t mass = 1;
  if (is_valid) {
    if (needs_mass) row.sum_masses(true, false);
    mass = shared.row_mass;
    if (filters) {
      const auto survivors = ThresholdSearch<Source>(row).find_threshold(!masks);
      threshold = survivors.key;
      mass = survivors.sum;
    }
  }
  float* out = params.written + static_cast<int64_t>(row.row) * params.written_stride;
  const auto weights = row.weights();
  const float least = key_value(threshold);
  row.reader.start();
  row.reader.for_each([&](int32_t segment, const float (&v)[kLaneTokens]) {
#pragma unroll
    for (int32_t i = 0; i < kLaneTokens; ++i) {
      const int32_t token = lane_token<Source>(segment, i);
      if (token >= params.vocab) continue;
      const bool survives = is_valid && v[i] >= least;
      if (masks)
        out[token] = survives || !is_valid ? v[i] : kMinusInfinity;
      else
        out[token] = survives ? normalized(weights, v[i], weights(v[i]), mass) : 0.0f;
    }
  });
}

template <class Source>
__device__ __forceinline__ void write_rows(const SamplingParams& params) {
  extern __shared__ __align__(16) char dynamic_shared[];
  write_rows(params, Source(params, ptx::cluster_id()), *reinterpret_cast<SamplingShared*>(dynamic_shared));
}

}  // namespace attn
