// The row_ranges kernel of a variant on a CPU, for ctypes: attention/variant/row_ranges.cu with emulated/ in the place
// of CUDA. CTAs run one after another, so that what they share may be static.
#include "no_shared_memory.h"

#undef __shared__
#define __shared__ static

#include <cstring>

#include "kernels.h"  // row_ranges_kernel
#include "plan_params.h"

namespace {
attn::RowRangeParams launched;
}

/// Of level number `level`. `row_ranges`: of config->max_rows rows. Returns what failed, or nullptr.
extern "C" const char* device_row_ranges(const attn::ScheduleConfig* config, void* workspace,
                                         const attn::PlanLevel* levels, int32_t num_levels, int32_t level,
                                         const void* variant, size_t variant_bytes, attn::RowRange* row_ranges,
                                         attn::KvTileList* lists, int32_t num_lists, int32_t ctas, uint32_t seed) {
  static std::string failure;
  launched.plan = attn::passed_params(*config, workspace, levels, num_levels);
  launched.level = level;
  std::memcpy(launched.variant.bytes, variant, variant_bytes);
  launched.row_ranges = row_ranges;
  launched.num_kv_heads = config->num_kv_heads;
  launched.kv_tile_lists = lists;
  launched.num_kv_tile_lists = num_lists;
  try {
    gridDim.y = 2;
    for (blockIdx.y = 0; blockIdx.y < gridDim.y; ++blockIdx.y) {
      for (int32_t cta = 0; cta < ctas; ++cta)
        emulation::run_cta(cta, ctas, attn::kRowRangeThreads, seed, [] { row_ranges_kernel(launched); });
    }
  } catch (const emulation::Failure& error) {
    failure = error.what();
    return failure.c_str();
  }
  return nullptr;
}
