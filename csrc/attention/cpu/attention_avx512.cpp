#include "attention/cpu/float32_engine.h"
#include "common/cpu/vector_avx512.h"

attn::cpu::Kernels attn::cpu::avx512_kernels(DataType dtype, bool widens) {
  return float32_kernels<Avx512>(dtype, widens);
}
