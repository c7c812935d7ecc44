// The kernels of one instruction set that computes in float32, for every element type. Compiled once for each
// (attention_*.cpp).
#pragma once

#include "attention/cpu/attention_kernel.h"
#include "attention/cpu/float32_engine.h"

namespace attn::cpu {

template <class Isa>
Kernels float32_kernels(DataType dtype, bool widens) {
  return visit_float(dtype,
                     [&](auto element) { return standard_kernels<Float32Engine<Isa, decltype(element)>>(widens); });
}

}  // namespace attn::cpu
