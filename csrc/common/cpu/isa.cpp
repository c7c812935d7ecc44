#include "common/cpu/isa.h"

#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <cstring>

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

bool has_amx_bf16() {
  unsigned eax = 0, ebx = 0, ecx = 0, edx = 0;
  if (!__get_cpuid_count(7, 0, &eax, &ebx, &ecx, &edx)) return false;
  constexpr unsigned kAmxBf16 = 1u << 22;
  constexpr unsigned kAmxTile = 1u << 24;
  return (edx & kAmxBf16) != 0 && (edx & kAmxTile) != 0;
}

Isa detect() {
  __builtin_cpu_init();
  if (!__builtin_cpu_supports("avx2") || !__builtin_cpu_supports("fma") || !__builtin_cpu_supports("f16c"))
    return Isa::kBaseline;
  if (!__builtin_cpu_supports("avx512f") || !__builtin_cpu_supports("avx512bw") ||
      !__builtin_cpu_supports("avx512vl") || !__builtin_cpu_supports("avx512dq")) {
    return Isa::kAvx2;
  }
  if (!__builtin_cpu_supports("avx512bf16") || !has_amx_bf16() || !request_amx_tiles()) return Isa::kAvx512;
  return Isa::kAmx;
}

#else

Isa detect() { return Isa::kBaseline; }

#endif

Isa wanted_isa() {
  const char* name = std::getenv("ATTN_BACKEND_CPU_ISA");
  if (name == nullptr) return Isa::kAmx;
  if (std::strcmp(name, "baseline") == 0) return Isa::kBaseline;
  if (std::strcmp(name, "avx2") == 0) return Isa::kAvx2;
  if (std::strcmp(name, "avx512") == 0) return Isa::kAvx512;
  if (std::strcmp(name, "amx") != 0)
    std::fprintf(stderr, "ATTN_BACKEND_CPU_ISA is %s, must be baseline, avx2, avx512 or amx: ignored\n", name);
  return Isa::kAmx;
}

Isa lesser(Isa a, Isa b) { return a < b ? a : b; }

std::atomic<Isa>& isa_in_use() {
  static std::atomic<Isa> isa{lesser(wanted_isa(), best_isa())};
  return isa;
}

}  // namespace

Isa best_isa() {
  static const Isa isa = detect();
  return isa;
}

Isa current_isa() { return isa_in_use().load(std::memory_order_relaxed); }

void set_isa(Isa isa) { isa_in_use().store(lesser(isa, best_isa()), std::memory_order_relaxed); }

}  // namespace attn::cpu
