// Everything that follows from a kernel's Traits: its arguments, its tuning, how it treats Q, K and V, and its tiles in
// shared memory.
#pragma once

#include "attention/sm90/params.h"
#include "attention/sm90/shape.h"
#include "attention/tile/shared_tile.cuh"
#include "attention/variant/variants.h"
#include "common/elements.cuh"
#include "common/platform.h"
#include "common/ptx/wgmma.cuh"

namespace attn::sm90 {

/// The kernel's arguments.
template <class Traits>
using ParamsOf = typename Conditional<Traits::kIsLatent, LatentHopperParams, HopperParams>::Type;

/// Whether K and V are transformed in the ring while the tiles before them are multiplied (prepared_tiles.cuh).
/// Not where the ring may have fewer than four tiles in use (Tuning::max_parts_in_flight): this needs two tiles after
/// those that are multiplied. There registers are scarce, too.
template <class Traits>
constexpr bool kTransformsEarly = Traits::kTransformsCache && !Traits::kDequantizes &&
                                  tuning(Traits::Shape::kDims, Traits::StoredElement::kBytes).stage_parts > 1;

template <class Traits>
ATTN_HD constexpr Tuning tuning_of() {
  Tuning found = tuning(Traits::Shape::kDims, Traits::StoredElement::kBytes);
  if (kTransformsEarly<Traits>) found.producer_registers = 72;  // the consumers need more than others
  return found;
}

template <class Traits>
constexpr Tuning kTuning = tuning_of<Traits>();

/// Whether KV tiles of an item are taken from the last to the first. A bias with a slope mostly grows from token to
/// token (ALiBi's does): rows then find their maxima among their nearest tokens, and can keep them (prefill.cuh).
template <class Traits>
constexpr bool kTakesLastFirst = kTuning<Traits>.keeps_maxima && VariantHooks<typename Traits::Variant>::kBiasSlope;

/// Whether the two CTAs that have the halves of row tiles are a cluster, and dequantize KV tiles for each other.
template <class Traits>
constexpr bool kMayBeCluster = Traits::kIsLatent && Traits::kDequantizesOnLoad;

/// Whether row tiles for wgmma multiply 8-bit elements (float8_prefill.cuh): where weights are probabilities, whose
/// range is known, and neither Q nor the cache is rewritten.
template <class Traits>
constexpr bool kMultipliesFloat8 = Traits::kHasFloat8Query && is_same<typename Traits::QElement, Float8E4M3> &&
                                   multiplies_float8(Traits::Shape::kDims) && Traits::Variant::kUsesSoftmax &&
                                   !VariantHooks<typename Traits::Variant>::kQuery && !Traits::kTransformsCache;

/// Whether Q of 8 bits becomes Element when it is loaded.
template <class Traits>
constexpr bool kDequantizesQuery = Traits::kHasFloat8Query && !kMultipliesFloat8<Traits>;

/// Whether consumers rewrite Q in shared memory before they multiply it.
template <class Traits>
constexpr bool kRewritesQuery = Traits::kConvertsQuery || VariantHooks<typename Traits::Variant>::kQuery;

/// Columns of O that a consumer warpgroup makes: the head's, and perhaps some more. With wide heads, half of them.
template <class Traits>
constexpr int kVColumns =
    is_wide(Traits::Shape::kDims) ? Traits::Shape::kV / 2 : columns_of_products(Traits::Shape::kVMultiplied);

template <class Traits>
__device__ __forceinline__ typename Traits::Variant variant_of(const AttentionParams& params, int32_t kv_head) {
  using Variant = typename Traits::Variant;
  return Variant(params.variant.as<typename Variant::Params>(), kv_head);
}

/// A tile of rows in shared memory, as TMA writes it and wgmma reads it: blocks of 64 columns (128 of a byte each), one
/// after another. In a block the eight 16-byte chunks of a row are permuted (chunk ^ row % 8).
/// kHeadColumns: of a head; a row may have room for more (tile_row_bytes()).
template <class Element_, int kHeadColumns_, int kRows>
struct SwizzledTile : PermutedRows<SwizzledTile<Element_, kHeadColumns_, kRows>> {
  using Element = Element_;
  static constexpr bool kIsFilledByTma = true;
  static constexpr int kHeadColumns = kHeadColumns_;
  static constexpr int kRowChunks = tile_row_bytes(kHeadColumns, Element::kBytes) / 16;
  static constexpr int kHeadBytes = kHeadColumns * Element::kBytes;
  static constexpr int kHeadChunks = kHeadBytes / 16;
  static constexpr int kBoxColumns = kBlockRowBytes / Element::kBytes;  // of a block
  static constexpr int kBlocks = ceil_div(kHeadColumns, kBoxColumns);   // that have columns of the head
  static constexpr uint32_t kRowBytes = kBlockRowBytes;                 // of a block
  static constexpr uint32_t kBlockBytes = kRows * kRowBytes;

  /// Byte offset of a 16-byte chunk.
  __device__ __forceinline__ static uint32_t offset(int row, int chunk) {
    return chunk / 8 * kBlockBytes + row * kRowBytes + (((chunk & 7) ^ (row & 7)) << 4);
  }

  /// As SharedTile::block().
  __device__ __forceinline__ static uint32_t block(uint32_t first, int rows, int columns) {
    return (first ^ columns % 4 * 32) + columns / 4 * kBlockBytes + rows * 16 * kRowBytes;
  }

  /// For wgmma, columns are the k dimension; `shared`: of a row that is a multiple of 8. Column block k of 16 columns
  /// (32 of a byte each) is at columns(descriptor, k).
  using Descriptor = ptx::MatrixDescriptor;
  __device__ __forceinline__ static Descriptor columns_descriptor(uint32_t shared) { return Descriptor(shared, 0); }
  __device__ __forceinline__ static Descriptor columns(Descriptor descriptor, int k) {
    return descriptor.advanced(k / 4 * kBlockBytes + k % 4 * 32);
  }

  /// For wgmma, rows are the k dimension. Row block k of 16 rows is at rows(descriptor, k); its columns from 64 *
  /// first_block on.
  __device__ __forceinline__ static Descriptor rows_descriptor(uint32_t shared) {
    return Descriptor(shared, kBlockBytes);
  }
  __device__ __forceinline__ static Descriptor rows(Descriptor descriptor, int k, int first_block = 0) {
    return descriptor.advanced(k * 16 * kRowBytes + first_block * kBlockBytes);
  }
};

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

// K and V as wgmma takes them: of an 8-bit cache, dequantized.
template <class Traits>
using WgmmaKTile = SwizzledTile<typename Traits::Element, Traits::Shape::kQk, kTuning<Traits>.kv_tile>;
template <class Traits>
using WgmmaVTile = SwizzledTile<typename Traits::Element, Traits::Shape::kV, kTuning<Traits>.kv_tile>;

}  // namespace attn::sm90
