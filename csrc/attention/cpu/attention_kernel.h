// One work item of the schedule: a row tile's rows x a run of KV tiles of one KV head; and the merge of split pairs.
//
// Tokens are processed in blocks. A block's keys and values are packed for the engine once; then scores, online softmax
// and output are computed panel by panel, a few rows at a time. Scores are kept in powers of 2. An engine
// (float32_engine.h, amx_engine.h) owns the layouts and the two matrix products.
#pragma once

#include <cmath>

#include "attention/cpu/cache_rows.h"
#include "attention/cpu/kernels.h"
#include "attention/cpu/row_states.h"
#include "attention/kv_tokens.h"
#include "attention/params.h"
#include "attention/score_row.h"
#include "attention/variants.h"
#include "common/math.h"
#include "planner/page_table.h"
#include "planner/schedule.h"

namespace attn::cpu {

/// Variant_: WithScales if the cache is of 8 bits. Its rows are then widened before they are packed.
template <class Engine, class Variant_>
class AttentionKernel : public RowStates<Engine, Variant_> {
  using Variant = Variant_;
  using States = RowStates<Engine, Variant>;
  using States::count_rows;
  using States::end_row;
  using States::find_row;
  using States::level_of;
  using States::row_out;
  using States::store_output;
  using States::transform_output;
  using typename States::RowEnd;
  using typename States::RowOut;
  using typename States::RowPlace;
  using Isa = typename Engine::Isa;
  using Float = typename Isa::Float;
  using Element = typename Engine::Element;
  using Rows = CacheRows<Isa, Element>;
  using TransformedRows = typename Rows::TransformedRows;

  // A row's reference maximum is raised only when exponentials would exceed 2^kMaxGrowth, so that outputs are rarely
  // rescaled.
  static constexpr float kMaxGrowth = 8.0f;

 public:
  static void run(const CpuAttentionParams& params, HeadDims dims, const WorkItem& item, const WorkItem* next,
                  Scratch& scratch) {
    if (count_rows(params, item) == 0) return;
    AttentionKernel kernel(params, dims, item, scratch);
    kernel.compute(next);
  }

  /// Finds the ranges of all rows of a level, and lists KV tiles if the variant skips some.
  static void find_row_ranges(const RowRangeParams& params) {
    using Variant = typename WithoutScales<Variant_>::Variant;
    if constexpr (VariantHooks<Variant>::kMask) {
      const int32_t num_rows = rows_of_level(params.plan.levels[params.level]);
      for (int32_t i = 0; i < num_rows; ++i) {
        const RangedRow row(params.plan, params.level, i);
        const RangeSum sum = sum_tokens<Variant>(params, row, 0, 1);
        params.row_ranges[i] = make_row_range(row, sum, find_holes<Variant>(params, row, sum, 0, 1));
      }
      if constexpr (Variant::kSkipsTiles) {
        for (int32_t i = 0; i < params.num_kv_tile_lists; ++i) list_kv_tiles<Variant>(params, i);
      }
    }
  }

 private:
  /// Lists the KV tiles that one row tile of a level needs.
  template <class Variant>
  static void list_kv_tiles(const RowRangeParams& params, int32_t number) {
    const TileOfLevel of_level(params.plan, params.level, number);
    if (!of_level.exists()) return;
    KvTileList& list = params.kv_tile_lists[number];
    int32_t count = 0;
    for (int32_t kv_tile = 0; kv_tile < of_level.tile.num_kv_tiles; ++kv_tile) {
      const TokenRange tokens = of_level.tokens(params.plan, kv_tile);
      SeenOrHidden answer{false, false};
      for (int32_t row = of_level.first_row; row < of_level.end_row && !answer.both(); ++row) {
        const SeenOrHidden of_row = ask_row<Variant>(params, of_level, row, tokens, 0, 1);
        answer.some_seen |= of_row.some_seen;
        answer.some_hidden |= of_row.some_hidden;
      }
      if (!answer.some_seen) continue;
      if (count < kMostListedKvTiles) list.kv_tiles[count] = listed(params.plan, of_level, kv_tile, answer);
      ++count;
    }
    list.count = listed_count(count);
  }

