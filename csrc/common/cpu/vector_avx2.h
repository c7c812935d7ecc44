// Vectors of 8 floats: AVX2, FMA, F16C. head_dim is a multiple of 8, so no vector is partly filled.
#pragma once

#include <immintrin.h>

#include "common/cpu/elements.h"

namespace attn::cpu {

struct Avx2 {
  using Float = __m256;
  using Word = __m256i;
  static constexpr int kWidth = 8;
  static constexpr int kMicroRows = 3;
  static constexpr int kMicroVectors = 4;
  static constexpr int kPanelRows = 12;

  [[gnu::always_inline]] static inline Float zero() { return _mm256_setzero_ps(); }
  [[gnu::always_inline]] static inline Float splat(float x) { return _mm256_set1_ps(x); }
  [[gnu::always_inline]] static inline Float load(const float* p) { return _mm256_loadu_ps(p); }
  [[gnu::always_inline]] static inline void store(float* p, Float x) { _mm256_storeu_ps(p, x); }
  [[gnu::always_inline]] static inline Float add(Float a, Float b) { return _mm256_add_ps(a, b); }
  [[gnu::always_inline]] static inline Float mul(Float a, Float b) { return _mm256_mul_ps(a, b); }
  [[gnu::always_inline]] static inline Float max(Float a, Float b) { return _mm256_max_ps(a, b); }
  [[gnu::always_inline]] static inline Float fma(Float a, Float b, Float c) { return _mm256_fmadd_ps(a, b, c); }
  [[gnu::always_inline]] static inline float reduce_add(Float x) {
    __m128 half = _mm_add_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
    half = _mm_add_ps(half, _mm_movehl_ps(half, half));
    return _mm_cvtss_f32(_mm_add_ss(half, _mm_movehdup_ps(half)));
  }
  [[gnu::always_inline]] static inline float reduce_max(Float x) {
    __m128 half = _mm_max_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
    half = _mm_max_ps(half, _mm_movehl_ps(half, half));
    return _mm_cvtss_f32(_mm_max_ss(half, _mm_movehdup_ps(half)));
  }

  /// 2^x for x <= 127, relative error below 1e-7; 0 below the range of normal floats; NaN stays NaN.
  [[gnu::always_inline]] static inline Float exp2(Float x) {
    const Float lowest = splat(-126.0f);
    const Float underflows = _mm256_cmp_ps(x, lowest, _CMP_LT_OQ);
    x = _mm256_max_ps(lowest, x);
    const Float n = _mm256_round_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    const Float f = _mm256_sub_ps(x, n);
    Float y = splat(0.00015345810970757157f);
    y = fma(y, f, splat(0.0013399930903688073f));
    y = fma(y, f, splat(0.009618489071726799f));
    y = fma(y, f, splat(0.05550328642129898f));
    y = fma(y, f, splat(0.24022646248340607f));
    y = fma(y, f, splat(0.6931471824645996f));
    y = fma(y, f, splat(1.0f));
    const __m256i exponent = _mm256_slli_epi32(_mm256_add_epi32(_mm256_cvtps_epi32(n), _mm256_set1_epi32(127)), 23);
    return _mm256_andnot_ps(underflows, _mm256_mul_ps(y, _mm256_castsi256_ps(exponent)));
  }

  [[gnu::always_inline]] static inline Float load_elements(const float* p, int) { return load(p); }
  [[gnu::always_inline]] static inline Float load_elements(const Half* p, int) {
    return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
  }
  [[gnu::always_inline]] static inline Float load_elements(const BFloat16* p, int) {
    return _mm256_castsi256_ps(
        _mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))), 16));
  }

  // Rounds to nearest even.
  [[gnu::always_inline]] static inline void store_elements(float* p, Float x, int) { store(p, x); }
  [[gnu::always_inline]] static inline void store_elements(Half* p, Float x, int) {
    _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm256_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
  }
  [[gnu::always_inline]] static inline void store_elements(BFloat16* p, Float x, int) {
    const __m256i bits = _mm256_castps_si256(x);
    const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
    const __m256i rounded =
        _mm256_srli_epi32(_mm256_add_epi32(_mm256_add_epi32(bits, odd), _mm256_set1_epi32(0x7fff)), 16);
    const __m256i is_nan = _mm256_castps_si256(_mm256_cmp_ps(x, x, _CMP_UNORD_Q));
    const __m256i result = _mm256_blendv_epi8(rounded, _mm256_set1_epi32(0x7fc0), is_nan);
    const __m128i packed = _mm_packus_epi32(_mm256_castsi256_si128(result), _mm256_extracti128_si256(result, 1));
    _mm_storeu_si128(reinterpret_cast<__m128i*>(p), packed);
  }

  [[gnu::always_inline]] static inline Float as_float(Word w) { return _mm256_castsi256_ps(w); }
  [[gnu::always_inline]] static inline Float low_elements(Word w, BFloat16) {
    return _mm256_castsi256_ps(_mm256_slli_epi32(w, 16));
  }
  [[gnu::always_inline]] static inline Float high_elements(Word w, BFloat16) {
    return _mm256_castsi256_ps(_mm256_and_si256(w, _mm256_set1_epi32(static_cast<int>(0xffff0000u))));
  }
  [[gnu::always_inline]] static inline Float low_elements(Word w, Half) {
    w = _mm256_and_si256(w, _mm256_set1_epi32(0xffff));
    return _mm256_cvtph_ps(_mm_packus_epi32(_mm256_castsi256_si128(w), _mm256_extracti128_si256(w, 1)));
  }
  [[gnu::always_inline]] static inline Float high_elements(Word w, Half) {
    return low_elements(_mm256_srli_epi32(w, 16), Half{});
  }

  /// out[i] has word i of each of the kWidth rows; of `words` <= kWidth words that exist.
  [[gnu::always_inline]] static inline void transpose_words(const char* const* rows, int64_t byte_offset, int words,
                                                            Word* out) {
    const __m256i mask = _mm256_cmpgt_epi32(_mm256_set1_epi32(words), _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7));
    __m256i a[8], b[8];
#pragma GCC unroll 8
    for (int i = 0; i < 8; ++i) a[i] = _mm256_maskload_epi32(reinterpret_cast<const int*>(rows[i] + byte_offset), mask);
#pragma GCC unroll 4
    for (int i = 0; i < 8; i += 2) {
      b[i] = _mm256_unpacklo_epi32(a[i], a[i + 1]);
      b[i + 1] = _mm256_unpackhi_epi32(a[i], a[i + 1]);
    }
    // a[i + j]: words j, 4 + j (one in each 128-bit lane) of rows i .. i + 3
#pragma GCC unroll 2
    for (int i = 0; i < 8; i += 4) {
      a[i] = _mm256_unpacklo_epi64(b[i], b[i + 2]);
      a[i + 1] = _mm256_unpackhi_epi64(b[i], b[i + 2]);
      a[i + 2] = _mm256_unpacklo_epi64(b[i + 1], b[i + 3]);
      a[i + 3] = _mm256_unpackhi_epi64(b[i + 1], b[i + 3]);
    }
#pragma GCC unroll 4
    for (int j = 0; j < 4; ++j) {
      out[j] = _mm256_permute2x128_si256(a[j], a[4 + j], 0x20);
      out[4 + j] = _mm256_permute2x128_si256(a[j], a[4 + j], 0x31);
    }
  }
};

}  // namespace attn::cpu
