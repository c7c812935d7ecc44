// The products of attention in float32, for every element type: a block's keys and values are converted once and used
// by all rows of the tile.
#pragma once

#include "attention/cpu/attention_kernel.h"
#include "attention/cpu/kernels.h"
#include "common/math.h"

namespace attn::cpu {

/// c [rows, columns] = a [rows, depth] x b [depth, columns], or += with Accumulate; `columns` is a multiple of the
/// vector width.
template <class Isa, bool Accumulate>
struct MatrixProduct {
  using Float = typename Isa::Float;

  template <int Rows, int Vectors>
  static void block(const float* a, int lda, const float* b, int ldb, float* c, int ldc, int depth) {
    Float sum[Rows][Vectors];
#pragma GCC unroll 8
    for (int r = 0; r < Rows; ++r) {
#pragma GCC unroll 8
      for (int v = 0; v < Vectors; ++v) sum[r][v] = Accumulate ? Isa::load(c + r * ldc + v * Isa::kWidth) : Isa::zero();
    }
    for (int k = 0; k < depth; ++k) {
      Float right[Vectors];
#pragma GCC unroll 8
      for (int v = 0; v < Vectors; ++v) right[v] = Isa::load(b + k * ldb + v * Isa::kWidth);
#pragma GCC unroll 8
      for (int r = 0; r < Rows; ++r) {
        const Float left = Isa::splat(a[r * lda + k]);
#pragma GCC unroll 8
        for (int v = 0; v < Vectors; ++v) sum[r][v] = Isa::fma(left, right[v], sum[r][v]);
      }
    }
#pragma GCC unroll 8
    for (int r = 0; r < Rows; ++r) {
#pragma GCC unroll 8
      for (int v = 0; v < Vectors; ++v) Isa::store(c + r * ldc + v * Isa::kWidth, sum[r][v]);
    }
  }

  template <int Rows>
  static void rows_of(const float* a, int lda, const float* b, int ldb, float* c, int ldc, int depth, int columns) {
    constexpr int kWide = Isa::kMicroVectors * Isa::kWidth;
    int column = 0;
    for (; column + kWide <= columns; column += kWide)
      block<Rows, Isa::kMicroVectors>(a, lda, b + column, ldb, c + column, ldc, depth);
    for (; column < columns; column += Isa::kWidth) block<Rows, 1>(a, lda, b + column, ldb, c + column, ldc, depth);
  }

  /// `Rows` at a time, then the last rows, which are fewer.
  template <int Rows = Isa::kMicroRows>
  static void run(const float* a, int lda, const float* b, int ldb, float* c, int ldc, int rows, int depth,
                  int columns) {
    for (; rows >= Rows; rows -= Rows) {
      rows_of<Rows>(a, lda, b, ldb, c, ldc, depth, columns);
      a += Rows * lda;
      c += Rows * ldc;
    }
    if constexpr (Rows > 1) run<Rows - 1>(a, lda, b, ldb, c, ldc, rows, depth, columns);
  }
};

/// Works in Scratch: q [rows, q_stride], keys [columns of K, kBlockTokens] (transposed), values [kBlockTokens,
/// o_stride], scores and probabilities [kPanelRows, kBlockTokens], o [rows, o_stride]; strides are the widths of heads
/// rounded up to whole vectors.
template <class IsaType, class ElementType>
class Float32Engine {
 public:
  using Isa = IsaType;
  using Element = ElementType;
  static constexpr int kBlockTokens = 64;
  static constexpr int kPanelRows = Isa::kPanelRows;
  static constexpr int kColumnStep = Isa::kWidth;  // tokens of a block that are computed are a multiple of this

  Float32Engine(Scratch& scratch, HeadDims dims, int /*rows*/)
      : s_(scratch),
        dims_(dims),
        q_stride_(round_up<int>(dims.qk, Isa::kWidth)),
        o_stride_(round_up<int>(dims.v, Isa::kWidth)) {}

  int o_stride() const { return o_stride_; }

  void load_query(int row, const Element* q) {
    for (int i = 0; i < dims_.qk; i += Isa::kWidth)
      Isa::store(s_.q + row * q_stride_ + i, Isa::load_elements(q + i, dims_.qk - i));
  }

  /// Packs tokens [begin, end) of the block, multiples of kColumnStep.
  void pack_keys(const TokenRows& tokens, int begin, int end) {
    constexpr int kElements = 4 / static_cast<int>(sizeof(Element));  // in a word
    const int words = dims_.qk / kElements;
    for (int first = 0; first < words; first += Isa::kWidth) {
      const int count = min_of(words - first, Isa::kWidth);
      for (int token = begin; token < end; token += Isa::kWidth) {
        typename Isa::Word columns[Isa::kWidth];
        Isa::transpose_words(tokens.keys + token, int64_t{4} * first, count, columns);
        float* out = s_.keys + first * kElements * kBlockTokens + token;
#pragma GCC unroll 16
        for (int i = 0; i < Isa::kWidth; ++i) {
          if (i >= count) break;
          if constexpr (kElements == 1) {
            Isa::store(out + i * kBlockTokens, Isa::as_float(columns[i]));
          } else {
            Isa::store(out + 2 * i * kBlockTokens, Isa::low_elements(columns[i], Element{}));
            Isa::store(out + (2 * i + 1) * kBlockTokens, Isa::high_elements(columns[i], Element{}));
          }
        }
      }
    }
  }

  void pack_values(const TokenRows& tokens, int begin, int end) {
    for (int token = begin; token < end; ++token) {
      const Element* row = reinterpret_cast<const Element*>(tokens.values[token]);
      for (int i = 0; i < dims_.v; i += Isa::kWidth)
        Isa::store(s_.values + token * o_stride_ + i, Isa::load_elements(row + i, dims_.v - i));
    }
  }

  /// Scores of rows [row, row + rows) for tokens [begin, end) of the block.
  void multiply_keys(int buffer, int row, int rows, int begin, int end) {
    MatrixProduct<Isa, false>::run(s_.q + row * q_stride_, q_stride_, s_.keys + begin, kBlockTokens,
                                   s_.scores[buffer] + begin, kBlockTokens, rows, dims_.qk, end - begin);
  }

  static typename Isa::Float exp2(typename Isa::Float x) { return Isa::exp2(x); }

  void store_probabilities(int buffer, int panel_row, int token, typename Isa::Float p) {
    Isa::store(s_.probabilities[buffer] + panel_row * kBlockTokens + token, p);
  }

  /// Adds probabilities x values of tokens [begin, end) to the outputs of rows [row, row + rows).
  void multiply_values(int buffer, int row, int rows, int begin, int end) {
    MatrixProduct<Isa, true>::run(s_.probabilities[buffer] + begin, kBlockTokens, s_.values + begin * o_stride_,
                                  o_stride_, s_.o + row * o_stride_, o_stride_, rows, end - begin, o_stride_);
  }

  /// Output elements [i, i + width) of a row.
  typename Isa::Float output(int row, int i) const { return Isa::load(s_.o + row * o_stride_ + i); }

 private:
  Scratch& s_;
  const HeadDims dims_;
  const int q_stride_;
  const int o_stride_;
};

/// The kernels of one instruction set, for every element type. Compiled once for each (attention_*.cpp).
template <class Isa>
Kernels float32_kernels(DataType dtype, bool widens) {
  return visit_float(dtype,
                     [&](auto element) { return standard_kernels<Float32Engine<Isa, decltype(element)>>(widens); });
}

}  // namespace attn::cpu
