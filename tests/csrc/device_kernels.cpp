// Device kernels on a CPU, for ctypes: csrc/cache/append.cu, the generic attention kernel, merge.cuh and
// sampling with emulated/ in the place of CUDA; and a walk over the schedule as the Hopper kernel's
// producer sees it, with plain arithmetic in the place of its copies and products. CTAs run one after another.
#include <algorithm>
#include <cmath>
#include <vector>

#include "cuda_emulation.h"

namespace attn {
alignas(1024) char shared[256 << 10];  // shared memory of the CTAs that run together
namespace sm80 {
extern char shared[256 << 10] __attribute__((alias("_ZN4attn6sharedE")));
}
}  // namespace attn

namespace emulation {

char* const shared_memory = attn::shared;
const size_t shared_bytes = sizeof(attn::shared);

uint64_t time() {
  static uint64_t now = 0;
  return now += 1000;
}

bool loses_messages() { return false; }

}  // namespace emulation

#include "attention/merge/merge.cuh"
#include "attention/merge/merge_states.cuh"
#include "attention/sm80/attention.cuh"
#include "attention/sm90/work_item.cuh"
#include "cache/append.cu"
#include "plan_params.h"
#include "sampling/device/speculative.cuh"
#include "sampling/device/unfiltered.cuh"
#include "sampling/device/write_rows.cuh"
#include "slanted_variant.h"

