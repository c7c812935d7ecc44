// Wide heads and latents: three consumer warpgroups, because the output does not fit into the registers of one.
//
// The scorer, the first warpgroup, computes scores and probabilities of a row tile of 64 rows. It leaves the
// probabilities in shared memory, with what the rows' outputs so far must be multiplied by. Each of the multipliers,
// the other two, computes half of the output's columns from them:
//
//     tensor cores  | Q K(0) |        | Q K(1), P V(0) |        | Q K(2), P V(1) | ...
//     scorer                 | exp(0) |                | exp(1) |                | exp(2) | ...
//
// Where V lies in K's bytes (MLA's latent), a KV tile is one tile in the ring, which both products read. Tiles of an
// 8-bit cache have been dequantized by the producer (dequantizing_copier.cuh).
#pragma once

#include "attention/sm90/consumer.cuh"
#include "attention/sm90/output.cuh"
#include "attention/sm90/prepared_tiles.cuh"
#include "attention/sm90/scores.cuh"
#include "attention/sm90/traits.cuh"
#include "attention/tile/warp_state.cuh"
#include "common/elements.cuh"
#include "common/ptx/warp.cuh"
#include "common/ptx/wgmma.cuh"

namespace attn::sm90 {

template <class Traits>
struct Wide {
  using Element = typename Traits::Element;
  using Variant = typename Traits::Variant;
  using Shared = SharedMemory<Traits>;
  using Place = typename Shared::KvPlace;
  using Walk = KvWalk<Traits>;
  using Query = QTile<Traits>;
  using Keys = KTile<Traits>;
  using Values = VTile<Traits>;
  static constexpr int kTokens = Traits::kTuning.kv_tile;
  static constexpr int kColumns = Traits::kVColumns;              // of one warpgroup
  static constexpr bool kUsesSoftmax = Variant::kUsesSoftmax;     // all variants but those with custom weights
  static constexpr bool kSkipsTiles = Variant::kSkipsTiles;       // variants with sparse masks
  static constexpr bool kConvertsQuery = Traits::kConvertsQuery;  // Q of another 16-bit type than the cache
  static constexpr bool kProducerDequantizes = Traits::kDequantizesOnLoad;  // 8-bit caches
  static constexpr bool kLoadsScaled = Traits::kLoadsScaled;                // latents of 8 bits: one tile, with scales
  static constexpr bool kHalvesRowTiles = Traits::kIsLatent;                // latents: two CTAs share a row tile
  static constexpr int kRows = Traits::kTuning.q_rows();
  using State = WarpState<Element, kColumns, 1>;
  using Probabilities = SwizzledTile<Element, kTokens, kRows>;
  using Half = SwizzledTile<typename Traits::OutElement, kColumns, kRows>;  // of O, where Q was
  static_assert(kTokens == kBlockColumns && kColumns % 128 == 0 && kRows == 64 && Shared::kQStages == 1);
  static_assert(Traits::kTuning.kv_stages == 2 && Shared::kParts == 2);
  static_assert(Traits::kRewritesQuery == kConvertsQuery && !Traits::kTransformsCache,
                "transforms are not supported with wide heads");

  const TmaParams& tma_params;
  KvRing<Traits>& ring;
  const Shared& shared = ring.shared;
  const AttentionParams& params = tma_params.attention;
  const Scores<Traits> scores{params};
  RingPlace<1> published{};  // the next probabilities, or the states at the end of an item

  __device__ __forceinline__ static bool is_scorer() { return warpgroup() == 0; }

  /// This warp's first row in the row tile.
  __device__ __forceinline__ static int first_row() { return consumer_warp() % 4 * 16; }
  /// The first of this lane's two rows.
  __device__ __forceinline__ static int own_row() { return first_row() + ptx::lane_id() / 4; }

  // Places of the KV tile whose K is at ring.kv, and of the next one. A place is where the left part lies, the columns
  // that the first multiplier takes.
  __device__ __forceinline__ bool v_is_k() const {
    return kProducerDequantizes ? kLoadsScaled : tma_params.v_is_k != 0;
  }
  __device__ __forceinline__ Place values() const { return v_is_k() ? ring.kv : ring.kv.ahead(2); }
  __device__ __forceinline__ Place next_keys() const { return ring.kv.ahead(v_is_k() ? 2 : 4); }
  __device__ __forceinline__ static Place right_of(const Place& place) { return Place{place.index + 1, place.parity}; }

