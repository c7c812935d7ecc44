// What rows are sampled from: logits of some element type, or probabilities.
//
// A warp takes a segment of kSegmentTokens at a time, a lane kVectors vectors of it. A source says what a
// vector holds: float32, -inf for a token that cannot be drawn, so that code that works with values knows nothing
// of masks, tails and element types.
#pragma once

#include "common/ptx/cp_async.cuh"
#include "common/ptx/math.cuh"
#include "common/ptx/special_registers.cuh"
#include "common/ptx/warp.cuh"
#include "sampling/sampling.h"

namespace attn {

constexpr int32_t kLaneTokens = kSegmentTokens / 32;
constexpr int32_t kVectorTokens = 4;
constexpr int32_t kVectors = kLaneTokens / kVectorTokens;

struct Float32Element {
  using Storage = float;
  using Vector = uint4;  // kVectorTokens of them
  static constexpr float kExcluded = kMinusInfinity;

  __device__ __forceinline__ static float to_float(float x) { return x; }
};

/// A probability; 0 beyond the end of the row.
struct ProbElement : Float32Element {
  static constexpr float kExcluded = 0.0f;
};

struct BFloat16Element {
  using Storage = uint16_t;
  using Vector = uint2;
  static constexpr uint16_t kExcluded = 0xff80;

  __device__ __forceinline__ static float to_float(uint16_t bits) { return bits_float(uint32_t{bits} << 16); }
};

struct Float16Element {
  using Storage = uint16_t;
  using Vector = uint2;
  static constexpr uint16_t kExcluded = 0xfc00;

  __device__ __forceinline__ static float to_float(uint16_t bits) { return ptx::float_of_f16(bits); }
};

/// First token of vector j of this lane in a segment.
__device__ __forceinline__ int32_t vector_token(int32_t segment, int32_t j) {
  return segment * kSegmentTokens + (j * 32 + ptx::lane_id()) * kVectorTokens;
}

/// Token i of this lane in a segment, i < kLaneTokens.
__device__ __forceinline__ int32_t lane_token(int32_t segment, int32_t i) {
  return vector_token(segment, i / kVectorTokens) + i % kVectorTokens;
}

/// Reads kVectorTokens tokens of a row at a time.
template <class Element>
struct RowReader {
  using Storage = typename Element::Storage;
  using Vector = typename Element::Vector;

  const Storage* row;
  int32_t vocab;

  /// Whether the vector that begins with the token `first` can be read at once.
  __device__ __forceinline__ bool reads_whole(int32_t first) const {
    return reinterpret_cast<uint64_t>(row) % sizeof(Vector) == 0 && first + kVectorTokens <= vocab;
  }

  __device__ __forceinline__ Vector load(int32_t first) const {
    if (reads_whole(first)) return __ldg(reinterpret_cast<const Vector*>(row + first));
    Storage elements[kVectorTokens];
#pragma unroll
    for (int32_t i = 0; i < kVectorTokens; ++i) {
      const int32_t token = first + i;
      Storage element = Element::kExcluded;
      if (token < vocab) element = __ldg(row + token);
      elements[i] = element;
    }
    Vector vector;
    memcpy(&vector, elements, sizeof(vector));
    return vector;
  }

  __device__ __forceinline__ static float value(const Vector& vector, int32_t i) {
    Storage elements[kVectorTokens];
    memcpy(elements, &vector, sizeof(vector));
    return Element::to_float(elements[i]);
  }

  /// One token's value; token < vocab.
  __device__ __forceinline__ float one(int32_t token) const { return Element::to_float(__ldg(row + token)); }
};

/// A row of logits, of whose tokens a mask may allow some only.
template <class Element, bool kMasked>
struct LogitSource {
  using Weights = LogitWeights;
  using Reader = RowReader<Element>;
  using Vector = typename Reader::Vector;
  static constexpr bool kHasDraft = false;

  Reader reader;
  const uint32_t* mask;

  __device__ __forceinline__ LogitSource(const SamplingParams& params, int64_t row)
      : reader{static_cast<const typename Element::Storage*>(params.values) + row * params.row_stride, params.vocab},
        mask(kMasked ? params.token_mask + row * params.mask_stride : nullptr) {}

