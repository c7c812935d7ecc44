// Copies new tokens into the paged cache. A block takes one token at a time; any grid works. Bytes are copied: one
// kernel for every element type.

#include "cache/params.h"
#include "common/ptx/grid_dependency.cuh"

namespace attn {

template <class Word>
__device__ __forceinline__ void append(const AppendParams& p) {
  const int32_t k_words = p.k_head_bytes / static_cast<int32_t>(sizeof(Word));
  const int32_t v_words = p.v_head_bytes / static_cast<int32_t>(sizeof(Word));
  const int32_t words = max_of(k_words, v_words);
  for (int32_t token = blockIdx.x; token < p.num_tokens; token += gridDim.x) {
    const int64_t slot = p.slots[token];
    if (!p.pages.has(slot)) continue;
    const SlotPlace place = p.pages.place(static_cast<int32_t>(slot));
    const int64_t k_token = p.k_cache.element(place);
    const int64_t v_token = p.v_cache.element(place);
    for (int32_t i = threadIdx.x; i < p.num_kv_heads * words; i += blockDim.x) {
      const int32_t head = i / words;
      const int32_t word = i - head * words;
      const auto source = [&](const HeadRows& rows) {
        const int64_t element = token * rows.token_stride + head * rows.head_stride;
        return reinterpret_cast<const Word*>(static_cast<const char*>(rows.data) + element * p.element_bytes)[word];
      };
      const auto target = [&](const KvTensor& cache, int64_t token_element) {
        return reinterpret_cast<Word*>(static_cast<char*>(const_cast<void*>(cache.data)) +
                                       (token_element + head * cache.head_stride) * p.element_bytes) +
               word;
      };
      Word k, v;
      if (word < k_words) k = source(p.k);
      if (word < v_words) v = source(p.v);
      if (word < k_words) *target(p.k_cache, k_token) = k;
      if (word < v_words) *target(p.v_cache, v_token) = v;
    }
  }
}

/// The bits that are set in some address or byte stride. A power of two divides all of them if it is at or below the
/// lowest bit.
__device__ __forceinline__ uint64_t address_bits(const AppendParams& p) {
  const int64_t strides = p.k.token_stride | p.k.head_stride | p.v.token_stride | p.v.head_stride |
                          p.k_cache.page_stride | p.k_cache.token_stride | p.k_cache.head_stride |
                          p.v_cache.page_stride | p.v_cache.token_stride | p.v_cache.head_stride;
  return reinterpret_cast<uint64_t>(p.k.data) | reinterpret_cast<uint64_t>(p.v.data) |
         reinterpret_cast<uint64_t>(p.k_cache.data) | reinterpret_cast<uint64_t>(p.v_cache.data) |
         static_cast<uint64_t>(strides * p.element_bytes) | static_cast<uint64_t>(p.k_head_bytes | p.v_head_bytes);
}

}  // namespace attn

extern "C" __global__ __launch_bounds__(attn::kAppendThreads) void append_kernel(
    const __grid_constant__ attn::AppendParams params) {
  attn::ptx::wait_for_previous_grid();
  attn::ptx::allow_next_grid();  // it waits for this one itself, before it reads the cache
  const uint64_t bits = attn::address_bits(params);
  if (bits % 16 == 0) {
    attn::append<uint4>(params);
  } else if (bits % 2 == 0) {
    attn::append<unsigned short>(params);
  } else {
    attn::append<unsigned char>(params);
  }
}
