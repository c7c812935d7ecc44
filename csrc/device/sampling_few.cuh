// Rows of which top-k leaves few tokens, in batches so small that a row has many CTAs: there the time is that of the longest chain of dependent steps, so this way
// has few of them. Each CTA takes a bound that about its share of some hundreds of tokens reach and sends those to the first CTA, which finds the survivors of all
// filters at one look at a histogram and one comparison of all pairs. Where that does not do (many equal values, what survives lies in one CTA's segments), the
// row goes the usual way (sampling.cuh).
#pragma once

#include "device/ptx/cluster_mail.cuh"
#include "device/ptx/named_barrier.cuh"
#include "device/sampling_candidates.cuh"

namespace attn {

template <class Source>
struct FewSurvivors {
  using Weights = typename Source::Weights;

  const Row<Source>& row;
  SamplingShared& shared;

  __device__ __forceinline__ explicit FewSurvivors(const Row<Source>& row) : row(row), shared(row.shared) {}

  static constexpr int32_t kMostTopK = 64;
  static constexpr int32_t kTokensOfK = 7;          // tokens at or above the bounds, of each that top-k asks for
  static constexpr int32_t kMostSurvivors = kSamplingThreads / 2;
  static constexpr int32_t kValueBins = 256;
  static constexpr int32_t kLaneBins = kValueBins / 32;

  /// What a CTA tells the first one of its candidates, which lie in its part of the list.
  struct Told {
    uint32_t bound;         // they are complete from here on; kNoBound: they are not
    uint32_t best_key;
    uint32_t count;
    uint32_t unused;
  };

  /// key << 32 | token of each.
  __device__ __forceinline__ uint64_t* list() const { return reinterpret_cast<uint64_t*>(shared.keys); }
  __device__ __forceinline__ Told* told() const { return reinterpret_cast<Told*>(shared.summaries); }
  __device__ __forceinline__ uint32_t mailbox() const { return ptx::shared_address(&shared.mailboxes[0]); }       // of candidates, in the first CTA
  __device__ __forceinline__ uint32_t answer() const { return ptx::shared_address(&shared.mailboxes[1]); }        // of whether they were enough, in the others
  __device__ __forceinline__ uint32_t* bins() const { return shared.bins; }
  __device__ __forceinline__ Survivor* survivors() const { return reinterpret_cast<Survivor*>(shared.bins + kValueBins); }
  __device__ __forceinline__ Racer* racers() const { return reinterpret_cast<Racer*>(survivors() + kMostSurvivors); }

  /// Of the row; the host has looked at the launch (may_leave_few in csrc/host/sampling.cpp).
  __device__ __forceinline__ bool suits() const {
    const RowSettings& settings = shared.settings;
    return settings.valid && !settings.greedy && settings.top_k > 0 && settings.top_k <= kMostTopK && !(settings.has_top_p && row.params.joint != 0);
  }

  /// Before the cluster's first barrier.
  __device__ __forceinline__ void prepare() const {
    if (row.rank == 0) bins()[threadIdx.x] = 0;
    if (threadIdx.x == 0) {
      const SamplingParams& params = row.params;
      for (const float* of_all : {params.temperature.data, params.top_p.data, params.min_p.data}) {
        if (of_all != nullptr) ptx::prefetch_l2(of_all + row.row);
      }
      for (const IndexArray& of_all : {params.top_k.array, params.seed.array, params.position.array}) {
        if (of_all) ptx::prefetch_l2(static_cast<const int32_t*>(of_all.data) + (static_cast<int64_t>(row.row) << of_all.is_int64));
      }
      ptx::mailbox_init(mailbox(), row.num_ctas);
      ptx::mailbox_init(answer(), 1);
      shared.num_listed = 0;
      shared.summary.num_candidates = 0;
    }
  }

  // Segments are dealt out one by one: the likely tokens of a model lie together, most at low ids.
  __device__ __forceinline__ int32_t first_segment() const { return row.rank + row.num_ctas * row.warp(); }
  __device__ __forceinline__ int32_t segment_step() const { return row.num_ctas * kSamplingWarps; }

