// The kernels of one instruction set that computes in float32, for every element type. Compiled once for each
// (attention_*.cpp).
#pragma once

#include "attention/cpu/attention_kernel.h"
#include "attention/cpu/float32_engine.h"

namespace attn::cpu {

template <class Isa, class Element>
constexpr Kernels float32_kernels_of(bool widens) {
  using Kernel = AttentionKernel<Float32Engine<Isa, Element>, StandardVariant>;
  using WideningKernel = AttentionKernel<Float32Engine<Isa, Element>, WithScales<StandardVariant>>;
  if (widens) return Kernels{WideningKernel::run, WideningKernel::merge_pair, WideningKernel::merge_row, nullptr};
  return Kernels{Kernel::run, Kernel::merge_pair, Kernel::merge_row, nullptr};
}

template <class Isa>
Kernels float32_kernels(DataType dtype, bool widens) {
  switch (dtype) {
    case DataType::kFloat32:
      return float32_kernels_of<Isa, float>(widens);
    case DataType::kFloat16:
      return float32_kernels_of<Isa, Half>(widens);
    case DataType::kBFloat16:
      return float32_kernels_of<Isa, BFloat16>(widens);
    case DataType::kFloat8E4M3:
    case DataType::kFloat8E5M2:
    case DataType::kScaledLatent:
      break;  // of caches only
  }
  return Kernels{};
}

}  // namespace attn::cpu
