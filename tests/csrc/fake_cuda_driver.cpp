// A libcuda without a GPU, with the functions that csrc/runtime/driver.cpp looks up. The name of a "cubin" is the
// compute capability it was compiled for. Built with FAKE_PRINTS_LAUNCHES, a launch prints the ids of its attributes.
// Counters are relaxed and printing is optional: either would order threads that the thread sanitizer watches.
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>

namespace {

constexpr int kPtxVersion = 5, kBinaryVersion = 6;                       // CU_FUNC_ATTRIBUTE_*
constexpr int kMultiprocessorCount = 16, kMaxSharedMemoryPerBlock = 97;  // CU_DEVICE_ATTRIBUTE_*
constexpr int kInvalidValue = 1, kInvalidContext = 201, kNotFound = 500;
constexpr int kBinary = 90;
constexpr int kDevices = 64;

struct Attribute {
  int id;
  char value[68];
};

struct Config {
  unsigned sizes[7];
  void* stream;
  Attribute* attributes;
  unsigned num_attributes;
};

struct Context {
  std::atomic<int> num_retains{0};
} contexts[kDevices];

struct Module {
  int version;
  Context* context;
};

thread_local Context* current = nullptr;
std::atomic<int> num_launches{0};

template <class T>
int store(void** pointer, T* value) {
  *pointer = value;
  return 0;
}

}  // namespace

extern "C" {

/// How often the primary context of a device was retained.
int fake_retains(int device) { return contexts[device].num_retains.load(std::memory_order_relaxed); }
int fake_launches() { return num_launches.load(std::memory_order_relaxed); }

int cuInit(unsigned) { return 0; }
int cuGetErrorName(int, const char** name) {
  *name = "CUDA_ERROR_OF_THE_TEST";
  return 0;
}
int cuDeviceGet(int* handle, int device) {
  *handle = device;
  return 0;
}
int cuDeviceGetAttribute(int* value, int attribute, int) {
  *value = attribute == kMultiprocessorCount ? 8 : attribute == kMaxSharedMemoryPerBlock ? 227 * 1024 : 0;
  return 0;
}
int cuDevicePrimaryCtxRetain(void** context, int device) {
  contexts[device].num_retains.fetch_add(1, std::memory_order_relaxed);
  return store(context, &contexts[device]);
}
int cuCtxGetCurrent(void** context) { return store(context, current); }
int cuCtxSetCurrent(void* context) {
  current = static_cast<Context*>(context);
  return 0;
}
int cuModuleLoad(void** module, const char* file) {
  return current == nullptr ? kInvalidContext : store(module, new Module{std::atoi(file), current});
}
int cuModuleGetFunction(void** function, void* module, const char*) { return store(function, module); }
int cuModuleGetGlobal_v2(uint64_t*, size_t*, void*, const char*) { return kNotFound; }
int cuMemcpyDtoH_v2(void*, uint64_t, size_t) { return kInvalidValue; }
int cuPointerGetAttribute(void*, int, uint64_t) { return kInvalidValue; }
int cuFuncSetAttribute(void*, int, int) { return 0; }
int cuFuncGetAttribute(int* value, int attribute, void* function) {
  if (attribute != kPtxVersion && attribute != kBinaryVersion) return kInvalidValue;
  *value = attribute == kPtxVersion ? static_cast<Module*>(function)->version : kBinary;
  return 0;
}
int cuOccupancyMaxActiveBlocksPerMultiprocessor(int* count, void*, int, size_t) {
  *count = 1;
  return 0;
}
int cuLaunchKernelEx([[maybe_unused]] const Config* config, void* function, void**, void**) {
  const Module& module = *static_cast<Module*>(function);
  if (module.context != current) return kInvalidContext;
  num_launches.fetch_add(1, std::memory_order_relaxed);
#ifdef FAKE_PRINTS_LAUNCHES
  std::printf("%d:", module.version);
  for (unsigned i = 0; i < config->num_attributes; ++i) std::printf(" %d", config->attributes[i].id);
  std::printf("\n");
#endif
  return 0;
}
int cuTensorMapEncodeTiled(void*, int, unsigned, void*, const uint64_t*, const uint64_t*, const uint32_t*,
                           const uint32_t*, int, int, int, int) {
  return kInvalidValue;
}

}  // extern "C"
