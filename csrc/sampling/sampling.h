// The arguments of sampling, and its arithmetic, the same bits from nvcc and g++.
//
// Every probability is an integer: token v of a row weighs weight(v), the most likely one 2^40 or a little more, and
// the probability of v is weight(v) over the sum. Sums of integers have no order, so neither the launch's shape nor the
// batch can change a token. Earlier float32 arithmetic uses single IEEE operations and explicit fused multiply-adds: a
// compiler can neither contract nor approximate them.
#pragma once

#include "common/index_array.h"
#include "common/math.h"
#include "common/platform.h"

namespace attn {

// ---- The arguments, and the shape of launches ----

/// The mass of a whole row is a sum of segments, each scaled from its own largest weight.
constexpr int32_t kSegmentTokens = 512;
constexpr int32_t kMaxVocab = 1 << 19;
constexpr int32_t kMaxTopLogprobs = 128;

// Shape of the kernels' launches.
constexpr int32_t kSamplingThreads = 256;
constexpr int32_t kSamplingWarps = kSamplingThreads / 32;
constexpr int32_t kPortableClusterCtas = 8;
constexpr int32_t kMaxClusterCtas = 16;
constexpr int32_t kSamplingStateBytes = 63744;  // of shared memory, before the tables of segments

// For rows without filters, whose CTAs exchange messages through global memory.
constexpr int32_t kUnfilteredCtas = 3;   // on a multiprocessor at a time
constexpr int32_t kMaxSharedRows = 256;  // whose CTAs wait at a time
/// Of 8 bytes: a launch number of 4 bytes for each row, then two words for each message.
constexpr int32_t kWorkspaceWords = 4096;
constexpr int32_t kWorkspaceMessages = kWorkspaceWords / 2 - kMaxSharedRows / 4;

/// Dynamic shared memory where each row has `ctas` CTAs.
constexpr int32_t sampling_shared_bytes(int32_t vocab, int32_t ctas) {
  constexpr int32_t kSegmentBytes = 20;  // two masses and the largest value
  const int32_t rounds = ceil_div(ceil_div(vocab, kSegmentTokens), kSamplingWarps * ctas);
  return kSamplingStateBytes + rounds * kSamplingWarps * kSegmentBytes;
}

/// The word at `address`, or `otherwise` where that is nullptr. On a GPU nothing waits for it before it is used: a
/// choice between two values would.
ATTN_HD uint32_t load_or(const void* address, uint32_t otherwise) {
#if defined(__CUDA_ARCH__)
  uint32_t word;
  asm volatile("{\n.reg .pred has;\nsetp.ne.u64 has, %1, 0;\nmov.b32 %0, %2;\n@has ld.global.b32 %0, [%1];\n}"
               : "=&r"(word)
               : "l"(address), "r"(otherwise));
  return word;
#else
  if (address != nullptr) __builtin_memcpy(&otherwise, address, sizeof(otherwise));
  return otherwise;
#endif
}

/// A parameter of requests: one value for each row, or one for all.
struct RowFloat {
  const float* data = nullptr;
  float value = 0.0f;

  ATTN_HD float operator[](int64_t row) const {
    return bits_float(load_or(data != nullptr ? data + row : nullptr, float_bits(value)));
  }
};

/// An integer whose words may still be on their way from memory.
struct PendingInt {
  int32_t low;
  int32_t high;
  bool is_int32;  // `high` says nothing

  ATTN_HD int64_t value() const {
    return static_cast<int64_t>(is_int32 ? low >> 31 : high) << 32 | static_cast<uint32_t>(low);
  }
};

struct RowInt {
  IndexArray array;
  int64_t value = 0;

  ATTN_HD PendingInt load(int64_t row) const {
    const int32_t* words = array ? static_cast<const int32_t*>(array.data) + (row << array.is_int64) : nullptr;
    const bool is_int64 = words == nullptr || array.is_int64 != 0;
    return PendingInt{static_cast<int32_t>(load_or(words, static_cast<uint32_t>(value))),
                      static_cast<int32_t>(load_or(words != nullptr && is_int64 ? words + 1 : nullptr,
                                                   static_cast<uint32_t>(static_cast<uint64_t>(value) >> 32))),
                      !is_int64};
  }

