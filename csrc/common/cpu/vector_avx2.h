// Vectors of 8 floats: AVX2, FMA, F16C. head_dim is a multiple of 8, so no vector is partly filled.
#pragma once

#include <immintrin.h>

#include "common/cpu/vector_baseline.h"

namespace attn::cpu {

typedef float Floats8 __attribute__((vector_size(32)));
typedef uint32_t Words8 __attribute__((vector_size(32)));
typedef uint16_t Shorts8 __attribute__((vector_size(16)));

struct Avx2 : VectorOf<Floats8, Words8, Shorts8> {
  static constexpr int kMicroRows = 3;
  static constexpr int kMicroVectors = 4;
  static constexpr int kPanelRows = 12;

  ATTN_HD static Float max(Float a, Float b) { return _mm256_max_ps(a, b); }
  ATTN_HD static Float fma(Float a, Float b, Float c) { return _mm256_fmadd_ps(a, b, c); }
  ATTN_HD static float reduce_add(Float x) {
    __m128 half = _mm_add_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
    half = _mm_add_ps(half, _mm_movehl_ps(half, half));
    return _mm_cvtss_f32(_mm_add_ss(half, _mm_movehdup_ps(half)));
  }
  ATTN_HD static float reduce_max(Float x) {
    __m128 half = _mm_max_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
    half = _mm_max_ps(half, _mm_movehl_ps(half, half));
    return _mm_cvtss_f32(_mm_max_ss(half, _mm_movehdup_ps(half)));
  }

  using VectorOf::load_elements;
  ATTN_HD static Float load_elements(const Half* p, int) {
    return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
  }

  using VectorOf::store_elements;
  ATTN_HD static void store_elements(Half* p, Float x, int) {
    _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm256_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
  }

  using VectorOf::low_elements, VectorOf::high_elements;
  ATTN_HD static Float low_elements(Word w, Half) {
    const __m256i low = reinterpret_cast<__m256i>(w & 0xffffu);
    return _mm256_cvtph_ps(_mm_packus_epi32(_mm256_castsi256_si128(low), _mm256_extracti128_si256(low, 1)));
  }
  ATTN_HD static Float high_elements(Word w, Half) { return low_elements(w >> 16, Half{}); }

  /// out[i] has word i of each of the kWidth rows; of `words` <= kWidth words that exist.
  ATTN_HD static void transpose_words(const char* const* rows, int64_t byte_offset, int words, Word* out) {
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
      out[j] = reinterpret_cast<Word>(_mm256_permute2x128_si256(a[j], a[4 + j], 0x20));
      out[4 + j] = reinterpret_cast<Word>(_mm256_permute2x128_si256(a[j], a[4 + j], 0x31));
    }
  }
};

}  // namespace attn::cpu
