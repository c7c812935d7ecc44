// Vectors of 16 floats: AVX-512 F, BW, VL, DQ.
#pragma once

#include <immintrin.h>

#include "common/cpu/vector_baseline.h"

namespace attn::cpu {

typedef float Floats16 __attribute__((vector_size(64)));
typedef uint32_t Words16 __attribute__((vector_size(64)));
typedef uint16_t Shorts16 __attribute__((vector_size(32)));

struct Avx512 : VectorOf<Floats16, Words16, Shorts16> {
  static constexpr int kMicroRows = 6;  // rows x vectors of accumulators of the matrix product's inner loop
  static constexpr int kMicroVectors = 4;
  static constexpr int kPanelRows = 12;  // rows that go through scores, softmax and output together

  ATTN_HD static Float max(Float a, Float b) { return _mm512_max_ps(a, b); }
  ATTN_HD static Float fma(Float a, Float b, Float c) { return _mm512_fmadd_ps(a, b, c); }
  ATTN_HD static float reduce_add(Float x) { return _mm512_reduce_add_ps(x); }
  ATTN_HD static float reduce_max(Float x) { return _mm512_reduce_max_ps(x); }

  /// As VectorOf::exp2(). Results below the range of normal floats take a slow path of the processor: they become 0.
  ATTN_HD static Float exp2(Float x) { return scale_power(x, power); }

  /// The same with a relative error below 3e-6. 2^0 is 1, so a row that sees one token gets that token's value.
  ATTN_HD static Float exp2_short(Float x) {
    return scale_power(x, [](Float f) __attribute__((always_inline)) {
      Float y = splat(0.009582576341927052f);
      y = fma(y, f, splat(0.05590682849287987f));
      y = fma(y, f, splat(0.24024106562137604f));
      y = fma(y, f, splat(0.6931241154670715f));
      return fma(y, f, splat(1.0f));
    });
  }

  // The first n elements (n <= kWidth) at p; the rest is 0.
  ATTN_HD static Float load_elements(const float* p, int n) {
    return n >= kWidth ? load(p) : _mm512_maskz_loadu_ps(first(n), p);
  }
  ATTN_HD static Float load_elements(const Half* p, int n) {
    return _mm512_cvtph_ps(n >= kWidth ? _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p))
                                       : _mm256_maskz_loadu_epi16(first(n), p));
  }
  ATTN_HD static Float load_elements(const BFloat16* p, int n) {
    const __m256i bits =
        n >= kWidth ? _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)) : _mm256_maskz_loadu_epi16(first(n), p);
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(bits), 16));
  }

  // Rounds to nearest even and writes the first n elements.
  ATTN_HD static void store_elements(float* p, Float x, int n) { _mm512_mask_storeu_ps(p, first(n), x); }
  ATTN_HD static void store_elements(Half* p, Float x, int n) {
    _mm256_mask_storeu_epi16(p, first(n), _mm512_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
  }
  ATTN_HD static void store_elements(BFloat16* p, Float x, int n) {
    _mm256_mask_storeu_epi16(p, first(n), _mm512_cvtepi32_epi16(reinterpret_cast<__m512i>(bfloat16_bits(x))));
  }

  using VectorOf::low_elements, VectorOf::high_elements;
  ATTN_HD static Float low_elements(Word w, Half) {
    return _mm512_cvtph_ps(_mm512_cvtepi32_epi16(reinterpret_cast<__m512i>(w)));
  }
  ATTN_HD static Float high_elements(Word w, Half) { return low_elements(w >> 16, Half{}); }

  /// out[i] has word i of each of the kWidth rows; of `words` <= kWidth words that exist.
  ATTN_HD static void transpose_words(const char* const* rows, int64_t byte_offset, int words, Word* out) {
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
      out[j] = reinterpret_cast<Word>(_mm512_shuffle_i32x4(top_even, bottom_even, 0x88));
      out[8 + j] = reinterpret_cast<Word>(_mm512_shuffle_i32x4(top_even, bottom_even, 0xdd));
      out[4 + j] = reinterpret_cast<Word>(_mm512_shuffle_i32x4(top_odd, bottom_odd, 0x88));
      out[12 + j] = reinterpret_cast<Word>(_mm512_shuffle_i32x4(top_odd, bottom_odd, 0xdd));
    }
  }

 private:
  /// 2^x = 2^f * 2^n with n = x rounded and f in [-0.5, 0.5]; `power` is 2^f.
  template <class Power>
  ATTN_HD static Float scale_power(Float x, Power power) {
    const Float lowest = splat(-126.0f);
    const __mmask16 in_range = _mm512_cmp_ps_mask(x, lowest, _CMP_NLT_UQ);
    x = _mm512_max_ps(lowest, x);
    const Float n = _mm512_roundscale_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    return _mm512_maskz_scalef_ps(in_range, power(_mm512_sub_ps(x, n)), n);
  }

  ATTN_HD static __mmask16 first(int n) { return n >= kWidth ? 0xffff : static_cast<__mmask16>((1u << n) - 1); }
};

}  // namespace attn::cpu
