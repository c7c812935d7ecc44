"""The sources of kernels, as far as they are the same for every element type, head shape and variant;
`manifest` fills in the rest.
"""

from __future__ import annotations

from string import Template

SM80_ATTENTION = Template("""\
#include "attention/sm80/attention.cuh"

extern "C" __global__ __launch_bounds__(attn::sm80::kThreads, attn::sm80::kCtasPerMultiprocessor)
void attention_kernel(const __grid_constant__ attn::sm80::ParamsOf<$traits> params) {
  attn::sm80::attention<$traits>(params);
}
""")

SM90_ATTENTION = Template("""\
#include "attention/sm90/attention.cuh"
#include "common/kernel_code.cuh"

extern "C" __global__ __launch_bounds__(attn::sm90::cta_threads($traits::Shape::kDims), 1)
void attention_kernel(const __grid_constant__ attn::sm90::ParamsOf<$traits> params) {
  attn::sm90::attention<$traits, attn::sm90::$copier>(params);
}

extern "C" __device__ attn::KernelCode attention_kernel_code{&attn::unknown_code, 0};
""")

MERGE = Template("""\
#include "attention/merge/merge.cuh"
#include "common/kernel_code.cuh"

extern "C" __global__ __launch_bounds__(attn::kMergeThreads, attn::kMergeBlocks) void merge_kernel(const __grid_constant__ attn::AttentionParams params) {
  attn::merge<attn::$element, attn::$variant>(params);
}

extern "C" __device__ attn::KernelCode merge_kernel_code{&attn::unknown_code, 0};
""")

MERGE_STATES = Template("""\
#include "attention/merge/merge_states.cuh"

extern "C" __global__ __launch_bounds__(attn::kMergeStatesThreads) void merge_states_kernel(const __grid_constant__ attn::MergeStatesParams params) {
  attn::merge_states<attn::$element>(params);
}
""")

ROW_RANGES = Template("""\
#include "attention/variant/row_ranges.cuh"

extern "C" __global__ __launch_bounds__(attn::kRowRangeThreads) void row_ranges_kernel(const __grid_constant__ attn::RowRangeParams params) {
  attn::find_row_ranges<attn::$variant>(params);
}
""")

# One kernel of an append_qkv cubin; ctas: that share a multiprocessor, as many as fit without spilled
# registers.
APPEND_QKV = Template("""
extern "C" __global__ __launch_bounds__(attn::kAppendQkvThreads, $ctas) void append_qkv_${name}_kernel(const __grid_constant__ attn::QkvParams params) {
  attn::append_qkv<attn::$element, attn::QkvKernel::$kernel, $quantises, attn::$cache_element>(params);
}
""")

APPEND_ROUNDED = Template("""
extern "C" __global__ __launch_bounds__(attn::kAppendQkvThreads) void append_rounded_kernel(const __grid_constant__ attn::QkvParams params) {
  attn::append_rounded<attn::$element>(params);
}
""")
APPEND_LATENT = """\
#include "cache/append_latent.cuh"

extern "C" __global__ __launch_bounds__(attn::kAppendLatentThreads) void append_latent_kernel(const __grid_constant__ attn::LatentParams params) {
  attn::ptx::wait_for_previous_grid();
  attn::ptx::allow_next_grid();  // it waits for this one itself, before it reads the cache
  attn::append_latent(params);
}
"""

SELECTED_SLOTS = """\
#include "planner/device/selection.cuh"

extern "C" __global__ __launch_bounds__(attn::kSelectionThreads) void selected_slots_kernel(const __grid_constant__ attn::SelectionParams params) {
  attn::ptx::wait_for_previous_grid();
  attn::ptx::allow_next_grid();  // it waits for this one itself, before it reads the schedule and the slots
  __shared__ int32_t counts[attn::kSelectionWarps];
  attn::pack_selected_slots(params, counts);
}
"""

# One kernel of a sampling cubin; ctas: that share a multiprocessor.
SAMPLING = Template("""
extern "C" __global__ __launch_bounds__(attn::kSamplingThreads, $ctas) void ${name}_kernel(const __grid_constant__ attn::SamplingParams params) {
  attn::$call(params);
}
""")
