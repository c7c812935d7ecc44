// Kernels of a variant for a CPU: compiled when they are needed, into one shared library for each variant
// (attn_backend/jit/cubins.py), which the host library opens.
#pragma once

#include "attention/cpu/kernels.h"

namespace attn::cpu {

/// What such a library has: `extern "C" const attn::cpu::VariantModule attn_variant_module`. The digest stays the first
/// field, whatever else changes.
struct VariantModule {
  const char* headers_digest;  // of those that it was compiled with (attn_backend/jit/compilers.py)
  Kernels kernels;
};

/// The kernels in a file; it stays open until the process ends. Throws RuntimeError naming the file and what is wrong
/// with it.
Kernels load_variant(const char* file);

}  // namespace attn::cpu