namespace {

using namespace attn;

/// What ctypes passes. strides, in elements: row and head of q, of o; page, token and head of k, of v. sizes: rows of
/// q, pages, head_dim, page_size.
struct PassedAttention {
  const void* q;
  const void* k;
  const void* v;
  void* o;
  float* lse;
  float* partial_o;
  float* partial_lse;
  int64_t strides[10];
  int64_t sizes[4];
  double sm_scale;
  double variant_value;  // logits_soft_cap, or SlantedVariant's slope
  int64_t is_bf16;
  int64_t variant;  // VariantNumber
  const float* sinks;
};

enum VariantNumber : int64_t { kStandard = 0, kSlanted = 1, kSquared = 2, kPlaced = 3 };

AttentionParams passed_attention(const ScheduleConfig& config, void* workspace, const PassedAttention& passed) {
  const int64_t* s = passed.strides;
  AttentionParams params{};
  params.schedule = Schedule(workspace, ScheduleLayout(config));
  params.q = passed.q;
  params.q_row_stride = s[0];
  params.q_head_stride = s[1];
  params.o = passed.o;
  params.o_row_stride = s[2];
  params.o_head_stride = s[3];
  params.k = KvTensor{passed.k, s[4], s[5], s[6]};
  params.v = KvTensor{passed.v, s[7], s[8], s[9]};
  params.lse = passed.lse;
  params.partial_o = passed.partial_o;
  params.partial_lse = passed.partial_lse;
  params.num_rows = static_cast<int32_t>(passed.sizes[0]);
  params.num_pages = static_cast<int32_t>(passed.sizes[1]);
  params.head_dim = static_cast<int32_t>(passed.sizes[2]);
  params.page_size = FastDivisor(static_cast<int32_t>(passed.sizes[3]));
  params.max_merge_rows = config.max_merge_rows;
  params.num_kv_heads = config.num_kv_heads;
  params.num_ctas = config.num_ctas;
  params.max_tile_rows = tile_rows(config.max_kind);
  params.kv_tile = config.kv_tile;
  params.group_size = FastDivisor(config.group_size);
  params.sm_scale = static_cast<float>(passed.sm_scale);
  const float value = static_cast<float>(passed.variant_value);
  params.sinks = passed.sinks;
  params.adds_up = passed.variant == kSquared;
  if (passed.variant == kSlanted || passed.variant == kPlaced) {
    params.variant.set(SlantedVariant::Params{value});
  } else {
    params.variant.set(StandardVariant::Params{value});
  }
  return params;
}

// Of the running launch.
AttentionParams launched;
AppendParams launched_append;
MergeStatesParams launched_merge;
SamplingParams launched_sampling;
bool is_bf16;
constexpr int kElementBytes = 2;

uint16_t element_of(float x) { return static_cast<uint16_t>(is_bf16 ? ptx::bf16_of(x) : ptx::f16_of(x)); }
float value_of(const void* element) {
  uint16_t bits;
  std::memcpy(&bits, element, sizeof(bits));
  return is_bf16 ? ptx::bf16_element(bits, 0) : ptx::f16_element(bits, 0);
}

/// One row of a work item, computed from what the producer tells the consumers.
void compute_row(const AttentionParams& params, const sm90::LoadedRowTile& tile, const sm90::WorkItem& item,
                 const OutputTarget<BFloat16, true, WithSinks<StandardVariant>>& target, int32_t tile_row) {
  const OutputRow row(params, item.rows, item.kv_head, tile_row);
  const OutputPlace place = target.place(tile_row);
  if (row.exists != (place.o != nullptr)) emulation::fail("a row exists in one place only");
  if (!row.exists) return;
  const StandardVariant variant(params.variant.as<StandardVariant::Params>(), item.kv_head);
  const int32_t position = item.rows.position(tile_row, params.group_size);
  const int32_t end = min_of(item.first_token + item.num_kv_tiles * params.kv_tile, item.readable.end);
  const char* const q = static_cast<const char*>(params.q) +
                        (row.row * params.q_row_stride + row.qo_head * params.q_head_stride) * kElementBytes;
  std::vector<double> o(static_cast<size_t>(params.head_dim), 0.0);
  double maximum = -INFINITY, sum = 0.0;
  for (int32_t token = max_of(item.first_token, item.readable.begin); token < end; ++token) {
    if (!item.visibility.sees(position, token)) continue;
    const int32_t page = tile.page(params, tile.entry(params, token));
    const auto find = [&](const KvTensor& t) {
      const int64_t element =
          page * t.page_stride + params.page_size.modulo(token) * t.token_stride + item.kv_head * t.head_stride;
      return static_cast<const char*>(t.data) + element * kElementBytes;
    };
    const char *const k = find(params.k), *const v = find(params.v);
    double logit = 0.0;
    for (int32_t i = 0; i < params.head_dim; ++i)
      logit += static_cast<double>(value_of(q + i * kElementBytes)) * value_of(k + i * kElementBytes);
    logit *= params.sm_scale;
    if (variant.transforms_logits()) logit = variant.logits(static_cast<float>(logit), ScoreRow{}, token);
    const double higher = std::max(maximum, logit), kept = std::exp(maximum - higher),
                 weight = std::exp(logit - higher);
    sum = sum * kept + weight;
    maximum = higher;
    for (int32_t i = 0; i < params.head_dim; ++i)
      o[static_cast<size_t>(i)] = o[static_cast<size_t>(i)] * kept + weight * value_of(v + i * kElementBytes);
  }
  if (target.has_sinks()) {
    const double sink = params.sinks[row.qo_head], higher = std::max(maximum, sink);
    const double kept = sum > 0.0 ? std::exp(maximum - higher) : 0.0;
    sum = sum * kept + (sink > -INFINITY ? std::exp(sink - higher) : 0.0);
    for (double& value : o) value *= kept;
    maximum = higher;
  }
  for (int32_t i = 0; i < params.head_dim; ++i) {
    const float value = static_cast<float>(sum > 0.0 ? o[static_cast<size_t>(i)] / sum : 0.0);
    if (target.complete)
      reinterpret_cast<uint16_t*>(place.o)[i] = element_of(value);
    else
      reinterpret_cast<float*>(place.o)[i] = value;
  }
  if (place.lse != nullptr) *place.lse = static_cast<float>(sum > 0.0 ? maximum + std::log(sum) : -INFINITY);
}

/// A CTA's interval from `cursor` on, or the pair that it has taken.
void walk(const AttentionParams& params, WorkCursor cursor) {
  while (!cursor.done()) {
    const sm90::LoadedRowTile tile(params, cursor.now.tile);
    const sm90::WorkItem item(params, tile, cursor);
    if (item.num_kv_tiles < 1) emulation::fail("a work item of no KV tiles");
    const OutputTarget<BFloat16, true, WithSinks<StandardVariant>> target(
        params, item.rows, item.group, item.kv_head, item.starts_inside != 0, item.ends_inside != 0);
    for (int32_t row = 0; row < tile_rows(item.kind); ++row) compute_row(params, tile, item, target, row);
    cursor.next_pair(params.num_kv_heads);
  }
}

/// As the Hopper kernel's CTAs: each its interval, in any order; or, where pairs are taken in turn, each pair by
/// anyone.
void walk_schedule(const AttentionParams& params) {
  const bool uses_queue = WorkCursor(params.schedule, 0).uses_queue();
  const int32_t num_tiles = params.schedule.header->num_tiles;
  std::vector<int32_t> order(static_cast<size_t>(uses_queue ? num_tiles * params.num_kv_heads : params.num_ctas));
  for (size_t i = 0; i < order.size(); ++i) order[i] = static_cast<int32_t>(i);
  for (size_t i = order.size(); i > 1; --i) std::swap(order[i - 1], order[emulation::random() % i]);
  for (const int32_t number : order) {
    blockIdx.x = uses_queue ? static_cast<int32_t>(emulation::random()) % params.num_ctas : number;
    WorkCursor cursor(params.schedule, blockIdx.x);
    if (uses_queue)
      cursor.take(queued_pair(params.schedule, params.group_size, params.num_kv_heads, num_tiles, number));
    walk(params, cursor);
  }
}

template <class Element, int kHeadDim, class Variant = WithSinks<StandardVariant>>
void run_attention(const AttentionParams& params, uint32_t seed) {
  for (int32_t cta = 0; cta < params.num_ctas; ++cta) {
    emulation::run_cta(cta, params.num_ctas, sm80::kThreads, seed,
                       [] { sm80::attention<Traits<Element, Element, HeadShape<kHeadDim>, Variant>>(launched); });
  }
}

/// The kernels of csrc/sampling/device, whose shared memory would be each thread's own here.
template <class Shared>
Shared& shared_of_cta() {
  return *reinterpret_cast<Shared*>(shared + sizeof(shared) / emulation::cluster_size() * emulation::cluster_rank());
}

template <class Source>
void sample_row_unfiltered() {
  const Source source(launched_sampling, blockIdx.y);
  UnfilteredRow<Source>{launched_sampling, source, shared_of_cta<UnfilteredShared>(), blockIdx.y, blockIdx.x, gridDim.x}
      .run();
}

template <class Source>
void sample_row() {
  const Source source(launched_sampling, blockIdx.y);
  RowSampler<Source>(launched_sampling, source, shared_of_cta<SamplingShared>()).run();
}

template <class Source>
void write_row() {
  write_rows(launched_sampling, Source(launched_sampling, blockIdx.y), shared_of_cta<SamplingShared>());
}

void speculate_row() { speculate(launched_sampling, shared_of_cta<SamplingShared>()); }

template <class Source>
void (*thread_of_task(bool unfiltered))() {
  if (launched_sampling.task != RowTask::kSample) return write_row<Source>;
  if constexpr (!std::is_same_v<Source, ProbSource<false>>) {
    if (unfiltered) return sample_row_unfiltered<Source>;
  }
  return sample_row<Source>;
}

}  // namespace

