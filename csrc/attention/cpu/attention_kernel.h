// One work item of the schedule: a row tile's rows x a run of KV tiles of one KV head.
//
// Tokens are processed in blocks. A block's keys and values are packed for the engine once; then scores, online softmax
// and output are computed panel by panel, a few rows at a time. Scores are kept in powers of 2. An engine
// (float32_engine.h, amx_engine.h) owns the layouts and the two matrix products.
#pragma once

#include <cmath>

#include "attention/cpu/input_rows.h"
#include "attention/cpu/kernels.h"
#include "attention/cpu/row_states.h"
#include "attention/cpu/work_item.h"
#include "attention/params.h"
#include "attention/variant/coordinates.h"
#include "attention/variant/variants.h"
#include "common/math.h"
#include "common/rotation.h"
#include "planner/schedule.h"

namespace attn::cpu {

/// Variant_: WithScales if the cache is of 8 bits. Its rows are then widened before they are packed.
template <class Engine, class Variant_>
class AttentionKernel : public RowStates<Engine, Variant_> {
  using Variant = Variant_;
  using States = RowStates<Engine, Variant>;
  using States::end_row;
  using States::write_complete_row;
  using typename States::RowEnd;
  using Isa = typename Engine::Isa;
  using Float = typename Isa::Float;
  using Element = typename Engine::Element;
  using Rows = CacheRows<Isa, Element>;
  using Blocks = TokenBlocks<Engine, Variant>;
  using TransformedRows = typename Rows::TransformedRows;

  static constexpr bool kWidens = Variant::kHasScales;
  using Cache = CacheTokens<Isa, kWidens ? 1 : static_cast<int64_t>(sizeof(Element))>;

  // A row's reference maximum is raised only when exponentials would exceed 2^kMaxGrowth, so that outputs are rarely
  // rescaled.
  static constexpr float kMaxGrowth = 8.0f;

 public:
  static void run(const CpuAttentionParams& params, HeadDims dims, const WorkItem& item, const WorkItem* next,
                  Scratch& scratch) {
    if (ItemRows(params, item).existing == 0) return;
    AttentionKernel kernel(params, dims, item, scratch);
    kernel.compute(next);
  }

  /// `find_row_ranges`: of a variant with a mask.
  static constexpr Kernels kernels(FindRowRanges find_row_ranges = nullptr) {
    return Kernels{run, States::merge_pair, States::merge_row, find_row_ranges};
  }

 private:
  AttentionKernel(const CpuAttentionParams& params, HeadDims dims, const WorkItem& item, Scratch& scratch)
      : params_(params),
        item_(item),
        s_(scratch),
        tile_(params.schedule.tiles[item.tile]),
        group_(params.schedule.groups[tile_.group]),
        item_rows_(params, item),
        visibility_(item_rows_.level.visibility),
        variant_(params.variant.as<typename Variant::Params>(), item.head),
        dims_(dims),
        rows_(item_rows_.existing),
        cache_{params, dims, reinterpret_cast<const char*>(scratch.no_token)},
        engine_(scratch, dims, rows_) {}

  int32_t position(int row) const { return item_rows_.position(row, params_.group_size); }
  PackedRow packed_row(int row) const { return PackedRow(params_, item_rows_, item_.head, row); }

