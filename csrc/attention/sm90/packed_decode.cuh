// Decode over a cache whose K or V has 4 bits. Tiles stay packed: row tiles of 16 rows, multiplied with mma.sync as in
// decode.cuh. But tokens and columns of V are the rows of products. Products have 8 columns, for 8 rows of Q: with 8
// query heads or fewer for a KV head, a decode has half of the products, scores and outputs of decode.cuh.
//
// The PackedNumbers of K's type and of V's say how a word becomes pairs of 16-bit numbers, and where scales multiply:
// int4_numbers.cuh, fp4_numbers.cuh, int8_numbers.cuh. Their members:
// - kWordColumns: numbers of a word. Pairs are numbers (i, i + 4) of eight, (i, i + 2) of four
// - Multiplied: their type
// - kExponent, kOddExponent: pairs with even i are 2^-kExponent times as large as the numbers, others 2^-kOddExponent
// - kHasZeroPoints: Keys and Values subtract zero points
// - kWeighsTokens: a scale of V for each token multiplies probabilities
// - kHeadroom: the probability of a new maximum is 2^kHeadroom
// - Keys, Values: scales of a warp's tokens, for one step. Numbers that are only K's have no Values, and none of the
//   members that say how V is multiplied
//
// The two warpgroups take KV tiles in turn, their four warps a quarter of the tokens. A stage of the ring has a packed
// tile for each of them (TmaParams::k_packed). The states of all eight warps merge in shared memory at the end.
#pragma once

#include "attention/sm90/consumer.cuh"
#include "attention/sm90/fp4_numbers.cuh"
#include "attention/sm90/int4_numbers.cuh"
#include "attention/sm90/int8_numbers.cuh"
#include "attention/sm90/output.cuh"
#include "attention/sm90/prepared_tiles.cuh"
#include "attention/sm90/scores.cuh"
#include "attention/sm90/traits.cuh"
#include "attention/tile/rotation.cuh"
#include "attention/tile/row_tile.cuh"
#include "common/elements.cuh"
#include "common/ptx/math.cuh"
#include "common/ptx/mma.cuh"
#include "common/ptx/warp.cuh"

namespace attn::sm90 {

ATTN_HD constexpr float power_of_2(int exponent) {
  float power = 1.0f;
  for (int i = 0; i < exponent; ++i) power *= 2.0f;
  for (int i = 0; i > exponent; --i) power *= 0.5f;
  return power;
}

/// Reduces the values of the eight lanes that have the same rows: lane % 4 is the same.
template <class Combine>
__device__ __forceinline__ float over_tokens(float x, const Combine& combine) {
#pragma unroll
  for (int step = 4; step < 32; step *= 2) x = combine(x, __shfl_xor_sync(ptx::kAllLanes, x, step));
  return x;
}

/// Rows of Q, as Multiplied, as the second operand of products. Lane (g, t) has row g of each eight, columns 8t to 8t +
/// 7 of each 32 in the order of pairs; over words of four, columns 4t to 4t + 3 of each 16. Columns of odd pairs are
/// divided by 2^(kExponent - kOddExponent). Numbers: K's.
template <class Traits, class Numbers, int kEights>
struct PackedQuery {
  using Element = typename Traits::Element;
  using Multiplied = typename Numbers::Multiplied;
  using Query = QTile<Traits>;
  static constexpr int kSteps = Traits::Shape::kQkMultiplied / 16;
  static_assert(kSteps % 2 == 0);
  uint32_t pairs[kEights][kSteps][2];
  float to_score[kEights][2];  // factors of products, for rows 2t and 2t + 1
  float sums[kEights][2];      // of these rows, times 2^-kExponent; for zero points

