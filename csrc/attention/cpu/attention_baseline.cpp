#include "attention/cpu/float32_engine.h"
#include "common/cpu/vector_baseline.h"

attn::cpu::Kernels attn::cpu::baseline_kernels(DataType dtype, bool widens) {
  return float32_kernels<Baseline>(dtype, widens);
}
