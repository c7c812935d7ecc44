// The Hopper attention kernel: one CTA a multiprocessor, which walks its interval of the schedule, or takes pairs from
// a work queue. CTAs (i, 0) and (i, 1) share an interval where row tiles are halved (KernelDesign). Over 8-bit latents
// these are a cluster, and widen KV tiles for each other (widening_copier.cuh).
//
// One warpgroup loads Q, K and V (producer.cuh) into rings in shared memory (shared_memory.cuh). Two compute
// (consumer.cuh; with Q of 8 bits float8_consumer.cuh), or three where heads are wide (wide_consumer.cuh). What
// consumers of all kinds of row tiles share is in consumer_base.cuh. Rows leave through output.cuh. docs/kernels.md
// draws how.
#pragma once

#include "attention/sm90/consumer.cuh"
#include "attention/sm90/feed/producer.cuh"
#include "attention/sm90/feed/shared_memory.cuh"
#include "attention/sm90/float8_consumer.cuh"
#include "attention/sm90/params.h"
#include "attention/sm90/shape.h"
#include "attention/sm90/wide_consumer.cuh"
#include "attention/tile/work_cursor.cuh"
#include "attention/traits.cuh"
#include "common/kernel_code.cuh"
#include "common/ptx/cluster.cuh"
#include "common/ptx/grid_dependency.cuh"
#include "common/ptx/warp.cuh"

namespace attn::sm90 {

/// `Copier`: BoxCopier, or RowCopier for caches that TMA cannot load box by box.
template <class Traits, template <class> class Copier>
__device__ __forceinline__ void attention(const ParamsOf<Traits>& params) {
  extern __shared__ __align__(1024) char memory[];
  using Shared = SharedMemory<Traits>;
  const Shared shared(kMayBeCluster<Traits> ? ptx::own_shared(memory) : memory);
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
    ptx::prefetch_tensor_map(params.q);
    ptx::prefetch_tensor_map(params.q_row);
    ptx::prefetch_tensor_map(params.o);
    if constexpr (Traits::kIsLatent) {
      ptx::prefetch_tensor_map(params.q_rope_tile);
      ptx::prefetch_tensor_map(params.q_rope_row);
    }
  }
  if (threadIdx.x == 0) {
    shared.init_barriers(Copier<Traits>::kGathers ? 32 : 1);
  }
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
    ptx::give_registers<kTuning<Traits>.producer_registers>();
    if constexpr (kMayBeCluster<Traits>) {
      if (in_cluster) return produce<Traits, WideningCopier<Traits, 2>>(params, shared, cursor);
    }
    produce<Traits, Copier<Traits>>(params, shared, cursor);
  } else if constexpr (is_wide(Traits::Shape::kDims)) {
    WideConsumer<Traits>(params, shared).run();
  } else {
    ptx::take_registers<kTuning<Traits>.consumer_registers()>();
    if constexpr (kMultipliesFloat8<Traits>) {
      Float8Consumer<Traits>(params, shared).run();
    } else {
      Consumer<Traits>(params, shared).run();
    }
  }
}

}  // namespace attn::sm90
