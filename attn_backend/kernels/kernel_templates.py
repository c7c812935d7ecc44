"""The sources of kernels: each says what a kernel of csrc/ is compiled for, and includes its entry.

`manifest` fills in element types, head shapes and variants.
"""

from __future__ import annotations

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
using KernelTraits = $traits;
template <class Traits>
using KernelCopier = sm90::$copier<Traits>;
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
