// Vectors of 16 floats: AVX-512 F, BW, VL, DQ.
#pragma once

#include <immintrin.h>

#include "common/cpu/elements.h"

namespace attn::cpu {

struct Avx512 {
  using Float = __m512;
  using Word = __m512i;
  static constexpr int kWidth = 16;
  static constexpr int kMicroRows = 6;  // rows x vectors of accumulators of the matrix product's inner loop
  static constexpr int kMicroVectors = 4;
  static constexpr int kPanelRows = 12;  // rows that go through scores, softmax and output together

  [[gnu::always_inline]] static inline Float zero() { return _mm512_setzero_ps(); }
  [[gnu::always_inline]] static inline Float splat(float x) { return _mm512_set1_ps(x); }
  [[gnu::always_inline]] static inline Float load(const float* p) { return _mm512_loadu_ps(p); }
  [[gnu::always_inline]] static inline void store(float* p, Float x) { _mm512_storeu_ps(p, x); }
  [[gnu::always_inline]] static inline Float add(Float a, Float b) { return _mm512_add_ps(a, b); }
  [[gnu::always_inline]] static inline Float mul(Float a, Float b) { return _mm512_mul_ps(a, b); }
  [[gnu::always_inline]] static inline Float max(Float a, Float b) { return _mm512_max_ps(a, b); }
  [[gnu::always_inline]] static inline Float fma(Float a, Float b, Float c) { return _mm512_fmadd_ps(a, b, c); }
  [[gnu::always_inline]] static inline float reduce_add(Float x) { return _mm512_reduce_add_ps(x); }
  [[gnu::always_inline]] static inline float reduce_max(Float x) { return _mm512_reduce_max_ps(x); }

  /// 2^x for x <= 127, relative error below 1e-7; 0 below the range of normal floats (results outside it take a slow
  /// path of the processor); NaN stays NaN.
  [[gnu::always_inline]] static inline Float exp2(Float x) {
    return scale_power(x, [](Float f) __attribute__((always_inline)) {
      Float y = splat(0.00015345810970757157f);
      y = fma(y, f, splat(0.0013399930903688073f));
      y = fma(y, f, splat(0.009618489071726799f));
      y = fma(y, f, splat(0.05550328642129898f));
      y = fma(y, f, splat(0.24022646248340607f));
      y = fma(y, f, splat(0.6931471824645996f));
      return fma(y, f, splat(1.0f));
    });
  }

  /// The same with a relative error below 3e-6. 2^0 is 1, so a row that sees one token gets that token's value.
  [[gnu::always_inline]] static inline Float exp2_short(Float x) {
    return scale_power(x, [](Float f) __attribute__((always_inline)) {
      Float y = splat(0.009582576341927052f);
      y = fma(y, f, splat(0.05590682849287987f));
      y = fma(y, f, splat(0.24024106562137604f));
      y = fma(y, f, splat(0.6931241154670715f));
      return fma(y, f, splat(1.0f));
    });
  }