  /// `tile`: its first address. `rows`: that exist; others become zeros. `factor`: multiplies K.
  __device__ __forceinline__ void load(uint32_t tile, int rows, float factor) {
    const int lane = ptx::lane_id();
    constexpr bool kHasEights = Numbers::kWordColumns == 8;  // neighboring columns of a lane
    const uint32_t address = kHasEights ? tile + Query::offset(lane / 4, lane % 4)
                                        : tile + Query::offset(lane / 4, lane % 4 / 2) + lane % 2 * 8;
#pragma unroll
    for (int b = 0; b < kEights; ++b) {
      float largest = 0.0f;
      const bool exists = 8 * b + lane / 4 < rows;
#pragma unroll
      for (int c = 0; c < kSteps / 2; ++c) {
        uint32_t words[4];
        const uint32_t from = (address ^ c % 2 * 64) + c / 2 * Query::kBlockBytes + b * 8 * Query::kRowBytes;
        if constexpr (kHasEights) {
          ptx::load_words(words, from);
        } else {
          uint32_t halves[2][2];
          ptx::load_words(halves[0], from);
          ptx::load_words(halves[1], from ^ 32);
          words[0] = halves[0][0], words[2] = halves[0][1], words[1] = halves[1][0], words[3] = halves[1][1];
        }
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          if (!exists) words[i] = 0;
          largest = fmaxf(largest, fmaxf(fabsf(Element::unpack(words[i])), fabsf(Element::unpack(words[i] >> 16))));
        }
#pragma unroll
        for (int step = 0; step < 2; ++step) {
          pairs[b][2 * c + step][0] = __byte_perm(words[step], words[step + 2], 0x5410);
          pairs[b][2 * c + step][1] = __byte_perm(words[step], words[step + 2], 0x7632);
        }
      }
      convert(b, ptx::quad_max(largest), factor);
    }
  }

 private:
  /// Converts the lane's row of eight number b. A power of 2 brings the row's largest number to [2^14, 2^15).
  __device__ __forceinline__ void convert(int b, float largest, float k_factor) {
    constexpr float kOdd = power_of_2(Numbers::kOddExponent - Numbers::kExponent);
    const int32_t exponent =  // biased
        min_of(127 + 14 + 127 - static_cast<int32_t>(__float_as_uint(largest) >> 23), 253);
    const float factor = __uint_as_float(static_cast<uint32_t>(exponent) << 23);
    const float back = __uint_as_float(static_cast<uint32_t>(min_of(254 + Numbers::kExponent - exponent, 254)) << 23);
    float sum = 0.0f;
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const float of_pair = i == 0 ? factor : factor * kOdd;
        const uint32_t pair = pairs[b][step][i];
        const uint32_t packed =
            Multiplied::pack(Element::unpack(pair) * of_pair, Element::unpack(pair >> 16) * of_pair);
        pairs[b][step][i] = packed;
        if constexpr (Numbers::kHasZeroPoints)
          sum += (Multiplied::unpack(packed) + Multiplied::unpack(packed >> 16)) *
                 power_of_2(i == 0 ? -Numbers::kExponent : -Numbers::kOddExponent);
      }
    }
    if constexpr (Numbers::kHasZeroPoints) sum = ptx::quad_add(sum);
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int lane = (ptx::lane_id() % 4 * 2 + r) * 4;
      if constexpr (Numbers::kHasZeroPoints) sums[b][r] = __shfl_sync(ptx::kAllLanes, sum, lane);
      to_score[b][r] = __shfl_sync(ptx::kAllLanes, back, lane) * k_factor;
    }
  }
};

/// A warp's rows of a work item in registers. Lane (g, t) = (lane / 4, lane % 4) holds rows 2t and 2t + 1 of each
/// eight. Of each 32 columns of O it holds columns 4g to 4g + 3: product i of two has columns i and i + 2, in its rows
/// g and g + 8.
///
/// zeros: probabilities times zero points, summed. Maxima are of score * scale + log2(weight), minus kHeadroom. Sums
/// are of exp2(score * scale - maximum), over this lane's tokens. `scale` is above 0, and makes a score a logarithm to
/// base 2. Numbers: V's.
template <class Numbers, int kEights, int kColumns>
struct PackedState {
  static constexpr int kProducts = kColumns / 16;
  static constexpr float kSlack = 8.0f + Numbers::kHeadroom;  // WarpState's, plus kHeadroom
  static_assert(!is_same<typename Numbers::Multiplied, Float16> || kSlack < 16.0f, "probabilities are below 2^kSlack");
  float o[kEights][kProducts][4] = {};
  float zeros[kEights][4] = {};
  float maximum[kEights][2];
  float sum[kEights][2];
  float scale;

  __device__ __forceinline__ explicit PackedState(float scale_) : scale(scale_) {
#pragma unroll
    for (int b = 0; b < kEights; ++b) {
      maximum[b][0] = maximum[b][1] = minus_infinity();
      sum[b][0] = sum[b][1] = 0.0f;
    }
  }

  /// As WarpState::start_sum().
  __device__ __forceinline__ void start_sum(bool counts) {
#pragma unroll
    for (int b = 0; b < kEights; ++b) {
      maximum[b][0] = maximum[b][1] = 0.0f;
      sum[b][0] = sum[b][1] = counts && ptx::lane_id() / 4 == 0 ? 1.0f : 0.0f;
    }
  }

