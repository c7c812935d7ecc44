// What rows are sampled from: logits of some element type, or probabilities.
//
// A warp takes a segment of kSegmentTokens at a time, a lane kVectors vectors of 16 bytes of it. A source says what a
// vector holds: float32, -inf for a token that cannot be drawn, so that code that works with values knows nothing
// of masks, tails and element types.
#pragma once

#include "common/elements.cuh"
#include "common/ptx/copy.cuh"
#include "common/ptx/warp.cuh"
#include "sampling/sampling.h"

namespace attn {

constexpr int32_t kLaneTokens = kSegmentTokens / 32;

struct Float32Element {
  using Storage = float;
  static constexpr uint32_t kExcludedWord = 0xff800000u;

  __device__ __forceinline__ static float from_word(uint32_t word, int32_t) { return __uint_as_float(word); }
};

/// A probability; 0 beyond the end of the row.
struct ProbElement : Float32Element {
  static constexpr uint32_t kExcludedWord = 0;
};

/// A type of 16 bits; kExcluded: two elements of -infinity.
template <class Element, uint32_t kExcluded>
struct HalfElement {
  using Storage = uint16_t;
  static constexpr uint32_t kExcludedWord = kExcluded;

  __device__ __forceinline__ static float from_word(uint32_t word, int32_t half) {
    return Element::unpack(half != 0 ? word >> 16 : word);
  }
};
using BFloat16Element = HalfElement<BFloat16, 0xff80ff80u>;
using Float16Element = HalfElement<Float16, 0xfc00fc00u>;

/// Reads 16 bytes of a row at a time: a vector of kVectorTokens tokens.
template <class Element>
struct RowReader {
  using Storage = typename Element::Storage;
  static constexpr int32_t kWordTokens = 4 / static_cast<int32_t>(sizeof(Storage));
  static constexpr int32_t kVectorTokens = 4 * kWordTokens;
  static constexpr int32_t kVectors = kLaneTokens / kVectorTokens;

  const Storage* row;
  int32_t vocab;

  /// First token of vector j of a lane.
  __device__ __forceinline__ static int32_t vector_token(int32_t segment, int32_t lane, int32_t j) {
    return segment * kSegmentTokens + (j * 32 + lane) * kVectorTokens;
  }

  /// Whether vectors can be read at once up to that token.
  __device__ __forceinline__ bool reads_whole(int32_t end) const {
    return reinterpret_cast<uint64_t>(row) % 16 == 0 && end <= vocab;
  }

  /// The vector that begins with the token `first`.
  __device__ __forceinline__ uint4 load(int32_t first) const {
    if (reads_whole(first + kVectorTokens)) return __ldg(reinterpret_cast<const uint4*>(row + first));
    uint32_t words[4];
#pragma unroll
    for (int32_t w = 0; w < 4; ++w) {
      const int32_t token = first + w * kWordTokens;
      uint32_t word = Element::kExcludedWord;
      if constexpr (kWordTokens == 1) {
        if (token < vocab) word = __float_as_uint(__ldg(row + token));
      } else {
        if (token < vocab) word = (word & 0xffff0000u) | __ldg(row + token);
        if (token + 1 < vocab) word = (word & 0x0000ffffu) | static_cast<uint32_t>(__ldg(row + token + 1)) << 16;
      }
      words[w] = word;
    }
    return make_uint4(words[0], words[1], words[2], words[3]);
  }

  __device__ __forceinline__ static float value(const uint4& vector, int32_t i) {
    const int32_t w = i / kWordTokens;
    return Element::from_word(w == 0 ? vector.x : w == 1 ? vector.y : w == 2 ? vector.z : vector.w, i % kWordTokens);
  }

  /// One token's value; token < vocab.
  __device__ __forceinline__ float one(int32_t token) const {
    if constexpr (kWordTokens == 1)
      return __ldg(row + token);
    else
      return Element::from_word(__ldg(row + token), 0);
  }
};

/// A row of logits. A mask may allow only some of its tokens.
template <class Element, bool kMasked>
struct LogitSource {
  using Weights = LogitWeights;
  using Reader = RowReader<Element>;
  static constexpr int32_t kVectors = Reader::kVectors;
  static constexpr int32_t kVectorTokens = Reader::kVectorTokens;
  static constexpr bool kHasDraft = false;

