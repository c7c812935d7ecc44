// Packs selected tokens on CPU threads: what planner/device/selection.cuh is on a GPU.
#pragma once

#include "planner/selection.h"

namespace attn::cpu {

void pack_selected_slots(const SelectionParams& params);

}  // namespace attn::cpu