  /// Raises the maxima of rows where a score, with the logarithm of its weight, exceeds them by much.
  template <int kFragments, class Values>
  __device__ __forceinline__ void raise_maxima(const float (&s)[kEights][kFragments][4], const Values& values) {
    float logarithms[2 * kFragments];
    if constexpr (Numbers::kWeighsTokens) {
#pragma unroll
      for (int i = 0; i < 2 * kFragments; ++i) logarithms[i] = ptx::lg2(values.weights[i]);
    }
#pragma unroll
    for (int b = 0; b < kEights; ++b) {
      float highest[2];
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        highest[r] = minus_infinity();
#pragma unroll
        for (int i = 0; i < 2 * kFragments; ++i) {
          const float score = s[b][i / 2][i % 2 * 2 + r];
          if constexpr (Numbers::kWeighsTokens)
            highest[r] = fmaxf(highest[r], fmaf(score, scale, logarithms[i]));
          else
            highest[r] = fmaxf(highest[r], score);
        }
        if constexpr (!Numbers::kWeighsTokens) highest[r] *= scale;
      }
      const auto exceeds = [&](int r) { return highest[r] - maximum[b][r] > kSlack; };
      if (!__any_sync(ptx::kAllLanes, exceeds(0) || exceeds(1))) continue;
      float correction[2];
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        highest[r] = over_tokens(highest[r], [](float x, float y) { return fmaxf(x, y); });
        // Only a row's own scores raise its maximum: its bits do not depend on other rows.
        const float m = exceeds(r) ? highest[r] - Numbers::kHeadroom : maximum[b][r];
        correction[r] = m == minus_infinity() ? 1.0f : ptx::ex2(maximum[b][r] - m);
        maximum[b][r] = m;
        sum[b][r] *= correction[r];
      }
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        if constexpr (Numbers::kHasZeroPoints) zeros[b][i] *= correction[i % 2];
#pragma unroll
        for (int n = 0; n < kProducts; ++n) o[b][n][i] *= correction[i % 2];
      }
    }
  }

  /// One step of the online softmax: turns scores into probabilities, times the weights of tokens, as the second
  /// operand of products. Without softmax the scores are the probabilities.
  template <bool kUsesSoftmax, int kFragments, class Values>
  __device__ __forceinline__ void update(const float (&s)[kEights][kFragments][4], const Values& values,
                                         uint32_t (&p)[kEights][kFragments][2]) {
    if constexpr (kUsesSoftmax) raise_maxima(s, values);
#pragma unroll
    for (int b = 0; b < kEights; ++b) {
      float base[2];
#pragma unroll
      for (int r = 0; r < 2; ++r) base[r] = maximum[b][r] == minus_infinity() ? 0.0f : maximum[b][r];
#pragma unroll
      for (int f = 0; f < kFragments; ++f) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          float weighted[2];
#pragma unroll
          for (int r = 0; r < 2; ++r) {
            const float score = s[b][f][2 * i + r];
            float probability = score;
            if constexpr (kUsesSoftmax) {
              probability = ptx::ex2(score * scale - base[r]);
              sum[b][r] += probability;
            }
            if constexpr (Numbers::kWeighsTokens) probability *= values.weights[2 * f + i];
            weighted[r] = probability;
          }
          p[b][f][i] = ptx::transposed(Numbers::Multiplied::pack(weighted[0], weighted[1]));
        }
      }
    }
  }

  /// O of row r of the lane's two, columns 32 * c + 4g to 32 * c + 4g + 3.
  __device__ __forceinline__ float4 outputs(int b, int r, int c, float factor) const {
    constexpr float kEven = power_of_2(Numbers::kExponent), kOdd = power_of_2(Numbers::kOddExponent);
    const float even = factor * kEven, odd = factor * kOdd;
    const float zero = Numbers::kHasZeroPoints ? zeros[b][r] * even : 0.0f;
    const float (&first)[4] = o[b][2 * c];
    const float (&second)[4] = o[b][2 * c + 1];
    return make_float4(first[r] * even - zero, second[r] * odd - zero, first[2 + r] * even - zero,
                       second[2 + r] * odd - zero);
  }
};

