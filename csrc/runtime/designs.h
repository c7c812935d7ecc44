// Every design of the attention kernel. Another one is a folder of csrc/attention, an entry here and one in
// attn_backend/jit/manifest.py.
#pragma once

#include "attention/cpu/design.h"
#include "attention/kernel_design.h"
#include "attention/sm80/design.h"
#include "attention/sm90/design.h"

namespace attn {

constexpr const KernelDesign* kDesigns[] = {&cpu::kDesign, &sm80::kDesign, &sm90::kDesign};
constexpr int32_t kNumDesigns = sizeof(kDesigns) / sizeof(kDesigns[0]);

constexpr bool smallest_kinds_are_cheapest() {
  for (const KernelDesign* design : kDesigns) {
    if (!smallest_kind_is_cheapest(design->costs) || !smallest_kind_is_cheapest(design->invariant_costs)) return false;
  }
  return true;
}
static_assert(smallest_kinds_are_cheapest(), "a KV tile of the smallest kind costs more than another");

}  // namespace attn
