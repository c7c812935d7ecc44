#include "attention/cpu/amx_engine.h"
#include "attention/cpu/attention_kernel.h"

attn::cpu::Kernels attn::cpu::amx_kernels(bool widens) { return standard_kernels<AmxEngine>(widens); }
