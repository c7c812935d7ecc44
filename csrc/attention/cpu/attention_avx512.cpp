#include "attention/cpu/float32_kernels.h"
#include "common/cpu/vector_avx512.h"

namespace attn::cpu {

Kernels avx512_kernels(DataType dtype, bool widens) { return float32_kernels<Avx512>(dtype, widens); }

}  // namespace attn::cpu
