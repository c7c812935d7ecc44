#include "attention/cpu/amx_engine.h"
#include "attention/cpu/attention_kernel.h"

namespace attn::cpu {

Kernels amx_kernels() {
  using Kernel = AttentionKernel<AmxEngine, StandardVariant>;
  return Kernels{Kernel::run, Kernel::merge_pair, Kernel::merge_row, nullptr};
}

}  // namespace attn::cpu
