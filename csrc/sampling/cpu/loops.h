// The loops of an instruction set: each source that includes this has its own. Nothing in it may become a function that
// the linker could share between them.
#pragma once

#include "sampling/cpu/sampling.h"

namespace attn::cpu {

static void weigh_logits(const LogitWeights& weights, const float* logits, int32_t count, uint64_t* out) {
  const LogitWeights local = weights;
  for (int32_t i = 0; i < count; ++i) out[i] = local(logits[i]);
}

static void race_halves(int64_t seed, int64_t position, int32_t segment, uint16_t* out) {
  constexpr int32_t kBlocks = kSegmentTokens / 8, kTogether = 16;  // blocks that go through a round together
  for (int32_t begin = 0; begin < kBlocks; begin += kTogether) {
    uint32_t c0[kTogether], c1[kTogether], c2[kTogether], c3[kTogether];
    for (int32_t i = 0; i < kTogether; ++i) {
      uint32_t counter[4];
      set_counter(counter, position, static_cast<uint32_t>(segment * kBlocks + begin + i), kDrawStream);
      c0[i] = counter[0], c1[i] = counter[1], c2[i] = counter[2], c3[i] = counter[3];
    }
    PhiloxKey key(seed);
    for (int32_t round = 0; round < kPhiloxRounds; ++round, key.next()) {
      for (int32_t i = 0; i < kTogether; ++i) philox_round(key, c0[i], c1[i], c2[i], c3[i]);
    }
    for (int32_t i = 0; i < kTogether; ++i) {
      const int32_t block = begin + i, first = block % 2 * 256 + block / 2 * 4;  // see race_block()
      const uint32_t words[4] = {c0[i], c1[i], c2[i], c3[i]};
      for (int32_t w = 0; w < 4; ++w) {
        uint16_t* word_out = out + first + w / 2 * 128 + w % 2 * 2;
        word_out[0] = static_cast<uint16_t>(words[w]);
        word_out[1] = static_cast<uint16_t>(words[w] >> 16);
      }
    }
  }
}

}  // namespace attn::cpu
