#include "sampling/cpu/sampling.h"

#include <algorithm>
#include <vector>

#include "common/cpu/elements.h"
#include "common/cpu/isa.h"
#include "common/cpu/parallel.h"

namespace attn::cpu {
namespace {

constexpr int64_t kMinThreadedElements = 1 << 15;

const SamplingLoops& loops() {
#if defined(__x86_64__)
  const Isa isa = current_isa();
  if (isa >= Isa::kAvx512) return kAvx512Loops;
  if (isa >= Isa::kAvx2) return kAvx2Loops;
#endif
  return kBaselineLoops;
}

void weigh(const LogitWeights& weights, const float* values, int32_t count, uint64_t* out) {
  loops().weigh_logits(weights, values, count, out);
}

void weigh(const ProbWeights& weights, const float* values, int32_t count, uint64_t* out) {
  for (int32_t i = 0; i < count; ++i) out[i] = weights(values[i]);
}

/// A little more than race_gain() of any bits that begin with `half`.
double most_gain(uint32_t half) { return half == 0 ? 49.1 : __builtin_clz(half) - 16 + 1.1; }

/// One thread's buffers; kept for the thread's life.
struct Scratch {
  std::vector<float> values;
  std::vector<uint32_t> keys;
  std::vector<std::pair<uint32_t, int32_t>> ranked;
};

/// A row's values in float32, -inf for what cannot be drawn.
template <class Weights>
class Row {
 public:
  Row(const SamplingParams& params, int64_t row, Scratch& scratch)
      : params_(params),
        row_(row),
        settings_(row_settings(params, row)),
        scratch_(scratch),
        vocab_(params.vocab),
        values_(scratch.values.data()),
        weights_(1.0f, 1.0f) {
    if (params.token_mask != nullptr) {
      const uint32_t* words = params.token_mask + row * params.mask_stride;
      for (int32_t i = 0; i < vocab_; ++i) {
        if ((words[i >> 5] >> (i & 31) & 1) == 0) values_[i] = kMinusInfinity;
      }
    }
    reference_ = kMinusInfinity;
    bool bad = !settings_.valid;
    for (int32_t i = 0; i < vocab_; ++i) {
      bad |= is_nan(values_[i]);
      if (values_[i] > reference_) {
        reference_ = values_[i];
        best_ = i;
      }
    }
    valid_ = !bad && reference_ > kMinusInfinity && reference_ < -kMinusInfinity;
    if (valid_) weights_ = Weights(reference_, settings_.scale);
  }

  bool valid() const { return valid_; }

  /// Draws, or takes the most likely token.
  int32_t token() {
    if (!valid_) return first_allowed();
    if (settings_.greedy) return best_;
    return race(threshold());
  }

  void write_logprobs(int32_t token) {
    const bool tempered = is_tempered(params_, settings_);
    const float inverse_temperature = tempered ? settings_.inverse_temperature : 1.0f;
    const uint64_t mass = valid_ ? segment_masses(Weights(reference_, tempered ? settings_.scale : kLog2E)) : 0;
    const auto of = [&](int32_t i) {
      return valid_ ? logprob(values_[i], reference_, inverse_temperature, mass) : kNaN;
    };
    if (params_.logprobs != nullptr) params_.logprobs[row_] = of(token);
    const int32_t count = params_.num_top_logprobs;
    if (count == 0) return;
    auto& ranked = scratch_.ranked;
    ranked.clear();
    for (int32_t i = 0; valid_ && i < vocab_; ++i) {
      if (values_[i] > kMinusInfinity) ranked.emplace_back(~order_key(values_[i]), i);
    }
    const int32_t found = min_of(count, static_cast<int32_t>(ranked.size()));
    std::partial_sort(ranked.begin(), ranked.begin() + found, ranked.end());
    for (int32_t n = 0; n < count; ++n) {
      const bool exists = n < found;
      params_.top_token_ids[row_ * count + n] = exists ? ranked[static_cast<size_t>(n)].second : 0;
      params_.top_logprobs[row_ * count + n] =
          exists ? of(ranked[static_cast<size_t>(n)].second) : (valid_ ? kMinusInfinity : kNaN);
    }
  }

  void write_values() {
    float* out = params_.written + row_ * params_.written_stride;
    if (params_.task == RowTask::kMaskLogits) {
      const uint32_t lowest = valid_ ? threshold() : 0;
      for (int32_t i = 0; i < vocab_; ++i) out[i] = order_key(values_[i]) >= lowest ? values_[i] : kMinusInfinity;
      return;
    }
    const uint32_t lowest = valid_ ? threshold() : kWholeRow;
    const uint64_t total = !valid_ ? 0 : settings_.filters() ? survivors_mass(lowest) : segment_masses(weights_);
    for_segments([&](int32_t begin, int32_t count, const uint64_t* weight) {
      for (int32_t i = 0; i < count; ++i) {
        const bool survives = valid_ && order_key(values_[begin + i]) >= lowest;
        out[begin + i] = survives ? normalized(weights_, values_[begin + i], weight[i], total) : 0.0f;
      }
    });
  }

