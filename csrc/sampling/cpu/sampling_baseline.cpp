#include "sampling/cpu/loops.h"

const attn::cpu::SamplingLoops attn::cpu::kBaselineLoops{weigh_logits, race_halves};
