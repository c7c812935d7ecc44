// What the CTAs of a row keep in shared memory.
#pragma once

#include <cstddef>

#include "sampling/device/race.cuh"
#include "sampling/device/select.cuh"

namespace attn {

constexpr uint32_t kNoBound = 0xffffffffu;        // no candidates are kept
constexpr uint32_t kWholeRow = kExcludedKey + 1;  // every token that can be drawn

/// Masses in units of what Bands::reference weighs, nearly: of all tokens, of those at or above Bands::low, and
/// Bands::high. Sums of segments' float sums: in float their error would be the largest of all.
struct BandMasses {
  double all = 0.0, low = 0.0, high = 0.0;

  __device__ __forceinline__ void add(const BandMasses& other) {
    all += other.all;
    low += other.low;
    high += other.high;
  }
};

/// Values about the threshold of top-p (sampling_bands.cuh).
struct Bands {
  float reference;
  float low;  // what is at or above it races
  float high;
  float sure;  // what is at or above it survives
  float few;   // the survey's mass of as many tokens as candidates are
  bool asks;   // whether shared.asked survives: `low` is the next value above its
  bool used;
};

/// What the CTAs of a cluster tell each other.
struct CtaSummary {
  uint64_t best;  // key of the largest value, then ~token: the first one among equals
  uint64_t mass;
  uint64_t logprob_mass;
  uint32_t bound;          // candidates are complete from this key on
  int32_t num_candidates;  // of this CTA; may exceed what there is room for
  uint32_t least_key;      // of a window's members
  uint32_t most_key;
  Racer racer;  // the best in the race
  BandMasses band_masses;
};

/// What the first CTA tells the others.
struct Decision {
  uint64_t mass;  // of the survivors
  uint32_t threshold;
  bool settled;  // the candidates were enough
  bool has_top;  // also for the top log-probabilities
};

/// What is looked for when the row is read again: the threshold lies in [low, high). In shared memory, as all of it
/// would not fit in registers.
struct Search {
  uint64_t target;
  uint64_t base;    // what lies before the bins weighs or counts
  uint32_t lowest;  // nothing below is looked at
  uint32_t low;
  uint32_t high;
  uint32_t ends[2];  // least and largest key of a window's members
  int32_t shift;     // fine bins have 2^shift keys, ends[1] in the first one; -1: coarse bins
  bool by_mass;
  bool is_wide;  // the window is what the bins prove, not what they suggest
};

/// What a read of the row looks for.
struct ReadTask {
  float scale, floor;  // of the masses
  float least;         // again: what is below is not looked at
  bool needs_mass;
  bool has_second;  // also the masses at temperature 1, for log-probabilities
  bool finds_candidates;
  bool has_bands;  // sums their masses
};

struct SamplingShared {
  alignas(16) uint32_t keys[kMaxCandidates];
  int32_t tokens[kMaxCandidates];
  alignas(16) uint32_t bins[kBins];  // or a list of survivors, or of the most likely tokens
  SelectScratch scratch;
  CtaSummary summary;
  Decision decision;
  CtaSummary summaries[kMaxClusterCtas];  // of the first read, of every CTA
  uint64_t warp_best[kSamplingWarps];
  Racer warp_racers[kSamplingWarps];
  BandMasses warp_band_masses[kSamplingWarps];
  Bands bands;
  // Of the row: in registers they would be spilled.
  RowSettings settings;
  int64_t seed;
  int64_t position;
  int64_t token_index;  // where in token_ids the token goes
  uint64_t row_mass;
  uint64_t logprob_mass;
  float reference;       // the row's largest value, once it is known
  uint32_t bound;        // candidates are complete from here on; kNoBound: there are none, or too many
  int32_t num_gathered;  // candidates from other CTAs, behind this CTA's own
  int32_t token;         // that is drawn; the first CTA knows it
  int32_t num_listed;
  ReadTask task;
  int32_t round;          // reads before this one
  int32_t segment_begin;  // of this CTA
  int32_t segment_end;
  int32_t
      num_ctas;  // of the row; from memory, or the compiler keeps in registers what it can compute from it beforehand
  Racer asked;   // of whom is asked whether it survives
  uint32_t race_magic;  // 0x4b00
  uint32_t race_bound;  // order_key() of what some racer of the CTA has reached, or a little less
  Search search;
  uint64_t mbarriers[2];  // few.cuh
  uint64_t is_enough;

  // While the row races candidates and bins are of no use. In their place: vectors of each thread on their way, the
  // best of its racers, its masses.
  __device__ __forceinline__ uint4* staged() { return reinterpret_cast<uint4*>(keys); }
  __device__ __forceinline__ Racer* lane_racers() { return reinterpret_cast<Racer*>(staged() + 4 * kSamplingThreads); }
  __device__ __forceinline__ BandMasses* lane_band_masses() {
    return reinterpret_cast<BandMasses*>(lane_racers() + kSamplingThreads);
  }

  /// Behind this struct: for each segment of this CTA its mass, its mass for log-probabilities, its largest value.
  __device__ __forceinline__ uint64_t* segment_mass(int32_t which, int32_t segments) {
    return reinterpret_cast<uint64_t*>(reinterpret_cast<char*>(this) + kSamplingStateBytes) + which * segments;
  }
  __device__ __forceinline__ float* segment_reference(int32_t segments) {
    return reinterpret_cast<float*>(segment_mass(2, segments));
  }
};

static_assert(sizeof(SamplingShared) <= kSamplingStateBytes && kSamplingStateBytes % 16 == 0, "the tables follow");
static_assert(kSamplingThreads * (4 * sizeof(uint4) + sizeof(Racer) + sizeof(BandMasses)) <=
                  offsetof(SamplingShared, scratch),
              "they have the candidates' room");

}  // namespace attn
