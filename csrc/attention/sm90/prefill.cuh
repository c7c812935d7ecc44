// Prefill: row tiles of 32 rows and more, multiplied with wgmma. Each warpgroup computes 64 rows of a row tile of 128
// or 192 rows; the first warpgroup computes row tiles of 32 and 64 rows. While the tensor cores add P V of one KV tile,
// the warpgroup computes most of the next tile's exponentials:
//
//     tensor cores  | Q K(0) |        | Q K(1) | P V(0) |        | Q K(2) | P V(1) | ...
//     warpgroup              | exp(0) |        | exp(1)          |        | exp(2)          | ...
//
// With heads of 64 columns the exponentials take as long as the products. Three warpgroups compute there, and each
// waits for its products (kWaitsForProducts). Scores and probabilities of a warpgroup are then never alive together, so
// the registers suffice for three:
//
//     tensor cores  | Q K(0) |        | P V(0) | Q K(1) |        | P V(1) | Q K(2) | ...
//     warpgroup              | exp(0) |                 | exp(1) |                 | ...
//
// The warpgroups are not synchronized: the products of one overlap with the softmax of the others.
#pragma once

#include "attention/sm90/consumer.cuh"
#include "attention/sm90/output.cuh"
#include "attention/sm90/prepared_tiles.cuh"
#include "attention/sm90/scores.cuh"
#include "attention/sm90/traits.cuh"
#include "attention/tile/warp_state.cuh"
#include "common/elements.cuh"
#include "common/ptx/wgmma.cuh"

namespace attn::sm90 {

template <class Traits>
struct Prefill {
  using Element = typename Traits::Element;
  using Variant = typename Traits::Variant;
  using Walk = KvWalk<Traits>;
  using Query = QTile<Traits>;
  using Keys = WgmmaKTile<Traits>;
  using Values = WgmmaVTile<Traits>;
  using Rows = LaneRows<Variant, 1>;
  using Place = typename KvRing<Traits>::Place;
  static constexpr int kTokens = Traits::kTuning.kv_tile;
  static constexpr bool kUsesSoftmax = Variant::kUsesSoftmax;  // all variants but those with custom weights
  static constexpr bool kSkipsTiles = Variant::kSkipsTiles;    // variants with sparse masks
  static constexpr bool kWaitsForProducts = Traits::kTuning.waits_for_products;  // heads of up to 64 columns
  static constexpr bool kAddsBias = Traits::kTakesLastFirst;  // ALiBi: the bias is added with the exponentials, and
                                                              // KV tiles are taken from the last to the first
  /// Heads of up to 128 columns, and 192/128 over 16-bit caches. Not where a variant's logits may grow from KV tile to
  /// KV tile: rows would outgrow their maxima all the time (a prefill of 4 x 4096 with ALiBi's took 6.8 times as long).
  static constexpr bool kKeepsMaxima =
      Traits::kTuning.keeps_maxima && (kAddsBias || !(VariantHooks<Variant>::kLogits && Variant::kReadsRows));
  static constexpr int kQkColumns = Traits::Shape::kQkMultiplied;
  static constexpr int kColumns = Traits::kVColumns;
  using State = WarpState<Element, kColumns, 1>;  // of one warp, which has 16 rows
  using PromptScores = Scores<Traits, SoftCap::kFast>;

  const TmaParams& tma_params;
  KvRing<Traits>& ring;
  const AttentionParams& params = tma_params.attention;
  const PromptScores scores{params};
  PreparedTiles<Traits> tiles{params, ring};

