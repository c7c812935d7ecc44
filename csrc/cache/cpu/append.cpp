#include "cache/cpu/append.h"

#include <cmath>
#include <cstring>

#include "common/cpu/elements.h"
#include "common/cpu/parallel.h"

namespace attn::cpu {
namespace {

void append_token(const AppendParams& params, int32_t token) {
  const int64_t slot = params.slots[token];
  if (!params.pages.has(slot)) return;
  const SlotPlace place = params.pages.place(static_cast<int32_t>(slot));
  const auto copy_heads = [&](const HeadRows& from, int32_t head_bytes, const KvTensor& to) {
    const char* source = static_cast<const char*>(from.data) + token * from.token_stride * params.element_bytes;
    char* target = static_cast<char*>(const_cast<void*>(to.data)) + to.element(place) * params.element_bytes;
    for (int64_t head = 0; head < params.num_kv_heads; ++head) {
      std::memcpy(target + head * to.head_stride * params.element_bytes,
                  source + head * from.head_stride * params.element_bytes, static_cast<size_t>(head_bytes));
    }
  };
  copy_heads(params.k, params.k_head_bytes, params.k_cache);
  copy_heads(params.v, params.v_head_bytes, params.v_cache);
}

using Row = ScaledLatentRow;

void write_row(const BFloat16* latent, const BFloat16* rope, char* row) {
  for (int32_t scale_number = 0; scale_number < Row::kScales; ++scale_number) {
    const int32_t first = scale_number * Row::kColumnsOfScale;
    float largest = 0.0f;
    for (int32_t i = first; i < first + Row::kColumnsOfScale; ++i)
      largest = std::fmax(largest, std::fabs(to_float(latent[i])));
    const float scale = latent_scale(largest);
    for (int32_t i = first; i < first + Row::kColumnsOfScale; ++i)
      row[i] = static_cast<char>(e4m3_bits(to_float(latent[i]) / scale));
    std::memcpy(row + Row::kScalesAt + scale_number * 4, &scale, sizeof(scale));
  }
  std::memcpy(row + Row::kRopeAt, rope, Row::kRopeColumns * sizeof(BFloat16));
}

}  // namespace

void append(const AppendParams& params) {
  constexpr int64_t kMinThreadedBytes = 256 * 1024;
  const int64_t bytes = int64_t{params.num_tokens} * params.num_kv_heads * (params.k_head_bytes + params.v_head_bytes);
  parallel_chunks(params.num_tokens, 64, bytes >= kMinThreadedBytes, [&](int32_t token, int32_t end) {
    for (; token < end; ++token) append_token(params, token);
  });
}

void append_latent(const LatentParams& params) {
  constexpr int32_t kChunk = 16;
  parallel_chunks(params.num_tokens, kChunk, params.num_tokens > kChunk, [&](int32_t token, int32_t end) {
    for (; token < end; ++token) {
      char* const row = params.row(token);
      if (row != nullptr)
        write_row(static_cast<const BFloat16*>(params.latent) + token * params.latent_stride,
                  static_cast<const BFloat16*>(params.rope) + token * params.rope_stride, row);
    }
  });
}

}  // namespace attn::cpu
