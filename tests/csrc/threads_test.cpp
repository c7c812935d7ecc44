// Calls the functions that Python calls from several threads at once: on the CPU, and on devices of a driver without a
// GPU (fake_cuda_driver.cpp). The thread sanitizer reports races; this program checks results and errors.
//
// Sources of other instruction sets than the baseline are replaced here: the kernels share no state.
#include <dlfcn.h>
#include <pthread.h>
#include <tvm/ffi/container/map.h>
#include <tvm/ffi/function.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <initializer_list>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "attention/cpu/kernels.h"
#include "runtime/arguments.h"
#include "runtime/attention.h"
#include "runtime/designs.h"
#include "sampling/cpu/sampling.h"

namespace attn::cpu {

Kernels avx2_kernels(DataType dtype, bool widens) { return baseline_kernels(dtype, widens); }
Kernels avx512_kernels(DataType dtype, bool widens) { return baseline_kernels(dtype, widens); }
Kernels amx_kernels(bool widens) { return baseline_kernels(DataType::kBFloat16, widens); }
const SamplingLoops kAvx2Loops = kBaselineLoops;
const SamplingLoops kAvx512Loops = kBaselineLoops;

}  // namespace attn::cpu

namespace {

using attn::AnyView;
using attn::TensorView;
using tvm::ffi::Any;
using tvm::ffi::Bytes;
using tvm::ffi::Error;
using tvm::ffi::Map;
using tvm::ffi::String;

using Function = int(void*, const TVMFFIAny*, int32_t, TVMFFIAny*);

extern "C" {
// clang-format off
Function __tvm_ffi_attention_create, __tvm_ffi_attention_destroy, __tvm_ffi_workspace_size, __tvm_ffi_set_workspace,
    __tvm_ffi_plan_level, __tvm_ffi_plan_level_arguments, __tvm_ffi_run, __tvm_ffi_run_arguments, __tvm_ffi_sample,
    __tvm_ffi_sample_arguments, __tvm_ffi_append_qkv, __tvm_ffi_append_qkv_arguments, __tvm_ffi_merge_states,
    __tvm_ffi_merge_states_arguments, __tvm_ffi_selected_slots, __tvm_ffi_selected_slots_arguments, __tvm_ffi_append_kv,
    __tvm_ffi_load_append, __tvm_ffi_load_selection;
// clang-format on
}

Any call(Function* function, std::initializer_list<AnyView> arguments) {
  Any result;
  TVM_FFI_CHECK_SAFE_CALL(function(nullptr, reinterpret_cast<const TVMFFIAny*>(arguments.begin()),
                                   static_cast<int32_t>(arguments.size()), reinterpret_cast<TVMFFIAny*>(&result)));
  return result;
}

Any call_by_name(Function* function, Function* names_of,
                 std::initializer_list<std::pair<const char*, AnyView>> arguments) {
  const auto names = call(names_of, {}).cast<tvm::ffi::Array<String>>();
  std::vector<AnyView> values(names.size());
  for (const auto& [name, value] : arguments) {
    size_t at = 0;
    while (at < values.size() && names[static_cast<int64_t>(at)] != name) ++at;
    if (at == values.size()) TVM_FFI_THROW(TypeError) << "no argument is called " << name;
    values[at] = value;
  }
  Any result;
  TVM_FFI_CHECK_SAFE_CALL(function(nullptr, reinterpret_cast<const TVMFFIAny*>(values.data()),
                                   static_cast<int32_t>(values.size()), reinterpret_cast<TVMFFIAny*>(&result)));
  return result;
}

#define CALL(name, ...) call_by_name(__tvm_ffi_##name, __tvm_ffi_##name##_arguments, {__VA_ARGS__})

/// A contiguous tensor. One "on" a device of the fake driver is in the host's memory, too: nothing reads it.
template <class T>
class Tensor {
 public:
  Tensor(DLDevice device, std::vector<int64_t> shape, T value = T{}) : shape_(std::move(shape)), strides_(shape_) {
    int64_t count = 1;
    for (size_t i = shape_.size(); i-- > 0; count *= shape_[i]) strides_[i] = count;
    values_.assign(static_cast<size_t>(count), value);
    const uint8_t code = std::is_same_v<T, bool8>      ? kDLBool
                         : std::is_floating_point_v<T> ? kDLFloat
                         : std::is_signed_v<T>         ? kDLInt
                                                       : kDLBfloat;
    tensor_ = DLTensor{
        values_.data(),  device, static_cast<int32_t>(shape_.size()), DLDataType{code, 8 * sizeof(T), 1}, shape_.data(),
        strides_.data(), 0};
  }
  Tensor(const Tensor&) = delete;
  Tensor& operator=(const Tensor&) = delete;

