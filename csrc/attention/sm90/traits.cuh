// The Hopper design's additions to a kernel's traits, and the tile that only its consumers use.
#pragma once

#include "attention/feed/params.h"
#include "attention/feed/tiles.cuh"
#include "attention/sm90/shape.h"
#include "attention/traits.cuh"
#include "attention/variant/variants.h"
#include "common/elements.cuh"

namespace attn::sm90 {

/// Kernel: its Traits. kGathers: the producer gathers tokens one by one (RowCopier).
template <class Kernel, bool kGathers = false>
struct HopperTraits : Kernel {
  using Shape = typename Kernel::Shape;
  using Hooks = VariantHooks<typename Kernel::Variant>;
  using Params = typename Conditional<Kernel::kIsLatent, LatentTmaParams, TmaParams>::Type;  // of a launch

  /// Row tiles for wgmma multiply 8-bit elements (float8_prefill.cuh). Weights must be probabilities, whose range is
  /// known. Q and the cache must not be rewritten. The host applies the same rule: prefill_multiplies_float8() in
  /// attention.py.
  static constexpr bool kMultipliesFloat8 = Kernel::kHasFloat8Query && is_same<typename Kernel::QElement, Float8E4M3> &&
                                            multiplies_float8(Shape::kDims) && Kernel::Variant::kUsesSoftmax &&
                                            !Hooks::kQuery && !Kernel::kTransformsCache;
  static constexpr KvForm kKvForm{Kernel::StoredElement::kBytes, kMultipliesFloat8, Kernel::Variant::kHasTokenScales,
                                  Kernel::kKvForm.dtype, Kernel::kKvForm.is_for_bf16};
  static constexpr Tuning kTuningOfShape = tuning(Shape::kDims, kKvForm);
  /// The producer dequantizes tiles of 8-bit caches in the ring (feed/dequantizer.cuh).
  static constexpr bool kDequantizesInFeed = kTuningOfShape.dequantized_stages > 0;
  /// Weights may be too large or too small for f16: they are no probabilities, whose range is known.
  static constexpr bool kHasWideWeights = !Kernel::Variant::kUsesSoftmax && !is_same<typename Kernel::Element, Float16>;
  /// Also of row tiles for mma.sync. Their weights would be f16 numbers (except in products of bf16), or a variant
  /// transforms them, or 4-bit tiles cannot stay packed. Registers are then few, of consumers or of a producer that
  /// gathers. Other tiles for mma.sync stay as they are stored, and are dequantized in registers.
  static constexpr bool kFeedsAll =
      kDequantizesInFeed &&
      (Kernel::kTransformsCache || (kHasWideWeights && stored_format(kKvForm.dtype).packed != PackedProducts::kBf16) ||
       (kKvForm.has_4_bits() && (kGathers || !decodes_packed(Shape::kDims, kKvForm))));
  static constexpr bool kDequantizesInRegisters = kDequantizesInFeed ? !kFeedsAll : Kernel::kDequantizesInRegisters;
  /// Consumers dequantize tiles in registers, and read their TokenScales from shared memory.
  static constexpr bool kScalesInShared = Kernel::Variant::kHasTokenScales && kDequantizesInRegisters;
  /// K and V are transformed in the ring while the tiles before them are multiplied (prepared_tiles.cuh). Not where the
  /// ring may have fewer than four tiles in use (Tuning::max_parts_in_flight): this needs two tiles after those that
  /// are multiplied. There registers are scarce, too. Not where the producer dequantizes either: it needs them.
  static constexpr bool kTransformsEarly =
      Kernel::kTransformsCache && !kDequantizesInFeed && kTuningOfShape.stage_parts > 1;
  /// Row tiles for mma.sync multiply packed tiles (packed_decode.cuh).
  static constexpr bool kTakesPacked = kKvForm.has_4_bits() && kDequantizesInRegisters;
  // The consumers that transform early need more registers than others.
  static constexpr Tuning kTuning = kTransformsEarly ? with_producer_registers(kTuningOfShape, 72)
                                    : kTakesPacked   ? for_packed(kTuningOfShape)
                                                     : kTuningOfShape;
  /// The KV tiles of an item are taken from the last to the first. A bias with a slope mostly grows from token to token
  /// (ALiBi's does): rows then find their maxima among their nearest tokens, and can keep them (prefill.cuh).
  static constexpr bool kTakesLastFirst = kTuning.keeps_maxima && Hooks::kBiasSlope;
  /// The two CTAs that have the halves of row tiles are a cluster, and dequantize KV tiles for each other.
  static constexpr bool kMayBeCluster = Kernel::kIsLatent && Kernel::kDequantizesOnLoad;
  /// Q of 8 bits becomes Element when it is loaded.
  static constexpr bool kDequantizesQuery = Kernel::kHasFloat8Query && !kMultipliesFloat8;
  /// Consumers rewrite Q in shared memory before they multiply it.
  static constexpr bool kRewritesQuery = Kernel::kConvertsQuery || Hooks::kQuery || Kernel::Variant::kRotates;
  using QueryElement =  // in shared memory
      typename Conditional<kMultipliesFloat8, typename Kernel::QElement, typename Kernel::Element>::Type;
  /// Columns of O that a consumer warpgroup makes: the head's, and perhaps some more. With wide heads, half of them.
  static constexpr int kVColumns = is_wide(Shape::kDims) ? Shape::kV / 2 : columns_of_products(Shape::kVMultiplied);
};

/// Rows of O on their way to global memory, where Q was.
template <class Traits>
using OTile = SwizzledTile<typename Traits::OutElement, Traits::Shape::kV, Traits::kTuning.q_rows()>;

}  // namespace attn::sm90