 private:
  /// body(first token, tokens, weights relative to the row's largest value)
  template <class Body>
  void for_segments(const Body& body) const {
    uint64_t weight[kSegmentTokens];
    for (int32_t begin = 0; begin < vocab_; begin += kSegmentTokens) {
      const int32_t count = min_of(kSegmentTokens, vocab_ - begin);
      if (valid_) weigh(weights_, values_ + begin, count, weight);
      body(begin, count, weight);
    }
  }

  /// The row's mass, segment by segment, each relative to its own largest value first.
  uint64_t segment_masses(const Weights& weights) const {
    uint64_t weight[kSegmentTokens];
    uint64_t total = 0;
    for (int32_t begin = 0; begin < vocab_; begin += kSegmentTokens) {
      const int32_t count = min_of(kSegmentTokens, vocab_ - begin);
      const float reference = *std::max_element(values_ + begin, values_ + begin + count);
      if (reference == kMinusInfinity) continue;
      weigh(Weights(reference, weights), values_ + begin, count, weight);
      uint64_t sum = 0;
      for (int32_t i = 0; i < count; ++i) sum += weight[i];
      total += scale_mass(sum, segment_factor(weights, reference));
    }
    return total;
  }

  uint64_t survivors_mass(uint32_t lowest) const {
    uint64_t total = 0;
    for_segments([&](int32_t begin, int32_t count, const uint64_t* weight) {
      for (int32_t i = 0; i < count; ++i) total += order_key(values_[begin + i]) >= lowest ? weight[i] : 0;
    });
    return total;
  }

  /// Smallest key that survives all filters.
  uint32_t threshold() {
    if (!settings_.filters()) return kWholeRow;
    uint32_t lowest = min_p_key(weights_, settings_);
    auto& keys = scratch_.keys;
    keys.clear();
    for (int32_t i = 0; i < vocab_; ++i) {
      const uint32_t key = order_key(values_[i]);
      if (key >= lowest) keys.push_back(key);
    }
    if (settings_.top_k > 0 && static_cast<int64_t>(keys.size()) > settings_.top_k) {
      std::nth_element(keys.begin(), keys.begin() + (settings_.top_k - 1), keys.end(), std::greater<uint32_t>());
      lowest = keys[static_cast<size_t>(settings_.top_k - 1)];
    }
    if (!settings_.has_top_p) return lowest;
    const uint64_t total = top_p_of_all(params_, settings_) ? segment_masses(weights_) : survivors_mass(lowest);
    return max_of(lowest, top_p_key(keys, top_p_target(settings_, total)));
  }

  /// Largest key that at least `target` lies at or above; 0 if there is none.
  uint32_t top_p_key(std::vector<uint32_t>& keys, uint64_t target) const {
    uint64_t mass = 0;
    size_t done = 0;
    for (size_t wanted = 128; done < keys.size(); wanted *= 8) {  // sorts no more than a few times what is needed
      const size_t end = std::min(wanted, keys.size());
      const auto middle = keys.begin() + static_cast<std::ptrdiff_t>(end);
      std::nth_element(keys.begin() + static_cast<std::ptrdiff_t>(done), middle - 1, keys.end(),
                       std::greater<uint32_t>());
      std::sort(keys.begin() + static_cast<std::ptrdiff_t>(done), middle, std::greater<uint32_t>());
      for (; done < end; ++done) {
        mass += weights_(key_value(keys[done]));
        if (mass >= target) return keys[done];
      }
    }
    return 0;
  }

  /// The winner among the tokens with a key from `lowest` on.
  int32_t race(uint32_t lowest) const {
    const int64_t seed = params_.seed[row_], position = params_.position[row_];
    const float least = key_value(lowest);
    uint16_t halves[kSegmentTokens];
    double best = 0.0;
    int32_t winner = -1;
    for (int32_t begin = 0; begin < vocab_; begin += kSegmentTokens) {
      const int32_t end = min_of(begin + kSegmentTokens, vocab_);
      if (std::none_of(values_ + begin, values_ + end, [&](float value) { return value >= least; })) continue;
      loops().race_halves(seed, position, begin / kSegmentTokens, halves);
      for (int32_t token = begin; token < end; ++token) {
        if (!(values_[token] >= least)) continue;
        const double strength = weights_.strength(values_[token]);
        const uint32_t half = halves[token - begin];
        if (winner >= 0 && strength + most_gain(half) < best) continue;
        const uint32_t tail = random_word(seed, position, static_cast<uint32_t>(token), kDrawTailStream);
        const double value = race_value(strength, static_cast<uint64_t>(half) << kRaceTailBits | tail);
        if (winner < 0 || value > best) {
          best = value;
          winner = token;
        }
      }
    }
    return winner;
  }