template <class Traits>
struct PackedDecode {
  using KeyNumbers = PackedNumbers<Traits, typename Traits::KElement>;
  using ValueNumbers = PackedNumbers<Traits, typename Traits::VElement>;
  using Variant = typename Traits::Variant;
  using Shared = SharedMemory<Traits>;
  using Place = typename Shared::KvPlace;
  using Walk = KvWalk<Traits>;
  static constexpr bool kUsesSoftmax = Variant::kUsesSoftmax, kSkipsTiles = Variant::kSkipsTiles;
  static constexpr int kParts = Shared::kParts;
  static constexpr int kTokens = Traits::kTuning.kv_tile / 4;  // of a KV tile, that a warp takes
  static constexpr int kFreedFor = 2;  // warps: its own, and one of the warpgroup that does not read the tile
  static_assert(kParts == 2, "one for each warpgroup");

  const TmaParams& tma_params;
  KvRing<Traits>& ring;
  const AttentionParams& params{tma_params.attention};
  const Scores<Traits> scores{params};

  __device__ __forceinline__ void run(const WorkItem& item, int q_stage) {
    if (item.rows.count <= 8)
      run_rows<1>(item, q_stage);
    else
      run_rows<2>(item, q_stage);
  }

 private:
  template <int kEights>
  using Rows = LaneRows<Variant, kEights, true>;

  /// kEights: of rows.
  template <int kEights>
  __device__ __forceinline__ void run_rows(const WorkItem& item, int q_stage) {
    using State = PackedState<ValueNumbers, kEights, Traits::kVColumns>;
    constexpr int kStep = kEights == 1 ? kTokens : kTokens / 2;  // tokens at a time, as registers allow
    const Shared& shared = ring.shared;
    const int row = consumer_warp() % 4 * kTokens;  // of a KV tile
    if constexpr (Traits::kRewritesQuery)
      rewrite_query<Traits, kSharingThreads>(params, item, shared.q(q_stage), 0, kWarpRows);
    State state(scores.scale(item));
    if constexpr (!kUsesSoftmax) state.start_sum(consumer_warp() == 0);
    Rows<kEights> rows(params, item.rows, item.group, item.kv_head, 0);
    const auto constants = scores.constants(item, 0);
    PackedQuery<Traits, KeyNumbers, kEights> query;
    query.load(ptx::shared_address(shared.q(q_stage)), item.rows.count, scale_factor<Traits>(params, false));

    KvTileStart start = Walk::first(params, item);
    if (warpgroup() == 1) start = next_tile(item, start.token, 1, 1);
    for (int tile = warpgroup(); tile < item.num_kv_tiles + warpgroup();
         tile += 2, ring.kv = ring.kv.ahead(2 * kParts)) {
      const Place keys = own_part(ring.kv), values = own_part(ring.kv.ahead(kParts));
      shared.wait_kv_full(keys);
      if (tile >= item.num_kv_tiles) {  // of an odd number of tiles, the last pair's second: it does not exist
        shared.free_kv(keys, kFreedFor);
        shared.wait_kv_full(values);
        shared.free_kv(values, kFreedFor);
        continue;
      }
      const int32_t token = Walk::enter(start, rows) + row;
      start = next_tile(item, start.token, tile + 2, 2);  // early: it may have to be loaded
#pragma unroll 1
      for (int step = 0; step < kTokens; step += kStep) {
        float s[kEights][kStep / 16][4];
        multiply_keys(query, s, keys, row + step);
        if (step + kStep == kTokens) shared.free_kv(keys, kFreedFor);
        const bool all_seen = scores.finish(item, s, 0, token + step, constants, rows);
        shared.wait_kv_full(values);
        multiply_values(state, s, values, row + step, all_seen);
      }
      shared.free_kv(values, kFreedFor);
    }
    write<kEights>(state, item, q_stage);
  }

  /// Where KV tile number `number` of the item begins, `tiles` after that at `token`.
  __device__ __forceinline__ KvTileStart next_tile(const WorkItem& item, int32_t token, int number, int tiles) const {
    if constexpr (kSkipsTiles)
      return Walk::next(params, item, token, max_of(item.num_kv_tiles - number, 0));
    else
      return KvTileStart{token + tiles * Walk::kStep, false};
  }

  /// The warpgroup's part of a stage. It does not wait for the other part. All warps meet at the end of such an item:
  /// no barrier is a phase behind when a later item needs both parts.
  __device__ __forceinline__ static Place own_part(Place place) {
    place.index += warpgroup();
    return place;
  }

