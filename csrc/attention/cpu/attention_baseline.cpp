#include "attention/cpu/float32_kernels.h"
#include "common/cpu/vector_baseline.h"

namespace attn::cpu {

Kernels baseline_kernels(DataType dtype, bool widens) { return float32_kernels<Baseline>(dtype, widens); }

}  // namespace attn::cpu
