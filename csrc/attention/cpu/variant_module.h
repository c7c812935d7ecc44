// Kernels of a variant for a CPU: compiled when they are needed, into one shared library for each variant
// (attn_backend/jit/cubins.py), which the host library opens (variant_loader.h).
#pragma once

#include "attention/cpu/kernels.h"

namespace attn::cpu {

/// What such a library has: `extern "C" const attn::cpu::VariantModule attn_variant_module`. The digest stays the first
/// field, whatever else changes.
struct VariantModule {
  const char* headers_digest;  // of those that it was compiled with (attn_backend/jit/compilers.py)
  Kernels kernels;
};

}  // namespace attn::cpu
