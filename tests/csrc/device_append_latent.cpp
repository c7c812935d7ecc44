// csrc/cache/append_latent.cu on a CPU, for ctypes: with emulated/ in the place of CUDA. CTAs run one after another.
#include "no_shared_memory.h"

#include "cache/append_latent.cu"

namespace {
attn::LatentParams launched;
}

/// strides: of latent, rope, pages, tokens. slots: int32.
extern "C" void device_append_latent(const void* latent, const void* rope, void* cache, const int32_t* slots,
                                     const int64_t* strides, int32_t tokens, int32_t pages, int32_t page_size) {
  launched = attn::LatentParams{latent,
                                rope,
                                strides[0],
                                strides[1],
                                attn::KvTensor{cache, strides[2], strides[3], 0},
                                attn::IndexArray{slots, false},
                                tokens,
                                attn::CachePages{pages, attn::FastDivisor(page_size)}};
  const int32_t ctas = (tokens + 1) / 2;  // some take two tokens
  for (int32_t cta = 0; cta < ctas; ++cta)
    emulation::run_cta(cta, ctas, attn::kAppendLatentThreads, 0, [] { attn::append_latent(launched); });
}
