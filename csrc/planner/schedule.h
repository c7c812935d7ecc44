// The schedule: what `plan` leaves in the workspace and what the attention and merge kernels read.
// Work is one flattened list: row tile by row tile; inside a row tile KV head by KV head; inside a head KV tile by KV
// tile. Every CTA gets one interval of that list, `[positions[cta], positions[cta + 1])`, of about equal cost. An
// interval therefore starts and ends inside at most two (row tile, head) pairs, and a pair that several CTAs share
// belongs to consecutive CTAs: nothing else has to be stored to run it or to merge it.
// Where CTAs have many pairs each, the intervals consist of whole pairs, and a GPU may ignore them: its CTAs take one
// pair after another from a work queue. Pairs that read the same K and V are then computed at about the same time, and
// find them in L2 (ADR 7, ADR 48).
//
// A row may be in several row groups: one for each level of a composition, each shared prefix that `plan` finds
// (forest.h), or each KV chunk of a request in a batch invariant plan. Then it leaves a state in each of them, and
// `links` says which row groups those are.
#pragma once

#include "common/math.h"
#include "common/platform.h"
#include "planner/visibility.h"

namespace attn {

constexpr int32_t kNumTileKinds = 5;

/// Most levels of a composition.
constexpr int32_t kMaxLevels = 8;

/// Most row groups that a row is in: one warp handles them, one lane each.
constexpr int32_t kMaxLinks = 32;

/// Packed rows (query position x heads of one KV group) of each kind of row tile: 16, 32, 64, 128, 192.
ATTN_HD constexpr int32_t tile_rows(int32_t kind) { return kind < 4 ? 16 << kind : 192; }

/// packed_row / tile_rows(kind), by shifts and products: the row tile that has this packed row of a row group.
ATTN_HD constexpr int32_t row_tile_of(uint32_t packed_row, int32_t kind) {
  return static_cast<int32_t>(kind < 4 ? packed_row >> (4 + kind) : packed_row / 192);
}

/// The cost of a row tile depends on its kind and on whether its rows leave states. The first cost kinds are for row
/// tiles whose rows are written, the others for row tiles whose rows leave states.
constexpr int32_t kNumCostKinds = 2 * kNumTileKinds;

/// `state_begin`: of the row group.
ATTN_HD constexpr int32_t cost_kind(int32_t kind, int32_t state_begin) {
  return state_begin < 0 ? kind : kNumTileKinds + kind;
}

/// Bits of ScheduleHeader::errors: metadata that only the device can see and that was clamped.
enum ScheduleError : uint32_t {
  kQoIndptrInvalid = 1u << 0,     // decreases, starts above 0 or ends beyond max_rows
  kKvIndptrInvalid = 1u << 1,     // decreases, starts below 0 or ends beyond the page indices
  kKvLengthInvalid = 1u << 2,     // negative or longer than the request's row of the table
  kLastPageLenInvalid = 1u << 3,  // below 1 or above page_size for a request that has pages
  kTableRowInvalid = 1u << 4,     // row of the table outside it
  kPageIndexInvalid = 1u << 5,    // page id outside the cache (seen by the attention kernel)
  kRowInvalid = 1u << 6,          // row of a row list outside [0, max_rows): it is left out
  kPrefixSearchFailed = 1u << 7,  // metadata changed while it was planned, or the search for shared prefixes did not
                                  // end in time: planned without any
  kSelectionTooLong = 1u << 8,    // a row has selected more tokens than were planned: the last ones are left out
};

/// A row group of a level's BSR view: rows, and the pages that they attend to.
struct RowGroup {
  int64_t table_begin;  // element of the level's `indices` (or first row of a ragged tensor) where its pages start
  int32_t qo_begin;     // first row of Q and O, or first element of the level's row list
  int32_t qo_len;       // rows
  int32_t kv_len;       // tokens
  int32_t tile_begin;   // index of its first RowTile
  int32_t level;
  int32_t kind;         // of its row tiles
  int32_t state_begin;  // its row number r leaves its state at row_state_index(state_begin + r, head)
                        // (attention/params.h), to be merged; -1: its rows are in no other group
  // For variants:
  int32_t kv_offset;   // tokens of its request that come before its first one
  int32_t q_position;  // of its row number 0 among the tokens of its request
  int32_t request;     // its place in the batch; -1: its rows are of several requests (Schedule::row_requests)

