#include "attention/cpu/executor.h"

#include <dlfcn.h>
#include <tvm/ffi/error.h>

#include <cstring>
#include <memory>
#include <vector>

#include "common/cpu/isa.h"
#include "common/cpu/parallel.h"
#include "planner/schedule.h"

namespace attn::cpu {
namespace {

// A job with less work is done before other threads have woken up.
constexpr int64_t kMinThreadedWork = 20000;  // about a nanosecond each
constexpr int64_t kMinThreadedBytes = 1 << 20;

Kernels choose_kernels(DataType dtype, bool widens, HeadDims dims) {
#if defined(__x86_64__)
  const Isa isa = current_isa();
  if (isa >= Isa::kAmx && dtype == DataType::kBFloat16 && dims.qk % 32 == 0 && dims.v % 32 == 0)
    return amx_kernels(widens);
  if (isa >= Isa::kAvx512) return avx512_kernels(dtype, widens);
  if (isa >= Isa::kAvx2) return avx2_kernels(dtype, widens);
#endif
  (void)dims;
  return baseline_kernels(dtype, widens);
}

/// This thread's scratch memory; made when a thread first works, kept for the thread's life.
Scratch& thread_scratch() {
  thread_local const std::unique_ptr<Scratch> scratch(new Scratch());
  return *scratch;
}

/// The next work item of a CTA's interval, from `position` on: the part of a (row tile, KV head) that the interval
/// touches. Returns false at the interval's end.
bool next_item(const AttentionParams& params, int32_t cta, Position& position, WorkItem& item) {
  const Position end = params.schedule.positions[cta + 1];
  if (!(position < end)) return false;
  const RowTile& tile = params.schedule.tiles[position.tile];
  const bool ends_inside = position.tile == end.tile && position.head == end.head;
  item =
      WorkItem{position.tile, position.head, position.kv_tile, ends_inside ? end.kv_tile : tile.num_kv_tiles, kWhole};
  if (item.kv_tile_begin > 0)
    item.partial = partial_slot(cta, kStartsInside);
  else if (params.schedule.groups[tile.group].state_begin >= 0)
    item.partial = kRowStates;
  else if (item.kv_tile_end < tile.num_kv_tiles)
    item.partial = partial_slot(cta, kEndsInside);
  position.kv_tile = 0;
  if (++position.head == params.num_kv_heads) {
    position.head = 0;
    ++position.tile;
  }
  return true;
}

void run_cta(const CpuAttentionParams& params, const Kernels& kernels, HeadDims dims, int32_t cta) {
  Position position = params.schedule.positions[cta];
  WorkItem item, next;
  for (bool more = next_item(params, cta, position, item); more; item = next) {
    more = next_item(params, cta, position, next);
    kernels.run_work_item(params, dims, item, more ? &next : nullptr, thread_scratch());
  }
}

/// The (row tile, KV head) pairs that start in one CTA's interval and end in a later one's, except those whose rows
/// keep states.
std::vector<SplitPair> find_split_pairs(const AttentionParams& params) {
  const Position* positions = params.schedule.positions;
  std::vector<SplitPair> pairs;
  for (int32_t cta = 0; cta + 1 < params.num_ctas; ++cta) {
    const Position end = positions[cta + 1];
    if (end.kv_tile == 0 || Position{end.tile, end.head, 0, 0} < positions[cta]) continue;
    if (params.schedule.groups[params.schedule.tiles[end.tile].group].state_begin >= 0) continue;
    int32_t last = cta + 1;
    while (last + 1 < params.num_ctas && positions[last + 1].tile == end.tile && positions[last + 1].head == end.head)
      ++last;
    pairs.push_back(SplitPair{end.tile, end.head, cta, last});
  }
  return pairs;
}

/// Rough cost of a schedule, in nanoseconds of a fast core.
int64_t estimate_work(const AttentionParams& params, HeadDims dims) {
  constexpr int64_t kTokenCost =
      8;  // reading and packing a token's key and value, in units of one row's products with them
  int64_t work = 0;
  for (int32_t i = 0; i < params.schedule.header->num_tiles && work < kMinThreadedWork; ++i) {
    const RowTile& tile = params.schedule.tiles[i];
    const int64_t packed_rows =
        int64_t{params.schedule.groups[tile.group].qo_len} * params.group_size.divisor - tile.packed_begin;
    const int64_t rows = min_of<int64_t>(packed_rows, tile_rows(tile.kind));
    work += int64_t{tile.num_kv_tiles} * params.kv_tile * (kTokenCost + rows) * params.num_kv_heads *
            (dims.qk + dims.v) / 128;
  }
  return work;
}

}  // namespace

Kernels load_variant(const char* file) {
  void* const library = dlopen(file, RTLD_NOW | RTLD_LOCAL);
  if (library == nullptr) TVM_FFI_THROW(RuntimeError) << "loading " << file << ": " << dlerror();
  const auto* const module = static_cast<const VariantModule*>(dlsym(library, "attn_variant_module"));
  if (module == nullptr) TVM_FFI_THROW(RuntimeError) << "loading " << file << ": it holds no kernels of a variant";
  if (std::strcmp(module->headers_digest, ATTN_HEADERS_DIGEST) != 0)
    TVM_FFI_THROW(RuntimeError) << "loading " << file
                                << ": it was compiled from other headers than libattn_backend.so; reinstall "
                                   "attn-backend, whose csrc/ and lib/ do not belong together";
  return module->kernels;
}

void run_attention(const LatentAttentionParams& given, const AttentionTokenScales& token_scales, DataType dtype,
                   DataType kv_dtype, HeadDims dims, bool rotates, const Kernels* variant_kernels) {
  const bool widens = is_in_bytes(kv_dtype);
  const CpuAttentionParams params{given, !widens && kv_dtype != dtype, token_scales, rotates};
  const Kernels kernels =
      variant_kernels != nullptr ? *variant_kernels : choose_kernels(widens ? dtype : kv_dtype, widens, dims);
  const bool use_threads = estimate_work(params, dims) >= kMinThreadedWork;
  auto run = [&](int32_t cta) { run_cta(params, kernels, dims, cta); };
  parallel_for(params.num_ctas, use_threads, run);

  auto merge_row = [&](int32_t row) { kernels.merge_row(params, dims, row, thread_scratch()); };
  parallel_for(params.schedule.header->num_merge_rows, use_threads, merge_row);
  const std::vector<SplitPair> pairs = find_split_pairs(params);
  int64_t parts = 0;
  for (const SplitPair& pair : pairs) parts += pair.last_cta - pair.first_cta + 1;
  auto merge_pair = [&](int32_t i) {
    kernels.merge_pair(params, dims, pairs[static_cast<size_t>(i)], thread_scratch());
  };
  parallel_for(static_cast<int32_t>(pairs.size()), parts * params.max_tile_rows * dims.v * 4 >= kMinThreadedBytes,
               merge_pair);
}

}  // namespace attn::cpu
