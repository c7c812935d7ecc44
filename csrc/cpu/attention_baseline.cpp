#include "cpu/attention_kernel.h"
#include "cpu/float32_engine.h"
#include "cpu/vector_baseline.h"

namespace attn::cpu {
namespace {

template <class Element>
constexpr Kernels make_kernels() {
  using Kernel = AttentionKernel<Float32Engine<Baseline, Element>, StandardVariant>;
  return Kernels{Kernel::run, Kernel::merge};
}

}  // namespace

Kernels baseline_kernels(DataType dtype) {
  switch (dtype) {
    case DataType::kFloat32: return make_kernels<float>();
    case DataType::kFloat16: return make_kernels<Half>();
    case DataType::kBFloat16: return make_kernels<BFloat16>();
  }
  return Kernels{nullptr, nullptr};
}

}  // namespace attn::cpu
