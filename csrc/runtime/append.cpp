// What writes to the cache (attn_backend/kernels/append.py), bound with tvm-ffi: checks, then a launch or the CPU's
// loop.
#include <atomic>
#include <string>
#include <string_view>

#include "cache/cpu/append.h"
#include "runtime/arguments.h"
#include "runtime/attention.h"
#include "runtime/checks.h"
#include "runtime/driver.h"

namespace attn {
namespace {

using tvm::ffi::String;

/// append's kernel on each device, from load_append().
std::atomic<const driver::Kernel*> append_kernels[driver::kMaxDevices];

std::string_view view(const String& text) { return {text.data(), text.size()}; }

/// Loads the kernel for a CUDA device. append_kv then need not be given a file: looking one up takes a tenth of its
/// time.
void load_append(String file, int64_t device) {
  const int32_t id = narrow("device", device, 0, driver::kMaxDevices - 1);
  append_kernels[id] = &driver::loaded_kernel(view(file), "append_kernel", id);
}

/// Where there are no tokens it has one CTA: a run() that follows relies on this launch.
void launch(const driver::Kernel& kernel, int64_t ctas, uint32_t threads, const void* params, DLDevice device) {
  driver::launch(kernel, driver::Launch{static_cast<uint32_t>(max_of<int64_t>(ctas, 1)), 1, threads, true}, params,
                 driver::current_stream(device));
}

HeadRows head_rows(const TensorView& t) { return HeadRows{t.data_ptr(), t.stride(0), t.stride(1)}; }

/// The pages of a cache, whose K has been found to have four dimensions.
CachePages pages_of(const TensorView& k) {
  return CachePages{narrow("kv.k.shape[0] (pages)", k.size(0)),
                    FastDivisor(narrow("kv.k.shape[1] (page_size)", k.size(1), 1))};
}

void append_kv(TensorView k, TensorView v, TensorView k_cache, TensorView v_cache, TensorView slots) {
  const DLDevice device = k_cache.device();
  check_shape("kv.k", k_cache, {{"pages"}, {"page_size"}, {"num_kv_heads"}, {"head_dim"}});
  const Dim heads{"num_kv_heads", k_cache.size(2)}, head_dim{"head_dim", k_cache.size(3)};
  check_shape("kv.v", v_cache, {{"pages", k_cache.size(0)}, {"page_size", k_cache.size(1)}, heads, {"head_dim_v"}});
  const Dim head_dim_v = columns_of_v(k_cache.size(3), v_cache.size(3));
  AppendParams params{};
  params.pages = pages_of(k_cache);
  params.slots = index_array("slots", slots, device, 0);
  const auto check = [&](const char* name, const TensorView& tokens, const char* cache_name, const TensorView& cache,
                         Dim columns) {
    check_rows(name, tokens, device, k_cache.dtype(), {{"tokens"}, heads, columns});
    check_rows(cache_name, cache, device, k_cache.dtype(), {{"pages"}, {"page_size"}, heads, columns});
    check_no_overlap(cache_name, cache);
    check_size(name, tokens, 0, slots.size(0), "slots.shape[0] = ");
  };
  check("k", k, "kv.k", k_cache, head_dim);
  check("v", v, "kv.v", v_cache, head_dim_v);
  params.num_tokens = narrow("slots.shape[0]", slots.size(0));
  params.k = head_rows(k);
  params.v = head_rows(v);
  params.k_cache = kv_tensor(k_cache);
  params.v_cache = kv_tensor(v_cache);
  params.num_kv_heads = narrow("kv.k.shape[2] (num_kv_heads)", k_cache.size(2));
  params.element_bytes = k_cache.dtype().bits / 8;
  const auto head_bytes = [&](const char* name, const TensorView& cache) {
    return narrow(name, cache.size(3), 0, kMaxInt32 / params.element_bytes) * params.element_bytes;
  };
  params.k_head_bytes = head_bytes("kv.k.shape[3] (head_dim)", k_cache);
  params.v_head_bytes = head_bytes("kv.v.shape[3] (head_dim_v)", v_cache);
  if (device.device_type == kDLCPU) {
    if (params.num_tokens > 0 && params.pages.count > 0) cpu::append(params);
    return;
  }
  const driver::Kernel* const kernel = append_kernels[narrow("device", device.device_id, 0, driver::kMaxDevices - 1)];
  if (kernel == nullptr) TVM_FFI_THROW(RuntimeError) << "append's kernel is not loaded on " << device_name(device);
  launch(*kernel, params.num_tokens, kAppendThreads, &params, device);
}

/// The element type of heads.
DataType heads_dtype(const char* name, const TensorView& tensor) {
  if (tensor.device().device_type != kDLCUDA) return float_dtype(name, tensor);
  const auto dtype = find_dtype(tensor.dtype(), {DataType::kBFloat16, DataType::kFloat16});
  if (!dtype) refuse(std::string(name) + ".dtype", dtype_name(tensor.dtype()), "bfloat16 or float16");
  return *dtype;
}

/// A scale of the cache that append writes. Append does not know requests: scales per request are not possible.
KvScale append_scale(const char* name, const AnyView& scale, DLDevice device, int64_t num_kv_heads) {
  const KvScale made = kv_scale(name, scale, device, num_kv_heads);
  if (made.is_of_requests())
    refuse(std::string(name) + ".shape", shape_of(scale.cast<TensorView>()),
           "[] or [num_kv_heads]: append knows no requests");
  return made;
}

/// Sets the scales of K or of V, of a cache that append writes: `token_scales` if each token and head has its own.
void set_scales(const char* name, const AnyView& given, const TensorView& cache, DataType kv_dtype, KvScale& scale,
                TokenScales& token_scales) {
  const std::optional<TensorView> tensor = given == nullptr ? std::nullopt : given.try_cast<TensorView>();
  const bool needs_them = stored_format(kv_dtype).token_scales != ScaleType::kNone;
  if (needs_them || (tensor && tensor->ndim() == 3)) {
    if (!needs_them && kv_dtype != DataType::kFloat8E4M3)
      refuse("kv.k.dtype", dtype_name(cache.dtype()),
             "float8_e4m3fn, int8 or uint8 with a scale for each token and head");
    token_scales = checked_token_scales(name, given, cache, kv_dtype);  // refuses what is no tensor
    if (tensor) check_no_overlap(name, *tensor);
    return;
  }
  scale = append_scale(name, given, cache.device(), cache.size(2));
}

/// The element type of K or V of a cache that heads of `dtype` are written to: of 8 bits or less, or of 16 if these
/// are; else `dtype`. `scale`: its dtype tells 4-bit types apart (scales_tell_4_bit_types_apart()).
DataType cache_dtype(const TensorView& cache, const AnyView& scale, DataType dtype) {
  const std::optional<TensorView> scales = scale == nullptr ? std::nullopt : scale.try_cast<TensorView>();
  const DLDataType of_4_bits = scales && scales->ndim() == 4 ? scales->dtype() : kFloat32;
  for (int32_t i = 0; i < kNumDataTypes; ++i) {
    const DataType stored = static_cast<DataType>(i);
    const StoredFormat format = stored_format(stored);
    if (format.is_pair || cache.dtype() != dl_dtype(stored) || stored == DataType::kScaledLatent) continue;
    if (format.bits == 32 || (format.bits == 16 && dtype == DataType::kFloat32)) continue;
    if (format.bits != 4 || dl_dtype(format.token_scales) == of_4_bits) return stored;
  }
  return dtype;
}

/// The type of V, of a cache whose K has k_dtype: the same, or a pair's.
DataType v_cache_dtype(const TensorView& cache, const AnyView& scale, DataType dtype, DataType k_dtype) {
  const DataType found = cache_dtype(cache, scale, dtype);
  for (int32_t i = 0; i < kNumDataTypes; ++i) {
    const StoredFormat format = stored_format(static_cast<DataType>(i));
    if (format.is_pair && format.k == k_dtype && format.v == found) return found;
  }
  return k_dtype;
}

/// Refuses one tensor as the scales of K and of V: append writes both.
void check_separate(const QkvParams& params) {
  if (params.k_token_scales.exist() && params.k_token_scales.data == params.v_token_scales.data)
    refuse("kv.v_scale", "kv.k_scale", "another tensor: append writes both");
}

void check_scales(const QkvParams& params, DLDevice device) {
  if (params.v.data != nullptr && params.k_token_scales.exist() != params.v_token_scales.exist())
    refuse("kv.v_scale", "None or of another shape", "one for each token and head if kv.k_scale is, and only then");
  constexpr int32_t kMaxReduced = 256;  // by a warp, also where the kernel moves a few bytes at a time
  if (device.device_type != kDLCPU && params.k_token_scales.exist() && params.head_dim > kMaxReduced)
    refuse("head_dim", params.head_dim,
           "at most " + std::to_string(kMaxReduced) + " on CUDA with a scale for each token and head");
}

/// Launches the kernel, or runs the CPU's loop.
void launch_append_qkv(QkvParams& params, DataType dtype, DLDevice device, std::string_view file) {
  check_scales(params, device);
  if (device.device_type == kDLCPU) {
    if (params.num_tokens > 0) cpu::append_qkv(params, dtype);
    return;
  }
  const QkvKernel kernel = kernel_for(params);
  divide_work(params, kernel);
  narrow("tokens * heads", int64_t{params.num_tokens} * params.groups_of_token.divisor);
  const char* const symbol = kernel == QkvKernel::kPlain     ? "append_qkv_plain_kernel"
                             : kernel == QkvKernel::kNormed  ? "append_qkv_normed_kernel"
                             : kernel == QkvKernel::kRounded ? "append_rounded_kernel"
                                                             : "append_qkv_general_kernel";
  launch(driver::loaded_kernel(file, symbol, device.device_id), append_qkv_ctas(params, kernel), kAppendQkvThreads,
         &params, device);
}

/// The same where K and V have different types. `values`: split_v().
void launch_append_pair(const QkvParams& params, const QkvParams& values, DataType dtype, DLDevice device,
                        std::string_view file) {
  check_scales(params, device);
  check_scales(values, device);
  if (device.device_type == kDLCPU) {
    if (params.num_tokens > 0) {
      cpu::append_qkv(params, dtype);
      cpu::append_qkv(values, dtype);
    }
    return;
  }
  QkvPairParams pair{params, values, 0};
  const QkvKernel kernel = divide_pair(pair);
  narrow("tokens * heads",
         int64_t{params.num_tokens} * (pair.k.groups_of_token.divisor + pair.v.groups_of_token.divisor));
  const char* const symbol = kernel == QkvKernel::kPlain    ? "append_pair_plain_kernel"
                             : kernel == QkvKernel::kNormed ? "append_pair_normed_kernel"
                                                            : "append_pair_general_kernel";
  launch(driver::loaded_kernel(file, symbol, device.device_id), append_pair_ctas(pair, kernel), kAppendQkvThreads,
         &pair, device);
}

/// The last dimension of a cache, for heads of `columns` columns.
Dim stored_dim(const char* name, int64_t columns, DataType dtype) {
  if (!has_4_bits(dtype)) return Dim{name, columns};
  const int32_t step = column_step(dtype);
  if (columns % step != 0) refuse(name, columns, "a multiple of " + std::to_string(step) + " over such a 4-bit cache");
  return Dim{"head_dim / 2", columns / 2};
}

/// A cache that is written.
KvTensor cache_of(const char* name, const TensorView& t, DLDevice device, DataType dtype, Dim pages, Dim page_size,
                  Dim heads, Dim head_dim) {
  const KvTensor cache = kv_tensor(name, t, device, dtype, pages, page_size, heads, head_dim);
  check_no_overlap(name, t);
  return cache;
}

/// Angles: [rotary_dim / 2] frequencies, or [positions, rotary_dim] cosines and sines.
void set_table(QkvParams& params, const TensorView& t, DLDevice device, DataType dtype) {
  check_tensor("rotary.table", t, device);
  const bool is_float32 = t.dtype() == kFloat32;
  const bool has_frequencies = t.ndim() == 1;
  if (has_frequencies) {
    check_dtype("rotary.table", t, kFloat32);
    check_shape("rotary.table", t, {{"rotary_dim / 2"}});
  } else {
    if (!is_float32) check_dtype("rotary.table", t, dl_dtype(dtype));
    check_shape("rotary.table", t, {{"positions"}, {"rotary_dim"}});
    if (t.size(0) < 1) refuse("rotary.table.shape[0] (positions)", 0, "at least 1");
    params.table_stride = t.stride(0);
    params.num_positions = narrow("rotary.table.shape[0] (positions)", t.size(0), 1);
  }
  check_contiguous_dim("rotary.table", t, t.ndim() - 1);
  const int64_t rotary_dim = has_frequencies ? 2 * t.size(0) : t.size(1);
  if (rotary_dim < 8 || rotary_dim % 8 != 0 || rotary_dim > params.head_dim)
    refuse("rotary_dim", rotary_dim, "a multiple of 8 up to head_dim = " + std::to_string(params.head_dim));
  params.rotary_dim = static_cast<int32_t>(rotary_dim);
  params.table = t.data_ptr();
  params.rotary = has_frequencies                             ? RotaryTable::kFrequencies
                  : is_float32 && dtype != DataType::kFloat32 ? RotaryTable::kCosSinFloat32
                                                              : RotaryTable::kCosSin;
}

/// The weights of a norm; nullptr: none.
const void* norm_weights(const char* name, const Optional<TensorView>& weights, DLDevice device, DataType dtype,
                         Dim head_dim) {
  if (!weights.has_value()) return nullptr;
  const TensorView& t = weights.value();
  check_rows(name, t, device, dl_dtype(dtype), {head_dim});
  return t.data_ptr();
}

/// Numbers and widths of heads.
void set_heads(QkvParams& params, const TensorView& q, const TensorView& k) {
  constexpr int32_t kMaxHeadDim = 256;
  check_shape("q", q, {{"tokens"}, {"num_qo_heads"}, {"head_dim"}});
  check_shape("k", k, {{"tokens"}, {"num_kv_heads"}, {"head_dim", q.size(2)}});
  params.num_qo_heads = narrow("q.shape[1] (num_qo_heads)", q.size(1), 1, kMaxHeads);
  params.num_kv_heads = narrow("k.shape[1] (num_kv_heads)", k.size(1), 1, kMaxHeads);
  params.head_dim = narrow("q.shape[2] (head_dim)", q.size(2), 8, kMaxHeadDim);
  if (params.head_dim % 8 != 0) refuse("q.shape[2] (head_dim)", params.head_dim, "a multiple of 8");
}

/// Without `v`, `v_cache` and `slots`, k_cache is [tokens, 1, num_kv_heads, head_dim], the place of K.
#define APPEND_QKV_ARGUMENTS(ARGUMENT)                                        \
  ARGUMENT(TensorView, q)                                                     \
  ARGUMENT(TensorView, k)                                                     \
  ARGUMENT(Optional<TensorView>, v)                                           \
  ARGUMENT(TensorView, out) /* Q */                                           \
  ARGUMENT(TensorView, k_cache)                                               \
  ARGUMENT(Optional<TensorView>, v_cache)                                     \
  ARGUMENT(Optional<TensorView>, slots)                                       \
  ARGUMENT(String, file) /* the cubin */                                      \
  ARGUMENT(double, norm_eps)                                                  \
  ARGUMENT(double, norm_offset)                                               \
  ARGUMENT(bool, is_interleaved)                                              \
  ARGUMENT(Optional<TensorView>, positions)                                   \
  ARGUMENT(Optional<TensorView>, table)                                       \
  ARGUMENT(Optional<TensorView>, q_norm)                                      \
  ARGUMENT(Optional<TensorView>, k_norm)                                      \
  ARGUMENT(AnyView, k_scale)                                                  \
  ARGUMENT(AnyView, v_scale)                                                  \
  ARGUMENT(Optional<bool>, rotation)   /* of K and V */                       \
  ARGUMENT(Optional<double>, k_factor) /* of all scales of blocks; None: 1 */ \
  ARGUMENT(Optional<double>, v_factor)
ATTN_ARGUMENTS(AppendQkvArguments, APPEND_QKV_ARGUMENTS);

/// append_kv into a cache of another type, to which numbers are rounded, or of rotated rows: append_qkv without Q. With
/// a table RoPE rotates K before that. `v` and `v_cache` may be missing.
#define APPEND_KV_ROUNDED_ARGUMENTS(ARGUMENT) \
  ARGUMENT(TensorView, k)                     \
  ARGUMENT(Optional<TensorView>, v)           \
  ARGUMENT(TensorView, k_cache)               \
  ARGUMENT(Optional<TensorView>, v_cache)     \
  ARGUMENT(TensorView, slots)                 \
  ARGUMENT(String, file) /* the cubin */      \
  ARGUMENT(AnyView, k_scale)                  \
  ARGUMENT(AnyView, v_scale)                  \
  ARGUMENT(Optional<bool>, is_interleaved)    \
  ARGUMENT(Optional<TensorView>, positions)   \
  ARGUMENT(Optional<TensorView>, table)       \
  ARGUMENT(Optional<bool>, rotation)          \
  ARGUMENT(Optional<double>, k_factor)        \
  ARGUMENT(Optional<double>, v_factor)
ATTN_ARGUMENTS(AppendKvRoundedArguments, APPEND_KV_ROUNDED_ARGUMENTS);

void append_qkv(const AppendQkvArguments& given) {
  const TensorView &q = given.q, &k = given.k, &k_cache = given.k_cache;
  if (is_same_device(k.device(), k_cache.device())) check_device("q", q, k.device());
  const DLDevice device = q.device();
  const DataType dtype = heads_dtype("q", q);
  QkvParams params{};
  set_heads(params, q, k);
  const Dim qo_heads{"num_qo_heads", q.size(1)}, kv_heads{"num_kv_heads", k.size(1)}, head_dim{"head_dim", q.size(2)};
  int64_t tokens = q.size(0);
  if (given.slots.has_value()) {
    params.slots = index_array("slots", given.slots.value(), device, 0);
    tokens = given.slots.value().size(0);
  }
  params.num_tokens = narrow("tokens", tokens);
  const auto rows_of = [&](const char* name, const TensorView& t, Dim heads) {
    check_rows(name, t, device, dl_dtype(dtype), {{"tokens"}, heads, head_dim});
    check_size(name, t, 0, tokens);
    return head_rows(t);
  };
  params.q = rows_of("q", q, qo_heads);
  params.k = rows_of("k", k, kv_heads);
  params.q_out = rows_of("q_out", given.out, qo_heads);
  check_no_overlap("q_out", given.out);
  const bool is_cached = given.v_cache.has_value();
  const DataType k_dtype = is_cached ? cache_dtype(k_cache, given.k_scale, dtype) : dtype;
  const DataType v_dtype = is_cached ? v_cache_dtype(given.v_cache.value(), given.v_scale, dtype, k_dtype) : k_dtype;
  params.k_cache = cache_of(is_cached ? "kv.k" : "k_out", k_cache, device, k_dtype, {"pages"}, {"page_size"}, kv_heads,
                            stored_dim("head_dim", q.size(2), k_dtype));
  params.scales.element = k_dtype;
  set_scales("kv.k_scale", given.k_scale, k_cache, k_dtype, params.scales.k, params.k_token_scales);
  params.k_factor = checked_factor("kv.k_scale.factor", given.k_factor, k_dtype);
  params.v_factor = checked_factor("kv.v_scale.factor", given.v_factor, v_dtype);
  params.pages = pages_of(k_cache);
  if (is_cached) {
    set_scales("kv.v_scale", given.v_scale, given.v_cache.value(), v_dtype, params.scales.v, params.v_token_scales);
    check_separate(params);
    params.v = rows_of("v", given.v.value(), kv_heads);
    params.v_cache = cache_of("kv.v", given.v_cache.value(), device, v_dtype, {"pages", k_cache.size(0)},
                              {"page_size", k_cache.size(1)}, kv_heads, stored_dim("head_dim", q.size(2), v_dtype));
  }
  if (given.table.has_value()) {
    params.positions = index_array("positions", given.positions.value(), device, tokens);
    set_table(params, given.table.value(), device, dtype);
  }
  params.q_norm = norm_weights("q_norm", given.q_norm, device, dtype, head_dim);
  params.k_norm = norm_weights("k_norm", given.k_norm, device, dtype, head_dim);
  params.norm_eps = static_cast<float>(given.norm_eps);
  params.norm_offset = static_cast<float>(given.norm_offset);
  params.is_interleaved = given.is_interleaved;
  params.rotates_rows = given.rotation.value_or(false);
  if (k_dtype == v_dtype) return launch_append_qkv(params, dtype, device, view(given.file));
  const QkvParams values = split_v(params, v_dtype, params.head_dim);
  launch_append_pair(params, values, dtype, device, view(given.file));
}

/// K and V of different widths take a launch each, except in a pair.
void append_kv_rounded(const AppendKvRoundedArguments& given) {
  const TensorView &k = given.k, &k_cache = given.k_cache, &slots = given.slots;
  const DLDevice device = k_cache.device();
  const DataType dtype = heads_dtype("k", k);
  const DataType k_dtype = cache_dtype(k_cache, given.k_scale, dtype);
  check_shape("kv.k", k_cache, {{"pages"}, {"page_size"}, {"num_kv_heads"}, {"head_dim"}});
  const Dim pages{"pages", k_cache.size(0)}, page_size{"page_size", k_cache.size(1)};
  const Dim heads{"num_kv_heads", k_cache.size(2)};
  const auto columns_of = [&](const char* name, const TensorView& cache, DataType stored, int32_t most) {
    const int32_t columns = narrow(name, cache.size(3) * (has_4_bits(stored) ? 2 : 1), 8, most);
    if (columns % 8 != 0) refuse(name, columns, "a multiple of 8");
    return columns;
  };
  constexpr int32_t kMaxColumns = 512, kMaxRotated = 256;  // 512: MLA's latents
  const bool is_rotated = given.table.has_value();
  const bool rotates_rows = given.rotation.value_or(false);
  const int32_t k_columns =
      columns_of("kv.k.shape[3] (head_dim)", k_cache, k_dtype, is_rotated || rotates_rows ? kMaxRotated : kMaxColumns);

  QkvParams params{};
  params.num_kv_heads = narrow("kv.k.shape[2] (num_kv_heads)", k_cache.size(2), 1, kMaxHeads);
  params.slots = index_array("slots", slots, device, 0);
  params.num_tokens = narrow("slots.shape[0]", slots.size(0));
  const auto rows_of = [&](const char* name, const TensorView& tokens, Dim columns) {
    check_rows(name, tokens, device, dl_dtype(dtype), {{"tokens"}, heads, columns});
    check_size(name, tokens, 0, slots.size(0), "slots.shape[0] = ");
    return head_rows(tokens);
  };
  const Dim head_dim{"head_dim", k_columns};
  params.k = rows_of("k", k, head_dim);
  params.k_cache =
      cache_of("kv.k", k_cache, device, k_dtype, pages, page_size, heads, stored_dim("head_dim", k_columns, k_dtype));
  params.pages = pages_of(k_cache);
  params.scales.element = k_dtype;
  set_scales("kv.k_scale", given.k_scale, k_cache, k_dtype, params.scales.k, params.k_token_scales);
  params.k_factor = checked_factor("kv.k_scale.factor", given.k_factor, k_dtype);
  params.head_dim = k_columns;
  params.rotates_rows = rotates_rows;
  QkvParams values{};
  bool is_pair = false;
  if (given.v.has_value()) {
    const TensorView &v = given.v.value(), &v_cache = given.v_cache.value();
    check_shape("kv.v", v_cache, {pages, page_size, heads, {"head_dim_v"}});
    const DataType v_dtype = v_cache_dtype(v_cache, given.v_scale, dtype, k_dtype);
    check_dtype("kv.v", v_cache, dl_dtype(v_dtype));
    params.v_factor = checked_factor("kv.v_scale.factor", given.v_factor, v_dtype);
    const int32_t v_columns = columns_of("kv.v.shape[3] (head_dim_v)", v_cache, v_dtype, kMaxColumns);
    if (rotates_rows && v_columns != k_columns)
      refuse("kv.v.shape[3] (head_dim_v)", v_columns,
             "head_dim = " + std::to_string(k_columns) + " with rotation=True");
    const Dim head_dim_v = columns_of_v(k_columns, v_columns);
    params.v = rows_of("v", v, head_dim_v);
    params.v_cache = cache_of("kv.v", v_cache, device, v_dtype, pages, page_size, heads,
                              stored_dim(head_dim_v.name, v_columns, v_dtype));
    set_scales("kv.v_scale", given.v_scale, v_cache, v_dtype, params.scales.v, params.v_token_scales);
    check_separate(params);
    if (k_columns != v_columns || k_dtype != v_dtype) {
      values = split_v(params, v_dtype, v_columns);
      is_pair = k_dtype != v_dtype;
      if (!is_pair) launch_append_qkv(values, dtype, device, view(given.file));
    }
  }
  if (is_rotated) {
    params.positions = index_array("positions", given.positions.value(), device, params.num_tokens);
    set_table(params, given.table.value(), device, dtype);
    params.is_interleaved = given.is_interleaved.value_or(false);
  }
  if (is_pair) return launch_append_pair(params, values, dtype, device, view(given.file));
  launch_append_qkv(params, dtype, device, view(given.file));
}

/// bf16 latents and rotated parts to rows that carry their scales.
void append_latent(TensorView latent, TensorView rope, TensorView cache, TensorView slots, String file) {
  const DLDevice device = cache.device();
  LatentParams params{};
  params.cache = cache_of("kv.k", cache, device, DataType::kScaledLatent, {"pages"}, {"page_size"}, {"num_kv_heads", 1},
                          {"bytes of a row", ScaledLatentRow::kBytes});
  check_alignment("kv.k", cache);
  params.slots = index_array("slots", slots, device, 0);
  params.num_tokens = narrow("slots.shape[0]", slots.size(0));
  const auto check = [&](const char* name, const TensorView& t, int64_t columns) {
    check_rows(name, t, device, dl_dtype(DataType::kBFloat16), {{"tokens"}, {"columns", columns}});
    check_size(name, t, 0, slots.size(0), "slots.shape[0] = ");
  };
  check("latent", latent, ScaledLatentRow::kLatentColumns);
  check("rope", rope, ScaledLatentRow::kRopeColumns);
  params.latent = latent.data_ptr();
  params.rope = rope.data_ptr();
  params.latent_stride = latent.stride(0);
  params.rope_stride = rope.stride(0);
  params.pages = pages_of(cache);
  if (device.device_type == kDLCPU) return cpu::append_latent(params);
  launch(driver::loaded_kernel(view(file), "append_latent_kernel", device.device_id), params.num_tokens,
         kAppendLatentThreads, &params, device);
}

}  // namespace
}  // namespace attn

TVM_FFI_DLL_EXPORT_TYPED_FUNC(load_append, attn::load_append);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(append_kv, attn::append_kv);
ATTN_EXPORT_BY_NAME(append_kv_rounded, AppendKvRoundedArguments);
ATTN_EXPORT_BY_NAME(append_qkv, AppendQkvArguments);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(append_latent, attn::append_latent);
