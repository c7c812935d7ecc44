// A CTA's shared memory and the barriers in it: Q tiles and their work items, and the ring of K and V tiles, each
// filled by the producer and freed by the consumers.
#pragma once

#include "attention/feed/tiles.cuh"
#include "attention/feed/tuning.h"
#include "attention/feed/work_item.cuh"
#include "attention/variant/variants.h"
#include "common/ptx/barrier.cuh"
#include "common/ptx/cluster.cuh"
#include "common/ptx/copy.cuh"
#include "common/ptx/warp.cuh"

namespace attn::feed {

/// Named barriers.
enum Barrier : int {
  kConsumersBarrier = 1,
  kWarpgroupBarrier = 2,  // to 4
  kProducerBarrier = 5,
  kTurnBarrier = 6  // and 7
};

/// A place in a ring of stages, or of their parts, and the parity of the phase that the ring is in.
template <int kStages>
struct RingPlace {
  int32_t index = 0;
  uint32_t parity = 0;

  __device__ __forceinline__ RingPlace ahead(int stages) const {
    if constexpr (kStages == 1) return RingPlace{0, parity ^ 1};
    RingPlace place{index + stages, parity};
    if (place.index >= kStages) {
      place.index -= kStages;
      place.parity ^= 1;
    }
    return place;
  }

  __device__ __forceinline__ void next() { *this = ahead(1); }
};

template <class Traits>
struct SharedMemory {
  static constexpr SharedLayout kLayout =
      SharedLayout::of(Traits::Shape::kDims, Traits::kTuning, Traits::Element::kBytes, Traits::StoredElement::kBytes);
  static constexpr int kTileRows = Traits::kTuning.q_rows();  // of a Q tile
  static constexpr int kQStages = Traits::kTuning.q_stages;
  static constexpr int kParts = Traits::kTuning.stage_parts;
  static constexpr int kKvParts = Traits::kTuning.kv_stages * kParts;
  static constexpr int kConsumerWarps = Traits::kTuning.consumer_warps();
  static constexpr bool kIsWide = is_wide(Traits::Shape::kDims);
  static constexpr int kPartTokens = Traits::kTuning.kv_tile / kParts;
  /// Parts of a tile as wgmma takes it. If it has two stages, consumers wait for the parts of the first.
  static constexpr int kTileParts = kParts * max_of(Traits::kTuning.dequantized_stages, 1);
  using QPlace = RingPlace<kQStages>;
  using KvPlace = RingPlace<kKvParts>;  // its index is a part's

  char* base;
  uint32_t address;

  __device__ __forceinline__ explicit SharedMemory(char* base_) : base(base_), address(ptx::shared_address(base_)) {}