  ATTN_HD int64_t operator[](int64_t row) const { return load(row).value(); }
};

/// A launch's task for each row.
enum class RowTask : int32_t {
  kSample = 0,      // draw a token
  kRenorm = 1,      // write probabilities: softmax, renormalized survivors of top-k or top-p
  kMaskLogits = 2,  // write the values, with -inf where top-k removes them
  kSpeculate = 3,   // accept draft tokens, then draw
};

struct SamplingParams {
  const void* values;      // logits or probabilities, [batch, vocab]
  int64_t row_stride;      // elements
  IndexArray source_rows;  // [batch]: of probabilities, the row that each is drawn from; none: its own
  int32_t num_source_rows;
  const uint32_t* token_mask;  // [batch, ceil(vocab / 32)]: bit set, token allowed; nullptr: all are
  int64_t mask_stride;         // words
  RowFloat temperature;
  RowFloat top_p;
  RowFloat min_p;
  RowInt top_k;
  RowInt seed;
  RowInt position;
  void* token_ids;      // [batch], int32 or int64
  uint8_t* valid;       // [batch]
  float* logprobs;      // [batch] or nullptr
  float* top_logprobs;  // [batch, num_top_logprobs] or nullptr
  int32_t* top_token_ids;
  float* written;  // [batch, vocab]: what kRenorm and kMaskLogits write
  int64_t written_stride;
  // Messages between the CTAs of an unfiltered row, arbitrary before a launch; nullptr: no messages.
  void* workspace;
  // Chain speculative sampling: `values` are target_probs [batch, num_draft_tokens + 1, vocab], contiguous.
  const float* draft_probs;     // [batch, num_draft_tokens, vocab], contiguous
  const void* draft_token_ids;  // [batch, num_draft_tokens]
  int32_t* num_accepted;        // [batch]
  int32_t* num_passed;          // [batch]
  int32_t draft_ids_are_int64;
  int32_t num_draft_tokens;
  int32_t batch;
  int32_t vocab;
  int32_t num_top_logprobs;
  int32_t token_ids_are_int64;
  int32_t joint;              // filter order, see RowSettings
  int32_t tempered_logprobs;  // log-probabilities of logits / temperature instead of logits
  RowTask task;

  /// Where the probabilities of row `row` begin, in elements. A row that does not exist becomes the nearest that does.
  /// (Kernels of logits have no register left for it.)
  ATTN_HD int64_t row_offset(int64_t row) const {
    const int64_t source = source_rows ? clamp<int64_t>(source_rows[row], 0, num_source_rows - 1) : row;
    return source * row_stride;
  }
};

ATTN_HD void store_token(const SamplingParams& params, int64_t index, int64_t token) {
  if (params.token_ids_are_int64 != 0)
    static_cast<int64_t*>(params.token_ids)[index] = token;
  else
    static_cast<int32_t*>(params.token_ids)[index] = static_cast<int32_t>(token);
}

constexpr int32_t kWeightBits = 40;

// ---- Numbers and keys ----

ATTN_HD uint64_t multiply_high(uint64_t a, uint64_t b) {
#if defined(__CUDA_ARCH__)
  return __umul64hi(a, b);
#else
  return static_cast<uint64_t>((static_cast<unsigned __int128>(a) * b) >> 64);
#endif
}

constexpr float kMinusInfinity = -__builtin_huge_valf();
constexpr float kNaN = __builtin_nanf("");
constexpr float kLargestFloat = 3.4028234663852886e38f;
constexpr float kSmallestNormal = 1.1754943508222875e-38f;

ATTN_HD bool is_nan(float x) { return x != x; }

/// Integers in the order of the floats (no NaN); -0 and +0 are the same.
ATTN_HD uint32_t order_key(float x) {
  const uint32_t bits = float_bits(x + 0.0f);
  return (bits >> 31) != 0 ? ~bits : bits | 0x80000000u;
}

ATTN_HD float key_value(uint32_t key) { return bits_float((key >> 31) != 0 ? key & 0x7fffffffu : ~key); }

constexpr uint32_t kExcludedKey = 0x007fffffu;    // order_key(-inf): a token that cannot be drawn
constexpr uint32_t kWholeRow = kExcludedKey + 1;  // every token that can be drawn has such a key, or a larger one
constexpr uint32_t kInfiniteKey = 0xff800000u;    // order_key(+inf)

// ---- Random numbers ----

constexpr int32_t kPhiloxRounds = 10;

/// The key of a round of Philox4x32-10 (Salmon et al. 2011).
struct PhiloxKey {
  uint32_t low;
  uint32_t high;

