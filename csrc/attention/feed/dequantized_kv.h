// A 16-bit copy of the tokens that long row groups read from an 8-bit cache. A kernel makes it before attention
// (dequantize.cu): a token is then dequantized once, instead of by each row tile that reads it (dequantizer.cuh). The
// plan decides which row groups have a copy (place_dequantized() in planner/steps.h).
#pragma once

#include "cache/kv_cache.h"
#include "common/data_type.h"
#include "common/math.h"
#include "planner/schedule.h"

namespace attn {

/// Rows [rows, num_kv_heads, dequantized_columns()] of K and of V, contiguous. They are in the workspace, and may hold
/// anything where no row group has its tokens.
struct DequantizedKv {
  void* k;
  void* v;
  DataType dtype;
  int32_t rows;
};

/// Columns of a head of K or V: whole blocks of a tile in shared memory. The columns after the head's are zeros.
ATTN_HD constexpr int32_t dequantized_columns(int32_t head_columns) { return round_up(head_columns, 64); }

constexpr int32_t kDequantizeThreads = 256;
constexpr int32_t kDequantizeCtasPerMultiprocessor = 4;
constexpr int32_t kChunkColumns = 8;  // that a thread dequantizes at a time

/// K or V, stored and dequantized.
struct DequantizedTensor {
  KvTensor stored;
  TokenScales scales;  // if the cache has any
  float factor;        // of scales of blocks
  int32_t head_columns;
  FastDivisor head_chunks;  // of dequantized_columns()
  void* target;

  DequantizedTensor() = default;
  DequantizedTensor(const KvTensor& stored_, const TokenScales& scales_, float factor_, int32_t head_columns_,
                    void* target_)
      : stored(stored_),
        scales(scales_),
        factor(factor_),
        head_columns(head_columns_),
        head_chunks(dequantized_columns(head_columns_) / kChunkColumns),
        target(target_) {}
};

struct DequantizeParams {
  Schedule schedule;
  FastDivisor page_size;
  int32_t num_pages;
  int32_t num_kv_heads;
  FastDivisor row_chunks;  // of all heads of K and V
  DequantizedTensor k;
  DequantizedTensor v;
};

}  // namespace attn
