// One work item of the schedule: a row tile's rows x a run of KV tiles of one KV head; and the merge of split pairs.
//
// Tokens go through in blocks. A block's keys and values are packed for the engine once; then panels of a few rows each take scores, online softmax and output.
// Scores are kept in powers of 2. An engine (float32_engine.h, amx_engine.h) owns the layouts and the two matrix products.
#pragma once

#include <cmath>

#include "attn/math.h"
#include "attn/schedule.h"
#include "attn/variants.h"
#include "cpu/elements.h"
#include "cpu/kernels.h"

namespace attn::cpu {

template <class Engine, class Variant>
class AttentionKernel {
  using Isa = typename Engine::Isa;
  using Float = typename Isa::Float;
  using Element = typename Engine::Element;

  // A row's reference maximum follows a greater score only when exponentials would grow beyond 2^this: outputs are rarely rescaled.
  static constexpr float kMaxGrowth = 8.0f;

 public:
  static void run(const AttentionParams& params, int32_t head_dim, const WorkItem& item, Scratch& scratch) {
    AttentionKernel kernel(params, head_dim, item, scratch);
    if (kernel.rows_ > 0) kernel.compute();
  }

  static void merge(const AttentionParams& params, int32_t head_dim, const SplitPair& pair) {
    const RowTile& tile = params.schedule.tiles[pair.tile];
    const RowGroup& group = params.schedule.groups[tile.group];
    const int rows = count_rows(params, tile, group);
    for (int r = 0; r < rows; ++r) {
      const int slots = pair.last_cta - pair.first_cta + 1;
      const auto slot_row = [&](int part) -> int64_t {
        const int32_t slot = partial_slot(pair.first_cta + part, part == 0 ? kEndsInside : kStartsInside);
        return int64_t{slot} * params.max_tile_rows + r;
      };
      float largest = -INFINITY;
      for (int part = 0; part < slots; ++part) largest = max_of(largest, params.partial_lse[slot_row(part)]);
      const float reference = largest == -INFINITY ? 0.0f : largest;
      float sum = 0.0f;
      for (int part = 0; part < slots; ++part) sum += expf(params.partial_lse[slot_row(part)] - reference);
      const float inverse = sum > 0.0f ? 1.0f / sum : sum;
      const RowOut out = locate_row(params, tile, group, pair.head, r);
      for (int i = 0; i < head_dim; i += Isa::kWidth) {
        Float o = Isa::zero();
        for (int part = 0; part < slots; ++part) {
          const int64_t row = slot_row(part);
          const float weight = expf(params.partial_lse[row] - reference) * inverse;
          o = Isa::fma(Isa::splat(weight), Isa::load_elements(params.partial_o + row * head_dim + i, head_dim - i), o);
        }
        Isa::store_elements(out.o + i, o, head_dim - i);
      }
      if (out.lse != nullptr) *out.lse = sum > 0.0f ? largest + logf(sum) : (sum == 0.0f ? -INFINITY : sum);
    }
  }

 private:
  struct RowOut {
    Element* o;
    float* lse;
  };

  AttentionKernel(const AttentionParams& params, int32_t head_dim, const WorkItem& item, Scratch& scratch)
      : params_(params),
        item_(item),
        s_(scratch),
        tile_(params.schedule.tiles[item.tile]),
        group_(params.schedule.groups[tile_.group]),
        variant_{params.sm_scale, params.logits_soft_cap, params.schedule.header->causal, params.schedule.header->window_left},
        head_dim_(head_dim),
        rows_(count_rows(params, tile_, group_)),
        engine_(scratch, head_dim, rows_) {}

  /// Rows of the tile that exist: packed rows are in order of query rows, and those of a query row beyond num_rows are ignored.
  static int count_rows(const AttentionParams& params, const RowTile& tile, const RowGroup& group) {
    const int64_t query_rows = min_of<int64_t>(group.qo_len, int64_t{params.num_rows} - group.qo_begin);
    const int64_t rows = query_rows * params.group_size.divisor - tile.packed_begin;
    return static_cast<int>(clamp<int64_t>(rows, 0, tile_rows(tile.kind)));
  }

  static RowOut locate_row(const AttentionParams& params, const RowTile& tile, const RowGroup& group, int32_t head, int row) {
    const int32_t packed = tile.packed_begin + row;
    const int32_t i = params.group_size.divide(packed);
    const int64_t query_row = group.qo_begin + i;
    const int64_t query_head = int64_t{head} * params.group_size.divisor + (packed - i * params.group_size.divisor);
    Element* o = static_cast<Element*>(params.o) + query_row * params.o_row_stride + query_head * params.o_head_stride;
    const int64_t num_qo_heads = int64_t{params.num_kv_heads} * params.group_size.divisor;
    return RowOut{o, params.lse == nullptr ? nullptr : params.lse + query_row * num_qo_heads + query_head};
  }

  /// Position of a row's query.
  int32_t position(int row) const { return group_.kv_len - group_.qo_len + params_.group_size.divide(tile_.packed_begin + row); }