  ATTN_HD explicit PhiloxKey(int64_t seed)
      : low(static_cast<uint32_t>(seed)), high(static_cast<uint32_t>(static_cast<uint64_t>(seed) >> 32)) {}

  ATTN_HD void next() {
    low += 0x9E3779B9u;
    high += 0xBB67AE85u;
  }
};

ATTN_HD void philox_round(const PhiloxKey& key, uint32_t& c0, uint32_t& c1, uint32_t& c2, uint32_t& c3) {
  const uint64_t product0 = uint64_t{0xD2511F53u} * c0;
  const uint64_t product1 = uint64_t{0xCD9E8D57u} * c2;
  c0 = static_cast<uint32_t>(product1 >> 32) ^ c1 ^ key.low;
  c1 = static_cast<uint32_t>(product1);
  c2 = static_cast<uint32_t>(product0 >> 32) ^ c3 ^ key.high;
  c3 = static_cast<uint32_t>(product0);
}

/// The four words of a counter, in its place.
ATTN_HD void philox(int64_t seed, uint32_t (&counter)[4]) {
  PhiloxKey key(seed);
#if defined(__CUDA_ARCH__)
#pragma unroll 1
#endif
  for (int32_t round = 0; round < kPhiloxRounds; ++round, key.next())
    philox_round(key, counter[0], counter[1], counter[2], counter[3]);
}

/// Streams of one request: the first bits of its draws, the acceptance of draft tokens, the other bits of its draws.
constexpr uint32_t kDrawStream = 0;
constexpr uint32_t kAcceptStream = 1;
constexpr uint32_t kDrawTailStream = 2;

/// The counter of what a request draws at a position: `block` of a stream, which gives four words.
ATTN_HD void set_counter(uint32_t (&counter)[4], int64_t position, uint32_t block, uint32_t stream) {
  counter[0] = static_cast<uint32_t>(position);
  counter[1] = static_cast<uint32_t>(static_cast<uint64_t>(position) >> 32);
  counter[2] = block;
  counter[3] = stream;
}

/// The first word of a block.
ATTN_HD uint32_t random_word(int64_t seed, int64_t position, uint32_t block, uint32_t stream) {
  uint32_t words[4];
  set_counter(words, position, block, stream);
  philox(seed, words);
  return words[0];
}

// ---- Weights ----

/// log2(1 + r) for 1 + r of about 0.7 to 1.42, divided by z = r / (2 + r), of z squared.
ATTN_HD float log2_series(float z2) {
  float p = fused_multiply_add(0.3205989f, z2, 0.4121986f);
  p = fused_multiply_add(p, z2, 0.5770780f);
  p = fused_multiply_add(p, z2, 0.9617967f);
  return fused_multiply_add(p, z2, 2.885390f);
}

/// log2(a) for a normal a > 0, to 2e-7 (absolute near 1, else relative).
ATTN_HD float log2_of(float a) {
  const uint32_t bits = float_bits(a);
  const uint32_t offset = bits - 0x3f3504f3u;  // sqrt(1/2)
  const int32_t exponent = static_cast<int32_t>(offset) >> 23;
  const float m = bits_float(bits - (static_cast<uint32_t>(exponent) << 23));
  const float z = (m - 1.0f) / (m + 1.0f);
  return fused_multiply_add(log2_series(z * z), z, static_cast<float>(exponent));
}

/// 2^t in units of 2^-40, rounded down, for -48 <= t <= 0 (a little below and above). Relative error 3e-7 for large
/// results; 0 below 2^-40.
ATTN_HD uint64_t exp2_fixed(float d, float scale) {
  constexpr float kMagic = 12582912.0f;  // 1.5 * 2^23: adding it rounds to an integer
  const float rounded = fused_multiply_add(d, scale, kMagic);
  const float f = fused_multiply_add(d, scale, kMagic - rounded);  // t = n + f, |f| <= 0.5
  float p = fused_multiply_add(0.001326472731307149f, f, 0.009671512991189957f);
  p = fused_multiply_add(p, f, 0.05550733581185341f);
  p = fused_multiply_add(p, f, 0.24022242426872253f);
  p = fused_multiply_add(p, f, 0.6931470036506653f);
  p = fused_multiply_add(p, f, 3.0f);  // 2 + 2^f, in [2, 4): its mantissa is 2^f in units of 2^-22
  const uint32_t mantissa = float_bits(p) - 0x40000000u;
  const uint32_t shift = 14u + 0x4b400000u - float_bits(rounded);  // 14 - n
  return static_cast<uint64_t>(mantissa) << 32 >> shift;
}

/// Weights of logits: 2^((logit - reference) * scale), scale = log2(e) / temperature.
struct LogitWeights {
  float reference;
  float scale;
  float floor;  // smallest difference that is looked at

