// Rows of Q and of the cache on their way into the kernel: transformed by a variant, or in another type.
#pragma once

#include "attention/cpu/kernels.h"
#include "attention/cpu/work_item.h"
#include "attention/params.h"
#include "attention/variant/coordinates.h"
#include "attention/variant/variants.h"
#include "cache/kv_cache.h"
#include "cache/quantizers.h"
#include "common/cpu/elements.h"
#include "common/data_type.h"
#include "common/platform.h"
#include "common/rotation.h"
#include "planner/schedule.h"

namespace attn::cpu {

/// Isa: vectors of float. Element: the type that the engine multiplies.
template <class Isa, class Element>
struct CacheRows {
  /// Applies `change` to the pairs of a row of Q, K or V, whose numbers are multiplied by `scale` before.
  template <class Change>
  static void transform_row(const Element* row, int columns, const PairLayout& pairs, float scale, Element* transformed,
                            const Change& change) {
    alignas(64) float values[kMaxHeadDim];
    load_row(row, columns, values);
    if (scale != 1.0f) {
      for (int i = 0; i < columns; ++i) values[i] *= scale;
    }
    const PairLayout layout = pairs.for_head(columns);
    for (int32_t begin = 0; begin < layout.columns; begin += 2 * layout.distance) {
      for (int32_t first = begin; first < begin + layout.distance; ++first) {
        const int32_t second = first + layout.distance;
        const Pair changed = change(Pair{values[first], values[second]}, first, second);
        values[first] = changed.first;
        values[second] = changed.second;
      }
    }
    store_row(values, columns, transformed);
  }

  /// Rotates a row of Q and divides it by b (common/rotation.h).
  static void rotate_query(const Element* row, int columns, Element* rotated) {
    alignas(64) float values[kMaxHeadDim];
    load_row(row, columns, values);
    rotate_row(values, columns, 1.0f / static_cast<float>(rotation_block(columns)));
    store_row(values, columns, rotated);
  }

  /// Keys and values that are packed at once.
  static constexpr int kPackTokens = 16;

  /// Rows of the cache, transformed.
  struct TransformedRows {
    Element rows[kPackTokens][kMaxHeadDim];
  };

  /// Transforms rows [begin, end) of the block, whose first is token number `token` of `tokens`; some may not exist.
  /// `rows`: their addresses, which become those of the results, and may be those already; `scale`: of 8-bit numbers.
  template <class Change>
  static void transform_rows(const char** rows, int columns, const TokenRange& part, const KvTokens& tokens,
                             int32_t token, const PairLayout& pairs, float scale, TransformedRows& transformed,
                             const Change& change) {
    for (int i = part.begin; i < part.end; ++i) {
      Element* const to = transformed.rows[i - part.begin];
      const KvToken at = tokens.at(token + i);
      transform_row(reinterpret_cast<const Element*>(rows[i]), columns, pairs, scale, to,
                    [&](const Pair& x, int32_t first, int32_t second) { return change(x, first, second, at); });
      rows[i] = reinterpret_cast<const char*>(to);
    }
  }

  /// Widens a row of the cache or of Q from a type of 8 bits or 4. `scales`: the row's TokenScales, which multiply its
  /// numbers before they are rounded; nullptr: it has none. `factor`: of scales of blocks.
  static void widen_row(const void* row, DataType dtype, int columns, Element* to, const float* scales = nullptr,
                        float factor = 1.0f) {
    const float scale = scales == nullptr ? 1.0f : *scales;
    switch (dtype) {
      case DataType::kFloat8E4M3:
        return widen_numbers(static_cast<const Float8E4M3*>(row), columns, to, scale);
      case DataType::kFloat8E5M2:
        return widen_numbers(static_cast<const Float8E5M2*>(row), columns, to, scale);
      case DataType::kInt8:
        return widen_numbers(static_cast<const Int8*>(row), columns, to, scale);
      case DataType::kScaledLatent:
        return widen_latent(static_cast<const char*>(row), columns, to);
      default:
        if (has_4_bits(dtype))
          visit_quantizer(dtype, [&](auto quantizer) {
            widen_4_bits<decltype(quantizer)>(static_cast<const uint8_t*>(row), dtype, columns, to, scales, factor);
          });
    }
  }

  /// Converts a row of Q from the other 16-bit type. What exceeds the largest float16 becomes that, as on a GPU.
  static void convert_row(const OtherElement<Element>* row, int columns, Element* to) {
    alignas(64) float values[kMaxHeadDim];
    load_row(row, columns, values);
    if constexpr (is_same<Element, Half>) {
      for (int j = 0; j < columns; ++j) values[j] = finite_half(values[j]);
    }
    store_row(values, columns, to);
  }

