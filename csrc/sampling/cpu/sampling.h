// Sampling on CPU threads, a row at a time: the same tokens as the kernels of csrc/sampling/device.
#pragma once

#include "common/data_type.h"
#include "sampling/sampling.h"

namespace attn::cpu {

/// Runs params.task on every row of logits. All pointers are on the host.
void sample_logits(const SamplingParams& params, DataType dtype);

/// Runs params.task on every row of float32 probabilities.
void sample_probs(const SamplingParams& params);

/// Weights of `count` logits: one source for each instruction set (sampling_weights.h).
using WeighLogits = void (*)(const LogitWeights& weights, const float* logits, int32_t count, uint64_t* out);

void weigh_logits_baseline(const LogitWeights& weights, const float* logits, int32_t count, uint64_t* out);
void weigh_logits_avx2(const LogitWeights& weights, const float* logits, int32_t count, uint64_t* out);
void weigh_logits_avx512(const LogitWeights& weights, const float* logits, int32_t count, uint64_t* out);

/// The first bits of the tokens of a segment in the race, kSegmentTokens of them.
using RaceHalves = void (*)(int64_t seed, int64_t position, int32_t segment, uint16_t* out);

void race_halves_baseline(int64_t seed, int64_t position, int32_t segment, uint16_t* out);
void race_halves_avx2(int64_t seed, int64_t position, int32_t segment, uint16_t* out);
void race_halves_avx512(int64_t seed, int64_t position, int32_t segment, uint16_t* out);

}  // namespace attn::cpu
