// The kernels of one instruction set that computes in float32, for every element type. Compiled once for each
// (attention_*.cpp).
#pragma once

#include "attention/cpu/attention_kernel.h"
#include "attention/cpu/float32_engine.h"

namespace attn::cpu {

template <class Isa, class Element>
constexpr Kernels float32_kernels_of() {
  using Kernel = AttentionKernel<Float32Engine<Isa, Element>, StandardVariant>;
  return Kernels{Kernel::run, Kernel::merge_pair, Kernel::merge_row, nullptr};
}

template <class Isa>
Kernels float32_kernels(DataType dtype) {
  switch (dtype) {
    case DataType::kFloat32:
      return float32_kernels_of<Isa, float>();
    case DataType::kFloat16:
      return float32_kernels_of<Isa, Half>();
    case DataType::kBFloat16:
      return float32_kernels_of<Isa, BFloat16>();
  }
  return Kernels{};
}

}  // namespace attn::cpu