  /// The place in DequantizedKv (attention/feed/dequantized_kv.h) of a long row group's tokens. Token dequantized_token
  /// is in row dequantized_row, and later tokens follow. Row -1: the row group has no place there.
  int32_t dequantized_row;
  int32_t dequantized_token;
};

/// Packed rows [packed_begin, packed_begin + tile_rows(kind)) of a row group. Rows below qo_len * group_size exist. Any
/// of them may attend to tokens [kv_begin, kv_end).
///
/// kv_begin is a multiple of half a KV tile: a short window then lies in fewer KV tiles. In batch invariant plans, and
/// where row ranges are known, it is a multiple of a KV tile. A negative kv_begin says that there are holes between the
/// KV tiles. It is the complement (~) of the first one's place among all listed KV tiles (kv_tile_start()).
struct RowTile {
  int64_t cost_begin;  // cost of everything before this tile in the list
  int32_t group;
  int32_t kind;
  int32_t packed_begin;
  int32_t kv_begin;
  int32_t kv_end;
  int32_t num_kv_tiles;  // >= 1: a tile with nothing to attend to has one empty KV tile, so that its output is written
};

/// The part of a schedule that a CTA reads first.
enum ScheduleFlag : int32_t {
  kIsPlain = 1 << 0,          // no row is in several groups, and there is no row list
  kUsesQueue = 1 << 1,        // CTAs may take whole pairs from the work queue
  kHasLargestTiles = 1 << 2,  // some row tile is of the largest kind
};

/// A point in the list of work; ordered lexicographically.
struct alignas(16) Position {
  int32_t tile;
  int32_t head;     // KV head
  int32_t kv_tile;  // counted from RowTile::kv_begin
  int32_t flags;    // ScheduleFlag bits of the schedule: here they arrive with the first load of a CTA. 0 in pairs of
                    // the queue
};

ATTN_HD bool operator==(const Position& a, const Position& b) {
  return a.tile == b.tile && a.head == b.head && a.kv_tile == b.kv_tile;
}
ATTN_HD bool operator<(const Position& a, const Position& b) {
  if (a.tile != b.tile) return a.tile < b.tile;
  if (a.head != b.head) return a.head < b.head;
  return a.kv_tile < b.kv_tile;
}

/// For variants: a level's positions and requests of rows of Q whose requests its row groups do not know.
struct RowPositions {
  const int32_t* positions;  // [rows of Q]: among the tokens of their requests; nullptr: as the row groups say
  const int32_t* requests;   // [rows of Q]: their places in the batch; nullptr: as the row groups say
  int32_t num_rows;
};

/// The tokens that a variant's mask lets a row of a view see (attention/variant/row_ranges.h): no token outside [begin,
/// end), and all of [full_begin, full_end). Positions are token positions in their request.
struct alignas(16) RowRange {
  int32_t begin;
  int32_t end;
  int32_t full_begin;
  int32_t full_end;
};

/// Most KV tiles of a row tile that are listed: a list fills 4 KB.
constexpr int32_t kMaxListedKvTiles = 1023;

/// Where a KV tile begins.
struct KvTileStart {
  int32_t token;
  /// The variant lets each row of the row tile see all tokens of the KV tile that visibility lets it see.
  bool is_seen;
};

/// A KV tile in a KvTileList.
struct ListedKvTile {
  int32_t bits;  // of KvTileStart: the token, below 2^31, and is_seen after it

  ATTN_HD static ListedKvTile make(int32_t token, bool is_seen) {
    return ListedKvTile{token | (is_seen ? ~kMaxToken : 0)};
  }
  ATTN_HD int32_t token() const { return bits & kMaxToken; }
  ATTN_HD bool is_seen() const { return bits < 0; }

