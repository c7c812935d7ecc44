// The consumers where Q, K and V are e4m3: row tiles of 32 rows and more multiply 8-bit elements with wgmma.
// MmaConsumer computes row tiles of 16 rows.
//
// Probabilities are rounded to e4m3, after a factor that uses its range; sums are of the values before rounding. Tensor
// cores add products of 8-bit elements with about 14 bits, which is too few for long sums: each KV tile's P V is
// computed by itself, and added to the output in float32.
//
// Each warpgroup transposes half of V's columns, for both, while the tensor cores multiply its Q K^T. It has registers
// for a KV tile's scores or for its P V, not for both: its softmax overlaps with the products of the other warpgroup,
// and they take turns.
//
//     tensor cores  | Q K(0) |        | P V(0) | Q K(1) |        | P V(1) | ...
//     warpgroup     | V(0)^T | exp(0) |        | V(1)^T | exp(1) |        | ...
//
// An instruction scheduler has only two warps here, so what a warp waits for counts. A product's inputs (whether K and
// V have arrived, descriptors) are therefore prepared while another product is under way.
#pragma once

#include "attention/sm90/consumer.cuh"
#include "attention/sm90/transposed_values.cuh"
#include "common/ptx/wgmma.cuh"

namespace attn::sm90 {

template <class Traits>
struct Float8Consumer : Consumer<Traits> {
  using Base = Consumer<Traits>;
  using Base::finish_scores;
  using Base::first_start;
  using Base::is_tile_full;
  using Base::kSkips;
  using Base::kTokens;
  using Base::kv;
  using Base::kVColumns;
  using Base::multiplies;
  using Base::next_start;
  using Base::params;
  using Base::query;
  using Base::run_mma_item;
  using Base::scale;
  using Base::shared;
  using Base::wait_for_tile;
  using typename Base::Query;
  using typename Base::Rows;
  using typename Base::Shared;
  using typename Base::State;
  using typename Base::StoredKeys;
  using typename Base::StoredValues;
  using typename Base::Variant;
  using Transposed = TransposedValues<kTokens, kVColumns>;
  static_assert(Transposed::kBlockBytes <= Shared::kLayout.widened_bytes);
  static_assert(Shared::kKvParts % (2 * Shared::kParts) == 0, "the parts of a KV tile follow one another");

  /// Probabilities are multiplied by 2^kShift, and are up to 2^kSlack before, because a row's maximum is left as it is
  /// until a score exceeds it by that much, to base 2: together they stay below e4m3's largest number, 448 = 2^8.8.
  static constexpr float kShift = 8.0f;
  static constexpr float kSlack = 0.75f;
  static constexpr float kUnshift = 1.0f / (1 << static_cast<int>(kShift));

  static constexpr int kChunks = StoredValues::kHeadChunks / 2;  // of V, that a warpgroup transposes
  const Transposition<StoredValues, Transposed> transposition{warpgroup() * kChunks};
  uint32_t num_multiplied = 0;  // V tiles: the next is transposed into the one or the other of two

  using Base::Base;

