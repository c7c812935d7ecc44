// Shape of the generic attention kernel: what its launcher, the planner's configuration and the kernel itself must
// agree on.
//
// A CTA's shared memory:
//     Q tile            tile_rows(max_kind) x head_dim elements; at the end of a work item: the warps' outputs on their
//     way to global memory KV slots          kv_slots x kv_tile x head_dim elements, a ring: K and V of one KV tile in
//     neighbouring slots row addresses     two KV tiles' worth: K and V address of each token row states        maximum
//     and sum of each warp's 16 rows loading           what each warp's KV loader knows of its row tile, where
//     registers are scarce
#pragma once

#include "common/math.h"
#include "common/platform.h"
#include "planner/schedule.h"

namespace attn {

constexpr int32_t kWarps = 4;
constexpr int32_t kThreads = 32 * kWarps;

/// Tokens of one KV tile.
ATTN_HD constexpr int32_t kv_tile(int32_t /*head_dim*/) { return 64; }

/// Largest kind of row tile: what the accumulators of a warp leave room for.
ATTN_HD constexpr int32_t max_kind(int32_t head_dim) { return head_dim <= 128 ? 3 : 2; }

/// Slots of the ring that K and V tiles go through: as many as fit into the 99 KB that a block may have on every GPU
/// since Ampere.
ATTN_HD constexpr int32_t kv_slots(int32_t head_dim) { return head_dim <= 64 ? 6 : head_dim <= 128 ? 4 : 2; }

/// Blocks that share an SM (where its shared memory is large enough); bounds the registers.
ATTN_HD constexpr int32_t ctas_per_sm(int32_t /*head_dim*/) { return 2; }

/// Bytes of LoadedTile (attention/sm80/kv_loader.cuh).
constexpr int32_t kLoadedTileBytes = 48;

/// Byte offsets of the parts of a CTA's dynamic shared memory, for elements of 2 bytes.
struct SharedLayout {
  int32_t q;
  int32_t kv;
  int32_t kv_slot_bytes;
  int32_t row_addresses;  // uint64 [2 (KV tile parity)][2 (K, V)][kv_tile]
  int32_t row_states;     // float [2 (maximum, sum)][kWarps][16]
  int32_t loading;        // LoadedTile [kWarps]
  int32_t bytes;

  ATTN_HD constexpr explicit SharedLayout(int32_t head_dim)
      : q(0),
        kv(tile_rows(max_kind(head_dim)) * head_dim * 2),
        kv_slot_bytes(kv_tile(head_dim) * head_dim * 2),
        row_addresses(kv + kv_slots(head_dim) * kv_slot_bytes),
        row_states(row_addresses + 2 * 2 * kv_tile(head_dim) * 8),
        loading(row_states + 2 * kWarps * 16 * 4),
        bytes(loading + kWarps * kLoadedTileBytes) {}
};

/// Dynamic shared memory of a CTA, in bytes.
ATTN_HD constexpr int32_t shared_bytes(int32_t head_dim) { return SharedLayout(head_dim).bytes; }

}  // namespace attn
