// What differs between the compilers that read these headers: nvcc, NVRTC and g++.
#pragma once

#if defined(__CUDACC_RTC__)
#include <cuda/std/cstdint>
using cuda::std::int32_t;
using cuda::std::int64_t;
using cuda::std::uint32_t;
using cuda::std::uint64_t;
using cuda::std::uint8_t;
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
