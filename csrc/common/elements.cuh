// The element types of the tensor-core kernels.
#pragma once

#include "common/data_type.h"
#include "common/platform.h"
#include "common/ptx/math.cuh"
#include "common/ptx/mma.cuh"
#include "common/ptx/types.cuh"

namespace attn {

struct BFloat16 {
  static constexpr DataType kType = DataType::kBFloat16;
  static constexpr int kBytes = 2;
  static constexpr ptx::MmaType kMmaType = ptx::MmaType::kBFloat16;
  __device__ __forceinline__ static uint32_t pack(float low, float high) { return ptx::pack_bf16(low, high); }
  /// The element in the lower 16 bits.
  __device__ __forceinline__ static float unpack(uint32_t pair) { return __uint_as_float(pair << 16); }
  __device__ __forceinline__ static void mma(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
    ptx::mma_bf16(c, a, b0, b1);
  }
};

struct Float16 {
  static constexpr DataType kType = DataType::kFloat16;
  static constexpr int kBytes = 2;
  static constexpr ptx::MmaType kMmaType = ptx::MmaType::kFloat16;
  __device__ __forceinline__ static uint32_t pack(float low, float high) { return ptx::pack_f16(low, high); }
  __device__ __forceinline__ static float unpack(uint32_t pair) {
    return ptx::float_of_f16(static_cast<uint16_t>(pair));
  }
  __device__ __forceinline__ static void mma(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
    ptx::mma_f16(c, a, b0, b1);
  }
};

/// As pack(), but what is beyond the largest float16 becomes that one, not infinity: a product with it would be NaN.
template <class Element>
__device__ __forceinline__ uint32_t pack_finite(float low, float high) {
  const uint32_t pair = Element::pack(low, high);
  if constexpr (is_same<Element, Float16>) return ptx::finite_f16(pair);
  return pair;
}

/// Two elements of one 16-bit type as two of another.
template <class Element, class Other>
__device__ __forceinline__ uint32_t converted(uint32_t pair) {
  return pack_finite<Element>(Other::unpack(pair), Other::unpack(pair >> 16));
}

template <class Element, class Other>
__device__ __forceinline__ uint4 converted(const uint4& pairs) {
  return make_uint4(converted<Element, Other>(pairs.x), converted<Element, Other>(pairs.y),
                    converted<Element, Other>(pairs.z), converted<Element, Other>(pairs.w));
}

/// Of a cache's type whose elements are bytes. A byte of 4-bit types has two columns.
template <DataType kType_>
struct ByteElement {
  static constexpr DataType kType = kType_;
  static constexpr int kBytes = 1;
  static constexpr bool kRowsHaveScales = false;
};

// 8-bit types: four elements a word, which are dequantized before they are multiplied. to_f16() makes pair number i of
// a word, (0, 1) or (2, 3), to_f16_apart() of the pairs (0, 2) and (1, 3).

struct Float8E4M3 : ByteElement<DataType::kFloat8E4M3> {
  __device__ __forceinline__ static uint32_t to_f16(uint32_t word, int i) {
    return ptx::f16_of_e4m3(static_cast<uint16_t>(word >> 16 * i));
  }
  __device__ __forceinline__ static uint32_t to_f16_apart(uint32_t word, int i) {
    return to_f16(__byte_perm(word, 0, 0x3120), i);
  }
  /// In the lower 16 bits; larger numbers become the largest one.
  __device__ __forceinline__ static uint32_t pack(float low, float high) { return ptx::pack_e4m3(low, high); }
};

struct Float8E5M2 : ByteElement<DataType::kFloat8E5M2> {
  __device__ __forceinline__ static uint32_t to_f16(uint32_t word, int i) {
    return ptx::f16_of_e5m2(static_cast<uint16_t>(word >> 16 * i));
  }
  __device__ __forceinline__ static uint32_t to_f16_apart(uint32_t word, int i) {
    return to_f16(__byte_perm(word, 0, 0x3120), i);
  }
};

struct Int8 : ByteElement<DataType::kInt8> {
  /// f16 numbers 1024 + 128. With a byte as their last eight bits, they are 1024 + byte.
  static constexpr uint32_t kOffset = 0x64806480u;
  __device__ __forceinline__ static uint32_t to_f16(uint32_t word, int i) {
    return ptx::sub_f16(__byte_perm(word ^ 0x80808080u, 0x64, i == 0 ? 0x4140 : 0x4342), kOffset);
  }
  __device__ __forceinline__ static uint32_t to_f16_apart(uint32_t word, int i) {
    const uint32_t biased = i == 0 ? (word & 0x00ff00ffu) ^ kOffset : __byte_perm(word, 0x64, 0x4341) ^ 0x00800080u;
    return ptx::sub_f16(biased, kOffset);
  }
};

// 4-bit types: two columns in a byte, the lower half first. dequantize() makes eight numbers of word number
// `word_number` of a row. `scale_word`: of its TokenScales; over scales of blocks, their word number word_number / 8.
// `factor`: multiplies these.

/// Numbers from 0 to 15, with a zero point in each of the TokenScales (Int4Scale).
struct Int4 : ByteElement<DataType::kInt4> {
  template <class Element>
  __device__ __forceinline__ static uint4 dequantize(uint32_t word, int /*word_number*/, uint32_t scale_word,
                                                     float /*factor*/) {
    const float scale = __uint_as_float(scale_word & ~15u);
    const uint32_t zero_points = (scale_word & 15u) * 0x10001u | 0x64006400u;  // twice 1024 more than it, in f16
    float values[8];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const uint32_t pair = ptx::sub_f16((word >> 4 * i & 0x000f000fu) | 0x64006400u, zero_points);
      values[i] = Float16::unpack(pair) * scale;
      values[i + 4] = Float16::unpack(pair >> 16) * scale;
    }
    return make_uint4(Element::pack(values[0], values[1]), Element::pack(values[2], values[3]),
                      Element::pack(values[4], values[5]), Element::pack(values[6], values[7]));
  }
};

