// Instruction sets that the attention kernels are compiled for, and the choice among them at run time.
#pragma once

namespace attn::cpu {

/// In ascending order: a machine that has one has those before it.
enum class Isa {
  kBaseline = 0,  // the compiler's default for the architecture
  kAvx2 = 1,      // AVX2, FMA, F16C
  kAvx512 = 2,    // AVX-512 F, BW, VL, DQ
  kAmx = 3,       // AMX tiles for bf16, AVX-512 BF16
};

/// Their names in ATTN_BACKEND_CPU_ISA.
constexpr const char* kIsaNames[] = {"baseline", "avx2", "avx512", "amx"};

/// The instruction set in use: the best one of this machine, or the lesser one in ATTN_BACKEND_CPU_ISA.
Isa current_isa();

}  // namespace attn::cpu