  /// The address of chunk number `chunk` of a token in the packed tile of part number `part`. Chunks are permuted as
  /// TMA does it with rows of 128 or 64 bytes. kTokenBytes: packed_token_bytes().
  template <int kTokenBytes>
  __device__ __forceinline__ uint32_t chunk_address(int part, int token, int chunk) const {
    if constexpr (kTokenBytes == 128)
      return ring.shared.template packed_token<128>(part, token) + ((chunk ^ (token & 7)) << 4);
    const int row = token / 2, permutation = row & (tma_params.has_token_pairs ? 7 : 3);
    return ring.shared.template packed_token<64>(part, 0) + row * 128 + (((token % 2 * 4 + chunk) ^ permutation) << 4);
  }
  /// The block of 16 tokens x 32 bytes that is `tokens` blocks below and `columns` blocks to the right of the first.
  template <int kTokenBytes>
  __device__ __forceinline__ static uint32_t block(uint32_t first, int tokens, int columns) {
    return (first ^ columns * 32) + tokens * 16 * kTokenBytes;
  }

  /// S = K Q^T, times K's scales. The rows of products are tokens. `row`: of the tile, the warp's first.
  template <int kEights, int kFragments>
  __device__ __forceinline__ void multiply_keys(const PackedQuery<Traits, KeyNumbers, kEights>& query,
                                                float (&s)[kEights][kFragments][4], const Place& keys, int row) const {
    constexpr int kBytes = packed_token_bytes<Traits>(false);
    constexpr int kPairs = KeyNumbers::kWordColumns / 2, kLoadColumns = 8 * KeyNumbers::kWordColumns;
    constexpr int kColumns = Traits::Shape::kQkMultiplied, kLoads = ceil_div(kColumns, kLoadColumns) * kFragments;
    const int lane = ptx::lane_id();  // as in PermutedRows::columns_first()
    const uint32_t k = chunk_address<kBytes>(keys.index, row + (lane & 7) + ((lane >> 4) << 3), (lane >> 3) & 1);
    uint32_t words[2][4];  // of 16 tokens x kLoadColumns columns
    ptx::ldmatrix_x4(words[0], k);
    const typename KeyNumbers::template Keys<kFragments> numbers(ring.shared, keys.index, row);
    numbers.start(query, s);
#pragma unroll
    for (int i = 0; i < kLoads; ++i) {
      const int f = i % kFragments, d = i / kFragments, next = i + 1;
      if (next < kLoads) ptx::ldmatrix_x4(words[next % 2], block<kBytes>(k, next % kFragments, next / kFragments));
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        if ((2 * d + half) * (kLoadColumns / 2) >= kColumns) break;
        uint32_t upper[kPairs], lower[kPairs];  // of eight tokens each
        numbers.split(words[i % 2][half], 2 * f, 2 * d + half, upper);
        numbers.split(words[i % 2][2 + half], 2 * f + 1, 2 * d + half, lower);
#pragma unroll
        for (int step = 0; step < kPairs / 2; ++step) {
          const uint32_t a[4] = {upper[2 * step], lower[2 * step], upper[2 * step + 1], lower[2 * step + 1]};
#pragma unroll
          for (int b = 0; b < kEights; ++b) {
            const uint32_t (&q)[2] = query.pairs[b][(2 * d + half) * (kPairs / 2) + step];
            KeyNumbers::Multiplied::mma(s[b][f], a, q[0], q[1]);
          }
        }
      }
    }
    numbers.finish(query, s);
  }

  /// O += V^T P^T. The rows of products are columns of V.
  template <class State, int kEights, int kFragments>
  __device__ __forceinline__ void multiply_values(State& state, const float (&s)[kEights][kFragments][4],
                                                  const Place& values, int row, bool all_seen) const {
    using Numbers = ValueNumbers;
    static_assert(Numbers::kWordColumns == 8, "a word has four columns of two tokens");
    constexpr int kBytes = packed_token_bytes<Traits>(true);
    constexpr int kColumns = Traits::kVColumns, kLoadsOfFragment = ceil_div(kColumns, 64);
    constexpr int kLoads = kFragments * kLoadsOfFragment;
    const int lane = ptx::lane_id();
    const uint32_t v = chunk_address<kBytes>(values.index, row + (lane & 15), lane >> 4);  // as in rows_first()
    uint32_t words[2][4];                                                                  // of 16 tokens x 64 columns
    ptx::ldmatrix_x4_trans(words[0], v);
    const typename Numbers::template Values<kFragments> numbers(ring.shared, values.index, row, all_seen);
    uint32_t p[kEights][kFragments][2];
    state.template update<kUsesSoftmax>(s, numbers, p);
#pragma unroll
    for (int i = 0; i < kLoads; ++i) {
      const int f = i / kLoadsOfFragment, d = i % kLoadsOfFragment, next = i + 1;
      if (next < kLoads)
        ptx::ldmatrix_x4_trans(words[next % 2], block<kBytes>(v, next / kLoadsOfFragment, next % kLoadsOfFragment));
      if constexpr (Numbers::kHasZeroPoints) {
        if (d == 0) numbers.add_zero_points(state.zeros, f, p);
      }
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        if (d * 64 + half * 32 >= kColumns) break;
        uint32_t upper[4], lower[4];  // tokens 0 to 7 and 8 to 15
        numbers.split(words[i % 2][2 * half], 2 * f, 2 * d + half, upper);
        numbers.split(words[i % 2][2 * half + 1], 2 * f + 1, 2 * d + half, lower);
#pragma unroll
        for (int j = 0; j < 2; ++j) {
          const uint32_t a[4] = {upper[j], upper[j + 2], lower[j], lower[j + 2]};
#pragma unroll
          for (int b = 0; b < kEights; ++b)
            Numbers::Multiplied::mma(state.o[b][d * 4 + half * 2 + j], a, p[b][f][0], p[b][f][1]);
        }
      }
    }
  }

  /// As write_merged_warps(): the states of all warps merge, eight rows at a time.
  template <int kEights, class State>
  __device__ __forceinline__ void write(State& state, const WorkItem& item, int q_stage) const {
    constexpr int kWarps = kSharingWarps, kColumns = Traits::kVColumns, kHeadColumns = OTile<Traits>::kHeadColumns;
    constexpr int kChunks = kColumns / 4;  // of 16 bytes
    static_assert(!Variant::kRotates || rotation_block(kHeadColumns) <= 128, "or halves must be joined");
    static_assert(kWarps * 8 * kChunks * 16 <= Shared::kLayout.q_stage_bytes && kChunks % 8 == 0, "they fit, permuted");
    const Shared& shared = ring.shared;
    const ItemTarget<Traits> target(params, item, Shared::requests(item));
    const int lane = ptx::lane_id(), warp = consumer_warp();
    const float v_factor = scale_factor<Traits>(params, true);
    auto* const row_maxima = reinterpret_cast<OfWarps<kWarps>*>(shared.row_states());  // [row of the tile], scaled
    auto* const row_sums = row_maxima + kWarpRows;
    char* const outputs = shared.q(q_stage);
    // [warp][row][column]; a row's chunks are permuted so that the rows which a store touches at once fall into
    // different banks.
    const auto output_chunk = [&](int of_warp, int row, int chunk) {
      return reinterpret_cast<float4*>(outputs + (of_warp * 8 + row) * kChunks * 16 + ((chunk ^ (row & 6)) << 4));
    };
#pragma unroll
    for (int b = 0; b < kEights; ++b) {
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const float sum = over_tokens(state.sum[b][r], [](float x, float y) { return x + y; });
        if (lane >= 4) continue;
        row_maxima[8 * b + 2 * lane + r].by_warp[warp] = state.maximum[b][r];
        row_sums[8 * b + 2 * lane + r].by_warp[warp] = sum;
      }
    }
    Consumers::sync();