  operator AnyView() { return AnyView(&tensor_); }
  std::vector<T>& values() { return values_; }

  using bool8 = unsigned char;

 private:
  std::vector<int64_t> shape_, strides_;
  std::vector<T> values_;
  DLTensor tensor_;
};

template <class Struct>
Bytes bytes_of(const Struct& value) {
  return Bytes(reinterpret_cast<const char*>(&value), sizeof(value));
}

template <class Struct>
Struct unpack(const Any& bytes) {
  const auto given = bytes.cast<Bytes>();
  Struct value;
  std::memcpy(&value, given.data(), sizeof(value));
  return value;
}

constexpr int kThreads = 4, kRepeats = 2;
constexpr DLDevice kCpu{kDLCPU, 0};
constexpr int64_t kTokens = 200, kRows = 40, kHeads = 4, kHeadDim = 64;  // enough work for the executor's threads
const String kCubin = "90";

/// Runs `body` on all threads at the same time, each with its number.
void on_threads(const std::function<void(int)>& body) {
  pthread_barrier_t barrier;
  pthread_barrier_init(&barrier, nullptr, kThreads);
  std::vector<std::thread> threads;
  for (int thread = 0; thread < kThreads; ++thread)
    threads.emplace_back([&, thread] {
      pthread_barrier_wait(&barrier);
      try {
        body(thread);
      } catch (const std::exception& error) {
        std::fprintf(stderr, "thread %d: %s\n", thread, error.what());
        std::_Exit(1);
      }
    });
  for (std::thread& thread : threads) thread.join();
  pthread_barrier_destroy(&barrier);
}

void expect(bool is_right, const char* what) {
  if (is_right) return;
  std::fprintf(stderr, "wrong: %s\n", what);
  std::_Exit(1);
}

// ---- The functions, with arguments that are the same in every call ----

class AttentionObject {
 public:
  using Element = uint16_t;

  explicit AttentionObject(DLDevice device)
      : device_(device), qo_indptr_(device, {2}), block_table_(device, {1, kTokens}) {
    attn::AttentionConfig config{};
    config.num_qo_heads = config.num_kv_heads = kHeads;
    config.head_dim = config.head_dim_v = kHeadDim;
    config.dtype = config.q_dtype = config.kv_dtype = attn::DataType::kBFloat16;
    config.max_rows = kRows;
    config.max_batch = 1;
    config.max_levels = 1;
    config.cascade = attn::kCascadeByCost;
    config.on_cuda = device.device_type == kDLCUDA;
    config.device = device.device_id;
    while (std::strcmp(attn::kDesigns[config.design]->name, config.on_cuda ? "sm80" : "cpu") != 0) ++config.design;
    config.uses_softmax = true;
    Map<String, String> files;
    if (config.on_cuda)
      for (const char* kernel : {"plan", "merge", "attention"}) files.Set(kernel, kCubin);
    handle_ = call(__tvm_ffi_attention_create, {bytes_of(config), files}).cast<int64_t>();
    const auto sizes = unpack<attn::WorkspaceSize>(call(__tvm_ffi_workspace_size, {handle_}));
    for (const int64_t bytes :
         {sizes.schedule, sizes.partial_o, sizes.partial_lse, sizes.row_ranges, sizes.dequantized})
      workspaces_.push_back(std::make_unique<Tensor<float>>(device, std::vector<int64_t>{bytes / 4 + 1}));
    call(__tvm_ffi_set_workspace,
         {handle_, *workspaces_[0], *workspaces_[1], *workspaces_[2], *workspaces_[3], *workspaces_[4]});
    qo_indptr_.values() = {0, static_cast<int32_t>(kRows)};
    for (size_t i = 0; i < block_table_.values().size(); ++i) block_table_.values()[i] = static_cast<int32_t>(i);
    kv_lens_.values() = {static_cast<int32_t>(kTokens)};
  }
  ~AttentionObject() { call(__tvm_ffi_attention_destroy, {handle_}); }

