// The rows of a work item, its tokens, block by block, and where these lie in the cache.
#pragma once

#include "attention/cpu/kernels.h"
#include "attention/params.h"
#include "attention/tile/row_tile.h"
#include "common/math.h"
#include "planner/page_table.h"
#include "planner/schedule.h"

namespace attn::cpu {

/// The packed rows of an item's row tile.
struct ItemRows : RowTileRows<true> {
  const Level& level;
  int existing;  // of the first `count`; rows of Q beyond num_rows do not exist

  ATTN_HD ItemRows(const AttentionParams& params, const WorkItem& item)
      : RowTileRows(params.schedule, item.tile, params.group_size.divisor), level(level_of(params, item)) {
    const int64_t end = (int64_t{params.num_rows} - qo_begin) * params.group_size.divisor;  // of the group
    existing = list != nullptr ? count : static_cast<int>(clamp<int64_t>(end - packed_begin, 0, count));
  }

  ATTN_HD static const Level& level_of(const AttentionParams& params, const WorkItem& item) {
    return params.schedule.header->levels[params.schedule.groups[params.schedule.tiles[item.tile].group].level];
  }
};

/// Tokens [begin, end) of an item. No row of its row tile sees the tokens before `readable`, which need not be in the
/// cache.
struct TokenBlock : TokenRange {
  int32_t readable;
};

/// The tokens of an item that any of its rows may see, as far as plan knows, block by block. Blocks end at multiples of
/// kBlockTokens and begin at multiples of kColumnStep, so a row's sums do not depend on what other rows see.
template <class Engine, class Variant>
class TokenBlocks {
 public:
  TokenBlocks(const AttentionParams& params, const WorkItem& item)
      : params_(params), item_(item), rows_(params, item), kv_tile_(item.kv_tile_begin), run_{} {
    if (rows_.existing == 0) kv_tile_ = item.kv_tile_end;
  }

  /// The next block; empty after the last one.
  TokenBlock next() {
    while (run_.begin >= run_.end && kv_tile_ < item_.kv_tile_end) next_run();
    TokenBlock block = run_;
    block.end = min_of(run_.end, round_down(run_.begin, Engine::kBlockTokens) + Engine::kBlockTokens);
    run_.begin = block.end;
    return block;
  }

 private:
  /// Goes to the next run of KV tiles without holes between them.
  void next_run() {
    const RowTile& tile = params_.schedule.tiles[item_.tile];
    const int32_t begin = token_of(tile, kv_tile_);
    int64_t end = begin;
    do {
      end += params_.kv_tile;
      ++kv_tile_;
    } while (kv_tile_ < item_.kv_tile_end && token_of(tile, kv_tile_) == end);
    const TokenRange seen = seen_by_any_row(TokenRange{begin, static_cast<int32_t>(min_of<int64_t>(end, tile.kv_end))});
    run_ = TokenBlock{{max_of(begin, round_down(seen.begin, Engine::kColumnStep)), seen.end}, seen.begin};
    if (seen.begin >= seen.end) run_.begin = run_.end;
  }

  static int32_t round_down(int32_t token, int32_t step) { return token / step * step; }

  int32_t token_of(const RowTile& tile, int32_t kv_tile) const {
    return kv_tile_start<Variant::kSkipsTiles>(params_.schedule, tile.group, tile.kv_begin, kv_tile, params_.kv_tile)
        .token;
  }

  TokenRange seen_by_any_row(TokenRange tokens) const {
    const int32_t first = rows_.position(0, params_.group_size);
    const int32_t last = rows_.position(rows_.existing - 1, params_.group_size);
    return rows_.level.visibility.seen_by_any(first, last, tokens);
  }

  const AttentionParams& params_;
  const WorkItem& item_;
  const ItemRows rows_;
  int32_t kv_tile_;  // after `run_`
  TokenBlock run_;   // what is left of it
};

/// Where the tokens of a block lie. kKvBytes: of an element of the cache.
template <class Isa, int64_t kKvBytes>
struct CacheTokens {
  const CpuAttentionParams& params;
  HeadDims dims;
  const char* no_token;  // a row that stands in for a token without a page

  void prefetch(const TokenRows& tokens, int begin, int end) const {
    const auto prefetch_row = [](const char* row, int columns) {
      for (int byte = 0; byte < columns * static_cast<int>(kKvBytes); byte += 64) __builtin_prefetch(row + byte, 0, 2);
    };
    for (int i = begin; i < end; ++i) {
      prefetch_row(tokens.keys[i], dims.qk);
      prefetch_row(tokens.values[i], dims.v);
    }
  }

  /// Addresses of the keys and values of an item's tokens in `block`.
  void find(const WorkItem& item, TokenBlock block, TokenRows& rows) const {
    const int64_t table_begin = params.schedule.groups[params.schedule.tiles[item.tile].group].table_begin;
    const Level& level = ItemRows::level_of(params, item);
    const int64_t key_step = params.k.token_stride * kKvBytes;
    const int64_t value_step = params.v.token_stride * kKvBytes;
    const int32_t page_size = params.page_size.divisor;
    int i = 0;
    const int32_t readable = min_of(block.readable, block.end);
    for (; block.begin + i < readable; ++i) set_no_token(rows, i);
    for (int32_t token = block.begin + i; token < block.end;) {
      const int32_t page = params.page_size.divide(token);
      const int32_t in_page = token - page * page_size;
      const int32_t run = min_of(block.end - token, page_size - in_page);
      const int64_t id = find_page(level, table_begin, page);
      if (id >= 0) {
        const SlotPlace first{static_cast<int32_t>(id), in_page};
        const char* key = static_cast<const char*>(params.k.data) + params.k.element(first, item.head) * kKvBytes;
        const char* value = static_cast<const char*>(params.v.data) + params.v.element(first, item.head) * kKvBytes;
        for (int32_t j = 0; j < run; ++j) {
          rows.keys[i + j] = key + j * key_step;
          rows.values[i + j] = value + j * value_step;
        }
        for (int32_t j = 0; j < run && params.token_scales.k.exist(); ++j) {
          const SlotPlace place{first.page, in_page + j};
          rows.key_scales[i + j] = &params.token_scales.k.of(place, item.head);
          rows.value_scales[i + j] = &params.token_scales.v.of(place, item.head);
        }
      } else {
        for (int32_t j = i; j < i + run; ++j) set_no_token(rows, j);
      }
      i += run;
      token += run;
    }
    rows.count = i;
  }

 private:
  void set_no_token(TokenRows& rows, int32_t i) const {
    rows.keys[i] = rows.values[i] = no_token;
    rows.key_scales[i] = rows.value_scales[i] = reinterpret_cast<const float*>(no_token);
  }

  /// Page number `page` of a request, inside the cache whatever the table says; -1 if there is no page at all.
  int64_t find_page(const Level& level, int64_t table_begin, int32_t page) const {
    int64_t id = table_begin + page;
    if (level.indices != nullptr) {
      const int64_t entry = table_begin + int64_t{page} * level.entry_step;
      id = level.num_entries > 0
               ? page_of_slot(level.indices[clamp<int64_t>(entry, 0, level.num_entries - 1)], level.entry_step)
               : -1;
    }
    if (id >= 0 && id < params.num_pages) return id;
    __atomic_fetch_or(&params.schedule.header->errors, static_cast<uint32_t>(kPageIndexInvalid), __ATOMIC_RELAXED);
    return params.num_pages > 0 ? clamp<int64_t>(id, 0, params.num_pages - 1) : -1;
  }
};

}  // namespace attn::cpu
