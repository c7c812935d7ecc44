// Dequantizes the tokens of long row groups before attention (dequantized_kv.h). A CTA takes kDequantizedRows rows at a
// time; any grid works. The source that includes this file defines attn::KernelElement, the 16-bit type,
// attn::KernelStored, the cache's, and attn::kKernelHasTokenScales.

#include "attention/feed/dequantized_kv.h"
#include "attention/feed/work_item.cuh"
#include "common/elements.cuh"
#include "common/ptx/grid_dependency.cuh"

namespace attn::feed {

/// The row group that has row `row` of DequantizedKv; -1: none has.
__device__ __forceinline__ int32_t find_dequantized(const Schedule& schedule, int32_t row, int32_t& found) {
  __syncthreads();  // the result before has been read
  if (threadIdx.x == 0) found = -1;
  __syncthreads();
  for (int32_t g = threadIdx.x; g < schedule.header->num_groups; g += kDequantizeThreads) {
    const RowGroup& group = schedule.groups[g];
    const int32_t first = group.dequantized_row, tokens = group.kv_len - group.dequantized_token;
    if (first >= 0 && first <= row && row - first < tokens) found = g;
  }
  __syncthreads();
  return found;
}

/// kChunkColumns columns of a head of K or V.
struct Chunk {
  int32_t row;  // of those that the CTA takes
  int32_t head;
  int32_t column;
  bool is_v;

  __device__ __forceinline__ Chunk(const DequantizeParams& p, int32_t number) {
    row = p.row_chunks.divide(number);
    const int32_t in_row = number - row * p.row_chunks.divisor;
    const int32_t first_v = p.num_kv_heads * p.k.head_chunks.divisor;
    is_v = in_row >= first_v;
    const FastDivisor& head_chunks = is_v ? p.v.head_chunks : p.k.head_chunks;
    const int32_t in_tensor = is_v ? in_row - first_v : in_row;
    head = head_chunks.divide(in_tensor);
    column = (in_tensor - head * head_chunks.divisor) * kChunkColumns;
  }
};

template <class Element, class Stored, bool kHasTokenScales>
__device__ __forceinline__ void dequantize(const DequantizeParams& p) {
  __shared__ int32_t found;
  __shared__ int64_t k_from[kDequantizedRows], v_from[kDequantizedRows];  // elements; negative: no token
  __shared__ SlotPlace places[kDequantizedRows];
  for (int32_t first_row = blockIdx.x * kDequantizedRows; first_row < p.schedule.header->dequantized_tokens;
       first_row += gridDim.x * kDequantizedRows) {
    const int32_t g = find_dequantized(p.schedule, first_row, found);
    if (g < 0 || p.num_pages == 0) continue;
    if (threadIdx.x < kDequantizedRows) {
      const RowGroup& group = p.schedule.groups[g];
      const int32_t token = group.dequantized_token + first_row - group.dequantized_row + threadIdx.x;
      k_from[threadIdx.x] = v_from[threadIdx.x] = -1;
      if (token < group.kv_len) {
        const GroupPages pages(group, p.schedule.header->levels[group.level]);
        const int32_t page = pages.page(pages.entry(p.page_size.divide(token)), p.num_pages, *p.schedule.header);
        const SlotPlace place{page, p.page_size.modulo(token)};
        places[threadIdx.x] = place;
        k_from[threadIdx.x] = p.k.stored.element(place);
        v_from[threadIdx.x] = p.v.stored.element(place);
      }
    }
    __syncthreads();
    constexpr int kAhead = 8;  // chunks that a thread loads before it stores the first
    const int32_t num_chunks = kDequantizedRows * p.row_chunks.divisor;
    for (int32_t begin = threadIdx.x; begin < num_chunks; begin += kAhead * kDequantizeThreads) {
      uint2 stored[kAhead] = {};  // of 4 bits only one word
      float scales[kAhead] = {};
#pragma unroll
      for (int i = 0; i < kAhead; ++i) {
        const int32_t number = begin + i * kDequantizeThreads;
        if (number >= num_chunks) break;
        const Chunk chunk(p, number);
        const DequantizedTensor& tensor = chunk.is_v ? p.v : p.k;
        const int64_t from = (chunk.is_v ? v_from : k_from)[chunk.row];
        if (from < 0 || chunk.column >= tensor.head_columns) continue;
        with_side<Stored>(chunk.is_v, [&](auto side) {
          using OfSide = decltype(side);
          const char* const data = static_cast<const char*>(tensor.stored.data) + from +
                                   chunk.head * tensor.stored.head_stride + stored_columns<OfSide>(chunk.column);
          if constexpr (kHas4Bits<OfSide>)
            stored[i].x = *reinterpret_cast<const uint32_t*>(data);
          else
            stored[i] = *reinterpret_cast<const uint2*>(data);
          const int32_t scale_word = has_block_scales(OfSide::kType) ? chunk.column / (4 * kScaleColumns) : 0;
          if constexpr (kHasTokenScales) scales[i] = (&tensor.scales.of(places[chunk.row], chunk.head))[scale_word];
        });
      }
#pragma unroll
      for (int i = 0; i < kAhead; ++i) {
        const int32_t number = begin + i * kDequantizeThreads;
        if (number >= num_chunks) break;
        const Chunk chunk(p, number);
        const DequantizedTensor& tensor = chunk.is_v ? p.v : p.k;
        const int64_t head = int64_t{first_row + chunk.row} * p.num_kv_heads + chunk.head;
        const int64_t element = head * tensor.head_chunks.divisor * kChunkColumns + chunk.column;
        uint4& to = *reinterpret_cast<uint4*>(static_cast<char*>(tensor.target) + element * Element::kBytes);
        with_side<Stored>(chunk.is_v, [&](auto side) {
          using OfSide = decltype(side);
          if constexpr (kHas4Bits<OfSide>)
            to = OfSide::template dequantize<Element>(stored[i].x, chunk.column / kChunkColumns,
                                                      __float_as_uint(scales[i]), tensor.factor);
          else if constexpr (kHasTokenScales)
            to = dequantize_eight<Element, OfSide>(stored[i], scales[i]);
          else
            to = dequantize_eight<Element, OfSide>(stored[i]);
        });
      }
    }
  }
}

}  // namespace attn::feed

extern "C" __global__ void __launch_bounds__(attn::kDequantizeThreads)
    dequantize_kernel(const __grid_constant__ attn::DequantizeParams params) {
  attn::ptx::wait_for_previous_grid();
  attn::ptx::allow_next_grid();  // it waits for this one itself
  attn::feed::dequantize<attn::KernelElement, attn::KernelStored, attn::kKernelHasTokenScales>(params);
}