  Reader reader;
  const uint32_t* mask;

  __device__ __forceinline__ LogitSource(const SamplingParams& params, int64_t row)
      : reader{static_cast<const typename Element::Storage*>(params.values) + row * params.row_stride, params.vocab},
        mask(kMasked ? params.token_mask + row * params.mask_stride : nullptr) {}

  /// The values of the vector that begins with the token `first` holds.
  __device__ __forceinline__ void values(int32_t first, const uint4& vector, float* v) const {
    uint32_t allowed = 0xffffffffu;
    if constexpr (kMasked) allowed = first < reader.vocab ? __ldg(mask + (first >> 5)) >> (first & 31) : 0;
#pragma unroll
    for (int32_t i = 0; i < kVectorTokens; ++i)
      v[i] = (allowed >> i & 1) != 0 ? Reader::value(vector, i) : kMinusInfinity;
  }

  __device__ __forceinline__ float one(int32_t token) const {
    if (token >= reader.vocab) return kMinusInfinity;
    if (kMasked && (__ldg(mask + (token >> 5)) >> (token & 31) & 1) == 0) return kMinusInfinity;
    return reader.one(token);
  }
};

/// A row of probabilities, or of what a target gives beyond a draft.
template <bool kMayHaveDraft>
struct ProbSource {
  using Weights = ProbWeights;
  using Reader = RowReader<ProbElement>;
  static constexpr int32_t kVectors = Reader::kVectors;
  static constexpr int32_t kVectorTokens = Reader::kVectorTokens;
  static constexpr bool kHasDraft = kMayHaveDraft;

  Reader reader;
  const float* draft;

  __device__ __forceinline__ ProbSource(const float* row, const float* draft, int32_t vocab)
      : reader{row, vocab}, draft(draft) {}
  __device__ __forceinline__ ProbSource(const SamplingParams& params, int64_t row)
      : ProbSource(static_cast<const float*>(params.values) + params.row_offset(row), nullptr, params.vocab) {}

