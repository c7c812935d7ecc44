// How a warp of the producer loads its share of a KV tile. There are two ways. Each has its own kernel, because a
// larger kernel costs every launch (ADR 19):
// - BoxCopier: TMA loads boxes of pages, if it can describe the cache.
// - RowCopier: cp.async gathers rows from all other caches. Their pages have fewer than 8 tokens and are not
//   consecutive, or their strides are no multiple of 16 bytes.
//
// look_up() starts to read the page table for an item. found() returns the next tile's place in the cache. It also
// starts to read the entries of later tiles. copy() runs when the ring has room.
//
// If the producer dequantizes tiles in place (dequantizer.cuh), copy() spreads a tile over the memory of its 16-bit
// form. A stored block becomes two blocks, and copy() writes it to the second one.
#pragma once

#include "attention/feed/params.h"
#include "attention/feed/shared_memory.cuh"
#include "attention/feed/tiles.cuh"
#include "attention/feed/work_item.cuh"
#include "common/ptx/barrier.cuh"
#include "common/ptx/copy.cuh"
#include "common/ptx/math.cuh"
#include "common/ptx/warp.cuh"

namespace attn::feed {

/// The block of a tile's memory to which a stored block is loaded. `spreads`: to be dequantized there; `wide_blocks`:
/// of the dequantized tile. Types of 4 bits have one stored block.
template <class Stored>
__device__ __forceinline__ int target_block(int block, bool spreads, int wide_blocks) {
  if constexpr (kHas4Bits<Stored>) return spreads ? wide_blocks - 1 : block;
  return spreads ? min_of(2 * block + 1, wide_blocks - 1) : block;
}

/// A number as a type.
template <int kNumber>
struct Number {
  ATTN_HD constexpr int operator()() const { return kNumber; }
};

/// The part of each KV tile that a warp of the producer loads: half of the tokens of K, or of V.
template <class Traits>
struct KvShare {
  using Shared = SharedMemory<Traits>;
  static constexpr int kTokens = Traits::kTuning.kv_tile / 2;
  static constexpr int kLaneTokens = ceil_div(kTokens, 32);
  static constexpr int kMaxBlocks = max_of(KTile<Traits>::kBlocks, VTile<Traits>::kBlocks);
  /// With wide heads: the blocks in the first part of a stage.
  static constexpr int kLeftBlocks = VTile<Traits>::kBlocks / 2;

  bool is_v;
  int first_token;  // of the tile
  int part;         // counted from the tile's K

  __device__ __forceinline__ explicit KvShare(int warp)
      : is_v(warp % 2 == 1),
        first_token(warp / 2 * kTokens),
        part(Traits::kDequantizesOnLoad ? 0
                                        : warp % 2 * Shared::kParts +
                                              (is_wide(Traits::Shape::kDims) ? 0 : first_token / Shared::kPartTokens)) {
  }

  /// Starts to copy the TokenScales of token number `number` of the share to their place next to part number `part`.
  __device__ __forceinline__ void copy_token_scale(const AttentionParams& params, const Shared& shared, int part,
                                                   int number, SlotPlace token, bool exists, int32_t head) const {
    const float* const words = &token_scales(params).of(exists ? token : SlotPlace{0, 0}, exists ? head : 0);
    with_scale_words([&](auto count) {
#pragma unroll
      for (int word = 0; word < count(); ++word) {
        const bool is_there =
            exists && (count() == 1 || Traits::kKvForm.is_pair() || word < scale_words(columns(), true));
        ptx::cp_async_4_or_zero(token_scale(shared, part, number) + word * 4, words + (is_there ? word : 0), is_there);
      }
    });
  }
  __device__ __forceinline__ const TokenScales& token_scales(const AttentionParams& params) const {
    const auto& scales = params.variant.template as<typename Traits::Variant::Params>().scales;
    return is_v ? scales.v : scales.k;
  }
  /// The address of that place.
  __device__ __forceinline__ uint32_t token_scale(const Shared& shared, int part, int number) const {
    return shared.token_scales(part) +
           (first_token % Shared::kPartTokens + number) * (scale_words_of<Traits>(is_v) * 4);
  }
  /// Calls body(Number<scale_words_of()>{}).
  template <class Body>
  __device__ __forceinline__ void with_scale_words(const Body& body) const {
    constexpr int kOfK = scale_words_of<Traits>(false), kOfV = scale_words_of<Traits>(true);
    if (kOfK == kOfV || !is_v)
      body(Number<kOfK>{});
    else
      body(Number<kOfV>{});
  }

