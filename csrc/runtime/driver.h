// The few functions of the CUDA driver that are used, found in libcuda at run time: building needs no CUDA, and
// importing needs no driver.
#pragma once

#include <tvm/ffi/extra/c_env_api.h>

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>

#include "common/kernel_code.h"
#include "common/tensor_map.h"

namespace attn::driver {

using Stream = void*;

constexpr int32_t kMaxDevices = 64;

/// A kernel in a loaded cubin. Copyable; stays loaded until the process ends.
struct Kernel {
  void* function = nullptr;
  void* module = nullptr;
  int32_t shared_bytes = 0;  // dynamic shared memory of a launch
  int32_t device = 0;
  bool waits = false;  // compiled for compute capability 9.0 or newer, with griddepcontrol (grid_dependency.cuh)
  std::string name;

  explicit operator bool() const { return function != nullptr; }
};

struct Launch {
  uint32_t grid_x;
  uint32_t grid_y;
  uint32_t threads;
  // Programmatic dependent launch: the kernel waits for the previous one itself. Other kernels are serialized.
  bool overlaps_previous = false;
  int32_t shared_bytes = -1;  // dynamic shared memory, if less than the kernel's
  uint32_t cluster_x = 1;     // CTAs of a thread block cluster; more than 8 only with has_large_clusters
  uint32_t grid_z = 1;
  uint32_t cluster_y = 1;
};

/// Returns whether TMA can load such boxes: addresses and strides must be multiples of 16 bytes.
bool encode(const Tensor4d& tensor, TensorMap& map);

/// Loads `symbol` from a cubin or fatbin file into the primary context of `device`. Throws RuntimeError naming the file
/// and CUDA's error.
Kernel load_kernel(const std::string& file, const char* symbol, int32_t device, int32_t shared_bytes);

/// Where the code of a kernel lies, if its source and cubin say (common/kernel_code.h).
KernelCode find_code(const Kernel& kernel);

/// load_kernel() for kernels without an owner: loaded at the first call. Lookups copy no string, which would cost a
/// layer's call time. has_large_clusters: launches may have clusters of up to 16 CTAs.
const Kernel& loaded_kernel(std::string_view file, std::string_view symbol, int32_t device, int32_t shared_bytes = 0,
                            bool has_large_clusters = false);

/// CTAs of `threads` threads that one multiprocessor holds.
int32_t ctas_per_multiprocessor(const Kernel& kernel, int32_t threads);

/// Whether CUDA knows of memory at an address.
bool is_device_memory(uint64_t address);

/// Asks the driver once for each device: every call of sample() needs it.
int32_t multiprocessor_count(int32_t device);

/// Most shared memory that a block can be given, in bytes.
int32_t max_shared_bytes(int32_t device);

/// Launches with one plain-data parameter struct. Throws RuntimeError naming the kernel and CUDA's error.
void launch(const Kernel& kernel, const Launch& shape, const void* params, Stream stream);

/// torch's current stream of a CUDA device; nullptr for a CPU.
inline Stream current_stream(DLDevice device) {
  return device.device_type == kDLCUDA ? TVMFFIEnvGetStream(device.device_type, device.device_id) : nullptr;
}

}  // namespace attn::driver