  static constexpr int32_t kMaxToken = 0x7fffffff;
};

/// The KV tiles of a row tile in which some row sees a token, in order; those between them are skipped. Made for the
/// row tiles of a view (attention/variant/row_ranges.h). Tokens are positions in the request.
struct KvTileList {
  int32_t count;  // -1: more than there is room for
  ListedKvTile kv_tiles[kMaxListedKvTiles];
};

/// Fields that the row groups of one level share.
struct Level {
  const int32_t* indices;  // nullptr: ragged (page j of a group is table_begin + j)
  const int32_t* rows;     // row list: row j of the level is row rows[j] of Q and O; nullptr: row j itself
  RowPositions positions;
  const RowRange* row_ranges;  // [its rows]; nullptr: not known; KvTileLists may follow, in the same memory
  int64_t num_entries;         // elements of `indices`
  int32_t entry_step;          // see PageTable
  Visibility visibility;
  int32_t group_begin;  // its first RowGroup
};

struct ScheduleHeader {
  int32_t num_groups;
  int32_t num_tiles;
  uint32_t errors;  // ScheduleError bits
  int32_t num_levels;
  int32_t num_merge_rows;               // Used rows of `links`. 0: no row is in several groups.
  int32_t num_links;                    // Links of a merge row.
  int32_t flags;                        // ScheduleFlag bits.
  int32_t whole_pairs;                  // 1: CTAs share no (row tile, head).
  int32_t num_requests;                 // Requests of the prefix forest. 0: no forest was sought.
  uint32_t queue_head;                  // Requests made to the work queue. 0 between launches.
  int32_t aligned_tile;                 // The first row tile that is cut evenly (align_prefix()). num_tiles: none is.
  int32_t aligned_cta;                  // The first CTA that runs evenly cut tiles.
  int32_t aligned_parts;                // CTAs for each pair of an evenly cut tile.
  uint32_t second_queue_head;           // The queue_head of CTAs that take second halves of row tiles.
  int32_t section_tokens;               // As in ScheduleConfig.
  int32_t dequantized_tokens;           // Used rows of DequantizedKv.
  int64_t share;                        // The cost that a CTA gets of the pairs before aligned_tile.
  int32_t kv_tile_cost[kNumCostKinds];  // as in ScheduleConfig
  int32_t pair_cost[kNumCostKinds];
  Level levels[kMaxLevels];
};

/// Where a row is found: a row group, and the row's number in it. group < 0: nowhere.
struct RowLink {
  int32_t group;
  int32_t index;
};

/// Why a node of the prefix forest is a row group, or is none.
enum NodeReason : int32_t {
  kNodeTaken = 0,
  kNodeSavesTooLittle = 1,
  kNodeHasNoRoom = 2,
  kNodeTooDeep = 3,
  kForestSavesTooLittle = 4
};

/// A node of the prefix forest (forest.h), for inspecting a plan. Node n, if there is one, is named after the
/// smallest request that joins the others at it.
struct PrefixNode {
  int32_t leader;      // smallest request of all that share its pages; -1: there is no node of this number
  int32_t parent;      // node; -1: none
  int32_t begin_page;  // pages that it would read as a row group: what no ancestor reads for it ...
  int32_t end_page;    // ... up to here
  int32_t num_requests;
  int32_t num_rows;
  int32_t group;   // its row group; -1: none
  int32_t reason;  // NodeReason
  int64_t saved;   // cost for each KV head
  int64_t added;
};

/// Where a request joins those before it (forest.h): the request with which it shares most leading pages, and how many.
struct Attachment {
  int32_t leader;  // -1: it shares nothing with any before it
  int32_t pages;
};

/// A message of the device planner (planner/device/prefix_search.cuh). The last slot holds the LaunchNumber instead.
struct alignas(16) AttachmentSlot {
  uint64_t tag;
  uint64_t attachment;
};

/// How a plan looks for shared prefixes.
enum CascadeMode : int32_t { kCascadeOff = 0, kCascadeByCost = 1, kCascadeAlways = 2 };

/// The schedule's inputs besides the batch: fixed when an Attention object is made.
struct ScheduleConfig {
  int32_t num_kv_heads;
  int32_t group_size;  // query heads of one KV head
  int32_t kv_tile;     // tokens of one KV tile
  int32_t max_kind;    // largest kind of row tile
  int32_t num_ctas;
  int32_t max_groups;  // row groups
  int32_t max_rows;    // rows of Q
  int32_t max_tiles;
  int32_t max_states;       // row states
  int32_t max_merge_rows;   // rows that are in several row groups
  int32_t max_links;        // row groups of one row
  int32_t max_nodes;        // requests in which plan looks for a prefix forest; 0: never
  int32_t cascade;          // CascadeMode
  int32_t batch_invariant;  // parts and their order depend only on the request
  int32_t min_queue_pairs;  // a work queue is used if a CTA's share holds at least this number of the longest pairs; 0:
                            // never (distribute_pairs() in work_list.h has further cases)
  int32_t section_tokens;   // of one KV head whose K and V fill a section of L2 (queued_pair())