  AttentionKernel(const CpuAttentionParams& params, HeadDims dims, const WorkItem& item, Scratch& scratch)
      : params_(params),
        item_(item),
        s_(scratch),
        tile_(params.schedule.tiles[item.tile]),
        group_(params.schedule.groups[tile_.group]),
        visibility_(level_of(params, item).visibility),
        variant_(params.variant.as<typename Variant::Params>(), item.head),
        dims_(dims),
        rows_(count_rows(params, item)),
        engine_(scratch, dims, rows_) {}

  /// The tokens of an item that any of its rows may see, as far as plan knows, block by block.
  class Blocks {
   public:
    Blocks(const AttentionParams& params, const WorkItem& item)
        : params_(params), item_(item), kv_tile_(item.kv_tile_begin), run_{0, 0} {
      if (count_rows(params, item) == 0) kv_tile_ = item.kv_tile_end;
    }

    /// The next block; empty after the last one.
    TokenRange next() {
      while (run_.begin >= run_.end && kv_tile_ < item_.kv_tile_end) next_run();
      const TokenRange block{run_.begin, min_of(run_.end, run_.begin + Engine::kBlockTokens)};
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
      run_ = seen_by_any_row(TokenRange{begin, static_cast<int32_t>(min_of<int64_t>(end, tile.kv_end))});
    }

    int32_t token_of(const RowTile& tile, int32_t kv_tile) const {
      return kv_tile_start<Variant::kSkipsTiles>(params_.schedule, tile.group, tile.kv_begin, kv_tile, params_.kv_tile)
          .token;
    }

    TokenRange seen_by_any_row(TokenRange tokens) const {
      const RowTile& tile = params_.schedule.tiles[item_.tile];
      const RowGroup& group = params_.schedule.groups[tile.group];
      const int32_t last_row = tile.packed_begin + count_rows(params_, item_) - 1;
      const int32_t first = group.kv_len - group.qo_len + params_.group_size.divide(tile.packed_begin);
      const int32_t last = group.kv_len - group.qo_len + params_.group_size.divide(last_row);
      return level_of(params_, item_).visibility.seen_by_any(first, last, tokens);
    }

    const AttentionParams& params_;
    const WorkItem& item_;
    int32_t kv_tile_;  // after `run_`
    TokenRange run_;   // what is left of it
  };

  /// Position of a row's query.
  int32_t position(int row) const {
    return group_.kv_len - group_.qo_len + params_.group_size.divide(tile_.packed_begin + row);
  }

  void compute(const WorkItem* next_item) {
    load_queries();
    __builtin_memset(s_.o, 0,
                     sizeof(float) * static_cast<unsigned>(ceil_div(rows_, Engine::kPanelRows) * Engine::kPanelRows *
                                                           engine_.o_stride()));
    for (int r = 0; r < rows_; ++r) {
      s_.row_max[r] = Variant::kUsesSoftmax ? -INFINITY : 0.0f;
      s_.row_sum[r] = 0.0f;
    }

    Blocks blocks(params_, item_);
    TokenRange block = blocks.next();
    TokenRows* rows = &s_.tokens[0];
    TokenRows* next_rows = &s_.tokens[1];
    find_tokens(item_, block, *rows);
    prefetch(*rows, 0, rows->count);
    while (block.begin < block.end) {
      const TokenRange next_block = blocks.next();
      const bool last = next_block.begin >= next_block.end;
      if (!last)
        find_tokens(item_, next_block, *next_rows);
      else if (next_item != nullptr)
        find_tokens(*next_item, Blocks(params_, *next_item).next(), *next_rows);
      else
        next_rows->count = 0;
      process_block(block, *rows, *next_rows);
      block = next_block;
      TokenRows* const done = rows;
      rows = next_rows;
      next_rows = done;
    }

    for (int r = 0; r < rows_; ++r) write_row(r);
  }

