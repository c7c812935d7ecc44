// One design of the attention kernel: its costs, tiles, launch and arguments. Each design has a folder here with its
// design.h; runtime/designs.h lists them.
#pragma once

#include <new>
#include <type_traits>

#include "attention/feed/dequantized_kv.h"
#include "attention/head_shape.h"
#include "attention/params.h"
#include "common/kernel_code.h"
#include "common/tensor_map.h"
#include "planner/params.h"
#include "planner/schedule.h"

namespace attn {

/// The costs that a schedule is made from. Only their ratios count. On a GPU the small kinds of row tiles wait for
/// memory and cost about the same. A pair of a large one costs two more of its KV tiles, or three to six if its rows
/// leave states (ADR 6). On a CPU cost follows the rows.
struct KernelCosts {
  int32_t kv_tile[kNumCostKinds];
  int32_t pair[kNumCostKinds];
  int32_t min_queue_pairs;  // as in ScheduleConfig; 0: the kernel has no work queue
  int32_t section_bytes;    // K and V of the KV heads that the work queue hands out together: a part of L2
  int32_t min_share;        // shares smaller than this are not worth a CTA
  int32_t state;            // of a row state of one KV head, in 64ths of the above (benchmarks/cascade_costs.py)
  int32_t forest;           // what a forest must save over all KV heads
};

/// The forest relies on this: KV tiles of any kind cost at least as much as KV tiles of the smallest kind
/// (node_cost_beside_none()).
constexpr bool smallest_kind_is_cheapest(const KernelCosts& costs) {
  for (int32_t kind = 1; kind < kNumTileKinds; ++kind) {
    if (costs.kv_tile[kind] < costs.kv_tile[0]) return false;
  }
  return true;
}

/// Most kernels that a design chooses between at a launch.
constexpr int32_t kMaxDesignKernels = 2;

/// What a launch depends on, besides LatentAttentionParams.
struct LaunchContext {
  const PlanLevel* levels;  // as planned
  int32_t num_levels;
  DataType o_dtype;   // of O
  DataType q_dtype;   // of Q
  DataType kv_dtype;  // of the cache
  HeadDims dims;
  const KernelCode* codes;  // of the design's kernels
  KernelCode merge_code;
  bool (*encode)(const Tensor4d& tensor, TensorMap& map);  // the driver's; returns whether TMA can load such boxes
  KvForm kv_form;                                          // of the cache
  DequantizedKv dequantized;                               // without rows: this run has none
};

/// Where latent kernels find the last columns of Q. They see one tensor as two, side by side.
inline QueryPart find_q_rope(const LatentAttentionParams& params, const LaunchContext& context) {
  if (params.q_rope.data != nullptr) return params.q_rope;
  return QueryPart{static_cast<const char*>(params.q) + int64_t{context.dims.v} * bytes_of(context.q_dtype),
                   params.q_row_stride, params.q_head_stride};
}

/// Room for the arguments of any design's kernel.
struct alignas(64) KernelArguments {
  char bytes[2304];

  template <class Arguments>
  Arguments& make() {
    static_assert(sizeof(Arguments) <= sizeof(bytes) && alignof(Arguments) <= alignof(KernelArguments), "no room");
    static_assert(std::is_trivially_copyable<Arguments>::value, "a launch copies bytes");
    return *new (bytes) Arguments{};
  }
};

/// Returned by KernelDesign::make_arguments for K and V whose rows lie too far from one another.
constexpr int32_t kRowsTooFarApart = -1;

struct KernelDesign {
  const char* name;  // of its folder, and in attn_backend/jit/manifest.py
  KernelCosts costs;
  KernelCosts invariant_costs;                    // of batch invariant plans
  int32_t (*max_kind)(HeadDims dims, KvForm kv);  // largest kind of row tile
  /// Whether row tiles are planned twice as large as the largest kind. Two CTAs then share each interval of the
  /// schedule: the kernel is launched with blocks (i, 0) and (i, 1) for interval i, which take the first and the second
  /// half of the rows.
  bool (*halves_row_tiles)(HeadDims dims, int32_t group_size) = [](HeadDims /*dims*/, int32_t /*group_size*/) {
    return false;
  };
  /// Whether these two CTAs are a cluster, which takes the same (row tile, KV head) pairs.
  bool (*forms_clusters)(KvForm kv) = [](KvForm /*kv*/) { return false; };
  /// Tokens of a KV tile.
  int32_t (*kv_tile)(HeadDims dims, KvForm kv);
  /// Packed rows of a row group from which it pays to dequantize its tokens before attention (DequantizedKv); 0: the
  /// kernel cannot read them.
  int32_t (*min_dequantized_rows)(HeadDims dims, KvForm kv) = [](HeadDims /*dims*/, KvForm /*kv*/) { return 0; };
  /// Names of cubins in KernelFiles. A design with fewer kernels has nullptr.
  const char* kernels[kMaxDesignKernels];
  /// Threads of a CTA.
  int32_t (*threads)(HeadDims dims, KvForm kv);
  /// Dynamic shared memory of a CTA.
  int32_t (*shared_bytes)(HeadDims dims, KvForm kv);
  /// The kernel prefetches its code and the merge kernel's code to L2.
  bool prefetches_code;
  /// Fills in the arguments of a launch. Returns the number of the kernel to launch, or kRowsTooFarApart.
  int32_t (*make_arguments)(const LatentAttentionParams& params, const LaunchContext& context,
                            KernelArguments& arguments);
};

}  // namespace attn
