// The tiles in shared memory of the generic attention kernel.
#pragma once

#include "attention/params.h"
#include "attention/sm80/shape.h"
#include "attention/tile/shared_tile.cuh"
#include "common/type_traits.h"

namespace attn::sm80 {

/// The kernel's arguments.
template <class Traits>
using ParamsOf = typename Conditional<Traits::kIsLatent, LatentAttentionParams, AttentionParams>::Type;

template <class Traits>
constexpr SharedLayout kLayout{Traits::Shape::kDims, Traits::Element::kBytes, Traits::StoredElement::kBytes};

template <class Traits>
using QTile = SharedTile<typename Traits::Element, Traits::Shape::kQk>;

/// Rows of O on their way to global memory, where Q was.
template <class Traits>
using OTile = SharedTile<typename Traits::OutElement, Traits::Shape::kV>;

template <class Traits>
using KTile = SharedTile<typename Traits::KvElement, Traits::Shape::kQk>;

template <class Traits>
using VTile = SharedTile<typename Traits::KvElement, Traits::Shape::kV>;

/// K and V as they are multiplied. kDequantizesInTiles: they have been dequantized to other tiles before.
template <class Traits>
using MultipliedElement =
    typename Conditional<Traits::kDequantizesInTiles, typename Traits::Element, typename Traits::KvElement>::Type;

}  // namespace attn::sm80