  // The first n elements (n <= kWidth) at p; the rest is 0.
  [[gnu::always_inline]] static inline Float load_elements(const float* p, int n) {
    return n >= kWidth ? load(p) : _mm512_maskz_loadu_ps(first(n), p);
  }
  [[gnu::always_inline]] static inline Float load_elements(const Half* p, int n) {
    return _mm512_cvtph_ps(n >= kWidth ? _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p))
                                       : _mm256_maskz_loadu_epi16(first(n), p));
  }
  [[gnu::always_inline]] static inline Float load_elements(const BFloat16* p, int n) {
    const __m256i bits =
        n >= kWidth ? _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)) : _mm256_maskz_loadu_epi16(first(n), p);
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(bits), 16));
  }

  // Rounds to nearest even and writes the first n elements.
  [[gnu::always_inline]] static inline void store_elements(float* p, Float x, int n) {
    _mm512_mask_storeu_ps(p, first(n), x);
  }
  [[gnu::always_inline]] static inline void store_elements(Half* p, Float x, int n) {
    _mm256_mask_storeu_epi16(p, first(n), _mm512_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
  }
  [[gnu::always_inline]] static inline void store_elements(BFloat16* p, Float x, int n) {
    const __m512i bits = _mm512_castps_si512(x);
    const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
    const __m512i rounded =
        _mm512_srli_epi32(_mm512_add_epi32(_mm512_add_epi32(bits, odd), _mm512_set1_epi32(0x7fff)), 16);
    const __m512i result =
        _mm512_mask_mov_epi32(rounded, _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q), _mm512_set1_epi32(0x7fc0));
    _mm256_mask_storeu_epi16(p, first(n), _mm512_cvtepi32_epi16(result));
  }

  // The two elements of each word, or the word itself.
  [[gnu::always_inline]] static inline Float as_float(Word w) { return _mm512_castsi512_ps(w); }
  [[gnu::always_inline]] static inline Float low_elements(Word w, BFloat16) {
    return _mm512_castsi512_ps(_mm512_slli_epi32(w, 16));
  }
  [[gnu::always_inline]] static inline Float high_elements(Word w, BFloat16) {
    return _mm512_castsi512_ps(_mm512_and_si512(w, _mm512_set1_epi32(static_cast<int>(0xffff0000u))));
  }
  [[gnu::always_inline]] static inline Float low_elements(Word w, Half) {
    return _mm512_cvtph_ps(_mm512_cvtepi32_epi16(w));
  }
  [[gnu::always_inline]] static inline Float high_elements(Word w, Half) {
    return _mm512_cvtph_ps(_mm512_cvtepi32_epi16(_mm512_srli_epi32(w, 16)));
  }

  /// out[i] has word i of each of the kWidth rows; of `words` <= kWidth words that exist.
  [[gnu::always_inline]] static inline void transpose_words(const char* const* rows, int64_t byte_offset, int words,
                                                            Word* out) {
    const __mmask16 mask = first(words);
    __m512i a[16], b[16];
#pragma GCC unroll 16
    for (int i = 0; i < 16; ++i) a[i] = _mm512_maskz_loadu_epi32(mask, rows[i] + byte_offset);
#pragma GCC unroll 8
    for (int i = 0; i < 16; i += 2) {
      b[i] = _mm512_unpacklo_epi32(a[i], a[i + 1]);
      b[i + 1] = _mm512_unpackhi_epi32(a[i], a[i + 1]);
    }
    // a[i + j]: words j, 4 + j, 8 + j, 12 + j (one in each 128-bit lane) of rows i .. i + 3
#pragma GCC unroll 4
    for (int i = 0; i < 16; i += 4) {
      a[i] = _mm512_unpacklo_epi64(b[i], b[i + 2]);
      a[i + 1] = _mm512_unpackhi_epi64(b[i], b[i + 2]);
      a[i + 2] = _mm512_unpacklo_epi64(b[i + 1], b[i + 3]);
      a[i + 3] = _mm512_unpackhi_epi64(b[i + 1], b[i + 3]);
    }
#pragma GCC unroll 4
    for (int j = 0; j < 4; ++j) {
      const __m512i top_even = _mm512_shuffle_i32x4(a[j], a[4 + j], 0x88);  // words j, 8 + j of rows 0 .. 7
      const __m512i top_odd = _mm512_shuffle_i32x4(a[j], a[4 + j], 0xdd);   // words 4 + j, 12 + j
      const __m512i bottom_even = _mm512_shuffle_i32x4(a[8 + j], a[12 + j], 0x88);
      const __m512i bottom_odd = _mm512_shuffle_i32x4(a[8 + j], a[12 + j], 0xdd);
      out[j] = _mm512_shuffle_i32x4(top_even, bottom_even, 0x88);
      out[8 + j] = _mm512_shuffle_i32x4(top_even, bottom_even, 0xdd);
      out[4 + j] = _mm512_shuffle_i32x4(top_odd, bottom_odd, 0x88);
      out[12 + j] = _mm512_shuffle_i32x4(top_odd, bottom_odd, 0xdd);
    }
  }

 private:
  /// 2^x = 2^f * 2^n with n = x rounded and f in [-0.5, 0.5]; `power` is 2^f.
  template <class Power>
  [[gnu::always_inline]] static inline Float scale_power(Float x, Power power) {
    const Float lowest = splat(-126.0f);
    const __mmask16 in_range = _mm512_cmp_ps_mask(x, lowest, _CMP_NLT_UQ);
    x = _mm512_max_ps(lowest, x);
    const Float n = _mm512_roundscale_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    return _mm512_maskz_scalef_ps(in_range, power(_mm512_sub_ps(x, n)), n);
  }

  [[gnu::always_inline]] static inline __mmask16 first(int n) {
    return n >= kWidth ? 0xffff : static_cast<__mmask16>((1u << n) - 1);
  }
};

}  // namespace attn::cpu