#pragma unroll
    for (int b = 0; b < kEights; ++b) {
      float lse[2];
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const int tile_row = 8 * b + lane % 4 * 2 + r;
        const MergedRow merged =
            merge_row(target, row_maxima[tile_row], row_sums[tile_row], state.maximum[b][r], tile_row);
        lse[r] = merged.lse(target);
        if (tile_row >= item.rows.count) continue;
#pragma unroll
        for (int c = 0; c < kColumns / 32; ++c)
          *output_chunk(warp, tile_row % 8, 8 * c + lane / 4) = state.outputs(b, r, c, merged.factor * v_factor);
      }
      // As in write_merged_warps().
      if (b + 1 == kEights) Consumers::fence_outputs();
      Consumers::sync();
      write_sums<Consumers, kWarps, 8, kChunks, kHeadColumns>(
          target, [&](int row) { return 8 * b + row; }, output_chunk);
      if (warp == kWarps - 1 && lane < 4) {
#pragma unroll
        for (int r = 0; r < 2; ++r) {
          if (float* const to = target.place(8 * b + lane * 2 + r).lse; to != nullptr) *to = lse[r];
        }
      }
      if (b + 1 < kEights) Consumers::sync();  // before other rows' outputs replace these
    }
  }
};

}  // namespace attn::sm90
