// How the producer dequantizes tiles of an 8-bit cache where they lie, in the ring: consumers then multiply 16-bit
// tiles by the loops of a 16-bit cache.
//
// A stage has room for a stored tile, and a dequantized tile takes dequantized_stages of them. A warp loads its share
// of a tile as for consumers that dequantize (kv_copiers.cuh), but spread. It waits for its share at one of its
// barriers, kv_stored. A row of a stored block becomes the same row of two blocks. The second of them lies where the
// stored block did: a warp reads rows, then writes over them. No other warp has a part in these rows.
//
// Row tiles of 16 rows take their tiles as they are stored, and dequantize them in registers, unless a variant
// transforms them. Their tiles take one stage.
#pragma once

#include "attention/feed/kv_copiers.cuh"
#include "attention/feed/shared_memory.cuh"
#include "attention/feed/tiles.cuh"
#include "common/elements.cuh"
#include "common/ptx/barrier.cuh"
#include "common/ptx/copy.cuh"
#include "common/ptx/warp.cuh"

namespace attn::feed {

/// Loads and dequantizes a producer warp's share of tiles. A tile is dequantized while the next one is on its way.
template <class Traits, class Copier>
class InPlaceDequantizer {
 public:
  using Shared = SharedMemory<Traits>;
  using Place = typename Shared::KvPlace;
  using Share = KvShare<Traits>;
  static constexpr int kTileParts = Shared::kTileParts, kParts = Shared::kParts;
  static_assert(Shared::kKvParts % kTileParts == 0, "a tile's stages lie together");

  __device__ __forceinline__ InPlaceDequantizer(const Shared& shared, const Share& share)
      : shared_(shared), share_(share) {}

  /// Fills `count` tiles of an item; no more than `limited` of the first as wait_for_part() says. The first has been
  /// looked up; look_up(i) does so for number i. `place`: where the warp's part of the first is, were it to stay as it
  /// is stored. All are dequantized in the end: warps then wait for one another, and for room for Q.
  template <class LookUp>
  __device__ __forceinline__ void fill(Copier& copier, const LoadedRowTile& tile, int32_t head, int count, int limited,
                                       ptx::CachePolicy policy, const LookUp& look_up, Place& place) {
    const int first = loaded_;
    int part = dequantized_place(place).index;  // of the next tile to dequantize
#pragma unroll 1
    for (int done = first; done < first + count; ++done) {
      // Consumers may wait for a tile that has been loaded. Before the warp waits for room, which they make, it
      // therefore dequantizes all.
      while (loaded_ < first + count && (loaded_ == done || has_room(place, loaded_ - first < limited))) {
        const auto found = copier.found(tile);
        const int next = loaded_ + 1 - first;
        if (Copier::kGathers && next < count) look_up(next);
        load(copier, found, head, dequantized_place(place), loaded_ - first < limited, policy);
        if (!Copier::kGathers && next < count) look_up(next);
        place = place.ahead(2 * kTileParts);
        if (loaded_ - done == kStoredBarriers) break;
      }
      dequantize(part, done);
      part += part < Shared::kKvParts - 2 * kTileParts ? 2 * kTileParts : 2 * kTileParts - Shared::kKvParts;
    }
  }

 private:
  /// V lies behind all stages of K.
  __device__ __forceinline__ Place dequantized_place(const Place& stored) const {
    return share_.is_v ? stored.ahead(kTileParts - kParts) : stored;
  }

  /// Whether a tile may be filled without waiting. All lanes must do the same, and may see a barrier in different
  /// phases.
  __device__ __forceinline__ bool has_room(const Place& stored, bool is_limited) const {
    const Place place = dequantized_place(stored);
    bool has = !is_limited & shared_.is_kv_free(place);
    if constexpr (kTileParts > kParts) has &= shared_.is_kv_free(place.ahead(kParts));
    return __all_sync(0xffffffffu, has);
  }

  template <class Found>
  __device__ __forceinline__ void load(const Copier& copier, const Found& found, int32_t head, const Place& place,
                                       bool is_limited, ptx::CachePolicy policy) {
    if (is_limited) shared_.wait_kv_free(place.ahead(Shared::kKvParts - Traits::kTuning.max_parts_in_flight));
    shared_.wait_kv_free(place);
    if constexpr (kTileParts > kParts) shared_.wait_kv_free(place.ahead(kParts));
    copier.template copy<0, Share::kMaxBlocks>(shared_, found, head, place.index, policy, barrier(loaded_));
    ++loaded_;
  }