  void compute() {
    load_queries();
    __builtin_memset(s_.o, 0, sizeof(float) * static_cast<unsigned>(ceil_div(rows_, Engine::kPanelRows) * Engine::kPanelRows * engine_.o_stride()));
    for (int r = 0; r < rows_; ++r) {
      s_.row_max[r] = -INFINITY;
      s_.row_sum[r] = 0.0f;
    }

    const int64_t item_begin = tile_.kv_begin + int64_t{item_.kv_tile_begin} * params_.kv_tile;
    const int64_t item_end = min_of<int64_t>(tile_.kv_begin + int64_t{item_.kv_tile_end} * params_.kv_tile, tile_.kv_end);
    const TokenRange item_tokens{static_cast<int32_t>(item_begin), static_cast<int32_t>(item_end)};
    const TokenRange tokens = Variant::any(variant_, position(0), position(rows_ - 1), item_tokens);
    for (int32_t begin = tokens.begin; begin < tokens.end; begin += Engine::kBlockTokens) {
      process_block(TokenRange{begin, min_of(tokens.end, begin + Engine::kBlockTokens)});
    }

    for (int r = 0; r < rows_; ++r) write_row(r);
  }

  void load_queries() {
    const int32_t group_size = params_.group_size.divisor;
    for (int r = 0; r < rows_; ++r) {
      const int32_t packed = tile_.packed_begin + r;
      const int32_t i = params_.group_size.divide(packed);
      const int64_t query_row = group_.qo_begin + i;
      const int64_t query_head = int64_t{item_.head} * group_size + (packed - i * group_size);
      engine_.load_query(r, static_cast<const Element*>(params_.q) + query_row * params_.q_row_stride + query_head * params_.q_head_stride);
    }
  }

  void process_block(TokenRange block) {
    const int count = block.end - block.begin;
    const int padded = ceil_div(count, Engine::kColumnStep) * Engine::kColumnStep;
    find_tokens(block, padded);
    engine_.pack_keys(padded);
    engine_.pack_values(padded);
    for (int row = 0; row < rows_; row += Engine::kPanelRows) {
      const int rows = min_of(Engine::kPanelRows, rows_ - row);
      const TokenRange seen = Variant::any(variant_, position(row), position(row + rows - 1), block);
      if (seen.begin >= seen.end) continue;
      const int begin = round_down(seen.begin - block.begin, Engine::kColumnStep);
      const int end = ceil_div(seen.end - block.begin, Engine::kColumnStep) * Engine::kColumnStep;
      engine_.multiply_keys(row, rows, begin, end);
      softmax(row, rows, begin, end, block);
      engine_.multiply_values(row, rows, begin, end);
    }
  }

  /// Addresses of the block's keys and values.
  void find_tokens(TokenRange block, int padded) {
    const int64_t key_step = params_.k.token_stride * static_cast<int64_t>(sizeof(Element));
    const int64_t value_step = params_.v.token_stride * static_cast<int64_t>(sizeof(Element));
    const int32_t page_size = params_.page_size.divisor;
    int i = 0;
    for (int32_t token = block.begin; token < block.end;) {
      const int32_t page = params_.page_size.divide(token);
      const int32_t in_page = token - page * page_size;
      const int32_t run = min_of(block.end - token, page_size - in_page);
      const int64_t id = find_page(page);
      const char* key = id < 0 ? nullptr : locate_token(params_.k, id, in_page);
      const char* value = id < 0 ? nullptr : locate_token(params_.v, id, in_page);
      for (int32_t j = 0; j < run; ++j, ++i) {
        s_.key_rows[i] = key != nullptr ? key + j * key_step : reinterpret_cast<const char*>(s_.no_token);
        s_.value_rows[i] = value != nullptr ? value + j * value_step : reinterpret_cast<const char*>(s_.no_token);
      }
      token += run;
    }
    for (; i < padded; ++i) s_.key_rows[i] = s_.value_rows[i] = reinterpret_cast<const char*>(s_.no_token);
  }

  const char* locate_token(const KvTensor& tensor, int64_t page, int32_t in_page) const {
    const int64_t element = page * tensor.page_stride + in_page * tensor.token_stride + item_.head * tensor.head_stride;
    return static_cast<const char*>(tensor.data) + element * static_cast<int64_t>(sizeof(Element));
  }

  /// Page number `page` of the request, inside the cache whatever the table says; -1 if there is no page at all.
  int64_t find_page(int32_t page) const {
    const ScheduleHeader& header = *params_.schedule.header;
    int64_t id = group_.table_begin + page;
    if (header.indices != nullptr) {
      const int64_t entry = group_.table_begin + int64_t{page} * header.entry_step;
      id = header.num_entries > 0 ? header.indices[clamp<int64_t>(entry, 0, header.num_entries - 1)] / header.entry_step : -1;
    }
    if (id >= 0 && id < params_.num_pages) return id;
    __atomic_fetch_or(&params_.schedule.header->errors, static_cast<uint32_t>(kPageIndexInvalid), __ATOMIC_RELAXED);
    return params_.num_pages > 0 ? clamp<int64_t>(id, 0, params_.num_pages - 1) : -1;
  }

