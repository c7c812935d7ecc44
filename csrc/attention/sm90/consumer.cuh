// The two consumer warpgroups compute work items from what the producer has loaded.
//
// Row tiles of 32 rows and more are multiplied with wgmma. Each warpgroup computes 64 rows of a 128-row tile; the first
// warpgroup computes row tiles of 32 and 64 rows. While the tensor cores add P V of one KV tile, the warpgroup computes
// most of the next tile's exponentials:
//
//     tensor cores  | Q K(0) |        | Q K(1) | P V(0) |        | Q K(2) | P V(1) | ...
//     warpgroup              | exp(0) |        | exp(1)          |        | exp(2)          | ...
//
// The two warpgroups are not synchronized: the products of one overlap with the softmax of the other.
#pragma once

#include "attention/sm90/mma_consumer.cuh"
#include "attention/sm90/output.cuh"

namespace attn::sm90 {

template <class Traits>
struct Consumer : MmaConsumer<Traits> {
  using Base = MmaConsumer<Traits>;
  using Base::clear_unreadable;
  using Base::finish_scores;
  using Base::first_start;
  using Base::free_tile;
  using Base::hopper_params;
  using Base::kAddsBias;
  using Base::kKeepsMaxima;
  using Base::kQkColumns;
  using Base::kSkips;
  using Base::kStep;
  using Base::kTokens;
  using Base::kv;
  using Base::kVColumns;
  using Base::kWidens;
  using Base::multiplied;
  using Base::next_start;
  using Base::next_tile;
  using Base::params;
  using Base::run_mma_item;
  using Base::scale;
  using Base::shared;
  using Base::sm_scale;
  using Base::transform_early;
  using Base::transform_first;
  using Base::transform_late;
  using Base::wait_for_tile;
  using Base::wait_for_tiles;
  using Base::wide_keys;
  using Base::wide_values;
  using Base::widen_tiles;
  using typename Base::Element;
  using typename Base::Keys;
  using typename Base::Output;
  using typename Base::Query;
  using typename Base::Rows;
  using typename Base::Shared;
  using typename Base::State;
  using typename Base::Target;
  using typename Base::Values;
  using typename Base::Variant;

  using Base::Base;

  __device__ __forceinline__ void run() {
    typename Shared::QPlace place;
    shared.wait_q_full(place);
    while (shared.item(place.slot).num_kv_tiles > 0) {
      const WorkItem& item = shared.item(place.slot);
      if (multiplies(item)) {
        run_wgmma_item(item, place.slot);
      } else if (item.kind == 0) {
        run_mma_item(item, place.slot);
      } else {
        skip(item);
      }
      shared.free_q(place);
      place.next();
      shared.wait_q_full(place);
    }
  }

  /// Whether this warpgroup multiplies rows of the item with wgmma: the second has rows only of the largest row tiles.
  __device__ __forceinline__ bool multiplies(const WorkItem& item) const {
    return item.kind > 0 && (item.kind == kMaxKind || warpgroup() == 0);
  }

  /// Frees the KV tiles of an item that only the other warpgroup computes.
  __device__ __forceinline__ void skip(const WorkItem& item) {
    if constexpr (kWidens) {
      widen_tiles(item, kv, kv, item.kv_begin, false, true, 0);
      for (int left = item.num_kv_tiles, token = first_start(item).token; left > 0;
           --left, token = kSkips ? next_start(item, token, left).token : token + kTokens) {
        next_tile();
        const typename Shared::KvPlace values = kv;
        next_tile();
        widen_tiles(item, values, kv, token, true, left > 1, left - 1);
      }
    } else {
      for (int slot = 0; slot < 2 * item.num_kv_tiles; ++slot) {
        wait_for_tile(kv);
        free_tile(kv);
        next_tile();
      }
    }
  }

  // --- wgmma

  /// Starts s = Q K^T.
  __device__ __forceinline__ void multiply_keys(float (&s)[1][kTokens / 8][4], ptx::MatrixDescriptor q,
                                                int slot) const {
    const ptx::MatrixDescriptor keys = Keys::columns_descriptor(ptx::shared_address(wide_keys(slot)));
#pragma unroll
    for (int k = 0; k < kQkColumns / 16; ++k)
      ptx::wgmma_shared<Element::kMmaType>(s[0], Query::columns(q, k), Keys::columns(keys, k), k > 0);
    ptx::wgmma_commit();
  }