  __device__ __forceinline__ char* q(int stage) const { return base + kLayout.q + stage * kLayout.q_stage_bytes; }
  /// The tile that part number `part` of the ring belongs to.
  __device__ __forceinline__ char* kv(int part) const {
    const int stage = part / kParts;
    if constexpr (kLayout.k_stage_bytes == kLayout.v_stage_bytes)
      return base + kLayout.kv + stage * kLayout.k_stage_bytes;
    return base + kLayout.kv + stage / 2 * (kLayout.k_stage_bytes + kLayout.v_stage_bytes) +
           stage % 2 * kLayout.k_stage_bytes;
  }
  /// The address of a token in the packed tile of part number `part` (TmaParams::k_packed). A packed tile only takes
  /// memory that the part's tokens have in a dequantized tile: half of a block, or of two blocks.
  template <int kTokenBytes>
  __device__ __forceinline__ uint32_t packed_token(int part, int token) const {
    constexpr int kHalf = Traits::kTuning.kv_tile * kBlockRowBytes / kParts, kTokens = kHalf / kTokenBytes;
    const uint32_t tile = ptx::shared_address(kv(part)) + part % kParts * kHalf;
    if constexpr (kTokens == Traits::kTuning.kv_tile) return tile + token * kTokenBytes;
    return tile + token / kTokens * (kParts * kHalf) + token % kTokens * kTokenBytes;
  }
  /// One of two places of transposed V tiles, if 8-bit elements are multiplied.
  __device__ __forceinline__ char* transposed(int number) const {
    return base + kLayout.transposed + number * kLayout.transposed_bytes;
  }
  __device__ __forceinline__ WorkItem& item(int stage) const {
    return *reinterpret_cast<WorkItem*>(base + kLayout.items + stage * kLayout.item_bytes);
  }
  /// With an 8-bit cache: the requests of an item's rows, as write_requests() leaves them.
  __device__ __forceinline__ static const int32_t* requests(const WorkItem& item) {
    return reinterpret_cast<const int32_t*>(reinterpret_cast<const char*>(&item) + kWorkItemBytes);
  }
  /// What score_scale() is for the item: in shared memory, because consumers have no register to keep it.
  __device__ __forceinline__ static const float& score_scale(const WorkItem& item) {
    return *reinterpret_cast<const float*>(requests(item) + Traits::kTuning.item_rows());
  }
  __device__ __forceinline__ int32_t& queued_pair(int number) const {
    return reinterpret_cast<int32_t*>(base + kLayout.queued)[number];
  }
  /// TokenScales of the tokens of part number `part`.
  __device__ __forceinline__ uint32_t token_scales(int part) const {
    return address + kLayout.token_scales +
           part * Traits::kTuning.scale_tokens() * Traits::kTuning.token_scale_words * 4;
  }
  __device__ __forceinline__ float* row_states() const { return reinterpret_cast<float*>(base + kLayout.row_states); }

  __device__ __forceinline__ uint32_t q_full(int stage) const { return address + kLayout.barriers + stage * 8; }
  __device__ __forceinline__ uint32_t q_free(int stage) const { return q_full(kQStages + stage); }
  __device__ __forceinline__ uint32_t kv_full(int part) const { return q_full(2 * kQStages + part); }
  __device__ __forceinline__ uint32_t kv_free(int part) const { return q_full(2 * kQStages + kKvParts + part); }

  /// The barrier of variants that transform K or V, and of 8-bit V, which is transposed.
  __device__ __forceinline__ uint32_t transformed() const { return q_full(2 * (kQStages + kKvParts)); }

  /// With wide heads: the probabilities of a KV tile and the corrections of their rows; at the end of an item the
  /// states of its rows.
  __device__ __forceinline__ char* probabilities() const { return base + kLayout.probabilities; }
  __device__ __forceinline__ uint32_t p_full() const { return q_full(2 * (kQStages + kKvParts) + 1); }
  __device__ __forceinline__ uint32_t p_free() const { return q_full(2 * (kQStages + kKvParts) + 2); }

  /// Barrier number `number` of what a producer warp has loaded to dequantize it.
  __device__ __forceinline__ uint32_t kv_stored(int warp, int number) const {
    return q_full(2 * (kQStages + kKvParts) + 1 + warp * kStoredBarriers + number);
  }

  /// Where piece number `piece` of a producer thread arrives.
  __device__ __forceinline__ char* staged(int piece) const {
    return base + kLayout.staged + (piece * kProducerThreads + ptx::thread_id()) * 16;
  }

  /// CTAs that dequantize KV tiles for each other.
  __device__ __forceinline__ static uint32_t cluster_ctas() {
    if constexpr (Traits::kMayBeCluster) return ptx::cluster_size();
    return 1;
  }

