// Variants: functions compiled into the attention kernels that change the meaning of attention, softmax(Q K^T) V.
//
// Kernels are templates over a variant. The standard kernels have StandardVariant. Any other is the struct
// UserVariant, which attn_backend/variants/cpp.py writes from a user's functions or C++; its text is compiled in front
// of the kernel's. WithSinks, WithRotation, WithScales, WithScaledLoads and WithTokenScales wrap either of them.
//
// A variant is a struct derived from VariantBase that has any of
// - Params: plain data, at most VariantParams::kBytes, the same for a whole launch;
// - float logits(float logit, const ScoreRow& row, int32_t kv_position) const: the transformed logit; q . k * sm_scale
//   goes in, natural units in and out;
// - float bias_slope(const ScoreRow& row) const, next to a logits() that returns logit + bias_slope(row) * (kv_position
//   - row.position): GPU kernels then add that bias themselves, for less;
// - bool mask(const ScoreRow& row, int32_t kv_position) const: whether the row attends to the token;
// - TokenRange range(const ScoreRow& row) const, next to a mask() that is false outside of it: plans ask mask() only
//   about the tokens [begin, end), positions in the row's request;
// - float output(float value, const ScoreRow& row, int32_t column) const: the transformed output, once, where a row is
//   complete;
// - Pair query(Pair x, int32_t first, int32_t second, const ScoreRow& row) const: transforms two elements of a Q row,
//   from columns `first` and `second`; PairLayout kQueryPairs says which columns are a pair;
// - Pair key(Pair x, int32_t first, int32_t second, const KvToken& token) const: the same for a row of K, by kKeyPairs;
// - Pair value(Pair x, int32_t first, int32_t second, const KvToken& token) const: for a row of V, by kValuePairs;
// - static constexpr bool kUsesSoftmax = false: logits() returns weights; the output is the sum of weight times value.
// It is constructed from (const Params&, KV head) for each (row tile, KV head). It may keep references to its Params,
// which outlive it.
//
// A row sees an interval of tokens by its level's Visibility, which plans know: kernels skip KV tiles outside it and
// mask only those at its ends. mask() is asked for every score inside it. All hooks are also called for rows and
// tokens that do not exist; what they return is then not used, but they must not read outside their tensors
// (ParamTensor clamps).
//
// Rows of Q, K and V are transformed once for each tile that they are in, before it is multiplied, and rounded to
// elements again. A row of K or V is transformed once for all queries that read it: key() and value() know none of
// them. Where several requests share a prefix, its tokens have no request.
#pragma once

#include "cache/kv_cache.h"
#include "common/math.h"
#include "common/platform.h"
#include "planner/visibility.h"

namespace attn {

/// Coordinates of a row of scores.
struct ScoreRow {
  int32_t row;      // of Q
  int32_t request;  // its place in the batch
  int32_t qo_head;
  int32_t position;  // of the query among the tokens of its request, or as a level says (RowPositions)
  int32_t index;     // of the query among those of its request
  int32_t kv_len;    // tokens of its request
};

/// Coordinates of a row of K or V.
struct KvToken {
  int32_t request;   // its place in the batch; -1: several requests share the token
  int32_t position;  // among the tokens of its request
  int32_t kv_head;
  int32_t kv_len;  // tokens of its request; meaningless where several share the token
};

/// Two elements of a row of Q, K or V.
struct Pair {
  float first;
  float second;
};

/// Which elements of a row are pairs: those `distance` columns apart, in each run of 2 * distance columns. Columns from
/// `columns` on are left alone.
struct PairLayout {
  int32_t distance;  // 1, or a multiple of 8; 0: half of the head's columns
  int32_t columns;   // a multiple of 2 * distance; 0: all of the head's

  /// What 0 means for heads of `head_columns` columns.
  ATTN_HD constexpr PairLayout for_head(int32_t head_columns) const {
    return PairLayout{distance == 0 ? head_columns / 2 : distance, columns == 0 ? head_columns : columns};
  }
};

/// The Params of any variant, as bytes.
struct VariantParams {
  static constexpr int kBytes = 256;
  alignas(16) unsigned char bytes[kBytes];