  __device__ __forceinline__ int columns() const { return is_v ? Traits::Shape::kV : Traits::Shape::kQk; }
  /// Blocks of columns of a row that has been dequantized.
  __device__ __forceinline__ int wide_blocks() const {
    return is_v ? WgmmaVTile<Traits>::kBlocks : WgmmaKTile<Traits>::kBlocks;
  }
  /// Blocks of columns of a row.
  __device__ __forceinline__ int blocks() const { return is_v ? VTile<Traits>::kBlocks : KTile<Traits>::kBlocks; }
  /// Bytes that TMA writes for blocks [first, end) of a row. It fills columns after the head's with zeros.
  __device__ __forceinline__ int row_bytes(int first, int end) const {
    return (min_of(end, blocks()) - first) * kBlockRowBytes;
  }
  /// Starts TMA for blocks [kFirst, kEnd) of columns of a box. `target`: of its first row. `spreads`: target_block().
  template <int kFirst, int kEnd>
  __device__ __forceinline__ void copy_blocks(const TensorMap& map, uint32_t target, uint32_t full, int32_t row,
                                              int32_t head, int32_t page, ptx::CachePolicy policy, bool spreads) const {
    using Tile = KTile<Traits>;
#pragma unroll
    for (int block = kFirst; block < kEnd; ++block) {
      if (block >= blocks()) break;
      int to = block;
      with_side<typename Traits::KvElement>(
          is_v, [&](auto side) { to = target_block<decltype(side)>(block, spreads, wide_blocks()); });
      ptx::copy_box(target + to * Tile::kBlockBytes, map, full, block * Tile::kBoxColumns, row, head, page, policy);
    }
  }
  /// Calls body(stored tile, dequantized tile), of K or V.
  template <class Body>
  __device__ __forceinline__ void with_tiles(const Body& body) const {
    if constexpr (is_same<KTile<Traits>, VTile<Traits>>) {
      body(KTile<Traits>{}, WgmmaKTile<Traits>{});
    } else if (is_v) {
      body(VTile<Traits>{}, WgmmaVTile<Traits>{});
    } else {
      body(KTile<Traits>{}, WgmmaKTile<Traits>{});
    }
  }
};

/// Loads a warp's share of KV tiles by TMA. A lane has one box. A share has few, so lanes look up the boxes of several
/// tiles at once, while the boxes before them are loaded. With wider heads registers are few: they look up one tile
/// after another.
///
/// In packed decodes (packed_decode.cuh) a warp loads every other packed tile, whole, into its part of a stage.
template <class Traits>
struct BoxCopier {
  static constexpr bool kGathers = false;
  using Shared = SharedMemory<Traits>;
  using Share = KvShare<Traits>;
  using Tile = KTile<Traits>;  // V tiles have K's layout, but may have another number of blocks
  static constexpr bool kHasTokenScales = Traits::Variant::kHasTokenScales;
  static constexpr bool kLooksAhead = leaves_registers(Traits::Shape::kDims.widest());
  static constexpr int32_t kNone = -1;
  /// Where a lane's box is, and the tile that is loaded next, among those whose boxes lanes have.
  struct Box {
    int32_t row = 0, page = kNone;
    int tile = 0;
    __device__ __forceinline__ bool wanted() const { return page != kNone; }
  };
  const TmaParams& params;
  const Share& share;
  int32_t token = kNone;  // the first of the box that is looked up, if there is one
  int32_t entry = 0;
  Box held;  // the lane's box that is loaded next

  __device__ __forceinline__ BoxCopier(const TmaParams& params_, const Share& share_)
      : params(params_), share(share_) {}

  /// Of a warp at a part's barrier: of one lane, or of all that copy TokenScales.
  __device__ __forceinline__ static uint32_t arrivals(const TmaParams&) { return kHasTokenScales ? 32 : 1; }

  /// Starts to look up the first tiles of an item, which has `count`. Tile number i begins at token_of(i).
  template <class TokenOf>
  __device__ __forceinline__ void look_up(const LoadedRowTile& tile, const TokenOf& token_of, int count) {
    held.tile = 0;
    look_up(tile, token_of, 0, kLooksAhead ? count : 1, Traits::kTakesPacked && tile.kind == 0);
  }

