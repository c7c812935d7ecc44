// Prefill where Q, K and V are e4m3: row tiles of 32 rows and more multiply 8-bit elements with wgmma.
//
// Probabilities are rounded to e4m3, after a factor that uses its range; sums are of the values before rounding. Tensor
// cores add products of 8-bit elements with about 14 bits, too few for long sums. Each KV tile's P V is therefore
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
#include "attention/sm90/output.cuh"
#include "attention/sm90/prepared_tiles.cuh"
#include "attention/sm90/scores.cuh"
#include "attention/sm90/traits.cuh"
#include "attention/tile/warp_state.cuh"
#include "common/elements.cuh"
#include "common/ptx/mma.cuh"
#include "common/ptx/warp.cuh"
#include "common/ptx/wgmma.cuh"

namespace attn::sm90 {

/// V as wgmma takes it: products of 8-bit elements want the k dimension, here tokens, along the rows of both matrices.
/// A row for each column of V. Its tokens are permuted such that a lane's probabilities are four neighboring ones: of
/// every 16, number 4t + 2h + i is token 8h + 2t + i (t below 4, h and i below 2).
template <int kTokens, int kColumns>
using TransposedValues = SwizzledTile<Float8E4M3, kTokens, kColumns>;

/// Transposes V tiles; holds what a lane needs to know for that. ldmatrix with .trans moves pairs of columns, which are
/// then taken apart. Each of a warpgroup's four warps takes 32 tokens, in chunks of 16 columns. Of the eight rows that
/// stmatrix writes together the last four are of the other parity than the first four, so that all fall into different
/// banks.
template <class Values, class Transposed>
struct Transposition {
  static_assert(Transposed::kHeadColumns == 128 && Values::kBlocks == 1, "a row is 128 bytes");
  uint32_t from, to;  // bytes from the beginnings of the tiles
  uint32_t parity;    // selects the bytes of the lane's first word

  /// first: the chunk that run() counts from.
  __device__ __forceinline__ explicit Transposition(int first) {
    const int lane = ptx::lane_id();
    const int warp = ptx::thread_id() / 32 % 4;
    const int matrix = lane / 8, row = lane % 8;
    const int column = 2 * row + (matrix % 2 ^ row / 4);
    from = Values::offset(warp * 32 + lane, 0) ^ first << 4;
    to = Transposed::offset(column, warp * 2 + matrix / 2) + first * 16 * Transposed::kRowBytes;
    parity = lane < 16 ? 0x6420 : 0x7531;
    ptx::keep(from);
    ptx::keep(to);
    ptx::keep(parity);
  }

  /// Transposes kChunks chunks of columns of a V tile, from `first` on, by the four warps of a warpgroup. ldmatrix
  /// takes long: all chunks are loaded before the first is stored.
  template <int kChunks>
  __device__ __forceinline__ void run(const char* values, char* transposed, int first) const {
    const uint32_t source = ptx::shared_address(values) + (from ^ first << 4);
    const uint32_t target = ptx::shared_address(transposed) + to + first * 16 * Transposed::kRowBytes;
    const uint32_t other_parity = parity ^ 0x1111;
    uint32_t pairs[kChunks][4];  // of eight tokens each
#pragma unroll
    for (int chunk = 0; chunk < kChunks; ++chunk) ptx::ldmatrix_x4_trans(pairs[chunk], source ^ chunk << 4);
#pragma unroll
    for (int chunk = 0; chunk < kChunks; ++chunk) {
      const uint32_t (&of)[4] = pairs[chunk];
      const uint32_t words[4] = {__byte_perm(of[0], of[1], parity), __byte_perm(of[0], of[1], other_parity),
                                 __byte_perm(of[2], of[3], parity), __byte_perm(of[2], of[3], other_parity)};
      ptx::stmatrix_x4(target + chunk * 16 * Transposed::kRowBytes, words);
    }
  }
};

template <class Traits>
struct Float8Prefill {
  using Variant = typename Traits::Variant;
  using Shared = SharedMemory<Traits>;
  using Place = typename Shared::KvPlace;
  using Walk = KvWalk<Traits>;
  using Query = QTile<Traits>;
  using Keys = KTile<Traits>;
  using Values = VTile<Traits>;
  static constexpr int kTokens = Traits::kTuning.kv_tile;
  static constexpr bool kSkipsTiles = Variant::kSkipsTiles;     // variants with sparse masks
  static constexpr bool kMasks = VariantHooks<Variant>::kMask;  // variants with masks
  static constexpr int kColumns = Traits::kVColumns;
  using State = WarpState<typename Traits::Element, kColumns, 1>;  // of one warp, which has 16 rows
  using Transposed = TransposedValues<kTokens, kColumns>;
  static constexpr int kChunks = Values::kHeadChunks / 2;  // of V, that a warpgroup transposes
  static_assert(Transposed::kBlockBytes <= Shared::kLayout.transposed_bytes);
  static_assert(Shared::kKvParts % (2 * Shared::kParts) == 0, "the parts of a KV tile follow one another");

