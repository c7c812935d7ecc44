#include "runtime/driver.h"

#include <dlfcn.h>
#include <tvm/ffi/error.h>

#include <atomic>
#include <deque>
#include <map>
#include <mutex>
#include <tuple>
#include <utility>

namespace attn::driver {
namespace {

// Declarations of the driver's stable C interface (CUDA driver API reference).
using Result = int;
using Device = int;
using Context = void*;
using Module = void*;
using Function = void*;

constexpr int kPtxVersion = 5;                       // CU_FUNC_ATTRIBUTE_PTX_VERSION: 80 for compute_80
constexpr int kMaxDynamicSharedSizeBytes = 8;        // CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
constexpr int kNonPortableClusterSizeAllowed = 14;   // CU_FUNC_ATTRIBUTE_NON_PORTABLE_CLUSTER_SIZE_ALLOWED
constexpr int kMultiprocessorCount = 16;             // CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT
constexpr int kMaxSharedMemoryPerBlockOptin = 97;    // CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN
constexpr int kPointerMemoryType = 2;                // CU_POINTER_ATTRIBUTE_MEMORY_TYPE
constexpr int kClusterDimension = 4;                 // CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION
constexpr int kProgrammaticStreamSerialization = 6;  // CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION

struct LaunchAttribute {
  int id;
  char pad[8 - sizeof(int)];
  union {
    char bytes[64];
    int allowed;
    struct {
      unsigned x, y, z;
    } cluster;
  } value;
};

struct LaunchConfig {
  unsigned grid[3];
  unsigned block[3];
  unsigned shared_bytes;
  Stream stream;
  LaunchAttribute* attributes;
  unsigned num_attributes;
};

/// The functions that are used, with the types of their arguments.
#define CUDA_FUNCTIONS(FUNCTION)                                                                                   \
  FUNCTION(cuInit, unsigned)                                                                                       \
  FUNCTION(cuGetErrorName, Result, const char**)                                                                   \
  FUNCTION(cuDeviceGet, Device*, int)                                                                              \
  FUNCTION(cuDeviceGetAttribute, int*, int, Device)                                                                \
  FUNCTION(cuDevicePrimaryCtxRetain, Context*, Device)                                                             \
  FUNCTION(cuCtxGetCurrent, Context*)                                                                              \
  FUNCTION(cuCtxSetCurrent, Context)                                                                               \
  FUNCTION(cuModuleLoad, Module*, const char*)                                                                     \
  FUNCTION(cuModuleGetFunction, Function*, Module, const char*)                                                    \
  FUNCTION(cuModuleGetGlobal_v2, uint64_t*, size_t*, Module, const char*)                                          \
  FUNCTION(cuMemcpyDtoH_v2, void*, uint64_t, size_t)                                                               \
  FUNCTION(cuPointerGetAttribute, void*, int, uint64_t)                                                            \
  FUNCTION(cuFuncSetAttribute, Function, int, int)                                                                 \
  FUNCTION(cuFuncGetAttribute, int*, int, Function)                                                                \
  FUNCTION(cuOccupancyMaxActiveBlocksPerMultiprocessor, int*, Function, int, size_t)                               \
  FUNCTION(cuLaunchKernelEx, const LaunchConfig*, Function, void**, void**)                                        \
  FUNCTION(cuTensorMapEncodeTiled, void*, int, unsigned, void*, const uint64_t*, const uint64_t*, const uint32_t*, \
           const uint32_t*, int, int, int, int)

struct Driver {
#define DECLARE(name, ...) Result (*name)(__VA_ARGS__);
  CUDA_FUNCTIONS(DECLARE)
#undef DECLARE
};

template <class Pointer>
void find(void* library, const char* name, Pointer& pointer) {
  pointer = reinterpret_cast<Pointer>(dlsym(library, name));
  if (pointer == nullptr)
    TVM_FFI_THROW(RuntimeError) << "libcuda.so.1 has no " << name << ": the NVIDIA driver is older than CUDA 12";
}

const Driver& driver() {
  static const Driver loaded = [] {
    void* library = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
    if (library == nullptr) TVM_FFI_THROW(RuntimeError) << "a CUDA tensor needs the NVIDIA driver: " << dlerror();
    Driver d;
#define FIND(name, ...) find(library, #name, d.name);
    CUDA_FUNCTIONS(FIND)
#undef FIND
    d.cuInit(0);
    return d;
  }();
  return loaded;
}

std::string describe(Result result, const std::string& doing) {
  const char* name = nullptr;
  driver().cuGetErrorName(result, &name);
  return doing + ": " + (name ? name : "unknown CUDA error") + " (" + std::to_string(result) + ")";
}

void check(Result result, const std::string& doing) {
  if (result != 0) TVM_FFI_THROW(RuntimeError) << describe(result, doing);
}

void check_device(int32_t device) {
  if (device < 0 || device >= kMaxDevices)
    TVM_FFI_THROW(ValueError) << "device is " << device << ", must be in [0, " << kMaxDevices << ")";
}

/// The primary context of `device`, which torch uses, too. Retained once and never released.
Context primary_context(int32_t device) {
  static std::atomic<Context> contexts[kMaxDevices];
  static std::mutex mutex;
  check_device(device);
  Context context = contexts[device].load(std::memory_order_acquire);
  if (context != nullptr) return context;
  const std::lock_guard<std::mutex> lock(mutex);
  context = contexts[device].load(std::memory_order_relaxed);
  if (context != nullptr) return context;
  Device handle;
  check(driver().cuDeviceGet(&handle, device), "cuDeviceGet");
  check(driver().cuDevicePrimaryCtxRetain(&context, handle), "cuDevicePrimaryCtxRetain");
  contexts[device].store(context, std::memory_order_release);
  return context;
}

/// Makes the primary context of `device` current on this thread.
void use_device(int32_t device) {
  const Context wanted = primary_context(device);
  Context current = nullptr;
  driver().cuCtxGetCurrent(&current);
  if (current != wanted) check(driver().cuCtxSetCurrent(wanted), "cuCtxSetCurrent");
}

int32_t device_attribute(int32_t device, int attribute) {
  use_device(device);
  int value = 0;
  Device handle;
  check(driver().cuDeviceGet(&handle, device), "cuDeviceGet");
  check(driver().cuDeviceGetAttribute(&value, attribute, handle), "cuDeviceGetAttribute");
  return value;
}

}  // namespace

Kernel load_kernel(const std::string& file, const char* symbol, int32_t device, int32_t shared_bytes) {
  static std::map<std::tuple<std::string, int32_t>, Module> modules;
  static std::map<Function, int32_t>
      allowed;  // dynamic shared memory: all users of a kernel share one limit, which must never fall
  static std::mutex mutex;
  use_device(device);
  std::lock_guard<std::mutex> lock(mutex);
  Module& module = modules[{file, device}];
  if (module == nullptr) {
    const Result result = driver().cuModuleLoad(&module, file.c_str());
    if (result != 0) TVM_FFI_THROW(RejectedKernelError) << describe(result, "loading " + file);
  }
  Kernel kernel;
  kernel.module = module;
  kernel.device = device;
  kernel.shared_bytes = shared_bytes;
  kernel.name = symbol;
  check(driver().cuModuleGetFunction(&kernel.function, module, symbol), "looking for " + kernel.name + " in " + file);
  int ptx_version = 0;
  check(driver().cuFuncGetAttribute(&ptx_version, kPtxVersion, kernel.function),
        "asking what " + kernel.name + " was compiled for");
  kernel.waits = ptx_version >= 90;
  int32_t& limit = allowed.emplace(kernel.function, -1).first->second;
  if (shared_bytes > limit) {
    check(driver().cuFuncSetAttribute(kernel.function, kMaxDynamicSharedSizeBytes, shared_bytes),
          "giving " + std::to_string(shared_bytes) + " bytes of shared memory to " + kernel.name);
    limit = shared_bytes;
  }
  return kernel;
}

KernelCode find_code(const Kernel& kernel) {
  static std::map<Function, KernelCode> known;  // read once: copying to the host may not be captured
  static std::mutex mutex;
  const std::lock_guard<std::mutex> lock(mutex);
  const auto [entry, is_new] = known.emplace(kernel.function, KernelCode{});
  if (!is_new) return entry->second;
  use_device(kernel.device);
  uint64_t variable = 0;
  size_t bytes = 0;
  KernelCode code{};
  if (driver().cuModuleGetGlobal_v2(&variable, &bytes, kernel.module, (kernel.name + "_code").c_str()) != 0 ||
      bytes != sizeof(code))
    return {};
  check(driver().cuMemcpyDtoH_v2(&code, variable, sizeof(code)), "reading where the code of " + kernel.name + " lies");
  // A module's variables and its code lie in one region. A prefetch of an address without memory takes thirty times as
  // long.
  constexpr uint64_t kRegionBytes = uint64_t{1} << 32;
  const uint64_t address = reinterpret_cast<uint64_t>(code.address);
  if ((address > variable ? address - variable : variable - address) < kRegionBytes) entry->second = code;
  return entry->second;
}

const Kernel& loaded_kernel(std::string_view file, std::string_view symbol, int32_t device, int32_t shared_bytes,
                            bool has_large_clusters) {
  static std::deque<std::pair<std::string, Kernel>> kernels;  // with their files; they stay where they are
  static std::mutex mutex;
  const std::lock_guard<std::mutex> lock(mutex);
  for (const auto& [known_file, known] : kernels)
    if (known.device == device && known.name == symbol && known_file == file) return known;
  const Kernel kernel = load_kernel(std::string(file), std::string(symbol).c_str(), device, shared_bytes);
  if (has_large_clusters)
    check(driver().cuFuncSetAttribute(kernel.function, kNonPortableClusterSizeAllowed, 1),
          "allowing large clusters of " + kernel.name);
  return kernels.emplace_back(file, kernel).second;
}

int32_t ctas_per_multiprocessor(const Kernel& kernel, int32_t threads) {
  use_device(kernel.device);
  int count = 0;
  check(driver().cuOccupancyMaxActiveBlocksPerMultiprocessor(&count, kernel.function, threads,
                                                             static_cast<size_t>(kernel.shared_bytes)),
        "occupancy of " + kernel.name);
  return count;
}

int32_t multiprocessor_count(int32_t device) {
  static std::atomic<int32_t> known[kMaxDevices];  // threads may ask the driver twice, and get the same answer
  check_device(device);
  int32_t count = known[device].load(std::memory_order_relaxed);
  if (count == 0) {
    count = device_attribute(device, kMultiprocessorCount);
    known[device].store(count, std::memory_order_relaxed);
  }
  return count;
}

bool is_device_memory(uint64_t address) {
  unsigned type = 0;
  return driver().cuPointerGetAttribute(&type, kPointerMemoryType, address) == 0;
}

int32_t max_shared_bytes(int32_t device) { return device_attribute(device, kMaxSharedMemoryPerBlockOptin); }

/// CU_TENSOR_MAP_DATA_TYPE_*. 8-bit numbers are bytes to TMA.
static int tensor_map_type(DataType dtype) {
  if (is_in_bytes(dtype)) return 0;                                               // UINT8
  return dtype == DataType::kBFloat16 ? 9 : dtype == DataType::kFloat32 ? 7 : 6;  // BFLOAT16, FLOAT32, FLOAT16
}

bool encode(const Tensor4d& tensor, TensorMap& map) {
  constexpr int kNoInterleave = 0, kNoFill = 0;   // CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE
  constexpr int kSwizzle64 = 2, kSwizzle128 = 3;  // CU_TENSOR_MAP_SWIZZLE_64B, CU_TENSOR_MAP_SWIZZLE_128B
  constexpr uint64_t kUnit = 16;
  const uint64_t bytes = static_cast<uint64_t>(bytes_of(tensor.dtype));
  uint64_t strides[3];
  uint64_t alignment_bits = reinterpret_cast<uint64_t>(tensor.data);  // of rows
  for (int i = 0; i < 3; ++i) {
    // A dimension of size 1 may have any stride.
    strides[i] = tensor.sizes[i + 1] == 1 ? kUnit : static_cast<uint64_t>(tensor.strides[i]) * bytes;
    if (tensor.strides[i] < 0 || strides[i] % kUnit != 0) return false;
    if (tensor.sizes[i + 1] > 1) alignment_bits |= strides[i];
  }
  if (alignment_bits % kUnit != 0) return false;
  // A box's row is usually 128 bytes. With 256 the memory brings twice what heads of 64 elements need, and reads of
  // longer ones are slower too (ADR 17). Rows that begin within a line of 128 share it with another head, which a CTA
  // reads at another time.
  constexpr int kNoPromotion = 0, kPromoteToL2_128 = 2;
  const int promotion = alignment_bits % 128 == 0 ? kPromoteToL2_128 : kNoPromotion;
  uint64_t sizes[4];
  uint32_t box[4];
  for (int i = 0; i < 4; ++i) {
    sizes[i] = static_cast<uint64_t>(tensor.sizes[i]);
    box[i] = static_cast<uint32_t>(tensor.box[i]);
  }
  const uint32_t steps[4] = {1, 1, 1, 1};
  const int swizzle = box[0] * bytes == 64 ? kSwizzle64 : kSwizzle128;
  return driver().cuTensorMapEncodeTiled(&map, tensor_map_type(tensor.dtype), 4, const_cast<void*>(tensor.data), sizes,
                                         strides, box, steps, kNoInterleave, swizzle, promotion, kNoFill) == 0;
}

void launch(const Kernel& kernel, const Launch& shape, const void* params, Stream stream) {
  use_device(kernel.device);
  LaunchAttribute attributes[2] = {};
  unsigned num_attributes = 0;
  if (shape.overlaps_previous && kernel.waits) {
    LaunchAttribute& attribute = attributes[num_attributes++];
    attribute.id = kProgrammaticStreamSerialization;
    attribute.value.allowed = 1;
  }
  if (shape.cluster_x * shape.cluster_y > 1) {
    LaunchAttribute& attribute = attributes[num_attributes++];
    attribute.id = kClusterDimension;
    attribute.value.cluster.x = shape.cluster_x;
    attribute.value.cluster.y = shape.cluster_y;
    attribute.value.cluster.z = 1;
  }
  const int32_t shared_bytes = shape.shared_bytes < 0 ? kernel.shared_bytes : shape.shared_bytes;
  const LaunchConfig config{{shape.grid_x, shape.grid_y, shape.grid_z},
                            {shape.threads, 1, 1},
                            static_cast<unsigned>(shared_bytes),
                            stream,
                            attributes,
                            num_attributes};
  void* arguments[] = {const_cast<void*>(params)};
  const Result result = driver().cuLaunchKernelEx(&config, kernel.function, arguments, nullptr);
  if (result != 0) {
    check(result, "launching " + kernel.name + " with grid " + std::to_string(shape.grid_x) + " x " +
                      std::to_string(shape.grid_y) + " x " + std::to_string(shape.grid_z) + ", " +
                      std::to_string(shape.threads) + " threads, " + std::to_string(shared_bytes) +
                      " bytes of shared memory");
  }
}

}  // namespace attn::driver
