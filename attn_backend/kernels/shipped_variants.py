"""Variants whose kernels are built ahead and shipped: the sources of built-ins (Variant.source), by the names
that cubins have for them.

Text, since kernels are built where there is no torch, which makes it. A test compares it with the built-ins.
A variant is found here by its source: what combines to the same (`alibi() & causal()`) uses the same kernels.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

_ALIBI = """\
#include "attention/variant/variant_math.h"
#include "attention/variant/variants.h"

namespace attn {

struct UserVariant : VariantBase {
  struct Params {
    ParamTensor<float, 1> slopes;
  };
  static constexpr bool kMaskReadsHead = false;

  const ParamTensor<float, 1>& slopes;

  ATTN_HD UserVariant(const Params& params, int32_t /*kv_head*/) : slopes(params.slopes) {}

  ATTN_HD float logits(float logit, const ScoreRow& row, int32_t kv_position) const {
    return logit + (slopes(row.qo_head) * (static_cast<float>(kv_position) - static_cast<float>(row.position)));
  }

  ATTN_HD float bias_slope(const ScoreRow& row) const {
    return slopes(row.qo_head);
  }
};

static_assert(sizeof(UserVariant::Params) == 16, "not as Python packs it");

}  // namespace attn
"""  # noqa: E501  (letter for letter what the built-in generates)


@dataclass(frozen=True)
class ShippedVariant:
    """A manifest.VariantSource without a mask and a transform of the output, which would need kernels besides
    attention's, and without those of Q, K and V.
    """

    name: str
    source: str
    user_sources: Mapping[str, str] = field(default_factory=dict)
    has_mask: bool = False
    has_output: bool = False
    has_transforms: bool = False


SHIPPED_VARIANTS = (ShippedVariant("alibi", _ALIBI),)
_BY_SOURCE = {variant.source: variant for variant in SHIPPED_VARIANTS}


def shipped_variant(source: str) -> ShippedVariant | None:
    """That of this source, if it is one."""
    return _BY_SOURCE.get(source)