  /// Computes an item whose rows this warpgroup multiplies. The first Q K^T is issued alone: overlapping it with the
  /// last P V of the item before gained nothing (ADR 16).
  __device__ __forceinline__ void run(const WorkItem& item, int q_stage) {
    const int first_row = consumer_warp() * kWarpRows;
    float s[1][kTokens / 8][4];
    uint32_t p[kTokens / 16][4];

    // Start S(0) = Q K(0)^T.
    tiles.prepare_first(item, ring.shared.q(q_stage));
    ptx::wgmma_fence();
    multiply_keys(s, query(q_stage), ring.kv.index);

    // Meanwhile, set up the rows' state.
    State state;
    state.scale = scores.scale(item);
    if constexpr (!kUsesSoftmax) state.start_sum(true);
    Rows rows(params, item.rows, item.group, item.kv_head, first_row);
    const typename PromptScores::Constants constants = scores.constants(item, first_row);
    const TokenRange readable = item.readable;
    int32_t token = Walk::enter(Walk::first(params, item), rows);
    int32_t next_token = token;  // of the next KV tile
    Place values;
    bool have_maxima = false;  // all rows of the warp
    tiles.prepare_early(item, token, item.num_kv_tiles - 1);
    ptx::wgmma_wait<0>();
    ptx::wgmma_fence_operand(s[0]);

    for (int left = item.num_kv_tiles;; token = kSkipsTiles ? next_token : token + Walk::kStep) {
      // P(i) = exp2(S(i) - maximum), while P(i - 1) V(i - 1) is under way.
      float added[2], correction[2];
      bool raised = false;
      if constexpr (!kKeepsMaxima) ring.free_tile(ring.kv);  // K(i): no row computes its scores again
      scores.finish(item, s, first_row, token, constants, rows, !kAddsBias);
      if constexpr (!kUsesSoftmax) {
        added[0] = added[1] = 0.0f;
      } else {
        if constexpr (!kKeepsMaxima)
          raised = state.raise_maximum(0, s[0], correction);
        else if (!have_maxima)
          have_maxima = find_maxima(item, state, s, token, rows);
        if constexpr (kAddsBias)
          exponentiate_biased(item, state, s, added, token, rows);
        else
          exponentiate(state, s, added);
      }
      ptx::wgmma_fence_operand(s[0]);  // the exponentials before the wait

      // Wait for P(i - 1) V(i - 1), then rescale the output if rows have larger maxima now.
      if constexpr (kWaitsForProducts) pack_probabilities<Element>(s, p);  // recompute() needs the registers
      if (left != item.num_kv_tiles) {  // not the first tile; a bool here makes ptxas spill
        if constexpr (!kWaitsForProducts) finish_values(state, values);
        if constexpr (!kKeepsMaxima) {
          if (raised) state.scale_output(0, correction);
        } else if (__any_sync(0xffffffffu, has_outgrown(added, 0) || has_outgrown(added, 1))) {
          if constexpr (kWaitsForProducts)
            recompute(state, item, p, added, q_rows(q_stage), ring.kv.index, token, constants, rows);
          else
            recompute(state, item, s, added, q_rows(q_stage), ring.kv.index, token, constants, rows);
        }
      }
      state.sum[0][0] += added[0];
      state.sum[0][1] += added[1];

      if constexpr (kKeepsMaxima) ring.free_tile(ring.kv);
      ring.next_tile();
      if constexpr (!kWaitsForProducts) {
        ptx::wgmma_fence_operand(s[0]);  // p is still read before the wait
        pack_probabilities<Element>(s, p);
      }
      values = ring.kv;
      ring.next_tile();
      if (--left == 0) break;

      // Start S(i + 1) = Q K(i + 1)^T and O += P(i) V(i), then wait for S(i + 1) only. With three warpgroups: P V
      // first, then the next S, both after V and K have arrived (P V before K has arrived takes 12 % longer, ADR 50).
      tiles.prepare(item, values, token, true, left, readable);
      ptx::wgmma_fence();
      if constexpr (kWaitsForProducts) {
        multiply_values(state, p, values.index);
        finish_values(state, values);
        ptx::wgmma_fence();
      }
      multiply_keys(s, query(q_stage), ring.kv.index);
      if constexpr (!kWaitsForProducts) multiply_values(state, p, values.index);
      if constexpr (kSkipsTiles)
        next_token = Walk::enter(Walk::next(params, item, token, left), rows);  // early: it may have to be loaded
      tiles.prepare_early(item, kSkipsTiles ? next_token : token + Walk::kStep, left - 1);
      ptx::wgmma_wait<kWaitsForProducts ? 0 : 1>();
      ptx::wgmma_fence_operand(s[0]);
    }

    // The last P V
    tiles.prepare(item, values, token, false, 0, readable);
    ptx::wgmma_fence();
    multiply_values(state, p, values.index);
    finish_values(state, values);

    // Epilogue: all of the warpgroup's products with Q are done, so the rows of O go through the Q tile.
    sync_warpgroup();
    write_rows<Traits>(tma_params, item, state, first_row, ring.shared.q(q_stage));
  }

