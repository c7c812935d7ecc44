// The products of attention in bf16 tiles with float32 sums (AMX). Scores are exact sums of bf16 products;
// probabilities are rounded to bf16. Subnormal numbers count as 0.
#pragma once

#include "attention/cpu/kernels.h"
#include "common/cpu/vector_avx512.h"
#include "common/math.h"

namespace attn::cpu {

// A word is a pair of bf16, one after the other along the depth of a product, as a tile instruction takes them: as its
// right operand. Works in Scratch: q [rows, qk] bf16, keys [qk / 2, kBlockTokens] words (pairs of elements), values
// [kBlockTokens / 2, v] words (pairs of tokens), scores [kPanelRows, kBlockTokens] float, probabilities [kPanelRows,
// kBlockTokens] bf16, o [rows, v] float; qk and v: the widths of heads. Columns of values, and so of o, are in the
// order in which interleaving two rows leaves them: of every 32, first elements 0-3, 8-11, 16-19, 24-27, then the
// others. At least one row.
class AmxEngine {
 public:
  using Isa = Avx512;
  using Element = BFloat16;
  static constexpr int kBlockTokens = 128;
  static constexpr int kPanelRows = 16;
  static constexpr int kColumnStep = 32;  // depth of a tile

  /// Configures the tile registers of this thread; the destructor frees them.
  AmxEngine(Scratch& scratch, HeadDims dims, int rows) : s_(scratch), dims_(dims) {
    TileConfig config;
    const int panel_rows = min_of(rows, kPanelRows);  // a tile instruction takes as long as it has rows
    for (int i = 0; i < 8; ++i) {
      config.row_bytes[i] = 64;
      config.rows[i] = static_cast<uint8_t>(i < 5 ? panel_rows : 16);  // 0-3: sums, 4: left operand, 5-7: right operand
    }
    make_visible(&config);
    _tile_loadconfig(&config);
    // Rows that fill up the last panel: their products are computed and never used.
    const int padded_rows = ceil_div(rows, panel_rows) * panel_rows;
    for (int row = rows; row < padded_rows; ++row) __builtin_memset(query(row), 0, static_cast<unsigned>(dims.qk) * 2);
  }

  ~AmxEngine() { _tile_release(); }

  AmxEngine(const AmxEngine&) = delete;
  AmxEngine& operator=(const AmxEngine&) = delete;

  int o_stride() const { return dims_.v; }

  void load_query(int row, const Element* q) { __builtin_memcpy(query(row), q, static_cast<unsigned>(dims_.qk) * 2); }

  void pack_keys(const TokenRows& tokens, int begin, int end) {
    for (int token = begin; token < end; token += Isa::kWidth) {
      for (int first = 0; first < dims_.qk / 2; first += Isa::kWidth) {
        __m512i columns[Isa::kWidth];
        Isa::transpose_words(tokens.keys + token, int64_t{4} * first, Isa::kWidth, columns);
        float* out = s_.keys + first * kBlockTokens + token;
#pragma GCC unroll 16
        for (int i = 0; i < Isa::kWidth; ++i) _mm512_store_si512(out + i * kBlockTokens, columns[i]);
      }
    }
  }

  void pack_values(const TokenRows& tokens, int begin, int end) {
    for (int token = begin; token < end; token += 2) {
      for (int i = 0; i < dims_.v; i += 32) {
        const __m512i even = _mm512_loadu_si512(tokens.values[token] + 2 * i);
        const __m512i odd = _mm512_loadu_si512(tokens.values[token + 1] + 2 * i);
        float* out = s_.values + token / 2 * dims_.v + i;
        _mm512_store_si512(out, _mm512_unpacklo_epi16(even, odd));
        _mm512_store_si512(out + 16, _mm512_unpackhi_epi16(even, odd));
      }
    }
  }

  void multiply_keys(int buffer, int row, int /*rows*/, int begin, int end) {
    make_visible(&s_);
    constexpr int kScoreBytes = kBlockTokens * 4;
    int token = begin;
    for (; token + 64 <= end; token += 64) {
      float* scores = s_.scores[buffer] + token;
      _tile_zero(0);
      _tile_zero(1);
      _tile_zero(2);
      _tile_zero(3);
      for (int i = 0; i < dims_.qk; i += 32) {
        const float* keys = s_.keys + i / 2 * kBlockTokens + token;
        _tile_loadd(4, query(row) + i, dims_.qk * 2);
        _tile_loadd(5, keys, kScoreBytes);
        _tile_dpbf16ps(0, 4, 5);
        _tile_loadd(6, keys + 16, kScoreBytes);
        _tile_dpbf16ps(1, 4, 6);
        _tile_loadd(7, keys + 32, kScoreBytes);
        _tile_dpbf16ps(2, 4, 7);
        _tile_loadd(5, keys + 48, kScoreBytes);
        _tile_dpbf16ps(3, 4, 5);
      }
      _tile_stored(0, scores, kScoreBytes);
      _tile_stored(1, scores + 16, kScoreBytes);
      _tile_stored(2, scores + 32, kScoreBytes);
      _tile_stored(3, scores + 48, kScoreBytes);
    }
    for (; token < end; token += 32) {
      float* scores = s_.scores[buffer] + token;
      _tile_zero(0);
      _tile_zero(1);
      for (int i = 0; i < dims_.qk; i += 32) {
        const float* keys = s_.keys + i / 2 * kBlockTokens + token;
        _tile_loadd(4, query(row) + i, dims_.qk * 2);
        _tile_loadd(5, keys, kScoreBytes);
        _tile_dpbf16ps(0, 4, 5);
        _tile_loadd(6, keys + 16, kScoreBytes);
        _tile_dpbf16ps(1, 4, 6);
      }
      _tile_stored(0, scores, kScoreBytes);
      _tile_stored(1, scores + 16, kScoreBytes);
    }
  }

