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
ATTN_STRUCT(Visibility, ATTN_FIELD(causal), ATTN_FIELD(window_left));

ATTN_STRUCT(RowPositions, ATTN_FIELD(positions), ATTN_FIELD(requests), ATTN_FIELD(num_rows), padding(4));

ATTN_STRUCT(Level, ATTN_FIELD(indices), ATTN_FIELD(rows), ATTN_FIELD(positions), ATTN_FIELD(row_ranges),
            ATTN_FIELD(num_entries), ATTN_FIELD(entry_step), ATTN_FIELD(visibility), ATTN_FIELD(group_begin));

ATTN_STRUCT(ScheduleHeader, ATTN_FIELD(num_groups), ATTN_FIELD(num_tiles), ATTN_FIELD(errors), ATTN_FIELD(num_levels),
            ATTN_FIELD(num_merge_rows), ATTN_FIELD(num_links), ATTN_FIELD(flags), ATTN_FIELD(whole_pairs),
            ATTN_FIELD(num_requests), ATTN_FIELD(queue_head), ATTN_FIELD(aligned_tile), ATTN_FIELD(aligned_cta),
            ATTN_FIELD(aligned_parts), ATTN_FIELD(second_queue_head), ATTN_FIELD(section_tokens), padding(4),
            ATTN_FIELD(share), ATTN_FIELD(kv_tile_cost), ATTN_FIELD(pair_cost), ATTN_FIELD(levels));

ATTN_STRUCT(RowGroup, ATTN_FIELD(table_begin), ATTN_FIELD(qo_begin), ATTN_FIELD(qo_len), ATTN_FIELD(kv_len),
            ATTN_FIELD(tile_begin), ATTN_FIELD(level), ATTN_FIELD(kind), ATTN_FIELD(state_begin), ATTN_FIELD(kv_offset),
            ATTN_FIELD(q_position), ATTN_FIELD(request));

ATTN_STRUCT(RowTile, ATTN_FIELD(cost_begin), ATTN_FIELD(group), ATTN_FIELD(kind), ATTN_FIELD(packed_begin),
            ATTN_FIELD(kv_begin), ATTN_FIELD(kv_end), ATTN_FIELD(num_kv_tiles));

ATTN_STRUCT(Position, ATTN_FIELD(tile), ATTN_FIELD(head), ATTN_FIELD(kv_tile), ATTN_FIELD(flags));

ATTN_STRUCT(RowLink, ATTN_FIELD(group), ATTN_FIELD(index));

ATTN_STRUCT(PrefixNode, ATTN_FIELD(leader), ATTN_FIELD(parent), ATTN_FIELD(begin_page), ATTN_FIELD(end_page),
            ATTN_FIELD(num_requests), ATTN_FIELD(num_rows), ATTN_FIELD(group), ATTN_FIELD(reason), ATTN_FIELD(saved),
            ATTN_FIELD(added));

ATTN_STRUCT(ScheduleConfig, ATTN_FIELD(num_kv_heads), ATTN_FIELD(group_size), ATTN_FIELD(kv_tile), ATTN_FIELD(max_kind),
            ATTN_FIELD(num_ctas), ATTN_FIELD(max_groups), ATTN_FIELD(max_rows), ATTN_FIELD(max_tiles),
            ATTN_FIELD(max_states), ATTN_FIELD(max_merge_rows), ATTN_FIELD(max_links), ATTN_FIELD(max_nodes),
            ATTN_FIELD(cascade), ATTN_FIELD(batch_invariant), ATTN_FIELD(min_queue_pairs), ATTN_FIELD(section_tokens),
            ATTN_FIELD(min_share), ATTN_FIELD(kv_tile_cost), ATTN_FIELD(pair_cost), ATTN_FIELD(state_cost),
            ATTN_FIELD(cascade_cost));

ATTN_STRUCT(ScheduleLayout, ATTN_FIELD(groups), ATTN_FIELD(tiles), ATTN_FIELD(positions), ATTN_FIELD(links),
            ATTN_FIELD(rows), ATTN_FIELD(row_requests), ATTN_FIELD(nodes), ATTN_FIELD(attachments), ATTN_FIELD(bytes));

// The inputs of a plan, filled by tests that call a planner themselves.
ATTN_STRUCT(IndexArray, ATTN_FIELD(data), ATTN_FIELD(is_int64), padding(4));

ATTN_STRUCT(PageTable, ATTN_FIELD(indices), ATTN_FIELD(indptr), ATTN_FIELD(last_page_len), ATTN_FIELD(kv_lens),
            ATTN_FIELD(rows), ATTN_FIELD(num_entries), ATTN_FIELD(row_stride), ATTN_FIELD(num_rows),
            ATTN_FIELD(row_entries), ATTN_FIELD(page_size), ATTN_FIELD(entry_step));

ATTN_STRUCT(PlanLevel, ATTN_FIELD(qo_indptr), ATTN_FIELD(table), ATTN_FIELD(rows), ATTN_FIELD(max_rows),
            ATTN_FIELD(num_groups), ATTN_FIELD(visibility), ATTN_FIELD(kv_offsets), ATTN_FIELD(positions),
            ATTN_FIELD(row_ranges), ATTN_FIELD(kv_tile_lists), ATTN_FIELD(num_kv_tile_lists), padding(4),
            ATTN_FIELD(kv_length));