  /// The largest key of what this lane reads of the row. It waits for no parameter, so it is done while those are on their way.
  __device__ __forceinline__ uint32_t read_largest() const {
    for (int32_t segment = first_segment() + segment_step(); segment < row.num_segments(); segment += segment_step()) row.prefetch(segment);
    uint32_t key = 0;
#pragma unroll 1
    for (int32_t segment = first_segment(); segment < row.num_segments(); segment += segment_step()) {
      typename Source::Vector raw[Source::kVectors];
      float v[kLaneTokens];
      row.load(segment, raw);
      row.values(raw, v);
      key = max_of(key, row.lane_max_key(v));
    }
    return key;
  }

  /// A value that about `wanted` of the warp's lanes have reached: the wanted-th largest of the lanes' largest, or a little less.
  __device__ __forceinline__ static uint32_t warp_bound(uint32_t lane_key, int32_t wanted) {
    uint32_t own = (lane_key & ~31u) | static_cast<uint32_t>(ptx::lane_id()), bound = 0;
#pragma unroll 1
    for (int32_t i = 0; i < wanted; ++i) {
      bound = ptx::warp_max(own);
      own = own == bound ? 0 : own;
    }
    return bound & ~31u;
  }

  /// The CTA's part: sends its candidates to the first one, with the bound from which on they are complete. lane_key: of read_largest().
  __device__ __forceinline__ void send_candidates(uint32_t lane_key) const {
    const int32_t warps = min_of(segment_step(), row.num_segments());
    const int32_t wanted = max_of(ceil_div(kTokensOfK * shared.settings.top_k, warps), 2);
    const uint32_t of_warp = warp_bound(lane_key, wanted);
    const uint32_t most = ptx::warp_max(lane_key);
    if (row.lane() == 0) shared.warp_best[row.warp()] = static_cast<uint64_t>(most) << 32 | of_warp;
    __syncthreads();
    // The fourth largest of the warps' bounds: one of them alone says little.
    const uint64_t of_lane = shared.warp_best[row.lane() % kSamplingWarps];
    const uint32_t ranked = (static_cast<uint32_t>(of_lane) & ~31u) | static_cast<uint32_t>(row.lane() % kSamplingWarps);
    uint32_t above = 0;
#pragma unroll
    for (int32_t w = 0; w < kSamplingWarps; ++w) above += (static_cast<uint32_t>(shared.warp_best[w]) | static_cast<uint32_t>(w)) > ranked ? 1 : 0;
    const uint32_t bound = max_of(ptx::warp_max(above == 3 ? ranked & ~31u : 0), kWholeRow);
    const uint32_t to = ptx::cluster_address(mailbox(), 0);
    const uint32_t places = ptx::cluster_address(ptx::shared_address(list() + row.rank * row.candidate_room()), 0);
    if (__any_sync(ptx::kAllLanes, lane_key >= bound)) {
      const float least = key_value(bound);
#pragma unroll 1
      for (int32_t segment = first_segment(); segment < row.num_segments(); segment += segment_step()) {
        typename Source::Vector raw[Source::kVectors];
        float v[kLaneTokens];
        row.load(segment, raw);
        row.values(raw, v);
        uint32_t chosen = 0;
#pragma unroll
        for (int32_t i = 0; i < kLaneTokens; ++i) chosen |= v[i] >= least ? 1u << i : 0u;
#pragma unroll 1
        for (; chosen != 0; chosen &= chosen - 1) {
          const int32_t token = row.token(segment, __ffs(static_cast<int32_t>(chosen)) - 1);
          const int32_t at = atomicAdd(&shared.summary.num_candidates, 1);
          if (at < row.candidate_room()) ptx::mailbox_send(to, places + at * 8, static_cast<uint64_t>(order_key(row.source.one(token))) << 32 | static_cast<uint32_t>(token));
        }
      }
    }
    __syncthreads();
    if (row.warp() != 0) return;
    const uint32_t best_key = ptx::warp_max(static_cast<uint32_t>(of_lane >> 32));
    if (row.lane() == 0) {
      const int32_t count = shared.summary.num_candidates, room = row.candidate_room();
      const uint32_t place = ptx::cluster_address(ptx::shared_address(told() + row.rank), 0);
      ptx::mailbox_send(to, place, static_cast<uint64_t>(best_key) << 32 | (count <= room ? bound : kNoBound));
      ptx::mailbox_send(to, place + 8, static_cast<uint64_t>(count));
      ptx::mailbox_announce(to, sizeof(Told) + 8 * min_of(count, room));
    }
  }