  void load_queries() {
    for (int r = 0; r < rows_; ++r) {
      RowPlace place = find_row(params_, item_, r);
      if (!place.exists) place.row = 0;  // the row list is wrong: the result is not used
      Element made[kMaxHeadDim];
      const Element* q = row_of_q(place, made);
      if constexpr (VariantHooks<Variant>::kQuery) {
        if (place.exists) {
          Element transformed[kMaxHeadDim];
          const ScoreRow row = score_row(r);
          Rows::transform_row(
              q, dims_.qk, Variant::kQueryPairs, query_scale(), transformed,
              [&](const Pair& x, int32_t first, int32_t second) { return variant_.query(x, first, second, row); });
          engine_.load_query(r, transformed);
          continue;
        }
      }
      engine_.load_query(r, q);
    }
  }

  /// A row of Q. It is put together in `made` if it has two parts or another type.
  const Element* row_of_q(const RowPlace& place, Element* made) const {
    const QueryPart q{params_.q, params_.q_row_stride, params_.q_head_stride};
    const QueryPart& rope = params_.q_rope;
    if (rope.data == nullptr) return part_of_q(q, place, dims_.qk, made);
    const Element* const latent = part_of_q(q, place, dims_.v, made);
    if (latent != made) __builtin_memcpy(made, latent, sizeof(Element) * static_cast<unsigned>(dims_.v));
    Element* const after_latent = made + dims_.v;
    const int columns = dims_.qk - dims_.v;
    const Element* const rotated = part_of_q(rope, place, columns, after_latent);
    if (rotated != after_latent)
      __builtin_memcpy(after_latent, rotated, sizeof(Element) * static_cast<unsigned>(columns));
    return made;
  }

  /// Columns of a row of Q, converted in `made` if they have another type.
  const Element* part_of_q(const QueryPart& part, const RowPlace& place, int columns, Element* made) const {
    const int64_t element = place.row * part.row_stride + place.head * part.head_stride;
    if constexpr (kWidens) {
      if (has_8_bits(variant_.scales.q_element)) {
        const uint8_t* const bytes = static_cast<const uint8_t*>(part.data) + element;
        if (variant_.scales.q_element == DataType::kFloat8E4M3)
          Rows::widen_row(reinterpret_cast<const Float8E4M3*>(bytes), columns, made);
        else
          Rows::widen_row(reinterpret_cast<const Float8E5M2*>(bytes), columns, made);
        return made;
      }
    }
    if (params_.is_mixed) {
      Rows::convert_row(static_cast<const typename OtherElementOf<Element>::Type*>(part.data) + element, columns, made);
      return made;
    }
    return static_cast<const Element*>(part.data) + element;
  }

  /// Transforms rows [begin, end) of the block, some of which may not exist. `token`: the block's first; `rows`: their
  /// addresses, which become those of the results, and may be those already; `scale`: of 8-bit numbers.
  template <class Change>
  void transform_tokens(const char** rows, int columns, const TokenRange& part, int32_t token, const PairLayout& pairs,
                        float scale, TransformedRows& transformed, const Change& change) const {
    const KvTokens tokens(group_, item_.head);
    for (int i = part.begin; i < part.end; ++i) {
      Element* to = transformed.rows[i - part.begin];
      const KvToken at = tokens.at(token + i);
      Rows::transform_row(reinterpret_cast<const Element*>(rows[i]), columns, pairs, scale, to,
                          [&](const Pair& x, int32_t first, int32_t second) { return change(x, first, second, at); });
      rows[i] = reinterpret_cast<const char*>(to);
    }
  }

  /// Transforms the keys and values of tokens [begin, end) of the block.
  void transform_cache(TokenRows& tokens, const TokenRange& part, int32_t token, TransformedRows& keys,
                       TransformedRows& values) const {
    if constexpr (VariantHooks<Variant>::kKey) {
      transform_tokens(tokens.keys, dims_.qk, part, token, Variant::kKeyPairs, key_scale(group_.request), keys,
                       [&](const Pair& x, int32_t first, int32_t second, const KvToken& at) {
                         return variant_.key(x, first, second, at);
                       });
    }
    if constexpr (VariantHooks<Variant>::kValue) {
      transform_tokens(tokens.values, dims_.v, part, token, Variant::kValuePairs, value_scale(group_.request), values,
                       [&](const Pair& x, int32_t first, int32_t second, const KvToken& at) {
                         return variant_.value(x, first, second, at);
                       });
    }
  }

