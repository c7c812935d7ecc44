// The producer warpgroup loads Q, K and V of a CTA's work items into shared memory, as far ahead of the consumers as
// there is room.
//
// Each of its four warps loads half of the tokens of every KV tile, of K or of V. There are two ways, and a kernel for
// each, because a launch costs more the more code a kernel has, whether it runs or not (ADR 19):
// - TMA loads boxes of pages, where it can describe the cache (BoxCopier);
// - cp.async gathers rows, where it cannot: pages of fewer than 8 tokens that are not consecutive, and strides that are
//   no multiple of 16 bytes (RowCopier).
// With wide heads over an 8-bit cache all four warps widen tokens on the way (widening_copier.cuh). The warps that load
// V also load Q: by TMA if it can describe the row tile's rows, otherwise chunk by chunk.
#pragma once

#include "attention/output.cuh"
#include "attention/sm90/params.h"
#include "attention/sm90/query_loader.cuh"
#include "attention/sm90/shape.h"
#include "attention/sm90/shared_memory.cuh"
#include "attention/sm90/swizzled_tile.cuh"
#include "attention/sm90/widening_copier.cuh"
#include "attention/sm90/work_item.cuh"
#include "attention/work_cursor.cuh"
#include "common/ptx/cp_async.cuh"
#include "common/ptx/grid_dependency.cuh"
#include "common/ptx/math.cuh"
#include "common/ptx/named_barrier.cuh"
#include "common/ptx/tensor_copy.cuh"

namespace attn::sm90 {

/// What a warp of the producer loads of each KV tile: half of the tokens of K, or of V.
template <class Traits>
struct Share {
  using Shared = SharedMemory<Traits>;
  static constexpr int kTokens = Shared::kTuning.kv_tile / 2;
  static constexpr int kMostBlocks = max_of(KTile<Traits>::kBlocks, VTile<Traits>::kBlocks);
  /// With wide heads: the blocks in the first part of a slot.
  static constexpr int kLeftBlocks = VTile<Traits>::kBlocks / 2;

  bool is_v;
  int first_token;  // of the tile
  int part;         // counted from the tile's K

  __device__ __forceinline__ explicit Share(int warp)
      : is_v(warp % 2 == 1),
        first_token(warp / 2 * kTokens),
        part(Traits::kWidensOnLoad ? 0
                                   : warp % 2 * Shared::kParts +
                                         (is_wide(Traits::Shape::kDims) ? 0 : first_token / Shared::kPartTokens)) {}

  /// Blocks of columns of a row.
  __device__ __forceinline__ int blocks() const { return is_v ? VTile<Traits>::kBlocks : KTile<Traits>::kBlocks; }
  /// Bytes that TMA writes for blocks [first, end) of a row. It fills columns after the head's with zeros.
  __device__ __forceinline__ int row_bytes(int first, int end) const {
    return (min_of(end, blocks()) - first) * kBlockRowBytes;
  }
};

/// Loads a warp's share of a KV tile by TMA; lane i knows box i.
template <class Traits>
struct BoxCopier {
  static constexpr bool kGathers = false;
  using Shared = SharedMemory<Traits>;
  using Tile = KTile<Traits>;  // V has the same rows and blocks, but perhaps another number of blocks
  const HopperParams& params;
  const Share<Traits>& share;
  int32_t token = 0;  // first token of the lane's box
  int32_t entry = 0;
  bool wanted = false;

  __device__ __forceinline__ BoxCopier(const HopperParams& params_, const Share<Traits>& share_)
      : params(params_), share(share_) {}

  /// Starts to look up the boxes of the tile from `tile_token` on.
  __device__ __forceinline__ void look_up(const LoadedRowTile& tile, int32_t tile_token) {
    const int32_t box_token = ptx::lane_id() * params.box_tokens;
    token = tile_token + share.first_token + box_token;
    wanted = box_token < Share<Traits>::kTokens && token < tile.readable.end &&
             token > tile.readable.begin - params.box_tokens;
    if (wanted) entry = tile.entry(params.attention, token);
  }

