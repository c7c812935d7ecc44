// Sampling on CPU threads, a row at a time: the same tokens as the kernels of csrc/sampling/device.
#pragma once

#include "common/data_type.h"
#include "sampling/sampling.h"

namespace attn::cpu {

/// Runs params.task on every row of logits. All pointers are on the host.
void sample_logits(const SamplingParams& params, DataType dtype);

/// Runs params.task on every row of float32 probabilities.
void sample_probs(const SamplingParams& params);

/// The loops that are compiled for each instruction set (loops.h).
struct SamplingLoops {
  /// Weights of `count` logits.
  void (*weigh_logits)(const LogitWeights& weights, const float* logits, int32_t count, uint64_t* out);
  /// The first bits of the tokens of a segment in the race, kSegmentTokens of them.
  void (*race_halves)(int64_t seed, int64_t position, int32_t segment, uint16_t* out);
};
extern const SamplingLoops kBaselineLoops, kAvx2Loops, kAvx512Loops;

}  // namespace attn::cpu
