// Opens the shared libraries that variants are compiled into for a CPU.
#pragma once

#include <string>

#include "attention/cpu/kernels.h"

namespace attn::cpu {

/// The kernels in a file; it stays open until the process ends. Throws RuntimeError naming the file and what is wrong
/// with it.
Kernels load_variant(const std::string& file);

}  // namespace attn::cpu
