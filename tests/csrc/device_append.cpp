// csrc/cache/append_qkv.cuh and append_rounded.cu on a CPU, for ctypes: with emulated/ in the place of CUDA. CTAs run
// one after another.
#include "cuda_emulation.h"

#include "cache/elements_in_memory.cuh"
#include "common/elements.cuh"

namespace emulation {

alignas(16) char memory[16 << 10];
char* const shared_memory = memory;
const size_t shared_bytes = sizeof(memory);

uint64_t time() { return 0; }

}  // namespace emulation

namespace attn {
// Of the entries, which are not called.
using KernelElement = BFloat16;
using KernelCacheElement = BFloat16;
using KernelQuantizer = Elements16Bits;
constexpr bool kKernelRotates = false;
}  // namespace attn

#include "cache/append_qkv.cu"
#include "cache/append_rounded.cu"

namespace {

attn::QkvParams launched;

template <class Element, attn::QkvKernel kKernel, bool kRotates>
void append_all() {
  constexpr bool kIsBf16 = attn::is_same<Element, attn::BFloat16>;
  using Other = typename attn::Conditional<kIsBf16, attn::Float16, attn::BFloat16>::Type;
  if (attn::has_4_bits(launched.scales.element))
    attn::visit_quantizer(launched.scales.element, [](auto quantizer) {
      attn::append_qkv<Element, kKernel, decltype(quantizer), Element, kRotates>(launched,
                                                                                 static_cast<int32_t>(blockIdx.x));
    });
  else if (launched.k_token_scales.exist())
    attn::append_qkv<Element, kKernel, attn::ByteQuantizer, Element, kRotates>(launched,
                                                                               static_cast<int32_t>(blockIdx.x));
  else if (attn::is_in_bytes(launched.scales.element))
    attn::append_qkv<Element, kKernel, attn::GivenScales, Element, kRotates>(launched,
                                                                             static_cast<int32_t>(blockIdx.x));
  else if (launched.scales.element == (kIsBf16 ? attn::DataType::kFloat16 : attn::DataType::kBFloat16))
    attn::append_qkv<Element, kKernel, attn::Elements16Bits, Other, kRotates>(launched,
                                                                              static_cast<int32_t>(blockIdx.x));
  else
    attn::append_qkv<Element, kKernel, attn::Elements16Bits, Element, kRotates>(launched,
                                                                                static_cast<int32_t>(blockIdx.x));
}

template <class Element, attn::QkvKernel kKernel>
void append() {
  launched.rotates_rows != 0 ? append_all<Element, kKernel, true>() : append_all<Element, kKernel, false>();
}

attn::QkvPairParams launched_pair;

template <class Element, attn::QkvKernel kKernel>
void append_pair() {
  using Quantizers = attn::QuantizerPair<attn::ByteQuantizer, attn::Fp4Quantizer>;
  launched_pair.k.rotates_rows != 0 ? attn::append_pair<Element, kKernel, Quantizers, true>(launched_pair)
                                    : attn::append_pair<Element, kKernel, Quantizers, false>(launched_pair);
}

template <class Element>
void run_pair(attn::QkvKernel kernel) {
  void (*const thread)() = kernel == attn::QkvKernel::kPlain    ? append_pair<Element, attn::QkvKernel::kPlain>
                           : kernel == attn::QkvKernel::kNormed ? append_pair<Element, attn::QkvKernel::kNormed>
                                                                : append_pair<Element, attn::QkvKernel::kGeneral>;
  const int32_t ctas = static_cast<int32_t>(attn::append_pair_ctas(launched_pair, kernel));
  for (int32_t cta = 0; cta < ctas; ++cta) emulation::run_cta(cta, ctas, attn::kAppendQkvThreads, 0, thread);
}

template <class Element>
void append_rounded() {
  attn::append_rounded<Element>(launched);
}

template <class Element>
void run(attn::QkvKernel kernel) {
  void (*const thread)() = kernel == attn::QkvKernel::kPlain     ? append<Element, attn::QkvKernel::kPlain>
                           : kernel == attn::QkvKernel::kNormed  ? append<Element, attn::QkvKernel::kNormed>
                           : kernel == attn::QkvKernel::kRounded ? append_rounded<Element>
                                                                 : append<Element, attn::QkvKernel::kGeneral>;
  const int32_t ctas = static_cast<int32_t>(attn::append_qkv_ctas(launched, kernel));
  for (int32_t cta = 0; cta < ctas; ++cta) emulation::run_cta(cta, ctas, attn::kAppendQkvThreads, 0, thread);
}

}  // namespace

extern "C" int32_t qkv_params_bytes() { return sizeof(attn::QkvParams); }

/// Returns the QkvKernel that ran.
extern "C" int32_t device_append_qkv(const attn::QkvParams* params, int32_t page_size, bool is_bf16) {
  launched = *params;
  launched.pages.page_size = attn::FastDivisor(page_size);
  const attn::QkvKernel kernel = attn::kernel_for(launched);
  attn::divide_work(launched, kernel);
  is_bf16 ? run<attn::BFloat16>(kernel) : run<attn::Float16>(kernel);
  return static_cast<int32_t>(kernel);
}

/// The same into a cache of int8 K and NVFP4 V.
extern "C" int32_t device_append_pair(const attn::QkvParams* params, int32_t page_size, bool is_bf16) {
  attn::QkvParams k = *params;
  k.pages.page_size = attn::FastDivisor(page_size);
  k.scales.element = attn::DataType::kInt8;
  const attn::QkvParams v = attn::split_v(k, attn::DataType::kNvFp4, k.head_dim);
  launched_pair = attn::QkvPairParams{k, v, 0};
  const attn::QkvKernel kernel = attn::divide_pair(launched_pair);
  is_bf16 ? run_pair<attn::BFloat16>(kernel) : run_pair<attn::Float16>(kernel);
  return static_cast<int32_t>(kernel);
}
