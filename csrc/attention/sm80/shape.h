// Shape of the generic attention kernel: what its launcher, the planner's configuration and the kernel itself must
// agree on.
//
// A CTA's shared memory:
// - Q tile: tile_rows(max_kind) rows; at the end of a work item the warps' outputs on their way to global memory;
// - KV stages: a ring of KV tiles, K and V of one tile in neighboring stages;
// - row addresses: of two KV tiles, K and V address of each token;
// - row states: maximum and sum of each warp's 16 rows; within a work item, TokenScales of a KV tile;
// - loading: what each warp's KV loader knows of its row tile, where registers are scarce.
#pragma once

#include "attention/head_shape.h"
#include "common/platform.h"
#include "planner/schedule.h"

namespace attn::sm80 {

constexpr int32_t kWarps = 4;
constexpr int32_t kThreads = 32 * kWarps;

/// Blocks that share a multiprocessor (where its shared memory is large enough); bounds the registers.
constexpr int32_t kCtasPerMultiprocessor = 2;

/// Sizes that follow from the widest head.
struct Tuning {
  int32_t max_columns;  // of a head: the widest that this is for
  int32_t max_kind;     // largest kind of row tile that a warp's accumulators leave room for
  int32_t kv_tile;      // tokens of one KV tile
  int32_t kv_stages;    // of the ring: as many as fit into the 99 KB that a block may have on every GPU since Ampere
};

/// The first entry for heads of these widths. If there is none, its kv_tile is 0.
template <int kCount>
ATTN_HD constexpr Tuning first_for(const Tuning (&tunings)[kCount], HeadDims dims) {
  for (const Tuning& tuning : tunings) {
    if (dims.widest() <= tuning.max_columns) return tuning;
  }
  return Tuning{};
}

ATTN_HD constexpr Tuning tuning(HeadDims dims, KvForm kv = 2) {
  constexpr Tuning kTunings[] = {
      {.max_columns = 64, .max_kind = 3, .kv_tile = 64, .kv_stages = 6},
      {.max_columns = 128, .max_kind = 3, .kv_tile = 64, .kv_stages = 4},
      {.max_columns = 256, .max_kind = 2, .kv_tile = 64, .kv_stages = 2},
      {.max_columns = 576, .max_kind = 0, .kv_tile = 32, .kv_stages = 2},
  };
  // 8-bit caches
  constexpr Tuning kFloat8Tunings[] = {
      {.max_columns = 64, .max_kind = 3, .kv_tile = 64, .kv_stages = 6},
      {.max_columns = 128, .max_kind = 2, .kv_tile = 64, .kv_stages = 6},
      {.max_columns = 256, .max_kind = 2, .kv_tile = 64, .kv_stages = 2},
      {.max_columns = 576, .max_kind = 0, .kv_tile = 32, .kv_stages = 2},
  };
  return kv.element_bytes == 1 ? first_for(kFloat8Tunings, dims) : first_for(kTunings, dims);
}

/// Bytes of LoadedTile (attention/sm80/kv_loader.cuh).
constexpr int32_t kLoadedTileBytes = 48;

/// Byte offsets of the parts of a CTA's dynamic shared memory. `element_bytes`: of Q and O.
struct SharedLayout {
  int32_t q;
  int32_t kv;
  int32_t k_stage_bytes;
  int32_t pair_bytes;     // of neighboring stages
  int32_t row_addresses;  // uint64 [2 (KV tile parity)][2 (K, V)][kv_tile]
  int32_t row_states;     // float [2 (maximum, sum)][kWarps][16], or [2 (K, V)][kv_tile][scale_words]
  int32_t loading;        // LoadedTile [kWarps]
  int32_t requests;       // of an 8-bit cache: int32 [rows of the Q tile]
  int32_t bytes;

  ATTN_HD constexpr explicit SharedLayout(HeadDims dims, int32_t element_bytes = 2, KvForm kv_form = 2)
      : q(0),
        kv(tile_rows(tuning(dims, kv_form).max_kind) * tile_row_bytes(dims.widest(), element_bytes)),
        k_stage_bytes(tuning(dims, kv_form).kv_tile * kv_row_bytes(false, dims, element_bytes, kv_form)),
        pair_bytes(k_stage_bytes + tuning(dims, kv_form).kv_tile * kv_row_bytes(true, dims, element_bytes, kv_form)),
        row_addresses(kv + tuning(dims, kv_form).kv_stages / 2 * pair_bytes),
        row_states(row_addresses + 2 * 2 * tuning(dims, kv_form).kv_tile * 8),
        loading(row_states + 2 * max_of(kWarps * 16, tuning(dims, kv_form).kv_tile * kv_form.scale_words(dims)) * 4),
        requests(loading + kWarps * kLoadedTileBytes),
        bytes(requests + (kv_form.element_bytes == element_bytes ? 0 : tile_rows(tuning(dims, kv_form).max_kind) * 4)) {
  }

 private:
  /// Of a row of a tile of K or V.
  ATTN_HD static constexpr int32_t kv_row_bytes(bool is_v, HeadDims dims, int32_t element_bytes, KvForm kv) {
    const int32_t columns = is_v ? dims.v : dims.qk;
    return is_wide(dims) ? tile_row_bytes(columns, element_bytes)
                         : tile_row_bytes(kv.stored_columns(columns, is_v), kv.element_bytes);
  }
};

}  // namespace attn::sm80
