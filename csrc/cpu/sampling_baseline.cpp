#include "cpu/sampling_weights.h"

namespace attn::cpu {

void weigh_logits_baseline(const LogitWeights& weights, const float* logits, int32_t count, uint64_t* out) { weigh_logits(weights, logits, count, out); }

}  // namespace attn::cpu