  template <class Params>
  ATTN_HD const Params& as() const {
    static_assert(sizeof(Params) <= kBytes && alignof(Params) <= 16, "larger data belongs behind a pointer");
    return *reinterpret_cast<const Params*>(bytes);
  }

  template <class Params>
  void set(const Params& params) {
    static_assert(sizeof(Params) <= kBytes && alignof(Params) <= 16, "larger data belongs behind a pointer");
    __builtin_memcpy(bytes, &params, sizeof(Params));
  }
};

/// A tensor among a variant's Params. An index outside it is clamped to it: variants are also asked about tokens that
/// do not exist.
template <class T, int kDims>
struct ParamTensor {
  const T* data;
  int32_t sizes[kDims];
  int32_t strides[kDims];  // in elements

  template <class... Indices>
  ATTN_HD T operator()(Indices... indices) const {
    static_assert(sizeof...(Indices) == kDims, "an index for each dimension");
    const int32_t at[] = {static_cast<int32_t>(indices)...};
    int64_t element = 0;
    for (int i = 0; i < kDims; ++i) element += static_cast<int64_t>(clamp(at[i], 0, sizes[i] - 1)) * strides[i];
    return data[element];
  }
};

/// In the place of a hook that a variant does not have.
struct NoHook {};

/// The defaults of a variant.
struct VariantBase {
  struct Params {};
  static constexpr NoHook logits{}, bias_slope{}, mask{}, range{}, output{}, query{}, key{}, value{};
  static constexpr bool kUsesSoftmax = true;
  static constexpr bool kHasSinks = false;
  static constexpr bool kRotates = false;
  static constexpr bool kHasScales = false;
  static constexpr bool kHasQueryScale = false;
  static constexpr bool kLoadsScaled = false;
  static constexpr bool kHasTokenScales = false;
  static constexpr bool kIsStandard = false;
  static constexpr bool kMaskReadsHead = true;  // false: mask() is the same for all heads
  static constexpr bool kSkipsTiles = false;    // true: plan looks for holes in what mask() lets rows see, and KV tiles
                                                // in which no row of a row tile sees anything are skipped
  static constexpr bool kReadsRows = true;      // false: its hooks look at no ScoreRow, and none is made
  static constexpr PairLayout kQueryPairs{0, 0};
  static constexpr PairLayout kKeyPairs{0, 0};
  static constexpr PairLayout kValuePairs{0, 0};
};

/// A variant whose rows may have sinks (AttentionParams::sinks). It is a separate kernel, since it makes the plain
/// kernel's code 3 % longer.
template <class Variant>
struct WithSinks : Variant {
  static constexpr bool kHasSinks = true;

  using Variant::Variant;
};

/// A variant over a cache whose rows of K and V are rotated (common/rotation.h): the kernel rotates Q, and O back. The
/// variant must not transform rows.
template <class Variant>
struct WithRotation : Variant {
  static constexpr bool kRotates = true;

  using Variant::Variant;
};

/// A variant over a cache whose numbers have scales: a row's scores are multiplied by K's before logits() sees them,
/// its output by V's before output() does. kOfQuery: Q is of 8 bits, too, and its scale multiplies scores.
template <class Variant, bool kOfQuery = false>
struct WithScales : Variant {
  static constexpr bool kHasScales = true;
  static constexpr bool kHasQueryScale = kOfQuery;

  struct Params {
    AttentionScales scales;
    typename Variant::Params variant;
  };

  AttentionScales scales;
  int32_t kv_head;

  ATTN_HD WithScales(const Params& params, int32_t kv_head_)
      : Variant(params.variant, kv_head_), scales(params.scales), kv_head(kv_head_) {}
};

/// A variant over MLA's latents in 8 bits, which are multiplied by their scale, one for K and V, where they are
/// widened: on their way to KV tiles.
template <class Variant>
struct WithScaledLoads : Variant {
  static constexpr bool kLoadsScaled = true;

  struct Params {
    AttentionScales scales;
    typename Variant::Params variant;
  };

