#include "attention/cpu/amx_engine.h"
#include "attention/cpu/attention_kernel.h"

namespace attn::cpu {

Kernels amx_kernels(bool widens) {
  using Kernel = AttentionKernel<AmxEngine, StandardVariant>;
  using WideningKernel = AttentionKernel<AmxEngine, WithScales<StandardVariant>>;
  if (widens) return Kernels{WideningKernel::run, WideningKernel::merge_pair, WideningKernel::merge_row, nullptr};
  return Kernels{Kernel::run, Kernel::merge_pair, Kernel::merge_row, nullptr};
}

}  // namespace attn::cpu
