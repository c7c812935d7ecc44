// A libcuda without a GPU, of as many functions as csrc/runtime/driver.cpp looks for. A "cubin" is its file's name: the
// compute capability that it was compiled for. A launch prints the ids of its attributes.
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>

namespace {

constexpr int kPtxVersion = 5, kBinaryVersion = 6;  // CU_FUNC_ATTRIBUTE_*
constexpr int kBinary = 90;

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

int version_of_file = 0;

int store(void** pointer, void* value) {
  *pointer = value;
  return 0;
}

}  // namespace

extern "C" {

int cuInit(unsigned) { return 0; }
int cuGetErrorName(int, const char** name) {
  *name = "CUDA_ERROR_OF_THE_TEST";
  return 0;
}
int cuDeviceGet(int* handle, int) { return *handle = 0; }
int cuDeviceGetAttribute(int* value, int, int) { return *value = 0; }
int cuDevicePrimaryCtxRetain(void** context, int) { return store(context, &version_of_file); }
int cuCtxGetCurrent(void** context) { return store(context, nullptr); }
int cuCtxSetCurrent(void*) { return 0; }
int cuModuleLoad(void** module, const char* file) {
  version_of_file = std::atoi(file);
  return store(module, new int(version_of_file));
}
int cuModuleGetFunction(void** function, void* module, const char*) { return store(function, module); }
int cuModuleGetGlobal_v2(uint64_t*, size_t*, void*, const char*) { return 500; }
int cuMemcpyDtoH_v2(void*, uint64_t, size_t) { return 1; }
int cuPointerGetAttribute(void*, int, uint64_t) { return 1; }
int cuFuncSetAttribute(void*, int, int) { return 0; }
int cuFuncGetAttribute(int* value, int attribute, void* function) {
  if (attribute != kPtxVersion && attribute != kBinaryVersion) return 1;
  *value = attribute == kPtxVersion ? *static_cast<int*>(function) : kBinary;
  return 0;
}
int cuOccupancyMaxActiveBlocksPerMultiprocessor(int* count, void*, int, size_t) { return *count = 0; }
int cuLaunchKernelEx(const Config* config, void* function, void**, void**) {
  std::printf("%d:", *static_cast<int*>(function));
  for (unsigned i = 0; i < config->num_attributes; ++i) std::printf(" %d", config->attributes[i].id);
  std::printf("\n");
  return 0;
}
int cuTensorMapEncodeTiled(void*, int, unsigned, void*, const uint64_t*, const uint64_t*, const uint32_t*,
                           const uint32_t*, int, int, int, int) {
  return 1;
}

}  // extern "C"
