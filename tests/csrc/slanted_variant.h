// A variant for tests that uses everything a variant can: a bias by head and distance (ALiBi), a mask of its own, and a
// transform of the output.
#pragma once

#include "attention/variant/variants.h"

namespace attn {

struct SlantedVariant : VariantBase {
  struct Params {
    float slope;
  };

  float slope;
  int32_t kv_head;

  ATTN_HD SlantedVariant(const Params& params, int32_t kv_head_) : slope(params.slope), kv_head(kv_head_) {}
  ATTN_HD float logits(float logit, const ScoreRow& row, int32_t kv_position) const {
    return logit + slope * static_cast<float>((row.qo_head + 1) * (kv_position - row.position));
  }
  ATTN_HD bool mask(const ScoreRow& row, int32_t kv_position) const {
    return (kv_position + row.row + row.index + row.kv_len + 5 * row.request + kv_head) % 3 != 0;
  }
  ATTN_HD float output(float value, const ScoreRow& row, int32_t column) const {
    return value + static_cast<float>(row.request % 4 + column % 3);
  }
};

/// The same without what levels of a composition do not say: a row's index, and the length of its request.
struct PlacedVariant : SlantedVariant {
  using SlantedVariant::SlantedVariant;

  ATTN_HD bool mask(const ScoreRow& row, int32_t kv_position) const {
    return (kv_position + row.row + 5 * row.request + kv_head) % 3 != 0;
  }
};

/// Weights of their own in the place of the softmax.
struct SquaredVariant : VariantBase {
  static constexpr bool kUsesSoftmax = false;

  ATTN_HD SquaredVariant(const Params&, int32_t /*kv_head*/) {}
  ATTN_HD float logits(float logit, const ScoreRow&, int32_t /*kv_position*/) const { return logit * logit; }
};

}  // namespace attn
