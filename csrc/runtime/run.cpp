// Attention.run (attn_backend/kernels/attention.py), bound with tvm-ffi: checks the arguments. Attention::run
// (attention.cpp) then launches the kernels or runs the CPU's loops.
#include <limits>
#include <optional>
#include <string>

#include "cache/kv_cache.h"
#include "runtime/arguments.h"
#include "runtime/attention.h"
#include "runtime/checks.h"
#include "runtime/driver.h"

namespace attn {
namespace {

/// The arguments of a run. Calls may end before any argument from q_rope on.
#define RUN_ARGUMENTS(ARGUMENT)                                                                           \
  ARGUMENT(int64_t, handle)                                                                               \
  ARGUMENT(TensorView, q)                                                                                 \
  ARGUMENT(TensorView, k)           /* any form of pages() */                                             \
  ARGUMENT(Optional<TensorView>, v) /* None only with k_rope */                                           \
  ARGUMENT(TensorView, out)                                                                               \
  ARGUMENT(Optional<TensorView>, lse)                                                                     \
  ARGUMENT(double, sm_scale)                                                                              \
  ARGUMENT(double, logits_soft_cap)                                                                       \
  ARGUMENT(bool, after_append)                                                                            \
  ARGUMENT(Optional<TensorView>, q_rope) /* the last columns of Q, where they are not in q */             \
  ARGUMENT(AnyView, k_scale)             /* of an 8-bit cache: KvScale */                                 \
  ARGUMENT(AnyView, v_scale)                                                                              \
  ARGUMENT(AnyView, q_scale) /* the same of Q of 8 bits */                                                \
  ARGUMENT(Optional<TensorView>, sinks)                                                                   \
  ARGUMENT(Optional<bool>, lse_to_base_2)                                                                 \
  ARGUMENT(Optional<bool>, is_hnd)       /* K and V of three dimensions */                                \
  ARGUMENT(Optional<TensorView>, k_rope) /* the last columns of K, right after the others; V is then k */ \
  ARGUMENT(AnyView, out_scale)           /* of O in 8 bits; None: O has the Attention's dtype */          \
  ARGUMENT(Optional<double>, k_factor)   /* of all scales of blocks; None: 1 */                           \
  ARGUMENT(Optional<double>, v_factor)                                                                    \
  ARGUMENT(Optional<TensorView>, indices) /* and what follows: a Selection */                             \
  ARGUMENT(Optional<TensorView>, block_table)                                                             \
  ARGUMENT(Optional<TensorView>, requests)                                                                \
  ARGUMENT(Optional<TensorView>, kv_lens)                                                                 \
  ARGUMENT(Optional<int64_t>, page_size)                                                                  \
  ARGUMENT(Optional<int64_t>, page_stride)
ATTN_ARGUMENTS(RunArguments, RUN_ARGUMENTS);

// ---- Callers pass Q, K and V in several forms. They become the form that the checks and the kernels take. Nothing is
// copied.

/// A tensor with the dimensions that are wanted, over another one's memory.
class TensorForm {
 public:
  static constexpr int32_t kMaxDims = 4;

  /// The tensor as it is; it has at most kMaxDims dimensions.
  explicit TensorForm(const TensorView& t)
      : data_(t.data_ptr()), device_(t.device()), dtype_(t.dtype()), dims_(t.ndim()) {
    for (int32_t dim = 0; dim < dims_; ++dim) set(dim, t.size(dim), t.stride(dim));
  }

  /// A tensor of three dimensions as one of four. Dimension `added` has size 1.
  TensorForm unsqueezed(int32_t added) const {
    TensorForm form = *this;
    form.dims_ = 4;
    for (int32_t dim = 0; dim < 3; ++dim) form.set(dim + (dim >= added), shape_[dim], strides_[dim]);
    form.set(added, 1, 0);
    return form;
  }

  TensorForm transposed(int32_t a, int32_t b) const {
    TensorForm form = *this;
    form.set(a, shape_[b], strides_[b]);
    form.set(b, shape_[a], strides_[a]);
    return form;
  }

