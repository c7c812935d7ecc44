#include "attention/cpu/float32_kernels.h"
#include "common/cpu/vector_avx2.h"

namespace attn::cpu {

Kernels avx2_kernels(DataType dtype) { return float32_kernels<Avx2>(dtype); }

}  // namespace attn::cpu