  static constexpr bool kWidens = Variant::kHasScales;

  /// Bytes of an element of the cache.
  static constexpr int64_t kKvBytes = kWidens ? 1 : static_cast<int64_t>(sizeof(Element));

  /// Widens the keys and values of tokens [begin, end) of the block.
  void widen_cache(TokenRows& tokens, const TokenRange& part, TransformedRows& keys, TransformedRows& values) const {
    if constexpr (kWidens) {
      if (variant_.scales.element == DataType::kScaledLatent) {
        Rows::widen_latents(tokens.keys, dims_.qk, part, keys);
        Rows::widen_latents(tokens.values, dims_.v, part, values);
      } else if (variant_.scales.element == DataType::kFloat8E4M3) {
        Rows::template widen_rows<Float8E4M3>(tokens.keys, dims_.qk, part, keys);
        Rows::template widen_rows<Float8E4M3>(tokens.values, dims_.v, part, values);
      } else {
        Rows::template widen_rows<Float8E5M2>(tokens.keys, dims_.qk, part, keys);
        Rows::template widen_rows<Float8E5M2>(tokens.values, dims_.v, part, values);
      }
    }
  }

  // Scales of Q and of the cache; 1 where there are none.
  float query_scale() const {
    if constexpr (kWidens) return variant_.scales.q.of(0, item_.head);
    return 1.0f;
  }
  float key_scale(int32_t request) const {
    if constexpr (kWidens) return variant_.scales.k.of(request, item_.head);
    return 1.0f;
  }
  float value_scale(int32_t request) const {
    if constexpr (kWidens) return variant_.scales.v.of(request, item_.head);
    return 1.0f;
  }

  /// sm_scale, and the scales of Q and of K of a row of the tile; without those of rows that a variant has transformed,
  /// which are multiplied by them.
  float score_scale(int row) const {
    float scale = params_.sm_scale;
    if constexpr (kWidens && !VariantHooks<Variant>::kQuery) scale *= query_scale();
    if constexpr (kWidens && !VariantHooks<Variant>::kKey) scale *= key_scale(scale_request(variant_.scales.k, row));
    return scale;
  }

  /// What a row of outputs is multiplied by: `factor`, and V's scale, if no variant has transformed V.
  float output_scale(float factor, int row) const {
    if constexpr (kWidens && !VariantHooks<Variant>::kValue)
      factor *= value_scale(scale_request(variant_.scales.v, row));
    return factor;
  }

  int32_t scale_request(const KvScale& scale, int row) const {
    return scale.is_of_requests() ? score_row(row).request : 0;
  }

  void process_block(TokenRange block, TokenRows& tokens, const TokenRows& next) {
    const int padded = ceil_div(tokens.count, Engine::kColumnStep) * Engine::kColumnStep;
    for (int i = tokens.count; i < padded; ++i)
      tokens.keys[i] = tokens.values[i] = reinterpret_cast<const char*>(s_.no_token);
    constexpr bool kTransforms = VariantHooks<Variant>::kKey || VariantHooks<Variant>::kValue;
    for (int begin = 0; begin < padded; begin += Rows::kPackTokens) {
      const int end = min_of(begin + Rows::kPackTokens, padded);
      prefetch(next, begin, end == padded ? next.count : min_of(end, next.count));
      TransformedRows keys, values;
      widen_cache(tokens, TokenRange{begin, min_of(end, tokens.count)}, keys, values);
      if constexpr (kTransforms)
        transform_cache(tokens, TokenRange{begin, min_of(end, tokens.count)}, block.begin, keys, values);
      engine_.pack_keys(tokens, begin, end);
      engine_.pack_values(tokens, begin, end);
    }

    // Panels go through three steps. At any time each step works on another panel, so that none waits for what was
    // written just before.
    Panel scored{}, weighted{};
    int buffer = 0;
    for (int row = 0; row < rows_ || scored.rows > 0 || weighted.rows > 0;) {
      Panel panel{};
      for (; row < rows_ && panel.rows == 0; row += Engine::kPanelRows) panel = make_panel(row, block);
      if (panel.rows > 0) engine_.multiply_keys(buffer, panel.row, panel.rows, panel.begin, panel.end);
      if (weighted.rows > 0) engine_.multiply_values(buffer, weighted.row, weighted.rows, weighted.begin, weighted.end);
      if (scored.rows > 0) softmax(1 - buffer, scored, block);
      weighted = scored;
      scored = panel;
      buffer = 1 - buffer;
    }
  }