  int32_t first_allowed() const {
    if (params_.token_mask == nullptr) return 0;
    const uint32_t* words = params_.token_mask + row_ * params_.mask_stride;
    for (int32_t i = 0; i < vocab_; ++i) {
      if ((words[i >> 5] >> (i & 31) & 1) != 0) return i;
    }
    return 0;
  }

  const SamplingParams& params_;
  const int64_t row_;
  const RowSettings settings_;
  Scratch& scratch_;
  const int32_t vocab_;
  float* values_;
  Weights weights_;
  float reference_;
  int32_t best_ = 0;
  bool valid_;
};

template <class Weights>
void finish_row(const SamplingParams& params, int64_t row, Scratch& scratch) {
  Row<Weights> prepared(params, row, scratch);
  if (params.task == RowTask::kRenorm || params.task == RowTask::kMaskLogits) {
    prepared.write_values();
    return;
  }
  const int32_t token = prepared.token();
  store_token(params, row, token);
  params.valid[row] = prepared.valid();
  if (params.logprobs != nullptr || params.num_top_logprobs > 0) prepared.write_logprobs(token);
}

/// Accepts draft tokens until the first that is refused, then draws from what the target has more than the draft.
void speculate_row(const SamplingParams& params, int64_t row, Scratch& scratch) {
  const int32_t vocab = params.vocab, drafts = params.num_draft_tokens;
  const int64_t seed = params.seed[row], position = params.position[row];
  const float* target = static_cast<const float*>(params.values) + row * (drafts + 1) * vocab;
  const float* draft = params.draft_probs + row * drafts * vocab;
  const IndexArray draft_ids{params.draft_token_ids, params.draft_ids_are_int64};
  const int64_t out = row * (drafts + 1);
  int32_t accepted = 0, passed = 0;
  for (int32_t i = 0; i < drafts; ++i) {
    const int64_t token = draft_ids[row * drafts + i], at = i * static_cast<int64_t>(vocab) + token;
    if (token < 0 || token >= vocab || !accepts_draft(seed, position + i, draft[at], target[at])) continue;
    if (accepted == i) store_token(params, out + accepted++, token);
    ++passed;
  }
  target += static_cast<int64_t>(accepted) * vocab;
  draft += static_cast<int64_t>(accepted) * vocab;
  const auto fill = [&](bool residual) {
    for (int32_t i = 0; i < vocab; ++i)
      scratch.values[static_cast<size_t>(i)] = prob_value(residual ? residual_prob(target[i], draft[i]) : target[i]);
  };
  SamplingParams drawn = params;
  drawn.position.array = IndexArray{};
  drawn.position.value = position + accepted;
  fill(accepted < drafts);
  const auto is_nothing = [](float value) {
    return value == kMinusInfinity;
  };  // a NaN is something, wherever it stands
  if (accepted < drafts && std::all_of(scratch.values.begin(), scratch.values.begin() + vocab, is_nothing)) fill(false);
  Row<ProbWeights> prepared(drawn, row, scratch);
  store_token(params, out + accepted, prepared.token());
  for (int32_t i = accepted + 1; i <= drafts; ++i) store_token(params, out + i, -1);
  params.num_accepted[row] = accepted;
  params.num_passed[row] = passed;
  params.valid[row] = prepared.valid();
}

template <class Body>
void for_rows(const SamplingParams& params, const Body& body) {
  auto one = [&](int32_t row) {
    thread_local Scratch scratch;
    scratch.values.resize(static_cast<size_t>(params.vocab));
    body(row, scratch);
  };
  parallel_for(params.batch, static_cast<int64_t>(params.batch) * params.vocab >= kMinThreadedElements, one);
}

template <class Element>
void sample_elements(const SamplingParams& params) {
  for_rows(params, [&](int32_t row, Scratch& scratch) {
    const Element* logits = static_cast<const Element*>(params.values) + row * params.row_stride;
    for (int32_t i = 0; i < params.vocab; ++i) scratch.values[static_cast<size_t>(i)] = to_float(logits[i]);
    finish_row<LogitWeights>(params, row, scratch);
  });
}

}  // namespace

void sample_logits(const SamplingParams& params, DataType dtype) {
  visit_float(dtype, [&](auto element) { sample_elements<decltype(element)>(params); });
}

void sample_probs(const SamplingParams& params) {
  for_rows(params, [&](int32_t row, Scratch& scratch) {
    if (params.task == RowTask::kSpeculate) return speculate_row(params, row, scratch);
    const float* probs = static_cast<const float*>(params.values) + params.row_offset(row);
    for (int32_t i = 0; i < params.vocab; ++i) scratch.values[static_cast<size_t>(i)] = prob_value(probs[i]);
    finish_row<ProbWeights>(params, row, scratch);
  });
}

}  // namespace attn::cpu
