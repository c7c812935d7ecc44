// What an attention kernel is compiled for.
#pragma once

#include <type_traits>

#include "attention/head_shape.h"
#include "common/elements.cuh"

namespace attn {

/// Element_: of Q and O. KvElement_: of the cache. Shape_: a HeadShape. Variant_: see variants.h.
template <class Element_, class KvElement_, class Shape_, class Variant_>
struct Traits {
  using Element = Element_;
  using KvElement = KvElement_;
  using Shape = Shape_;
  using Variant = Variant_;
  static_assert(std::is_same_v<Element, KvElement>,
                "the products take Q, K and V of one type: a cache of another one must be converted first");
};

}  // namespace attn