  ATTN_HD LogitWeights(float reference, float scale, float floor) : reference(reference), scale(scale), floor(floor) {}
  ATTN_HD LogitWeights(float reference, float scale) : LogitWeights(reference, scale, floor_of(scale)) {}
  ATTN_HD LogitWeights(float reference, const LogitWeights& other)
      : reference(reference), scale(other.scale), floor(other.floor) {}

  ATTN_HD static float floor_of(float scale) { return -48.0f / scale; }

  ATTN_HD uint64_t operator()(float logit) const { return exp2_fixed(max_of(logit - reference, floor), scale); }

  /// log2 of the logit's weight, up to a term that is the same for the whole row; exact.
  ATTN_HD double strength(float logit) const { return static_cast<double>(logit) * static_cast<double>(scale); }
};

/// Weights of probabilities: themselves, in units that give the exponent of the reference 2^40.
struct ProbWeights {
  float reference;

  ATTN_HD explicit ProbWeights(float reference, float = 1.0f, float = 0.0f) : reference(reference) {}
  ATTN_HD ProbWeights(float reference, const ProbWeights&) : reference(reference) {}

  ATTN_HD uint64_t operator()(float prob) const {
    const uint32_t bits = float_bits(prob);
    const uint32_t shift = min_of((float_bits(reference) >> 23) - (bits >> 23), 63u);
    return prob > 0.0f ? static_cast<uint64_t>((bits & 0x7fffffu) | 0x800000u) << 17 >> shift : 0;
  }

