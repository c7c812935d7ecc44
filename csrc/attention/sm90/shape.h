// Shape of the Hopper attention kernel: what its launcher, the planner's configuration and the kernel itself must agree
// on.
#pragma once

#include "attention/feed/tuning.h"
#include "attention/head_shape.h"
#include "common/platform.h"

namespace attn::sm90 {

using namespace feed;

constexpr int32_t kMultiplierRegisters = 160;  // of a thread that multiplies: the output takes 128

constexpr int32_t kWarpRows = 16;  // of a consumer warp in row tiles for wgmma

/// Of the warpgroup that computes P of wide heads.
ATTN_HD constexpr int32_t scorer_registers(const Tuning& tuning) {
  return 512 - 2 * kMultiplierRegisters - tuning.producer_registers;
}

/// The first entry for heads of these widths. If there is none, its kv_tile is 0.
template <int kCount>
ATTN_HD constexpr Tuning first_for(const Tuning (&tunings)[kCount], HeadDims dims) {
  for (const Tuning& tuning : tunings) {
    if (dims.qk <= tuning.max_qk && dims.v <= tuning.max_v) return tuning;
  }
  return Tuning{};
}

/// Whether row tiles of 16 rows decode from packed tiles (packed_decode.cuh).
ATTN_HD constexpr bool decodes_packed(HeadDims dims, KvForm kv) {
  const PackedProducts products = stored_format(kv.dtype).packed;
  return (products == PackedProducts::kF16 || (products == PackedProducts::kBf16 && kv.is_for_bf16)) &&
         leaves_registers(dims.widest());
}

/// max_parts_in_flight: enough to keep the memory busy. With more, some multiprocessors get more bandwidth than others,
/// and all wait for the slowest (ADR 18). If stages have no parts, it must be at most kv_stages - 2. Otherwise the
/// producer could refill a tile while a warpgroup still waits for its old phase.
/// keeps_maxima, finds_runs: off for wide heads, whose output needs the registers.
ATTN_HD constexpr Tuning tuning(HeadDims dims, KvForm kv = 2) {
  // clang-format off: it would give each field a line
  constexpr Tuning kTunings[] = {
      {.max_qk = 64, .max_v = 64, .max_kind = kTwoWarpgroupKind + 1, .kv_tile = 128, .q_stages = 2, .kv_stages = 10,
       .stage_parts = 2, .max_parts_in_flight = 12, .producer_registers = 72, .has_third_consumer = true,
       .waits_for_products = true, .keeps_maxima = true, .finds_runs = true},
      {.max_qk = 128, .max_v = 128, .max_kind = kTwoWarpgroupKind, .kv_tile = 128, .q_stages = 2, .kv_stages = 5,
       .stage_parts = 2, .max_parts_in_flight = 6, .producer_registers = 88, .keeps_maxima = true, .finds_runs = true},
      // MLA that is not absorbed
      {.max_qk = 192, .max_v = 128, .max_kind = kTwoWarpgroupKind, .kv_tile = 128, .q_stages = 1, .kv_stages = 4,
       .stage_parts = 2, .max_parts_in_flight = 5, .producer_registers = 88, .keeps_maxima = true, .finds_runs = true},
      {.max_qk = 192, .max_v = 192, .max_kind = kTwoWarpgroupKind, .kv_tile = 64, .q_stages = 1, .kv_stages = 7,
       .stage_parts = 1, .max_parts_in_flight = 4, .producer_registers = 72},
      {.max_qk = 256, .max_v = 256, .max_kind = kTwoWarpgroupKind, .kv_tile = 64, .q_stages = 1, .kv_stages = 5,
       .stage_parts = 1, .max_parts_in_flight = 3, .producer_registers = 72},
      // wide heads, absorbed MLA
      {.max_qk = 576, .max_v = 512, .max_kind = 2, .kv_tile = 64, .q_stages = 1, .kv_stages = 2,
       .stage_parts = 2, .producer_registers = 72, .has_third_consumer = true},
  };
  // 8-bit caches whose elements are multiplied
  constexpr Tuning kMultipliedTunings[] = {
      {.max_qk = 64, .max_v = 64, .max_kind = kTwoWarpgroupKind, .kv_tile = 128, .q_stages = 2, .kv_stages = 10,
       .stage_parts = 2, .max_parts_in_flight = 20, .producer_registers = 88, .finds_runs = true},
      {.max_qk = 128, .max_v = 128, .max_kind = kTwoWarpgroupKind, .kv_tile = 128, .q_stages = 2, .kv_stages = 6,
       .stage_parts = 2, .max_parts_in_flight = 12, .producer_registers = 88, .finds_runs = true},
  };
  // 8-bit caches that the producer dequantizes (feed/dequantizer.cuh). With heads of 64 and 128, row tiles of 16 rows
  // have as many tiles in flight as in kMultipliedTunings.
  constexpr Tuning kFloat8Tunings[] = {
      {.max_qk = 64, .max_v = 64, .max_kind = kTwoWarpgroupKind + 1, .kv_tile = 128, .q_stages = 2, .kv_stages = 10,
       .stage_parts = 2, .max_parts_in_flight = 20, .producer_registers = 104, .has_third_consumer = true,
       .waits_for_products = true, .keeps_maxima = true, .finds_runs = true, .dequantized_stages = 1},
      {.max_qk = 128, .max_v = 128, .max_kind = kTwoWarpgroupKind, .kv_tile = 128, .q_stages = 2, .kv_stages = 10,
       .stage_parts = 2, .max_parts_in_flight = 12, .producer_registers = 104, .keeps_maxima = true, .finds_runs = true,
       .dequantized_stages = 2},
      {.max_qk = 192, .max_v = 192, .max_kind = kTwoWarpgroupKind, .kv_tile = 64, .q_stages = 1, .kv_stages = 10,
       .stage_parts = 1, .max_parts_in_flight = 4, .producer_registers = 88, .dequantized_stages = 2},
      {.max_qk = 256, .max_v = 256, .max_kind = kTwoWarpgroupKind, .kv_tile = 64, .q_stages = 1, .kv_stages = 10,
       .stage_parts = 1, .max_parts_in_flight = 4, .producer_registers = 72, .dequantized_stages = 2},
      // wide heads: dequantized on their way to the ring
      {.max_qk = 512, .max_v = 512, .max_kind = 2, .kv_tile = 64, .q_stages = 1, .kv_stages = 2,
       .stage_parts = 2, .producer_registers = 104, .has_third_consumer = true, .staged_pieces = 12},
      // there is no room to stage them
      {.max_qk = 576, .max_v = 512, .max_kind = 2, .kv_tile = 64, .q_stages = 1, .kv_stages = 2,
       .stage_parts = 2, .producer_registers = 112, .has_third_consumer = true},
  };
  // clang-format on
  if (kv.multiplies_float8) return first_for(kMultipliedTunings, dims);
  if (kv.element_bytes != 1) return first_for(kTunings, dims);
  Tuning tuning = first_for(kFloat8Tunings, dims);
  if (!kv.has_token_scales) return tuning;
  tuning.token_scale_words = kv.scale_words(dims);
  if (tuning.dequantized_stages == 2) tuning.kv_stages = 8;  // two fewer: there is no room for more
  if (decodes_packed(dims, kv)) {
    tuning.kv_stages = 8;
    tuning.packed_token_bytes = max_of(packed_token_bytes(dims, kv, false), packed_token_bytes(dims, kv, true));
    // Two packed tiles may need a stage twice as large, which has room for a dequantized tile.
    if (tuning.stage_parts * tuning.packed_token_bytes > tile_row_bytes(dims.widest(), kv.element_bytes)) {
      tuning.kv_stages /= tuning.dequantized_stages;
      tuning.dequantized_stages = 1;
    }
    tuning.max_parts_in_flight = min_of(tuning.max_parts_in_flight, tuning.kv_stages * tuning.stage_parts);
  }
  return tuning;
}

/// Of kernels whose row tiles of 16 rows multiply packed tiles (packed_decode.cuh). Their consumers need more
/// registers. With heads of 64, parts are half as large, and all may be in flight.
ATTN_HD constexpr Tuning for_packed(Tuning tuning) {
  tuning.max_parts_in_flight = tuning.kv_stages * tuning.stage_parts;
  if (tuning.max_qk > 64) {
    tuning.max_parts_in_flight = min_of(8, tuning.max_parts_in_flight);
    tuning.producer_registers = 88;
  }
  return tuning;
}

/// KernelDesign::min_dequantized_rows (ADR 54).
inline int32_t min_dequantized_rows(HeadDims dims, KvForm kv) {
  if (tuning(dims, kv).dequantized_stages == 0) return 0;
  return dims.widest() <= 64 ? 1536 : dims.widest() <= 128 ? 1024 : 768;
}

/// Columns of O that products make, at least `columns`; not of wide heads.
ATTN_HD constexpr int32_t columns_of_products(int32_t columns) {
  return columns <= 64 ? 64 : columns <= 96 ? 96 : columns <= 128 ? 128 : columns <= 192 ? 192 : 256;
}

/// Whether row tiles for wgmma may multiply 8-bit elements of these heads (float8_prefill.cuh, ADR 37):
/// MULTIPLIED_FLOAT8_HEAD_DIMS in manifest.py.
ATTN_HD constexpr bool multiplies_float8(HeadDims dims) {
  return dims.qk == dims.v && (dims.qk == 64 || dims.qk == 128);
}

/// Byte offsets in a CTA's shared memory.
ATTN_HD constexpr SharedLayout shared_layout(HeadDims dims, KvForm kv = 2) {
  return SharedLayout::of(dims, tuning(dims, kv), 2, kv.element_bytes);
}

/// Whether the layouts of these heads are within a block's limit.
template <int kCount>
constexpr bool fit_shared_memory(KvForm kv, const HeadDims (&all_dims)[kCount]) {
  for (const HeadDims& dims : all_dims) {
    if (shared_layout(dims, kv).bytes > 227 * 1024) return false;
  }
  return true;
}
static_assert(fit_shared_memory(2, {64, 128, {192, 128}, 192, 256, {576, 512}}));
static_assert(fit_shared_memory(1, {64, 128, {192, 128}, 192, 256, 512, {576, 512}}));
static_assert(fit_shared_memory(KvForm(1, true), {64, 128}));
static_assert(fit_shared_memory(KvForm(1, false, true), {64, 128, 256}));
constexpr bool fit_4_bits() {
  for (int32_t i = 0; i < kNumDataTypes; ++i) {
    const DataType dtype = static_cast<DataType>(i);
    const HeadDims dims[] = {64, 128, 192, 256};
    const KvForm form(1, false, true, dtype), of_bf16(1, false, true, dtype, true);
    if (form.has_4_bits() && !(fit_shared_memory(form, dims) && fit_shared_memory(of_bf16, dims))) return false;
  }
  return true;
}
static_assert(fit_4_bits());

}  // namespace attn::sm90
