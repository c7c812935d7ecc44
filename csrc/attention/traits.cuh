// The parameters that an attention kernel is compiled for.
#pragma once

#include "attention/head_shape.h"
#include "attention/variant/variants.h"
#include "common/elements.cuh"
#include "common/platform.h"
#include "common/rotation.h"

namespace attn {

/// Element_: the type that products take. StoredElement_: of the cache; may be a StoredPair. Shape_: a HeadShape.
/// Variant_: see variants.h. QElement_: of Q; may be StoredElement_, of 8 bits, or the other 16-bit type. OutElement_:
/// of O; as Q's, or Float8E4M3.
template <class Element_, class StoredElement_, class Shape_, class Variant_, class QElement_ = Element_,
          class OutElement_ = Element_>
struct Traits {
  using Element = Element_;
  using StoredElement = StoredElement_;
  using QElement = QElement_;
  using OutElement = OutElement_;
  using Shape = Shape_;
  using Variant = Variant_;
  static constexpr bool kIsQuantized = !is_same<Element, StoredElement>;
  static constexpr KvForm kKvForm{StoredElement::kBytes, false, Variant::kHasTokenScales, StoredElement::kType,
                                  is_same<Element, BFloat16>};
  /// The products take Q, K and V of one type: 8-bit elements of a cache are dequantized between KV tile and product;
  /// with wide heads, between cache and KV tile. On Hopper the producer may dequantize KV tiles (sm90/traits.cuh).
  static constexpr bool kDequantizesOnLoad = kIsQuantized && is_wide(Shape::kDims);
  static constexpr bool kDequantizes = kIsQuantized && !kDequantizesOnLoad;
  static constexpr bool kIsLatent = is_latent(Shape::kDims);  // Q may be two tensors
  static constexpr bool kTransformsCache = VariantHooks<Variant>::kKey || VariantHooks<Variant>::kValue;
  /// Rows that a variant transforms, or that have scales, are dequantized in shared memory first; mma.sync then
  /// multiplies them as it does 16-bit elements. Others it dequantizes in registers.
  static constexpr bool kDequantizesInTiles = kDequantizes && (kTransformsCache || Variant::kHasTokenScales);
  static constexpr bool kDequantizesInRegisters = kDequantizes && !kDequantizesInTiles;
  using KvElement = typename Conditional<kDequantizesOnLoad, Element, StoredElement>::Type;  // of KV tiles
  using KElement = SideElement<KvElement, false>;
  using VElement = SideElement<KvElement, true>;
  /// The loader also multiplies by a scale, one for K and V: V lies in K's bytes.
  static constexpr bool kLoadsScaled = Variant::kLoadsScaled;
  static_assert(kIsQuantized == (Variant::kHasScales || kLoadsScaled || Variant::kHasTokenScales) &&
                    (kDequantizesOnLoad || !kLoadsScaled) && (kDequantizes || !Variant::kHasTokenScales) &&
                    StoredElement::kBytes == (kIsQuantized ? 1 : Element::kBytes),
                "a cache of another type has elements of 8 or 4 bits, which have scales");
  static_assert(kLoadsScaled || !is_same<StoredElement, ScaledLatent>, "rows of latents");
  static constexpr bool kHasFloat8Query = QElement::kBytes == 1;
  /// Q of another 16-bit type than the cache becomes Element before it is multiplied: it is read once for many tokens.
  static constexpr bool kConvertsQuery = !kHasFloat8Query && !is_same<Element, QElement>;
  static_assert(!kConvertsQuery || !kIsQuantized, "Element is then the cache's");
  static_assert(kHasFloat8Query == Variant::kHasQueryScale && (!kHasFloat8Query || is_same<QElement, KvElement>),
                "Q of 8 bits has the type of the cache, and a scale");
  static_assert(!Variant::kRotates ||
                    (!kTransformsCache && !VariantHooks<Variant>::kQuery && !VariantHooks<Variant>::kOutput &&
                     !kHasFloat8Query && Shape::kQk == Shape::kV && Shape::kV <= kMaxRotatedColumns),
                "what rotates rows is their only transform");
};

/// The factor of K's block scales, or of V's; 1 for other caches.
template <class Traits, class Params>
__device__ __forceinline__ float scale_factor(const Params& params, bool is_v) {
  if constexpr (Traits::kKvForm.has_block_scales()) {
    const auto& scales = params.variant.template as<typename Traits::Variant::Params>().scales;
    return is_v ? scales.v_factor : scales.k_factor;
  }
  return 1.0f;
}

}  // namespace attn