  void compute(const WorkItem* next_item) {
    load_queries();
    __builtin_memset(s_.o, 0,
                     sizeof(float) * static_cast<unsigned>(round_up(rows_, Engine::kPanelRows) * engine_.o_stride()));
    for (int r = 0; r < rows_; ++r) {
      s_.row_max[r] = Variant::kUsesSoftmax ? -INFINITY : 0.0f;
      s_.row_sum[r] = 0.0f;
    }

    Blocks blocks(params_, item_);
    TokenBlock block = blocks.next();
    TokenRows* rows = &s_.tokens[0];
    TokenRows* next_rows = &s_.tokens[1];
    cache_.find(item_, block, *rows);
    cache_.prefetch(*rows, 0, rows->count);
    while (block.begin < block.end) {
      const TokenBlock next_block = blocks.next();
      const bool last = next_block.begin >= next_block.end;
      if (!last)
        cache_.find(item_, next_block, *next_rows);
      else if (next_item != nullptr)
        cache_.find(*next_item, Blocks(params_, *next_item).next(), *next_rows);
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
    const QueryRows<Isa, Element, Variant> query_rows{params_, dims_, variant_};
    for (int r = 0; r < rows_; ++r) {
      PackedRow place = packed_row(r);
      if (!place.exists) place.row = 0;  // the row list is wrong: the result is not used
      Element made[kMaxHeadDim];
      const Element* q = query_rows.row(place, made);
      if (params_.rotates) {
        Rows::rotate_query(q, dims_.qk, made);
        q = made;
      }
      if constexpr (VariantHooks<Variant>::kQuery) {
        if (place.exists) {
          Element transformed[kMaxHeadDim];
          const ScoreRow row = score_row(r);
          Rows::transform_row(
              q, dims_.qk, Variant::kQueryPairs, scale_of(&AttentionScales::q, 0), transformed,
              [&](const Pair& x, int32_t first, int32_t second) { return variant_.query(x, first, second, row); });
          engine_.load_query(r, transformed);
          continue;
        }
      }
      engine_.load_query(r, q);
    }
  }

  /// Transforms the keys and values of tokens [begin, end) of the block.
  void transform_cache(TokenRows& tokens, const TokenRange& part, int32_t token, TransformedRows& keys,
                       TransformedRows& values) const {
    const KvTokens group_tokens(group_, item_.head);
    if constexpr (VariantHooks<Variant>::kKey) {
      Rows::transform_rows(tokens.keys, dims_.qk, part, group_tokens, token, Variant::kKeyPairs,
                           scale_of(&AttentionScales::k, group_.request), keys,
                           [&](const Pair& x, int32_t first, int32_t second, const KvToken& at) {
                             return variant_.key(x, first, second, at);
                           });
    }
    if constexpr (VariantHooks<Variant>::kValue) {
      Rows::transform_rows(tokens.values, dims_.v, part, group_tokens, token, Variant::kValuePairs,
                           scale_of(&AttentionScales::v, group_.request), values,
                           [&](const Pair& x, int32_t first, int32_t second, const KvToken& at) {
                             return variant_.value(x, first, second, at);
                           });
    }
  }

  /// Widens the keys and values of tokens [begin, end) of the block.
  void widen_cache(TokenRows& tokens, const TokenRange& part, TransformedRows& keys, TransformedRows& values) const {
    if constexpr (kWidens) {
      const AttentionTokenScales& scales = params_.token_scales;
      const DataType element = variant_.scales.element;
      Rows::widen_rows(tokens.keys, scales.k.exist() ? tokens.key_scales : nullptr, scales.k_factor,
                       side_type(element, false), dims_.qk, part, keys);
      Rows::widen_rows(tokens.values, scales.v.exist() ? tokens.value_scales : nullptr, scales.v_factor,
                       side_type(element, true), dims_.v, part, values);
    }
  }

  /// A scale of Q or of the cache; 1 where there are none.
  float scale_of(KvScale AttentionScales::* which, int32_t request) const {
    if constexpr (kWidens) return (variant_.scales.*which).of(request, item_.head);
    return 1.0f;
  }

  /// sm_scale, and the scales of Q and of K of a row of the tile; rows that a variant has transformed are multiplied by
  /// their scales already.
  float score_scale(int row) const {
    float scale = params_.sm_scale;
    if constexpr (kWidens && !VariantHooks<Variant>::kQuery) scale *= scale_of(&AttentionScales::q, 0);
    if constexpr (kWidens && !VariantHooks<Variant>::kKey)
      scale *= scale_of(&AttentionScales::k, scale_request(variant_.scales.k, row));
    return scale;
  }

  /// The factor of a row of outputs: `factor`, and V's scale, if no variant has transformed V.
  float output_scale(float factor, int row) const {
    if constexpr (kWidens && !VariantHooks<Variant>::kValue)
      factor *= scale_of(&AttentionScales::v, scale_request(variant_.scales.v, row));
    return factor;
  }

  int32_t scale_request(const KvScale& scale, int row) const {
    return scale.is_of_requests() ? score_row(row).request : 0;
  }

  void process_block(TokenRange block, TokenRows& tokens, const TokenRows& next) {
    const int padded = round_up(tokens.count, Engine::kColumnStep);
    for (int i = tokens.count; i < padded; ++i) tokens.keys[i] = tokens.values[i] = cache_.no_token;
    constexpr bool kTransforms = VariantHooks<Variant>::kKey || VariantHooks<Variant>::kValue;
    for (int begin = 0; begin < padded; begin += Rows::kPackTokens) {
      const int end = min_of(begin + Rows::kPackTokens, padded);
      cache_.prefetch(next, begin, end == padded ? next.count : min_of(end, next.count));
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
    const int begin = (seen.begin - block.begin) / Engine::kColumnStep * Engine::kColumnStep;
    const int end = round_up(seen.end - block.begin, Engine::kColumnStep);
    return Panel{row, rows, begin, end};
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

      Float largest = Isa::load(scores + begin) * scale;
      for (int t = begin + Isa::kWidth; t < end; t += Isa::kWidth)
        largest = Isa::max(largest, Isa::load(scores + t) * scale);
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
        sum += p;
        engine_.store_probabilities(buffer, r, t, p);
      }
      s_.row_sum[row + r] += Isa::reduce_add(sum);
    }
  }

