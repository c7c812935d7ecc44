// Vectors of 4 floats in the compiler's own vector types: SSE2 on x86-64, whatever there is elsewhere.
#pragma once

#include "common/cpu/elements.h"

namespace attn::cpu {

struct Baseline : private ScalarElements {
  typedef float Float __attribute__((vector_size(16)));
  typedef uint32_t Word __attribute__((vector_size(16)));
  static constexpr int kWidth = 4;
  static constexpr int kMicroRows = 3;
  static constexpr int kMicroVectors = 4;
  static constexpr int kPanelRows = 12;

  [[gnu::always_inline]] static inline Float zero() { return splat(0.0f); }
  [[gnu::always_inline]] static inline Float splat(float x) { return Float{x, x, x, x}; }
  [[gnu::always_inline]] static inline Float load(const float* p) {
    Float x;
    __builtin_memcpy(&x, p, sizeof(x));
    return x;
  }
  [[gnu::always_inline]] static inline void store(float* p, Float x) { __builtin_memcpy(p, &x, sizeof(x)); }
  [[gnu::always_inline]] static inline Float add(Float a, Float b) { return a + b; }
  [[gnu::always_inline]] static inline Float mul(Float a, Float b) { return a * b; }
  [[gnu::always_inline]] static inline Float max(Float a, Float b) { return a > b ? a : b; }
  [[gnu::always_inline]] static inline Float fma(Float a, Float b, Float c) { return a * b + c; }
  [[gnu::always_inline]] static inline float reduce_add(Float x) { return (x[0] + x[2]) + (x[1] + x[3]); }
  [[gnu::always_inline]] static inline float reduce_max(Float x) {
    const float even = x[0] > x[2] ? x[0] : x[2];
    const float odd = x[1] > x[3] ? x[1] : x[3];
    return even > odd ? even : odd;
  }

  /// 2^x for x <= 127, relative error about 1e-7; 0 below the range of normal floats; NaN stays NaN.
  [[gnu::always_inline]] static inline Float exp2(Float x) {
    const Float lowest = splat(-126.0f);
    const auto underflows = x < lowest;
    x = underflows ? lowest : x;
    const Float magic = splat(12582912.0f);  // 1.5 * 2^23: adding it rounds to an integer, which stands in the low bits
    const Float shifted = x + magic;
    const Float f = x - (shifted - magic);
    Float y = splat(0.00015345810970757157f);
    y = y * f + splat(0.0013399930903688073f);
    y = y * f + splat(0.009618489071726799f);
    y = y * f + splat(0.05550328642129898f);
    y = y * f + splat(0.24022646248340607f);
    y = y * f + splat(0.6931471824645996f);
    y = y * f + splat(1.0f);
    const Word exponent = (reinterpret_cast<Word>(shifted) - reinterpret_cast<Word>(magic) + 127u) << 23;
    y = y * reinterpret_cast<Float>(exponent);
    return underflows ? zero() : y;
  }

  template <class Element>
  [[gnu::always_inline]] static inline Float load_elements(const Element* p, int) {
    return Float{to_float(p[0]), to_float(p[1]), to_float(p[2]), to_float(p[3])};
  }

  template <class Element>
  [[gnu::always_inline]] static inline void store_elements(Element* p, Float x, int) {
    for (int i = 0; i < kWidth; ++i) from_float(x[i], p[i]);
  }

  [[gnu::always_inline]] static inline Float as_float(Word w) { return reinterpret_cast<Float>(w); }
  [[gnu::always_inline]] static inline Float low_elements(Word w, BFloat16) { return reinterpret_cast<Float>(w << 16); }
  [[gnu::always_inline]] static inline Float high_elements(Word w, BFloat16) {
    return reinterpret_cast<Float>(w & 0xffff0000u);
  }
  [[gnu::always_inline]] static inline Float low_elements(Word w, Half) {
    return Float{half_to_float(w[0]), half_to_float(w[1]), half_to_float(w[2]), half_to_float(w[3])};
  }
  [[gnu::always_inline]] static inline Float high_elements(Word w, Half) { return low_elements(w >> 16, Half{}); }

  /// out[i] has word i of each of the kWidth rows. A row's bytes are a multiple of 16, so all words exist.
  [[gnu::always_inline]] static inline void transpose_words(const char* const* rows, int64_t byte_offset, int,
                                                            Word* out) {
    Word a[4];
    for (int i = 0; i < 4; ++i) __builtin_memcpy(&a[i], rows[i] + byte_offset, sizeof(Word));
    for (int i = 0; i < 4; ++i) out[i] = Word{a[0][i], a[1][i], a[2][i], a[3][i]};
  }
};

}  // namespace attn::cpu