  /// Widens rows [begin, end) of the block. `rows`: their addresses, then the addresses of the results. `scales`: of
  /// the rows, or nullptr.
  static void widen_rows(const char** rows, const float* const* scales, float factor, DataType dtype, int columns,
                         const TokenRange& part, TransformedRows& wide) {
    for (int i = part.begin; i < part.end; ++i) {
      Element* const to = wide.rows[i - part.begin];
      widen_row(rows[i], dtype, columns, to, scales == nullptr ? nullptr : scales[i], factor);
      rows[i] = reinterpret_cast<const char*>(to);
    }
  }

 private:
  template <class From>
  static void load_row(const From* row, int columns, float* values) {
    for (int i = 0; i < columns; i += Isa::kWidth) Isa::store(values + i, Isa::load_elements(row + i, columns - i));
  }
  static void store_row(const float* values, int columns, Element* to) {
    for (int i = 0; i < columns; i += Isa::kWidth) Isa::store_elements(to + i, Isa::load(values + i), columns - i);
  }

  template <class Narrow>
  static void widen_numbers(const Narrow* row, int columns, Element* to, float scale) {
    alignas(64) float values[kMaxHeadDim];
    for (int j = 0; j < columns; ++j) values[j] = to_float(row[j]) * scale;
    store_row(values, columns, to);
  }

  template <class Quantizer>
  static void widen_4_bits(const uint8_t* row, DataType dtype, int columns, Element* to, const float* scales,
                           float factor) {
    alignas(64) float values[kMaxHeadDim];
    const int step = Quantizer::kOfBlocks ? kScaleColumns : columns;
    for (int first = 0; first < columns; first += step) {
      const typename Quantizer::Scale scale(scales, first / step, factor, dtype);
      for (int j = first; j < first + step; j += 2) {
        values[j] = scale.value(row[j / 2] & 15);
        values[j + 1] = scale.value(row[j / 2] >> 4);
      }
    }
    if constexpr (is_same<Element, Half> && Quantizer::kOfBlocks) {  // the largest number may be rounded up, beyond it
      for (int j = 0; j < columns; ++j) values[j] = finite_half(values[j]);
    }
    store_row(values, columns, to);
  }

  /// For rows that carry their scales.
  static void widen_latent(const char* row, int columns, Element* to) {
    using Row = ScaledLatentRow;
    alignas(64) float values[kMaxHeadDim];
    float scales[Row::kScales];
    __builtin_memcpy(scales, row + Row::kScalesAt, sizeof(scales));
    const auto* const latent = reinterpret_cast<const Float8E4M3*>(row);
    const auto* const rope = reinterpret_cast<const BFloat16*>(row + Row::kRopeAt);
    for (int j = 0; j < Row::kLatentColumns; ++j) values[j] = to_float(latent[j]) * scales[j / Row::kColumnsOfScale];
    for (int j = Row::kLatentColumns; j < columns; ++j) values[j] = to_float(rope[j - Row::kLatentColumns]);
    store_row(values, columns, to);
  }
};

/// Rows of Q as the kernel takes them: of one piece, and in the type of the products.
template <class Isa, class Element, class Variant>
struct QueryRows {
  using Rows = CacheRows<Isa, Element>;
  const CpuAttentionParams& params;
  HeadDims dims;
  const Variant& variant;

  /// A row of Q. It is put together in `made` if it has two parts or another type.
  const Element* row(const PackedRow& place, Element* made) const {
    const QueryPart q{params.q, params.q_row_stride, params.q_head_stride};
    const QueryPart& rope = params.q_rope;
    if (rope.data == nullptr) return columns_of(q, place, dims.qk, made);
    const Element* const latent = columns_of(q, place, dims.v, made);
    if (latent != made) __builtin_memcpy(made, latent, sizeof(Element) * static_cast<unsigned>(dims.v));
    Element* const after_latent = made + dims.v;
    const int columns = dims.qk - dims.v;
    const Element* const rotated = columns_of(rope, place, columns, after_latent);
    if (rotated != after_latent)
      __builtin_memcpy(after_latent, rotated, sizeof(Element) * static_cast<unsigned>(columns));
    return made;
  }

 private:
  /// Columns of a row of Q, converted in `made` if they have another type.
  const Element* columns_of(const QueryPart& part, const PackedRow& place, int columns, Element* made) const {
    const int64_t element = place.row * part.row_stride + place.qo_head * part.head_stride;
    if constexpr (Variant::kHasScales) {
      if (is_in_bytes(variant.scales.q_element)) {
        const uint8_t* const bytes = static_cast<const uint8_t*>(part.data) + element;
        Rows::widen_row(bytes, variant.scales.q_element, columns, made);
        return made;
      }
    }
    if (params.is_mixed) {
      Rows::convert_row(static_cast<const OtherElement<Element>*>(part.data) + element, columns, made);
      return made;
    }
    return static_cast<const Element*>(part.data) + element;
  }
};

}  // namespace attn::cpu