// Arguments and results of the functions that Python calls.
ATTN_STRUCT(AttentionConfig, ATTN_FIELD(num_qo_heads), ATTN_FIELD(num_kv_heads), ATTN_FIELD(head_dim),
            ATTN_FIELD(head_dim_v), ATTN_FIELD(dtype), ATTN_FIELD(q_dtype), ATTN_FIELD(kv_dtype), ATTN_FIELD(max_rows),
            ATTN_FIELD(max_groups), ATTN_FIELD(max_levels), ATTN_FIELD(num_ctas), ATTN_FIELD(cascade),
            ATTN_FIELD(design), ATTN_FIELD(device), ATTN_FIELD(batch_invariant), ATTN_FIELD(on_cuda),
            ATTN_FIELD(has_variant), ATTN_FIELD(uses_softmax), ATTN_FIELD(has_mask), ATTN_FIELD(skips_kv_tiles),
            ATTN_FIELD(has_sinks), ATTN_FIELD(float8_out));

ATTN_STRUCT(LevelOptions, ATTN_FIELD(index), ATTN_FIELD(num_levels), ATTN_FIELD(page_size), ATTN_FIELD(window_left),
            ATTN_FIELD(kv_offsets), ATTN_FIELD(positions), ATTN_FIELD(entry_step), ATTN_FIELD(causal),
            ATTN_FIELD(finds_row_ranges), ATTN_FIELD(pages_change), ATTN_FIELD(has_slots));

ATTN_STRUCT(WorkspaceSize, ATTN_FIELD(schedule), ATTN_FIELD(partial_o), ATTN_FIELD(partial_lse),
            ATTN_FIELD(row_ranges));

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
    if (field.name == nullptr) continue;
    fields.push_back(
        FieldRow(field.name, field.type, static_cast<int64_t>(field.count), static_cast<int64_t>(field.offset)));
  }
  return StructRow(StructFields<Struct>::name, static_cast<int64_t>(sizeof(Struct)), fields);
}

template <class... Structs>
Array<StructRow> describe_all() {
  return {describe<Structs>()...};
}

/// A struct comes after those that it holds.
Array<StructRow> struct_tables() {
  return describe_all<Visibility, RowPositions, Level, ScheduleHeader, RowGroup, RowTile, Position, RowLink, PrefixNode,
                      ScheduleConfig, ScheduleLayout, IndexArray, PageTable, PlanLevel, AttentionConfig, LevelOptions,
                      WorkspaceSize>();
}

/// The values of enumerations, by their names in C++; designs, by the names of their folders; and limits that Python
/// checks.
Array<ValueRow> enum_values() {
  Array<ValueRow> values;
  const auto add = [&](const char* enumeration, const char* name, auto value) {
    values.push_back(ValueRow(enumeration, name, static_cast<int64_t>(value)));
  };
#define ATTN_VALUE(Enumeration, name) add(#Enumeration, #name, Enumeration::name)
  ATTN_VALUE(DataType, kFloat32);
  ATTN_VALUE(DataType, kFloat16);
  ATTN_VALUE(DataType, kBFloat16);
  ATTN_VALUE(DataType, kFloat8E4M3);
  ATTN_VALUE(DataType, kFloat8E5M2);
  ATTN_VALUE(DataType, kScaledLatent);
  ATTN_VALUE(CascadeMode, kCascadeOff);
  ATTN_VALUE(CascadeMode, kCascadeByCost);
  ATTN_VALUE(CascadeMode, kCascadeAlways);
  ATTN_VALUE(ScheduleFlag, kIsPlain);
  ATTN_VALUE(ScheduleFlag, kUsesQueue);
  ATTN_VALUE(ScheduleFlag, kHasLargestTiles);
  ATTN_VALUE(ScheduleError, kQoIndptrInvalid);
  ATTN_VALUE(ScheduleError, kKvIndptrInvalid);
  ATTN_VALUE(ScheduleError, kKvLengthInvalid);
  ATTN_VALUE(ScheduleError, kLastPageLenInvalid);
  ATTN_VALUE(ScheduleError, kTableRowInvalid);
  ATTN_VALUE(ScheduleError, kPageIndexInvalid);
  ATTN_VALUE(ScheduleError, kRowInvalid);
  ATTN_VALUE(ScheduleError, kPrefixSearchFailed);
  ATTN_VALUE(ScheduleError, kSelectionTooLong);
  ATTN_VALUE(RowTask, kSample);
  ATTN_VALUE(RowTask, kRenorm);
  ATTN_VALUE(RowTask, kMaskLogits);
  ATTN_VALUE(RowTask, kSpeculate);
  ATTN_VALUE(NodeReason, kNodeTaken);
  ATTN_VALUE(NodeReason, kNodeSavesTooLittle);
  ATTN_VALUE(NodeReason, kNodeHasNoRoom);
  ATTN_VALUE(NodeReason, kNodeTooDeep);
  ATTN_VALUE(NodeReason, kForestSavesTooLittle);
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
