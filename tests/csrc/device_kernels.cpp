// Append and sampling on a CPU, for ctypes: their kernels with emulated/ in the place of CUDA. CTAs run one after
// another, but for clusters.
#include <type_traits>

#include "cuda_emulation.h"

namespace attn {
alignas(1024) char shared[256 << 10];  // shared memory of the CTAs that run together
}  // namespace attn

namespace emulation {

char* const shared_memory = attn::shared;
const size_t shared_bytes = sizeof(attn::shared);

uint64_t time() {
  static uint64_t now = 0;
  return now += 100'000;
}

bool loses_messages() { return false; }

}  // namespace emulation

#include "attention/merge/merge_states.cuh"
#include "cache/append.cu"
#include "sampling/device/speculative.cuh"
#include "sampling/device/unfiltered.cuh"
#include "sampling/device/write_rows.cuh"

namespace {

using namespace attn;

constexpr int32_t kMaxConcurrentCtas = 4;  // of a row without filters, which the emulation can run together

// Of the running launch.
AppendParams launched_append;
MergeStatesParams launched_merge;
SamplingParams launched_sampling;

/// The kernels of csrc/sampling/device, whose shared memory would be each thread's own here.
template <class Shared>
Shared& shared_of_cta() {
  const int32_t part = static_cast<int32_t>(sizeof(shared)) / emulation::cluster_size() / 1024 * 1024;
  return *reinterpret_cast<Shared*>(shared + part * emulation::cluster_rank());
}

template <class Source>
void sample_row_unfiltered() {
  const Source source(launched_sampling, blockIdx.y);
  const int32_t rank = emulation::cluster_size() > 1 ? emulation::cluster_rank() : blockIdx.x;
  UnfilteredRow<Source>{launched_sampling, source, shared_of_cta<UnfilteredShared>(), blockIdx.y, rank, gridDim.x}
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

/// A launch of sampling.
/// element: 0 for float32 logits, 1 for bfloat16 logits, 2 for probabilities.
/// ctas: of a row.
/// order: the CTAs of a row without filters, in the order in which they run. The last CTA waits for the others: those
/// that run after it are late. nullptr: they run together, or if they are too many, the last CTA opens the launch
/// number and then all run in turn. Returns the failure, or nullptr.
extern "C" const char* device_sample(const SamplingParams* params, int32_t element, int32_t ctas, int32_t unfiltered,
                                     uint32_t seed, const int32_t* order) {
  return emulation::failure_of(seed, [&] {
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
      if (unfiltered && order != nullptr) {
        for (int32_t i = 0; i < ctas; ++i) emulation::run_cta(order[i], ctas, kSamplingThreads, seed, thread);
      } else if (unfiltered && (ctas == 1 || ctas > kMaxConcurrentCtas)) {
        const LaunchNumber launch{static_cast<uint32_t*>(params->workspace) + blockIdx.y};
        if (ctas > 1) launch.open(*launch.word);
        for (int32_t cta = 0; cta < ctas; ++cta) emulation::run_cta(cta, ctas, kSamplingThreads, seed, thread);
      } else {
        gridDim.x = ctas;
        emulation::run_cluster(ctas, kSamplingThreads, seed, thread);
      }
    }
    ptx::deliver_all();
  });
}

/// pointers: k, v, K and V of the cache, slots. strides, in elements: token and head of k, of v; page, token and head
/// of the cache's K, of its V. sizes: tokens, pages, page_size, KV heads, head_dim, bytes of an element, whether slots
/// are int64. Returns what failed, or nullptr.
extern "C" const char* device_append(const void* const* pointers, const int64_t* strides, const int64_t* sizes,
                                     int32_t blocks) {
  AppendParams& params = launched_append;
  params = AppendParams{};
  params.k = HeadRows{pointers[0], strides[0], strides[1]};
  params.v = HeadRows{pointers[1], strides[2], strides[3]};
  params.k_cache = KvTensor{pointers[2], strides[4], strides[5], strides[6]};
  params.v_cache = KvTensor{pointers[3], strides[7], strides[8], strides[9]};
  params.slots = IndexArray{pointers[4], static_cast<int32_t>(sizes[6])};
  params.num_tokens = static_cast<int32_t>(sizes[0]);
  params.pages = CachePages{static_cast<int32_t>(sizes[1]), FastDivisor(static_cast<int32_t>(sizes[2]))};
  params.num_kv_heads = static_cast<int32_t>(sizes[3]);
  params.element_bytes = static_cast<int32_t>(sizes[5]);
  params.k_head_bytes = params.v_head_bytes = static_cast<int32_t>(sizes[4]) * params.element_bytes;
  return emulation::failure_of(0, [&] {
    for (int32_t block = 0; block < blocks; ++block)
      emulation::run_cta(block, blocks, kAppendThreads, 0, [] { append_kernel(launched_append); });
  });
}

/// pointers: o, lse, out, out_lse, indptr (int64) or nullptr, mask or nullptr. strides, in elements: row, state and
/// head of o; row and state of lse; row and head of out; row of out_lse. sizes: states, rows, heads, head_dim,
/// DataType. Returns what failed, or nullptr.
extern "C" const char* device_merge_states(const void* const* pointers, const int64_t* strides, const int64_t* sizes,
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
  return emulation::failure_of(0, [&] {
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
  });
}
