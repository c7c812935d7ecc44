// The arguments of the attention kernels: plain data, the same bytes for the device kernels and for the executor on a
// CPU.
#pragma once

#include "attention/variant/variants.h"
#include "cache/kv_cache.h"
#include "common/math.h"
#include "planner/schedule.h"

namespace attn {

/// First what a CTA reads before its first load of K, up to `q` (TmaParams).
struct AttentionParams {
  Schedule schedule;
  FastDivisor group_size;
  FastDivisor page_size;
  int32_t num_pages;     // of the cache (rows of a ragged tensor): page ids are clamped to [0, num_pages)
  int32_t after_append;  // the append kernel, or another that waited for all before it, was launched between plan and
                         // this: the schedule may be read while it runs (the Hopper kernel does)
  int32_t num_kv_heads;
  int32_t num_ctas;
  int32_t kv_tile;  // tokens of one KV tile, as planned
  float sm_scale;
  int32_t num_rows;       // rows of q; rows of the schedule beyond it are ignored
  int32_t max_tile_rows;  // tile_rows(max_kind)
  const void* q;          // [num_rows, num_kv_heads * group_size, columns of Q and K]
  int64_t q_row_stride;
  int64_t q_head_stride;
  KvTensor k;
  KvTensor v;
  void* o;  // [num_rows, num_kv_heads * group_size, v_columns]; e4m3 if it has a scale
  int64_t o_row_stride;
  int64_t o_head_stride;
  float* lse;              // [num_rows, num_qo_heads], contiguous; nullptr: not wanted
  float* partial_o;        // [num_ctas * kSlotsPerCta, tile_rows(max_kind), v_columns], normalized; then row states
                           // [max_states, num_qo_heads, v_columns]
  float* partial_lse;      // like partial_o, without v_columns
  int32_t v_columns;       // of a head of V and O
  int32_t max_merge_rows;  // as planned
  const float* sinks;      // [num_qo_heads], natural logarithms: exp(sink) joins the sum of a row's exponentials, once,
                           // where the row is complete; nullptr: none
  int32_t adds_up;         // the variant has no softmax: partial outputs are sums, and their sum is the output
  VariantParams variant;
  float lse_unit;   // what lse's natural logarithms are multiplied by: 1, or log2(e) for logarithms to base 2
  float out_scale;  // of O in 8 bits; 0: it has none, or it lies in memory
  const float* out_scale_data;  // read when the kernel runs; nullptr: out_scale

  ATTN_HD bool has_out_scale() const { return out_scale != 0.0f || out_scale_data != nullptr; }

  /// The factor of an output before it is rounded to 8 bits. A scale too small to be inverted must not make NaN of 0.
  ATTN_HD float out_factor() const {
    constexpr float kMaxFloat = 3.402823466e38f;
    return min_of(1.0f / (out_scale_data == nullptr ? out_scale : *out_scale_data), kMaxFloat);
  }
};

/// Some columns of Q's heads.
struct QueryPart {
  const void* data;  // [num_rows, num_qo_heads, columns]
  int64_t row_stride;
  int64_t head_stride;
};

/// The arguments of kernels of MLA's latents (is_latent()), and of the executor on a CPU. Other kernels are launched
/// with what comes before: nothing changes for them.
struct LatentAttentionParams : AttentionParams {
  QueryPart q_rope;  // the columns after the first v_columns; without data, for the executor: q has them
};

/// Row of partial_o and partial_lse that keeps row state number `state`. In a row group with states, the part that
/// begins a (row tile, head) goes to one state for each row. Only later parts go to slots.
ATTN_HD int64_t row_state_index(const AttentionParams& params, int32_t state, int32_t qo_head) {
  const int64_t slots = static_cast<int64_t>(params.num_ctas) * kSlotsPerCta * params.max_tile_rows;
  return slots + static_cast<int64_t>(state) * (params.num_kv_heads * params.group_size.divisor) + qo_head;
}

}  // namespace attn
