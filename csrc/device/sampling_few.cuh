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
  static constexpr int32_t kMostSurvivors = kSamplingThreads / 2;
  static constexpr int32_t kValueBins = 256;
  static constexpr int32_t kLaneBins = kValueBins / 32;
  static constexpr int32_t kMostWarps = kMaxClusterCtas * kSamplingWarps;

  // Warps take the row's lines of 128 bytes in turn: the likely tokens of a model lie together, most at low ids.
  static constexpr int32_t kLineLanes = 8;
  static constexpr int32_t kLineTokens = kLineLanes * Source::kVectorTokens;
  static constexpr int32_t kRoundLines = kLaneTokens * 32 / kLineTokens;      // that a warp reads at a time

  /// What a warp tells the first CTA of its candidates, which lie in its part of the list.
  struct Told {
    uint32_t bound;         // they are complete from here on; kNoBound: they are not
    uint32_t best_key;
    uint64_t count;
  };

  /// Of a segment, for the mass of the row.
  struct SegmentMass {
    uint64_t mass;          // relative to its largest value
    uint64_t best_key;
  };

  /// key << 32 | token of each.
  __device__ __forceinline__ uint64_t* list() const { return reinterpret_cast<uint64_t*>(shared.keys); }
  __device__ __forceinline__ uint32_t mailbox() const { return ptx::shared_address(&shared.mailboxes[0]); }       // of candidates, in the first CTA
  __device__ __forceinline__ uint32_t answer() const { return ptx::shared_address(&shared.mailboxes[1]); }        // of whether they were enough, in the others
  __device__ __forceinline__ uint32_t* bins() const { return shared.bins; }
  __device__ __forceinline__ Survivor* survivors() const { return reinterpret_cast<Survivor*>(shared.bins + kValueBins); }
  __device__ __forceinline__ Racer* racers() const { return reinterpret_cast<Racer*>(survivors() + kMostSurvivors); }
  __device__ __forceinline__ Told* told() const { return reinterpret_cast<Told*>(racers() + kMostSurvivors); }
  __device__ __forceinline__ SegmentMass* masses() const { return reinterpret_cast<SegmentMass*>(told() + kMostWarps); }

  static constexpr int32_t kMostSegments = kMostFewSegments * kMostWarps;
  static_assert(kValueBins * 4 + kMostSurvivors * (sizeof(Survivor) + sizeof(Racer)) + kMostWarps * sizeof(Told) + kMostSegments * sizeof(SegmentMass) <= kBins * 4,
                "all have the bins' room");

  __device__ __forceinline__ int32_t num_warps() const { return row.num_ctas * kSamplingWarps; }
  __device__ __forceinline__ int32_t warp_of_row() const { return row.rank * kSamplingWarps + row.warp(); }
  /// Candidates that a warp has room for.
  __device__ __forceinline__ int32_t room() const { return row.candidate_room() / kSamplingWarps; }

  /// Of the row; the host has looked at the launch (may_leave_few in csrc/host/sampling.cpp).
  __device__ __forceinline__ bool suits(const RowParameters& own) const {
    const bool is_valid = own.temperature > 0.0f && !is_nan(own.top_p) && !is_nan(own.min_p);
    return is_valid && own.top_k.value() > 0 && own.top_k.value() <= kMostTopK;
  }

  /// Whether top-p is a share of the whole row's mass.
  __device__ __forceinline__ bool needs_row_mass(const RowParameters& own) const { return own.top_p < 1.0f && row.params.joint != 0; }

  /// Before the cluster's first barrier.
  __device__ __forceinline__ void prepare() const {
    if (row.rank == 0) bins()[threadIdx.x] = 0;
    if (threadIdx.x == 0) {
      ptx::mailbox_init(mailbox(), num_warps());
      ptx::mailbox_init(answer(), 1);
      shared.num_listed = 0;
    }
  }

  /// First token of this lane's vector j in a round of reading.
  __device__ __forceinline__ int32_t vector_token(int32_t round, int32_t j) const {
    const int32_t line = round * kRoundLines + j * (32 / kLineLanes) + row.lane() / kLineLanes;
    return (line * num_warps() + warp_of_row()) * kLineTokens + row.lane() % kLineLanes * Source::kVectorTokens;
  }

  __device__ __forceinline__ int32_t num_rounds() const { return row.share_of_cta(ceil_div(row.params.vocab, kSamplingWarps * kRoundLines * kLineTokens) + row.num_ctas - 1); }

  __device__ __forceinline__ void load(int32_t round, typename Source::Vector (&raw)[Source::kVectors]) const {
    load_vectors(row.source, [&](int32_t j) { return vector_token(round, j); }, raw);
  }

  /// A value that `wanted` of the warp's lanes have reached: the wanted-th largest of the lanes' largest, or a little less.
  __device__ __forceinline__ static uint32_t warp_bound(uint32_t lane_key, int32_t wanted) {
    uint32_t own = (lane_key & ~31u) | static_cast<uint32_t>(ptx::lane_id()), bound = 0;
#pragma unroll 1
    for (int32_t i = 0; i < wanted; ++i) {
      bound = ptx::warp_max(own);
      own = own == bound ? 0 : own;
    }
    return max_of(bound & ~31u, kWholeRow);
  }

  /// v[i]; registers have no index.
  template <class T, int32_t kCount>
  __device__ __forceinline__ static T pick(const T (&v)[kCount], int32_t i) {
    T picked = v[0];
#pragma unroll
    for (int32_t j = 1; j < kCount; ++j) picked = i == j ? v[j] : picked;
    return picked;
  }

  /// How many lanes make a warp's bound: so many that hardly ever as many as these of the k largest lie in one warp's lines. With more the lists are longer.
  __device__ __forceinline__ int32_t lanes_at_bound(int32_t top_k) const { return 5 + row.share_of_cta(ceil_div(3 * top_k, kSamplingWarps) + row.num_ctas - 1); }

  /// Sends the warp's candidates to the first CTA, with the bound from which on they are complete. v: of the last round. Returns how many bytes.
  __device__ __forceinline__ uint32_t send_candidates(int32_t top_k, uint32_t lane_key, float (&v)[kLaneTokens]) const {
    const uint32_t bound = warp_bound(lane_key, lanes_at_bound(top_k));
    const uint32_t best_key = ptx::warp_max(lane_key);
    const float least = key_value(bound);
    const uint32_t to = ptx::cluster_address(mailbox(), 0);
    const uint32_t places = ptx::cluster_address(ptx::shared_address(list() + warp_of_row() * room()), 0);
    const uint32_t before = (1u << row.lane()) - 1;
    int32_t count = 0;
#pragma unroll 1
    for (int32_t round = num_rounds() - 1;;) {
      uint32_t chosen = 0;
#pragma unroll
      for (int32_t i = 0; i < kLaneTokens; ++i) chosen |= v[i] >= least ? 1u << i : 0u;
      // Most lanes have none or one.
#pragma unroll 1
      for (uint32_t ones; (ones = __ballot_sync(ptx::kAllLanes, chosen != 0)) != 0; chosen &= chosen - 1) {
        const int32_t at = count + __popc(ones & before);
        if (chosen != 0 && at < room()) {
          const int32_t i = __ffs(static_cast<int32_t>(chosen)) - 1;
          const int32_t token = vector_token(round, i / Source::kVectorTokens) + i % Source::kVectorTokens;
          ptx::mailbox_send(to, places + at * 8, static_cast<uint64_t>(order_key(pick(v, i))) << 32 | static_cast<uint32_t>(token));
        }
        count += __popc(ones);
      }
      if (--round < 0) break;
      typename Source::Vector raw[Source::kVectors];
      load(round, raw);
      row.values(raw, v);
    }
    if (row.lane() == 0) {
      const uint32_t place = ptx::cluster_address(ptx::shared_address(told() + warp_of_row()), 0);
      ptx::mailbox_send(to, place, static_cast<uint64_t>(best_key) << 32 | (count <= room() ? bound : kNoBound), static_cast<uint64_t>(count));
    }
    return sizeof(Told) + 8 * min_of(count, room());
  }

  /// Sends the masses of whole segments, which a warp reads one by one, to the first CTA: as they are defined. Returns how many bytes.
  __device__ __forceinline__ uint32_t send_masses(float temperature) const {
    const uint32_t to = ptx::cluster_address(mailbox(), 0);
    uint32_t bytes = 0;
#pragma unroll 1
    for (int32_t segment = warp_of_row(); segment < row.num_segments(); segment += num_warps()) {
      typename Source::Vector raw[Source::kVectors];
      float v[kLaneTokens];
      row.load(segment, raw);
      row.values(raw, v);
      const uint32_t key = ptx::warp_max(row.lane_max_key(v));
      const uint64_t mass = row.is_drawable(key) ? row.warp_mass(v, Weights(key_value(key), temperature_scale(temperature))) : 0;
      if (row.lane() == 0) ptx::mailbox_send(to, ptx::cluster_address(ptx::shared_address(masses() + segment), 0), mass, key);
      bytes += sizeof(SegmentMass);
    }
    return bytes;
  }

  /// The first CTA's part: the mass of the row.
  __device__ __forceinline__ uint64_t row_mass(const Weights& weights) const {
    uint64_t sum = 0;
    for (int32_t segment = threadIdx.x; segment < row.num_segments(); segment += kSamplingThreads) {
      const SegmentMass& own = masses()[segment];
      if (own.mass != 0) sum += scale_mass(own.mass, segment_factor(weights, key_value(static_cast<uint32_t>(own.best_key))));
    }
    return BlockSums(shared.scratch)(sum);
  }

  /// The first CTA's part. False, the same in all threads: the candidates do not tell.
  __device__ __forceinline__ bool list_survivors(const RowSettings& settings, int32_t& num_survivors, float& reference) const {
    uint32_t bound = 0, best_key = 0;
#pragma unroll
    for (int32_t w = 0; w < kMostWarps; w += 32) {
      if (w >= num_warps()) break;
      bound = max_of(bound, told()[w + row.lane()].bound);
      best_key = max_of(best_key, told()[w + row.lane()].best_key);
    }
    bound = ptx::warp_max(bound);
    best_key = ptx::warp_max(best_key);
    if (bound == kNoBound || best_key >= kInfiniteKey || best_key <= kExcludedKey) return false;
    reference = key_value(best_key);
    const float range = reference - key_value(bound);
    if (!(range < 1e30f)) return false;
    const float bins_of_one = range > 0.0f ? __fdividef(kValueBins - 1, range) : 0.0f;
    // A warp's candidates are looked at by the same few threads, each of which has room for as many.
    constexpr int32_t kOfThread = kMaxCandidates / kSamplingThreads;
    const int32_t readers = row.share_of_cta(kSamplingThreads / kSamplingWarps), first = static_cast<int32_t>(threadIdx.x) & (readers - 1);
    const int32_t sender = static_cast<int32_t>(threadIdx.x) * row.num_ctas / (kSamplingThreads / kSamplingWarps);
    const int32_t count = static_cast<int32_t>(told()[sender].count);
    uint64_t candidates[kOfThread];       // 0: none
#pragma unroll
    for (int32_t i = 0; i < kOfThread; ++i) candidates[i] = first + i * readers < count ? list()[sender * room() + first + i * readers] : 0;
    int32_t bin[kOfThread];
#pragma unroll
    for (int32_t i = 0; i < kOfThread; ++i) {
      const uint32_t key = static_cast<uint32_t>(candidates[i] >> 32);
      bin[i] = kValueBins;
      if (key >= bound) {
        bin[i] = static_cast<int32_t>((reference - key_value(key)) * bins_of_one);
        atomicAdd(&bins()[bin[i]], 1u);
      }
    }
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
    const uint32_t wanted = static_cast<uint32_t>(settings.top_k);
    uint32_t last = 0, listed = through - sum;        // of this lane
#pragma unroll
    for (int32_t i = 0; i < kLaneBins; ++i) {
      const bool before = listed < wanted;
      listed += before ? counts[i] : 0;
      last += before ? 1 : 0;
    }
    const uint32_t reached = __ballot_sync(ptx::kAllLanes, through >= wanted);
    if (reached == 0) return false;
    const int32_t lane = __ffs(static_cast<int32_t>(reached)) - 1;
    num_survivors = static_cast<int32_t>(__shfl_sync(ptx::kAllLanes, listed, lane));
    const int32_t last_bin = lane * kLaneBins + static_cast<int32_t>(__shfl_sync(ptx::kAllLanes, last, lane)) - 1;
    if (num_survivors > kMostSurvivors) return false;
    const Weights weights(reference, settings.scale, settings.floor);
    uint32_t chosen = 0;
#pragma unroll
    for (int32_t i = 0; i < kOfThread; ++i) chosen |= bin[i] <= last_bin ? 1u << i : 0u;
#pragma unroll 1
    for (; chosen != 0; chosen &= chosen - 1) {
      const uint64_t one = pick(candidates, __ffs(static_cast<int32_t>(chosen)) - 1);
      const uint32_t key = static_cast<uint32_t>(one >> 32);
      survivors()[atomicAdd(&shared.num_listed, 1)] = Survivor{weights(key_value(key)), key, static_cast<int32_t>(one)};
    }
    return true;
  }

  /// Tells in the bins, which nobody needs any more, who survives the filters, two threads for each; the other half of the CTA has them race.
  /// row_mass: if top-p is a share of it, else 0.
  __device__ __forceinline__ void filter_and_race(const RowParameters& draw, const RowSettings& settings, int32_t num_survivors, const Weights& weights,
                                                  uint64_t row_mass) const {
    constexpr int32_t kHalf = kSamplingThreads / 2;
    const int32_t thread = threadIdx.x;
    if (thread >= kHalf) {
      const int32_t at = thread - kHalf;
      if (at >= num_survivors) return;
      const Survivor own = survivors()[at];
      racers()[at] = enter_race<kPhiloxRounds>(weights, draw.seed.value(), draw.position.value(), own.token, key_value(own.key));
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
      uint64_t total = row_mass;
      if (row_mass == 0) {
        const uint32_t high = ptx::warp_max(static_cast<uint32_t>(most >> 32));
        const uint64_t of_warp = static_cast<uint64_t>(high) << 32 | ptx::warp_max(static_cast<uint32_t>(most >> 32) == high ? static_cast<uint32_t>(most) : 0);
        if (row.lane() == 0) shared.scratch.sums[0][row.warp()] = of_warp;
        ptx::barrier_sync<1, kHalf>();
#pragma unroll
        for (int32_t w = 0; w < kSamplingWarps / 2; ++w) total = max_of(total, shared.scratch.sums[0][w]);
      }
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
  __device__ __forceinline__ bool run() const {
    typename Source::Vector raw[Source::kVectors];
    load(0, raw);
    const RowParameters own(row.params, row.row);
    ptx::cluster_wait();      // the mailboxes are there
    float v[kLaneTokens];
    uint32_t lane_key = 0;
#pragma unroll 1
    for (int32_t round = 1;; ++round) {
      row.values(raw, v);
      lane_key = max_of(lane_key, row.lane_max_key(v));
      if (round >= num_rounds()) break;
      load(round, raw);
    }
    if (!suits(own)) return false;
    uint32_t bytes = send_candidates(static_cast<int32_t>(own.top_k.value()), lane_key, v);
    if (needs_row_mass(own)) bytes += send_masses(own.temperature);
    if (row.lane() == 0) ptx::mailbox_announce(ptx::cluster_address(mailbox(), 0), bytes);
    if (row.rank != 0) {
      ptx::mailbox_wait(answer());
      return shared.is_enough != 0;
    }
    const RowSettings settings = row_settings(own, row.params.vocab);
    __syncthreads();          // the bins are empty
    ptx::mailbox_wait(mailbox());
    int32_t num_survivors = 0;
    float reference = 0.0f;
    const bool is_enough = list_survivors(settings, num_survivors, reference);
    if (0 < threadIdx.x && threadIdx.x < row.num_ctas) {
      const uint32_t to = ptx::cluster_address(answer(), threadIdx.x);
      ptx::mailbox_send(to, ptx::cluster_address(ptx::shared_address(&shared.is_enough), threadIdx.x), is_enough ? 1 : 0);
      ptx::mailbox_announce(to, 8);
    }
    if (!is_enough) return false;
    __syncthreads();          // survivors are listed
    const Weights weights(reference, settings.scale, settings.floor);
    filter_and_race(own, settings, num_survivors, weights, needs_row_mass(own) ? row_mass(weights) : 0);
    __syncthreads();
    if (row.warp() != 0) return true;
    Racer best = nobody();
    for (int32_t i = row.lane(); i < num_survivors; i += 32) {
      if (bins()[i] != 0 && racers()[i].beats(best)) best = racers()[i];
    }
    best = best_of_warp(best);
    if (row.lane() == 0) {
      row.store_token(row.row, best.token);
      row.params.valid[row.row] = 1;
    }
    return true;
  }
};

}  // namespace attn