  /// Rows [row, row + rows) and tokens [begin, end) of the block.
  struct Panel {
    int row, rows, begin, end;
  };

  /// The panel from `row` on; without rows if they see nothing of the block.
  Panel make_panel(int row, TokenRange block) const {
    const int rows = min_of(Engine::kPanelRows, rows_ - row);
    const TokenRange seen = visibility_.seen_by_any(position(row), position(row + rows - 1), block);
    if (seen.begin >= seen.end) return Panel{};
    const int begin = round_down(seen.begin - block.begin, Engine::kColumnStep);
    const int end = ceil_div(seen.end - block.begin, Engine::kColumnStep) * Engine::kColumnStep;
    return Panel{row, rows, begin, end};
  }

  void prefetch(const TokenRows& tokens, int begin, int end) const {
    const auto prefetch_row = [](const char* row, int columns) {
      for (int byte = 0; byte < columns * static_cast<int>(kKvBytes); byte += 64) __builtin_prefetch(row + byte, 0, 2);
    };
    for (int i = begin; i < end; ++i) {
      prefetch_row(tokens.keys[i], dims_.qk);
      prefetch_row(tokens.values[i], dims_.v);
    }
  }

  /// Addresses of the keys and values of an item's tokens in `block`.
  void find_tokens(const WorkItem& item, TokenRange block, TokenRows& rows) const {
    const int64_t table_begin = params_.schedule.groups[params_.schedule.tiles[item.tile].group].table_begin;
    const Level& level = level_of(params_, item);
    const int64_t key_step = params_.k.token_stride * kKvBytes;
    const int64_t value_step = params_.v.token_stride * kKvBytes;
    const int32_t page_size = params_.page_size.divisor;
    int i = 0;
    for (int32_t token = block.begin; token < block.end;) {
      const int32_t page = params_.page_size.divide(token);
      const int32_t in_page = token - page * page_size;
      const int32_t run = min_of(block.end - token, page_size - in_page);
      const int64_t id = find_page(level, table_begin, page);
      if (id >= 0) {
        const char* key = locate_token(params_.k, id, in_page, item.head);
        const char* value = locate_token(params_.v, id, in_page, item.head);
        for (int32_t j = 0; j < run; ++j) {
          rows.keys[i + j] = key + j * key_step;
          rows.values[i + j] = value + j * value_step;
        }
      } else {
        for (int32_t j = 0; j < run; ++j)
          rows.keys[i + j] = rows.values[i + j] = reinterpret_cast<const char*>(s_.no_token);
      }
      i += run;
      token += run;
    }
    rows.count = i;
  }

  static const char* locate_token(const KvTensor& tensor, int64_t page, int32_t in_page, int32_t head) {
    const int64_t element = page * tensor.page_stride + in_page * tensor.token_stride + head * tensor.head_stride;
    return static_cast<const char*>(tensor.data) + element * kKvBytes;
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
    if (id >= 0 && id < params_.num_pages) return id;
    __atomic_fetch_or(&params_.schedule.header->errors, static_cast<uint32_t>(kPageIndexInvalid), __ATOMIC_RELAXED);
    return params_.num_pages > 0 ? clamp<int64_t>(id, 0, params_.num_pages - 1) : -1;
  }

