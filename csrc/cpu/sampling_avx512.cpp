#include "cpu/sampling_weights.h"

namespace attn::cpu {

void weigh_logits_avx512(const LogitWeights& weights, const float* logits, int32_t count, uint64_t* out) { weigh_logits(weights, logits, count, out); }

void race_words_avx512(int64_t seed, int64_t position, int32_t first, uint32_t* out) { race_words(seed, position, first, out); }

}  // namespace attn::cpu