  /// Starts o += P V.
  __device__ __forceinline__ void multiply_values(State& state, const uint32_t (&p)[kTokens / 16][4], int slot) const {
    constexpr int kColumns = columns_of_one_product(kVColumns);
    const ptx::MatrixDescriptor values = Values::rows_descriptor(ptx::shared_address(wide_values(slot)));
#pragma unroll
    for (int k = 0; k < kTokens / 16; ++k) {
#pragma unroll
      for (int c = 0; c < kVColumns; c += kColumns) {
        ptx::wgmma_registers<Element::kMmaType>(reinterpret_cast<float (&)[kColumns / 8][4]>(state.o[0][c / 8]), p[k],
                                                Values::rows(values, k, c / kBlockColumns), 1);
      }
    }
    ptx::wgmma_commit();
  }

  /// Turns scores into probabilities relative to the rows' maxima; `added`: their sums over this lane's columns.
  __device__ __forceinline__ static void exponentiate(const State& state, float (&s)[1][kTokens / 8][4],
                                                      float (&added)[2]) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float base = state.base(0, half);
      added[half] = 0.0f;
#pragma unroll
      for (int n = 0; n < kTokens / 8; ++n) {
        s[0][n][2 * half] = ptx::ex2(s[0][n][2 * half] * state.scale - base);
        s[0][n][2 * half + 1] = ptx::ex2(s[0][n][2 * half + 1] * state.scale - base);
        added[half] += s[0][n][2 * half] + s[0][n][2 * half + 1];
      }
    }
  }

  /// The same for products, masked, where a variant's bias is added now (kAddsBias): two instructions a score, instead
  /// of one to scale it. `first_token`: of the KV tile.
  __device__ __forceinline__ void exponentiate_biased(const WorkItem& item, const State& state,
                                                      float (&s)[1][kTokens / 8][4], float (&added)[2],
                                                      int32_t first_token, const Rows& rows) const {
    const float score_scale = sm_scale(item) * kLog2E;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float slope = rows.bias_slopes[0][half];
      const float maximum = state.maximum[0][half] == minus_infinity() ? 0.0f : state.maximum[0][half];
      // With one rounding: far from all that a row sees, bias and maximum are large, and their difference is not.
      const float first = fmaf(slope, rows.bias_distance(0, half, first_token), -maximum) * kLog2E;
      const float column_slope = slope * kLog2E;
      added[half] = 0.0f;
#pragma unroll
      for (int n = 0; n < kTokens / 8; ++n) {
#pragma unroll
        for (int c = 0; c < 2; ++c) {
          float& score = s[0][n][2 * half + c];
          score = ptx::ex2(score * score_scale + (column_slope * (n * 8 + c) + first));
        }
        added[half] += s[0][n][2 * half] + s[0][n][2 * half + 1];
      }
    }
  }

  /// WarpState::find_maxima() for such products.
  __device__ __forceinline__ bool find_biased_maxima(const WorkItem& item, State& state,
                                                     const float (&s)[1][kTokens / 8][4], int32_t first_token,
                                                     const Rows& rows) const {
    float logits[1][kTokens / 8][4];
#pragma unroll
    for (int n = 0; n < kTokens / 8; ++n) {
#pragma unroll
      for (int c = 0; c < 4; ++c) logits[0][n][c] = s[0][n][c];
    }
    transform_logits(this->variant(item.kv_head), sm_scale(item), logits, first_token, rows);
    return state.find_maxima(0, logits[0]);
  }

  /// Online softmax with lazy maxima: a row keeps the maximum of the first KV tile in which it sees anything, until the
  /// probabilities of a lane's columns sum to more than this, or to NaN. The limit is far below what an element can
  /// hold, and a maximum that is too small costs no accuracy. From the last KV tile to the first, a row may see but one
  /// token in its first one, and others exceed that by more: there the limit is as high as it may be.
  static constexpr float kMaxAdded = !kAddsBias ? 4096.0f : is_same<Element, BFloat16> ? 0x1p32f : 0x1p15f;

  __device__ __forceinline__ static bool has_outgrown(const float (&added)[2], int half) {
    return !(added[half] <= kMaxAdded);
  }

  /// For rows that have outgrown their maxima: computes their scores again (the first ones were overwritten by the
  /// probabilities), finds new maxima, and rescales output and sums. Other rows stay as they are: the bits of a row
  /// depend on no other.
  ///
  ///     wgmma: Q K(i) --> scores --> exp2(score - maximum) --> sum of a lane's columns <= kMaxAdded --> P V(i)
  ///                                                                 | larger, or NaN               ^
  ///                                                                 v                              |
  ///     mma.sync: Q K(i), K(i) is still in the ring --> new maximum --> output, sum rescaled --> exp2(score - maximum)
  __device__ __forceinline__ void recompute(State& state, const WorkItem& item, float (&s)[1][kTokens / 8][4],
                                            float (&added)[2], uint32_t q, int slot, int32_t first_token,
                                            const TokenRange& unmasked, const Rows& rows) const {
    constexpr int kStep = 16;  // tokens at a time
    const int first_row = consumer_warp() * 16;
    bool again[2];
    float maximum[2];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      again[half] = has_outgrown(added, half);
      again[half] |= __shfl_xor_sync(0xffffffffu, again[half], 1);
      again[half] |= __shfl_xor_sync(0xffffffffu, again[half], 2);
      maximum[half] = state.maximum[0][half];
    }
    // Visits all tokens twice: first for the maxima, then for the probabilities.