  /// Probabilities are multiplied by 2^kShift, and are up to 2^kSlack before, because a row's maximum is left as it is
  /// until a score exceeds it by that much, to base 2: together they stay below e4m3's largest number, 448 = 2^8.8.
  static constexpr float kShift = 8.0f;
  static constexpr float kSlack = 0.75f;
  static constexpr float kUnshift = 1.0f / (1 << static_cast<int>(kShift));

  const TmaParams& tma_params;
  KvRing<Traits>& ring;
  const Shared& shared = ring.shared;
  const AttentionParams& params = tma_params.attention;
  const Scores<Traits, SoftCap::kFast> scores{params};
  const Transposition<Values, Transposed> transposition{warpgroup() * kChunks};
  uint32_t num_multiplied = 0;  // V tiles: the next is transposed into the one or the other of two

  __device__ __forceinline__ Float8Prefill(const TmaParams& tma_params_, KvRing<Traits>& ring_)
      : tma_params(tma_params_), ring(ring_) {
    if (warpgroup() == 1) pass_turn();  // the first warpgroup has the first turn
  }

  /// Computes an item whose rows this warpgroup multiplies.
  __device__ __forceinline__ void run(const WorkItem& item, int q_stage) {
    const int first_row = consumer_warp() * kWarpRows;
    float s[1][kTokens / 8][4];
    float partial[kColumns / 8][4];
    const bool changes = changes_scores();

    // Start S(0) = Q K(0)^T. Meanwhile, set up the rows' state.
    wait_for_tiles(ring.kv);
    ptx::wgmma_fence();
    multiply_keys(s, query(q_stage), keys(ring.kv.index));
    State state;
    state.scale = scores.scale(item);
    LaneRows<Variant, 1> rows(params, item.rows, item.group, item.kv_head, first_row);
    const auto constants = scores.constants(item, first_row);
    const TokenRange readable = item.readable;
    int32_t token = Walk::enter(Walk::first(params, item), rows);

    for (int left = item.num_kv_tiles;;
         token = kSkipsTiles ? Walk::enter(Walk::next(params, item, token, left), rows) : token + kTokens) {
      // Transpose V(i), while S(i) is under way.
      transpose(item, ring.kv.ahead(Shared::kParts).index, token, readable);
      ptx::wgmma_wait<0>();
      ptx::wgmma_fence_operand(s[0]);
      free_tiles(ring.kv);
      next_tiles();

      // P(i) = exp2(S(i) - maximum), while the other warpgroup has the tensor cores.
      if (changes || token < constants.unmasked.begin || token + kTokens > constants.unmasked.end)
        scores.finish(item, s, first_row, token, constants, rows);
      const ptx::MatrixDescriptor values = Transposed::columns_descriptor(ptx::shared_address(transposed()));
      float correction[2] = {1.0f, 1.0f};
      state.raise_maximum(0, s[0], correction, kSlack);
      float added[2];
      exponentiate(state, s, added, kShift);
      state.sum[0][0] += added[0];
      state.sum[0][1] += added[1];
      uint32_t p[kTokens / 32][4];
      pack(s, p);

      // P(i) V(i). Meanwhile, prepare what the next product takes.
      if (item.kind == kTwoWarpgroupKind) wait_for_turn();
      shared.wait_transformed(num_multiplied & 1);
      ptx::wgmma_fence();
      multiply_values(partial, p, values);
      ++num_multiplied;
      const bool is_last = --left == 0;
      const bool are_full = !is_last && are_tiles_full(ring.kv);
      const ptx::MatrixDescriptor q = query(q_stage), k = keys(ring.kv.index);
      ptx::wgmma_wait<0>();
      ptx::wgmma_fence_operand(partial);
      add(state, correction, partial);
      if (is_last) break;

      // Start S(i + 1) = Q K(i + 1)^T.
      if (!are_full) wait_for_tiles(ring.kv);
      ptx::wgmma_fence();
      multiply_keys(s, q, k);
      if (item.kind == kTwoWarpgroupKind) pass_turn();
    }
    if (item.kind == kTwoWarpgroupKind) pass_turn();

    // Epilogue: the state is as if exponentials were not shifted. All of the warpgroup's products with Q are done, so
    // the rows of O go through the Q tile.
    sync_warpgroup();
    constexpr float kUnshifted[2] = {kUnshift, kUnshift};
    state.scale_output(0, kUnshifted);
    state.sum[0][0] *= kUnshift;
    state.sum[0][1] *= kUnshift;
    write_rows<Traits>(tma_params, item, state, first_row, shared.q(q_stage));
  }

