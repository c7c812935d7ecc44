// What rows are sampled from: logits of some element type, or probabilities.
//
// A warp takes a segment of kSegmentTokens at a time, lane l the tokens token(l, i), i < kLaneTokens. A source loads ahead (Raw) and converts later (values):
// float32, -inf for a token that cannot be drawn, so that whoever works with values knows nothing of masks, tails and element types.
#pragma once

#include "attn/sampling.h"

namespace attn {

constexpr int32_t kLaneTokens = kSegmentTokens / 32;

struct Float32Element {
  using Storage = float;
  static constexpr uint32_t kExcludedWord = 0xff800000u;

  __device__ __forceinline__ static float from_word(uint32_t word, int32_t) { return __uint_as_float(word); }
};

/// A probability: what lies behind the row's end has none.
struct ProbElement : Float32Element {
  static constexpr uint32_t kExcludedWord = 0;
};

struct BFloat16Element {
  using Storage = uint16_t;
  static constexpr uint32_t kExcludedWord = 0xff80ff80u;

  __device__ __forceinline__ static float from_word(uint32_t word, int32_t half) { return __uint_as_float(half != 0 ? word & 0xffff0000u : word << 16); }
};

struct Float16Element {
  using Storage = uint16_t;
  static constexpr uint32_t kExcludedWord = 0xfc00fc00u;

  __device__ __forceinline__ static float from_word(uint32_t word, int32_t half) {
    float x;
    asm("cvt.f32.f16 %0, %1;" : "=f"(x) : "h"(static_cast<uint16_t>(half != 0 ? word >> 16 : word)));
    return x;
  }
};

/// The words of one lane's tokens of a segment, as they are stored.
template <class Element>
struct RowReader {
  using Storage = typename Element::Storage;
  static constexpr int32_t kWordTokens = 4 / static_cast<int32_t>(sizeof(Storage));
  static constexpr int32_t kVectorTokens = 4 * kWordTokens;
  static constexpr int32_t kVectors = kLaneTokens / kVectorTokens;
  static constexpr int32_t kWords = kLaneTokens / kWordTokens;

  const Storage* row;
  int32_t vocab;
  bool aligned;

  __device__ __forceinline__ RowReader(const Storage* row, int32_t vocab) : row(row), vocab(vocab), aligned(reinterpret_cast<uint64_t>(row) % 16 == 0) {}

  /// First token of vector j of a lane.
  __device__ __forceinline__ static int32_t vector_token(int32_t segment, int32_t lane, int32_t j) {
    return segment * kSegmentTokens + (j * 32 + lane) * kVectorTokens;
  }

  __device__ __forceinline__ void load(int32_t segment, int32_t lane, uint32_t (&words)[kWords]) const {
    if (aligned && (segment + 1) * kSegmentTokens <= vocab) {
#pragma unroll
      for (int32_t j = 0; j < kVectors; ++j) {
        const uint4 vector = __ldg(reinterpret_cast<const uint4*>(row + vector_token(segment, lane, j)));
        words[4 * j] = vector.x;
        words[4 * j + 1] = vector.y;
        words[4 * j + 2] = vector.z;
        words[4 * j + 3] = vector.w;
      }
      return;
    }
#pragma unroll
    for (int32_t w = 0; w < kWords; ++w) {
      const int32_t token = vector_token(segment, lane, w / 4) + w % 4 * kWordTokens;
      uint32_t word = Element::kExcludedWord;
      if constexpr (kWordTokens == 1) {
        if (token < vocab) word = __float_as_uint(__ldg(row + token));
      } else {
        if (token < vocab) word = (word & 0xffff0000u) | __ldg(row + token);
        if (token + 1 < vocab) word = (word & 0x0000ffffu) | static_cast<uint32_t>(__ldg(row + token + 1)) << 16;
      }
      words[w] = word;
    }
  }

  __device__ __forceinline__ static float value(const uint32_t (&words)[kWords], int32_t i) { return Element::from_word(words[i / kWordTokens], i % kWordTokens); }

  /// One token's value; token < vocab.
  __device__ __forceinline__ float one(int32_t token) const {
    if constexpr (kWordTokens == 1) return __ldg(row + token);
    else return Element::from_word(__ldg(row + token), 0);
  }
};

/// The bits of one row of a token mask.
struct MaskReader {
  const uint32_t* words;