  void plan() {
    attn::LevelOptions options{};
    options.num_levels = 1;
    options.page_size = 1;
    options.window_left = -1;
    options.entry_step = 1;
    options.causal = true;
    expect(CALL(plan_level, {"handle", handle_}, {"options", bytes_of(options)}, {"qo_indptr", qo_indptr_},
                {"indices", block_table_}, {"kv_lens", kv_lens_})
                   .cast<int64_t>() == 0,
           "a plan has errors");
  }

  /// Returns O, whose memory the caller owns: several threads may run one object.
  std::vector<Element> run() {
    Tensor<Element> q(device_, {kRows, kHeads, kHeadDim}, 0x3f80), out(device_, {kRows, kHeads, kHeadDim});
    Tensor<Element> k(device_, {kTokens, 1, kHeads, kHeadDim}, 0x3e80), v(device_, {kTokens, 1, kHeads, kHeadDim});
    for (size_t i = 0; i < v.values().size(); ++i) v.values()[i] = static_cast<Element>(0x3f80 + i % 97);
    Tensor<float> lse(device_, {kRows, kHeads});
    expect(CALL(run, {"handle", handle_}, {"q", q}, {"k", k}, {"v", v}, {"out", out}, {"lse", lse}, {"sm_scale", 0.125},
                {"logits_soft_cap", 0.0}, {"after_append", false})
                   .cast<int64_t>() == 0,
           "a run has errors");
    return std::move(out.values());
  }

