#include "sampling/cpu/loops.h"

const attn::cpu::SamplingLoops attn::cpu::kAvx512Loops{weigh_logits, race_halves};