  /// Rows of DequantizedKv. 0: the object has none.
  int32_t dequantized_tokens;
  /// A row group of fewer packed rows gets no place there.
  int32_t min_dequantized_rows;

  int32_t min_share;  // smallest cost that is worth a CTA; >= every weight, so that no part of a split tile is empty
  int32_t kv_tile_cost[kNumCostKinds];  // cost of one KV tile
  int32_t pair_cost[kNumCostKinds];     // cost of a (row tile, KV head) pair without its KV tiles: load Q, write O
  int32_t state_cost;                   // cost of a row state of one KV head, in 64ths
  int32_t cascade_cost;                 // what a forest must save over all KV heads before any of it is taken
};

/// Packed rows of a row group of `rows` rows. All rows of Q together have fewer than 2^31 (checked when an Attention
/// object is made).
ATTN_HD int32_t packed_rows_of(const ScheduleConfig& config, int32_t rows) { return rows * config.group_size; }

/// A request uses the smallest kind of row tile that holds all its packed rows, or the largest there is.
ATTN_HD int32_t choose_kind(const ScheduleConfig& config, int32_t packed_rows, int32_t smallest = 0) {
  int32_t kind = 0;  // without a branch: kinds that are too small
  for (int32_t k = 0; k < kNumTileKinds - 1; ++k) kind += tile_rows(k) < packed_rows;
  return max_of(min_of(kind, config.max_kind), smallest);
}

/// Row groups begin at multiples of this number of rows of DequantizedKv.
constexpr int32_t kDequantizedRows = 8;

/// Row tiles of a kind that hold this many packed rows.
ATTN_HD int32_t row_tiles_of(int32_t packed_rows, int32_t kind) {
  return row_tile_of(static_cast<uint32_t>(packed_rows) + tile_rows(kind) - 1, kind);
}

/// Upper bound of the number of row tiles: a row group has one tile, and one more for every full largest tile.
/// `group_rows`: rows of all groups together.
inline int64_t max_row_tiles(int32_t max_groups, int64_t group_rows, int32_t group_size, int32_t max_kind) {
  return max_groups + group_rows * group_size / tile_rows(max_kind);
}

/// Byte offsets of the schedule's arrays in its workspace.
struct ScheduleLayout {
  int64_t groups;
  int64_t tiles;
  int64_t positions;
  int64_t links;
  int64_t rows;
  int64_t row_requests;
  int64_t nodes;
  int64_t attachments;
  int64_t bytes;

  explicit ScheduleLayout(const ScheduleConfig& config) {
    groups = align(static_cast<int64_t>(sizeof(ScheduleHeader)));
    tiles = align(groups + static_cast<int64_t>(sizeof(RowGroup)) * config.max_groups);
    positions = align(tiles + static_cast<int64_t>(sizeof(RowTile)) * config.max_tiles);
    links = align(positions + static_cast<int64_t>(sizeof(Position)) * (config.num_ctas + 1));
    rows = align(links + static_cast<int64_t>(sizeof(RowLink)) * config.max_links * config.max_merge_rows);
    const int64_t rows_bytes = static_cast<int64_t>(sizeof(int32_t)) * (config.max_nodes > 0 ? config.max_states : 0);
    row_requests = align(rows + rows_bytes);
    nodes = align(row_requests + rows_bytes);
    attachments = align(nodes + static_cast<int64_t>(sizeof(PrefixNode)) * config.max_nodes);
    bytes = align(attachments + static_cast<int64_t>(sizeof(AttachmentSlot)) * (config.max_nodes + 1));
  }

