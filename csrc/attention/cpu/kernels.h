// The attention kernels of each instruction set, as the executor sees them, and the memory they work in.
//
// Each instruction set has one source file, attention_<isa>.cpp, compiled with its own flags. The templates of
// attention_kernel.h and of the engines have the instruction set as a parameter, and every other inline function that
// they call is always inlined: no two of these files may define the same symbol, or the linker could keep the copy that
// this machine cannot run.
#pragma once

#include "attention/head_shape.h"
#include "attention/params.h"
#include "attention/variant/row_ranges.h"
#include "common/data_type.h"

namespace attn::cpu {

constexpr int32_t kMaxHeadDim = 576;
constexpr int32_t kMaxTileRows = tile_rows(kNumTileKinds - 1);  // a CPU also runs schedules of other designs
constexpr int32_t kMaxBlockTokens = 128;
constexpr int32_t kMaxPanelRows = 16;
constexpr int32_t kPanelBuffers = 2;
constexpr int32_t kMaxCtas = 4096;
constexpr int32_t kMaxBlockWords =
    64 * kMaxHeadDim;  // 4-byte words of a block's keys, or values: 64 tokens of floats or 128 of bf16

/// KV tiles [kv_tile_begin, kv_tile_end) of a (row tile, KV head).
struct WorkItem {
  int32_t tile;
  int32_t head;
  int32_t kv_tile_begin;
  int32_t kv_tile_end;
  int32_t partial;  // where its state goes: partial_slot(), kWhole for o and lse themselves, kRowStates for the states
                    // that its rows keep
};

constexpr int32_t kWhole = -1;
constexpr int32_t kRowStates = -2;

/// A (row tile, KV head) whose parts the consecutive CTAs [first_cta, last_cta] computed.
struct SplitPair {
  int32_t tile;
  int32_t head;
  int32_t first_cta;
  int32_t last_cta;
};

/// Addresses of the tokens of a block, and their scales, over a cache that has TokenScales.
struct TokenRows {
  const char* keys[kMaxBlockTokens];
  const char* values[kMaxBlockTokens];
  const float* key_scales[kMaxBlockTokens];
  const float* value_scales[kMaxBlockTokens];
  int count;
};

/// One thread's scratch memory.
struct alignas(64) Scratch {
  float q[kMaxTileRows * kMaxHeadDim];
  float keys[kMaxBlockWords];
  float values[kMaxBlockWords];
  float scores[kPanelBuffers][kMaxPanelRows * kMaxBlockTokens];
  float probabilities[kPanelBuffers][kMaxPanelRows * kMaxBlockTokens];
  float o[kMaxTileRows * kMaxHeadDim];  // not yet normalized
  float row_max[kMaxTileRows];          // what the row's exponentials are relative to, in powers of 2
  float row_sum[kMaxTileRows];
  float no_token[kMaxHeadDim];           // zeros: stands in for a token after the last of a block
  TokenRows tokens[2];                   // the block in work and the next one
  int64_t states[kMaxCtas + kMaxLinks];  // rows of partial_o that are being merged
};

/// The kernels' arguments.
struct CpuAttentionParams : LatentAttentionParams {
  bool is_mixed;  // Q and O have the other 16-bit type than the cache, which products take
  AttentionTokenScales token_scales;
  bool rotates;  // K and V are rotated (common/rotation.h)
};

using FindRowRanges = void (*)(const RowRangeParams&);

struct Kernels {
  /// `next`, if there is one, is what this thread will run after the item.
  void (*run_work_item)(const CpuAttentionParams&, HeadDims, const WorkItem&, const WorkItem* next, Scratch&);
  /// A pair that several CTAs share.
  void (*merge_pair)(const CpuAttentionParams&, HeadDims, const SplitPair&, Scratch&);
  /// All heads of a row that is in several row groups.
  void (*merge_row)(const CpuAttentionParams&, HeadDims, int32_t row, Scratch&);
  FindRowRanges find_row_ranges;  // of a variant with a mask; else nullptr
};

/// A shared library with the kernels of a variant exports one of these: `extern "C" const attn::cpu::VariantModule
/// attn_variant_module`. attn_backend/jit/cubins.py compiles the library on demand. The digest always stays the first
/// field.
struct VariantModule {
  const char* headers_digest;  // of those that it was compiled with (attn_backend/jit/compilers.py)
  Kernels kernels;
};

// The kernels of each instruction set for the dtype that products take. `widens`: over an 8-bit cache.
Kernels baseline_kernels(DataType dtype, bool widens);
Kernels avx2_kernels(DataType dtype, bool widens);
Kernels avx512_kernels(DataType dtype, bool widens);
Kernels amx_kernels(bool widens);  // bf16; head widths that are multiples of 32

}  // namespace attn::cpu