  /// A row of the tile, as variants see it.
  ScoreRow score_row(int row) const { return attn::score_row(params_, item_rows_, tile_.group, item_.head, row); }

  /// Turns scores into final logits, in powers of 2.
  void finish_scores(float* scores, int row, int begin, int end, int32_t block_begin) const {
    // Copies that the scores cannot overlap: the compiler vectorizes the loops.
    const Variant variant = variant_;
    const float scale = score_scale(row);
    const int32_t first = group_.kv_offset + block_begin;
    const float to_powers = Variant::kUsesSoftmax ? kLog2E : 1.0f;
    if (transforms_logits(variant)) {
      const ScoreRow variant_row = score_row(row);
      for (int t = begin; t < end; ++t) {
        scores[t] *= scale;
        if constexpr (VariantHooks<Variant>::kLogits) scores[t] = variant.logits(scores[t], variant_row, first + t);
        scores[t] *= to_powers;
      }
    } else {
      for (int t = begin; t < end; ++t) scores[t] *= scale * kLog2E;
    }
  }

  /// Hides what the variant does not let a row see.
  void apply_variant_mask(float* scores, int row, int begin, int end, int32_t block_begin) const {
    const ScoreRow variant_row = score_row(row);
    const int32_t first = group_.kv_offset + block_begin;
    if (item_rows_.level.row_ranges != nullptr) {
      const RowRange& range =
          item_rows_.level.row_ranges[group_.qo_begin + params_.group_size.divide(tile_.packed_begin + row)];
      if (range.full_begin <= first + begin && first + end <= range.full_end) return;
    }
    for (int t = begin; t < end; ++t) {
      if (!variant_.mask(variant_row, first + t)) scores[t] = -INFINITY;
    }
  }

  /// Sets scores to -inf where the query at `position` does not see the token, or there is none.
  void mask_scores(float* scores, int32_t position, int begin, int end, TokenRange tokens, int32_t block_begin) const {
    const TokenRange seen = visibility_.seen_by_any(position, position, tokens);
    const int seen_begin = clamp(seen.begin - block_begin, begin, end);
    const int seen_end = clamp(seen.end - block_begin, seen_begin, end);
    for (int t = begin; t < seen_begin; ++t) scores[t] = -INFINITY;
    for (int t = seen_end; t < end; ++t) scores[t] = -INFINITY;
  }

  void rescale(int row, float factor) {
    s_.row_sum[row] *= factor;
    float* o = s_.o + row * engine_.o_stride();
    for (int i = 0; i < engine_.o_stride(); i += Isa::kWidth) Isa::store(o + i, Isa::load(o + i) * Isa::splat(factor));
  }

  void write_row(int row) {
    const PackedRow place = packed_row(row);
    if (!place.exists) return;
    const bool is_complete = item_.partial == kWhole;
    const RowEnd end = end_row(params_, s_.row_max[row] * kLn2, s_.row_sum[row], place.qo_head, is_complete);
    const Float scale = Isa::splat(output_scale(end.factor, row));
    alignas(64) float o[kMaxHeadDim];
    for (int i = 0; i < dims_.v; i += Isa::kWidth) Isa::store(o + i, engine_.output(row, i) * scale);
    if (params_.rotates) rotate_row_back(o, dims_.v);  // of a state, too: merging is linear
    if (is_complete) {
      write_complete_row(params_, o, dims_.v, end.lse, tile_.group, place);
    } else {
      const int64_t state = item_.partial == kRowStates
                                ? row_state_index(params_, group_.state_begin + place.index, place.qo_head)
                                : int64_t{item_.partial} * params_.max_tile_rows + row;
      float* const to = params_.partial_o + state * dims_.v;
      for (int i = 0; i < dims_.v; i += Isa::kWidth) Isa::store_elements(to + i, Isa::load(o + i), dims_.v - i);
      params_.partial_lse[state] = end.lse;
    }
  }

  const CpuAttentionParams& params_;
  const WorkItem& item_;
  Scratch& s_;
  const RowTile& tile_;
  const RowGroup& group_;
  const ItemRows item_rows_;
  const Visibility visibility_;
  const Variant variant_;
  const HeadDims dims_;
  const int rows_;
  const Cache cache_;
  Engine engine_;
};

/// The kernels without a variant. `widens`: over an 8-bit cache.
template <class Engine>
constexpr Kernels standard_kernels(bool widens) {
  if (widens) return AttentionKernel<Engine, WithScales<StandardVariant>>::kernels();
  return AttentionKernel<Engine, StandardVariant>::kernels();
}

}  // namespace attn::cpu
