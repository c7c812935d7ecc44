// What differs between the compilers that read these headers: nvcc, NVRTC and g++.
#pragma once

#if defined(__CUDACC_RTC__)
// NVRTC has no standard headers: these are the types of <cstdint> and <cstddef> on 64-bit Linux.
using int8_t = signed char;
using int16_t = short;
using int32_t = int;
using int64_t = long;
using uint8_t = unsigned char;
using uint16_t = unsigned short;
using uint32_t = unsigned int;
using uint64_t = unsigned long;
using uintptr_t = unsigned long;
using size_t = unsigned long;
#else
#include <cstdint>
#endif

#if defined(__CUDACC__)
#define ATTN_HD __host__ __device__ __forceinline__
#else
// Always inlined: the CPU executor compiles these headers once for each instruction set, and the linker must not let
// one copy stand for another.
#define ATTN_HD inline __attribute__((always_inline))
#endif

namespace attn {

// The part of <type_traits> that device code uses: NVRTC has no such header.

template <class A, class B>
constexpr bool is_same = false;
template <class A>
constexpr bool is_same<A, A> = true;

template <bool kCondition, class A, class B>
struct Conditional {
  using Type = A;
};
template <class A, class B>
struct Conditional<false, A, B> {
  using Type = B;
};

}  // namespace attn
