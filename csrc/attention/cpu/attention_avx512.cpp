#include "attention/cpu/float32_kernels.h"
#include "common/cpu/vector_avx512.h"

namespace attn::cpu {

Kernels avx512_kernels(DataType dtype) { return float32_kernels<Avx512>(dtype); }

}  // namespace attn::cpu
