// 16-byte messages between CTAs through global memory. Each arrives at once as a whole, so no fence is needed before
// it.
#pragma once

#include "common/platform.h"

namespace attn::ptx {

struct alignas(16) Message {
  uint64_t low;
  uint64_t high;
};

__device__ __forceinline__ void send(Message* slot, const Message& message) {
  asm volatile("{\n.reg .b128 both;\nmov.b128 both, {%1, %2};\nst.relaxed.gpu.global.b128 [%0], both;\n}" ::"l"(slot),
               "l"(message.low), "l"(message.high)
               : "memory");
}

__device__ __forceinline__ Message receive(const Message* slot) {
  Message message;
  asm volatile("{\n.reg .b128 both;\nld.relaxed.gpu.global.b128 both, [%2];\nmov.b128 {%0, %1}, both;\n}"
               : "=l"(message.low), "=l"(message.high)
               : "l"(slot)
               : "memory");
  return message;
}

/// Reads and writes of a word that several CTAs read and write.
__device__ __forceinline__ uint32_t load_relaxed(const uint32_t* word) {
  uint32_t value;
  asm volatile("ld.relaxed.gpu.global.u32 %0, [%1];" : "=r"(value) : "l"(word) : "memory");
  return value;
}

__device__ __forceinline__ void store_relaxed(uint32_t* word, uint32_t value) {
  asm volatile("st.relaxed.gpu.global.u32 [%0], %1;" ::"l"(word), "r"(value) : "memory");
}

}  // namespace attn::ptx
