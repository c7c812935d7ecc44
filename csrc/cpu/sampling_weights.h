// The loops that the compiler vectorises for each instruction set. Nothing in it may become a function that the linker could share between them.
#pragma once

#include "cpu/sampling.h"

namespace attn::cpu {

ATTN_HD void weigh_logits(const LogitWeights& weights, const float* logits, int32_t count, uint64_t* out) {
  const LogitWeights local = weights;
  for (int32_t i = 0; i < count; ++i) out[i] = local(logits[i]);
}

ATTN_HD void race_words(int64_t seed, int64_t position, int32_t first, uint32_t* out) {
  constexpr int32_t kBlocks = 16;       // that go through a round together
  for (int32_t begin = 0; begin < kSegmentTokens / 4; begin += kBlocks) {
    uint32_t c0[kBlocks], c1[kBlocks], c2[kBlocks], c3[kBlocks];
    for (int32_t i = 0; i < kBlocks; ++i) {
      uint32_t counter[4];
      set_counter(counter, position, static_cast<uint32_t>(first + begin + i), kDrawStream);
      c0[i] = counter[0], c1[i] = counter[1], c2[i] = counter[2], c3[i] = counter[3];
    }
    PhiloxKey key(seed);
    for (int32_t round = 0; round < kPhiloxRounds; ++round, key.next()) {
      for (int32_t i = 0; i < kBlocks; ++i) philox_round(key, c0[i], c1[i], c2[i], c3[i]);
    }
    for (int32_t i = 0; i < kBlocks; ++i) {
      uint32_t* words = out + 4 * (begin + i);
      words[0] = c0[i], words[1] = c1[i], words[2] = c2[i], words[3] = c3[i];
    }
  }
}

}  // namespace attn::cpu