  /// Turns a panel's scores into exponentials; updates the rows' maxima, sums and outputs.
  void softmax(int buffer, const Panel& panel, TokenRange block) {
    const int row = panel.row, begin = panel.begin, end = panel.end;
    const TokenRange columns{block.begin + begin, block.begin + end};
    const TokenRange existing{columns.begin, min_of(columns.end, block.end)};
    const TokenRange certain = visibility_.seen_by_all(position(row), position(row + panel.rows - 1), existing);
    const bool all_seen = certain.begin <= columns.begin && certain.end >= columns.end;
    // The factor to powers of 2 is applied while reading a score, unless the variant needs the logit itself, or the
    // factor would corrupt -inf.
    const bool finish = transforms_logits(variant_) || !(params_.sm_scale > 0.0f);
    for (int r = 0; r < panel.rows; ++r) {
      const Float scale = Isa::splat(finish ? 1.0f : score_scale(row + r) * kLog2E);
      float* scores = s_.scores[buffer] + r * Engine::kBlockTokens;
      if (finish) finish_scores(scores, row + r, begin, end, block.begin);
      if (!all_seen) mask_scores(scores, position(row + r), begin, end, existing, block.begin);
      if constexpr (VariantHooks<Variant>::kMask) apply_variant_mask(scores, row + r, begin, end, block.begin);
      if constexpr (!Variant::kUsesSoftmax) {
        for (int t = begin; t < end; t += Isa::kWidth) {
          for (int i = t; i < t + Isa::kWidth; ++i) scores[i] = scores[i] == -INFINITY ? 0.0f : scores[i];
          engine_.store_probabilities(buffer, r, t, Isa::load(scores + t));
        }
        continue;
      }

      Float largest = Isa::mul(Isa::load(scores + begin), scale);
      for (int t = begin + Isa::kWidth; t < end; t += Isa::kWidth)
        largest = Isa::max(largest, Isa::mul(Isa::load(scores + t), scale));
      const float block_max = Isa::reduce_max(largest);
      float& row_max = s_.row_max[row + r];
      if (block_max > row_max + kMaxGrowth || row_max == -INFINITY) {
        if (row_max != -INFINITY) rescale(row + r, exp2f(row_max - block_max));
        row_max = block_max;
      }

      const Float shift =
          Isa::splat(row_max == -INFINITY ? 0.0f : -row_max);  // a row that has seen nothing: every exponential is 0
      Float sum = Isa::zero();
      for (int t = begin; t < end; t += Isa::kWidth) {
        const Float p = Engine::exp2(Isa::fma(Isa::load(scores + t), scale, shift));
        sum = Isa::add(sum, p);
        engine_.store_probabilities(buffer, r, t, p);
      }
      s_.row_sum[row + r] += Isa::reduce_add(sum);
    }
  }

  /// A row of the tile, as variants see it.
  ScoreRow score_row(int row) const {
    const RowPlace place = find_row(params_, item_, row);
    return attn::score_row(params_.schedule, tile_.group, place.index, static_cast<int32_t>(place.row),
                           static_cast<int32_t>(place.head));
  }

  /// Turns scores into final logits, in powers of 2.
  void finish_scores(float* scores, int row, int begin, int end, int32_t block_begin) const {
    // Copies that the scores cannot overlap: the compiler vectorises the loops.
    const Variant variant = variant_;
    const float scale = score_scale(row);
    const int32_t first = group_.kv_offset + block_begin;
    const float to_powers = Variant::kUsesSoftmax ? kLog2E : 1.0f;
    if (transforms_logits(variant)) {
      const ScoreRow of_row = score_row(row);
      for (int t = begin; t < end; ++t) {
        scores[t] *= scale;
        if constexpr (VariantHooks<Variant>::kLogits) scores[t] = variant.logits(scores[t], of_row, first + t);
        scores[t] *= to_powers;
      }
    } else {
      for (int t = begin; t < end; ++t) scores[t] *= scale * kLog2E;
    }
  }