  /// Skips the KV tiles of an item that only the other warpgroup computes. It arrives for V tiles as if it had
  /// transposed them, but never ahead of the other warpgroup.
  __device__ __forceinline__ void skip(const WorkItem& item) {
    for (int left = item.num_kv_tiles; left > 0; --left) {
      wait_for_tiles(ring.kv);
      free_tiles(ring.kv);
      next_tiles();
      shared.arrive_transformed();
      shared.wait_transformed(num_multiplied++ & 1);
    }
  }

  // In items that both warpgroups multiply they take turns: one starts its P V and its next Q K^T while the other turns
  // scores into probabilities. Both have as many turns in an item.
  __device__ __forceinline__ static void wait_for_turn() {
    ptx::barrier_sync(kTurnBarrier + warpgroup(), kSharingThreads);
  }
  __device__ __forceinline__ static void pass_turn() {
    ptx::barrier_arrive(kTurnBarrier + 1 - warpgroup(), kSharingThreads);
  }

  /// Starts s = Q K^T.
  __device__ __forceinline__ static void multiply_keys(float (&s)[1][kTokens / 8][4], ptx::MatrixDescriptor q,
                                                       ptx::MatrixDescriptor keys) {
#pragma unroll
    for (int k = 0; k < Traits::Shape::kQk / 32; ++k)
      ptx::wgmma_shared<ptx::MmaType::kFloat8E4M3>(s[0], Query::columns(q, k), Keys::columns(keys, k), k > 0);
    ptx::wgmma_commit();
  }

  __device__ __forceinline__ ptx::MatrixDescriptor query(int stage) const {
    return Query::columns_descriptor(ptx::shared_address(shared.q(stage)) + warpgroup() * 64 * Query::kRowBytes);
  }
  __device__ __forceinline__ ptx::MatrixDescriptor keys(int part) const {
    return Keys::columns_descriptor(ptx::shared_address(shared.kv(part)));
  }

  /// The V tile that is multiplied next.
  __device__ __forceinline__ char* transposed() const { return shared.transposed(num_multiplied & 1); }

  /// Transposes this warp's tokens of the V tile at `part`: its warpgroup's columns, or all if it computes the item
  /// alone. What must not be read becomes zeros: a NaN would reach the output.
  __device__ __forceinline__ void transpose(const WorkItem& item, int part, int32_t first_token,
                                            const TokenRange& readable) const {
    char* const values = shared.kv(part);
    clear_unreadable<Values, kTokens>(values, first_token, readable);
    // All warps have multiplied the tile before the last one: they do so before they arrive for the last one, and all
    // have arrived.
    transposition.template run<kChunks>(values, transposed(), 0);
    if (item.kind != kTwoWarpgroupKind) transposition.template run<kChunks>(values, transposed(), kChunks);
    ptx::fence_async_proxy();  // before wgmma reads it
    shared.arrive_transformed();
  }

  // The K tile at `place`, and the V tile after it.
  __device__ __forceinline__ bool are_tiles_full(const Place& place) const {
    return ring.is_tile_full(place) & ring.is_tile_full(place.ahead(Shared::kParts));
  }
  __device__ __forceinline__ void wait_for_tiles(const Place& place) const {
    ring.wait_for_tile(place);
    ring.wait_for_tile(place.ahead(Shared::kParts));
  }
  __device__ __forceinline__ void free_tiles(const Place& place) const {
    __syncwarp();
    if (ptx::lane_id() != 0) return;
#pragma unroll
    for (int part = 0; part < 2 * Shared::kParts; ++part) ptx::mbarrier_arrive(shared.kv_free(place.index + part));
  }
  __device__ __forceinline__ void next_tiles() { ring.kv = ring.kv.ahead(2 * Shared::kParts); }

  /// Whether products must still be turned into scores, even where nothing is masked.
  __device__ __forceinline__ bool changes_scores() const {
    if constexpr (kMasks) return true;
    const Variant variant = variant_of<Traits>(params, 0);
    bool changes = transforms_logits(variant);
    if constexpr (Variant::kHasScales) changes |= variant.scales.k.is_of_requests();
    return changes;
  }

  /// Starts partial = P V.
  __device__ __forceinline__ static void multiply_values(float (&partial)[kColumns / 8][4],
                                                         const uint32_t (&p)[kTokens / 32][4],
                                                         ptx::MatrixDescriptor values) {
#pragma unroll
    for (int k = 0; k < kTokens / 32; ++k)
      ptx::wgmma_registers<ptx::MmaType::kFloat8E4M3>(partial, p[k], Transposed::columns(values, k), k > 0);
    ptx::wgmma_commit();
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
                                             const float (&partial)[kColumns / 8][4]) {
#pragma unroll
    for (int n = 0; n < kColumns / 8; ++n) {
#pragma unroll
      for (int i = 0; i < 4; ++i) state.o[0][n][i] = state.o[0][n][i] * correction[i / 2] + partial[n][i];
    }
  }
};

}  // namespace attn::sm90
