"""The C++ sources of kernels and of the variants that ship.

The source of a kernel sets the types and sizes that it is compiled for, and includes its entry. `manifest`
fills in element types and heads.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from string import Template

SM80_ATTENTION = Template("""\
#include "attention/traits.cuh"

namespace attn {
using KernelTraits = $traits;
}  // namespace attn

#include "attention/sm80/attention.cu"
""")

SM90_ATTENTION = Template("""\
#include "attention/sm90/attention.cuh"

namespace attn {
using KernelTraits = sm90::HopperTraits<$traits>;
template <class Traits>
using KernelCopier = feed::$copier<Traits>;
}  // namespace attn

#include "attention/sm90/attention.cu"
""")

MERGE = Template("""\
#include "attention/variant/variants.h"
#include "common/elements.cuh"

namespace attn {
using KernelElement = $element;
using KernelVariant = $variant;
}  // namespace attn

#include "attention/merge/merge.cu"
""")

MERGE_STATES = Template("""\
#include "attention/merge/merge_states.cuh"

namespace attn {
using KernelElement = $element;
}  // namespace attn

#include "attention/merge/merge_states.cu"
""")

ROW_RANGES = Template("""\
namespace attn {
using KernelVariant = $variant;
}  // namespace attn

#include "attention/variant/row_ranges.cu"
""")

APPEND_QKV = Template("""\
#include "common/elements.cuh"

namespace attn {
using KernelElement = $element;
using KernelCacheElement = $cache_element;
constexpr bool kKernelQuantizes = $quantizes;
}  // namespace attn

#include "cache/append_qkv.cu"
""")

SAMPLING_LOGITS = Template("""\
#include "sampling/device/source.cuh"

namespace attn {
using KernelElement = $element;
}  // namespace attn

#include "sampling/device/logits.cu"
""")


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
"""  # noqa: E501  (must equal the built-in's output letter for letter)


@dataclass(frozen=True)
class ShippedVariant:
    """A manifest.VariantSource without a mask and without transforms of Q, K, V and the output, because those
    would need additional kernels.
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
    """The shipped variant with this source, or None."""
    return _BY_SOURCE.get(source)