/// e2m1 numbers. Format::scale(): scale number i of a word.
template <class Format, DataType kType>
struct E2M1 : ByteElement<kType> {
  template <class Element>
  __device__ __forceinline__ static uint4 dequantize(uint32_t word, int word_number, uint32_t scale_word,
                                                     float factor) {
    constexpr float kBias = 16384.0f;  // the product with it corrects the exponents, of subnormal numbers, too
    const float scale = Format::scale(scale_word, word_number / 2 % 4) * factor;
    float values[8];
#pragma unroll
    for (int i = 0; i < 4; ++i) {  // numbers i and i + 4, moved to where an f16 has sign, exponent and mantissa
      const uint32_t magnitudes = i < 3 ? word << (9 - 4 * i) : word >> 3;
      const uint32_t pair = (word << (12 - 4 * i) & 0x80008000u) | (magnitudes & 0x0e000e00u);
      values[i] = Float16::unpack(pair) * (scale * kBias);
      values[i + 4] = Float16::unpack(pair >> 16) * (scale * kBias);
    }
    // The largest number of a block may be rounded up, beyond float16.
    return make_uint4(pack_finite<Element>(values[0], values[1]), pack_finite<Element>(values[2], values[3]),
                      pack_finite<Element>(values[4], values[5]), pack_finite<Element>(values[6], values[7]));
  }
};

/// Blocks have an e4m3 scale.
struct NvFp4 : E2M1<NvFp4, DataType::kNvFp4> {
  __device__ __forceinline__ static float scale(uint32_t word, int i) {
    return Float16::unpack(ptx::f16_of_e4m3(static_cast<uint16_t>(word >> 8 * i)));
  }
};

/// Blocks have a power of 2 as their scale, stored as its exponent (e8m0).
struct MxFp4 : E2M1<MxFp4, DataType::kMxFp4> {
  __device__ __forceinline__ static float scale(uint32_t word, int i) {
    return __uint_as_float((word >> 8 * i & 0xffu) << 23);
  }
};

/// K and V of different types.
template <DataType kType_, class K, class V>
struct StoredPair : ByteElement<kType_> {
  static_assert(side_type(kType_, false) == K::kType && side_type(kType_, true) == V::kType);
};
using Int8NvFp4 = StoredPair<DataType::kInt8NvFp4, Int8, NvFp4>;

