// What an attention kernel is compiled for.
#pragma once

#include "attention/head_shape.h"
#include "common/elements.cuh"
#include "common/type_traits.h"

namespace attn {

/// Element_: of O and, unless it is QElement_, of Q. KvElement_: of the cache. Shape_: a HeadShape. Variant_: see
/// variants.h. QElement_: of Q; may be KvElement_, of 8 bits.
template <class Element_, class KvElement_, class Shape_, class Variant_, class QElement_ = Element_>
struct Traits {
  using Element = Element_;
  using KvElement = KvElement_;
  using QElement = QElement_;
  using Shape = Shape_;
  using Variant = Variant_;
  /// The products take Q, K and V of one type: those of a cache of 8-bit elements are widened on their way to them.
  static constexpr bool kWidens = !is_same<Element, KvElement>;
  static_assert(kWidens == Variant::kHasScales && KvElement::kBytes == (kWidens ? 1 : Element::kBytes),
                "a cache of another type has 8-bit elements, which have scales");
  static constexpr bool kHasFloat8Query = !is_same<Element, QElement>;
  static_assert(kHasFloat8Query == Variant::kHasQueryScale && (!kHasFloat8Query || is_same<QElement, KvElement>),
                "Q of 8 bits has the type of the cache, and a scale");
};

}  // namespace attn