#pragma unroll 1
    for (int i = 0; i < 2 * kTokens; i += kStep) {
      const int token = i % kTokens;
      if (i == kTokens) {
        float correction[2];
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          maximum[half] = fmaxf(maximum[half], __shfl_xor_sync(0xffffffffu, maximum[half], 1));
          maximum[half] = fmaxf(maximum[half], __shfl_xor_sync(0xffffffffu, maximum[half], 2));
          correction[half] = again[half] ? ptx::ex2((state.maximum[0][half] - maximum[half]) * state.scale) : 1.0f;
          if (again[half]) state.maximum[0][half] = maximum[half];
          if (again[half]) added[half] = 0.0f;
          state.sum[0][half] *= correction[half];
        }
        state.scale_output(0, correction);
      }
      float step[1][kStep / 8][4];
      state.template scores<kQkColumns, kStep, Query, Keys>(
          step, q,
          ptx::shared_address(wide_keys(slot)) + token * Keys::kRowBytes + Keys::columns_first(ptx::lane_id()));
      finish_scores(item, step, first_row, first_token + token, unmasked, rows);
#pragma unroll
      for (int j = 0; j < kStep / 8 * 4; ++j) {
        const int half = j % 4 / 2;
        if (i < kTokens) {
          maximum[half] = fmaxf(maximum[half], step[0][j / 4][j % 4]);
          continue;
        }
        const float probability = ptx::ex2(step[0][j / 4][j % 4] * state.scale - state.base(0, half));
        if (again[half]) added[half] += probability;
#pragma unroll
        for (int n = j / 4; n < kTokens / 8; n += kStep / 8)
          s[0][n][j % 4] = again[half] && n / (kStep / 8) * kStep == token ? probability : s[0][n][j % 4];
      }
    }
  }

  __device__ __forceinline__ static void pack(const float (&s)[1][kTokens / 8][4], uint32_t (&p)[kTokens / 16][4]) {
#pragma unroll
    for (int k = 0; k < kTokens / 16; ++k) {
#pragma unroll
      for (int i = 0; i < 4; ++i)
        p[k][i] = Element::pack(s[0][2 * k + i / 2][i % 2 * 2], s[0][2 * k + i / 2][i % 2 * 2 + 1]);
    }
  }

  __device__ __forceinline__ ptx::MatrixDescriptor query(int slot) const {
    return Query::columns_descriptor(ptx::shared_address(shared.q(slot)) + warpgroup() * 64 * Query::kRowBytes);
  }

  /// For ldmatrix: the rows of this warp.
  __device__ __forceinline__ uint32_t q_rows(int slot) const {
    return ptx::shared_address(shared.q(slot)) + consumer_warp() * 16 * Query::kRowBytes +
           Query::rows_first(ptx::lane_id());
  }

  /// Writes the warp's rows, through its rows of the Q tile.
  __device__ __forceinline__ void write(State& state, const WorkItem& item, int first_row, int q_slot) const {
    const Target target(params, item.rows, item.group, item.kv_head, item.starts_inside, item.ends_inside,
                        shared.requests(item));
    write_rows<Output>(hopper_params, state, target, first_row, shared.q(q_slot));
  }

  /// Computes an item whose rows this warpgroup multiplies. The scores of its first KV tile are multiplied by
  /// themselves: together with the last P V of the item before they were no faster (ADR 16).
  __device__ __forceinline__ void run_wgmma_item(const WorkItem& item, int q_slot) {
    const int first_row = consumer_warp() * 16;
    float s[1][kTokens / 8][4];
    uint32_t p[kTokens / 16][4];
    if constexpr (!kWidens) wait_for_tile(kv);
    transform_first(item, q_slot);
    ptx::wgmma_fence();
    multiply_keys(s, query(q_slot), kv.slot);

    State state;
    state.scale = scale(item);
    if constexpr (!Variant::kUsesSoftmax) state.start_sum(true);
    Rows rows(params, item.rows, item.group, item.kv_head, first_row);
    const TokenRange unmasked = unmasked_tokens(params, item, first_row, 16);
    const TokenRange readable = item.readable;
    int32_t token = Base::enter(first_start(item), rows);
    typename Shared::KvPlace values;
    bool have_maxima = false;  // all rows of the warp

    transform_early(item, token, item.num_kv_tiles > 1, item.num_kv_tiles - 1);
    ptx::wgmma_wait<0>();
    ptx::wgmma_fence_operand(s[0]);
    // Turns the scores of a KV tile into probabilities, then starts the next tile's scores together with this one's
    // P V. Maxima are lazy (see kMaxAdded): finding every tile's maxima takes a fifth of the softmax
    // (ADR 15).
    int32_t next_token = token;  // of the next KV tile
    for (int left = item.num_kv_tiles;; token = kSkips ? next_token : token + kStep) {
      const bool is_first = left == item.num_kv_tiles;
      float added[2], correction[2];
      bool raised = false;
      if constexpr (kWidens) state.scale = scale(item);  // read again: it is not kept over products
      Base::template finish_scores<!kAddsBias>(item, s, first_row, token, unmasked, rows);
      if constexpr (!Variant::kUsesSoftmax) {
        added[0] = added[1] = 0.0f;
      } else {
        if constexpr (kKeepsMaxima) {
          if constexpr (kAddsBias) {
            if (!have_maxima) have_maxima = find_biased_maxima(item, state, s, token, rows);
          } else {
            if (!have_maxima) have_maxima = state.find_maxima(0, s[0]);
          }
        } else {
          raised = state.raise_maximum(0, s[0], correction);
        }
        if constexpr (kAddsBias)
          exponentiate_biased(item, state, s, added, token, rows);
        else
          exponentiate(state, s, added);
      }
      ptx::wgmma_fence_operand(s[0]);  // the exponentials before the wait
      if (!is_first) {
        ptx::wgmma_wait<0>();
        ptx::wgmma_fence_operand(state.o[0]);
        multiplied(values);
        if constexpr (kKeepsMaxima) {
          if (__any_sync(0xffffffffu, has_outgrown(added, 0) || has_outgrown(added, 1))) {
            recompute(state, item, s, added, q_rows(q_slot), kv.slot, token, unmasked, rows);
          }
        } else if (raised) {
          state.scale_output(0, correction);
        }
      }
      state.sum[0][0] += added[0];
      state.sum[0][1] += added[1];
      multiplied(kv);
      next_tile();
      ptx::wgmma_fence_operand(s[0]);  // p is still read before the wait
      pack(s, p);
      values = kv;
      next_tile();
      if (--left == 0) break;
      wait_for_tiles(kv, values);
      transform_late(item, values, token, true, left);
      clear_unreadable(values, token, readable);
      ptx::wgmma_fence();
      multiply_keys(s, query(q_slot), kv.slot);
      multiply_values(state, p, values.slot);
      if constexpr (kSkips)
        next_token = Base::enter(next_start(item, token, left), rows);  // early: it may have to be loaded
      transform_early(item, kSkips ? next_token : token + kStep, left > 1, left - 1);
      ptx::wgmma_wait<1>();
      ptx::wgmma_fence_operand(s[0]);
    }

    if constexpr (!kWidens) wait_for_tile(values);
    transform_late(item, values, token, false, 0);
    clear_unreadable(values, token, readable);
    ptx::wgmma_fence();
    multiply_values(state, p, values.slot);
    ptx::wgmma_wait<0>();
    ptx::wgmma_fence_operand(state.o[0]);
    multiplied(values);

    sync_warpgroup();  // all of its products with Q are done: the rows of O go through the Q tile
    write(state, item, first_row, q_slot);
  }
};

}  // namespace attn::sm90
