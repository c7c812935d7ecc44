// Shape of the Hopper attention kernel: what its launcher, the planner's configuration and the kernel itself must agree
// on.
//
// A CTA has three warpgroups: one that brings Q, K and V (the producer), and two that compute (the consumers). Its
// shared memory is SharedLayout.
#pragma once

#include "attention/sm90/params.h"
#include "common/math.h"
#include "common/platform.h"
#include "planner/schedule.h"

namespace attn::hopper {

constexpr int32_t kWarpgroupThreads = 128;
constexpr int32_t kProducerThreads = kWarpgroupThreads;
constexpr int32_t kConsumerThreads = 2 * kWarpgroupThreads;
constexpr int32_t kConsumerWarps = kConsumerThreads / 32;
constexpr int32_t kThreads = kProducerThreads + kConsumerThreads;

/// Registers of a thread: three warpgroups share 504.
ATTN_HD constexpr int32_t producer_registers(int32_t head_dim) { return head_dim <= 128 ? 88 : 72; }
ATTN_HD constexpr int32_t consumer_registers(int32_t head_dim) { return (504 - producer_registers(head_dim)) / 2; }

/// Largest kind of row tile: 64 rows for each consumer.
constexpr int32_t kMaxKind = 3;
constexpr int32_t kQRows = tile_rows(kMaxKind);
constexpr int32_t kWarpRows = 16;  // of a consumer warp

/// Tokens of one KV tile: what the scores of 64 rows leave registers for.
ATTN_HD constexpr int32_t kv_tile(int32_t head_dim) { return head_dim <= 128 ? 128 : 64; }

/// Q tiles, of consecutive work items.
ATTN_HD constexpr int32_t q_slots(int32_t head_dim) { return head_dim <= 128 ? 2 : 1; }

/// Slots of the ring that K and V tiles go through, in turn.
ATTN_HD constexpr int32_t kv_slots(int32_t head_dim) { return head_dim <= 64 ? 10 : 5; }

/// Parts of a slot, each filled and freed by itself: what a warpgroup takes of a KV tile when the row tile is narrow.
ATTN_HD constexpr int32_t slot_parts(int32_t head_dim) { return head_dim <= 128 ? 2 : 1; }

/// Parts that are filled or being filled while row tiles are narrow: enough to keep the memory busy. With more, some
/// multiprocessors get more of its bandwidth than others, and all wait for the last (docs/decisions.md). Where slots
/// have no parts, more than kv_slots - 2 would be wrong: a warpgroup that only waits for a tile would hold up nothing.
ATTN_HD constexpr int32_t narrow_parts(int32_t head_dim) { return head_dim <= 64 ? 12 : head_dim <= 128 ? 6 : 3; }

/// Bytes of WorkItem (attention/sm90/work_item.cuh).
constexpr int32_t kWorkItemBytes = 80;

/// Columns of a row in one block of a tile in shared memory (128 bytes).
constexpr int32_t kBlockColumns = 64;

/// Byte offsets of the parts of a CTA's dynamic shared memory, for elements of 2 bytes.
struct SharedLayout {
  int32_t q;
  int32_t q_slot_bytes;
  int32_t kv;
  int32_t kv_slot_bytes;
  int32_t row_states;  // float [2 (maximum, sum)][kConsumerWarps][16]
  int32_t items;       // WorkItem [q_slots]
  int32_t turns;       // int32 [2]: pairs that the producer takes in turn
  int32_t barriers;    // mbarriers: q_full, q_free [q_slots], kv_full, kv_free [kv_slots][slot_parts]
  int32_t bytes;

  ATTN_HD constexpr explicit SharedLayout(int32_t head_dim)
      : q(0),
        q_slot_bytes(kQRows * head_dim * 2),
        kv(q_slots(head_dim) * q_slot_bytes),
        kv_slot_bytes(kv_tile(head_dim) * head_dim * 2),
        row_states(kv + kv_slots(head_dim) * kv_slot_bytes),
        items(row_states + 2 * kConsumerWarps * 16 * 4),
        turns(items + q_slots(head_dim) * kWorkItemBytes),
        barriers(turns + 2 * 4),
        bytes(barriers + 2 * (q_slots(head_dim) + kv_slots(head_dim) * slot_parts(head_dim)) * 8) {}
};

static_assert(SharedLayout(128).bytes <= 227 * 1024 && SharedLayout(256).bytes <= 227 * 1024 &&
                  SharedLayout(64).bytes <= 227 * 1024,
              "a block's limit");

}  // namespace attn::hopper
