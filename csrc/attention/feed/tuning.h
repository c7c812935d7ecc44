// A design's settings of the feed: the sizes of tiles and rings, and the layout of shared memory.
//
// A CTA has a warpgroup that loads Q, K and V (the producer), and two or three that compute (the consumers).
#pragma once

#include "attention/head_shape.h"
#include "common/math.h"
#include "common/platform.h"
#include "planner/schedule.h"

namespace attn::feed {

constexpr int32_t kWarpgroupThreads = 128;
constexpr int32_t kProducerThreads = kWarpgroupThreads;
constexpr int32_t kWarpgroupRows = 64;  // that a consumer warpgroup multiplies

/// Row tiles of this kind have rows for two consumer warpgroups. The next kind has rows for three.
constexpr int32_t kTwoWarpgroupKind = 3;

/// Two consumer warpgroups share a KV tile: its tokens in row tiles of 16 rows, and the work of transforming or
/// transposing it. A third warpgroup only multiplies rows of the largest row tiles.
constexpr int32_t kSharingThreads = 2 * kWarpgroupThreads;
constexpr int32_t kSharingWarps = kSharingThreads / 32;

/// Sizes that follow from the widths of heads.
struct Tuning {
  int32_t max_qk;  // columns of a head of Q and K, and of one of V: the widest that this is for
  int32_t max_v;
  int32_t max_kind;   // largest kind of row tile
  int32_t kv_tile;    // tokens of one KV tile: as many as 64 rows of scores leave registers for
  int32_t q_stages;   // Q tiles, of consecutive work items
  int32_t kv_stages;  // K and V tiles in the ring

  /// A stage has parts, each with two mbarriers. In row tiles of 16 rows each warpgroup takes the tokens of one part.
  /// With wide heads each multiplies the columns of one part with P.
  int32_t stage_parts;
  /// Limit of the parts that are filled or being filled while row tiles have 16 rows.
  int32_t max_parts_in_flight = 0;
  /// Of a thread. Three warpgroups share 504 registers, four share 512.
  int32_t producer_registers;

  // Defaults are 0: nvcc 13.0 ignores others.

  /// A third consumer warpgroup multiplies 64 more rows. With wide heads, one computes P and two compute P V.
  bool has_third_consumer = false;
  /// A warpgroup waits for P V before it starts the next Q K^T (prefill.cuh).
  bool waits_for_products = false;
  /// Maxima are lazy (prefill.cuh).
  bool keeps_maxima = false;
  /// TMA loads consecutive pages of one token (RowCopier).
  bool finds_runs = false;
  /// Pieces of 16 bytes that a producer thread has on their way (DequantizingCopier).
  int32_t staged_pieces = 0;
  /// Stages that a tile takes once the producer has dequantized it (dequantizer.cuh). A stage has room for a stored
  /// tile; kv_stages is a multiple. 0: the producer does not dequantize.
  int32_t dequantized_stages = 0;
  /// Of the wider of K and V. If not 0, row tiles of 16 rows take KV tiles in pairs, one for each warpgroup: a part of
  /// a stage has room for a whole packed tile (TmaParams::k_packed).
  int32_t packed_token_bytes = 0;
  /// Words of the TokenScales of a token, which stages have room for; 0: there are none.
  int32_t token_scale_words = 0;

