// The paged cache of a layer: K and V, where slots are in them, their scales, and the rows of MLA's latents.
#pragma once

#include "common/data_type.h"
#include "common/math.h"
#include "common/platform.h"

namespace attn {

/// Where a token is in a cache.
struct SlotPlace {
  int32_t page;
  int32_t in_page;  // the token's number in it
};

/// K or V of one layer: element (page, token in page, head, i) is data[page * page_stride + token * token_stride + head
/// * head_stride + i]. Of a 4-bit cache, the elements are bytes; the lower half of byte i is column 2 * i.
struct KvTensor {
  const void* data;
  int64_t page_stride;
  int64_t token_stride;
  int64_t head_stride;

  /// Number of element 0 of a token and head.
  ATTN_HD int64_t element(SlotPlace token, int32_t head = 0) const {
    return token.page * page_stride + token.in_page * token_stride + head * head_stride;
  }
};

/// Scales of K or V, for each token and head: a float32 number where a KvTensor has rows. They are read when the kernel
/// runs. Of an int4 cache, the lowest bits of the number hold a zero point (Int4Scale). Of FP4 caches, there are
/// scale_words(), whose bytes are the scales of the head's blocks.
struct TokenScales : KvTensor {
  ATTN_HD bool exist() const { return data != nullptr; }
  ATTN_HD const float& of(SlotPlace token, int32_t head) const {
    return static_cast<const float*>(data)[element(token, head)];
  }
  ATTN_HD void write(SlotPlace token, int32_t head, float scale) const {
    static_cast<float*>(const_cast<void*>(data))[element(token, head)] = scale;
  }
  ATTN_HD void write_block(SlotPlace token, int32_t head, int32_t block, uint32_t scale) const {
    auto* const scales =
        reinterpret_cast<uint8_t*>(static_cast<float*>(const_cast<void*>(data)) + element(token, head));
    scales[block] = static_cast<uint8_t>(scale);
  }
};

/// Rows of heads: element (token, head, i) is data[token * token_stride + head * head_stride + i].
struct HeadRows {
  const void* data;
  int64_t token_stride;
  int64_t head_stride;
};

/// The pages of a cache, as slots count their tokens: slot page * page_size + token in page.
struct CachePages {
  int32_t count;
  FastDivisor page_size;

  /// Whether a slot exists. Callers skip negative slots, and slots beyond the cache.
  ATTN_HD bool has(int64_t slot) const {
    return slot >= 0 && slot < min_of<int64_t>(static_cast<int64_t>(count) * page_size.divisor, kMaxInt32);
  }

  ATTN_HD SlotPlace place(int32_t slot) const {
    const int32_t page = page_size.divide(slot);
    return SlotPlace{page, slot - page * page_size.divisor};
  }
};

/// Whether V's columns are the first of K's, in the same memory. Strides of dimensions of one element are not used, and
/// may be anything.
ATTN_HD bool v_is_in_k(const KvTensor& k, const KvTensor& v, int64_t num_pages, int64_t page_size,
                       int64_t num_kv_heads) {
  return v.data == k.data && (num_pages <= 1 || v.page_stride == k.page_stride) &&
         (page_size <= 1 || v.token_stride == k.token_stride) && (num_kv_heads <= 1 || v.head_stride == k.head_stride);
}

/// Scales of K, of V or of Q: one for all, or one for each KV head, request, or both.
struct KvScale {
  const float* data;  // read when the kernel runs; nullptr: `value` for all
  float value;
  int32_t head_stride;     // in elements; 0: one for all heads
  int32_t request_stride;  // in elements; 0: one for all requests
  int32_t num_requests;

  ATTN_HD bool is_of_requests() const { return request_stride != 0; }

  /// A request that has none takes the nearest.
  ATTN_HD float of(int32_t request, int32_t kv_head) const {
    if (data == nullptr) return value;
    const int64_t row = clamp(request, 0, num_requests - 1);
    return data[row * request_stride + static_cast<int64_t>(kv_head) * head_stride];
  }

  /// The scale of all requests; 1 if requests have their own.
  ATTN_HD float for_all_requests(int32_t kv_head) const { return is_of_requests() ? 1.0f : of(0, kv_head); }
};

struct alignas(16) KvScales {
  KvScale k;
  KvScale v;
  DataType element;  // of the cache
};

/// What attention over an 8-bit cache is given.
struct alignas(16) AttentionScales {
  KvScale k;
  KvScale v;
  KvScale q;           // of Q in 8 bits, not of requests; 1 of others
  DataType element;    // of the cache
  DataType q_element;  // of Q
};

/// The same over a cache with TokenScales.
struct alignas(16) AttentionTokenScales {
  TokenScales k;
  TokenScales v;
  float k_factor;  // multiplies all scales of blocks
  float v_factor;
};
static_assert(sizeof(AttentionTokenScales) == sizeof(AttentionScales), "a variant's Params follow either");

/// A token of MLA's cache in DeepSeek V3.2's layout (DataType::kScaledLatent). A row has the latent (512 e4m3 numbers),
/// a float32 scale for each 128 of them, and the rotated part (64 bf16 numbers). K is all 576 columns, V the first 512.
struct ScaledLatentRow {
  static constexpr int32_t kLatentColumns = 512;
  static constexpr int32_t kRopeColumns = 64;
  static constexpr int32_t kColumnsOfScale = 128;
  static constexpr int32_t kScales = kLatentColumns / kColumnsOfScale;
  static constexpr int32_t kScalesAt = kLatentColumns;  // bytes from the row's first
  static constexpr int32_t kRopeAt = kScalesAt + kScales * 4;
  static constexpr int32_t kBytes = kRopeAt + kRopeColumns * 2;
};
static_assert(ScaledLatentRow::kBytes == 656);

}  // namespace attn