 private:
  static int64_t align(int64_t offset) { return ceil_div(offset, int64_t{128}) * 128; }
};

/// The schedule in its workspace.
struct Schedule {
  ScheduleHeader* header;
  RowGroup* groups;             // [max_groups]
  RowTile* tiles;               // [max_tiles]
  Position* positions;          // [num_ctas + 1]
  RowLink* links;               // [num_links][max_merge_rows]
  int32_t* rows;                // [max_states]: row list of the forest's row groups
  int32_t* row_requests;        // [max_states]: the requests of these rows
  PrefixNode* nodes;            // [max_nodes]
  AttachmentSlot* attachments;  // [max_nodes + 1]: one for each request, and the LaunchNumber; may hold anything before
                                // the first launch

  Schedule() = default;
  Schedule(void* workspace, const ScheduleLayout& layout) {
    char* base = static_cast<char*>(workspace);
    header = reinterpret_cast<ScheduleHeader*>(base);
    groups = reinterpret_cast<RowGroup*>(base + layout.groups);
    tiles = reinterpret_cast<RowTile*>(base + layout.tiles);
    positions = reinterpret_cast<Position*>(base + layout.positions);
    links = reinterpret_cast<RowLink*>(base + layout.links);
    rows = reinterpret_cast<int32_t*>(base + layout.rows);
    row_requests = reinterpret_cast<int32_t*>(base + layout.row_requests);
    nodes = reinterpret_cast<PrefixNode*>(base + layout.nodes);
    attachments = reinterpret_cast<AttachmentSlot*>(base + layout.attachments);
  }
};

// ---- What runs work out: where KV tiles begin, the pairs of the work queue, and which CTAs share a pair ----

/// Where KV tile `number` of a row tile begins in row group `group`. `kv_begin`: the row tile's, or, to count from a
/// later KV tile, kv_begin_after(). kSkips: KV tiles may be listed.
template <bool kSkips>
ATTN_HD KvTileStart kv_tile_start(const Schedule& schedule, int32_t group, int32_t kv_begin, int32_t number,
                                  int32_t kv_tile) {
  if constexpr (kSkips) {
    if (kv_begin < 0) {
      const ListedKvTile* const memory = reinterpret_cast<const ListedKvTile*>(schedule.header->levels[0].row_ranges);
      const ListedKvTile listed = memory[~kv_begin + number];
      return KvTileStart{listed.token() - schedule.groups[group].kv_offset, listed.is_seen()};
    }
  }
  return KvTileStart{kv_begin + number * kv_tile, false};
}

/// What RowTile::kv_begin would be without the row tile's first `number` KV tiles.
template <bool kSkips>
ATTN_HD int32_t kv_begin_after(int32_t kv_begin, int32_t number, int32_t kv_tile) {
  if (kSkips && kv_begin < 0) return kv_begin - number;
  return kv_begin + number * kv_tile;
}

/// KV heads of a section of a row group: at most as many as have K and V that fit a part of L2, at least one. The last
/// section may have fewer.
ATTN_HD int32_t section_heads(int32_t section_tokens, int32_t kv_len, int32_t num_kv_heads) {
  const int32_t most = clamp(section_tokens / max_of(kv_len, 1), 1, num_kv_heads);
  return ceil_div(num_kv_heads, ceil_div(num_kv_heads, most));
}

/// Pair number `pair` of the work queue. Row groups follow one another, and so do the sections of a row group. Inside a
/// section, the row tile that sees most tokens comes first, with all heads of the section. CTAs that run at the same
/// time then read the K and V of few heads, which stay in L2 (ADR 48).
ATTN_HD Position queued_pair(const Schedule& schedule, const FastDivisor& group_size, int32_t num_kv_heads,
                             int32_t num_tiles, int32_t pair) {
  const int32_t tile = pair / num_kv_heads;
  const RowGroup& group = schedule.groups[schedule.tiles[tile].group];
  const int32_t num_rows = group.qo_len * group_size.divisor;
  const int32_t group_tiles = min_of(row_tiles_of(num_rows, group.kind), num_tiles - group.tile_begin);
  const int32_t heads = section_heads(schedule.header->section_tokens, group.kv_len, num_kv_heads);
  const int32_t number = pair - group.tile_begin * num_kv_heads;  // in the row group
  const int32_t section = number / (group_tiles * heads);
  const int32_t in_section = number - section * group_tiles * heads;
  const int32_t first_head = section * heads;
  const int32_t width = min_of(heads, num_kv_heads - first_head);  // the last section may have fewer heads
  const int32_t row_tile = in_section / width;
  return Position{group.tile_begin + group_tiles - 1 - row_tile, first_head + in_section - row_tile * width, 0, 0};
}

/// Partial states. A CTA writes at most two: one of the (row tile, head) inside which its interval starts, one of that
/// inside which it ends. If both are the same pair it writes the first only.
enum PartialSlot : int32_t { kStartsInside = 0, kEndsInside = 1, kSlotsPerCta = 2 };

ATTN_HD int32_t partial_slot(int32_t cta, PartialSlot slot) { return cta * kSlotsPerCta + slot; }

/// Most KV tiles of a pair that may be uncut (is_uncut()): keeps its arithmetic in 32 bits.
constexpr int32_t kMaxUncutKvTiles = 64;

/// Whether no interval starts inside a (row tile, KV head). A CTA that started there would pay the pair's own cost
/// again, which is no less than the KV tiles that it could leave to another. `share`: the cost that each CTA gets.
ATTN_HD bool is_uncut(int32_t pair_cost, int32_t kv_tile_cost, int32_t num_kv_tiles, int64_t share) {
  return num_kv_tiles <= kMaxUncutKvTiles && (num_kv_tiles - 1) * kv_tile_cost <= pair_cost &&
         pair_cost + num_kv_tiles * kv_tile_cost <= share;
}

/// CTAs [begin, end) whose intervals start inside a (row tile, head), after its first KV tile: the inverse of
/// find_position() (work_list.h).
struct CtaRange {
  int32_t begin;
  int32_t end;
};

ATTN_HD CtaRange ctas_inside(const Schedule& schedule, int32_t tile_number, int32_t state_begin, int32_t num_kv_heads,
                             int32_t head, int32_t num_ctas) {
  const ScheduleHeader& header = *schedule.header;
  if (tile_number >= header.aligned_tile) {
    const int32_t first =
        header.aligned_cta + ((tile_number - header.aligned_tile) * num_kv_heads + head) * header.aligned_parts;
    return CtaRange{first + 1, first + header.aligned_parts};
  }
  const RowTile& tile = schedule.tiles[tile_number];
  const int32_t cost = cost_kind(tile.kind, state_begin);
  const int32_t kv_tile_cost = header.kv_tile_cost[cost];
  if (header.whole_pairs || is_uncut(header.pair_cost[cost], kv_tile_cost, tile.num_kv_tiles, header.share))
    return CtaRange{0, 0};
  const int64_t head_cost = header.pair_cost[cost] + static_cast<int64_t>(tile.num_kv_tiles) * kv_tile_cost;
  const int64_t first = tile.cost_begin + head * head_cost + header.pair_cost[cost];
  // An interval starts inside if it starts after `first` and not after `last`.
  const int64_t last = first + (tile.num_kv_tiles - 1) * kv_tile_cost;
  return CtaRange{static_cast<int32_t>(min_of<int64_t>(divide(first, header.share) + 1, num_ctas)),
                  static_cast<int32_t>(min_of<int64_t>(divide(last, header.share) + 1, num_ctas))};
}

}  // namespace attn