  /// The boxes of the warp's next tile of the item, of `count` that are left. `packed`: its tiles are.
  template <class TokenOf>
  __device__ __forceinline__ Box found(const LoadedRowTile& tile, const TokenOf& token_of, int count,
                                       bool packed = false) {
    const int at_once = tiles_at_once(packed);
    if constexpr (!kLooksAhead) return looked_up(tile);
    if (held.tile == 0) {
      held = looked_up(tile);
      if (number_of(at_once, packed) < count) look_up(tile, token_of, at_once, count, packed);
    }
    Box box = held;
    if (box.tile != lane_tile(packed)) box.page = kNone;
    held.tile = held.tile + 1 == at_once ? 0 : held.tile + 1;
    return box;
  }

  /// Called when a tile has been copied, if `count` of the item are left. The next one begins at token_of(0).
  template <class TokenOf>
  __device__ __forceinline__ void look_up_next(const LoadedRowTile& tile, const TokenOf& token_of, int count) {
    if (!kLooksAhead && count > 0) look_up(tile, token_of, 0, 1, false);
  }

  /// Blocks [kFirst, kEnd) of columns, to the tile of part number `part`. `stored`: the barrier that waits for them, if
  /// they are spread; 0: they are not, and the part's waits. Tiles of a kernel that kTakesPacked are packed if they are
  /// not spread.
  template <int kFirst, int kEnd>
  __device__ __forceinline__ void copy(const Shared& shared, const Box& box, int32_t head, int part,
                                       ptx::CachePolicy policy, uint32_t stored = 0) const {
    const uint32_t full = stored != 0 ? stored : shared.kv_full(part);
    const uint32_t boxes = __popc(__ballot_sync(0xffffffffu, box.wanted()));
    const bool packed = Traits::kTakesPacked && stored == 0;
    const uint32_t bytes =
        boxes * params.box_tokens * (packed ? packed_token_bytes<Traits>(share.is_v) : share.row_bytes(kFirst, kEnd));
    if (ptx::lane_id() == 0) {
      if constexpr (kHasTokenScales)
        ptx::mbarrier_expect(full, bytes);
      else
        ptx::mbarrier_arrive_expect(full, bytes);
    }
    __syncwarp();
    if (box.wanted() && packed) copy_packed(shared, box, head, part, policy, full);
    if (box.wanted() && !packed) copy_box<kFirst, kEnd>(shared, box, head, part, policy, full, stored != 0);
    if constexpr (kHasTokenScales) {
      if (params.scales_lie_together())
        copy_scales_of_boxes(shared, box, head, part, packed);
      else
        copy_token_scales(shared, box, head, part, packed);
      ptx::mbarrier_arrive_after_cp_async(full);
    }
  }

 private:
  /// Tokens of a tile that the warp loads are 2^log_tokens().
  __device__ __forceinline__ static int log_tokens(bool packed) {
    constexpr int kLogTokens = Share::kTokens == 64 ? 6 : 5;
    static_assert(1 << kLogTokens == Share::kTokens);
    return packed ? kLogTokens + 1 : kLogTokens;
  }
  __device__ __forceinline__ int tiles_at_once(bool packed) const {
    return 32 * params.box_tokens >> log_tokens(packed);
  }
  /// The lane's tile among those whose boxes lanes hold, and its box's first token of those that the warp loads.
  __device__ __forceinline__ int lane_tile(bool packed) const {
    return ptx::lane_id() * params.box_tokens >> log_tokens(packed);
  }
  __device__ __forceinline__ int box_token(bool packed) const {
    return ptx::lane_id() * params.box_tokens & ((1 << log_tokens(packed)) - 1);
  }
  /// The number in the item of the warp's tile number i from here on.
  __device__ __forceinline__ int number_of(int i, bool packed) const {
    return packed ? 2 * i + (share.first_token != 0 ? 1 : 0) : i;
  }

  /// Looks up the tiles from number `first` on.
  template <class TokenOf>
  __device__ __forceinline__ void look_up(const LoadedRowTile& tile, const TokenOf& token_of, int first, int count,
                                          bool packed) {
    const int number = number_of(first + lane_tile(packed), packed);
    token = kNone;
    if (number >= count) return;
    const int32_t first_token = token_of(number) + (packed ? 0 : share.first_token) + box_token(packed);
    if (first_token >= tile.readable.end || first_token <= tile.readable.begin - params.box_tokens) return;
    token = first_token;
    entry = tile.entry(params.attention, token);
  }