  __device__ __forceinline__ uint32_t barrier(int load) const {
    return shared_.kv_stored(ptx::thread_id() / 32, load % kStoredBarriers);
  }

  /// Dequantizes the warp's share of the tile of part number `part`, which it loaded as number `load`.
  __device__ __forceinline__ void dequantize(int part, int load) const {
    ptx::mbarrier_wait(barrier(load), load / kStoredBarriers & 1);
    char* const tile = shared_.kv(part);
    if constexpr (Traits::Shape::kQk == Traits::Shape::kV) {
      dequantize_rows<KTile<Traits>, WgmmaKTile<Traits>>(tile);
    } else if (share_.is_v) {
      dequantize_rows<VTile<Traits>, WgmmaVTile<Traits>>(tile);
    } else {
      dequantize_rows<KTile<Traits>, WgmmaKTile<Traits>>(tile);
    }
    ptx::fence_async_proxy();                             // before wgmma reads it, and TMA writes it again
    constexpr int kArrivals = Copier::kGathers ? 32 : 1;  // as if it had been loaded for consumers that dequantize
    // Consumers wait only for the first stage's parts.
    if constexpr (kTileParts > kParts) Shared::arrive_as_warp(shared_.kv_full(part + kParts), kArrivals);
    Shared::arrive_as_warp(shared_.kv_full(part), kArrivals);
  }

  template <class Stored, class Wide>
  __device__ __forceinline__ void dequantize_rows(char* tile) const {
    constexpr int kRowsOfWarp = 8;  // that a warp takes at a time: four lanes take a block of a dequantized row
    // Of a lane, read before any is written: registers are few.
    constexpr int kRows = 2;
    constexpr int kStep = kRows * kRowsOfWarp;
    static_assert(Share::kTokens % kStep == 0 && Stored::kBlockBytes == Wide::kBlockBytes);
    const int lane = ptx::lane_id(), chunk = lane % 4;
    // Eight lanes take a pair of rows, chosen so that neither their loads nor their stores fall into the same banks.
    const int first = share_.first_token + (lane / 8 ^ lane / 4 % 2 * 5);
    uint32_t from = Stored::offset(first, chunk), to = Wide::offset(first, chunk * 2);
#pragma unroll 1
    for (int row = 0; row < Share::kTokens; row += kStep) {
#pragma unroll
      for (int block = 0; block < Wide::kBlocks; ++block) {
        uint4 bytes[kRows];
#pragma unroll
        for (int i = 0; i < kRows; ++i)
          bytes[i] = *reinterpret_cast<const uint4*>(
              tile + (from ^ block % 2 * 64) + target_block(block / 2, true, Wide::kBlocks) * Stored::kBlockBytes +
              i * kRowsOfWarp * Stored::kRowBytes);
        if (target_block(block / 2, true, Wide::kBlocks) == block) __syncwarp();  // all lanes have read the rows
#pragma unroll
        for (int i = 0; i < kRows; ++i)
          store_sixteen<typename Wide::Element, typename Stored::Element>(
              tile, to + block * Wide::kBlockBytes + i * kRowsOfWarp * Wide::kRowBytes, bytes[i]);
      }
      from += kStep * Stored::kRowBytes;
      to += kStep * Wide::kRowBytes;
    }
  }

  /// Dequantizes sixteen numbers to two neighboring chunks.
  template <class Element, class Stored>
  __device__ __forceinline__ static void store_sixteen(char* tile, uint32_t target, const uint4& bytes) {
    *reinterpret_cast<uint4*>(tile + target) = dequantize_eight<Element, Stored>(make_uint2(bytes.x, bytes.y));
    *reinterpret_cast<uint4*>(tile + (target ^ 16)) = dequantize_eight<Element, Stored>(make_uint2(bytes.z, bytes.w));
  }

  const Shared& shared_;
  const Share& share_;
  int loaded_ = 0;  // tiles so far
};

/// Where consumers dequantize, or nobody.
struct NoDequantizer {
  template <class Shared, class Share>
  __device__ __forceinline__ NoDequantizer(const Shared& /*shared*/, const Share& /*share*/) {}
};

}  // namespace attn::feed