  // Where the box that was looked up is.
  struct Box {
    int32_t row, page;
    bool wanted;
  };

  __device__ __forceinline__ Box found(const LoadedRowTile& tile) const {
    Box box{0, 0, wanted};
    if (!wanted) return box;
    if (tile.indices == nullptr) {
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

  /// Blocks [kFirst, kEnd) of columns.
  template <int kFirst, int kEnd>
  __device__ __forceinline__ void copy(const Shared& shared, const Box& box, int32_t head, int part,
                                       ptx::CachePolicy policy) const {
    const int lane = ptx::lane_id();
    const uint32_t full = shared.kv_full(part);
    const uint32_t boxes = __popc(__ballot_sync(0xffffffffu, box.wanted));
    if (lane == 0) ptx::mbarrier_arrive_expect(full, boxes * params.box_tokens * share.row_bytes(kFirst, kEnd));
    __syncwarp();
    if (!box.wanted) return;
    const uint32_t target =
        ptx::shared_address(shared.kv(part)) + (share.first_token + lane * params.box_tokens) * Tile::kRowBytes;
    const TensorMap& map = share.is_v ? params.v : params.k;
#pragma unroll
    for (int block = kFirst; block < kEnd; ++block) {
      if (block >= share.blocks()) break;
      ptx::copy_box(target + block * Tile::kBlockBytes, map, full, block * Tile::kBoxColumns, box.row, head, box.page,
                    policy);
    }
  }
};

/// Gathers a warp's share of a KV tile; lane i knows tokens i and i + 32.
template <class Traits>
struct RowCopier {
  static constexpr bool kGathers = true;
  using Shared = SharedMemory<Traits>;
  using Tile = KTile<Traits>;  // V has the same rows and blocks, but perhaps another number of blocks
  static constexpr int kLaneTokens = Share<Traits>::kTokens / 32;
  static constexpr bool kFindsRuns = Shared::kTuning.finds_runs;
  const HopperParams& params;
  const Share<Traits>& share;
  int32_t token = 0;  // first token of the lane
  int32_t entry[kLaneTokens] = {};
  bool wanted[kLaneTokens] = {};

  __device__ __forceinline__ RowCopier(const HopperParams& params_, const Share<Traits>& share_)
      : params(params_), share(share_) {}

  __device__ __forceinline__ void look_up(const LoadedRowTile& tile, int32_t tile_token) {
    token = tile_token + share.first_token + ptx::lane_id();
#pragma unroll
    for (int i = 0; i < kLaneTokens; ++i) {
      wanted[i] = token + 32 * i >= tile.readable.begin && token + 32 * i < tile.readable.end;
      if (wanted[i]) entry[i] = tile.entry(params.attention, token + 32 * i);
    }
  }

  /// The rows that were looked up: where they begin in K or V, without their head, in units. Pages of one token are
  /// often consecutive, as those of a prompt are: TMA can load such a run.
  struct Box {
    uint32_t row[kLaneTokens];
    int32_t first;  // of the run
    bool is_run;
  };
  static constexpr uint32_t kNotWanted = 0xffffffff;

  __device__ __forceinline__ Box found(const LoadedRowTile& tile) const {
    const KvTensor& tensor = share.is_v ? params.attention.v : params.attention.k;
    const int lane = ptx::lane_id();
    Box box;
    const uint32_t some = __ballot_sync(0xffffffffu, wanted[0]);
    box.first = 0;
    bool is_apart = !kFindsRuns || params.run_tokens == 0 || some == 0;
#pragma unroll
    for (int i = 0; i < kLaneTokens; ++i) {
      box.row[i] = kNotWanted;
      const int32_t page = wanted[i] ? tile.page(params.attention, entry[i]) : 0;
      if (i == 0) box.first = __shfl_sync(0xffffffffu, page - lane, some == 0 ? 0 : __ffs(some) - 1);
      is_apart |= wanted[i] && page - lane - 32 * i != box.first;
      if (!wanted[i]) continue;
      const int32_t in_page = params.attention.page_size.modulo(token + 32 * i);
      box.row[i] =
          static_cast<uint32_t>((page * tensor.page_stride + in_page * tensor.token_stride) >> params.unit_shift);
    }
    box.is_run = kFindsRuns && !__any_sync(0xffffffffu, is_apart);
    return box;
  }

  /// Blocks [kFirst, kEnd) of columns.
  template <int kFirst, int kEnd>
  __device__ __forceinline__ void copy(const Shared& shared, const Box& box, int32_t head, int part,
                                       ptx::CachePolicy policy) const {
    if (box.is_run) {
      copy_run<kFirst, kEnd>(shared, box, head, part, policy);
    } else {
      if constexpr (Traits::Shape::kQk == Traits::Shape::kV) {
        gather<KTile<Traits>, kFirst, kEnd>(shared, box, head, part);
      } else if (share.is_v) {
        gather<VTile<Traits>, kFirst, kEnd>(shared, box, head, part);
      } else {
        gather<KTile<Traits>, kFirst, kEnd>(shared, box, head, part);
      }
    }
    // wgmma reads what cp.async has written, through the barrier alone (ADR 17).
    ptx::mbarrier_arrive_after_cp_async(shared.kv_full(part));
  }

 private:
  template <int kFirst, int kEnd>
  __device__ __forceinline__ void copy_run(const Shared& shared, const Box& box, int32_t head, int part,
                                           ptx::CachePolicy policy) const {
    if (ptx::lane_id() != 0) return;
    const uint32_t full = shared.kv_full(part);
    ptx::mbarrier_expect(full, Share<Traits>::kTokens * share.row_bytes(kFirst, kEnd));
    const uint32_t target = ptx::shared_address(shared.kv(part)) + share.first_token * Tile::kRowBytes;
#pragma unroll
    for (int block = kFirst; block < kEnd; ++block) {
      if (block >= share.blocks()) break;
      ptx::copy_box(target + block * Tile::kBlockBytes, share.is_v ? params.v : params.k, full,
                    block * Tile::kBoxColumns, box.first, head, 0, policy);
    }
  }

  template <class Tile, int kFirst, int kEnd>
  __device__ __forceinline__ void gather(const Shared& shared, const Box& box, int32_t head, int part) const {
    using Pieces = RowPieces<Tile, 32>;
    constexpr int kRowsPerPass = Pieces::kRows;
    constexpr int kBatch = 8;  // passes whose row offsets are shuffled together, so that the lanes wait once
    const int lane = ptx::lane_id();
    const int chunk = lane % Pieces::kChunks;
    const KvTensor& tensor = share.is_v ? params.attention.v : params.attention.k;
    const char* base =
        static_cast<const char*>(tensor.data) + head * tensor.head_stride * Traits::KvElement::kBytes + chunk * 16;
    const uint32_t unit_bytes = static_cast<uint32_t>(Traits::KvElement::kBytes) << params.unit_shift;
    const uint32_t target =
        ptx::shared_address(shared.kv(part)) + Tile::offset(share.first_token + lane / Pieces::kChunks, chunk);
#pragma unroll
    for (int batch = 0; batch < Share<Traits>::kTokens; batch += kBatch * kRowsPerPass) {
      uint32_t from[kBatch];
#pragma unroll
      for (int i = 0; i < kBatch; ++i) {
        const int first = batch + i * kRowsPerPass;
        from[i] = __shfl_sync(0xffffffffu, box.row[first / 32], first % 32 + lane / Pieces::kChunks);
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

/// Whether rows of Q, with all their heads, go into a Q tile without reaching beyond it.
template <class Traits>
__device__ __forceinline__ bool has_room_for_whole_rows(const FastDivisor& group_size) {
  if constexpr (!is_wide(Traits::Shape::kDims)) return true;  // half of the tile is room
  return group_size.modulo(SharedMemory<Traits>::kTileRows) == 0;
}

/// Publishes a work item and loads its Q. Called by the warps that load V: those of K must never wait for room for Q,
/// because consumers need K first.
template <class Traits>
__device__ __forceinline__ void produce_item(const ParamsOf<Traits>& hopper_params, const SharedMemory<Traits>& shared,
                                             const WorkItem& item, typename SharedMemory<Traits>::QPlace& place) {
  constexpr int kFirstThread = 32;  // of the first of these warps
  shared.wait_q_free(place);
  const uint32_t full = shared.q_full(place.slot);
  const uint32_t q = ptx::shared_address(shared.q(place.slot));
  if (item.num_kv_tiles > 0) {
    const bool is_largest = item.kind == SharedMemory<Traits>::kTuning.max_kind;
    const bool holds_whole_rows = item.rows.packed_begin == 0 &&
                                  hopper_params.attention.group_size.modulo(item.rows.count) == 0 &&
                                  has_room_for_whole_rows<Traits>(hopper_params.attention.group_size);
    if (kWidensQuery<Traits> || !(is_largest ? hopper_params.has_row_maps && item.rows.list == nullptr
                                             : hopper_params.has_one_row_map && holds_whole_rows)) {
      gather_q<Traits>(hopper_params, item, shared.q(place.slot), ptx::thread_id() / 64);
    } else if (is_largest) {
      if (ptx::thread_id() == kFirstThread) copy_q<Traits>(hopper_params, item, q, full);
    } else if (ptx::thread_id() < kFirstThread + 32) {
      copy_q_rows<Traits>(hopper_params, item, q, full);
    }
  }
  if constexpr (kWidensQuery<Traits>) {
    ptx::fence_async_proxy();  // before wgmma reads it
    ptx::mbarrier_arrive(full);
  } else {
    ptx::mbarrier_arrive_after_cp_async(full);
  }
  if constexpr (Traits::Variant::kHasScales) {
    if (item.num_kv_tiles > 0 && ptx::thread_id() < kFirstThread + 32) {
      int32_t* const requests = const_cast<int32_t*>(shared.requests(shared.item(place.slot)));
      write_requests<typename Traits::Variant, kQRows, 32>(hopper_params.attention, item.rows, item.group, item.kv_head,
                                                           ptx::lane_id(), requests);
    }
    __syncwarp();  // the thread that publishes the item publishes them, too
  }
  if (ptx::thread_id() == kFirstThread) {
    if constexpr (Traits::Variant::kHasScales) {
      using Variant = typename Traits::Variant;
      const AttentionParams& params = hopper_params.attention;
      const_cast<float&>(shared.score_scale(shared.item(place.slot))) =
          score_scale(Variant(params.variant.template as<typename Variant::Params>(), item.kv_head), params.sm_scale);
    }
    shared.item(place.slot) = item;
    ptx::mbarrier_arrive(full);
  }
  place.next();
}

/// A CTA's access to the work queue: all warps of the producer get the same pair. A CTA asks for the next pair while it
/// loads the one before, so its first two are fixed: the pair of the CTA's own number, and one of the next num_ctas in
/// the opposite order, because the first pairs take longest.
template <class Traits>
class WorkQueue {
 public:
  __device__ __forceinline__ WorkQueue(const AttentionParams& params, const SharedMemory<Traits>& shared)
      : params_(params), shared_(shared) {}

  __device__ __forceinline__ void begin(WorkCursor& cursor) {
    num_tiles_ = params_.schedule.header->num_tiles;
    take(cursor, static_cast<int32_t>(blockIdx.x));
    next_ = 2 * params_.num_ctas - 1 - static_cast<int32_t>(blockIdx.x);
  }

  __device__ __forceinline__ void next(WorkCursor& cursor) {
    if (ptx::thread_id() == 0) shared_.queued_pair(number_) = next_;
    ptx::barrier_sync<kProducerBarrier, kProducerThreads>();
    const int32_t pair = shared_.queued_pair(number_);
    number_ ^= 1;
    if (pair >= num_pairs()) return;
    take(cursor, pair);
    // Each CTA asks once for every pair that it takes after its first: num_pairs - num_ctas requests in all, after
    // which the counter is 0 again.
    if (ptx::thread_id() == 0) {
      next_ = 2 * params_.num_ctas + static_cast<int32_t>(atomicInc(&queue_head(), num_pairs() - params_.num_ctas - 1));
    }
  }

 private:
  /// CTAs that take the same half of row tiles share a counter.
  __device__ __forceinline__ uint32_t& queue_head() const {
    ScheduleHeader& header = *params_.schedule.header;
    if constexpr (Traits::kIsLatent) return blockIdx.y == 0 ? header.queue_head : header.second_queue_head;
    return header.queue_head;
  }

  __device__ __forceinline__ int32_t num_pairs() const { return num_tiles_ * params_.num_kv_heads; }

  __device__ __forceinline__ void take(WorkCursor& cursor, int32_t pair) const {
    cursor.take(queued_pair(params_.schedule, params_.group_size, params_.num_kv_heads, num_tiles_, pair));
  }

  const AttentionParams& params_;
  const SharedMemory<Traits>& shared_;
  int32_t num_tiles_;
  int32_t number_ = 0;
  int32_t next_;  // of thread 0
};

/// Waits until a part of a KV tile may be filled; if `few`, until no more than mma_parts would be in use.
template <class Traits>
__device__ __forceinline__ void wait_for_part(const SharedMemory<Traits>& shared,
                                              const typename SharedMemory<Traits>::KvPlace& place, bool few) {
  using Shared = SharedMemory<Traits>;
  if (few) shared.wait_kv_free(place.ahead(Shared::kKvParts - Shared::kTuning.mma_parts));
  shared.wait_kv_free(place);
}

template <class Traits, class Copier>
__device__ __forceinline__ void produce(const ParamsOf<Traits>& hopper_params, const SharedMemory<Traits>& shared,
                                        WorkCursor cursor) {
  using Shared = SharedMemory<Traits>;
  constexpr bool kIsWide = is_wide(Traits::Shape::kDims);
  static_assert(kIsWide || Shared::kParts > 1 || Shared::kTuning.mma_parts + 2 <= Shared::kKvParts,
                "what tiles_after_mma relies on");
  const AttentionParams& params = hopper_params.attention;
  const Share<Traits> share(ptx::thread_id() / 32);
  typename Shared::QPlace q_place;
  typename Shared::KvPlace place = typename Shared::KvPlace{}.ahead(share.part);
  const int32_t flags = cursor.now.flags;
  WorkQueue<Traits> queue(params, shared);
  if (flags & kUsesQueue) queue.begin(cursor);
  LoadedRowTile tile(params, cursor.now.tile);
  Copier copier(hopper_params, share);

  // K and V are one tile, which the warps that load K load.
  const bool is_one_tile = kIsWide && hopper_params.v_is_k;
  const bool copies = !(is_one_tile && share.is_v);
  constexpr bool kSkips = Traits::Variant::kSkipsTiles;
  int32_t item_begin = cursor.now.kv_tile;  // the item's first KV tile
  const auto look_up = [&](int ahead = 0) {
    const int32_t kv_tile = cursor.now.kv_tile + ahead;
    copier.look_up(
        tile, kv_tile_start<kSkips>(
                  params.schedule, tile.group, tile.kv_begin,
                  kTakesLastFirst<Traits> ? item_begin + cursor.last_kv_tile(tile.num_kv_tiles) - 1 - kv_tile : kv_tile,
                  Shared::kTuning.kv_tile)
                  .token);
  };
  look_up();
  ptx::wait_for_previous_grid();  // so far only the schedule and page tables have been read
  int32_t tiles_after_mma = 0;    // KV tiles after an item for mma.sync to which the limit `few` still applies
  while (!cursor.done()) {
    if (share.is_v) {
      const int32_t kv_begin = kv_begin_after<kSkips>(tile.kv_begin, cursor.now.kv_tile, params.kv_tile);
      WorkItem item(tile, cursor, kv_begin);
      if constexpr (Traits::kIsLatent) item.keep_half(static_cast<int32_t>(blockIdx.y), Shared::kTuning.max_kind);
      produce_item<Traits>(hopper_params, shared, item, q_place);
    }
    const int32_t head = cursor.now.head;
    const bool for_mma = !kIsWide && tile.kind == 0;
    // Tokens of small row tiles are read once: they must not evict those that several of the largest share. The
    // shuffle tells the compiler that the policy is uniform.
    const ptx::CachePolicy policy =
        __shfl_sync(0xffffffffu, tile.kind < Shared::kTuning.max_kind && (flags & kHasLargestTiles), 0)
            ? ptx::kEvictFirst
            : ptx::kKeepNormally;
    const int32_t end = cursor.last_kv_tile(tile.num_kv_tiles);
    if constexpr (Traits::kWidensOnLoad) {
      copier.widen(shared, tile, head, end - cursor.now.kv_tile, look_up, place);
      cursor.now.kv_tile = end;
    } else {
      if (!copies) cursor.now.kv_tile = end;
      while (copies) {
        const auto box = copier.found(tile);
        const bool last = ++cursor.now.kv_tile == end;
        // Looks up the next KV tile's pages. Gathering takes long enough for the entries to arrive; TMA loads should be
        // issued first, because they have few entries to wait for.
        if (Copier::kGathers && !last) look_up();
        if (!kIsWide) wait_for_part<Traits>(shared, place, for_mma || tiles_after_mma > 0);
        // Where slots are not divided, one warpgroup frees an item's last tile for both, and the other only waits on
        // its barrier. That one must observe the phase before the slot is refilled. While few parts are in flight,
        // refilling it requires freed parts of the next item, which no consumer reaches before all have synchronised at
        // the end of this one.
        if (Shared::kParts == 1) tiles_after_mma = for_mma ? Shared::kKvParts / 2 + 1 : tiles_after_mma - 1;
        constexpr int kBlocks = Share<Traits>::kMostBlocks, kLeftBlocks = Share<Traits>::kLeftBlocks;
        if constexpr (kIsWide) {
          const typename Shared::KvPlace right = place.ahead(1);  // freed first, and multiplied first
          shared.wait_kv_free(right);
          copier.template copy<kLeftBlocks, kBlocks>(shared, box, head, right.slot, policy);
          shared.wait_kv_free(place);
          copier.template copy<0, kLeftBlocks>(shared, box, head, place.slot, policy);
        } else {
          copier.template copy<0, kBlocks>(shared, box, head, place.slot, policy);
        }
        place = place.ahead(is_one_tile ? Shared::kParts : 2 * Shared::kParts);
        if (last) break;
        if (!Copier::kGathers) look_up();
      }
    }
    cursor.next_pair(params.num_kv_heads);
    if (flags & kUsesQueue) queue.next(cursor);
    if (cursor.done()) break;
    // The pairs of a row tile are consecutive. RowCopier lacks the registers to keep the tile and reloads it.
    if (Copier::kGathers || cursor.now.head == 0 || (flags & kUsesQueue)) tile = LoadedRowTile(params, cursor.now.tile);
    item_begin = cursor.now.kv_tile;
    look_up();
  }
  if (share.is_v) produce_item<Traits>(hopper_params, shared, WorkItem{}, q_place);
  ptx::cp_async_wait<0>();
}

}  // namespace attn::sm90
