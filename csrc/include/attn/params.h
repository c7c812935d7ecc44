// The kernels' arguments: plain data, the same bytes for device kernels and for the CPU executor.
#pragma once

#include "attn/kernel_code.h"
#include "attn/math.h"
#include "attn/platform.h"
#include "attn/schedule.h"

namespace attn {

enum class DataType : int32_t { kFloat32 = 0, kFloat16 = 1, kBFloat16 = 2 };

/// An array of int32 or int64 that the engine owns (SGLang's lengths are int64, vLLM's are int32).
struct IndexArray {
  const void* data = nullptr;
  int32_t is_int64 = 0;

  ATTN_HD explicit operator bool() const { return data != nullptr; }
  ATTN_HD int64_t operator[](int64_t i) const {
#if defined(__CUDA_ARCH__)
    // Without a branch, so that loads from several arrays are under way together.
    const int32_t* words = static_cast<const int32_t*>(data);
    const int32_t low = __ldg(words + (i << is_int64));
    const int32_t high = is_int64 ? __ldg(words + 2 * i + 1) : low >> 31;
    return static_cast<int64_t>(high) << 32 | static_cast<uint32_t>(low);
#else
    return is_int64 ? static_cast<const int64_t*>(data)[i] : static_cast<const int32_t*>(data)[i];
#endif
  }

  /// Element i as it lies in memory; an int32 in its low half. What is read is not touched before narrow(): loads from several arrays are under way together.
  struct Words {
    int32_t low;
    int32_t high;
  };
  ATTN_HD Words words(int32_t i) const {
    const char* element = static_cast<const char*>(data) + static_cast<int64_t>(i) * (is_int64 ? 8 : 4);
    const int32_t* at = reinterpret_cast<const int32_t*>(element);
    // `high` of an int32 is not looked at.
#if defined(__CUDA_ARCH__)
    return Words{__ldg(at), __ldg(at + is_int64)};
#else
    return Words{at[0], at[is_int64]};
#endif
  }