  /// Takes part in an item that only other warpgroups multiply.
  __device__ __forceinline__ void skip(const WorkItem& item) { tiles.skip(item); }

  // --- products

  /// Starts s = Q K^T.
  __device__ __forceinline__ void multiply_keys(float (&s)[1][kTokens / 8][4], ptx::MatrixDescriptor q,
                                                int part) const {
    const ptx::MatrixDescriptor keys = Keys::columns_descriptor(ptx::shared_address(ring.shared.kv(part)));
#pragma unroll
    for (int k = 0; k < kQkColumns / 16; ++k)
      ptx::wgmma_shared<Element::kMmaType>(s[0], Query::columns(q, k), Keys::columns(keys, k), k > 0);
    ptx::wgmma_commit();
  }

  /// Starts o += P V.
  __device__ __forceinline__ void multiply_values(State& state, const uint32_t (&p)[kTokens / 16][4], int part) const {
    const ptx::MatrixDescriptor values = Values::rows_descriptor(ptx::shared_address(ring.shared.kv(part)));
#pragma unroll
    for (int k = 0; k < kTokens / 16; ++k)
      ptx::wgmma_registers<Element::kMmaType>(state.o[0], p[k], Values::rows(values, k), 1);
    ptx::wgmma_commit();
  }

  /// Waits for P V, and frees V.
  __device__ __forceinline__ void finish_values(State& state, const Place& values) const {
    ptx::wgmma_wait<0>();
    ptx::wgmma_fence_operand(state.o[0]);
    ring.free_tile(values);
  }

  __device__ __forceinline__ ptx::MatrixDescriptor query(int stage) const {
    return Query::columns_descriptor(ptx::shared_address(ring.shared.q(stage)) + warpgroup() * 64 * Query::kRowBytes);
  }

  /// For ldmatrix: the rows of this warp.
  __device__ __forceinline__ uint32_t q_rows(int stage) const {
    return ptx::shared_address(ring.shared.q(stage)) + consumer_warp() * 16 * Query::kRowBytes +
           Query::rows_first(ptx::lane_id());
  }

  // --- the softmax

  /// Maxima are lazy: finding every tile's maxima takes a fifth of the softmax (ADR 15). A row keeps the maximum of the
  /// first KV tile in which it sees anything, until the probabilities of a lane's columns sum to more than this, or to
  /// NaN. The limit is far below what an element can hold, and a maximum that is too small costs no accuracy. If the
  /// last KV tile comes first, a row may see only one token of it. Other tokens exceed that by more, so the limit is
  /// as high as possible there.
  static constexpr float kMaxAdded = !kAddsBias ? 4096.0f : is_same<Element, BFloat16> ? 0x1p32f : 0x1p15f;

  __device__ __forceinline__ static bool has_outgrown(const float (&added)[2], int half) {
    return !(added[half] <= kMaxAdded);
  }

  /// Finds the maxima of the rows that have none. Returns whether all rows of the warp have one. Under a bias, `s` are
  /// masked products.
  __device__ __forceinline__ bool find_maxima(const WorkItem& item, State& state, const float (&s)[1][kTokens / 8][4],
                                              int32_t first_token, const Rows& rows) const {
    if constexpr (!kAddsBias) {
      return state.find_maxima(0, s[0]);
    } else {
      float logits[1][kTokens / 8][4];
#pragma unroll
      for (int n = 0; n < kTokens / 8; ++n) {
#pragma unroll
        for (int c = 0; c < 4; ++c) logits[0][n][c] = s[0][n][c];
      }
      transform_logits(variant_of<Traits>(params, item.kv_head), scores.sm_scale(item), logits, first_token, rows);
      return state.find_maxima(0, logits[0]);
    }
  }