  TensorForm with_columns(int64_t columns) const {
    TensorForm form = *this;
    form.shape_[dims_ - 1] = columns;
    return form;
  }

  /// A dimension of size 1 gets the stride that it has in a contiguous tensor. Its own stride is never used and may be
  /// anything, but the alignment check reads strides.
  TensorForm with_plain_strides() const {
    TensorForm form = *this;
    for (int32_t dim = dims_ - 1; dim >= 0; --dim) {
      if (shape_[dim] == 1) form.strides_[dim] = dim == dims_ - 1 ? 1 : form.strides_[dim + 1] * shape_[dim + 1];
    }
    return form;
  }

  /// Ends with this object.
  TensorView view() const {
    const DLTensor tensor{data_, device_, dims_, dtype_, const_cast<int64_t*>(shape_), const_cast<int64_t*>(strides_),
                          0};
    return TensorView(&tensor);
  }

 private:
  void set(int32_t dim, int64_t size, int64_t stride) {
    shape_[dim] = size;
    strides_[dim] = stride;
  }

  void* data_;
  DLDevice device_;
  DLDataType dtype_;
  int32_t dims_;
  int64_t shape_[kMaxDims];
  int64_t strides_[kMaxDims];
};

/// K and V as [pages, page_size, num_kv_heads, columns].
struct KvPair {
  TensorForm k;
  TensorForm v;
};

/// K or V that has these dimensions; or one request after another, as pages of one token: [tokens, num_kv_heads,
/// columns], or [num_kv_heads, tokens, columns] if `is_hnd`.
TensorForm pages(const char* name, const TensorView& t, bool is_hnd) {
  if (t.ndim() != 3) {
    check_shape(name, t, {{"pages"}, {"page_size"}, {"num_kv_heads"}, {"head_dim"}});
    return TensorForm(t).with_plain_strides();
  }
  const TensorForm tokens(t);
  return (is_hnd ? tokens.transposed(0, 1) : tokens).unsqueezed(1).with_plain_strides();
}

/// Two tensors [.., .., columns] as one: the rows of `right` follow the rows of `left`.
TensorForm joined(const char* left_name, const TensorView& left, const char* right_name, const TensorView& right) {
  check_device(right_name, right, left.device());
  check_dtype(right_name, right, left.dtype());
  check_shape(left_name, left, {{"rows"}, {"heads or tokens"}, {"columns"}});
  check_shape(right_name, right, {{"rows", left.size(0)}, {"heads or tokens", left.size(1)}, {"columns"}});
  const int64_t columns = left.size(2), more = right.size(2);
  if (left.numel() > 0 && more > 0) {
    const bool follows =
        static_cast<char*>(right.data_ptr()) == static_cast<char*>(left.data_ptr()) + columns * left.dtype().bits / 8;
    bool has_its_strides = left.stride(2) == 1 && right.stride(2) == 1;
    for (int32_t dim = 0; dim < 2; ++dim)
      has_its_strides &= left.size(dim) == 1 || left.stride(dim) == right.stride(dim);
    if (!follows || !has_its_strides)
      refuse(right_name, "elsewhere", std::string("right after ") + left_name + ", in the same rows");
  }
  return TensorForm(left).with_columns(columns + more);
}

/// Latents of MLA, [pages, page_size, columns]; V is their first `v_columns`.
KvPair latent_pages(const TensorForm& latents, int64_t v_columns) {
  const TensorForm k = latents.unsqueezed(2).with_plain_strides();
  return KvPair{k, k.with_columns(v_columns)};
}

// ---- Checks ----

/// Refuses latents in 8 bits whose K and V differ: a GPU's kernels widen and scale them once, while they load them.
void check_scaled_on_load(const AttentionParams& params, int64_t page_size, int64_t num_kv_heads,
                          const AttentionScales& scales) {
  if (!v_is_in_k(params.k, params.v, params.num_pages, page_size, num_kv_heads))
    refuse("kv.v", "a tensor of its own", "the first columns of kv.k, as KVCache.from_latent makes it");
  const auto is_one = [](const KvScale& scale) { return scale.head_stride == 0 && !scale.is_of_requests(); };
  if (!is_one(scales.k) || !is_one(scales.v) || scales.k.data != scales.v.data || scales.k.value != scales.v.value)
    refuse("kv.v_scale", "another one than kv.k_scale, or one of several",
           "kv.k_scale, one for all: K and V are the same bytes");
}

/// K's or V's scale. If requests have scales, all requests of the plan must, and its levels must say which request
/// each row belongs to.
KvScale checked_scale(const char* name, const AnyView& scale, const Attention& attention) {
  const AttentionConfig& config = attention.config();
  if (config.token_scales) return KvScale{nullptr, 1.0f, 0, 0, 1};
  const std::optional<TensorView> tensor = scale == nullptr ? std::nullopt : scale.try_cast<TensorView>();
  if (tensor && tensor->ndim() == 3)
    refuse(std::string(name) + ".shape", shape_of(*tensor),
           "[], [num_kv_heads] or [batch, num_kv_heads], or the Attention made with token_scales=True");
  const KvScale made = kv_scale(name, scale, config.dl_device(), config.num_kv_heads);
  if (!made.is_of_requests()) return made;
  const int32_t batch = attention.planned_batch();
  if (batch < 0)
    refuse(
        std::string(name) + ".shape", "[batch, ...]",
        "a scale for all requests, or the composition made with `requests`: row groups of its levels are not requests");
  if (made.num_requests < batch)
    refuse(std::string(name) + ".shape[0]", made.num_requests,
           "at least " + std::to_string(batch) + ", the requests of the plan");
  return made;
}

/// A scale as text for error messages.
std::string text_of(const TensorOrNumber& scale) { return scale.tensor ? "a tensor" : std::to_string(scale.number); }

/// Q's scale, the same for all requests.
KvScale checked_q_scale(const AnyView& given, const Attention& attention) {
  const AttentionConfig& config = attention.config();
  const TensorOrNumber scale("q_scale", given, 1.0);
  if (!is_in_bytes(config.q_dtype) && (scale.tensor || scale.number != 1.0))
    refuse("q_scale", text_of(scale), "None: q is not of 8 bits");
  const KvScale made = kv_scale("q_scale", given, config.dl_device(), config.num_kv_heads);
  if (scale.tensor && made.is_of_requests())
    refuse("q_scale.shape", shape_of(*scale.tensor),
           "[], [1] or [num_kv_heads = " + std::to_string(config.num_kv_heads) + "]");
  return made;
}

/// The scale of O in 8 bits: one number above 0, or a tensor of one.
void set_out_scale(const AnyView& given, const Attention& attention, AttentionParams& params) {
  const TensorOrNumber scale("out_scale", given, 0.0);
  if (!scale.tensor && scale.number == 0.0) return;
  if (!attention.config().float8_out)
    refuse("out_scale", text_of(scale), "None, or the Attention made with float8_out=True");
  if (!scale.tensor) {
    params.out_scale = static_cast<float>(scale.number);
    return;
  }
  const TensorView& t = *scale.tensor;
  check_tensor("out_scale", t, attention.config().dl_device());
  check_dtype("out_scale", t, kFloat32);
  if (t.numel() != 1) refuse("out_scale.shape", shape_of(t), "of one element");
  params.out_scale_data = static_cast<const float*>(t.data_ptr());
}

/// A number above 0, or 0 if that is allowed, that a float32 holds.
float checked_float(const char* name, double value, bool zero_is_allowed, const char* must_be) {
  const bool is_large_enough = value > 0.0 || (zero_is_allowed && value == 0.0);
  if (!is_large_enough || value > std::numeric_limits<float>::max()) refuse(name, value, must_be);
  return static_cast<float>(value);
}

/// Q: one tensor, or its first columns, as many as V has, and in `q_rope` the others.
void set_q(const TensorView& q, const Optional<TensorView>& q_rope, const AttentionConfig& config,
           LatentAttentionParams& params) {
  const DLDevice device = config.dl_device();
  const HeadDims dims = config.dims();
  const Dim heads{"num_qo_heads", config.num_qo_heads};
  if (q_rope.has_value() && (config.on_cuda ? !is_latent(dims) : dims.qk <= dims.v))
    refuse("q_rope", "a tensor",
           "None with head_dim = " + std::to_string(dims.qk) + " and head_dim_v = " + std::to_string(dims.v) +
               (config.on_cuda ? ": it is for 576 and 512" : ": q has all columns"));
  const Dim columns = q_rope.has_value() ? Dim{"head_dim_v", dims.v} : Dim{"head_dim", dims.qk};
  check_rows("q", q, device, dl_dtype(config.q_dtype), {{"rows"}, heads, columns});
  params.num_rows = narrow("q.shape[0] (rows)", q.size(0));
  params.q = q.data_ptr();
  params.q_row_stride = q.stride(0);
  params.q_head_stride = q.stride(1);
  if (config.on_cuda) check_alignment("q", q);
  if (!q_rope.has_value()) return;
  const TensorView& rope = q_rope.value();
  check_rows("q_rope", rope, device, dl_dtype(config.q_dtype),
             {{"rows", q.size(0)}, heads, {"head_dim - head_dim_v", dims.qk - dims.v}});
  if (config.on_cuda) check_alignment("q_rope", rope);
  params.q_rope = QueryPart{rope.data_ptr(), rope.stride(0), rope.stride(1)};
}

/// O, of the rows of Q; e4m3 if it has a scale.
void set_out(const TensorView& out, int64_t num_rows, const AttentionConfig& config, AttentionParams& params) {
  const DataType o_dtype = params.has_out_scale() ? DataType::kFloat8E4M3 : config.dtype;
  check_rows(
      "out", out, config.dl_device(), dl_dtype(o_dtype),
      {{"rows", num_rows}, {"num_qo_heads", config.num_qo_heads}, columns_of_v(config.head_dim, config.head_dim_v)});
  check_no_overlap("out", out);
  if (config.on_cuda) check_alignment("out", out);
  params.o = out.data_ptr();
  params.o_row_stride = out.stride(0);
  params.o_head_stride = out.stride(1);
}

void set_caches(const TensorView& k, const TensorView& v, const Attention& attention, AttentionParams& params) {
  const AttentionConfig& config = attention.config();
  const DataType k_dtype = side_type(config.kv_dtype, false), v_dtype = side_type(config.kv_dtype, true);
  const Dim k_columns = k_dtype == DataType::kScaledLatent ? Dim{"bytes of a row", ScaledLatentRow::kBytes}
                        : has_4_bits(k_dtype)              ? Dim{"head_dim / 2", config.head_dim / 2}
                                                           : Dim{"head_dim", config.head_dim};
  const Dim v_columns = has_4_bits(v_dtype) ? Dim{"head_dim_v / 2", config.head_dim_v / 2}
                                            : columns_of_v(config.head_dim, config.head_dim_v);
  const auto check = [&](const char* name, const TensorView& t, DataType dtype, Dim pages, Dim columns) {
    return kv_tensor(name, t, config.dl_device(), dtype, pages, {"page_size", attention.planned_page_size()},
                     {"num_kv_heads", config.num_kv_heads}, columns);
  };
  params.k = check("kv.k", k, k_dtype, {"pages"}, k_columns);
  params.v = check("kv.v", v, v_dtype, {"pages", k.size(0)}, v_columns);
  params.num_pages = narrow("kv.k.shape[0] (pages)", k.size(0));  // 0: no request may have a token
}

/// The Params of the object's variant, or of the standard one.
void set_variant(double logits_soft_cap, const Attention& attention, AttentionParams& params) {
  const float cap = checked_float("logits_soft_cap", logits_soft_cap, true, "0 (off) or above, and finite");
  if (!attention.config().has_variant) return params.variant.set(StandardVariant::Params{cap});
  if (logits_soft_cap != 0.0)
    refuse("logits_soft_cap", logits_soft_cap, "0 with a variant: combine the variant with soft_cap instead");
  if (!attention.has_variant_params()) TVM_FFI_THROW(RuntimeError) << "the variant's Params were not set";
  params.variant = attention.variant_params();
}

/// K and V as kernels take them.
KvPair pages_of(const RunArguments& given) {
  const bool is_hnd = given.is_hnd.value_or(false);
  if (given.k_rope.has_value()) {
    if (given.v.has_value()) refuse("v", "a tensor", "None with k_rope");
    return latent_pages(joined("k", given.k, "k_rope", given.k_rope.value()), given.k.size(2));
  }
  if (!given.v.has_value()) refuse("kv.v", "None", "a tensor");
  return KvPair{pages("kv.k", given.k, is_hnd), pages("kv.v", given.v.value(), is_hnd)};
}

int64_t run(const RunArguments& given) {
  Attention& attention = Attention::of(given.handle);
  const std::lock_guard<Attention> in_use(attention);
  const AttentionConfig& config = attention.config();
  const DLDevice device = config.dl_device();
  if (!attention.planned()) TVM_FFI_THROW(ValueError) << "run() before a successful plan()";
  LatentAttentionParams params{};
  set_out_scale(given.out_scale, attention, params);
  const TensorView& q = given.q;
  const KvPair forms = pages_of(given);
  const TensorView k = forms.k.view(), v = forms.v.view();
  set_q(q, given.q_rope, config, params);
  set_out(given.out, q.size(0), config, params);
  params.sm_scale = checked_float("sm_scale", given.sm_scale, false, "above 0 and finite");
  set_variant(given.logits_soft_cap, attention, params);
  set_caches(k, v, attention, params);
  if (config.on_cuda) {
    check_alignment("kv.k", k);
    check_alignment("kv.v", v);
  }
  const Dim heads{"num_qo_heads", config.num_qo_heads};
  if (given.lse.has_value()) {
    params.lse = dense<float>("lse", given.lse.value(), device, kFloat32, {{"rows", q.size(0)}, heads});
    if (config.has_variant && !config.uses_softmax)
      refuse("lse", "a tensor", "None: the variant does not use softmax, so its rows have no sum of exponentials");
  }
  params.lse_unit = given.lse_to_base_2.value_or(false) ? kLog2E : 1.0f;
  if (given.sinks.has_value()) {
    if (!config.has_sinks) refuse("sinks", "a tensor", "None, or the Attention made with sinks=True");
    params.sinks = dense<float>("sinks", given.sinks.value(), device, kFloat32, {heads});
  }
  const bool has_slots = given.indices.has_value() || attention.has_slots();
  // The kernel that packs slots runs in between and changes the schedule, so attention must wait for it.
  params.after_append = given.after_append && !has_slots;
  AttentionTokenScales token_scales{};
  if (config.token_scales) {
    const DataType k_dtype = side_type(config.kv_dtype, false), v_dtype = side_type(config.kv_dtype, true);
    token_scales.k = checked_token_scales("kv.k_scale", given.k_scale, k, k_dtype);
    token_scales.v = checked_token_scales("kv.v_scale", given.v_scale, v, v_dtype);
    token_scales.k_factor = checked_factor("kv.k_scale.factor", given.k_factor, k_dtype);
    token_scales.v_factor = checked_factor("kv.v_scale.factor", given.v_factor, v_dtype);
  }
  const AttentionScales scales{checked_scale("kv.k_scale", given.k_scale, attention),
                               checked_scale("kv.v_scale", given.v_scale, attention),
                               checked_q_scale(given.q_scale, attention), config.kv_dtype, config.q_dtype};
  if (config.on_cuda && is_in_bytes(config.kv_dtype) && is_latent(config.dims()))
    check_scaled_on_load(params, attention.planned_page_size(), config.num_kv_heads, scales);
  if (params.num_rows == 0) return 0;  // every row of the plan is beyond q's
  if (has_slots)
    attention.select(Selection{given.indices, given.block_table, given.requests, given.kv_lens,
                               given.page_size.value_or(1), given.page_stride.value_or(1)},
                     params.num_rows, driver::current_stream(device));
  return attention.run(params, scales, token_scales, driver::current_stream(device));
}

}  // namespace
}  // namespace attn

ATTN_EXPORT_BY_NAME(run, RunArguments);
