// How the producer dequantizes tiles of an 8-bit or 4-bit cache where they lie, in the ring: consumers then multiply
// 16-bit tiles by the loops of a 16-bit cache.
//
// A stage has room for a stored tile. A dequantized tile takes dequantized_stages of them. The copier loads a warp's
// share of a tile and spreads it over the memory of the 16-bit tile (kv_copiers.cuh). The warp waits for it at one of
// its barriers, kv_stored. A row of a stored block becomes the same row of two blocks, over 4 bits of up to four. The
// last of them lies where the stored block did: a lane reads a chunk before it writes over it. No other lane has a part
// in the row.
//
// Tiles of long row groups have been dequantized before (dequantized_kv.h), and are only loaded.
//
// Where kFeedsAll does not hold (a member of Traits), row tiles of 16 rows take tiles as they are stored, and
// dequantize them in registers. These tiles take one stage.
#pragma once

#include "attention/feed/kv_copiers.cuh"
#include "attention/feed/shared_memory.cuh"
#include "attention/feed/tiles.cuh"
#include "common/elements.cuh"
#include "common/ptx/barrier.cuh"
#include "common/ptx/copy.cuh"
#include "common/ptx/warp.cuh"

namespace attn::feed {

/// Loads and dequantizes a producer warp's share of tiles. A tile is dequantized while the next one is on its way,
/// unless the next one is `limited` (fill()).
template <class Traits, class Copier>
class InPlaceDequantizer {
 public:
  using Shared = SharedMemory<Traits>;
  using Place = typename Shared::KvPlace;
  using Share = KvShare<Traits>;
  static constexpr int kTileParts = Shared::kTileParts, kParts = Shared::kParts;
  static constexpr int kLaneRows = Share::kLaneTokens;  // of a tile
  static constexpr bool kHasScales = Traits::Variant::kHasTokenScales;
  static_assert(Shared::kKvParts % kTileParts == 0, "a tile's stages lie together");

  /// `arrivals`: of a warp at the barrier of a part, as without dequantization. `factor`: scale_factor().
  __device__ __forceinline__ InPlaceDequantizer(const Shared& shared, const Share& share, uint32_t arrivals,
                                                float factor)
      : shared_(shared), share_(share), arrivals_(arrivals), factor_(factor) {}

  /// Fills `count` tiles of an item, which has been looked up; the first `num_limited` as wait_for_part() does if
  /// `limited`. Tile number i begins at token_of(i). `place`: where the warp's part of the first is, were it to stay as
  /// it is stored. All are dequantized in the end: warps then wait for one another, and for room for Q.
  template <class TokenOf>
  __device__ __forceinline__ void fill(Copier& copier, const LoadedRowTile& tile, int32_t head, int count,
                                       int num_limited, const TokenOf& token_of, Place& place) {
    const int first = loaded_;
#pragma unroll 1
    for (int done = first; done < first + count; ++done) {
      // Consumers may wait for a tile that has been loaded. Before the warp waits for room, which they make, it
      // therefore dequantizes all.
      while (loaded_ < first + count) {
        const bool is_limited = loaded_ - first < num_limited;
        const Place to = dequantized_place(place);
        if (loaded_ == done)
          wait_for_room(to, is_limited);
        else if (is_limited || !has_room(to))
          break;
        const auto found =
            copier.found(tile, [&](int i) { return token_of(loaded_ - first + i); }, count - (loaded_ - first));
        const int next = loaded_ + 1 - first;
        copier.template copy<0, Share::kMaxBlocks>(shared_, found, head, to.index, ptx::kKeepNormally,
                                                   barrier(loaded_));
        ++loaded_;
        copier.look_up_next(tile, [&](int) { return token_of(next); }, count - next);
        place = place.ahead(2 * kTileParts);
        if (loaded_ - done == kStoredBarriers) break;
      }
      const int part = dequantized_place(place).index - (loaded_ - done) * 2 * kTileParts;
      dequantize(part < 0 ? part + Shared::kKvParts : part, done);
    }
  }