  /// The lane's box.
  __device__ __forceinline__ Box looked_up(const LoadedRowTile& tile) const {
    Box box;
    if (token == kNone) return box;
    box.page = 0;
    if (tile.pages.indices == nullptr) {
      box.row = entry;  // TMA fills rows beyond the end of the tensor with zeros
      const AttentionParams& attention = params.attention;
      if (entry > attention.num_pages - min_of(params.box_tokens, tile.readable.end - token))
        atomicOr(&attention.schedule.header->errors, kPageIndexInvalid);
    } else {
      box.page = tile.page(params.attention, entry);
      box.row = params.attention.page_size.modulo(token);
    }
    return box;
  }

  template <int kFirst, int kEnd>
  __device__ __forceinline__ void copy_box(const Shared& shared, const Box& box, int32_t head, int part,
                                           ptx::CachePolicy policy, uint32_t full, bool spreads) const {
    const TensorMap& map = params.cache_map(share.is_v, false);
    const uint32_t target =
        ptx::shared_address(shared.kv(part)) + (share.first_token + box_token(false)) * Tile::kRowBytes;
    share.template copy_blocks<kFirst, kEnd>(map, target, full, box.row, head, box.page, policy, spreads);
  }

  __device__ __forceinline__ void copy_packed(const Shared& shared, const Box& box, int32_t head, int part,
                                              ptx::CachePolicy policy, uint32_t full) const {
    const auto copy = [&](auto bytes) {
      constexpr int kTokenBytes = decltype(bytes){}();
      ptx::copy_box(shared.template packed_token<kTokenBytes>(part, box_token(true)),
                    params.cache_map(share.is_v, true), full, 0,
                    kTokenBytes == 64 ? box.row >> params.has_token_pairs : box.row, head, box.page, policy);
    };
    constexpr int kOfK = packed_token_bytes<Traits>(false), kOfV = packed_token_bytes<Traits>(true);
    if (kOfK == kOfV || !share.is_v)
      copy(Number<kOfK>{});
    else
      copy(Number<kOfV>{});
  }

  /// The lane that has the box of token number `number` of those that the warp loads. box_tokens is a power of 2.
  __device__ __forceinline__ int lane_of(const Box& box, int number, bool packed) const {
    return ((box.tile << log_tokens(packed)) + number) >> (__ffs(params.box_tokens) - 1);
  }

  /// Copies 16 bytes in a lane. TokenScales of a box lie together.
  __device__ __forceinline__ void copy_scales_of_boxes(const Shared& shared, const Box& box, int32_t head, int part,
                                                       bool packed) const {
    share.with_scale_words([&](auto count) {
      constexpr int kWords = decltype(count){}(), kChunks = Share::kTokens * kWords / 4;
#pragma unroll
      for (int first = 0; first < (Traits::kTakesPacked ? 2 : 1) * kChunks; first += 32) {
        const int chunk = first + ptx::lane_id();
        const int word = chunk * 4, number = word / kWords, lane = lane_of(box, number, packed);
        const int32_t row = __shfl_sync(0xffffffffu, box.row, lane), page = __shfl_sync(0xffffffffu, box.page, lane);
        if (page == kNone || chunk >= (packed ? 2 : 1) * kChunks) continue;
        const int first_word = (number & -params.box_tokens) * kWords;  // of the box
        const ScaleStrides& strides =
            Traits::kKvForm.is_pair() && share.is_v ? params.v_scale_strides : params.scale_strides;
        ptx::cp_async_16(share.token_scale(shared, part, 0) + word * 4,
                         params.scales_of(share.token_scales(params.attention), strides, page, head) + row * kWords +
                             word - first_word);
      }
    });
  }

  /// Lane i copies the scales of tokens i, i + 32 and so on.
  __device__ __forceinline__ void copy_token_scales(const Shared& shared, const Box& box, int32_t head, int part,
                                                    bool packed) const {
    const AttentionParams& attention = params.attention;
    const bool is_flat = attention.page_size.divisor == 1;  // boxes then go through pages of one token
#pragma unroll
    for (int i = 0; i < (packed ? 2 : 1) * Share::kLaneTokens; ++i) {
      const int number = ptx::lane_id() + 32 * i;
      const int lane = lane_of(box, number, packed);
      const int32_t row = __shfl_sync(0xffffffffu, box.row, lane) + (number & (params.box_tokens - 1));
      const int32_t page = __shfl_sync(0xffffffffu, box.page, lane);
      const bool exists = page != kNone;
      const SlotPlace token{min_of(is_flat ? row : page, attention.num_pages - 1), is_flat ? 0 : row};
      share.copy_token_scale(attention, shared, part, number, token, exists, head);
    }
  }
};

/// As RowPieces, for a warp: of a row of 4 bits, only chunks that it has are taken.
template <class Tile>
struct FourBitPieces {
  static constexpr int kChunks = Tile::kHeadChunks <= 2 ? 2 : Tile::kHeadChunks <= 4 ? 4 : 8;
  static constexpr int kPieces = 1;
  static constexpr int kRows = 32 / kChunks;
};

/// Gathers a warp's share of a KV tile; lane i knows tokens i and i + 32.
template <class Traits>
struct RowCopier {
  static constexpr bool kGathers = true;
  using Shared = SharedMemory<Traits>;
  using Tile = KTile<Traits>;  // V tiles have K's layout, but may have another number of blocks
  static constexpr int kLaneTokens = KvShare<Traits>::kLaneTokens;
  static constexpr bool kFindsRuns = Traits::kTuning.finds_runs;
  const TmaParams& params;
  const KvShare<Traits>& share;
  int32_t token = 0;  // first token of the lane
  int32_t entry[kLaneTokens] = {};
  bool wanted[kLaneTokens] = {};

