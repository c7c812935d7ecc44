#include "cache/cpu/append_latent.h"

#include <cmath>
#include <cstring>

#include "common/cpu/parallel.h"
#include "common/cpu/scalar_elements.h"

namespace attn::cpu {
namespace {

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

void append_latent(const LatentParams& params) {
  constexpr int32_t kChunk = 16;  // tokens that a thread takes at a time
  auto write_chunk = [&](int32_t chunk) {
    const int32_t end = min_of(params.num_tokens, (chunk + 1) * kChunk);
    for (int32_t token = chunk * kChunk; token < end; ++token) {
      char* const row = params.row(token);
      if (row != nullptr)
        write_row(static_cast<const BFloat16*>(params.latent) + token * params.latent_stride,
                  static_cast<const BFloat16*>(params.rope) + token * params.rope_stride, row);
    }
  };
  parallel_for(ceil_div(params.num_tokens, kChunk), params.num_tokens > kChunk, write_chunk);
}

}  // namespace attn::cpu