  ATTN_HD double strength(float prob) const { return static_cast<double>(log2_of(prob)); }
};

/// A segment's sum is relative to the segment's own reference. This is one unit of it in units of the row's sum, times
/// 2^40.
ATTN_HD uint64_t segment_factor(const LogitWeights& row, float segment_reference) { return row(segment_reference); }
ATTN_HD uint64_t segment_factor(const ProbWeights& row, float segment_reference) {
  const uint32_t shift = (float_bits(row.reference) >> 23) - (float_bits(segment_reference) >> 23);
  return (uint64_t{1} << kWeightBits) >> min_of(shift, 63u);
}

/// mass * factor / 2^40. Never decreases with the mass, so that a cumulative sum stays one.
ATTN_HD uint64_t scale_mass(uint64_t mass, uint64_t factor) {
  return multiply_high(mass, factor) << (64 - kWeightBits) | (mass * factor) >> kWeightBits;
}

// ---- The race ----
//
// Every token gets a number from an exponential distribution. The survivor of the filters with the largest weight /
// number is drawn: each with the probability of its share (Gumbel's maximum, in powers of two). It takes no sum, and
// what does not survive changes nothing among what does.

// A token's number comes from 48 bits. The first 16 bits decide that most tokens have lost. They come from one block
// for eight tokens, which one thread of a kernel reads: four in a row, and four that are 128 further on. The others are
// the first word of the token's own block of the tail stream.
constexpr int32_t kRaceTailBits = 32;

/// The block of the draw stream that has a token's first bits.
ATTN_HD uint32_t race_block(int32_t token) {
  const uint32_t t = static_cast<uint32_t>(token);
  return (t / kSegmentTokens) * (kSegmentTokens / 8) + (t / 4 % 32) * 2 + t / 256 % 2;
}

/// Which of the block's words has them; odd tokens have its upper half.
ATTN_HD uint32_t race_word(int32_t token) {
  return (static_cast<uint32_t>(token) / 2 % 2) + 2 * (static_cast<uint32_t>(token) / 128 % 2);
}

ATTN_HD uint32_t race_half(uint32_t word, int32_t token) { return token % 2 != 0 ? word >> 16 : word & 0xffffu; }

/// -log2 of the exponential number -ln(1 - x), x = (bits + 1/2) / 2^48, to 4e-7 (absolute near 1, else relative). No
/// more than -log2(x), except for that error.
ATTN_HD float race_gain(uint64_t bits) {
  constexpr float kUnit = 3.552713678800501e-15f;  // 2^-48
  constexpr uint64_t kAll = (uint64_t{1} << 48) - 1;
  float numerator, denominator, whole = 0.0f;
  if (bits < uint64_t{1} << 46) {  // x itself: 1 - x would lose its last bits
    numerator = fused_multiply_add(static_cast<float>(bits), kUnit, 0.5f * kUnit);
    denominator = 2.0f - numerator;
  } else {
    const uint32_t rest = float_bits(fused_multiply_add(static_cast<float>(kAll - bits), kUnit, 0.5f * kUnit));
    const int32_t exponent = static_cast<int32_t>(rest - 0x3f3504f3u) >> 23;
    const float m = bits_float(rest - (static_cast<uint32_t>(exponent) << 23));
    numerator = 1.0f - m;
    denominator = 1.0f + m;
    whole = static_cast<float>(-exponent);
  }
  const float z = numerator / denominator;
  return -log2_of(fused_multiply_add(log2_series(z * z), z, whole) * kLn2);
}

/// Where a token ends in the race: the largest wins, the lower id among equals.
ATTN_HD double race_value(double strength, uint64_t bits) { return strength + static_cast<double>(race_gain(bits)); }

// ---- Filters ----
//
// Every filter is a threshold on the value: a token survives if its key is at or above. Tokens with equal values stay
// together.

/// The parameters of one row.
struct RowSettings {
  float scale;  // log2(e) / temperature
  float floor;  // of LogitWeights
  float inverse_temperature;
  float min_p;     // 0: off
  int32_t top_k;   // 0: off
  uint64_t top_p;  // times 2^64
  bool has_top_p;
  bool greedy;
  bool valid;  // false: a NaN, or a negative temperature

