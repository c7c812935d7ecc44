// The attention kernels of one design, and merge, on a CPU, for ctypes: the manifest's sources with emulated/ in the
// place of CUDA. tests/helpers/device_attention.py writes kernels.h: these sources, and
//   constexpr auto kKernels: the design's attention kernels, in the order of KernelDesign::kernels.
//   constexpr auto kDequantize: the kernel before them; nullptr: there is none.
// DESIGN is the design's namespace. CTAs run one after another.
#include <device_attention.h>  // by this form, so that a precompiled one is found first

namespace attn {
alignas(1024) char shared[512 << 10];  // shared memory of the running CTA, or of two
namespace sm80 {
extern char shared[512 << 10] __attribute__((alias("_ZN4attn6sharedE")));
}
namespace sm90 {
extern char memory[512 << 10] __attribute__((alias("_ZN4attn6sharedE")));
}
}  // namespace attn

namespace emulation {

char* const shared_memory = attn::shared;
const size_t shared_bytes = sizeof(attn::shared);

uint64_t time() { return 0; }
bool loses_messages() { return false; }

}  // namespace emulation

#include "kernels.h"

namespace {

using namespace attn;

/// What ctypes passes. strides, in elements: row and head of q, of o; page, token and head of k, of v. sizes: rows of
/// q, pages, head_dim, page_size, levels that were planned, head_dim_v.
struct PassedAttention {
  const void* q;
  const void* k;
  const void* v;
  void* o;
  float* lse;
  float* partial_o;
  float* partial_lse;
  const float* sinks;
  int64_t strides[10];
  int64_t sizes[6];
  double sm_scale;
  int64_t dtype;     // DataType of O, unless it has a scale
  int64_t q_dtype;   // of Q
  int64_t kv_dtype;  // of the cache
  int64_t uses_softmax;
  int64_t variant_bytes;  // of the variant's Params
  const void* variant;
  const float* out_scale_data;  // as in AttentionParams
  double out_scale;
  const void* q_rope;  // nullptr: q has all columns
  int64_t q_rope_strides[2];
  AttentionScales scales;     // of an 8-bit cache
  int64_t multiplies_float8;  // KvForm::multiplies_float8
  int64_t has_token_scales;   // KvForm::has_token_scales
  void* dequantized;          // memory of DequantizedKv
  int64_t dequantizes;        // the kernel before attention runs
  int64_t launched;           // the kernel that was launched, a number among the design's
};

LatentAttentionParams passed_attention(const ScheduleConfig& config, void* workspace, const PassedAttention& passed) {
  const int64_t* s = passed.strides;
  LatentAttentionParams params{};
  params.schedule = Schedule(workspace, ScheduleLayout(config));
  params.q = passed.q;
  params.q_row_stride = s[0];
  params.q_head_stride = s[1];
  params.q_rope = QueryPart{passed.q_rope, passed.q_rope_strides[0], passed.q_rope_strides[1]};
  params.o = passed.o;
  params.o_row_stride = s[2];
  params.o_head_stride = s[3];
  params.k = KvTensor{passed.k, s[4], s[5], s[6]};
  params.v = KvTensor{passed.v, s[7], s[8], s[9]};
  params.lse = passed.lse;
  params.lse_unit = 1.0f;
  params.partial_o = passed.partial_o;
  params.partial_lse = passed.partial_lse;
  params.num_rows = static_cast<int32_t>(passed.sizes[0]);
  params.num_pages = static_cast<int32_t>(passed.sizes[1]);
  params.v_columns = static_cast<int32_t>(passed.sizes[5]);
  params.page_size = FastDivisor(static_cast<int32_t>(passed.sizes[3]));
  params.max_merge_rows = config.max_merge_rows;
  params.num_kv_heads = config.num_kv_heads;
  params.num_ctas = config.num_ctas;
  params.max_tile_rows = tile_rows(config.max_kind);
  params.kv_tile = config.kv_tile;
  params.group_size = FastDivisor(config.group_size);
  params.sm_scale = static_cast<float>(passed.sm_scale);
  params.sinks = passed.sinks;
  params.adds_up = passed.uses_softmax == 0;
  params.out_scale_data = passed.out_scale_data;
  params.out_scale = static_cast<float>(passed.out_scale);
  std::memcpy(params.variant.bytes, passed.variant, static_cast<size_t>(passed.variant_bytes));
  return params;
}

template <class Arguments>
Arguments arguments_of(void (*kernel)(Arguments));
using Arguments = decltype(arguments_of(kKernels[0]));

// Of the running launch.
KernelArguments launched;
size_t launched_kernel;
LatentAttentionParams launched_merge;

DequantizeParams launched_dequantize;

void run_dequantize(const AttentionParams& params, const AttentionTokenScales& scales, HeadDims dims,
                    const DequantizedKv& dequantized, uint32_t seed) {
  DequantizeParams& p = launched_dequantize = DequantizeParams{};
  p.schedule = params.schedule;
  p.page_size = params.page_size;
  p.num_pages = params.num_pages;
  p.num_kv_heads = params.num_kv_heads;
  p.k = DequantizedTensor(params.k, scales.k, scales.k_factor, dims.qk, dequantized.k);
  p.v = DequantizedTensor(params.v, scales.v, scales.v_factor, dims.v, dequantized.v);
  p.row_chunks = FastDivisor((p.k.head_chunks.divisor + p.v.head_chunks.divisor) * params.num_kv_heads);
  constexpr int32_t kCtas = 3;
  for (int32_t cta = 0; cta < kCtas; ++cta)
    emulation::run_cta(cta, kCtas, kDequantizeThreads, seed, [] { kDequantize(launched_dequantize); });
}

void run_attention(const ScheduleConfig& config, PassedAttention& passed, uint32_t seed) {
  constexpr KernelDesign design = DESIGN::kDesign;
  LatentAttentionParams params = launched_merge;
  if (is_in_bytes(static_cast<DataType>(passed.kv_dtype))) {  // the variant's Params after the scales
    std::memcpy(params.variant.bytes, &passed.scales, sizeof(passed.scales));
    std::memcpy(params.variant.bytes + kScalesBytes, launched_merge.variant.bytes,
                VariantParams::kBytes - kScalesBytes);
  }
  std::vector<PlanLevel> levels(static_cast<size_t>(passed.sizes[4]));
  for (size_t i = 0; i < levels.size(); ++i) levels[i].table.indices = params.schedule.header->levels[i].indices;
  const KernelCode codes[kMaxDesignKernels] = {};
  const HeadDims dims(static_cast<int32_t>(passed.sizes[2]), static_cast<int32_t>(passed.sizes[5]));
  const auto o_dtype = params.has_out_scale() ? DataType::kFloat8E4M3 : static_cast<DataType>(passed.dtype);
  const auto q_dtype = static_cast<DataType>(passed.q_dtype), kv_dtype = static_cast<DataType>(passed.kv_dtype);
  const KvForm kv_form(bytes_of(kv_dtype), passed.multiplies_float8 != 0, passed.has_token_scales != 0, kv_dtype,
                       static_cast<DataType>(passed.dtype) == DataType::kBFloat16);
  const int32_t rows = passed.dequantizes ? config.dequantized_tokens : 0;
  const int64_t k_bytes = int64_t{rows} * params.num_kv_heads * dequantized_columns(dims.qk) * 2;
  const DequantizedKv dequantized{passed.dequantized, static_cast<char*>(passed.dequantized) + k_bytes,
                                  static_cast<DataType>(passed.dtype), rows};
  AttentionTokenScales token_scales;  // where the cache has none, the kernel does not read them
  std::memcpy(&token_scales, &passed.scales, sizeof(token_scales));
  if (rows > 0) run_dequantize(params, token_scales, dims, dequantized, seed);
  const LaunchContext context{levels.data(), static_cast<int32_t>(levels.size()),
                              o_dtype,       q_dtype,
                              kv_dtype,      dims,
                              codes,         {},
                              ptx::encode,   kv_form,
                              dequantized};
  passed.launched = design.make_arguments(params, context, launched);
  launched_kernel = static_cast<size_t>(passed.launched);
  const int32_t halves = design.halves_row_tiles(dims, params.group_size.divisor) ? 2 : 1;
  const bool in_cluster = halves > 1 && design.forms_clusters(kv_form);
  const int32_t ctas_of_cluster = in_cluster ? halves : 1;
  std::vector<int32_t> order(static_cast<size_t>(params.num_ctas * halves / ctas_of_cluster));
  std::iota(order.begin(), order.end(), 0);
  for (size_t i = order.size(); i > 1; --i) std::swap(order[i - 1], order[emulation::random() % i]);
  const int32_t bytes = design.shared_bytes(dims, kv_form);
  for (const int32_t cta : order) {
    blockIdx.x = cta % params.num_ctas;
    blockIdx.y = cta / params.num_ctas;
    gridDim.x = params.num_ctas;
    emulation::run_cluster(
        ctas_of_cluster, design.threads(dims, kv_form), seed,
        [] { kKernels[launched_kernel](*reinterpret_cast<Arguments*>(launched.bytes)); }, in_cluster);
    const size_t part = sizeof(shared) / static_cast<size_t>(ctas_of_cluster);
    for (char* begin = shared; begin < std::end(shared); begin += part) {
      if (std::any_of(begin + bytes, begin + part - emulation::static_bytes,
                      [](char byte) { return byte != emulation::kUnwritten; }))
        emulation::fail("more shared memory is used than asked for");
    }
  }
  blockIdx.y = 0;
  if (params.schedule.header->queue_head != 0 || params.schedule.header->second_queue_head != 0)
    emulation::fail("the work queue's counter is not 0 at the end");
}

void run_merge(int32_t rows_of_blocks, uint32_t seed) {
  gridDim.y = rows_of_blocks;
  gridDim.z = ceil_div(launched_merge.v_columns, kMergeColumns);
  for (blockIdx.z = 0; blockIdx.z < gridDim.z; ++blockIdx.z) {
    for (blockIdx.y = 0; blockIdx.y < gridDim.y; ++blockIdx.y) {
      for (int32_t cta = 0; cta < launched_merge.num_ctas; ++cta)
        emulation::run_cta(cta, launched_merge.num_ctas, kMergeThreads, seed, [] { merge_kernel(launched_merge); });
    }
  }
}

}  // namespace

/// Where the last field lies.
extern "C" int32_t launched_offset() { return offsetof(PassedAttention, launched); }

/// Attention and merge of what `workspace` holds. rows_of_blocks: blocks of the merge kernel for each CTA. Returns what
/// failed, or nullptr.
extern "C" const char* device_attention(const ScheduleConfig* config, void* workspace, PassedAttention* passed,
                                        int32_t rows_of_blocks, uint32_t seed) {
  blockIdx.y = blockIdx.z = 0;
  gridDim.y = gridDim.z = 1;
  return emulation::failure_of(seed, [&] {
    launched_merge = passed_attention(*config, workspace, *passed);
    run_attention(*config, *passed, seed);
    run_merge(rows_of_blocks, seed);
  });
}
