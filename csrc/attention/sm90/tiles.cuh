// Everything that follows from a kernel's Traits: its arguments, its tuning, how it treats Q, K and V, and its tiles in
// shared memory.
#pragma once

#include "attention/sm90/params.h"
#include "attention/sm90/shape.h"
#include "attention/sm90/swizzled_tile.cuh"
#include "attention/variant/variants.h"
#include "common/elements.cuh"
#include "common/type_traits.h"

namespace attn::sm90 {

/// The kernel's arguments.
template <class Traits>
using ParamsOf = typename Conditional<Traits::kIsLatent, LatentHopperParams, HopperParams>::Type;

/// Whether K and V are transformed in the ring while the tiles before them are multiplied (consumer_base.cuh). Not
/// where the ring may have fewer than four tiles in use (Tuning::max_parts_in_flight): this needs two tiles after those
/// that are multiplied. There registers are scarce, too.
template <class Traits>
constexpr bool kTransformsEarly = Traits::kTransformsCache && !Traits::kWidens &&
                                  tuning(Traits::Shape::kDims, Traits::StoredElement::kBytes).slot_parts > 1;

template <class Traits>
ATTN_HD constexpr Tuning tuning_of() {
  Tuning found = tuning(Traits::Shape::kDims, Traits::StoredElement::kBytes);
  if (kTransformsEarly<Traits>) found.producer_registers = 72;  // the consumers need more than others
  return found;
}

template <class Traits>
constexpr Tuning kTuning = tuning_of<Traits>();

/// Whether KV tiles of an item are taken from the last to the first. A bias with a slope mostly grows from token to
/// token (ALiBi's does): rows then find their maxima among their nearest tokens, and can keep them (consumer.cuh).
template <class Traits>
constexpr bool kTakesLastFirst = kTuning<Traits>.keeps_maxima && VariantHooks<typename Traits::Variant>::kBiasSlope;

/// Whether the two CTAs that have the halves of row tiles are a cluster, and widen KV tiles for each other.
template <class Traits>
constexpr bool kMayBeCluster = Traits::kIsLatent && Traits::kWidensOnLoad;

/// Whether row tiles for wgmma multiply 8-bit elements (float8_consumer.cuh): where weights are probabilities, whose
/// range is known, and neither Q nor the cache is rewritten.
template <class Traits>
constexpr bool kMultipliesFloat8 = Traits::kHasFloat8Query && is_same<typename Traits::QElement, Float8E4M3> &&
                                   multiplies_float8(Traits::Shape::kDims) && Traits::Variant::kUsesSoftmax &&
                                   !VariantHooks<typename Traits::Variant>::kQuery && !Traits::kTransformsCache;

/// Whether Q of 8 bits becomes Element when it is loaded.
template <class Traits>
constexpr bool kWidensQuery = Traits::kHasFloat8Query && !kMultipliesFloat8<Traits>;

template <class Traits>
using QueryElement =  // in shared memory
    typename Conditional<kMultipliesFloat8<Traits>, typename Traits::QElement, typename Traits::Element>::Type;

template <class Traits>
using QTile = SwizzledTile<QueryElement<Traits>, Traits::Shape::kQk, kTuning<Traits>.q_rows()>;

/// Rows of O on their way to global memory, where Q was.
template <class Traits>
using OTile = SwizzledTile<typename Traits::OutElement, Traits::Shape::kV, kTuning<Traits>.q_rows()>;

template <class Traits>
using KTile = SwizzledTile<typename Traits::KvElement, Traits::Shape::kQk, kTuning<Traits>.kv_tile>;

template <class Traits>
using VTile = SwizzledTile<typename Traits::KvElement, Traits::Shape::kV, kTuning<Traits>.kv_tile>;

// K and V as wgmma takes them: of an 8-bit cache, widened.
template <class Traits>
using WideKTile = SwizzledTile<typename Traits::Element, Traits::Shape::kQk, kTuning<Traits>.kv_tile>;
template <class Traits>
using WideVTile = SwizzledTile<typename Traits::Element, Traits::Shape::kV, kTuning<Traits>.kv_tile>;

}  // namespace attn::sm90