  // Floats of each row, for the multipliers.
  __device__ __forceinline__ float* maxima() const { return shared.row_states(); }
  __device__ __forceinline__ float* sums() const { return shared.row_states() + kRows; }
  __device__ __forceinline__ float* corrections() const { return shared.row_states() + 2 * kRows; }

  // --- the scorer

  __device__ __forceinline__ void score(const WorkItem& item) {
    State state;  // without an output
    state.scale = scores.scale(item);
    if constexpr (kConvertsQuery) rewrite_query<Traits, kWarpgroupThreads>(params, item, shared.q(0), 0, kRows);
    if constexpr (!kUsesSoftmax) state.start_sum(true);
    LaneRows<Variant, 1> rows(params, item.rows, item.group, item.kv_head, first_row());
    const auto constants = scores.constants(item, first_row());
    KvTileStart start = Walk::first(params, item);
    for (int left = item.num_kv_tiles; left > 0; ring.kv = next_keys()) {
      // S = Q K^T
      float s[1][kTokens / 8][4];
      multiply_keys_as_they_come(s);
      const int32_t token = Walk::enter(start, rows);
      --left;
      if constexpr (kSkipsTiles)
        start = Walk::next(params, item, token, left);  // early: it may have to be loaded
      else
        start.token = token + kTokens;
      ptx::wgmma_wait<0>();
      ptx::wgmma_fence_operand(s[0]);
      if (!v_is_k()) {
        shared.free_kv(ring.kv, 1);
        shared.free_kv(right_of(ring.kv), 1);
      }

      // P = softmax(S)
      float added[2] = {0.0f, 0.0f}, correction[2] = {1.0f, 1.0f};
      scores.finish(item, s, first_row(), token, constants, rows);
      if constexpr (kUsesSoftmax) {
        state.raise_maximum(0, s[0], correction);
        exponentiate(state, s, added);
      }
      state.sum[0][0] += added[0];
      state.sum[0][1] += added[1];

      // Publish P. The producer has zeroed the rows that must not be read of tiles that it dequantizes.
      if (!kProducerDequantizes && (token < item.readable.begin || token + kTokens > item.readable.end)) {
        wait_unread();  // then V of the KV tile before has come, and the barriers are in the phase of this one's
        ring.wait_for_tile(values());
        clear_unreadable<Values, kTokens>(shared.kv(values().index), token, item.readable);
      }
      publish_probabilities(s, correction);
    }
    publish_states(state);
  }

  /// Starts s = Q K^T, right part first: it arrives first.
  __device__ __forceinline__ void multiply_keys_as_they_come(float (&s)[1][kTokens / 8][4]) const {
    constexpr int kLeftSteps = kColumns / 16, kSteps = Traits::Shape::kQkMultiplied / 16;
    const ptx::MatrixDescriptor query = Query::columns_descriptor(ptx::shared_address(shared.q(0)));
    const ptx::MatrixDescriptor keys = Keys::columns_descriptor(ptx::shared_address(shared.kv(ring.kv.index)));
    shared.wait_kv_full(right_of(ring.kv));
    ptx::wgmma_fence();
#pragma unroll
    for (int k = kLeftSteps; k < kSteps; ++k)
      ptx::wgmma_shared<Element::kMmaType>(s[0], Query::columns(query, k), Keys::columns(keys, k), k > kLeftSteps);
    shared.wait_kv_full(ring.kv);
    ptx::wgmma_fence();
#pragma unroll
    for (int k = 0; k < kLeftSteps; ++k)
      ptx::wgmma_shared<Element::kMmaType>(s[0], Query::columns(query, k), Keys::columns(keys, k), 1);
    ptx::wgmma_commit();
  }

  /// Waits until no warp reads what was published before.
  __device__ __forceinline__ void wait_unread() const { ptx::mbarrier_wait(shared.p_free(), published.parity ^ 1); }

  __device__ __forceinline__ void publish() {
    Shared::arrive_as_warp(shared.p_full(), 1);
    published.next();
  }