  ATTN_HD WithScaledLoads(const Params& params, int32_t kv_head) : Variant(params.variant, kv_head) {}
};

/// A variant over a cache with TokenScales. They multiply rows where these are dequantized to 16 bits. In Hopper's
/// decode, scales of int8, e4m3 and int4 multiply scores and probabilities (sm90/decode.cuh, sm90/packed_decode.cuh),
/// scales of FP4 the numbers (sm90/fp4_numbers.cuh).
template <class Variant>
struct WithTokenScales : Variant {
  static constexpr bool kHasTokenScales = true;

  struct Params {
    AttentionTokenScales scales;
    typename Variant::Params variant;
  };

  ATTN_HD WithTokenScales(const Params& params, int32_t kv_head) : Variant(params.variant, kv_head) {}
};

/// Where the variant's Params lie in the Params of WithScales, WithScaledLoads and WithTokenScales.
constexpr int32_t kScalesBytes = sizeof(AttentionScales);

/// The variant that a cache's scales were added to.
template <class Variant_>
struct WithoutScales {
  using Variant = Variant_;
};
template <class Variant_, bool kOfQuery>
struct WithoutScales<WithScales<Variant_, kOfQuery>> {
  using Variant = Variant_;
};

/// Which hooks a variant has: StandardVariant, UserVariant or a wrapper of them. Kernels ask here before they call one.
template <class Variant>
struct VariantHooks {
 private:
  template <class Hook>
  static constexpr bool kHas = !is_same<Hook, const NoHook*>;

 public:
  static constexpr bool kLogits = kHas<decltype(&Variant::logits)>;
  static constexpr bool kBiasSlope = kHas<decltype(&Variant::bias_slope)> && kLogits && Variant::kUsesSoftmax;
  static constexpr bool kMask = kHas<decltype(&Variant::mask)>;
  static constexpr bool kRange = kHas<decltype(&Variant::range)>;
  static constexpr bool kOutput = kHas<decltype(&Variant::output)>;
  static constexpr bool kQuery = kHas<decltype(&Variant::query)>;
  static constexpr bool kKey = kHas<decltype(&Variant::key)>;
  static constexpr bool kValue = kHas<decltype(&Variant::value)>;
};

/// tanh, to about 1e-6.
ATTN_HD float quick_tanh(float x) {
#if defined(__CUDA_ARCH__)
  // 1 - 2 / (exp(2x) + 1), in five instructions: each is emitted once for every score that a thread holds. (PTX as in
  // common/ptx/math.cuh, which is not for headers that g++ reads, too.)
  float power, inverse;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(power) : "f"(x * (2.0f * kLog2E)));
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(inverse) : "f"(power + 1.0f));
  return 1.0f - 2.0f * inverse;
#else
  return tanh_rational(x);
#endif
}

/// cap * tanh(logit / cap): Gemma 2, Grok.
ATTN_HD float soft_cap(float logit, float cap) {
#if defined(__CUDA_ARCH__)
  return cap * quick_tanh(logit * __fdividef(1.0f, cap));
#else
  return cap * quick_tanh(logit / cap);
#endif
}

/// The variant of the standard kernels: a soft cap, which may be off.
struct StandardVariant : VariantBase {
  struct Params {
    float logits_soft_cap;  // 0: off
  };

  static constexpr bool kIsStandard = true;
  static constexpr bool kReadsRows = false;

  float cap;

  ATTN_HD StandardVariant(const Params& params, int32_t /*kv_head*/) : cap(params.logits_soft_cap) {}
  ATTN_HD float logits(float logit, const ScoreRow&, int32_t /*kv_position*/) const { return soft_cap(logit, cap); }
};

/// Whether logits() is to be called; uniform over a launch. Only the standard variant says so at run time.
template <class Variant>
ATTN_HD constexpr bool transforms_logits(const Variant& variant) {
  if constexpr (Variant::kIsStandard) return variant.cap > 0.0f;
  return VariantHooks<Variant>::kLogits || !Variant::kUsesSoftmax;
}

}  // namespace attn
