// Where a kernel's machine code lies in a GPU's memory, so that it can be prefetched to L2.
#pragma once

#include "common/platform.h"

namespace attn {

/// A source defines one as NAME_code for kernel NAME (common/kernel_code.cuh); attn_backend/jit/code_address.py
/// completes it in the cubin. No bytes: not known.
struct KernelCode {
  const char* address;
  uint64_t bytes;
};

}  // namespace attn