  __device__ __forceinline__ void run() {
    if (warpgroup() == 1) pass_turn();  // the other has the first
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

  // In items that both warpgroups multiply they take turns: one starts its P V and its next Q K^T while the other turns
  // scores into probabilities. Both have as many turns in an item.
  __device__ __forceinline__ static void wait_for_turn() {
    ptx::barrier_sync(kTurnBarrier + warpgroup(), kConsumerThreads);
  }
  __device__ __forceinline__ static void pass_turn() {
    ptx::barrier_arrive(kTurnBarrier + 1 - warpgroup(), kConsumerThreads);
  }

  /// Frees the KV tiles of an item that only the other warpgroup computes. It arrives for V tiles as if it had
  /// transposed them, but never ahead of the other warpgroup.
  __device__ __forceinline__ void skip(const WorkItem& item) {
    for (int left = item.num_kv_tiles; left > 0; --left) {
      wait_for_tiles(kv);
      free_tiles(kv);
      next_tiles();
      shared.arrive_transformed();
      shared.wait_transformed(num_multiplied++ & 1);
    }
  }

  /// Starts s = Q K^T.
  __device__ __forceinline__ static void multiply_keys(float (&s)[1][kTokens / 8][4], ptx::MatrixDescriptor q,
                                                       ptx::MatrixDescriptor keys) {
#pragma unroll
    for (int k = 0; k < Traits::Shape::kQk / 32; ++k)
      ptx::wgmma_shared<ptx::MmaType::kFloat8E4M3>(s[0], Query::columns(q, k), StoredKeys::columns(keys, k), k > 0);
    ptx::wgmma_commit();
  }

  /// The descriptor of the K tile in `slot`.
  __device__ __forceinline__ ptx::MatrixDescriptor keys(int slot) const {
    return StoredKeys::columns_descriptor(ptx::shared_address(shared.kv(slot)));
  }

  /// The V tile that is multiplied next.
  __device__ __forceinline__ char* transposed() const { return shared.widened(num_multiplied & 1); }

  /// Transposes this warp's tokens of the V tile in `slot`: its warpgroup's columns, or all if it computes the item
  /// alone. What must not be read becomes zeros: a NaN would reach the output.
  __device__ __forceinline__ void transpose(const WorkItem& item, int slot, int32_t first_token,
                                            const TokenRange& readable) const {
    char* const values = shared.kv(slot);
    if (first_token < readable.begin || first_token + kTokens > readable.end) {
      zero_rows<StoredValues, kWarpgroupThreads>(values, 0, kTokens, readable.begin - first_token,
                                                 readable.end - first_token, consumer_thread() % kWarpgroupThreads);
      sync_warpgroup();
    }
    // All warps have multiplied the tile before the last one: they do so before they arrive for the last one, and all
    // have arrived.
    transposition.template run<kChunks>(values, transposed(), 0);
    if (item.kind != kMaxKind) transposition.template run<kChunks>(values, transposed(), kChunks);
    ptx::fence_async_proxy();  // before wgmma reads it
    shared.arrive_transformed();
  }

  // The K tile at `place`, and the V tile after it.
  __device__ __forceinline__ bool are_tiles_full(const typename Shared::KvPlace& place) const {
    return is_tile_full(place) & is_tile_full(place.ahead(Shared::kParts));
  }
  __device__ __forceinline__ void wait_for_tiles(const typename Shared::KvPlace& place) const {
    wait_for_tile(place);
    wait_for_tile(place.ahead(Shared::kParts));
  }
  __device__ __forceinline__ void free_tiles(const typename Shared::KvPlace& place) const {
    __syncwarp();
    if (ptx::lane_id() != 0) return;
#pragma unroll
    for (int part = 0; part < 2 * Shared::kParts; ++part) ptx::mbarrier_arrive(shared.kv_free(place.slot + part));
  }
  __device__ __forceinline__ void next_tiles() { kv = kv.ahead(2 * Shared::kParts); }

  /// Whether products must still be turned into scores, even where nothing is masked.
  __device__ __forceinline__ bool changes_scores() const {
    if constexpr (VariantHooks<Variant>::kMask) return true;
    const Variant variant = this->variant(0);
    bool changes = transforms_logits(variant);
    if constexpr (Variant::kHasScales) changes |= variant.scales.k.is_of_requests();
    return changes;
  }

  /// Starts partial = P V.
  __device__ __forceinline__ static void multiply_values(float (&partial)[kVColumns / 8][4],
                                                         const uint32_t (&p)[kTokens / 32][4],
                                                         ptx::MatrixDescriptor values) {
#pragma unroll
    for (int k = 0; k < kTokens / 32; ++k)
      ptx::wgmma_registers<ptx::MmaType::kFloat8E4M3>(partial, p[k], Transposed::columns(values, k), k > 0);
    ptx::wgmma_commit();
  }

  /// Turns scores into probabilities times 2^kShift, and adds them to the rows' sums.
  __device__ __forceinline__ static void exponentiate(State& state, float (&s)[1][kTokens / 8][4]) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float base = state.base(0, half) - kShift;
      float added = 0.0f;
#pragma unroll
      for (int n = 0; n < kTokens / 8; ++n) {
        s[0][n][2 * half] = ptx::ex2(s[0][n][2 * half] * state.scale - base);
        s[0][n][2 * half + 1] = ptx::ex2(s[0][n][2 * half + 1] * state.scale - base);
        added += s[0][n][2 * half] + s[0][n][2 * half + 1];
      }
      state.sum[0][half] += added;
    }
  }

