// The Hopper kernel as the planner and the launcher see it: costs, shape and arguments.
#pragma once

#include "attention/feed/arguments.h"
#include "attention/feed/params.h"
#include "attention/kernel_design.h"
#include "attention/sm90/shape.h"

namespace attn::sm90 {

constexpr KernelCosts kCosts{
    .kv_tile = {6, 6, 7, 9, 12, 6, 6, 8, 9, 12},
    .pair = {11, 11, 14, 20, 26, 10, 10, 25, 50, 70},
    .min_queue_pairs = 8,
    .section_bytes = 16 << 20,
    .min_share = 12,
    .state = 136,
    .forest = 1000,
};

/// Batch-invariant plans do not cut pairs of small row tiles, whose costs were measured separately (ADR 6).
constexpr KernelCosts costs_of_whole_pairs() {
  KernelCosts costs = kCosts;
  costs.pair[0] = costs.pair[1] = costs.pair[kNumTileKinds] = costs.pair[kNumTileKinds + 1] = 8;
  costs.min_share = 9;
  return costs;
}

/// The design's two kernels. One loads K and V by boxes, each inside one page; the other loads them row by row. Wide
/// heads over an 8-bit cache have only the first, with a producer that dequantizes rows (DequantizingCopier).
enum Kernel : int32_t { kByBoxes = 0, kByRows = 1 };

inline int32_t make_arguments(const LatentAttentionParams& params, const LaunchContext& context,
                              KernelArguments& arguments) {
  LatentTmaParams& tma = arguments.make<LatentTmaParams>();
  tma.attention = params;
  tma.unit_shift = unit_shift(params);
  if (tma.unit_shift < 0) return kRowsTooFarApart;
  const bool has_rope = is_latent(context.dims);
  const int32_t q_columns = has_rope ? context.dims.v : context.dims.qk;
  const QueryPart rope = tma.q_rope = find_q_rope(params, context);
  const auto encode_q = [&](int32_t packed_rows, TensorMap& map, TensorMap& rope_map) {
    return encode_rows(params, context, params.q, context.q_dtype, q_columns, params.q_row_stride, params.q_head_stride,
                       packed_rows, map) &&
           (!has_rope || encode_rows(params, context, rope.data, context.q_dtype, context.dims.qk - q_columns,
                                     rope.row_stride, rope.head_stride, packed_rows, rope_map));
  };
  const int32_t tile_rows = tuning(context.dims, context.kv_form).q_rows();
  tma.has_row_maps = encode_q(tile_rows, tma.q, tma.q_rope_tile) &&
                     encode_rows(params, context, params.o, context.o_dtype, context.dims.v, params.o_row_stride,
                                 params.o_head_stride, kWarpRows, tma.o);
  tma.has_one_row_map = encode_q(params.group_size.divisor, tma.q_row, tma.q_rope_row);
  tma.v_is_k = v_is_in_k(params.k, params.v, params.num_pages, params.page_size.divisor, params.num_kv_heads);
  const bool widens_on_load = is_wide(context.dims) && is_in_bytes(context.kv_dtype);
  if (!widens_on_load) encode_caches(context, decodes_packed(context.dims, context.kv_form), tma);
  tma.has_dequantized = context.dequantized.rows > 0;
  if (tma.has_dequantized) encode_dequantized(context, tuning(context.dims, context.kv_form).stage_parts, tma);
  const Kernel kernel = tma.box_tokens > 0 || widens_on_load ? kByBoxes : kByRows;
  tma.code = context.codes[kernel];
  tma.merge_code = context.merge_code;
  return kernel;
}

constexpr KernelDesign make_design() {
  KernelDesign design{};
  design.name = "sm90";
  design.costs = kCosts;
  design.invariant_costs = costs_of_whole_pairs();
  design.max_kind = [](HeadDims dims, KvForm kv) { return tuning(dims, kv).max_kind; };
  // Only where every row tile is then full (ADR 34).
  design.halves_row_tiles = [](HeadDims dims, int32_t group_size) {
    return is_latent(dims) && group_size % (2 * tuning(dims).q_rows()) == 0;
  };
  design.forms_clusters = [](KvForm kv) { return kv.element_bytes == 1; };
  design.kv_tile = [](HeadDims dims, KvForm kv) { return tuning(dims, kv).kv_tile; };
  design.min_dequantized_rows = min_dequantized_rows;
  design.kernels[kByBoxes] = "attention";
  design.kernels[kByRows] = "attention_rows";
  design.threads = [](HeadDims dims, KvForm kv) { return tuning(dims, kv).cta_threads(); };
  design.shared_bytes = [](HeadDims dims, KvForm kv) { return shared_layout(dims, kv).bytes; };
  design.prefetches_code = true;
  design.make_arguments = make_arguments;
  return design;
}
constexpr KernelDesign kDesign = make_design();

}  // namespace attn::sm90
