// Q, K and V tiles in shared memory. TMA writes them, and wgmma reads them.
#pragma once

#include "attention/feed/tuning.h"
#include "attention/tile/shared_tile.cuh"
#include "common/ptx/wgmma.cuh"

namespace attn::feed {

/// A tile of rows in shared memory, as TMA writes it and wgmma reads it: blocks of 64 columns (128 of a byte each), one
/// after another. In a block the eight 16-byte chunks of a row are permuted (chunk ^ row % 8).
/// kHeadColumns: of a head, of 4 bits its bytes; a row may have room for more (tile_row_bytes()).
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
using QTile = SwizzledTile<typename Traits::QueryElement, Traits::Shape::kQk, Traits::kTuning.q_rows()>;

template <class Traits>
using KTile = SwizzledTile<typename Traits::KElement, stored_columns<typename Traits::KElement>(Traits::Shape::kQk),
                           Traits::kTuning.kv_tile>;

template <class Traits>
using VTile = SwizzledTile<typename Traits::VElement, stored_columns<typename Traits::VElement>(Traits::Shape::kV),
                           Traits::kTuning.kv_tile>;

// K and V as wgmma takes them: of an 8-bit cache, dequantized.
template <class Traits>
using WgmmaKTile = SwizzledTile<typename Traits::Element, Traits::Shape::kQk, Traits::kTuning.kv_tile>;
template <class Traits>
using WgmmaVTile = SwizzledTile<typename Traits::Element, Traits::Shape::kV, Traits::kTuning.kv_tile>;

/// Words of the TokenScales of a token of K or V in shared memory: of a pair its own, else as many as the wider of K
/// and V has.
template <class Traits>
ATTN_HD constexpr int scale_words_of(bool is_v) {
  constexpr KvForm kForm = Traits::kKvForm;
  constexpr int kOfBoth = max_of(Traits::kTuning.token_scale_words, 1);
  constexpr int kOfK = kForm.is_pair() ? kForm.scale_words(Traits::Shape::kQk, false) : kOfBoth;
  constexpr int kOfV = kForm.is_pair() ? kForm.scale_words(Traits::Shape::kV, true) : kOfBoth;
  return is_v ? kOfV : kOfK;
}

/// Bytes of a token of K or V in a packed tile.
template <class Traits>
ATTN_HD constexpr int packed_token_bytes(bool is_v) {
  constexpr int kOfK = packed_token_bytes(Traits::Shape::kDims, Traits::kKvForm, false);
  constexpr int kOfV = packed_token_bytes(Traits::Shape::kDims, Traits::kKvForm, true);
  return is_v ? kOfV : kOfK;
}

template <class Traits>
__device__ __forceinline__ typename Traits::Variant variant_of(const AttentionParams& params, int32_t kv_head) {
  using Variant = typename Traits::Variant;
  return Variant(params.variant.as<typename Variant::Params>(), kv_head);
}

}  // namespace attn::feed
