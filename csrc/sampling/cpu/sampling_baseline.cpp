#include "sampling/cpu/sampling_weights.h"

namespace attn::cpu {

void weigh_logits_baseline(const LogitWeights& weights, const float* logits, int32_t count, uint64_t* out) {
  weigh_logits(weights, logits, count, out);
}

void race_halves_baseline(int64_t seed, int64_t position, int32_t segment, uint16_t* out) {
  race_halves(seed, position, segment, out);
}

}  // namespace attn::cpu