  /// An element as an int32: one that does not fit becomes the nearest that does.
  ATTN_HD int32_t narrow(Words element) const { return !is_int64 || element.high == element.low >> 31 ? element.low : element.high >> 31 ^ 0x7fffffff; }
};

/// Where the tokens of each request live. Every engine's form reduces to one formula; page j of request i is
///     indices ? indices[begin(i) + j * entry_step] / entry_step : begin(i) + j
/// with begin(i) = indptr ? indptr[i] : (rows ? rows[i] : i) * row_stride, and its length is kv_lens[i], or from indptr and last_page_len (CSR).
///   CSR            indices, indptr, last_page_len                    entry_step 1
///   block table    indices [num_rows, row_stride], kv_lens           entry_step 1
///   token slots    indices [num_rows, row_stride], rows, kv_lens     entry_step page_size: one entry a token, of which every page_size-th is read
///   ragged         indptr; page_size 1                               pages are the tensor's rows
struct PageTable {
  const int32_t* indices = nullptr;
  IndexArray indptr;
  IndexArray last_page_len;
  IndexArray kv_lens;
  IndexArray rows;
  int64_t num_entries = 0;   // elements of `indices`; for ragged: rows of the tensor
  int64_t row_stride = 0;    // elements between two rows of a dense table
  int32_t num_rows = 0;      // rows of a dense table
  int32_t row_entries = 0;   // elements of a dense table's row that may be read
  int32_t page_size = 1;     // tokens
  int32_t entry_step = 1;
};

/// The page of a slot; of a negative one a negative number, which no page has.
ATTN_HD int32_t page_of_slot(int32_t slot, int32_t page_size) { return min_of(slot / page_size, slot); }

/// One level of a composition: a BSR view.
struct PlanLevel {
  IndexArray qo_indptr;           // [num_groups + 1]
  PageTable table;
  const int32_t* rows = nullptr;  // row list, see Level
  int32_t max_rows = 0;           // no row group reaches beyond: elements of `rows`, or the rows of Q
  int32_t num_groups = 0;
  int32_t causal = 0;
  int32_t window_left = -1;
  IndexArray kv_length;           // from prepare_plan (planning.h): kv_lens, or else last_page_len, or else any array of as many elements, which is not looked at
};

struct PlanParams {
  ScheduleConfig config;
  Schedule schedule;
  PlanLevel levels[kMaxLevels];   // one behind the last: of the prefix forest's row groups
  int32_t num_levels;
  // From here on: prepare_plan (planning.h).
  int32_t seeks_forest;
  int32_t position_threads;       // of the device planner's first CTA: they find positions
  FastDivisor kv_tile;            // config.kv_tile
  FastDivisor group_size;         // config.group_size
  FastDivisor page_size;          // of the first level
  FastDivisor num_ctas;           // config.num_ctas
  FastDivisor kv_tile_cost[kNumCostKinds];
};

/// The runtime values of the built-in variants (variants.h).
struct VariantParams {
  float sm_scale;
  float logits_soft_cap;     // 0: off
  int32_t causal;
  int32_t window_left;       // -1: off
};

/// K or V of one layer: element (page, token in page, head, i) is data[page * page_stride + token * token_stride + head * head_stride + i].
struct KvTensor {
  const void* data;
  int64_t page_stride;
  int64_t token_stride;
  int64_t head_stride;
};

struct AttentionParams {
  Schedule schedule;
  const void* q;             // [num_rows, num_kv_heads * group_size, head_dim]
  int64_t q_row_stride;
  int64_t q_head_stride;
  KvTensor k;
  KvTensor v;
  void* o;                   // like q
  int64_t o_row_stride;
  int64_t o_head_stride;
  float* lse;                // [num_rows, num_qo_heads], contiguous; nullptr: not wanted
  float* partial_o;          // [num_ctas * kSlotsPerCta, tile_rows(max_kind), head_dim], normalised; then row states [max_states, num_qo_heads, head_dim]
  float* partial_lse;        // like partial_o, without head_dim
  int32_t num_rows;          // rows of q; rows of the schedule beyond it are ignored
  int32_t max_merge_rows;    // as planned
  int32_t num_pages;         // pages of the cache (rows of a ragged tensor): page ids are clamped to [0, num_pages)
  int32_t num_kv_heads;
  int32_t head_dim;
  int32_t num_ctas;
  int32_t max_tile_rows;     // tile_rows(max_kind)
  int32_t kv_tile;           // tokens of one KV tile, as planned
  FastDivisor group_size;
  FastDivisor page_size;
  float sm_scale;
  float logits_soft_cap;
  int32_t after_append;      // the append kernel, or another that waited for all before it, was launched between plan and this: the schedule may be read while it runs (the Hopper kernel does)
};

/// A tensor as the copy engine sees it: encoded by the driver, read by the hardware (CUtensorMap).
struct alignas(64) TensorMap {
  uint64_t words[16];
};

/// Of the Hopper kernel. The copy engine brings boxes of `box_tokens` tokens x 64 columns; the maps' dimensions are column, token (in its page; of a ragged tensor: row),
/// head and page.
struct HopperParams {
  TensorMap k;
  TensorMap v;
  AttentionParams attention;
  int32_t box_tokens;        // 0: tokens are gathered one by one
  int32_t run_tokens;        // with box_tokens 0: the maps bring boxes of so many tokens whose pages, of one token each, follow one another; 0: no map describes these tensors
  int32_t unit_shift;        // page and token strides of K and V are multiples of 2^unit_shift elements, and no row lies 2^32 of these units from the first
  int32_t has_row_maps;      // 0: maps `o` and `q` describe nothing; the largest row tiles are gathered, and all are stored row by row
  int32_t has_one_row_map;   // 0: map `q_row` describes nothing; smaller row tiles are gathered
  TensorMap o;               // dimensions column, head, row; boxes of 64 columns x group_size heads x 16 / group_size rows: what a consumer warp has of a wide row tile
  TensorMap q;               // boxes of 128 / group_size rows: one of the largest row tiles
  TensorMap q_row;           // boxes of one row
  KernelCode code;           // of the kernel itself, ...
  KernelCode merge_code;     // ... and of the one that runs next
};

/// Row of partial_o and partial_lse that keeps row state number `state`. In a row group with states the part that begins a (row tile, head) goes to a state of its
/// own for each row, and only the parts behind it go to slots.
ATTN_HD int64_t row_state_index(const AttentionParams& params, int32_t state, int32_t qo_head) {
  const int64_t slots = static_cast<int64_t>(params.num_ctas) * kSlotsPerCta * params.max_tile_rows;
  return slots + static_cast<int64_t>(state) * (params.num_kv_heads * params.group_size.divisor) + qo_head;
}

/// Copies new tokens into the paged cache: token i goes to slot slots[i] (page * page_size + token in page); a negative slot is skipped, so is one beyond the
/// cache.
struct AppendParams {
  const void* k;             // [num_tokens, num_kv_heads, head_dim]
  const void* v;
  int64_t k_token_stride, k_head_stride;
  int64_t v_token_stride, v_head_stride;
  KvTensor k_cache;          // written
  KvTensor v_cache;
  IndexArray slots;          // [num_tokens]
  int32_t num_tokens;
  int32_t num_pages;
  int32_t num_kv_heads;
  int32_t head_bytes;        // head_dim * sizeof(element)
  FastDivisor page_size;
  int32_t element_bytes;
};

}  // namespace attn