  __device__ __forceinline__ void publish_probabilities(const float (&s)[1][kTokens / 8][4],
                                                        const float (&correction)[2]) {
    uint32_t p[kTokens / 16][4];
    pack_probabilities<Element>(s, p);
    wait_unread();
    const uint32_t rows = ptx::shared_address(shared.probabilities()) + first_row() * Probabilities::kRowBytes +
                          Probabilities::rows_first(ptx::lane_id());
#pragma unroll
    for (int k = 0; k < kTokens / 16; ++k) ptx::stmatrix_x4(Probabilities::block(rows, 0, k), p[k]);
    if (ptx::lane_id() % 4 == 0) {
      corrections()[own_row()] = correction[0];
      corrections()[own_row() + 8] = correction[1];
    }
    ptx::fence_async_proxy();
    publish();
  }

  __device__ __forceinline__ void publish_states(const State& state) {
    const float sum[2] = {state.row_sum(0, 0), state.row_sum(0, 1)};
    wait_unread();
    if (ptx::lane_id() % 4 == 0) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        maxima()[own_row() + half * 8] = state.maximum[0][half];
        sums()[own_row() + half * 8] = sum[half];
      }
    }
    publish();
  }

  // --- the multipliers

  /// Which half of the output's columns this warpgroup has.
  __device__ __forceinline__ static int half() { return warpgroup() - 1; }

  __device__ __forceinline__ void wait_published() const { ptx::mbarrier_wait(shared.p_full(), published.parity); }

  __device__ __forceinline__ void free_published() {
    Shared::arrive_as_warp(shared.p_free(), 1);
    published.next();
  }

  __device__ __forceinline__ void multiply(const WorkItem& item) {
    State state;
    state.scale = scores.scale(item);
    for (int left = item.num_kv_tiles; left > 0; --left) {
      // Wait for V and P, then rescale O.
      const Place part = values().ahead(half());
      shared.wait_kv_full(part);
      wait_published();
      const float correction[2] = {corrections()[own_row()], corrections()[own_row() + 8]};
      if (__any_sync(0xffffffffu, correction[0] != 1.0f || correction[1] != 1.0f)) state.scale_output(0, correction);

      // O += P V
      ptx::wgmma_fence_operand(state.o[0]);
      ptx::wgmma_fence();
      multiply_probabilities(state);
      ptx::wgmma_wait<0>();
      ptx::wgmma_fence_operand(state.o[0]);
      shared.free_kv(part, 1);  // the scorer has read it, too
      free_published();
      ring.kv = next_keys();
    }

    // Epilogue
    wait_published();
    const bool is_first = ptx::lane_id() % 4 == 0;  // of the row's lanes, whose sums are added up
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      state.maximum[0][i] = maxima()[own_row() + i * 8];
      state.sum[0][i] = is_first ? sums()[own_row() + i * 8] : 0.0f;
    }
    free_published();
    // All products with Q are done: the rows of O go through the Q tile.
    ItemTarget<Traits> all_columns(params, item, Shared::requests(item));
    if constexpr (kHalvesRowTiles) all_columns.partial_row += blockIdx.y * kRows;  // the half of the row tile
    const TargetColumns<ItemTarget<Traits>, Traits::OutElement::kBytes> target(all_columns, half() * kColumns);
    write_warp_rows<Half>(state, target, first_row(), shared.q(0) + half() * Half::kBlocks * Half::kBlockBytes);
  }

  /// Starts o += P V for this warpgroup's columns.
  __device__ __forceinline__ void multiply_probabilities(State& state) const {
    constexpr int kProduct = 128;  // columns of one product: the compiler takes no more in a kernel of four warpgroups
    const ptx::MatrixDescriptor probabilities =
        Probabilities::columns_descriptor(ptx::shared_address(shared.probabilities()));
    const ptx::MatrixDescriptor columns = Values::rows_descriptor(
        ptx::shared_address(shared.kv(values().index)) + half() * (kColumns / kBlockColumns) * Values::kBlockBytes);
#pragma unroll
    for (int k = 0; k < kTokens / 16; ++k) {
#pragma unroll
      for (int c = 0; c < kColumns; c += kProduct) {
        ptx::wgmma_shared_rows<Element::kMmaType>(reinterpret_cast<float (&)[kProduct / 8][4]>(state.o[0][c / 8]),
                                                  Probabilities::columns(probabilities, k),
                                                  Values::rows(columns, k, c / kBlockColumns), 1);
      }
    }
    ptx::wgmma_commit();
  }
};

}  // namespace attn::sm90