/// Attention and merge of what `workspace` holds. generic: by the generic kernel, otherwise by the walk.
/// rows_of_blocks: blocks of the merge kernel for each CTA.
extern "C" void device_attention(const ScheduleConfig* config, void* workspace, const PassedAttention* passed,
                                 int32_t generic, int32_t rows_of_blocks, uint32_t seed) {
  launched = passed_attention(*config, workspace, *passed);
  is_bf16 = passed->is_bf16 != 0;
  if (!generic)
    walk_schedule(launched);
  else if (passed->variant == kSlanted && is_bf16 && launched.head_dim == 64)
    run_attention<BFloat16, 64, SlantedVariant>(launched, seed);
  else if (passed->variant == kPlaced && is_bf16 && launched.head_dim == 64)
    run_attention<BFloat16, 64, PlacedVariant>(launched, seed);
  else if (passed->variant == kSquared && is_bf16 && launched.head_dim == 64)
    run_attention<BFloat16, 64, SquaredVariant>(launched, seed);
  else if (is_bf16 && launched.head_dim == 64)
    run_attention<BFloat16, 64>(launched, seed);
  else if (!is_bf16 && launched.head_dim == 128)
    run_attention<Float16, 128>(launched, seed);
  else if (is_bf16 && launched.head_dim == 256)
    run_attention<BFloat16, 256>(launched, seed);
  else
    emulation::fail("this kernel is not compiled");
  void (*const merges)() = passed->variant == kSlanted  ? [] { merge<BFloat16, SlantedVariant>(launched); }
                           : passed->variant == kPlaced ? [] { merge<BFloat16, PlacedVariant>(launched); }
                           : is_bf16                    ? [] { merge<BFloat16>(launched); }
                                                        : [] { merge<Float16>(launched); };
  gridDim.y = rows_of_blocks;
  for (blockIdx.y = 0; blockIdx.y < gridDim.y; ++blockIdx.y) {
    for (int32_t cta = 0; cta < launched.num_ctas; ++cta) {
      emulation::run_cta(cta, launched.num_ctas, kMergeThreads, seed, merges);
    }
  }
  blockIdx.y = 0;
  gridDim.y = 1;
}