  /// Accurate enough for probabilities that are rounded to bf16, and for their sums.
  static __m512 exp2(__m512 x) { return Isa::exp2_short(x); }

  void store_probabilities(int buffer, int panel_row, int token, __m512 p) {
    const __m256i rounded = reinterpret_cast<__m256i>(_mm512_cvtneps_pbh(p));
    _mm256_store_si256(reinterpret_cast<__m256i*>(probability(buffer, panel_row) + token), rounded);
  }

  void multiply_values(int buffer, int row, int /*rows*/, int begin, int end) {
    make_visible(&s_);
    const int stride_bytes = dims_.v * 4;
    int i = 0;
    for (; i + 64 <= dims_.v; i += 64) {
      float* o = s_.o + row * dims_.v + i;
      _tile_loadd(0, o, stride_bytes);
      _tile_loadd(1, o + 16, stride_bytes);
      _tile_loadd(2, o + 32, stride_bytes);
      _tile_loadd(3, o + 48, stride_bytes);
      for (int token = begin; token < end; token += 32) {
        const float* values = s_.values + token / 2 * dims_.v + i;
        _tile_loadd(4, probability(buffer, 0) + token, kBlockTokens * 2);
        _tile_loadd(5, values, stride_bytes);
        _tile_dpbf16ps(0, 4, 5);
        _tile_loadd(6, values + 16, stride_bytes);
        _tile_dpbf16ps(1, 4, 6);
        _tile_loadd(7, values + 32, stride_bytes);
        _tile_dpbf16ps(2, 4, 7);
        _tile_loadd(5, values + 48, stride_bytes);
        _tile_dpbf16ps(3, 4, 5);
      }
      _tile_stored(0, o, stride_bytes);
      _tile_stored(1, o + 16, stride_bytes);
      _tile_stored(2, o + 32, stride_bytes);
      _tile_stored(3, o + 48, stride_bytes);
    }
    for (; i < dims_.v; i += 32) {
      float* o = s_.o + row * dims_.v + i;
      _tile_loadd(0, o, stride_bytes);
      _tile_loadd(1, o + 16, stride_bytes);
      for (int token = begin; token < end; token += 32) {
        const float* values = s_.values + token / 2 * dims_.v + i;
        _tile_loadd(4, probability(buffer, 0) + token, kBlockTokens * 2);
        _tile_loadd(5, values, stride_bytes);
        _tile_dpbf16ps(0, 4, 5);
        _tile_loadd(6, values + 16, stride_bytes);
        _tile_dpbf16ps(1, 4, 6);
      }
      _tile_stored(0, o, stride_bytes);
      _tile_stored(1, o + 16, stride_bytes);
    }
  }

  /// Output elements [i, i + 16) of a row, in their own order.
  __m512 output(int row, int i) const {
    const float* o = s_.o + row * dims_.v + i / 32 * 32;
    const __m512i first = _mm512_setr_epi32(0, 1, 2, 3, 16, 17, 18, 19, 4, 5, 6, 7, 20, 21, 22, 23);
    const __m512i second = _mm512_setr_epi32(8, 9, 10, 11, 24, 25, 26, 27, 12, 13, 14, 15, 28, 29, 30, 31);
    return _mm512_permutex2var_ps(_mm512_load_ps(o), i % 32 == 0 ? first : second, _mm512_load_ps(o + 16));
  }

 private:
  struct alignas(64) TileConfig {
    uint8_t palette = 1;
    uint8_t start_row = 0;
    uint8_t reserved[14] = {};
    uint16_t row_bytes[16] = {};
    uint8_t rows[16] = {};
  };

  /// The compiler does not know which memory the tile instructions read: it must have written all of it before them.
  static void make_visible(const void* memory) { asm volatile("" : : "r"(memory) : "memory"); }

  BFloat16* query(int row) const { return reinterpret_cast<BFloat16*>(s_.q) + row * dims_.qk; }
  BFloat16* probability(int buffer, int row) const {
    return reinterpret_cast<BFloat16*>(s_.probabilities[buffer]) + row * kBlockTokens;
  }

  Scratch& s_;
  const HeadDims dims_;
};

}  // namespace attn::cpu