template <class Stored, bool kIsV>
struct Side {
  using Type = Stored;
};
template <DataType kType, class K, class V, bool kIsV>
struct Side<StoredPair<kType, K, V>, kIsV> {
  using Type = typename Conditional<kIsV, V, K>::Type;
};
/// The type of K or of V in a cache of type Stored.
template <class Stored, bool kIsV>
using SideElement = typename Side<Stored, kIsV>::Type;
template <class Stored>
constexpr bool kIsPair = !is_same<SideElement<Stored, false>, SideElement<Stored, true>>;

/// Calls body(SideElement{}), of K or of V.
template <class Stored, class Body>
__device__ __forceinline__ void with_side(bool is_v, const Body& body) {
  if constexpr (!kIsPair<Stored>) {
    body(Stored{});
  } else if (is_v) {
    body(SideElement<Stored, true>{});
  } else {
    body(SideElement<Stored, false>{});
  }
}

template <class Element>
constexpr bool kHas4Bits = has_4_bits(Element::kType);

/// Bytes of a stored row of 8-bit or 4-bit numbers; elements of a row of any other type.
template <class Element>
ATTN_HD constexpr int stored_columns(int columns) {
  return stored_columns(columns, Element::kType);
}

/// The e4m3 numbers in rows that hold more than elements (cache/kv_cache.h).
struct ScaledLatent : Float8E4M3 {
  static constexpr bool kRowsHaveScales = true;
};

/// Stores four neighboring elements.
template <class Element>
__device__ __forceinline__ void store_four(char* to, const float (&values)[4]) {
  const uint32_t low = Element::pack(values[0], values[1]), high = Element::pack(values[2], values[3]);
  if constexpr (Element::kBytes == 1) {
    *reinterpret_cast<uint32_t*>(to) = low | high << 16;
  } else {
    *reinterpret_cast<uint2*>(to) = make_uint2(low, high);
  }
}

/// The elements of a word of a cache as two pairs of Element: (0, 1) and (2, 3).
template <class Element, class KvElement>
__device__ __forceinline__ void dequantize(uint32_t word, uint32_t (&pairs)[2]) {
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    pairs[i] = KvElement::to_f16(word, i);
    if constexpr (!is_same<Element, Float16>)
      pairs[i] = Element::pack(Float16::unpack(pairs[i]), Float16::unpack(pairs[i] >> 16));
  }
}

/// Eight elements as Element.
template <class Element, class KvElement>
__device__ __forceinline__ uint4 dequantize_eight(const uint2& narrow) {
  uint32_t low[2], high[2];
  dequantize<Element, KvElement>(narrow.x, low);
  dequantize<Element, KvElement>(narrow.y, high);
  return make_uint4(low[0], low[1], high[0], high[1]);
}

/// The same, times `scale`.
template <class Element, class KvElement>
__device__ __forceinline__ uint4 dequantize_eight(const uint2& narrow, float scale) {
  uint32_t pairs[2][2];
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    uint32_t& pair = pairs[i / 2][i % 2];
    pair = KvElement::to_f16(i / 2 == 0 ? narrow.x : narrow.y, i % 2);
    pair = Element::pack(Float16::unpack(pair) * scale, Float16::unpack(pair >> 16) * scale);
  }
  return make_uint4(pairs[0][0], pairs[0][1], pairs[1][0], pairs[1][1]);
}

/// The elements of a word as pairs (0, 2) and (1, 3).
template <class Element, class KvElement>
__device__ __forceinline__ void dequantize_apart(uint32_t word, uint32_t (&pairs)[2]) {
  if constexpr (is_same<Element, Float16>) {
    pairs[0] = KvElement::to_f16_apart(word, 0);
    pairs[1] = KvElement::to_f16_apart(word, 1);
  } else {
    const uint32_t first = KvElement::to_f16(word, 0), second = KvElement::to_f16(word, 1);
    pairs[0] = Element::pack(Float16::unpack(first), Float16::unpack(second));
    pairs[1] = Element::pack(Float16::unpack(first >> 16), Float16::unpack(second >> 16));
  }
}

__device__ __forceinline__ float minus_infinity() { return __int_as_float(0xff800000); }

}  // namespace attn
