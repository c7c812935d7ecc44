// The loop that the compiler vectorises for each instruction set. Nothing in it may become a function that the linker could share between them.
#pragma once

#include "cpu/sampling.h"

namespace attn::cpu {

ATTN_HD void weigh_logits(const LogitWeights& weights, const float* logits, int32_t count, uint64_t* out) {
  const LogitWeights local = weights;
  for (int32_t i = 0; i < count; ++i) out[i] = local(logits[i]);
}

}  // namespace attn::cpu