  __device__ __forceinline__ RowCopier(const TmaParams& params_, const KvShare<Traits>& share_)
      : params(params_), share(share_) {}

  __device__ __forceinline__ static uint32_t arrivals(const TmaParams&) { return 32; }

  template <class TokenOf>
  __device__ __forceinline__ void look_up(const LoadedRowTile& tile, const TokenOf& token_of, int /*count*/) {
    look_up_from(tile, token_of(0));
  }

  template <class TokenOf>
  __device__ __forceinline__ void look_up_next(const LoadedRowTile&, const TokenOf&, int) {}

  /// The rows that were looked up: where they begin in K or V, without their head, in units. Pages of one token are
  /// often consecutive, as a prompt's tokens are: TMA can load such a run.
  struct Rows {
    uint32_t begin[kLaneTokens];
    int32_t first;  // of the run
    bool is_run;
    SlotPlace tokens[kLaneTokens];  // if they have TokenScales
  };
  static constexpr uint32_t kNotWanted = 0xffffffff;

  /// As BoxCopier::found(). Rows take long to load: the entries of one tile arrive in the meantime.
  template <class TokenOf>
  __device__ __forceinline__ Rows found(const LoadedRowTile& tile, const TokenOf& token_of, int count,
                                        bool /*packed*/ = false) {
    const Rows rows = looked_up(tile);
    if (count > 1) look_up_from(tile, token_of(1));
    return rows;
  }

  /// As BoxCopier::copy().
  template <int kFirst, int kEnd>
  __device__ __forceinline__ void copy(const Shared& shared, const Rows& rows, int32_t head, int part,
                                       ptx::CachePolicy policy, uint32_t stored = 0) const {
    if (rows.is_run) {
      copy_run<kFirst, kEnd>(shared, rows, head, part, policy, stored);
    } else {
      share.with_tiles(
          [&](auto tile, auto) { gather<decltype(tile), kFirst, kEnd>(shared, rows, head, part, stored != 0); });
    }
    if constexpr (Traits::Variant::kHasTokenScales) {
#pragma unroll
      for (int i = 0; i < kLaneTokens; ++i)
        share.copy_token_scale(params.attention, shared, part, ptx::lane_id() + 32 * i, rows.tokens[i],
                               rows.begin[i] != kNotWanted, head);
    }
    // wgmma reads what cp.async has written, ordered only by the barrier (ADR 17).
    ptx::mbarrier_arrive_after_cp_async(stored != 0 ? stored : shared.kv_full(part));
  }

 private:
  __device__ __forceinline__ void look_up_from(const LoadedRowTile& tile, int32_t tile_token) {
    token = tile_token + share.first_token + ptx::lane_id();
#pragma unroll
    for (int i = 0; i < kLaneTokens; ++i) {
      wanted[i] = token + 32 * i >= tile.readable.begin && token + 32 * i < tile.readable.end;
      if (wanted[i]) entry[i] = tile.entry(params.attention, token + 32 * i);
    }
  }