 private:
  DLDevice device_;
  int64_t handle_;
  Tensor<int32_t> qo_indptr_, block_table_, kv_lens_{device_, {1}};
  std::vector<std::unique_ptr<Tensor<float>>> workspaces_;
};

std::vector<uint16_t> attend(DLDevice device) {
  AttentionObject attention(device);
  attention.plan();
  return attention.run();
}

std::vector<int32_t> sample(DLDevice device) {
  constexpr int64_t kBatch = 4, kVocab = 10000;
  Tensor<float> logits(device, {kBatch, kVocab});
  for (size_t i = 0; i < logits.values().size(); ++i) logits.values()[i] = static_cast<float>(i * 7919 % 1000) * 0.01f;
  Tensor<int32_t> out(device, {kBatch});
  Tensor<unsigned char> valid(device, {kBatch});
  const int64_t max_ctas = 8, row_ctas = 0, none = 0;
  CALL(sample, {"values", logits}, {"from_probs", false}, {"joint", false}, {"tempered_logprobs", false},
       {"file", kCubin}, {"max_ctas", max_ctas}, {"row_ctas", row_ctas}, {"temperature", 1.0}, {"top_k", int64_t{50}},
       {"top_p", 0.9}, {"min_p", 0.0}, {"seed", int64_t{3}}, {"position", none}, {"out", out}, {"valid", valid});
  return std::move(out.values());
}

std::vector<int32_t> append(DLDevice device) {
  if (device.device_type == kDLCUDA) call(__tvm_ffi_load_append, {kCubin, int64_t{device.device_id}});
  Tensor<int32_t> tokens(device, {kTokens, kHeads, kHeadDim}), cache(device, {kTokens, 1, kHeads, kHeadDim});
  Tensor<int32_t> slots(device, {kTokens});
  for (size_t i = 0; i < slots.values().size(); ++i) slots.values()[i] = static_cast<int32_t>((i * 3) % kTokens);
  for (size_t i = 0; i < tokens.values().size(); ++i) tokens.values()[i] = static_cast<int32_t>(i);
  Tensor<int32_t> v_cache(device, {kTokens, 1, kHeads, kHeadDim});
  call(__tvm_ffi_append_kv, {tokens, tokens, cache, v_cache, slots});
  return std::move(cache.values());
}

std::vector<uint16_t> append_rotated(DLDevice device) {
  Tensor<uint16_t> q(device, {kTokens, kHeads, kHeadDim}, 0x3f80), k(device, {kTokens, kHeads, kHeadDim}, 0x3f80);
  Tensor<uint16_t> k_cache(device, {kTokens, 1, kHeads, kHeadDim}), v_cache(device, {kTokens, 1, kHeads, kHeadDim});
  Tensor<int32_t> slots(device, {kTokens});
  for (size_t i = 0; i < slots.values().size(); ++i) slots.values()[i] = static_cast<int32_t>(i);
  Tensor<float> frequencies(device, {kHeadDim / 2}, 0.25f);
  CALL(append_qkv, {"q", q}, {"k", k}, {"v", k}, {"out", q}, {"k_cache", k_cache}, {"v_cache", v_cache},
       {"slots", slots}, {"file", kCubin}, {"norm_eps", 0.0}, {"norm_offset", 0.0}, {"is_interleaved", false},
       {"positions", slots}, {"table", frequencies}, {"k_scale", 1.0}, {"v_scale", 1.0});
  return std::move(k_cache.values());
}

std::vector<float> merge(DLDevice device) {
  Tensor<float> o(device, {kRows, 2, kHeads, kHeadDim}, 0.5f), lse(device, {kRows, 2, kHeads}, 1.0f);
  Tensor<float> out(device, {kRows, kHeads, kHeadDim}), out_lse(device, {kRows, kHeads});
  CALL(merge_states, {"o", o}, {"lse", lse}, {"out", out}, {"out_lse", out_lse}, {"is_log2", false}, {"file", kCubin});
  return std::move(out.values());
}

std::vector<int32_t> select(DLDevice device) {
  if (device.device_type == kDLCUDA) call(__tvm_ffi_load_selection, {kCubin, int64_t{device.device_id}});
  Tensor<int32_t> indices(device, {kRows, 64}, 5), out(device, {kRows, 64});
  CALL(selected_slots, {"indices", indices}, {"out", out}, {"page_size", int64_t{1}}, {"page_stride", int64_t{1}});
  return std::move(out.values());
}

template <auto* kFunction>
bool repeats(DLDevice device, bool compares) {
  const auto first = kFunction(device);
  bool is_same = true;
  for (int i = 1; i < kRepeats; ++i) is_same &= kFunction(device) == first;
  static const auto expected = first;  // the initialization is thread-safe
  return is_same && (!compares || first == expected);
}

using Use = bool (*)(DLDevice, bool);
constexpr Use kUses[] = {repeats<&attend>,         repeats<&sample>, repeats<&append>,
                         repeats<&append_rotated>, repeats<&merge>,  repeats<&select>};
constexpr int kNumUses = sizeof(kUses) / sizeof(kUses[0]);

/// All threads begin with the same use, which is the first one of the process.
void use_cpu(int first_use) {
  on_threads([&](int) {
    for (int i = 0; i < kNumUses; ++i) expect(kUses[(first_use + i) % kNumUses](kCpu, true), "a result on the CPU");
  });
}

/// Each use is the first one of a device on all threads. On further devices each thread begins with another use.
void use_devices() {
  for (int device = 0; device < 2 * kNumUses; ++device)
    on_threads([&](int thread) {
      const int first = device < kNumUses ? device : device + thread;
      for (int i = 0; i < kNumUses; ++i) kUses[(first + i) % kNumUses](DLDevice{kDLCUDA, device}, false);
    });
  void* const fake = dlopen("libcuda.so.1", RTLD_NOW | RTLD_NOLOAD);
  const auto retains = reinterpret_cast<int (*)(int)>(dlsym(fake, "fake_retains"));
  const auto launches = reinterpret_cast<int (*)()>(dlsym(fake, "fake_launches"));
  for (int device = 0; device < 2 * kNumUses; ++device) expect(retains(device) == 1, "retains of a primary context");
  constexpr int kLaunchesOfAttention = 3;  // plan, attention, merge
  expect(launches() == 2 * kNumUses * kThreads * kRepeats * (kNumUses - 1 + kLaunchesOfAttention),
         "number of launches");
}

/// Several threads use one object: each call works or is refused.
void share_object(DLDevice device) {
  AttentionObject attention(device);
  attention.plan();
  const std::vector<uint16_t> expected = attention.run();
  on_threads([&](int) {
    for (int i = 0; i < 12; ++i) {
      try {
        if (i % 4 == 0) attention.plan();
        expect(attention.run() == expected, "a result of a shared object");
      } catch (const Error& error) {
        if (error.kind() != "InUseError") throw;
      }
    }
  });
  attention.plan();  // the last user has left
  expect(attention.run() == expected, "a result after a shared use");
}

}  // namespace

int main(int argc, char** argv) {
  const std::string what = argc > 1 ? argv[1] : "";
  if (what == "cpu")
    use_cpu(std::atoi(argv[2]));
  else if (what == "devices")
    use_devices();
  else if (what == "shared")
    share_object(kCpu), share_object(DLDevice{kDLCUDA, 0});
  else
    return 2;
  return 0;
}