  /// exponentiate() for masked products, to which it adds the variant's bias: two instructions a score, instead of one
  /// to scale it. `first_token`: of the KV tile.
  __device__ __forceinline__ void exponentiate_biased(const WorkItem& item, const State& state,
                                                      float (&s)[1][kTokens / 8][4], float (&added)[2],
                                                      int32_t first_token, const Rows& rows) const {
    const float score_scale = scores.sm_scale(item) * kLog2E;
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

  /// For rows that have outgrown their maxima: computes their scores again (the first ones were overwritten by the
  /// probabilities), finds new maxima, and rescales output and sums. Other rows stay as they are: the bits of a row
  /// depend on no other. Probabilities: s, or p.
  ///
  ///     wgmma: Q K(i) --> scores --> exp2(score - maximum) --> sum of a lane's columns <= kMaxAdded --> P V(i)
  ///                                                                 | larger, or NaN               ^
  ///                                                                 v                              |
  ///     mma.sync: Q K(i), K(i) is still in the ring --> new maximum --> output, sum rescaled --> exp2(score - maximum)
  template <class Probabilities>
  __device__ __forceinline__ void recompute(State& state, const WorkItem& item, Probabilities& probabilities,
                                            float (&added)[2], uint32_t q, int part, int32_t first_token,
                                            const typename PromptScores::Constants& constants, const Rows& rows) const {
    constexpr int kStep = 16;  // tokens at a time
    const int first_row = consumer_warp() * kWarpRows;
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
    for (int visit = 0; visit < 2 * kTokens; visit += kStep) {
      const bool is_first_visit = visit < kTokens;
      const int token = visit % kTokens;
      if (visit == kTokens) {
        float correction[2];
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          maximum[half] = ptx::quad_max(maximum[half]);
          correction[half] = again[half] ? ptx::ex2((state.maximum[0][half] - maximum[half]) * state.scale) : 1.0f;
          if (again[half]) state.maximum[0][half] = maximum[half];
          if (again[half]) added[half] = 0.0f;
          state.sum[0][half] *= correction[half];
        }
        state.scale_output(0, correction);
      }
      float step[1][kStep / 8][4];
      State::set_to_zero(step);
      const uint32_t keys =
          ptx::shared_address(ring.shared.kv(part)) + token * Keys::kRowBytes + Keys::columns_first(ptx::lane_id());
#pragma unroll
      for (int d = 0; d < kQkColumns / 16; ++d) {
        uint32_t a[4], b[4];
        ptx::ldmatrix_x4(a, Query::block(q, 0, d));
        ptx::ldmatrix_x4(b, Keys::block(keys, 0, d));
        Element::mma(step[0][0], a, b[0], b[1]);
        Element::mma(step[0][1], a, b[2], b[3]);
      }
      scores.finish(item, step, first_row, first_token + token, constants, rows);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int half = i % 2;
        float (&two)[2] = reinterpret_cast<float (&)[2]>(step[0][i / 2][half * 2]);
        if (is_first_visit) {
          maximum[half] = fmaxf(maximum[half], fmaxf(two[0], two[1]));
          continue;
        }
        two[0] = ptx::ex2(two[0] * state.scale - state.base(0, half));
        two[1] = ptx::ex2(two[1] * state.scale - state.base(0, half));
        if (again[half]) added[half] += two[0] + two[1];
#pragma unroll
        for (int k = 0; k < kTokens / kStep; ++k) replace(probabilities, again[half] && k * kStep == token, k, i, two);
      }
    }
  }

  /// Replaces two probabilities of step k, if `condition`: numbers, or packed as A of wgmma.
  __device__ __forceinline__ static void replace(float (&s)[1][kTokens / 8][4], bool condition, int k, int i,
                                                 const float (&two)[2]) {
#pragma unroll
    for (int c = 0; c < 2; ++c) {
      float& probability = s[0][2 * k + i / 2][i % 2 * 2 + c];
      probability = condition ? two[c] : probability;
    }
  }
  __device__ __forceinline__ static void replace(uint32_t (&p)[kTokens / 16][4], bool condition, int k, int i,
                                                 const float (&two)[2]) {
    const uint32_t pair = Element::pack(two[0], two[1]);
    p[k][i] = condition ? pair : p[k][i];
  }
};

}  // namespace attn::sm90
