// The functions of attn_backend/kernels/sampling.py, bound with tvm-ffi: checks, then a launch or the CPU's loop.
#include <algorithm>
#include <cmath>
#include <string>
#include <string_view>

#include "runtime/arguments.h"
#include "runtime/checks.h"
#include "runtime/driver.h"
#include "sampling/cpu/sampling.h"

namespace attn {
namespace {

using tvm::ffi::String;
using tvm::ffi::TypeIndex;

constexpr int64_t kMaxRows = 1 << 26;  // times CTAs of a row: blocks of a grid

/// How a task's kernel is launched.
struct LaunchOptions {
  const String& file;  // the cubin
  int32_t max_ctas;    // of a cluster; 1 where there are none
  int32_t row_ctas;    // that share a row; 0: as many as suit the batch

  template <class Arguments>
  explicit LaunchOptions(const Arguments& given)
      : file(given.file),
        max_ctas(narrow("max_ctas", given.max_ctas, 1)),
        row_ctas(narrow("row_ctas", given.row_ctas, 0)) {}
};

/// A scalar, or a contiguous float32 tensor with an element for each row.
RowFloat row_float(const char* name, const AnyView& value, DLDevice device, int64_t rows) {
  RowFloat result;
  if (const auto tensor = value.try_cast<TensorView>()) {
    check_rows(name, *tensor, device, kFloat32, {{"batch", rows}});
    result.data = static_cast<const float*>(tensor->data_ptr());
    return result;
  }
  const auto number = value.try_cast<double>();
  if (!number || value.type_index() == TypeIndex::kTVMFFIBool)
    refuse(name, value.GetTypeKey(), "a number or a float32 tensor [batch]");
  if (std::isnan(*number)) refuse(name, *number, "a number");
  result.value = static_cast<float>(*number);
  return result;
}

RowInt row_int(const char* name, const AnyView& value, DLDevice device, int64_t rows) {
  RowInt result;
  if (const auto tensor = value.try_cast<TensorView>()) {
    check_shape(name, *tensor, {{"batch", rows}});
    result.array = index_array(name, *tensor, device, rows);
    return result;
  }
  const auto number = value.try_cast<int64_t>();
  const std::string type = value.GetTypeKey();
  if (!number || value.type_index() == TypeIndex::kTVMFFIBool)
    refuse(name, type == "ffi.BigInt" ? "larger than an int64" : type,
           "an integer in [-2^63, 2^63), or an int32 or int64 tensor [batch]");
  result.value = *number;
  return result;
}

/// The distribution, and the parameters that every task has: `values` are logits of any float dtype, or float32
/// probabilities, which the caller calls "probs".
SamplingParams params_of(RowTask task, bool from_probs, const TensorView& values, const AnyView& temperature,
                         const AnyView& top_k, const AnyView& top_p, const Optional<TensorView>& rows = std::nullopt) {
  const char* name = from_probs ? "probs" : "logits";
  const DLDevice device = values.device();
  float_dtype(name, values);
  if (from_probs) check_dtype(name, values, kFloat32);
  check_memory(name, values);
  check_shape(name, values, {{"batch"}, {"vocab"}});
  check_contiguous_dim(name, values, 1);
  const char* const batch_name = from_probs ? "probs.shape[0] (batch)" : "logits.shape[0] (batch)";
  SamplingParams params{};
  params.task = task;
  params.values = values.data_ptr();
  params.row_stride = values.stride(0);
  params.batch = narrow(batch_name, values.size(0), 0, kMaxRows);
  params.vocab =
      narrow(from_probs ? "probs.shape[1] (vocab)" : "logits.shape[1] (vocab)", values.size(1), 1, kMaxVocab);
  if (rows.has_value()) {
    params.source_rows = index_array("rows", rows.value(), device, 0);
    params.num_source_rows = params.batch;
    params.batch = narrow("rows.shape[0]", rows.value().size(0), 0, kMaxRows);
    if (params.batch > 0 && params.num_source_rows == 0) refuse(batch_name, 0, "at least 1 with rows");
  }
  params.temperature = row_float("temperature", temperature, device, params.batch);
  if (params.temperature.data == nullptr && params.temperature.value < 0.0f)
    refuse("temperature", params.temperature.value, "at least 0");
  params.top_k = row_int("top_k", top_k, device, params.batch);
  params.top_p = row_float("top_p", top_p, device, params.batch);
  return params;
}

/// `name`: the tensor's name for the caller of the Python function.
void set_token_ids(SamplingParams& params, const char* name, const TensorView& token_ids, DLDevice device,
                   std::initializer_list<Dim> dims) {
  check_index_dtype(name, token_ids.dtype());
  params.token_ids = dense(name, token_ids, device, token_ids.dtype(), dims);
  params.token_ids_are_int64 = token_ids.dtype().bits == 64;
}

/// CTAs of the cluster that takes a row, from measurements (ADR 32). Their number is doubled while a warp has more than
/// one segment and no multiprocessor gets too many: at most three at the first doubling; then one for short rows, two
/// for long rows with top-k, which soon leaves few tokens, and four for other long rows. Long rows with top-p are read
/// more than once, some more often than others: two CTAs a row end sooner, even if not all have room at once. Clusters
/// of 16 take longer to start, and are only for long rows where every multiprocessor has at most one CTA.
int32_t choose_row_ctas(const SamplingParams& params, int32_t device, int32_t max_ctas) {
  const int32_t multiprocessors = driver::multiprocessor_count(device);
  const int64_t segments = ceil_div(params.vocab, kSegmentTokens);
  const bool has_top_k = params.top_k.array || params.top_k.value > 0;
  const bool has_top_p = params.top_p.data != nullptr || params.top_p.value < 1.0f;
  if (segments > max_ctas * kSamplingWarps && int64_t{params.batch} * max_ctas <= multiprocessors) return max_ctas;
  const bool is_long = segments >= 2 * kSamplingWarps * kPortableClusterCtas;
  int32_t ctas = 1;
  while (2 * ctas <= std::min(max_ctas, kPortableClusterCtas) && segments > kSamplingWarps * ctas) {
    const int64_t first_limit = is_long && has_top_p && !has_top_k ? 8 : 3;
    const int64_t most = ctas == 1 ? first_limit : !is_long ? 1 : has_top_k ? 2 : 4;
    if (int64_t{params.batch} * 2 * ctas > most * multiprocessors) break;
    ctas *= 2;
  }
  return ctas;
}

bool is_unfiltered(const SamplingParams& params) {
  const bool no_top_k = !params.top_k.array && (params.top_k.value <= 0 || params.top_k.value >= params.vocab);
  const bool no_top_p = params.top_p.data == nullptr && params.top_p.value >= 1.0f;
  const bool no_min_p = params.min_p.data == nullptr && params.min_p.value <= 0.0f;
  return params.task == RowTask::kSample && no_top_k && no_top_p && no_min_p && params.logprobs == nullptr &&
         params.num_top_logprobs == 0;
}

/// CTAs of a row without filters, each warp reading a segment if there is room; 0: the row is for a cluster. Only the
/// last CTA of a row waits: these are fewer than the GPU has room for, so the others start.
int32_t choose_unfiltered_ctas(const SamplingParams& params, DLDataType dtype, int32_t device, int32_t max_ctas) {
  // Without a mask the kernel of float32 logits leaves registers for a fourth CTA. It pays where a row has many.
  constexpr int32_t kMaxUncrowdedRows = 64;
  const bool has_fourth = params.batch <= kMaxUncrowdedRows && params.token_mask == nullptr && dtype == kFloat32;
  const int32_t room = (has_fourth ? 4 : kUnfilteredCtas) * driver::multiprocessor_count(device);
  const int32_t wanted = ceil_div(ceil_div(params.vocab, kSegmentTokens), kSamplingWarps);
  if (params.workspace != nullptr && params.batch <= kMaxSharedRows && 2 * params.batch <= room)
    return std::min({wanted, room / params.batch, 1 + kWorkspaceMessages / params.batch});
  return max_ctas == 1 || wanted == 1 || 2 * params.batch > room ? 1 : 0;
}

void launch(const SamplingParams& params, const LaunchOptions& options, bool from_probs, const TensorView& values) {
  const DLDevice device = values.device();
  const std::string_view file{options.file.data(), options.file.size()};
  const std::string masked = params.token_mask != nullptr ? "masked_" : "";
  const int32_t row_ctas = narrow("row_ctas", options.row_ctas, 0, kWorkspaceMessages), max_ctas = options.max_ctas;
  const driver::Stream stream = driver::current_stream(device);
  constexpr int32_t kMaxGridRows = 65535;
  if (!from_probs && is_unfiltered(params) && params.batch <= kMaxGridRows) {
    const bool may_share = params.workspace != nullptr && params.batch <= kMaxSharedRows;
    const int32_t ctas = row_ctas == 0 ? choose_unfiltered_ctas(params, values.dtype(), device.device_id, max_ctas)
                         : row_ctas == 1 || (may_share && params.batch * (row_ctas - 1) <= kWorkspaceMessages)
                             ? row_ctas
                             : 0;
    if (ctas > 0) {
      driver::launch(driver::loaded_kernel(file, masked + "sample_unfiltered_kernel", device.device_id),
                     driver::Launch{static_cast<uint32_t>(ctas), static_cast<uint32_t>(params.batch), kSamplingThreads},
                     &params, stream);
      return;
    }
  }
  const int32_t ctas = row_ctas != 0 ? row_ctas : choose_row_ctas(params, device.device_id, max_ctas);
  if (ctas < 1 || ctas > max_ctas || (ctas & (ctas - 1)) != 0)
    refuse("ctas of a row", ctas, "a power of two, at most " + std::to_string(max_ctas));
  const char* const symbol = params.task == RowTask::kSample      ? "sample_filtered_kernel"
                             : params.task == RowTask::kSpeculate ? "speculate_kernel"
                                                                  : "write_rows_kernel";
  const driver::Kernel& kernel = driver::loaded_kernel(
      file, masked + symbol, device.device_id, sampling_shared_bytes(kMaxVocab, 1), max_ctas > kPortableClusterCtas);
  driver::Launch shape{static_cast<uint32_t>(params.batch) * static_cast<uint32_t>(ctas), 1, kSamplingThreads};
  shape.shared_bytes = sampling_shared_bytes(params.vocab, ctas);
  shape.cluster_x = static_cast<uint32_t>(ctas);
  driver::launch(kernel, shape, &params, stream);
}

void run(const SamplingParams& params, const LaunchOptions& options, bool from_probs, const TensorView& values) {
  if (params.batch == 0) return;
  if (values.device().device_type == kDLCUDA)
    launch(params, options, from_probs, values);
  else if (from_probs)
    cpu::sample_probs(params);
  else
    cpu::sample_logits(params, float_dtype("logits", values));
}

#define SAMPLE_ARGUMENTS(ARGUMENT)                            \
  ARGUMENT(TensorView, values) /* logits, or probabilities */ \
  ARGUMENT(bool, from_probs)                                  \
  ARGUMENT(bool, joint)                                       \
  ARGUMENT(bool, tempered_logprobs)                           \
  ARGUMENT(String, file)                                      \
  ARGUMENT(int64_t, max_ctas)                                 \
  ARGUMENT(int64_t, row_ctas)                                 \
  ARGUMENT(AnyView, temperature)                              \
  ARGUMENT(AnyView, top_k)                                    \
  ARGUMENT(AnyView, top_p)                                    \
  ARGUMENT(AnyView, min_p)                                    \
  ARGUMENT(AnyView, seed)                                     \
  ARGUMENT(AnyView, position)                                 \
  ARGUMENT(TensorView, out) /* token ids */                   \
  ARGUMENT(TensorView, valid)                                 \
  ARGUMENT(Optional<TensorView>, token_mask)                  \
  ARGUMENT(Optional<TensorView>, logprobs)                    \
  ARGUMENT(Optional<TensorView>, top_logprobs)                \
  ARGUMENT(Optional<TensorView>, top_token_ids)               \
  ARGUMENT(Optional<TensorView>, workspace)                   \
  ARGUMENT(Optional<TensorView>, rows)
ATTN_ARGUMENTS(SampleArguments, SAMPLE_ARGUMENTS);

#define WRITE_ROWS_ARGUMENTS(ARGUMENT)                        \
  ARGUMENT(TensorView, values) /* logits, or probabilities */ \
  ARGUMENT(int64_t, task)                                     \
  ARGUMENT(bool, from_probs)                                  \
  ARGUMENT(String, file)                                      \
  ARGUMENT(int64_t, max_ctas)                                 \
  ARGUMENT(int64_t, row_ctas)                                 \
  ARGUMENT(AnyView, temperature)                              \
  ARGUMENT(AnyView, top_k)                                    \
  ARGUMENT(AnyView, top_p)                                    \
  ARGUMENT(TensorView, out) /* float32 [batch, vocab] */
ATTN_ARGUMENTS(WriteRowsArguments, WRITE_ROWS_ARGUMENTS);

#define SPECULATE_ARGUMENTS(ARGUMENT)   \
  ARGUMENT(TensorView, draft_probs)     \
  ARGUMENT(TensorView, draft_token_ids) \
  ARGUMENT(TensorView, target_probs)    \
  ARGUMENT(String, file)                \
  ARGUMENT(int64_t, max_ctas)           \
  ARGUMENT(int64_t, row_ctas)           \
  ARGUMENT(AnyView, seed)               \
  ARGUMENT(AnyView, position)           \
  ARGUMENT(TensorView, token_ids)       \
  ARGUMENT(TensorView, num_accepted)    \
  ARGUMENT(TensorView, num_passed)      \
  ARGUMENT(TensorView, valid)
ATTN_ARGUMENTS(SpeculateArguments, SPECULATE_ARGUMENTS);

void sample(const SampleArguments& given) {
  const DLDevice device = given.values.device();
  SamplingParams params = params_of(RowTask::kSample, given.from_probs, given.values, given.temperature, given.top_k,
                                    given.top_p, given.rows);
  params.joint = given.joint;
  params.tempered_logprobs = given.tempered_logprobs;
  params.min_p = row_float("min_p", given.min_p, device, params.batch);
  params.seed = row_int("seed", given.seed, device, params.batch);
  params.position = row_int("position", given.position, device, params.batch);
  if (given.token_mask.has_value()) {
    const TensorView& mask = given.token_mask.value();
    check_rows("token_mask", mask, device, kInt32, {{"batch", params.batch}, {"words"}});
    check_size("token_mask", mask, 1, ceil_div(params.vocab, 32), "ceil(vocab / 32) = ");
    params.token_mask = static_cast<const uint32_t*>(mask.data_ptr());
    params.mask_stride = mask.stride(0);
  }
  const Dim batch{"batch", params.batch};
  set_token_ids(params, "out", given.out, device, {batch});
  params.valid = dense<uint8_t>("valid", given.valid, device, kBool, {batch});
  if (given.logprobs.has_value())
    params.logprobs = dense<float>("logprobs", given.logprobs.value(), device, kFloat32, {batch});
  if (given.top_logprobs.has_value() && given.top_token_ids.has_value()) {
    const TensorView &values = given.top_logprobs.value(), &ids = given.top_token_ids.value();
    const Dim count{"num_top_logprobs", values.size(1)};
    params.num_top_logprobs = narrow("num_top_logprobs", count.size, 0, kMaxTopLogprobs);
    params.top_logprobs = dense<float>("top_logprobs", values, device, kFloat32, {batch, count});
    params.top_token_ids = dense<int32_t>("top_token_ids", ids, device, kInt32, {batch, count});
  }
  if (given.workspace.has_value()) {
    const TensorView& words = given.workspace.value();
    params.workspace = dense("workspace", words, device, DLDataType{kDLInt, 64, 1}, {{"words"}});
    check_size("workspace", words, 0, kWorkspaceWords);
    if (reinterpret_cast<uintptr_t>(params.workspace) % 16 != 0)
      refuse("workspace", "not aligned", "aligned to 16 bytes");
  }
  run(params, LaunchOptions(given), given.from_probs, given.values);
}

void write_rows(const WriteRowsArguments& given) {
  const auto task = static_cast<RowTask>(narrow("task", given.task));
  SamplingParams params = params_of(task, given.from_probs, given.values, given.temperature, given.top_k, given.top_p);
  const DLDevice device = given.values.device();
  params.written = dense<float>("out", given.out, device, kFloat32, {{"batch", params.batch}, {"vocab", params.vocab}});
  params.written_stride = params.vocab;
  run(params, LaunchOptions(given), given.from_probs, given.values);
}

void speculate(const SpeculateArguments& given) {
  const TensorView &target_probs = given.target_probs, &draft_ids = given.draft_token_ids;
  const DLDevice device = target_probs.device();
  SamplingParams params{};
  params.values = dense("target_probs", target_probs, device, kFloat32, {{"batch"}, {"drafts + 1"}, {"vocab"}});
  const Dim batch{"batch", target_probs.size(0)}, drafts{"drafts", target_probs.size(1) - 1};
  const Dim vocab{"vocab", target_probs.size(2)};
  params.batch = narrow("target_probs.shape[0] (batch)", batch.size, 0, kMaxRows);
  params.num_draft_tokens = narrow("target_probs.shape[1] - 1 (drafts)", drafts.size);
  params.vocab = narrow("target_probs.shape[2] (vocab)", vocab.size, 1, kMaxVocab);
  params.draft_probs = dense<float>("draft_probs", given.draft_probs, device, kFloat32, {batch, drafts, vocab});
  check_index_dtype("draft_token_ids", draft_ids.dtype());
  params.draft_token_ids = dense("draft_token_ids", draft_ids, device, draft_ids.dtype(), {batch, drafts});
  params.draft_ids_are_int64 = draft_ids.dtype().bits == 64;
  params.task = RowTask::kSpeculate;
  params.temperature.value = 1.0f;
  params.top_p.value = 1.0f;
  params.seed = row_int("seed", given.seed, device, batch.size);
  params.position = row_int("position", given.position, device, batch.size);
  set_token_ids(params, "token_ids", given.token_ids, device, {batch, {"drafts + 1", drafts.size + 1}});
  params.num_accepted = dense<int32_t>("num_accepted", given.num_accepted, device, kInt32, {batch});
  params.num_passed = dense<int32_t>("num_passed", given.num_passed, device, kInt32, {batch});
  params.valid = dense<uint8_t>("valid", given.valid, device, kBool, {batch});
  run(params, LaunchOptions(given), true, target_probs);
}

}  // namespace
}  // namespace attn

ATTN_EXPORT_BY_NAME(sample, SampleArguments);
ATTN_EXPORT_BY_NAME(write_rows, WriteRowsArguments);
ATTN_EXPORT_BY_NAME(speculate, SpeculateArguments);
