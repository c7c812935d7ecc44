// append_kv into an 8-bit cache: append_qkv without Q, norm and RoPE, in a third of its code. A layer's other kernels
// evict that code from L2, and a decode waits for most of its lines. The source that includes this file defines
// attn::KernelElement, of the heads.

#include "cache/elements_in_memory.cuh"
#include "cache/params.h"
#include "common/elements.cuh"
#include "common/ptx/grid_dependency.cuh"

namespace attn {

/// A block takes a token. As many lanes as a head has chunks take a head of its K or V.
template <class Element>
__device__ __forceinline__ void append_rounded(const QkvParams& p) {
  constexpr int32_t kSize = half_chunk(QkvKernel::kRounded);
  ptx::wait_for_previous_grid();
  ptx::allow_next_grid();  // it waits for this one itself, before it reads the cache
  const int32_t token = static_cast<int32_t>(blockIdx.x);
  if (token >= p.num_tokens) return;
  const int32_t slot = p.slots[token];
  if (!p.pages.has(slot)) return;
  const SlotPlace place = p.pages.place(slot);
  const int32_t thread = static_cast<int32_t>(threadIdx.x);
  const int32_t column = (thread & ((1 << p.lane_bits) - 1)) * 2 * kSize;
  const int32_t heads = p.v.data != nullptr ? 2 * p.num_kv_heads : p.num_kv_heads;
  if (column >= p.head_dim) return;
#pragma unroll 1
  for (int32_t i = thread >> p.lane_bits; i < heads; i += kAppendQkvThreads >> p.lane_bits) {
    const bool is_v = i >= p.num_kv_heads;
    const int32_t head = is_v ? i - p.num_kv_heads : i;
    const HeadRows& rows = is_v ? p.v : p.k;
    const KvTensor& target = is_v ? p.v_cache : p.k_cache;
    const uint16_t* from =
        static_cast<const uint16_t*>(rows.data) + token * rows.token_stride + head * rows.head_stride + column;
    uint8_t* to = static_cast<uint8_t*>(const_cast<void*>(target.data)) + target.element(place, head) + column;
    uint32_t words[kSize];
    load_words<kSize, true>(from, words);
    load_words<kSize, true>(from + kSize, words + kSize / 2);
    const BytePairs<false> rounder{Divisor((is_v ? p.scales.v : p.scales.k).of(0, head)), p.scales.element};
    ByteChunk<kSize, true> bytes;
#pragma unroll
    for (int32_t j = 0; j < kSize; ++j)
      bytes.set(j, Element::unpack(words[j]), Element::unpack(words[j] >> 16), rounder);
    bytes.store(to, kSize);
  }
}

}  // namespace attn

extern "C" __global__ void __launch_bounds__(attn::kAppendQkvThreads)
    append_rounded_kernel(const __grid_constant__ attn::QkvParams params) {
  attn::append_rounded<attn::KernelElement>(params);
}
