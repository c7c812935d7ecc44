// Addresses of shared memory, as PTX has them: bytes from its beginning.
#pragma once

#include "cuda_emulation.h"

namespace attn::ptx {

inline uint32_t shared_address(const void* pointer) {
  const auto offset = static_cast<size_t>(static_cast<const char*>(pointer) - emulation::shared_memory);
  if (offset >= emulation::shared_bytes) emulation::fail("this is not shared memory");
  return static_cast<uint32_t>(offset);
}

/// Aligned to as many bytes.
inline char* shared_pointer(uint32_t address, size_t bytes) {
  if (address % bytes != 0 || address + bytes > emulation::shared_bytes)
    emulation::fail("a wrong address of shared memory");
  return emulation::shared_memory + address;
}

/// Where a swizzled tile holds what an unpermuted tile would hold at `address`. The 16-byte chunks of a row, of 64 or
/// 128 bytes, are permuted: chunk ^ number of 128 bytes, modulo the chunks. The address counts, not the offset in the
/// tile (PTX ISA, "Swizzling Modes").
inline uint32_t swizzled(uint32_t address, uint32_t row_bytes = 128) {
  return address ^ (address >> 3 & (row_bytes - 16));
}

}  // namespace attn::ptx
