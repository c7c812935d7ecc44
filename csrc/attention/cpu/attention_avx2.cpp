#include "attention/cpu/float32_engine.h"
#include "common/cpu/vector_avx2.h"

attn::cpu::Kernels attn::cpu::avx2_kernels(DataType dtype, bool widens) { return float32_kernels<Avx2>(dtype, widens); }