  /// Turns scores of rows [row, row + rows) and tokens [begin, end) of the block into exponentials; updates the rows' maxima, sums and outputs.
  void softmax(int row, int rows, int begin, int end, TokenRange block) {
    const TokenRange columns{block.begin + begin, block.begin + end};
    const TokenRange certain = Variant::all(variant_, position(row), position(row + rows - 1), TokenRange{columns.begin, min_of(columns.end, block.end)});
    const bool plain = certain.begin <= columns.begin && certain.end >= columns.end && !Variant::transforms_logits(variant_);
    for (int r = 0; r < rows; ++r) {
      float* scores = s_.scores + r * Engine::kBlockTokens;
      if (!plain) finish_scores(scores, position(row + r), begin, end, block);
      const Float scale = Isa::splat(plain ? params_.sm_scale * kLog2E : 1.0f);

      Float largest = Isa::mul(Isa::load(scores + begin), scale);
      for (int t = begin + Isa::kWidth; t < end; t += Isa::kWidth) largest = Isa::max(largest, Isa::mul(Isa::load(scores + t), scale));
      const float block_max = Isa::reduce_max(largest);
      float& row_max = s_.row_max[row + r];
      if (block_max > row_max + kMaxGrowth || row_max == -INFINITY) {
        if (row_max != -INFINITY) rescale(row + r, exp2f(row_max - block_max));
        row_max = block_max;
      }

      const Float shift = Isa::splat(row_max == -INFINITY ? 0.0f : -row_max);     // a row that has seen nothing: every exponential is 0
      Float sum = Isa::zero();
      for (int t = begin; t < end; t += Isa::kWidth) {
        const Float p = Isa::exp2(Isa::fma(Isa::load(scores + t), scale, shift));
        sum = Isa::add(sum, p);
        engine_.store_probabilities(r, t, p);
      }
      s_.row_sum[row + r] += Isa::reduce_add(sum);
    }
  }

  /// Applies the variant to a row's scores: final logits in powers of 2, -inf where the query at `position` does not see the token.
  void finish_scores(float* scores, int32_t position, int begin, int end, TokenRange block) const {
    const TokenRange tokens{block.begin + begin, min_of(block.begin + end, block.end)};
    const TokenRange seen = Variant::any(variant_, position, position, tokens);
    const TokenRange certain = Variant::all(variant_, position, position, seen);
    if (Variant::transforms_logits(variant_)) {
      for (int t = begin; t < end; ++t) scores[t] = Variant::logits(variant_, scores[t] * params_.sm_scale) * kLog2E;
    } else {
      const Float scale = Isa::splat(params_.sm_scale * kLog2E);
      for (int t = begin; t < end; t += Isa::kWidth) Isa::store(scores + t, Isa::mul(Isa::load(scores + t), scale));
    }
    const int seen_begin = clamp(seen.begin - block.begin, begin, end);
    const int seen_end = clamp(seen.end - block.begin, seen_begin, end);
    for (int t = begin; t < seen_begin; ++t) scores[t] = -INFINITY;
    for (int t = seen_end; t < end; ++t) scores[t] = -INFINITY;
    if (certain.begin <= seen.begin && certain.end >= seen.end) return;
    for (int t = seen_begin; t < seen_end; ++t) {
      if (!Variant::visible(variant_, position, block.begin + t)) scores[t] = -INFINITY;
    }
  }

  void rescale(int row, float factor) {
    s_.row_sum[row] *= factor;
    float* o = s_.o + row * engine_.o_stride();
    for (int i = 0; i < engine_.o_stride(); i += Isa::kWidth) Isa::store(o + i, Isa::mul(Isa::load(o + i), Isa::splat(factor)));
  }

  void write_row(int row) {
    const float sum = s_.row_sum[row];
    const Float scale = Isa::splat(sum == 0.0f ? 0.0f : 1.0f / sum);
    const float lse = sum == 0.0f ? -INFINITY : (s_.row_max[row] + log2f(sum)) * kLn2;
    if (item_.partial == kWhole) {
      const RowOut out = locate_row(params_, tile_, group_, item_.head, row);
      for (int i = 0; i < head_dim_; i += Isa::kWidth) Isa::store_elements(out.o + i, Isa::mul(engine_.output(row, i), scale), head_dim_ - i);
      if (out.lse != nullptr) *out.lse = lse;
    } else {
      const int64_t slot_row = int64_t{item_.partial} * params_.max_tile_rows + row;
      float* o = params_.partial_o + slot_row * head_dim_;
      for (int i = 0; i < head_dim_; i += Isa::kWidth) Isa::store_elements(o + i, Isa::mul(engine_.output(row, i), scale), head_dim_ - i);
      params_.partial_lse[slot_row] = lse;
    }
  }

  const AttentionParams& params_;
  const WorkItem& item_;
  Scratch& s_;
  const RowTile& tile_;
  const RowGroup& group_;
  const VariantParams variant_;
  const int32_t head_dim_;
  const int rows_;
  Engine engine_;
};

}  // namespace attn::cpu