  /// The same for tiles of DequantizedKv. If stages have two parts, each warp loads its own tokens and waits only for
  /// its own parts. After row tiles of 16 rows the other warp's parts may be a round of the ring behind, and a wait for
  /// them would end too early. Otherwise one of the two warps that share a tile loads all of it. `row_of`: the row
  /// there at which tile number i begins.
  template <class RowOf>
  __device__ __forceinline__ void load(const typename Traits::Params& params, int32_t head, int count, int num_limited,
                                       const RowOf& row_of, Place& place) const {
#pragma unroll 1
    for (int i = 0; i < count; ++i) {
      const Place to = dequantized_place(place);
      wait_for_room(to, i < num_limited);
      if constexpr (kParts == 1) {
        if (share_.first_token == 0) {
          for (int part = 1; part < kTileParts; ++part) shared_.wait_kv_free(to.ahead(part));
          if (ptx::lane_id() == 0) {
            const uint32_t full = shared_.kv_full(to.index);
            ptx::mbarrier_expect(full, Traits::kTuning.kv_tile * share_.wide_blocks() * kBlockRowBytes);
            ptx::copy_box(ptx::shared_address(shared_.kv(to.index)),
                          share_.is_v ? params.dequantized_v : params.dequantized_k, full, 0, row_of(i),
                          head * share_.wide_blocks(), 0, ptx::kKeepNormally);
          }
        }
      } else if (ptx::lane_id() == 0) {
        const uint32_t full = shared_.kv_full(to.index);
        const uint32_t target = ptx::shared_address(shared_.kv(to.index)) + share_.first_token * kBlockRowBytes;
        const int blocks = share_.wide_blocks(), row = row_of(i) + share_.first_token;
        ptx::mbarrier_expect(full, Share::kTokens * blocks * kBlockRowBytes);
#pragma unroll 1
        for (int block = 0; block < blocks; ++block)
          ptx::copy_box(target + block * KTile<Traits>::kBlockBytes,
                        share_.is_v ? params.dequantized_v : params.dequantized_k, full, 0, row, head * blocks + block,
                        0, ptx::kKeepNormally);
      }
      arrive_full(to.index);
      place = place.ahead(2 * kTileParts);
    }
  }

 private:
  /// Called when the warp has filled its share of a tile, or has told the barrier how many bytes will arrive.
  __device__ __forceinline__ void arrive_full(int part) const {
    // Consumers wait only for the first stage's parts.
    if constexpr (kTileParts > kParts) Shared::arrive_as_warp(shared_.kv_full(part + kParts), arrivals_);
    Shared::arrive_as_warp(shared_.kv_full(part), arrivals_);
  }

  /// V lies behind all stages of K.
  __device__ __forceinline__ Place dequantized_place(const Place& stored) const {
    return share_.is_v ? stored.ahead(kTileParts - kParts) : stored;
  }

  /// Whether a tile may be filled. All lanes must do the same, and may see a barrier in different phases.
  __device__ __forceinline__ bool has_room(const Place& place) const {
    bool has = shared_.is_kv_free(place);
    if constexpr (kTileParts > kParts) has &= shared_.is_kv_free(place.ahead(kParts));
    return __all_sync(0xffffffffu, has);
  }

  __device__ __forceinline__ void wait_for_room(const Place& place, bool is_limited) const {
    if (is_limited) shared_.wait_kv_free(place.ahead(Shared::kKvParts - Traits::kTuning.max_parts_in_flight));
    shared_.wait_kv_free(place);
    if constexpr (kTileParts > kParts) shared_.wait_kv_free(place.ahead(kParts));
  }

  __device__ __forceinline__ uint32_t barrier(int load) const {
    return shared_.kv_stored(ptx::thread_id() / 32, load % kStoredBarriers);
  }

  /// Dequantizes the warp's share of the tile of part number `part`, which it loaded as number `load`.
  __device__ __forceinline__ void dequantize(int part, int load) const {
    ptx::mbarrier_wait(barrier(load), load / kStoredBarriers & 1);
    share_.with_tiles([&](auto stored, auto wide) {
      if constexpr (kHas4Bits<typename decltype(stored)::Element>)
        dequantize_4_bit_rows<decltype(stored), decltype(wide)>(shared_.kv(part), part);
      else
        dequantize_rows<decltype(stored), decltype(wide)>(shared_.kv(part), part);
    });
    ptx::fence_async_proxy();  // before wgmma reads it, and TMA writes it again
    arrive_full(part);
  }