  /// Packs a lane's probabilities as A of wgmma, 32 tokens at a time, in the order of TransposedValues.
  __device__ __forceinline__ static void pack(const float (&s)[1][kTokens / 8][4], uint32_t (&p)[kTokens / 32][4]) {
#pragma unroll
    for (int k = 0; k < kTokens / 32; ++k) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float (&first)[4] = s[0][4 * k + i / 2 * 2];
        const float (&second)[4] = s[0][4 * k + i / 2 * 2 + 1];
        const int row = i % 2 * 2;
        p[k][i] = ptx::pack_e4m3(first[row], first[row + 1]) |
                  static_cast<uint32_t>(ptx::pack_e4m3(second[row], second[row + 1])) << 16;
      }
    }
  }

  /// o = o * correction + partial.
  __device__ __forceinline__ static void add(State& state, const float (&correction)[2],
                                             const float (&partial)[kVColumns / 8][4]) {
#pragma unroll
    for (int n = 0; n < kVColumns / 8; ++n) {
#pragma unroll
      for (int i = 0; i < 4; ++i) state.o[0][n][i] = state.o[0][n][i] * correction[i / 2] + partial[n][i];
    }
  }

  /// Writes the warp's rows as they would be if exponentials were not shifted.
  __device__ __forceinline__ void write(State& state, const WorkItem& item, int first_row, int q_slot) const {
    constexpr float kUnshifted[2] = {kUnshift, kUnshift};
    state.scale_output(0, kUnshifted);
    state.sum[0][0] *= kUnshifted[0];
    state.sum[0][1] *= kUnshifted[1];
    Base::write(state, item, first_row, q_slot);
  }

  /// Computes an item whose rows this warpgroup multiplies.
  __device__ __forceinline__ void run_wgmma_item(const WorkItem& item, int q_slot) {
    const int first_row = consumer_warp() * 16;
    float s[1][kTokens / 8][4];
    float partial[kVColumns / 8][4];
    const bool changes = changes_scores();
    wait_for_tiles(kv);
    ptx::wgmma_fence();
    multiply_keys(s, query(q_slot), keys(kv.slot));

    State state;
    state.scale = scale(item);
    Rows rows(params, item.rows, item.group, item.kv_head, first_row);
    const TokenRange unmasked = unmasked_tokens(params, item, first_row, 16);
    const TokenRange readable = item.readable;
    int32_t token = Base::enter(first_start(item), rows);
    for (int left = item.num_kv_tiles;;
         token = kSkips ? Base::enter(next_start(item, token, left), rows) : token + kTokens) {
      transpose(item, kv.ahead(Shared::kParts).slot, token, readable);
      ptx::wgmma_wait<0>();
      ptx::wgmma_fence_operand(s[0]);
      free_tiles(kv);
      next_tiles();

      if (changes || token < unmasked.begin || token + kTokens > unmasked.end)
        finish_scores(item, s, first_row, token, unmasked, rows);
      const ptx::MatrixDescriptor values = Transposed::columns_descriptor(ptx::shared_address(transposed()));
      float correction[2] = {1.0f, 1.0f};
      state.raise_maximum(0, s[0], correction, kSlack);
      exponentiate(state, s);
      uint32_t p[kTokens / 32][4];
      pack(s, p);

      if (item.kind == kMaxKind) wait_for_turn();
      shared.wait_transformed(num_multiplied & 1);
      ptx::wgmma_fence();
      multiply_values(partial, p, values);
      ++num_multiplied;
      const bool is_last = --left == 0;
      const bool are_full = !is_last && are_tiles_full(kv);
      const ptx::MatrixDescriptor q = query(q_slot), k = keys(kv.slot);
      ptx::wgmma_wait<0>();
      ptx::wgmma_fence_operand(partial);
      add(state, correction, partial);
      if (is_last) break;
      if (!are_full) wait_for_tiles(kv);
      ptx::wgmma_fence();
      multiply_keys(s, q, k);
      if (item.kind == kMaxKind) pass_turn();
    }
    if (item.kind == kMaxKind) pass_turn();
    sync_warpgroup();  // all of its products with Q are done: the rows of O go through the Q tile
    write(state, item, first_row, q_slot);
  }
};

}  // namespace attn::sm90
