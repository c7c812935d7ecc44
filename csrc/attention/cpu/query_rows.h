// Rows of Q as the kernel takes them: of one piece, and in the type of the products.
#pragma once

#include "attention/cpu/cache_rows.h"
#include "attention/cpu/kernels.h"
#include "attention/cpu/packed_rows.h"
#include "attention/params.h"
#include "common/cpu/elements.h"
#include "common/data_type.h"

namespace attn::cpu {

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
      if (has_8_bits(variant.scales.q_element)) {
        const uint8_t* const bytes = static_cast<const uint8_t*>(part.data) + element;
        Rows::widen_row(bytes, variant.scales.q_element, columns, made);
        return made;
      }
    }
    if (params.is_mixed) {
      Rows::convert_row(static_cast<const typename OtherElementOf<Element>::Type*>(part.data) + element, columns, made);
      return made;
    }
    return static_cast<const Element*>(part.data) + element;
  }
};

}  // namespace attn::cpu
