// The Hopper attention kernel: one CTA a multiprocessor, which walks its interval of the schedule, or takes pairs from
// a work queue. CTAs (i, 0) and (i, 1) share an interval where row tiles are halved (KernelDesign). Over 8-bit latents
// these are a cluster, and dequantize KV tiles for each other (dequantizing_copier.cuh).
//
// One warpgroup loads Q, K and V (producer.cuh) into rings in shared memory (shared_memory.cuh). Two or three consumer
// warpgroups compute, with one file for each regime:
// - decode.cuh: row tiles of 16 rows; packed_decode.cuh over tiles of 4-bit caches that stay packed (kTakesPacked)
// - prefill.cuh: row tiles of 32 rows and more; float8_prefill.cuh where Q has 8 bits, too
// - wide.cuh: wide heads and latents, row tiles of all sizes
//
// Their parts are consumer.cuh (threads, the ring of KV tiles), prepared_tiles.cuh (steps between a tile's arrival and
// its product), scores.cuh (from products to probabilities) and output.cuh. docs/kernels.md has pictures.
#pragma once

#include "attention/feed/params.h"
#include "attention/feed/producer.cuh"
#include "attention/feed/shared_memory.cuh"
#include "attention/sm90/consumer.cuh"
#include "attention/sm90/decode.cuh"
#include "attention/sm90/float8_prefill.cuh"
#include "attention/sm90/packed_decode.cuh"
#include "attention/sm90/prefill.cuh"
#include "attention/sm90/shape.h"
#include "attention/sm90/wide.cuh"
#include "attention/tile/work_cursor.cuh"
#include "attention/traits.cuh"
#include "common/kernel_code.cuh"
#include "common/ptx/cluster.cuh"
#include "common/ptx/grid_dependency.cuh"
#include "common/ptx/warp.cuh"

namespace attn::sm90 {

/// The work items of a CTA, as its consumers get them from the producer.
template <class Traits>
struct WorkItems {
  using Shared = SharedMemory<Traits>;
  const Shared& shared;
  typename Shared::QPlace place;

  __device__ __forceinline__ explicit WorkItems(const Shared& shared_) : shared(shared_) { shared.wait_q_full(place); }

  __device__ __forceinline__ const WorkItem& item() const { return shared.item(place.index); }
  __device__ __forceinline__ bool any() const { return item().num_kv_tiles > 0; }
  __device__ __forceinline__ void next() {
    shared.free_q(place);
    place.next();
    shared.wait_q_full(place);
  }
};

/// Whether this warpgroup multiplies rows of the item with wgmma.
template <class Traits>
__device__ __forceinline__ bool multiplies(const WorkItem& item) {
  if (!is_sharing<Traits>()) return item.rows.count > tile_rows(kTwoWarpgroupKind);
  return item.kind > 0 && (item.kind >= kTwoWarpgroupKind || warpgroup() == 0);
}

/// Computes all work items of the CTA, by the consumer warpgroups.
template <class Traits>
__device__ __forceinline__ void consume(const TmaParams& params, const SharedMemory<Traits>& shared) {
  KvRing<Traits> ring{shared};
  if constexpr (is_wide(Traits::Shape::kDims)) {
    Wide<Traits> wide{params, ring};
    if (wide.is_scorer()) {
      ptx::give_registers<scorer_registers(Traits::kTuning)>();
      for (WorkItems<Traits> items(shared); items.any(); items.next()) wide.score(items.item());
    } else {
      ptx::take_registers<kMultiplierRegisters>();
      for (WorkItems<Traits> items(shared); items.any(); items.next()) wide.multiply(items.item());
    }
  } else {
    using LargeTiles = typename Conditional<Traits::kMultipliesFloat8, Float8Prefill<Traits>, Prefill<Traits>>::Type;
    ptx::take_registers<Traits::kTuning.consumer_registers()>();
    using SmallTiles = typename Conditional<Traits::kTakesPacked, PackedDecode<Traits>, Decode<Traits>>::Type;
    SmallTiles decode{params, ring};
    LargeTiles prefill{params, ring};
    for (WorkItems<Traits> items(shared); items.any(); items.next()) {
      const WorkItem& item = items.item();
      if (multiplies<Traits>(item))
        prefill.run(item, items.place.index);
      else if (item.kind == 0 && is_sharing<Traits>())
        decode.run(item, items.place.index);
      else
        prefill.skip(item);
    }
  }
}

/// `Copier`: BoxCopier, or RowCopier for caches that TMA cannot load box by box.
template <class Traits, template <class> class Copier>
__device__ __forceinline__ void attention(const typename Traits::Params& params) {
  extern __shared__ __align__(1024) char memory[];
  using Shared = SharedMemory<Traits>;
  const Shared shared(Traits::kMayBeCluster ? ptx::own_shared(memory) : memory);
  if (threadIdx.x >= kProducerThreads) {  // the consumers have nothing to compute yet
    prefetch_code(params.code, threadIdx.x - kProducerThreads);
    prefetch_code(params.merge_code, threadIdx.x - kProducerThreads);
  }
  if (!params.attention.after_append) ptx::wait_for_previous_grid();
  ptx::allow_next_grid();  // blocks of the next grid start as CTAs of this grid exit
  const WorkCursor cursor(params.attention.schedule, blockIdx.x);
  if (threadIdx.x == kProducerThreads) {
    ptx::prefetch_tensor_map(params.k);
    ptx::prefetch_tensor_map(params.v);
    if constexpr (Traits::kTakesPacked) {
      ptx::prefetch_tensor_map(params.k_packed);
      ptx::prefetch_tensor_map(params.v_packed);
    }
    ptx::prefetch_tensor_map(params.q);
    ptx::prefetch_tensor_map(params.q_row);
    ptx::prefetch_tensor_map(params.o);
    if constexpr (Traits::kIsLatent) {
      ptx::prefetch_tensor_map(params.q_rope_tile);
      ptx::prefetch_tensor_map(params.q_rope_row);
    }
  }
  if (threadIdx.x == 0) shared.init_barriers(Copier<Traits>::arrivals(params));
  const bool in_cluster = Shared::cluster_ctas() > 1;
  if (in_cluster)
    ptx::cluster_arrive();
  else
    __syncthreads();
  const bool has_work = cursor.uses_queue()
                            ? static_cast<int32_t>(blockIdx.x) <
                                  params.attention.schedule.header->num_tiles * params.attention.num_kv_heads
                            : !cursor.done();
  if (!has_work) {
    ptx::wait_for_previous_grid();  // every CTA waits, so that later grids may rely on the grids before this one
    return;
  }
  if (in_cluster) ptx::cluster_wait();  // for the barriers of both CTAs

  if (threadIdx.x < kProducerThreads) {
    ptx::give_registers<Traits::kTuning.producer_registers>();
    if constexpr (Traits::kMayBeCluster) {
      if (in_cluster) return produce<Traits, DequantizingCopier<Traits, 2>>(params, shared, cursor);
    }
    produce<Traits, Copier<Traits>>(params, shared, cursor);
  } else {
    consume<Traits>(params, shared);
  }
}

}  // namespace attn::sm90
