// Vectors of floats in the compiler's vector types. On x86-64 a vector of 4 floats is an SSE2 register.
#pragma once

#include "common/cpu/elements.h"

namespace attn::cpu {

/// What vectors of every instruction set have. + and * are the compiler's. The types: vectors of kWidth float, uint32_t
/// and uint16_t.
template <class Float_, class Word_, class Short>
struct VectorOf {
  using Float = Float_;
  using Word = Word_;
  static constexpr int kWidth = sizeof(Float) / sizeof(float);

  ATTN_HD static Float zero() { return Float{}; }
  ATTN_HD static Float splat(float x) { return x - Float{}; }
  ATTN_HD static Float load(const float* p) { return load_bits<Float>(p); }
  ATTN_HD static void store(float* p, Float x) { __builtin_memcpy(p, &x, sizeof(x)); }

  /// 2^x for x <= 127, relative error about 1e-7; 0 below the range of normal floats; NaN stays NaN.
  ATTN_HD static Float exp2(Float x) {
    const Float lowest = splat(-126.0f);
    const auto underflows = x < lowest;
    x = underflows ? lowest : x;
    const Float magic = splat(12582912.0f);  // 1.5 * 2^23: adding it rounds to an integer, which stands in the low bits
    const Float shifted = x + magic;
    const Word exponent = (reinterpret_cast<Word>(shifted) - reinterpret_cast<Word>(magic) + 127u) << 23;
    const Float y = power(x - (shifted - magic)) * reinterpret_cast<Float>(exponent);
    return underflows ? zero() : y;
  }

  // Elements at p. Their number may be less than kWidth only where heads are not whole vectors (AVX-512).
  ATTN_HD static Float load_elements(const float* p, int) { return load(p); }
  ATTN_HD static Float load_elements(const BFloat16* p, int) {
    return low_elements(__builtin_convertvector(load_bits<Short>(p), Word), BFloat16{});
  }

  // Rounds to nearest even.
  ATTN_HD static void store_elements(float* p, Float x, int) { store(p, x); }
  ATTN_HD static void store_elements(BFloat16* p, Float x, int) {
    const Short bits = __builtin_convertvector(bfloat16_bits(x), Short);
    __builtin_memcpy(p, &bits, sizeof(bits));
  }

  // The two elements of each word, or the word itself.
  ATTN_HD static Float as_float(Word w) { return reinterpret_cast<Float>(w); }
  ATTN_HD static Float low_elements(Word w, BFloat16) { return reinterpret_cast<Float>(w << 16); }
  ATTN_HD static Float high_elements(Word w, BFloat16) { return reinterpret_cast<Float>(w & 0xffff0000u); }

 protected:
  /// 2^f for f in [-0.5, 0.5].
  ATTN_HD static Float power(Float f) {
    Float y = splat(0.00015345810970757157f);
    y = y * f + splat(0.0013399930903688073f);
    y = y * f + splat(0.009618489071726799f);
    y = y * f + splat(0.05550328642129898f);
    y = y * f + splat(0.24022646248340607f);
    y = y * f + splat(0.6931471824645996f);
    return y * f + splat(1.0f);
  }

  /// Rounded to nearest even, in the lower half of each word.
  ATTN_HD static Word bfloat16_bits(Float x) {
    const Word bits = reinterpret_cast<Word>(x);
    const Word rounded = (bits + (bits >> 16 & 1u) + 0x7fffu) >> 16;
    return x == x ? rounded : Word{} + 0x7fc0u;
  }

 private:
  template <class Bits>
  ATTN_HD static Bits load_bits(const void* p) {
    Bits bits;
    __builtin_memcpy(&bits, p, sizeof(bits));
    return bits;
  }
};

typedef float Floats4 __attribute__((vector_size(16)));
typedef uint32_t Words4 __attribute__((vector_size(16)));
typedef uint16_t Shorts4 __attribute__((vector_size(8)));

struct Baseline : VectorOf<Floats4, Words4, Shorts4> {
  static constexpr int kMicroRows = 3;
  static constexpr int kMicroVectors = 4;
  static constexpr int kPanelRows = 12;

  ATTN_HD static Float max(Float a, Float b) { return a > b ? a : b; }
  ATTN_HD static Float fma(Float a, Float b, Float c) { return a * b + c; }
  ATTN_HD static float reduce_add(Float x) { return (x[0] + x[2]) + (x[1] + x[3]); }
  ATTN_HD static float reduce_max(Float x) {
    const float even = x[0] > x[2] ? x[0] : x[2];
    const float odd = x[1] > x[3] ? x[1] : x[3];
    return even > odd ? even : odd;
  }

  using VectorOf::load_elements;
  ATTN_HD static Float load_elements(const Half* p, int) {
    return Float{to_float(p[0]), to_float(p[1]), to_float(p[2]), to_float(p[3])};
  }

  using VectorOf::store_elements;
  ATTN_HD static void store_elements(Half* p, Float x, int) {
    for (int i = 0; i < kWidth; ++i) from_float(x[i], p[i]);
  }

  using VectorOf::low_elements, VectorOf::high_elements;
  ATTN_HD static Float low_elements(Word w, Half) {
    return Float{half_to_float(w[0]), half_to_float(w[1]), half_to_float(w[2]), half_to_float(w[3])};
  }
  ATTN_HD static Float high_elements(Word w, Half) { return low_elements(w >> 16, Half{}); }

  /// out[i] has word i of each of the kWidth rows. A row's bytes are a multiple of 16, so all words exist.
  ATTN_HD static void transpose_words(const char* const* rows, int64_t byte_offset, int, Word* out) {
    Word a[4];
    for (int i = 0; i < 4; ++i) __builtin_memcpy(&a[i], rows[i] + byte_offset, sizeof(Word));
    for (int i = 0; i < 4; ++i) out[i] = Word{a[0][i], a[1][i], a[2][i], a[3][i]};
  }
};

}  // namespace attn::cpu