  __device__ __forceinline__ bool allows(int32_t token) const { return words == nullptr || (__ldg(words + (token >> 5)) >> (token & 31) & 1) != 0; }
};

/// A row of logits.
template <class Element>
struct LogitSource {
  using Weights = LogitWeights;
  using Reader = RowReader<Element>;

  struct Raw {
    uint32_t words[Reader::kWords];
    uint32_t allowed[Reader::kVectors];
  };

  Reader reader;
  MaskReader mask;

  __device__ __forceinline__ LogitSource(const SamplingParams& params, int64_t row)
      : reader(static_cast<const typename Element::Storage*>(params.values) + row * params.row_stride, params.vocab),
        mask{params.token_mask != nullptr ? params.token_mask + row * params.mask_stride : nullptr} {}

  __device__ __forceinline__ static int32_t token(int32_t segment, int32_t lane, int32_t i) {
    return Reader::vector_token(segment, lane, i / Reader::kVectorTokens) + i % Reader::kVectorTokens;
  }

  __device__ __forceinline__ void load(int32_t segment, int32_t lane, Raw& raw) const {
    reader.load(segment, lane, raw.words);
    if (mask.words == nullptr) return;
#pragma unroll
    for (int32_t j = 0; j < Reader::kVectors; ++j) {
      const int32_t first = Reader::vector_token(segment, lane, j);
      raw.allowed[j] = first < reader.vocab ? __ldg(mask.words + (first >> 5)) >> (first & 31) : 0;
    }
  }

  __device__ __forceinline__ void values(const Raw& raw, float (&v)[kLaneTokens]) const {
#pragma unroll
    for (int32_t i = 0; i < kLaneTokens; ++i) v[i] = Reader::value(raw.words, i);
    if (mask.words == nullptr) return;
#pragma unroll
    for (int32_t i = 0; i < kLaneTokens; ++i) {
      if ((raw.allowed[i / Reader::kVectorTokens] >> (i % Reader::kVectorTokens) & 1) == 0) v[i] = kMinusInfinity;
    }
  }

  __device__ __forceinline__ float one(int32_t token) const { return token < reader.vocab && mask.allows(token) ? reader.one(token) : kMinusInfinity; }
};

/// A row of probabilities, or of what a target gives beyond a draft.
template <bool kMayHaveDraft>
struct ProbSource {
  using Weights = ProbWeights;
  using Reader = RowReader<ProbElement>;

  struct Raw {
    uint32_t words[Reader::kWords];
    uint32_t draft[kMayHaveDraft ? Reader::kWords : 1];
  };

  Reader reader;
  const float* draft;

  __device__ __forceinline__ ProbSource(const float* row, const float* draft, int32_t vocab) : reader(row, vocab), draft(draft) {}
  __device__ __forceinline__ ProbSource(const SamplingParams& params, int64_t row)
      : ProbSource(static_cast<const float*>(params.values) + row * params.row_stride, nullptr, params.vocab) {}

  __device__ __forceinline__ static int32_t token(int32_t segment, int32_t lane, int32_t i) { return Reader::vector_token(segment, lane, i / 4) + i % 4; }

  __device__ __forceinline__ void load(int32_t segment, int32_t lane, Raw& raw) const {
    reader.load(segment, lane, raw.words);
    if constexpr (kMayHaveDraft) {
      if (draft != nullptr) Reader(draft, reader.vocab).load(segment, lane, raw.draft);
    }
  }

  __device__ __forceinline__ void values(const Raw& raw, float (&v)[kLaneTokens]) const {
#pragma unroll
    for (int32_t i = 0; i < kLaneTokens; ++i) v[i] = __uint_as_float(raw.words[i]);
    if constexpr (kMayHaveDraft) {
      if (draft != nullptr) {
#pragma unroll
        for (int32_t i = 0; i < kLaneTokens; ++i) v[i] = residual_prob(v[i], __uint_as_float(raw.draft[i]));
      }
    }
#pragma unroll
    for (int32_t i = 0; i < kLaneTokens; ++i) v[i] = prob_value(v[i]);
  }

  __device__ __forceinline__ float one(int32_t token) const {
    if (token >= reader.vocab) return kMinusInfinity;
    const float prob = reader.one(token);
    if constexpr (kMayHaveDraft) {
      if (draft != nullptr) return prob_value(residual_prob(prob, __ldg(draft + token)));
    }
    return prob_value(prob);
  }
};

}  // namespace attn
