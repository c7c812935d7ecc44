// Shared memory whose size a kernel knows itself.
#pragma once

namespace attn::ptx {

/// kBytes of static shared memory, in addition to a launch's dynamic one: every call in a kernel returns the same
/// bytes.
template <int kBytes>
__device__ __forceinline__ char* static_shared() {
  static __shared__ __align__(1024) char memory[kBytes];
  return memory;
}

/// A CTA's own dynamic shared memory. (In tests the CTAs of a cluster share an array.)
__device__ __forceinline__ char* own_shared(char* memory) { return memory; }

}  // namespace attn::ptx
