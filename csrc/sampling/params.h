// The arguments of sampling, and the shape of its launches.
#pragma once

#include "common/index_array.h"
#include "common/math.h"
#include "common/platform.h"

namespace attn {

/// The mass of a whole row is a sum of segments, each scaled from its own largest weight.
constexpr int32_t kSegmentTokens = 512;
constexpr int32_t kMaxVocab = 1 << 19;
constexpr int32_t kMaxTopLogprobs = 128;

// Shape of the kernels' launches.
constexpr int32_t kSamplingThreads = 256;
constexpr int32_t kSamplingWarps = kSamplingThreads / 32;
constexpr int32_t kPortableClusterCtas = 8;
constexpr int32_t kMaxClusterCtas = 16;
constexpr int32_t kSamplingStateBytes = 63744;  // of shared memory, before the tables of segments

// For rows without filters, whose CTAs exchange messages through global memory.
constexpr int32_t kUnfilteredCtas = 3;   // on a multiprocessor at a time
constexpr int32_t kMaxSharedRows = 256;  // whose CTAs wait at a time
/// Of 8 bytes: a launch number of 4 bytes for each row, then two words for each message.
constexpr int32_t kWorkspaceWords = 4096;
constexpr int32_t kWorkspaceMessages = kWorkspaceWords / 2 - kMaxSharedRows / 4;

/// Dynamic shared memory where each row has `ctas` CTAs.
constexpr int32_t sampling_shared_bytes(int32_t vocab, int32_t ctas) {
  constexpr int32_t kSegmentBytes = 20;  // two masses and the largest value
  const int32_t rounds = ceil_div(ceil_div(vocab, kSegmentTokens), kSamplingWarps * ctas);
  return kSamplingStateBytes + rounds * kSamplingWarps * kSegmentBytes;
}

/// The word at `address`, or `otherwise` where that is nullptr. On a GPU nothing waits for it before it is used: a
/// choice between two values would.
ATTN_HD uint32_t load_or(const void* address, uint32_t otherwise) {
#if defined(__CUDA_ARCH__)
  uint32_t word;
  asm volatile("{\n.reg .pred has;\nsetp.ne.u64 has, %1, 0;\nmov.b32 %0, %2;\n@has ld.global.b32 %0, [%1];\n}"
               : "=&r"(word)
               : "l"(address), "r"(otherwise));
  return word;
#else
  if (address != nullptr) __builtin_memcpy(&otherwise, address, sizeof(otherwise));
  return otherwise;
#endif
}

/// A parameter of requests: one value for each row, or one for all.
struct RowFloat {
  const float* data = nullptr;
  float value = 0.0f;

  ATTN_HD float operator[](int64_t row) const {
    return bits_float(load_or(data != nullptr ? data + row : nullptr, float_bits(value)));
  }
};

/// An integer whose words may still be on their way from memory.
struct PendingInt {
  int32_t low;
  int32_t high;
  bool is_int32;  // `high` says nothing

  ATTN_HD int64_t value() const {
    return static_cast<int64_t>(is_int32 ? low >> 31 : high) << 32 | static_cast<uint32_t>(low);
  }
};

struct RowInt {
  IndexArray array;
  int64_t value = 0;

  ATTN_HD PendingInt load(int64_t row) const {
    const int32_t* words = array ? static_cast<const int32_t*>(array.data) + (row << array.is_int64) : nullptr;
    const bool is_int64 = words == nullptr || array.is_int64 != 0;
    return PendingInt{static_cast<int32_t>(load_or(words, static_cast<uint32_t>(value))),
                      static_cast<int32_t>(load_or(words != nullptr && is_int64 ? words + 1 : nullptr,
                                                   static_cast<uint32_t>(static_cast<uint64_t>(value) >> 32))),
                      !is_int64};
  }

  ATTN_HD int64_t operator[](int64_t row) const { return load(row).value(); }
};

/// A launch's task for each row.
enum class RowTask : int32_t {
  kSample = 0,      // draw a token
  kRenorm = 1,      // write probabilities: softmax, renormalized survivors of top-k or top-p
  kMaskLogits = 2,  // write the values, with -inf where top-k removes them
  kSpeculate = 3,   // accept draft tokens, then draw
};

struct SamplingParams {
  const void* values;      // logits or probabilities, [batch, vocab]
  int64_t row_stride;      // elements
  IndexArray source_rows;  // [batch]: of probabilities, the row that each is drawn from; none: its own
  int32_t num_source_rows;
  const uint32_t* token_mask;  // [batch, ceil(vocab / 32)]: bit set, token allowed; nullptr: all are
  int64_t mask_stride;         // words
  RowFloat temperature;
  RowFloat top_p;
  RowFloat min_p;
  RowInt top_k;
  RowInt seed;
  RowInt position;
  void* token_ids;      // [batch], int32 or int64
  uint8_t* valid;       // [batch]
  float* logprobs;      // [batch] or nullptr
  float* top_logprobs;  // [batch, num_top_logprobs] or nullptr
  int32_t* top_token_ids;
  float* written;  // [batch, vocab]: what kRenorm and kMaskLogits write
  int64_t written_stride;
  // Messages between the CTAs of an unfiltered row, arbitrary before a launch; nullptr: no messages.
  void* workspace;
  // Chain speculative sampling: `values` are target_probs [batch, num_draft_tokens + 1, vocab], contiguous.
  const float* draft_probs;     // [batch, num_draft_tokens, vocab], contiguous
  const void* draft_token_ids;  // [batch, num_draft_tokens]
  int32_t* num_accepted;        // [batch]
  int32_t* num_passed;          // [batch]
  int32_t draft_ids_are_int64;
  int32_t num_draft_tokens;
  int32_t batch;
  int32_t vocab;
  int32_t num_top_logprobs;
  int32_t token_ids_are_int64;
  int32_t joint;              // filter order, see RowSettings
  int32_t tempered_logprobs;  // log-probabilities of logits / temperature instead of logits
  RowTask task;

  /// Where the probabilities of row `row` begin, in elements. A row that does not exist becomes the nearest that does.
  /// (Kernels of logits have no register left for it.)
  ATTN_HD int64_t row_offset(int64_t row) const {
    const int64_t source = source_rows ? clamp<int64_t>(source_rows[row], 0, num_source_rows - 1) : row;
    return source * row_stride;
  }
};

ATTN_HD void store_token(const SamplingParams& params, int64_t index, int64_t token) {
  if (params.token_ids_are_int64 != 0)
    static_cast<int64_t*>(params.token_ids)[index] = token;
  else
    static_cast<int32_t*>(params.token_ids)[index] = static_cast<int32_t>(token);
}

}  // namespace attn