  ATTN_HD constexpr int32_t scale_tokens() const {  // of a part, that have room for their TokenScales
    return kv_tile / (packed_token_bytes > 0 ? 1 : stage_parts);
  }
  ATTN_HD constexpr int32_t consumer_warps() const { return (has_third_consumer ? 3 : 2) * kWarpgroupThreads / 32; }
  ATTN_HD constexpr int32_t cta_threads() const { return kProducerThreads + 32 * consumer_warps(); }
  ATTN_HD constexpr int32_t consumer_registers() const {
    return has_third_consumer ? (512 - producer_registers) / 24 * 8 : (504 - producer_registers) / 2;
  }
  ATTN_HD constexpr int32_t q_rows() const { return tile_rows(max_kind); }  // of a Q tile
  /// Of a work item, that have a place for their requests.
  ATTN_HD constexpr int32_t item_rows() const { return max_of(q_rows(), tile_rows(kTwoWarpgroupKind)); }
};

ATTN_HD constexpr Tuning with_producer_registers(Tuning tuning, int32_t registers) {
  tuning.producer_registers = registers;
  return tuning;
}

/// Bytes of WorkItem (attention/feed/work_item.cuh).
constexpr int32_t kWorkItemBytes = 80;

/// Bytes of a token of K or V in a packed tile, whose numbers are multiplied as they are stored. TMA permutes chunks of
/// rows of 64 or 128 bytes.
ATTN_HD constexpr int32_t packed_token_bytes(HeadDims dims, KvForm kv, bool is_v) {
  return round_up(kv.stored_columns(is_v ? dims.v : dims.qk, is_v), 64);
}

/// Bytes of a row in one block of a tile in shared memory.
constexpr int32_t kBlockRowBytes = 128;

/// Columns of a row in one block of a tile that is multiplied.
constexpr int32_t kBlockColumns = 64;

/// Bytes after the WorkItem with an 8-bit cache: the requests of its rows, int32 [item_rows()], and what its scores are
/// multiplied by.
ATTN_HD constexpr int32_t item_scales_bytes(const Tuning& tuning) { return tuning.item_rows() * 4 + 16; }

/// Producer warps, each with this number of mbarriers of what it has loaded and not dequantized.
constexpr int32_t kStoredBarriers = 2;

/// Byte offsets of the parts of a CTA's dynamic shared memory. `element_bytes`: of Q and O; `kv_element_bytes`: of K
/// and V.
struct SharedLayout {
  int32_t q;
  int32_t q_stage_bytes;
  int32_t kv;
  int32_t k_stage_bytes;  // K and V tiles lie in turn
  int32_t v_stage_bytes;
  int32_t transposed;        // two V tiles, if 8-bit elements are multiplied (float8_prefill.cuh)
  int32_t transposed_bytes;  // of one of them
  int32_t probabilities;     // elements [64 rows][kv_tile]. Only of wide heads.
  int32_t token_scales;      // float [kv_stages][stage_parts][scale_tokens()][token_scale_words]
  int32_t staged;            // pieces of 16 bytes [staged_pieces][kProducerThreads]. Only of 8-bit caches.
  int32_t row_states;        // float [2 (maximum, sum)][kSharingWarps][16]. Wide heads: [3 (and correction)][64].
  int32_t items;             // WorkItem [q_stages]. With an 8-bit cache item_scales_bytes() follow each.
  int32_t item_bytes;
  int32_t queued;    // int32 [2]: pairs from the work queue
  int32_t barriers;  // mbarriers: q_full, q_free [q_stages], kv_full, kv_free [kv_stages][stage_parts], transformed;
                     // of wide heads p_full, p_free; of tiles that the producer dequantizes kv_stored [its warps]
                     // [kStoredBarriers]
  int32_t bytes;

  /// stored_bytes: of an element of the cache.
  ATTN_HD static constexpr SharedLayout of(HeadDims dims, const Tuning& tuning, int32_t element_bytes,
                                           int32_t stored_bytes) {
    return SharedLayout(dims, tuning, element_bytes, tile_element_bytes(dims, element_bytes, stored_bytes),
                        stored_bytes != element_bytes);
  }

 private:
  /// Columns that the stages have room for. With an odd number of them each holds K and V in turn; wide V may be in K's
  /// bytes, and then all stages hold both. Dequantized tiles take stages of both.
  ATTN_HD static constexpr HeadDims stage_dims(HeadDims dims, const Tuning& tuning) {
    return tuning.kv_stages % 2 == 0 && !is_wide(dims) && tuning.dequantized_stages == 0 ? dims
                                                                                         : HeadDims(dims.widest());
  }

  ATTN_HD static constexpr int32_t stage_bytes(const Tuning& tuning, int32_t columns, int32_t kv_element_bytes) {
    return tuning.kv_tile *
           max_of(tile_row_bytes(columns, kv_element_bytes), tuning.stage_parts * tuning.packed_token_bytes);
  }

  /// kv_element_bytes: of tiles.
  ATTN_HD constexpr SharedLayout(HeadDims dims, const Tuning& tuning, int32_t element_bytes, int32_t kv_element_bytes,
                                 bool has_scales)
      : q(0),
        q_stage_bytes(tuning.q_rows() * tile_row_bytes(dims.widest(), element_bytes)),
        kv(tuning.q_stages * q_stage_bytes),
        k_stage_bytes(stage_bytes(tuning, stage_dims(dims, tuning).qk, kv_element_bytes)),
        v_stage_bytes(stage_bytes(tuning, stage_dims(dims, tuning).v, kv_element_bytes)),
        transposed(kv + ceil_div(tuning.kv_stages, 2) * k_stage_bytes + tuning.kv_stages / 2 * v_stage_bytes),
        transposed_bytes(kv_element_bytes == element_bytes || tuning.dequantized_stages > 0
                             ? 0
                             : tuning.kv_tile * tile_row_bytes(dims.widest(), element_bytes)),
        probabilities(transposed + 2 * transposed_bytes),
        token_scales(probabilities + (is_wide(dims) ? 64 * tuning.kv_tile * 2 : 0)),
        staged(token_scales +
               tuning.kv_stages * tuning.stage_parts * tuning.scale_tokens() * tuning.token_scale_words * 4),
        row_states(staged + tuning.staged_pieces * kProducerThreads * 16),
        items(row_states + 2 * kSharingWarps * 16 * 4),
        item_bytes(kWorkItemBytes + (has_scales ? item_scales_bytes(tuning) : 0)),
        queued(items + tuning.q_stages * item_bytes),
        barriers(queued + 2 * 4),
        bytes(barriers + 2 * (tuning.q_stages + tuning.kv_stages * tuning.stage_parts) * 8 +
              (is_wide(dims) ? 3 : 1) * 8 +
              (tuning.dequantized_stages > 0 ? kProducerThreads / 32 * kStoredBarriers * 8 : 0)) {}
};

}  // namespace attn::feed
