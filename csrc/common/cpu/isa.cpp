#include "common/cpu/isa.h"

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <initializer_list>

#if defined(__x86_64__)
#include <cpuid.h>
#if defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#endif
#endif

namespace attn::cpu {
namespace {

#if defined(__x86_64__)

/// AMX tile registers must be asked for, once a process, before the first instruction that uses them.
bool request_amx_tiles() {
#if defined(__linux__)
  constexpr long kRequestPermission = 0x1023;  // ARCH_REQ_XCOMP_PERM
  constexpr long kTileData = 18;               // XFEATURE_XTILEDATA
  return syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
#else
  return false;
#endif
}

struct CpuidLeaf {
  unsigned eax = 0, ebx = 0, ecx = 0, edx = 0;  // 0 where the processor has no such leaf
};

CpuidLeaf cpuid(unsigned leaf, unsigned subleaf) {
  CpuidLeaf result;
  __get_cpuid_count(leaf, subleaf, &result.eax, &result.ebx, &result.ecx, &result.edx);
  return result;
}

/// XCR0: the registers that the operating system saves.
unsigned saved_registers() {
  unsigned low = 0, high = 0;
  __asm__("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
  return low;
}

constexpr bool has_all(unsigned bits, unsigned wanted) { return (bits & wanted) == wanted; }

/// The best instruction set of this machine that this build has kernels for. From CPUID itself:
/// __builtin_cpu_supports() needs a part of the compiler's runtime that zig's clang does not fill.
Isa detect() {
  constexpr unsigned kFma = 1u << 12, kOsXsave = 1u << 27, kAvx = 1u << 28, kF16c = 1u << 29;         // leaf 1, ecx
  constexpr unsigned kAvx2 = 1u << 5, kF = 1u << 16, kDq = 1u << 17, kBw = 1u << 30, kVl = 1u << 31;  // 7.0, ebx
  constexpr unsigned kAmxBf16 = 1u << 22, kAmxTile = 1u << 24;                                        // 7.0, edx
  constexpr unsigned kAvx512Bf16 = 1u << 5;                                                           // 7.1, eax
  constexpr unsigned kYmm = 0x6, kZmm = 0xe6, kTiles = 0x60000;                                       // XCR0
  if (!has_all(cpuid(1, 0).ecx, kFma | kOsXsave | kAvx | kF16c)) return Isa::kBaseline;
  const CpuidLeaf extended = cpuid(7, 0);
  const unsigned saved = saved_registers();
  if (!has_all(extended.ebx, kAvx2) || !has_all(saved, kYmm)) return Isa::kBaseline;
  if (!has_all(extended.ebx, kF | kDq | kBw | kVl) || !has_all(saved, kZmm)) return Isa::kAvx2;
  if (!has_all(cpuid(7, 1).eax, kAvx512Bf16) || !has_all(extended.edx, kAmxBf16 | kAmxTile) ||
      !has_all(saved, kTiles) || !request_amx_tiles()) {
    return Isa::kAvx512;
  }
  return Isa::kAmx;
}

#else

Isa detect() { return Isa::kBaseline; }

#endif

Isa wanted_isa() {
  const char* name = std::getenv("ATTN_BACKEND_CPU_ISA");
  if (name == nullptr) return Isa::kAmx;
  for (const Isa isa : {Isa::kBaseline, Isa::kAvx2, Isa::kAvx512, Isa::kAmx})
    if (std::strcmp(name, kIsaNames[static_cast<int>(isa)]) == 0) return isa;
  std::fprintf(stderr, "ATTN_BACKEND_CPU_ISA is %s, must be baseline, avx2, avx512 or amx: ignored\n", name);
  return Isa::kAmx;
}

}  // namespace

Isa current_isa() {
  static const Isa isa = std::min(wanted_isa(), detect());
  return isa;
}

}  // namespace attn::cpu
