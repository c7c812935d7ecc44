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
        Isa::Word columns[Isa::kWidth];
        Isa::transpose_words(tokens.keys + token, int64_t{4} * first, Isa::kWidth, columns);
        float* out = s_.keys + first * kBlockTokens + token;
#pragma GCC unroll 16
        for (int i = 0; i < Isa::kWidth; ++i) Isa::store(out + i * kBlockTokens, Isa::as_float(columns[i]));
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
    int token = begin;
    for (; token + 64 <= end; token += 64) multiply_key_tiles<4>(buffer, row, token);
    for (; token < end; token += 32) multiply_key_tiles<2>(buffer, row, token);
  }

  /// Accurate enough for probabilities that are rounded to bf16, and for their sums.
  static __m512 exp2(__m512 x) { return Isa::exp2_short(x); }

  void store_probabilities(int buffer, int panel_row, int token, __m512 p) {
    const __m256i rounded = reinterpret_cast<__m256i>(_mm512_cvtneps_pbh(p));
    _mm256_store_si256(reinterpret_cast<__m256i*>(probability(buffer, panel_row) + token), rounded);
  }

  void multiply_values(int buffer, int row, int /*rows*/, int begin, int end) {
    make_visible(&s_);
    int column = 0;
    for (; column + 64 <= dims_.v; column += 64) multiply_value_tiles<4>(buffer, row, column, begin, end);
    for (; column < dims_.v; column += 32) multiply_value_tiles<2>(buffer, row, column, begin, end);
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

  /// Scores of kTiles x 16 tokens.
  template <int kTiles>
  void multiply_key_tiles(int buffer, int row, int token) {
    constexpr int kScoreBytes = kBlockTokens * 4;
    Sums<kTiles>::set_to_zero();
    for (int i = 0; i < dims_.qk; i += 32)
      Sums<kTiles>::add_product(query(row) + i, dims_.qk * 2, s_.keys + i / 2 * kBlockTokens + token, kScoreBytes);
    Sums<kTiles>::store(s_.scores[buffer] + token, kScoreBytes);
  }

  /// Outputs in kTiles x 16 columns.
  template <int kTiles>
  void multiply_value_tiles(int buffer, int row, int column, int begin, int end) {
    const int stride_bytes = dims_.v * 4;
    float* o = s_.o + row * dims_.v + column;
    Sums<kTiles>::load(o, stride_bytes);
    for (int token = begin; token < end; token += 32)
      Sums<kTiles>::add_product(probability(buffer, 0) + token, kBlockTokens * 2,
                                s_.values + token / 2 * dims_.v + column, stride_bytes);
    Sums<kTiles>::store(o, stride_bytes);
  }

  /// The first kTiles tile registers, 2 or 4: 16 rows of 16 columns each, next to each other in memory.
  template <int kTiles>
  struct Sums {
    static void set_to_zero() {
      _tile_zero(0);
      _tile_zero(1);
      if constexpr (kTiles == 2) return;
      _tile_zero(2);
      _tile_zero(3);
    }

    static void load(const float* from, int stride_bytes) {
      _tile_loadd(0, from, stride_bytes);
      _tile_loadd(1, from + 16, stride_bytes);
      if constexpr (kTiles == 2) return;
      _tile_loadd(2, from + 32, stride_bytes);
      _tile_loadd(3, from + 48, stride_bytes);
    }

    static void store(float* to, int stride_bytes) {
      _tile_stored(0, to, stride_bytes);
      _tile_stored(1, to + 16, stride_bytes);
      if constexpr (kTiles == 2) return;
      _tile_stored(2, to + 32, stride_bytes);
      _tile_stored(3, to + 48, stride_bytes);
    }

    /// Adds a product of depth 32.
    static void add_product(const Element* left, int left_bytes, const float* right, int right_bytes) {
      _tile_loadd(4, left, left_bytes);
      _tile_loadd(5, right, right_bytes);
      _tile_dpbf16ps(0, 4, 5);
      _tile_loadd(6, right + 16, right_bytes);
      _tile_dpbf16ps(1, 4, 6);
      if constexpr (kTiles == 2) return;
      _tile_loadd(7, right + 32, right_bytes);
      _tile_dpbf16ps(2, 4, 7);
      _tile_loadd(5, right + 48, right_bytes);
      _tile_dpbf16ps(3, 4, 5);
    }
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
