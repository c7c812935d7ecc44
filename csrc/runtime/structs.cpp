// What Python knows of the structs and enumerations of this library: names, types and places of their fields. A new
// field must be added here, too, or the library does not compile.
#include <tvm/ffi/container/array.h>
#include <tvm/ffi/container/tuple.h>
#include <tvm/ffi/function.h>
#include <tvm/ffi/string.h>

#include "planner/params.h"
#include "planner/schedule.h"
#include "runtime/attention.h"
#include "runtime/designs.h"
#include "runtime/struct_fields.h"
#include "sampling/sampling.h"

namespace attn {

// The schedule.
ATTN_STRUCT(Visibility, 0, causal, window_left);
ATTN_STRUCT(RowPositions, 4, positions, requests, num_rows);
ATTN_STRUCT(Level, 0, indices, rows, positions, row_ranges, num_entries, entry_step, visibility, group_begin);
ATTN_STRUCT(ScheduleHeader, 0, num_groups, num_tiles, errors, num_levels, num_merge_rows, num_links, flags, whole_pairs,
            num_requests, queue_head, aligned_tile, aligned_cta, aligned_parts, second_queue_head, section_tokens,
            dequantized_tokens, share, kv_tile_cost, pair_cost, levels);
ATTN_STRUCT(RowGroup, 0, table_begin, qo_begin, qo_len, kv_len, tile_begin, level, kind, state_begin, kv_offset,
            q_position, request, dequantized_row, dequantized_token);
ATTN_STRUCT(RowTile, 0, cost_begin, group, kind, packed_begin, kv_begin, kv_end, num_kv_tiles);
ATTN_STRUCT(Position, 0, tile, head, kv_tile, flags);
ATTN_STRUCT(RowLink, 0, group, index);
ATTN_STRUCT(PrefixNode, 0, leader, parent, begin_page, end_page, num_requests, num_rows, group, reason, saved, added);
ATTN_STRUCT(ScheduleConfig, 0, num_kv_heads, group_size, kv_tile, max_kind, num_ctas, max_groups, max_rows, max_tiles,
            max_states, max_merge_rows, max_links, max_nodes, cascade, batch_invariant, min_queue_pairs, section_tokens,
            dequantized_tokens, min_dequantized_rows, min_share, kv_tile_cost, pair_cost, state_cost, cascade_cost);
ATTN_STRUCT(ScheduleLayout, 0, groups, tiles, positions, links, rows, row_requests, nodes, attachments, bytes);

// The inputs of a plan, filled by tests that call a planner themselves.
ATTN_STRUCT(IndexArray, 4, data, is_int64);
ATTN_STRUCT(PageTable, 0, indices, indptr, last_page_len, kv_lens, rows, num_entries, row_stride, num_rows, row_entries,
            page_size, entry_step);
ATTN_STRUCT(PlanLevel, 4, qo_indptr, table, rows, max_rows, num_groups, visibility, kv_offsets, prompts, positions,
            row_ranges, kv_tile_lists, num_kv_tile_lists, kv_length);

// Arguments and results of the functions that Python calls.
ATTN_STRUCT(AttentionConfig, 5, dequantized_bytes, num_qo_heads, num_kv_heads, head_dim, head_dim_v, dtype, q_dtype,
            kv_dtype, max_rows, max_batch, max_levels, num_ctas, cascade, design, device, batch_invariant, on_cuda,
            has_variant, uses_softmax, has_mask, skips_kv_tiles, has_sinks, float8_out, multiplies_float8, token_scales,
            rotation);
ATTN_STRUCT(LevelOptions, 0, index, num_levels, page_size, window_left, kv_offsets, prompts, positions, entry_step,
            causal, finds_row_ranges, pages_change, has_slots);
ATTN_STRUCT(WorkspaceSize, 0, schedule, partial_o, partial_lse, row_ranges, dequantized);

namespace {

using tvm::ffi::Array;
using tvm::ffi::String;
using tvm::ffi::Tuple;

using FieldRow = Tuple<String, String, int64_t, int64_t>;   // name, type, elements (0: not an array), offset
using StructRow = Tuple<String, int64_t, Array<FieldRow>>;  // name, bytes, fields
using ValueRow = Tuple<String, String, int64_t>;            // enumeration, name of the value, value

template <class Struct>
StructRow describe() {
  Array<FieldRow> fields;
  for (const Field& field : StructFields<Struct>::fields) {
    fields.push_back(
        FieldRow(field.name, field.type, static_cast<int64_t>(field.count), static_cast<int64_t>(field.offset)));
  }
  return StructRow(StructFields<Struct>::name, static_cast<int64_t>(sizeof(Struct)), fields);
}

/// A struct comes after those that it holds.
Array<StructRow> struct_tables() {
  return {describe<Visibility>(),   describe<RowPositions>(),   describe<Level>(),           describe<ScheduleHeader>(),
          describe<RowGroup>(),     describe<RowTile>(),        describe<Position>(),        describe<RowLink>(),
          describe<PrefixNode>(),   describe<ScheduleConfig>(), describe<ScheduleLayout>(),  describe<IndexArray>(),
          describe<PageTable>(),    describe<PlanLevel>(),      describe<AttentionConfig>(), describe<LevelOptions>(),
          describe<WorkspaceSize>()};
}

/// The values of enumerations, by their names in C++; designs, by the names of their folders; and limits that Python
/// checks.
Array<ValueRow> enum_values() {
  Array<ValueRow> values;
  const auto add = [&](const char* enumeration, const char* name, auto value) {
    values.push_back(ValueRow(enumeration, name, static_cast<int64_t>(value)));
  };
#define ATTN_VALUE(Enumeration, name) add(#Enumeration, #name, Enumeration::name);
#define ATTN_ENUMERATION(Enumeration, ...) ATTN_FOR_EACH(ATTN_VALUE, Enumeration, __VA_ARGS__)
  for (int32_t i = 0; i < kNumDataTypes; ++i) add("DataType", stored_format(static_cast<DataType>(i)).name, i);
  ATTN_ENUMERATION(CascadeMode, kCascadeOff, kCascadeByCost, kCascadeAlways);
  ATTN_ENUMERATION(ScheduleFlag, kIsPlain, kUsesQueue, kHasLargestTiles);
  ATTN_ENUMERATION(ScheduleError, kQoIndptrInvalid, kKvIndptrInvalid, kKvLengthInvalid, kLastPageLenInvalid,
                   kTableRowInvalid, kPageIndexInvalid, kRowInvalid, kPrefixSearchFailed, kSelectionTooLong);
  ATTN_ENUMERATION(RowTask, kSample, kRenorm, kMaskLogits, kSpeculate);
  ATTN_ENUMERATION(NodeReason, kNodeTaken, kNodeSavesTooLittle, kNodeHasNoRoom, kNodeTooDeep, kForestSavesTooLittle);
#undef ATTN_ENUMERATION
#undef ATTN_VALUE
  add("Limit", "kMaxHeads", kMaxHeads);
  add("Limit", "kScalesBytes", kScalesBytes);
  add("Limit", "kMaxLevels", kMaxLevels);
  add("Limit", "kMaxClusterCtas", kMaxClusterCtas);
  add("Limit", "kWorkspaceWords", kWorkspaceWords);
  for (int32_t i = 0; i < kNumDesigns; ++i) add("KernelDesign", kDesigns[i]->name, i);
  return values;
}

}  // namespace
}  // namespace attn

TVM_FFI_DLL_EXPORT_TYPED_FUNC(struct_tables, attn::struct_tables);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(enum_values, attn::enum_values);