  ATTN_HD bool filters() const { return top_k > 0 || has_top_p || min_p > 0.0f; }
};

/// log2(e) / temperature, within bounds that keep every product finite; beyond them a row is uniform, or has one token,
/// anyway.
ATTN_HD float temperature_scale(float temperature) {
  return temperature > 0.0f ? clamp(kLog2E / temperature, 1e-36f, 1e36f) : 1e36f;
}

ATTN_HD RowSettings row_settings(const SamplingParams& params, int64_t row) {
  const float temperature = params.temperature[row], top_p = params.top_p[row], min_p = params.min_p[row];
  const int64_t top_k = params.top_k[row];
  RowSettings s;
  s.valid = temperature >= 0.0f && !is_nan(top_p) && !is_nan(min_p);
  s.greedy = temperature == 0.0f;
  s.scale = temperature_scale(temperature);
  s.floor = LogitWeights::floor_of(s.scale);
  s.inverse_temperature = temperature > 0.0f ? min_of(1.0f / temperature, kLargestFloat) : kLargestFloat;
  s.min_p = min_p > 0.0f ? min_of(min_p, 1.0f) : 0.0f;
  s.top_k = top_k > 0 && top_k < params.vocab ? static_cast<int32_t>(top_k) : 0;
  s.has_top_p = top_p < 1.0f;
  const uint32_t bits = float_bits(top_p);
  s.top_p = 0;
  if (s.has_top_p && top_p > 0.0f) {
    const int32_t shift = static_cast<int32_t>(bits >> 23) - 86;  // (mantissa * 2^(exponent - 150)) * 2^64
    const uint64_t mantissa = (bits & 0x7fffffu) | ((bits >> 23) != 0 ? 0x800000u : 0u);
    s.top_p = shift >= 0 ? mantissa << shift : (shift > -24 ? mantissa >> -shift : 0);
  }
  return s;
}

/// Whether top-p is a share of the whole row's mass, not of what the filters before it leave.
ATTN_HD bool top_p_of_all(const SamplingParams& params, const RowSettings& settings) {
  return params.joint != 0 || (settings.top_k == 0 && settings.min_p == 0.0f);
}

/// Whether log-probabilities are computed from logits / temperature.
ATTN_HD bool is_tempered(const SamplingParams& params, const RowSettings& settings) {
  return params.tempered_logprobs != 0 && !settings.greedy;
}

/// Smallest mass that top-p must keep: top_p * total, rounded up, at least 1.
ATTN_HD uint64_t top_p_target(const RowSettings& settings, uint64_t total) {
  const uint64_t whole = multiply_high(settings.top_p, total);
  return max_of<uint64_t>(whole + (settings.top_p * total != 0 ? 1 : 0), 1);
}

/// Smallest value that min-p keeps. `reference`: the row's largest.
ATTN_HD float min_p_value(const LogitWeights& weights, const RowSettings& settings) {
  if (settings.min_p >= 1.0f) return weights.reference;
  return min_of(
      fused_multiply_add(log2_of(max_of(settings.min_p, kSmallestNormal)), 1.0f / weights.scale, weights.reference),
      weights.reference);
}

ATTN_HD float min_p_value(const ProbWeights& weights, const RowSettings& settings) {
  return weights.reference * settings.min_p;
}

/// Smallest key that can survive.
template <class Weights>
ATTN_HD uint32_t min_p_key(const Weights& weights, const RowSettings& settings) {
  return settings.min_p > 0.0f ? max_of(order_key(min_p_value(weights, settings)), kWholeRow) : kWholeRow;
}

/// A probability as the kernels see it: -inf for a token that cannot be drawn, NaN for a negative one, which makes the
/// row invalid.
ATTN_HD float prob_value(float prob) {
  const float drawn = prob < kSmallestNormal ? kMinusInfinity : prob;
  return prob < 0.0f ? kNaN : drawn;
}

/// The residual of a token: its target probability beyond the draft's. A NaN stays NaN.
ATTN_HD float residual_prob(float target, float draft) {
  const float rest = target - draft;
  return rest < 0.0f && target >= 0.0f && draft >= 0.0f ? 0.0f : rest;
}

/// Whether a draft token is taken: with probability min(1, target / draft).
ATTN_HD bool accepts_draft(int64_t seed, int64_t position, float draft_prob, float target_prob) {
  const uint32_t word = random_word(seed, position, 0, kAcceptStream);
  const float u = static_cast<float>(word >> 8) * 5.9604644775390625e-8f;  // 24 bits: exact
  return u * draft_prob < target_prob;
}

/// A survivor's share of `mass`, from its value rather than from its weight, which ends at 2^-40.
ATTN_HD float normalized(const LogitWeights&, float, uint64_t weight, uint64_t mass) {
  return static_cast<float>(weight) / static_cast<float>(mass);
}
ATTN_HD float normalized(const ProbWeights& weights, float value, uint64_t, uint64_t mass) {
  return value /
         (static_cast<float>(mass) * bits_float((max_of(float_bits(weights.reference) >> 23, 41u) - 40u) << 23));
}

ATTN_HD float logprob(float value, float reference, float inverse_temperature, uint64_t mass) {
  const float log2_mass = log2_of(static_cast<float>(mass)) - static_cast<float>(kWeightBits);
  return fused_multiply_add(value - reference, inverse_temperature, log2_mass * -kLn2);
}

}  // namespace attn
