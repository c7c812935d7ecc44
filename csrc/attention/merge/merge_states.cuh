// Merges attention states that lie in tensors, one warp a row and head. States merge in their order: same states, same
// bits.
#pragma once

#include "attention/merge/merge_states.h"
#include "common/elements.cuh"
#include "common/ptx/grid_dependency.cuh"
#include "common/ptx/math.cuh"
#include "common/ptx/warp.cuh"

namespace attn {

/// A number of a state in memory, of 16 bits. Four neighboring columns are stored together.
template <class Element>
struct StateNumber {
  uint16_t bits;

  __device__ __forceinline__ float value() const { return Element::unpack(bits); }

  __device__ __forceinline__ static void store(StateNumber* to, const float (&values)[4]) {
    store_four<Element>(reinterpret_cast<char*>(to), values);
  }
  __device__ __forceinline__ static void store(StateNumber* to, const float (&values)[1]) {
    to->bits = static_cast<uint16_t>(Element::pack(values[0], 0.0f));
  }
};

struct Float32State {};

template <>
struct StateNumber<Float32State> {
  float number;

  __device__ __forceinline__ float value() const { return number; }

  __device__ __forceinline__ static void store(StateNumber* to, const float (&values)[4]) {
    *reinterpret_cast<float4*>(to) = make_float4(values[0], values[1], values[2], values[3]);
  }
  __device__ __forceinline__ static void store(StateNumber* to, const float (&values)[1]) { to->number = values[0]; }
};

/// Numbers of neighboring columns, which are loaded together.
template <class Element, int kColumns>
struct alignas(kColumns * sizeof(StateNumber<Element>)) StateColumns {
  StateNumber<Element> numbers[kColumns];
};

/// Merges the states of one row and head. All lanes of the warp take part.
template <class Element, int kColumns>
__device__ __forceinline__ void merge_states_of_row(const MergeStatesParams& p, int32_t row, int32_t head) {
  using Number = StateNumber<Element>;
  using Columns = StateColumns<Element, kColumns>;
  const int32_t lane = threadIdx.x % 32;
  const int64_t begin = p.begin(row);
  const int64_t count = p.end(row) - begin;
  const float* lse = p.lse + row * p.lse_row_stride + begin * p.lse_state_stride + head;
  const Number* o =
      static_cast<const Number*>(p.o) + row * p.o_row_stride + begin * p.o_state_stride + head * p.o_head_stride;
  Number* out = static_cast<Number*>(p.out) + row * p.out_row_stride + head * p.out_head_stride;

  float maximum = minus_infinity();  // to base 2
  for (int64_t i = lane; i < count; i += 32) maximum = fmaxf(maximum, lse[i * p.lse_state_stride] * p.to_log2);
  maximum = ptx::warp_max(maximum);
  const float base = maximum == minus_infinity() ? 0.0f : maximum;
  float sum = 0.0f;
  for (int64_t i = 0; i < count; ++i) sum += ptx::ex2(lse[i * p.lse_state_stride] * p.to_log2 - base);
  const float factor = sum > 0.0f ? 1.0f / sum : 0.0f;  // of a row that sees nothing the output is 0

  for (int32_t column = lane * kColumns; column < p.head_dim; column += 32 * kColumns) {
    float merged[kColumns] = {};
    for (int64_t i = 0; i < count; ++i) {
      const float weight = ptx::ex2(lse[i * p.lse_state_stride] * p.to_log2 - base);
      const Columns state = *reinterpret_cast<const Columns*>(o + i * p.o_state_stride + column);
#pragma unroll
      for (int j = 0; j < kColumns; ++j) merged[j] += weight == 0.0f ? 0.0f : weight * state.numbers[j].value();
    }
#pragma unroll
    for (int j = 0; j < kColumns; ++j) merged[j] *= factor;
    Number::store(out + column, merged);
  }
  __syncwarp();  // out_lse may be lse itself, which all lanes have read by now
  if (lane == 0)
    p.out_lse[row * p.out_lse_row_stride + head] = sum > 0.0f ? (base + ptx::lg2(sum)) / p.to_log2 : minus_infinity();
}

template <class Element>
__device__ __forceinline__ void merge_states(const MergeStatesParams& p) {
  ptx::wait_for_previous_grid();
  constexpr int kWarps = kMergeStatesThreads / 32;
  const int64_t pairs = static_cast<int64_t>(p.num_rows) * p.num_heads;
  constexpr int64_t kVectorBytes = sizeof(StateColumns<Element, 4>);
  const int64_t strides = p.o_row_stride | p.o_state_stride | p.o_head_stride | p.out_row_stride | p.out_head_stride;
  const bool in_vectors = (reinterpret_cast<uint64_t>(p.o) | reinterpret_cast<uint64_t>(p.out)) % kVectorBytes == 0 &&
                          (strides | p.head_dim) % 4 == 0;
  for (int64_t pair = static_cast<int64_t>(blockIdx.x) * kWarps + threadIdx.x / 32; pair < pairs;
       pair += static_cast<int64_t>(gridDim.x) * kWarps) {
    const int32_t row = static_cast<int32_t>(pair / p.num_heads);
    const int32_t head = static_cast<int32_t>(pair - static_cast<int64_t>(row) * p.num_heads);
    if (p.mask != nullptr && p.mask[row] == 0) continue;
    if (in_vectors)
      merge_states_of_row<Element, 4>(p, row, head);
    else
      merge_states_of_row<Element, 1>(p, row, head);
  }
}

}  // namespace attn
