// What the designs of the attention kernel make of tensors: which kernel runs, and what TMA is told. Prints what is
// wrong; exits with the number of failures.
#include <cstdint>
#include <cstdio>
#include <vector>

#include "runtime/designs.h"

namespace {

int failures = 0;

void expect(bool right, const char* what, int64_t was, int64_t must_be) {
  if (right) return;
  std::printf("%s: %lld, must be %lld\n", what, static_cast<long long>(was), static_cast<long long>(must_be));
  ++failures;
}

void expect_equal(int64_t was, int64_t must_be, const char* what) { expect(was == must_be, what, was, must_be); }

std::vector<attn::Tensor4d> encoded;

bool encode(const attn::Tensor4d& tensor, attn::TensorMap&) {
  encoded.push_back(tensor);
  return true;
}

constexpr int32_t kKvHeads = 2, kHeadDim = 128, kPages = 50;
constexpr char kMemory[2048] = {};

/// A decode of ten rows over pages of `page_size` tokens.
attn::LatentAttentionParams make_params(int32_t page_size, int32_t group_size) {
  attn::LatentAttentionParams params{};
  params.q = params.o = const_cast<char*>(kMemory);
  params.q_head_stride = params.o_head_stride = kHeadDim;
  params.q_row_stride = params.o_row_stride = kHeadDim * group_size * kKvHeads;
  params.k = params.v = attn::KvTensor{kMemory, page_size * kKvHeads * kHeadDim, kKvHeads * kHeadDim, kHeadDim};
  params.num_rows = 10;
  params.num_pages = kPages;
  params.num_kv_heads = kKvHeads;
  params.v_columns = kHeadDim;
  params.kv_tile = 128;
  params.group_size = attn::FastDivisor(group_size);
  params.page_size = attn::FastDivisor(page_size);
  return params;
}

struct Launched {
  int32_t kernel;
  attn::TmaParams params;
};

Launched launch_sm90(const attn::LatentAttentionParams& params, bool is_ragged, attn::HeadDims dims = kHeadDim,
                     attn::DataType kv_dtype = attn::DataType::kBFloat16,
                     attn::DataType q_dtype = attn::DataType::kBFloat16, bool is_for_bf16 = true) {
  static const int32_t indices[1] = {};
  attn::PlanLevel level{};
  level.table.indices = is_ragged ? nullptr : indices;
  const attn::KernelCode codes[2] = {{kMemory, 1}, {kMemory, 2}};
  const attn::KvForm form(attn::bytes_of(kv_dtype), false, attn::has_4_bits(kv_dtype), kv_dtype, is_for_bf16);
  const attn::LaunchContext context{
      &level, 1, attn::DataType::kBFloat16, q_dtype, kv_dtype, dims, codes, {kMemory, 3}, encode, form, {}};
  attn::KernelArguments arguments;
  encoded.clear();
  const int32_t kernel = attn::sm90::kDesign.make_arguments(params, context, arguments);
  return {kernel, *reinterpret_cast<const attn::TmaParams*>(arguments.bytes)};
}

void check_caches() {
  const struct {
    int32_t page_size;
    bool is_ragged;
    int32_t kernel, box_tokens, run_tokens;
  } cases[] = {
      {16, false, attn::sm90::kByBoxes, 16, 0}, {256, false, attn::sm90::kByBoxes, 64, 0},
      {8, false, attn::sm90::kByBoxes, 8, 0},   {4, false, attn::sm90::kByRows, 0, 0},
      {48, false, attn::sm90::kByRows, 0, 0},   {1, false, attn::sm90::kByRows, 0, 64},
      {1, true, attn::sm90::kByBoxes, 64, 0},
  };
  for (const auto& of : cases) {
    const Launched launched = launch_sm90(make_params(of.page_size, 4), of.is_ragged);
    expect_equal(launched.kernel, of.kernel, "kernel");
    expect_equal(launched.params.box_tokens, of.box_tokens, "box_tokens");
    expect_equal(launched.params.run_tokens, of.run_tokens, "run_tokens");
    expect_equal(static_cast<int64_t>(launched.params.code.bytes), 1 + of.kernel, "code of the kernel");
    expect_equal(static_cast<int64_t>(launched.params.merge_code.bytes), 3, "code of the merge kernel");
    const int32_t tokens = of.box_tokens + of.run_tokens;
    if (tokens == 0) continue;
    const attn::Tensor4d& v = encoded.back();
    expect_equal(v.box[0], 64, "columns of a box");
    expect_equal(v.box[1], tokens, "tokens of a box");
    expect_equal(static_cast<int64_t>(v.sizes[1] * v.sizes[3]), int64_t{of.page_size} * kPages, "tokens of the cache");
  }
}

void check_rows() {
  const attn::TmaParams four = launch_sm90(make_params(16, 4), false).params;
  expect_equal(four.has_row_maps, 1, "row maps of groups of 4");
  expect_equal(four.has_one_row_map, 1, "map of one row");
  expect_equal(encoded[0].box[2], 32, "rows of a box of Q");
  expect_equal(encoded[1].box[2], 4, "rows of a box of O");
  expect_equal(encoded[2].box[2], 1, "rows of a box of one row");
  expect_equal(static_cast<int64_t>(encoded[0].sizes[1]), 4 * kKvHeads, "query heads");
  const attn::TmaParams six = launch_sm90(make_params(16, 6), false).params;
  expect_equal(six.has_row_maps, 0, "row maps of groups of 6");
  expect_equal(six.has_one_row_map, 1, "map of one row");
}

void check_float8() {
  const attn::TmaParams made =
      launch_sm90(make_params(16, 4), false, kHeadDim, attn::DataType::kFloat8E4M3, attn::DataType::kFloat8E4M3).params;
  expect_equal(made.has_row_maps + made.has_one_row_map, 2, "row maps of Q in 8 bits");
  const int64_t columns[] = {128, 64, 128, 128, 128};  // of Q, O, Q by rows, K and V: of 128 bytes each
  for (size_t i = 0; i < 5; ++i) expect_equal(encoded[i].box[0], columns[i], "columns of a box");
  expect_equal(static_cast<int64_t>(encoded[1].dtype), static_cast<int64_t>(attn::DataType::kBFloat16), "type of O");
}

void check_widths() {
  attn::LatentAttentionParams params = make_params(16, 4);
  const attn::TmaParams one_tensor = launch_sm90(params, false, attn::HeadDims(576, 512)).params;
  expect_equal(one_tensor.v_is_k, 1, "V in K's bytes");
  const int64_t columns[] = {512, 64, 512, 512, 64, 576, 512};  // of Q's parts, O, Q's parts by rows, K and V
  for (size_t i = 0; i < 7; ++i) expect_equal(static_cast<int64_t>(encoded[i].sizes[0]), columns[i], "columns");
  expect_equal(encoded[0].box[2], 16, "rows of a box of Q");
  expect_equal(encoded[1].box[2], 16, "rows of a box of Q's last columns");
  expect_equal(encoded[6].box[1], 16, "tokens of a box");
  const attn::TmaParams many = launch_sm90(make_params(16, 128), false, attn::HeadDims(576, 512)).params;
  expect_equal(many.has_row_maps, 1, "row maps of half a group of 128");
  expect_equal(encoded[0].box[1], 64, "heads of a box of Q");
  expect_equal(encoded[0].box[2], 1, "rows of a box of Q");
  params.v.token_stride += 8;
  expect_equal(launch_sm90(params, false, attn::HeadDims(576, 512)).params.v_is_k, 0, "V of other strides");
  params = make_params(16, 4);
  params.v.data = kMemory + 8;
  expect_equal(launch_sm90(params, false, attn::HeadDims(576, 512)).params.v_is_k, 0, "V beyond K's first columns");
}

/// Of 4-bit caches, two tokens are a row of a box if they lie together and the box keeps eight rows.
void check_packed(attn::DataType dtype) {
  constexpr int64_t kTokenBytes = 64;
  const struct {
    int32_t page_size;
    bool heads_follow;  // a page has one head after another
    int32_t pairs, row_bytes, rows;
  } cases[] = {{16, true, 1, 128, 8}, {64, true, 1, 128, 32}, {8, true, 0, 64, 8}, {16, false, 0, 64, 16}};
  for (const auto& of : cases) {
    attn::LatentAttentionParams params = make_params(of.page_size, 4);
    const int64_t page_stride = of.page_size * kKvHeads * kTokenBytes;
    params.k = params.v = of.heads_follow
                              ? attn::KvTensor{kMemory, page_stride, kTokenBytes, of.page_size * kTokenBytes}
                              : attn::KvTensor{kMemory, page_stride, kKvHeads * kTokenBytes, kTokenBytes};
    const attn::TmaParams made = launch_sm90(params, false, kHeadDim, dtype).params;
    expect_equal(made.has_token_pairs, of.pairs, "rows of two tokens");
    const attn::Tensor4d& v = encoded.back();
    expect_equal(v.box[0], of.row_bytes, "bytes of a packed row");
    expect_equal(v.box[1], of.rows, "rows of a packed box");
    expect_equal(v.sizes[0] * v.sizes[1], of.page_size * kTokenBytes, "bytes of a head's page");
  }
}

/// Of int8 K and NVFP4 V, K's tokens take a row of a box each, V's two.
void check_packed_pair() {
  for (const bool heads_follow : {true, false}) {
    attn::LatentAttentionParams params = make_params(16, 4);
    const auto tensor = [&](int64_t bytes) {
      const int64_t page_stride = 16 * kKvHeads * bytes;
      return heads_follow ? attn::KvTensor{kMemory, page_stride, bytes, 16 * bytes}
                          : attn::KvTensor{kMemory, page_stride, kKvHeads * bytes, bytes};
    };
    params.k = tensor(128);
    params.v = tensor(64);
    const attn::TmaParams made = launch_sm90(params, false, kHeadDim, attn::DataType::kInt8NvFp4).params;
    expect_equal(made.has_token_pairs, heads_follow ? 1 : 0, "rows of two tokens of V");
    const attn::Tensor4d &k = encoded[encoded.size() - 2], &v = encoded.back();
    expect_equal(k.box[0], 128, "bytes of a packed row of K");
    expect_equal(k.box[1], 16, "rows of a packed box of K");
    expect_equal(v.box[0], heads_follow ? 128 : 64, "bytes of a packed row of V");
    expect_equal(v.box[1], heads_follow ? 8 : 16, "rows of a packed box of V");
  }
}

/// Tiles of MX for f16, and of wider heads, are dequantized in the ring.
void check_not_packed() {
  const attn::LatentAttentionParams params = make_params(16, 4);
  launch_sm90(params, false, kHeadDim, attn::DataType::kInt4);
  const size_t maps = encoded.size();
  launch_sm90(params, false, kHeadDim, attn::DataType::kMxFp4, attn::DataType::kFloat16, false);
  expect_equal(static_cast<int64_t>(encoded.size()), static_cast<int64_t>(maps - 2), "maps over MX");
  launch_sm90(params, false, 192, attn::DataType::kNvFp4);
  expect_equal(static_cast<int64_t>(encoded.size()), static_cast<int64_t>(maps - 2), "maps of wide heads");
}

/// A latent as a cache of one KV head: K's and V's strides of that head differ, and are not used.
void check_latents() {
  for (const int32_t page_size : {1, 64}) {
    attn::LatentAttentionParams params = make_params(page_size, 16);
    params.num_kv_heads = 1;
    params.k = attn::KvTensor{kMemory, page_size * 576, 576, 576};
    params.v = attn::KvTensor{kMemory, page_size * 576, page_size == 1 ? 512 : 576, 512};
    const attn::HeadDims dims(576, 512);
    expect_equal(launch_sm90(params, false, dims).params.v_is_k, 1, "V in K's bytes");
    for (const attn::DataType kv_dtype : {attn::DataType::kFloat8E4M3, attn::DataType::kScaledLatent}) {
      const Launched widened = launch_sm90(params, false, dims, kv_dtype);
      expect_equal(widened.kernel, attn::sm90::kByBoxes, "the only kernel of 8-bit latents");
      expect_equal(widened.params.v_is_k, 1, "V in K's bytes");
      expect_equal(widened.params.box_tokens + widened.params.run_tokens, 0, "tokens of boxes");
    }
  }
}

/// Q in one tensor, and in two whose rows and heads are in another order each.
void check_parts_of_q() {
  const attn::HeadDims dims(576, 512);
  attn::LatentAttentionParams params = make_params(16, 16);
  launch_sm90(params, false, dims);
  expect(encoded[1].data == kMemory + 1024, "bytes before Q's last columns", 0, 1024);
  expect_equal(encoded[1].strides[1], params.q_row_stride, "elements between rows");
  params.q_head_stride = 512 * params.num_rows;
  params.q_row_stride = 512;
  params.q_rope = attn::QueryPart{kMemory + 8, 64 * 16, 64};
  launch_sm90(params, false, dims);
  for (const size_t first : {0, 3}) {  // of a row tile, of a row
    expect_equal(encoded[first].strides[0], params.q_head_stride, "elements between heads");
    expect(encoded[first + 1].data == kMemory + 8, "where Q's last columns are", 0, 8);
    expect_equal(encoded[first + 1].strides[0], 64, "elements between heads of them");
    expect_equal(encoded[first + 1].strides[1], 64 * 16, "elements between rows of them");
  }
}

/// Wide heads with a V of their own over an 8-bit cache, whether TMA could load its pages or not.
void check_wide_float8() {
  for (const int32_t page_size : {1, 3, 16}) {
    const Launched wide = launch_sm90(make_params(page_size, 16), false, 512, attn::DataType::kFloat8E4M3);
    expect_equal(wide.kernel, attn::sm90::kByBoxes, "the only kernel of wide heads over 8 bits");
    expect_equal(wide.params.box_tokens + wide.params.run_tokens, 0, "tokens of boxes");
  }
}

void check_strides() {
  attn::LatentAttentionParams params = make_params(16, 4);
  expect_equal(launch_sm90(params, false).params.unit_shift, 8, "unit_shift");
  params.k.page_stride = int64_t{1} << 40;
  expect_equal(launch_sm90(params, false).kernel, attn::kRowsTooFarApart, "rows far from one another");
}

}  // namespace

int main() {
  check_caches();
  check_rows();
  check_float8();
  check_packed(attn::DataType::kInt4);
  check_packed(attn::DataType::kNvFp4);
  check_packed(attn::DataType::kMxFp4);
  check_packed_pair();
  check_not_packed();
  check_widths();
  check_latents();
  check_parts_of_q();
  check_wide_float8();
  check_strides();
  return failures;
}
