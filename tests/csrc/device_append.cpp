// csrc/cache/append_qkv.cuh on a CPU, for ctypes: with emulated/ in the place of CUDA. CTAs run one after another.
#include "cuda_emulation.h"

namespace emulation {

char none[16];
char* const shared_memory = none;
const size_t shared_bytes = 0;

uint64_t time() { return 0; }

}  // namespace emulation

#include "cache/append_qkv.cuh"

namespace {

attn::QkvParams launched;

}  // namespace

extern "C" int32_t qkv_params_bytes() { return sizeof(attn::QkvParams); }

extern "C" void device_append_qkv(const attn::QkvParams* params, int32_t page_size, bool is_bf16, int32_t threads,
                                  int32_t blocks) {
  launched = *params;
  launched.page_size = attn::FastDivisor(page_size);
  for (int32_t block = 0; block < blocks; ++block) {
    const bool quantises = attn::is_float8(launched.scales.element);
    if (quantises && is_bf16)
      emulation::run_cta(block, blocks, threads, 0, [] { attn::append_qkv<attn::BFloat16, true>(launched); });
    else if (quantises)
      emulation::run_cta(block, blocks, threads, 0, [] { attn::append_qkv<attn::Float16, true>(launched); });
    else if (is_bf16)
      emulation::run_cta(block, blocks, threads, 0, [] { attn::append_qkv<attn::BFloat16>(launched); });
    else
      emulation::run_cta(block, blocks, threads, 0, [] { attn::append_qkv<attn::Float16>(launched); });
  }
}
