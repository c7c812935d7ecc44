#include "cache/cpu/append.h"

#include <cmath>
#include <cstring>

#include "common/cpu/parallel.h"
#include "common/cpu/scalar_elements.h"

namespace attn::cpu {
namespace {

/// body(token); a thread takes `chunk_tokens` at a time.
template <class Body>
void for_tokens(int32_t num_tokens, int32_t chunk_tokens, bool use_threads, const Body& body) {
  auto take_chunk = [&](int32_t chunk) {
    const int32_t end = min_of(num_tokens, (chunk + 1) * chunk_tokens);
    for (int32_t token = chunk * chunk_tokens; token < end; ++token) body(token);
  };
  parallel_for(ceil_div(num_tokens, chunk_tokens), use_threads, take_chunk);
}

void append_token(const AppendParams& params, int32_t token) {
  const int64_t slot = params.slots[token];
  if (slot < 0 || slot >= int64_t{params.num_pages} * params.page_size.divisor) return;
  const int64_t page = slot / params.page_size.divisor;
  const int64_t in_page = slot % params.page_size.divisor;
  const auto copy_heads = [&](const void* from, int64_t token_stride, int64_t head_stride, int32_t head_bytes,
                              const KvTensor& to) {
    const char* source = static_cast<const char*>(from) + token * token_stride * params.element_bytes;
    char* target = static_cast<char*>(const_cast<void*>(to.data)) +
                   (page * to.page_stride + in_page * to.token_stride) * params.element_bytes;
    for (int64_t head = 0; head < params.num_kv_heads; ++head) {
      std::memcpy(target + head * to.head_stride * params.element_bytes,
                  source + head * head_stride * params.element_bytes, static_cast<size_t>(head_bytes));
    }
  };
  copy_heads(params.k, params.k_token_stride, params.k_head_stride, params.k_head_bytes, params.k_cache);
  copy_heads(params.v, params.v_token_stride, params.v_head_stride, params.v_head_bytes, params.v_cache);
}

using Row = ScaledLatentRow;

void write_row(const BFloat16* latent, const BFloat16* rope, char* row) {
  for (int32_t scale_number = 0; scale_number < Row::kScales; ++scale_number) {
    const int32_t first = scale_number * Row::kColumnsOfScale;
    float largest = 0.0f;
    for (int32_t i = first; i < first + Row::kColumnsOfScale; ++i)
      largest = std::fmax(largest, std::fabs(ScalarElements::to_float(latent[i])));
    const float scale = latent_scale(largest);
    for (int32_t i = first; i < first + Row::kColumnsOfScale; ++i)
      row[i] = static_cast<char>(e4m3_bits(ScalarElements::to_float(latent[i]) / scale));
    std::memcpy(row + Row::kScalesAt + scale_number * 4, &scale, sizeof(scale));
  }
  std::memcpy(row + Row::kRopeAt, rope, Row::kRopeColumns * sizeof(BFloat16));
}

}  // namespace

void append(const AppendParams& params) {
  constexpr int64_t kMinThreadedBytes = 256 * 1024;
  const int64_t bytes = int64_t{params.num_tokens} * params.num_kv_heads * (params.k_head_bytes + params.v_head_bytes);
  for_tokens(params.num_tokens, 64, bytes >= kMinThreadedBytes, [&](int32_t token) { append_token(params, token); });
}

void append_latent(const LatentParams& params) {
  constexpr int32_t kChunk = 16;
  for_tokens(params.num_tokens, kChunk, params.num_tokens > kChunk, [&](int32_t token) {
    char* const row = params.row(token);
    if (row != nullptr)
      write_row(static_cast<const BFloat16*>(params.latent) + token * params.latent_stride,
                static_cast<const BFloat16*>(params.rope) + token * params.rope_stride, row);
  });
}

}  // namespace attn::cpu