  /// A lane takes whole rows: no other lane reads what it writes over. Eight lanes access a chunk of eight rows, in
  /// different banks. The lane takes one piece after another: of its rows, or of its row's pairs of blocks.
  template <class Stored, class Wide>
  __device__ __forceinline__ void dequantize_rows(char* tile, int part) const {
    constexpr int kBlocks = Wide::kBlocks % 2 == 0 ? 2 : Wide::kBlocks;  // of a piece
    constexpr int kPieces = kLaneRows * (Wide::kBlocks / kBlocks);
    constexpr uint32_t kNextPiece = kLaneRows > 1 ? 32 * Wide::kRowBytes : kBlocks * Wide::kBlockBytes;
    static_assert(Share::kTokens % 32 == 0 && (kLaneRows == 1 || Wide::kBlocks == kBlocks) &&
                  Stored::kBlockBytes == Wide::kBlockBytes && Stored::kRowBytes == Wide::kRowBytes);
    constexpr int kChunks = kBlocks * 4;  // of a piece, of sixteen numbers
    // Chunks that are read ahead. The last stored block may lie in the only block that it becomes: its chunks are then
    // all read before the first is written over.
    // A kernel with packed tiles also has their code.
    constexpr bool kHasRegisters = leaves_registers(Traits::Shape::kDims.widest()) && !Traits::kTakesPacked;
    constexpr int kAhead = kBlocks % 2 == 1 ? 4 : kHasRegisters ? 2 : 1;
    static_assert(kChunks % kAhead == 0, "a chunk has one place in bytes");
    float scales[kLaneRows];
    if constexpr (kHasScales) {
#pragma unroll
      for (int i = 0; i < kLaneRows; ++i)
        scales[i] = __uint_as_float(ptx::load_word(share_.token_scale(shared_, part, ptx::lane_id() + 32 * i)));
    }
    const auto read = [&](uint32_t piece, int chunk) {
      return *reinterpret_cast<const uint4*>(tile + (piece ^ chunk % 8 << 4) +
                                             target_block<typename Stored::Element>(chunk / 8, true, kBlocks) *
                                                 Stored::kBlockBytes);
    };
    uint32_t piece = Wide::offset(share_.first_token + ptx::lane_id(), 0);
    uint4 bytes[kAhead];
#pragma unroll
    for (int chunk = 0; chunk < kAhead; ++chunk) bytes[chunk] = read(piece, chunk);
#pragma unroll 1
    for (int i = 0; i < kPieces; ++i, piece += kNextPiece) {
#pragma unroll
      for (int chunk = 0; chunk < kChunks; ++chunk) {
        const uint4 now = bytes[chunk % kAhead];
        const int next = chunk + kAhead;
        if (next < kChunks)
          bytes[chunk % kAhead] = read(piece, next);
        else if (i + 1 < kPieces)
          bytes[chunk % kAhead] = read(piece + kNextPiece, next - kChunks);
        float scale = 1.0f;
        if constexpr (kHasScales) scale = kLaneRows > 1 && i > 0 ? scales[kLaneRows - 1] : scales[0];
        store_sixteen<typename Wide::Element, typename Stored::Element>(
            tile, (piece ^ chunk % 4 << 5) + chunk / 4 * Wide::kBlockBytes, now, scale);
      }
    }
  }

  /// The same for 4 bits. The one stored block lies in the last that it becomes, so that one chunk read ahead is
  /// enough.
  template <class Stored, class Wide>
  __device__ __forceinline__ void dequantize_4_bit_rows(char* tile, int part) const {
    constexpr int kChunks = Wide::kBlocks * 2;  // of a row, of 32 numbers
    constexpr bool kHasBlockScales = has_block_scales(Stored::Element::kType);
    constexpr bool kRecomputesAddresses = Traits::kTakesPacked && kHasBlockScales;
    static_assert(Share::kTokens % 32 == 0 && Stored::kBlocks == 1 && kChunks <= 8 &&
                  Stored::kRowBytes == Wide::kRowBytes);
#pragma unroll 1
    for (int i = 0; i < kLaneRows; ++i) {
      const int number = ptx::lane_id() + 32 * i;
      const uint32_t scales = share_.token_scale(shared_, part, number);
      uint32_t scale_word = ptx::load_word(scales);
      uint32_t row = Wide::offset(share_.first_token + number, 0);
      const auto read = [&](int chunk) {
        return *reinterpret_cast<const uint4*>(tile + (row ^ chunk << 4) + (Wide::kBlocks - 1) * Wide::kBlockBytes);
      };
      uint4 next = read(0);
#pragma unroll 2
      for (int chunk = 0; chunk < kChunks; ++chunk) {
        if constexpr (kRecomputesAddresses) ptx::keep(row);  // recompute chunk addresses
        const uint32_t words[4] = {next.x, next.y, next.z, next.w};
        if (chunk + 1 < kChunks) next = read(chunk + 1);
        if (kHasBlockScales && chunk % 2 == 0) scale_word = ptx::load_word(scales + chunk / 2 * 4);
#pragma unroll
        for (int w = 0; w < 4; ++w)
          *reinterpret_cast<uint4*>(tile + (row ^ (chunk % 2 * 4 + w) << 4) + chunk / 2 * Wide::kBlockBytes) =
              Stored::Element::template dequantize<typename Wide::Element>(words[w], chunk % 2 * 4 + w, scale_word,
                                                                           factor_);
      }
    }
  }

  /// Dequantizes sixteen numbers to two neighboring chunks. `scale`: their TokenScales', if they have any.
  template <class Element, class Stored>
  __device__ __forceinline__ static void store_sixteen(char* tile, uint32_t target, const uint4& bytes, float scale) {
    const auto wide = [&](uint32_t first, uint32_t second) {
      if constexpr (kHasScales) return dequantize_eight<Element, Stored>(make_uint2(first, second), scale);
      return dequantize_eight<Element, Stored>(make_uint2(first, second));
    };
    *reinterpret_cast<uint4*>(tile + target) = wide(bytes.x, bytes.y);
    *reinterpret_cast<uint4*>(tile + (target ^ 16)) = wide(bytes.z, bytes.w);
  }

  const Shared& shared_;
  const Share& share_;
  const uint32_t arrivals_;
  const float factor_;
  int loaded_ = 0;  // tiles so far
};

}  // namespace attn::feed