  __device__ __forceinline__ Rows looked_up(const LoadedRowTile& tile) const {
    const KvTensor& tensor = share.is_v ? params.attention.v : params.attention.k;
    const int lane = ptx::lane_id();
    Rows rows;
    const uint32_t some = __ballot_sync(0xffffffffu, wanted[0]);
    rows.first = 0;
    bool is_apart = !kFindsRuns || params.run_tokens == 0 || some == 0;
#pragma unroll
    for (int i = 0; i < kLaneTokens; ++i) {
      rows.begin[i] = kNotWanted;
      const int32_t page = wanted[i] ? tile.page(params.attention, entry[i]) : 0;
      if (i == 0) rows.first = __shfl_sync(0xffffffffu, page - lane, some == 0 ? 0 : __ffs(some) - 1);
      is_apart |= wanted[i] && page - lane - 32 * i != rows.first;
      if (!wanted[i]) continue;
      const int32_t in_page = params.attention.page_size.modulo(token + 32 * i);
      if constexpr (Traits::Variant::kHasTokenScales) rows.tokens[i] = SlotPlace{page, in_page};
      rows.begin[i] =
          static_cast<uint32_t>((page * tensor.page_stride + in_page * tensor.token_stride) >> params.unit_shift);
    }
    rows.is_run = kFindsRuns && !__any_sync(0xffffffffu, is_apart);
    return rows;
  }

  template <int kFirst, int kEnd>
  __device__ __forceinline__ void copy_run(const Shared& shared, const Rows& rows, int32_t head, int part,
                                           ptx::CachePolicy policy, uint32_t stored) const {
    if (ptx::lane_id() != 0) return;
    const uint32_t full = stored != 0 ? stored : shared.kv_full(part);
    ptx::mbarrier_expect(full, KvShare<Traits>::kTokens * share.row_bytes(kFirst, kEnd));
    const uint32_t target = ptx::shared_address(shared.kv(part)) + share.first_token * Tile::kRowBytes;
    share.template copy_blocks<kFirst, kEnd>(share.is_v ? params.v : params.k, target, full, rows.first, head, 0,
                                             policy, stored != 0);
  }

  template <class Tile, int kFirst, int kEnd>
  __device__ __forceinline__ void gather(const Shared& shared, const Rows& rows, int32_t head, int part,
                                         bool spreads) const {
    using Pieces =
        typename Conditional<kHas4Bits<typename Tile::Element>, FourBitPieces<Tile>, RowPieces<Tile, 32>>::Type;
    constexpr int kRowsPerPass = Pieces::kRows;
    // Passes whose row offsets are shuffled together, so that the lanes wait once.
    constexpr int kBatch = min_of(8, KvShare<Traits>::kTokens / kRowsPerPass);
    const int lane = ptx::lane_id();
    const int chunk = lane % Pieces::kChunks;
    const KvTensor& tensor = share.is_v ? params.attention.v : params.attention.k;
    const char* base =
        static_cast<const char*>(tensor.data) + head * tensor.head_stride * Traits::KvElement::kBytes + chunk * 16;
    const uint32_t unit_bytes = static_cast<uint32_t>(Traits::KvElement::kBytes) << params.unit_shift;
    uint32_t target =
        ptx::shared_address(shared.kv(part)) + Tile::offset(share.first_token + lane / Pieces::kChunks, chunk);
    if constexpr (Traits::kDequantizesInFeed) {
      static_assert(Pieces::kPieces == 1, "a lane's chunks are in one block");
      using Stored = typename Tile::Element;
      constexpr int kWideBlocks = ceil_div(Tile::kHeadColumns * (kHas4Bits<Stored> ? 2 : 1), kBlockColumns);
      target += (target_block<Stored>(chunk / 8, spreads, kWideBlocks) - chunk / 8) * Tile::kBlockBytes;
    }
#pragma unroll
    for (int batch = 0; batch < KvShare<Traits>::kTokens; batch += kBatch * kRowsPerPass) {
      uint32_t from[kBatch];
#pragma unroll
      for (int i = 0; i < kBatch; ++i) {
        const int first = batch + i * kRowsPerPass;
        from[i] = __shfl_sync(0xffffffffu, rows.begin[first / 32], first % 32 + lane / Pieces::kChunks);
      }
#pragma unroll
      for (int i = 0; i < kBatch; ++i) {
        const int first = batch + i * kRowsPerPass;
        if (from[i] == kNotWanted) continue;
        const char* const row = ptx::advanced(base, from[i], unit_bytes);
#pragma unroll
        for (int piece = 0; piece < Pieces::kPieces; ++piece) {
          const int offset = piece * Pieces::kChunks;
          if (offset < kFirst * 8 || offset >= kEnd * 8) continue;
          copy_chunk<Tile>(Tile::below(target, first) + offset / 8 * Tile::kBlockBytes, row + offset * 16,
                           chunk + offset);
        }
      }
    }
  }
};

}  // namespace attn::feed
