#include "attention/cpu/amx_engine.h"
#include "attention/cpu/attention_kernel.h"

namespace attn::cpu {

Kernels amx_kernels(bool widens) { return standard_kernels<AmxEngine>(widens); }

}  // namespace attn::cpu
