#include "attention/cpu/executor.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "common/cpu/elements.h"
#include "common/cpu/parallel.h"

namespace attn::cpu {
namespace {

constexpr int64_t kMinThreadedElements = 1 << 16;
constexpr float kMinusInfinity = -std::numeric_limits<float>::infinity();

/// Merges one row, all heads. `merged`: head_dim floats.
template <class Element>
void merge_row(const MergeStatesParams& p, int32_t row, float* merged) {
  const int64_t begin = p.begin(row), count = p.end(row) - begin;
  for (int32_t head = 0; head < p.num_heads; ++head) {
    const float* lse = p.lse + row * p.lse_row_stride + begin * p.lse_state_stride + head;
    const Element* o =
        static_cast<const Element*>(p.o) + row * p.o_row_stride + begin * p.o_state_stride + head * p.o_head_stride;
    float maximum = kMinusInfinity;  // to base 2
    for (int64_t i = 0; i < count; ++i) maximum = std::max(maximum, lse[i * p.lse_state_stride] * p.to_log2);
    const float base = maximum == kMinusInfinity ? 0.0f : maximum;
    float sum = 0.0f;
    std::fill_n(merged, p.head_dim, 0.0f);
    for (int64_t i = 0; i < count; ++i) {
      const float weight = std::exp2(lse[i * p.lse_state_stride] * p.to_log2 - base);
      if (weight == 0.0f) continue;
      sum += weight;
      const Element* state = o + i * p.o_state_stride;
      for (int32_t column = 0; column < p.head_dim; ++column) merged[column] += weight * to_float(state[column]);
    }
    const float factor = sum > 0.0f ? 1.0f / sum : 0.0f;  // of a row that sees nothing the output is 0
    Element* out = static_cast<Element*>(p.out) + row * p.out_row_stride + head * p.out_head_stride;
    for (int32_t column = 0; column < p.head_dim; ++column) from_float(factor * merged[column], out[column]);
    p.out_lse[row * p.out_lse_row_stride + head] = sum > 0.0f ? (base + std::log2(sum)) / p.to_log2 : kMinusInfinity;
  }
}

template <class Element>
void merge_rows(const MergeStatesParams& p) {
  auto merge = [&](int32_t row) {
    thread_local std::vector<float> merged;
    merged.resize(static_cast<size_t>(p.head_dim));
    if (p.mask == nullptr || p.mask[row] != 0) merge_row<Element>(p, row, merged.data());
  };
  const int64_t states = p.indptr ? p.indptr[p.num_rows] : int64_t{p.num_rows} * p.num_states;
  parallel_for(p.num_rows, states * p.num_heads * p.head_dim >= kMinThreadedElements, merge);
}

}  // namespace

void merge_states(const MergeStatesParams& params) {
  visit_float(params.dtype, [&](auto element) { merge_rows<decltype(element)>(params); });
}

}  // namespace attn::cpu
