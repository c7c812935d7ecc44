#include "attention/cpu/float32_kernels.h"
#include "common/cpu/vector_avx2.h"

namespace attn::cpu {

Kernels avx2_kernels(DataType dtype, bool widens) { return float32_kernels<Avx2>(dtype, widens); }

}  // namespace attn::cpu