  /// The first CTA's part. False, the same in all threads: the candidates do not tell.
  __device__ __forceinline__ bool list_survivors(int32_t& num_survivors, float& reference) const {
    const bool has = row.lane() < row.num_ctas;
    const uint32_t bound = ptx::warp_max(has ? told()[row.lane()].bound : 0);
    const uint32_t best_key = ptx::warp_max(has ? told()[row.lane()].best_key : 0);
    if (bound == kNoBound || best_key >= kInfiniteKey || best_key <= kExcludedKey) return false;
    reference = key_value(best_key);
    const float range = reference - key_value(bound);
    if (!(range < 1e30f)) return false;
    const float bins_of_one = range > 0.0f ? (kValueBins - 1) / range : 0.0f;
    // body(key, token) of the candidates, a warp taking those of one CTA at a time.
    const auto for_candidates = [&](const auto& body) {
#pragma unroll 1
      for (int32_t cta = row.warp(); cta < row.num_ctas; cta += kSamplingWarps) {
        const int32_t count = static_cast<int32_t>(told()[cta].count);
#pragma unroll 1
        for (int32_t i = row.lane(); i < count; i += 32) {
          const uint64_t one = list()[cta * row.candidate_room() + i];
          const uint32_t key = static_cast<uint32_t>(one >> 32);
          if (key >= bound) body(key, static_cast<int32_t>(one));
        }
      }
    };
    const auto bin_of = [&](uint32_t key) { return static_cast<int32_t>((reference - key_value(key)) * bins_of_one); };
    for_candidates([&](uint32_t key, int32_t) { atomicAdd(&bins()[bin_of(key)], 1u); });
    __syncthreads();
    // Each warp for itself: the bin in which the k-th largest lies.
    uint32_t counts[kLaneBins], sum = 0;
#pragma unroll
    for (int32_t i = 0; i < kLaneBins; ++i) {
      counts[i] = bins()[row.lane() * kLaneBins + i];
      sum += counts[i];
    }
    uint32_t through = sum;
#pragma unroll
    for (int32_t step = 1; step < 32; step *= 2) {
      const uint32_t before = __shfl_up_sync(ptx::kAllLanes, through, step);
      through += row.lane() >= step ? before : 0;
    }
    const uint32_t wanted = static_cast<uint32_t>(shared.settings.top_k);
    uint32_t last = 0, count = through - sum;         // of this lane
#pragma unroll
    for (int32_t i = 0; i < kLaneBins; ++i) {
      const bool before = count < wanted;
      count += before ? counts[i] : 0;
      last += before ? 1 : 0;
    }
    const uint32_t reached = __ballot_sync(ptx::kAllLanes, through >= wanted);
    if (reached == 0) return false;
    const int32_t lane = __ffs(static_cast<int32_t>(reached)) - 1;
    num_survivors = static_cast<int32_t>(__shfl_sync(ptx::kAllLanes, count, lane));
    const int32_t last_bin = lane * kLaneBins + static_cast<int32_t>(__shfl_sync(ptx::kAllLanes, last, lane)) - 1;
    if (num_survivors > kMostSurvivors) return false;
    const Weights weights(reference, shared.settings.scale, shared.settings.floor);
    for_candidates([&](uint32_t key, int32_t token) {
      if (bin_of(key) <= last_bin) survivors()[atomicAdd(&shared.num_listed, 1)] = Survivor{weights(key_value(key)), key, token};
    });
    return true;
  }