/// A launch of sampling. element: 0 float32 logits, 1 bfloat16 logits, 2 probabilities. ctas: of a row; unfiltered: by
/// the kernel for rows without filters, one after another, else together as a cluster.
extern "C" void device_sample(const SamplingParams* params, int32_t element, int32_t ctas, int32_t unfiltered,
                              uint32_t seed) {
  launched_sampling = *params;
  const bool masked = params->token_mask != nullptr;
  void (*const thread)() = params->task == RowTask::kSpeculate ? speculate_row
                           : element == 2                      ? thread_of_task<ProbSource<false>>(false)
                           : element == 1 ? (masked ? thread_of_task<LogitSource<BFloat16Element, true>>(unfiltered)
                                                    : thread_of_task<LogitSource<BFloat16Element, false>>(unfiltered))
                                          : (masked ? thread_of_task<LogitSource<Float32Element, true>>(unfiltered)
                                                    : thread_of_task<LogitSource<Float32Element, false>>(unfiltered));
  gridDim.y = params->batch;
  for (blockIdx.y = 0; blockIdx.y < gridDim.y; ++blockIdx.y) {
    if (unfiltered) {
      for (int32_t cta = 0; cta < ctas; ++cta) emulation::run_cta(cta, ctas, kSamplingThreads, seed, thread);
    } else {
      emulation::run_cluster(ctas, kSamplingThreads, seed, thread);
    }
  }
  ptx::deliver_all();
  blockIdx.y = 0;
  gridDim.y = 1;
}

/// pointers: k, v, K and V of the cache, slots. strides, in elements: token and head of k, of v; page, token and head
/// of the cache's K, of its V. sizes: tokens, pages, page_size, KV heads, head_dim, bytes of an element, whether slots
/// are int64.
extern "C" void device_append(const void* const* pointers, const int64_t* strides, const int64_t* sizes,
                              int32_t blocks) {
  AppendParams& params = launched_append;
  params = AppendParams{};
  params.k = pointers[0];
  params.v = pointers[1];
  params.k_token_stride = strides[0];
  params.k_head_stride = strides[1];
  params.v_token_stride = strides[2];
  params.v_head_stride = strides[3];
  params.k_cache = KvTensor{pointers[2], strides[4], strides[5], strides[6]};
  params.v_cache = KvTensor{pointers[3], strides[7], strides[8], strides[9]};
  params.slots = IndexArray{pointers[4], static_cast<int32_t>(sizes[6])};
  params.num_tokens = static_cast<int32_t>(sizes[0]);
  params.num_pages = static_cast<int32_t>(sizes[1]);
  params.page_size = FastDivisor(static_cast<int32_t>(sizes[2]));
  params.num_kv_heads = static_cast<int32_t>(sizes[3]);
  params.element_bytes = static_cast<int32_t>(sizes[5]);
  params.head_bytes = static_cast<int32_t>(sizes[4]) * params.element_bytes;
  for (int32_t block = 0; block < blocks; ++block) {
    emulation::run_cta(block, blocks, kAppendThreads, 0, [] { append_kernel(launched_append); });
  }
}

/// pointers: o, lse, out, out_lse, indptr (int64) or nullptr, mask or nullptr. strides, in elements: row, state and
/// head of o; row and state of lse; row and head of out; row of out_lse. sizes: states, rows, heads, head_dim,
/// DataType.
extern "C" void device_merge_states(const void* const* pointers, const int64_t* strides, const int64_t* sizes,
                                    double to_log2, int32_t blocks) {
  MergeStatesParams& params = launched_merge;
  params = MergeStatesParams{};
  params.o = pointers[0];
  params.lse = static_cast<const float*>(pointers[1]);
  params.out = const_cast<void*>(pointers[2]);
  params.out_lse = static_cast<float*>(const_cast<void*>(pointers[3]));
  params.indptr = IndexArray{pointers[4], 1};
  params.mask = static_cast<const uint8_t*>(pointers[5]);
  params.o_row_stride = strides[0];
  params.o_state_stride = strides[1];
  params.o_head_stride = strides[2];
  params.lse_row_stride = strides[3];
  params.lse_state_stride = strides[4];
  params.out_row_stride = strides[5];
  params.out_head_stride = strides[6];
  params.out_lse_row_stride = strides[7];
  params.num_states = static_cast<int32_t>(sizes[0]);
  params.num_rows = static_cast<int32_t>(sizes[1]);
  params.num_heads = static_cast<int32_t>(sizes[2]);
  params.head_dim = static_cast<int32_t>(sizes[3]);
  params.dtype = static_cast<DataType>(sizes[4]);
  params.to_log2 = static_cast<float>(to_log2);
  for (int32_t block = 0; block < blocks; ++block) {
    emulation::run_cta(block, blocks, kMergeStatesThreads, 0, [] {
      if (launched_merge.dtype == DataType::kFloat32) {
        merge_states<Float32State>(launched_merge);
      } else if (launched_merge.dtype == DataType::kFloat16) {
        merge_states<Float16>(launched_merge);
      } else {
        merge_states<BFloat16>(launched_merge);
      }
    });
  }
}