  __device__ __forceinline__ void values(int32_t first, const uint4& vector, float* v) const {
    const bool has_draft = kMayHaveDraft && draft != nullptr;
    uint4 draft_values{};
    if (has_draft) draft_values = Reader{draft, reader.vocab}.load(first);
#pragma unroll
    for (int32_t i = 0; i < kVectorTokens; ++i) {
      const float prob = Reader::value(vector, i);
      v[i] = prob_value(has_draft ? residual_prob(prob, Reader::value(draft_values, i)) : prob);
    }
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

/// Token i of this lane in a segment, i < kLaneTokens.
template <class Source>
__device__ __forceinline__ int32_t lane_token(int32_t segment, int32_t i) {
  return Source::Reader::vector_token(segment, ptx::lane_id(), i / Source::kVectorTokens) + i % Source::kVectorTokens;
}

/// This lane's values of a segment, outside of a SegmentReader.
template <class Source>
__device__ __forceinline__ void load_values(const Source& source, int32_t segment, float (&v)[kLaneTokens]) {
  uint4 vectors[Source::kVectors];
#pragma unroll
  for (int32_t j = 0; j < Source::kVectors; ++j)
    vectors[j] = source.reader.load(Source::Reader::vector_token(segment, ptx::lane_id(), j));
#pragma unroll
  for (int32_t j = 0; j < Source::kVectors; ++j)
    source.values(Source::Reader::vector_token(segment, ptx::lane_id(), j), vectors[j], v + j * Source::kVectorTokens);
}

/// Reads those segments of a row that are a warp's: `first` and every `step`-th after it. Each lane copies what it
/// reads itself to shared memory: two segments are on their way while one is worked on, and no registers are left.
template <class Source>
struct SegmentReader {
  static constexpr int32_t kAhead = 2;
  using Staged = uint4[kAhead][4][kSamplingThreads];

  const Source& source;
  Staged& staged;
  int32_t vocab, first, step;

  __device__ __forceinline__ int32_t num_segments() const { return ceil_div(vocab, kSegmentTokens); }

  /// Starts to load the first segments. Called before each for_each(), some time before if possible.
  __device__ __forceinline__ void start() const {
#pragma unroll 1
    for (int32_t i = 0; i < kAhead; ++i) stage(first + i * step, i);
  }

  /// meanwhile(segment) while the segment is on its way, then body(segment, values).
  template <class Meanwhile, class Body>
  __device__ __forceinline__ void for_each(const Meanwhile& meanwhile, const Body& body) const {
    int32_t slot = 0;
#pragma unroll 1
    for (int32_t segment = first; segment < num_segments(); segment += step) {
      meanwhile(segment);
      ptx::cp_async_wait<kAhead - 1>();
      float v[kLaneTokens];
#pragma unroll
      for (int32_t j = 0; j < Source::kVectors; ++j) {
        const uint4 vector =
            is_staged(segment, j) ? staged[slot][j][threadIdx.x] : source.reader.load(token(segment, j));
        source.values(token(segment, j), vector, v + j * Source::kVectorTokens);
      }
      stage(segment + kAhead * step, slot);
      slot ^= 1;
      body(segment, v);
    }
  }

  template <class Body>
  __device__ __forceinline__ void for_each(const Body& body) const {
    for_each([](int32_t) {}, body);
  }

  /// This lane's values of a segment that was read: the last ones are still in shared memory.
  __device__ __forceinline__ void load_again(int32_t round, float (&v)[kLaneTokens]) const {
    const int32_t segment = first + round * step;
    const bool is_there = segment + kAhead * step >= num_segments();
#pragma unroll
    for (int32_t j = 0; j < Source::kVectors; ++j) {
      const uint4 vector = is_there && is_staged(segment, j) ? staged[round % kAhead][j][threadIdx.x]
                                                             : source.reader.load(token(segment, j));
      source.values(token(segment, j), vector, v + j * Source::kVectorTokens);
    }
  }

 private:
  __device__ __forceinline__ static int32_t token(int32_t segment, int32_t j) {
    return Source::Reader::vector_token(segment, ptx::lane_id(), j);
  }

  __device__ __forceinline__ bool is_staged(int32_t segment, int32_t j) const {
    return !Source::kHasDraft && source.reader.reads_whole(token(segment, j) + Source::kVectorTokens);
  }

  __device__ __forceinline__ void stage(int32_t segment, int32_t slot) const {
#pragma unroll
    for (int32_t j = 0; j < Source::kVectors; ++j) {
      if (is_staged(segment, j))
        ptx::cp_async_16(ptx::shared_address(&staged[slot][j][threadIdx.x]), source.reader.row + token(segment, j));
    }
    ptx::cp_async_commit();
  }
};

/// v[i]; registers have no index.
template <class T, int32_t kCount>
__device__ __forceinline__ T pick(const T (&v)[kCount], int32_t i) {
  T picked = v[0];
#pragma unroll
  for (int32_t j = 1; j < kCount; ++j) picked = i == j ? v[j] : picked;
  return picked;
}

/// The key of the largest value. A NaN's key is above all others (max_nan gives the positive one).
__device__ __forceinline__ uint32_t lane_max_key(const float (&v)[kLaneTokens]) {
  float most = v[0];
#pragma unroll
  for (int32_t i = 1; i < kLaneTokens; ++i) most = ptx::max_nan(most, v[i]);
  return order_key(most);
}

__device__ __forceinline__ bool is_drawable(uint32_t key) { return key > kExcludedKey && key < kInfiniteKey; }

/// The token of a row that cannot be sampled: the first that the mask allows, or 0. Called by a warp.
__device__ __forceinline__ int32_t first_allowed(const SamplingParams& params, int32_t row) {
  uint32_t first = 0xffffffffu;
  if (params.token_mask != nullptr) {
    const uint32_t* words = params.token_mask + static_cast<int64_t>(row) * params.mask_stride;
#pragma unroll 1
    for (int32_t w = ptx::lane_id(); w < ceil_div(params.vocab, 32) && first == 0xffffffffu; w += 32) {
      const int32_t rest = params.vocab - 32 * w;
      const uint32_t bits = __ldg(words + w) & (rest >= 32 ? 0xffffffffu : (1u << rest) - 1);
      if (bits != 0) first = static_cast<uint32_t>(32 * w + __ffs(static_cast<int32_t>(bits)) - 1);
    }
  }
  first = ptx::warp_min(first);
  return first == 0xffffffffu ? 0 : static_cast<int32_t>(first);
}

}  // namespace attn