  /// Tells in the bins, which nobody needs any more, who survives the filters, two threads for each; the other half of the CTA has them race.
  __device__ __forceinline__ void filter_and_race(int32_t num_survivors, const Weights& weights) const {
    const RowSettings& settings = shared.settings;
    constexpr int32_t kHalf = kSamplingThreads / 2;
    const int32_t thread = threadIdx.x;
    if (thread >= kHalf) {
      const int32_t at = thread - kHalf;
      if (at >= num_survivors) return;
      const Survivor own = survivors()[at];
      racers()[at] = enter_race(weights, shared.seed, shared.position, own.token, key_value(own.key));
      return;
    }
    const uint32_t min_p = min_p_key(weights, settings);
    const int32_t part = thread % 2;
    uint64_t above[2] = {}, most = 0;                 // of survivors thread / 2 and thread / 2 + 64
    bool survives[2] = {};
#pragma unroll
    for (int32_t round = 0; round < 2; ++round) {
      const int32_t at = thread / 2 + round * (kHalf / 2);
      if (round * (kHalf / 2) >= num_survivors) break;
      const bool is_one = at < num_survivors;
      const uint32_t own_key = is_one ? survivors()[at].key : 0;
      uint64_t mass = 0, equal = 0;
      uint32_t rank = 0;
#pragma unroll 4
      for (int32_t i = part; i < num_survivors; i += 2) {
        const Survivor other = survivors()[i];
        mass += other.key > own_key ? other.weight : 0;
        equal += other.key == own_key ? other.weight : 0;
        rank += other.key > own_key ? 1 : 0;
      }
      mass += __shfl_xor_sync(ptx::kAllLanes, mass, 1);
      equal += __shfl_xor_sync(ptx::kAllLanes, equal, 1);
      rank += __shfl_xor_sync(ptx::kAllLanes, rank, 1);
      above[round] = mass;
      survives[round] = is_one && rank < static_cast<uint32_t>(settings.top_k) && own_key >= min_p;
      if (survives[round]) most = max_of(most, mass + equal);
    }
    if (settings.has_top_p) {
      const uint32_t high = ptx::warp_max(static_cast<uint32_t>(most >> 32));
      const uint64_t of_warp = static_cast<uint64_t>(high) << 32 | ptx::warp_max(static_cast<uint32_t>(most >> 32) == high ? static_cast<uint32_t>(most) : 0);
      if (row.lane() == 0) shared.scratch.sums[0][row.warp()] = of_warp;
      ptx::barrier_sync<1, kHalf>();
      uint64_t total = 0;
#pragma unroll
      for (int32_t w = 0; w < kSamplingWarps / 2; ++w) total = max_of(total, shared.scratch.sums[0][w]);
      const uint64_t target = top_p_target(settings, total);
#pragma unroll
      for (int32_t round = 0; round < 2; ++round) survives[round] &= above[round] < target;
    }
#pragma unroll
    for (int32_t round = 0; round < 2; ++round) {
      const int32_t at = thread / 2 + round * (kHalf / 2);
      if (part == 0 && at < num_survivors) bins()[at] = survives[round] ? 1 : 0;
    }
  }

  /// All of it. True, the same in all threads of the row: the token is written. prepare() came before.
  __device__ __forceinline__ bool run(uint32_t lane_key) const {
    ptx::cluster_wait();      // the mailboxes are there
    send_candidates(lane_key);
    if (row.rank != 0) {
      ptx::mailbox_wait(answer());
      return shared.is_enough != 0;
    }
    ptx::mailbox_wait(mailbox());
    int32_t num_survivors = 0;
    float reference = 0.0f;
    const bool is_enough = list_survivors(num_survivors, reference);
    if (0 < threadIdx.x && threadIdx.x < row.num_ctas) {
      const uint32_t to = ptx::cluster_address(answer(), threadIdx.x);
      ptx::mailbox_send(to, ptx::cluster_address(ptx::shared_address(&shared.is_enough), threadIdx.x), is_enough ? 1 : 0);
      ptx::mailbox_announce(to, 8);
    }
    if (!is_enough) return false;
    __syncthreads();          // survivors are listed
    const Weights weights(reference, shared.settings.scale, shared.settings.floor);
    filter_and_race(num_survivors, weights);
    __syncthreads();
    if (row.warp() != 0) return true;
    Racer best = nobody();
    for (int32_t i = row.lane(); i < num_survivors; i += 32) {
      if (bins()[i] != 0 && racers()[i].beats(best)) best = racers()[i];
    }
    best = best_of_warp(best);
    if (row.lane() == 0) {
      row.store_token(shared.token_index, best.token);
      row.params.valid[row.row] = 1;
    }
    return true;
  }
};

}  // namespace attn