  /// Hides what the variant does not let a row see.
  void apply_variant_mask(float* scores, int row, int begin, int end, int32_t block_begin) const {
    const ScoreRow of_row = score_row(row);
    const int32_t first = group_.kv_offset + block_begin;
    if (level_of(params_, item_).row_ranges != nullptr) {
      const RowRange& range =
          level_of(params_, item_).row_ranges[group_.qo_begin + params_.group_size.divide(tile_.packed_begin + row)];
      if (range.full_begin <= first + begin && first + end <= range.full_end) return;
    }
    for (int t = begin; t < end; ++t) {
      if (!variant_.mask(of_row, first + t)) scores[t] = -INFINITY;
    }
  }

  /// Sets scores to -inf where the query at `position` does not see the token, or there is none.
  void mask_scores(float* scores, int32_t position, int begin, int end, TokenRange tokens, int32_t block_begin) const {
    const TokenRange seen = visibility_.seen_by_any(position, position, tokens);
    const TokenRange certain = visibility_.seen_by_all(position, position, seen);
    const int seen_begin = clamp(seen.begin - block_begin, begin, end);
    const int seen_end = clamp(seen.end - block_begin, seen_begin, end);
    for (int t = begin; t < seen_begin; ++t) scores[t] = -INFINITY;
    for (int t = seen_end; t < end; ++t) scores[t] = -INFINITY;
    if (certain.begin <= seen.begin && certain.end >= seen.end) return;
    for (int t = seen_begin; t < seen_end; ++t) {
      if (!visibility_.sees(position, block_begin + t)) scores[t] = -INFINITY;
    }
  }

  void rescale(int row, float factor) {
    s_.row_sum[row] *= factor;
    float* o = s_.o + row * engine_.o_stride();
    for (int i = 0; i < engine_.o_stride(); i += Isa::kWidth)
      Isa::store(o + i, Isa::mul(Isa::load(o + i), Isa::splat(factor)));
  }

  void write_row(int row) {
    const RowPlace place = find_row(params_, item_, row);
    if (!place.exists) return;
    const bool is_complete = item_.partial == kWhole;
    const RowEnd end = end_row(params_, s_.row_max[row] * kLn2, s_.row_sum[row], place.head, is_complete);
    const Float scale = Isa::splat(output_scale(end.factor, row));
    if (is_complete) {
      const RowOut out = row_out(params_, place);
      if (VariantHooks<Variant>::kOutput || params_.has_out_scale() || params_.is_mixed) {
        float finished[kMaxHeadDim];
        for (int i = 0; i < dims_.v; i += Isa::kWidth)
          Isa::store(finished + i, Isa::mul(engine_.output(row, i), scale));
        transform_output(params_, finished, dims_.v, tile_.group, place);
        store_output(params_, finished, dims_.v, out);
      } else {
        for (int i = 0; i < dims_.v; i += Isa::kWidth)
          Isa::store_elements(out.o + i, Isa::mul(engine_.output(row, i), scale), dims_.v - i);
      }
      if (out.lse != nullptr) *out.lse = end.lse * params_.lse_unit;
    } else {
      const int64_t state =
          item_.partial == kRowStates
              ? row_state_index(params_, group_.state_begin + params_.group_size.divide(tile_.packed_begin + row),
                                static_cast<int32_t>(place.head))
              : int64_t{item_.partial} * params_.max_tile_rows + row;
      float* o = params_.partial_o + state * dims_.v;
      for (int i = 0; i < dims_.v; i += Isa::kWidth)
        Isa::store_elements(o + i, Isa::mul(engine_.output(row, i), scale), dims_.v - i);
      params_.partial_lse[state] = end.lse;
    }
  }

  const CpuAttentionParams& params_;
  const WorkItem& item_;
  Scratch& s_;
  const RowTile& tile_;
  const RowGroup& group_;
  const Visibility visibility_;
  const Variant variant_;
  const HeadDims dims_;
  const int rows_;
  Engine engine_;
};

}  // namespace attn::cpu