  /// All threads of the warps that load V arrive at q_full, and the thread that publishes the item a second time. At
  /// kv_full the warps that fill the part arrive with `lanes` lanes each; warps that dequantize on load arrive once. A
  /// part of wide heads is freed by the warpgroup that reads it last. In a cluster, one warpgroup of every CTA arrives.
  __device__ __forceinline__ void init_barriers(uint32_t lanes) const {
    for (int stage = 0; stage < kQStages; ++stage) {
      ptx::mbarrier_init(q_full(stage), kProducerThreads / 2 + 1);
      ptx::mbarrier_init(q_free(stage), kConsumerWarps);
    }
    for (int part = 0; part < kKvParts; ++part) {
      ptx::mbarrier_init(kv_full(part),
                         Traits::kDequantizesOnLoad ? kProducerThreads / 32 : (kIsWide ? 2 : 2 / kParts) * lanes);
      ptx::mbarrier_init(kv_free(part), (kIsWide ? kWarpgroupThreads / 32 : kConsumerWarps) * cluster_ctas());
    }
    using Hooks = VariantHooks<typename Traits::Variant>;
    if constexpr (Hooks::kKey || Hooks::kValue || Traits::kMultipliesFloat8)
      ptx::mbarrier_init(transformed(), kConsumerWarps);
    if constexpr (Traits::kDequantizesInFeed) {
      for (int warp = 0; warp < kProducerThreads / 32; ++warp) {
        for (int number = 0; number < kStoredBarriers; ++number) ptx::mbarrier_init(kv_stored(warp, number), lanes);
      }
    }
    if constexpr (kIsWide) {
      ptx::mbarrier_init(p_full(), kWarpgroupThreads / 32);
      ptx::mbarrier_init(p_free(), 2 * kWarpgroupThreads / 32);
    }
    ptx::fence_mbarrier_init();
  }

  // The producer waits until the consumers have freed a stage; at first every stage is free.
  __device__ __forceinline__ void wait_q_free(const QPlace& place) const {
    ptx::mbarrier_wait(q_free(place.index), place.parity ^ 1);
  }
  __device__ __forceinline__ void wait_kv_free(const KvPlace& place) const {
    ptx::mbarrier_wait(kv_free(place.index), place.parity ^ 1);
  }
  __device__ __forceinline__ bool is_kv_free(const KvPlace& place) const {
    return ptx::mbarrier_test(kv_free(place.index), place.parity ^ 1);
  }

  __device__ __forceinline__ void wait_q_full(const QPlace& place) const {
    ptx::mbarrier_wait(q_full(place.index), place.parity);
  }
  __device__ __forceinline__ bool is_kv_full(const KvPlace& place) const {
    return ptx::mbarrier_test(kv_full(place.index), place.parity);
  }
  __device__ __forceinline__ void wait_kv_full(const KvPlace& place) const {
    ptx::mbarrier_wait(kv_full(place.index), place.parity);
  }

  /// Called by a consumer warp whose share of the next tiles is transformed or transposed, and by all that wait for the
  /// others'.
  __device__ __forceinline__ void arrive_transformed() const { arrive_as_warp(transformed(), 1); }
  __device__ __forceinline__ void wait_transformed(uint32_t parity) const { ptx::mbarrier_wait(transformed(), parity); }

  /// Called by a consumer warp that has read what it needs; it arrives for `warps` warps. In a cluster, which only wide
  /// heads form, each warp arrives for itself, at all CTAs.
  __device__ __forceinline__ void free_q(const QPlace& place) const { arrive_as_warp(q_free(place.index), 1); }
  __device__ __forceinline__ void free_kv(const KvPlace& place, uint32_t warps) const {
    if (cluster_ctas() == 1) return arrive_as_warp(kv_free(place.index), warps);
    __syncwarp();
    if (ptx::lane_id() < 2) ptx::cluster_mbarrier_arrive(ptx::cluster_address(kv_free(place.index), ptx::lane_id()));
  }

  __device__ __forceinline__ static void arrive_as_warp(uint32_t barrier, uint32_t warps) {
    __syncwarp();
    if (ptx::lane_id() == 0) ptx::mbarrier_arrive(barrier, warps);
  }
};

}  // namespace attn::feed
