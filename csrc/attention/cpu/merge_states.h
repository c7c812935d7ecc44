// Merges attention states that lie in tensors, on a CPU.
#pragma once

#include "attention/merge/merge_states.h"

namespace attn::cpu {

void merge_states(const MergeStatesParams& params);

}  // namespace attn::cpu