  /// What the vector that begins with the token `first` holds.
  __device__ __forceinline__ void values(int32_t first, const Vector& vector, float* v) const {
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
  using Vector = typename Reader::Vector;
  static constexpr bool kHasDraft = kMayHaveDraft;

  Reader reader;
  const float* draft;

  __device__ __forceinline__ ProbSource(const float* row, const float* draft, int32_t vocab)
      : reader{row, vocab}, draft(draft) {}
  __device__ __forceinline__ ProbSource(const SamplingParams& params, int64_t row)
      : ProbSource(static_cast<const float*>(params.values) + params.row_offset(row), nullptr, params.vocab) {}

  __device__ __forceinline__ void values(int32_t first, const Vector& vector, float* v) const {
    const bool has_draft = kMayHaveDraft && draft != nullptr;
    Vector of_draft{};
    if (has_draft) of_draft = Reader{draft, reader.vocab}.load(first);
#pragma unroll
    for (int32_t i = 0; i < kVectorTokens; ++i) {
      const float prob = Reader::value(vector, i);
      v[i] = prob_value(has_draft ? residual_prob(prob, Reader::value(of_draft, i)) : prob);
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

/// Reads those segments of a row that are a warp's: `first` and every `step`-th after it. Each lane copies what it
/// reads itself to shared memory: two segments are on their way while one is worked on, and no registers are left.
template <class Source>
struct SegmentReader {
  static constexpr int32_t kAhead = 2;
  using Vector = typename Source::Vector;
  using Staged = uint4[kAhead][kVectors][kSamplingThreads];  // a vector has 16 bytes or less

  const Source& source;
  Staged& staged;
  int32_t vocab, first, step;

  __device__ __forceinline__ int32_t num_segments() const { return ceil_div(vocab, kSegmentTokens); }

  /// Has the first segments on their way: before each for_each(), some time if possible.
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
      take(segment, slot, true, v);
      stage(segment + kAhead * step, slot);
      slot ^= 1;
      body(segment, v);
    }
  }

  template <class Body>
  __device__ __forceinline__ void for_each(const Body& body) const {
    for_each([](int32_t) {}, body);
  }

  /// What this lane has of any segment.
  __device__ __forceinline__ void load(int32_t segment, float (&v)[kLaneTokens]) const { take(segment, 0, false, v); }

  /// What this lane has of a segment that was read: the last ones are still in shared memory.
  __device__ __forceinline__ void load_again(int32_t round, float (&v)[kLaneTokens]) const {
    const int32_t segment = first + round * step;
    take(segment, round % kAhead, segment + kAhead * step >= num_segments(), v);
  }

 private:
  __device__ __forceinline__ bool is_staged(int32_t first_token) const {
    return !Source::kHasDraft && source.reader.reads_whole(first_token);
  }

  __device__ __forceinline__ Vector* place(int32_t slot, int32_t j) const {
    return reinterpret_cast<Vector*>(&staged[slot][j][threadIdx.x]);
  }

  __device__ __forceinline__ void stage(int32_t segment, int32_t slot) const {
#pragma unroll
    for (int32_t j = 0; j < kVectors; ++j) {
      const int32_t token = vector_token(segment, j);
      if (!is_staged(token)) continue;
      const uint32_t to = ptx::shared_address(place(slot, j));
      if constexpr (sizeof(Vector) == 16)
        ptx::cp_async_16(to, source.reader.row + token);
      else
        ptx::cp_async_8_or_zero(to, source.reader.row + token, true);
    }
    ptx::cp_async_commit();
  }

  /// What this lane has of a segment, from its slot if it is there.
  __device__ __forceinline__ void take(int32_t segment, int32_t slot, bool is_there, float (&v)[kLaneTokens]) const {
#pragma unroll
    for (int32_t j = 0; j < kVectors; ++j) {
      const int32_t token = vector_token(segment, j);
      const Vector vector = is_there && is_staged(token) ? *place(slot, j) : source.reader.load(token);
      source.values(token, vector, v + j * kVectorTokens);
    }
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

/// Of the largest value; a NaN's is above all others (max_nan gives the positive one).
__device__ __forceinline__ uint32_t lane_max_key(const float (&v)[kLaneTokens]) {
  float most = v[0];
#pragma unroll
  for (int32_t i = 1; i < kLaneTokens; ++i) most = ptx::max_nan(most, v[i]);
  return order_key(most);
}

__device__ __forceinline__ bool is_drawable(uint32_t key) { return key > kExcludedKey && key < kInfiniteKey; }

/// The first token that the mask allows, or 0: of a row that cannot be sampled. For a warp.
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
