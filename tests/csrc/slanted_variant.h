// A variant for tests that uses everything a variant can: a bias by head and distance (ALiBi), and a mask of its own.
#pragma once

#include "attention/variants.h"

namespace attn {

struct SlantedVariant {
  struct Params {
    float slope;
  };
  static constexpr bool kHasMask = true;

  float slope;
  int32_t kv_head;

  ATTN_HD SlantedVariant(const Params& params, int32_t kv_head_) : slope(params.slope), kv_head(kv_head_) {}
  ATTN_HD bool transforms_logits() const { return true; }
  ATTN_HD float logits(float logit, const ScoreRow& row, int32_t kv_position) const {
    return logit + slope * static_cast<float>((row.qo_head + 1) * (kv_position - row.position));
  }
  ATTN_HD bool sees(const ScoreRow& row, int32_t kv_position) const {
    return (kv_position + row.row + kv_head) % 3 != 0;
  }
};

}  // namespace attn
