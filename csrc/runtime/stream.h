// The stream that launches go to.
#pragma once

#include <tvm/ffi/extra/c_env_api.h>

#include "runtime/driver.h"

namespace attn {

/// torch's current stream of a CUDA device; nullptr for a CPU.
inline driver::Stream current_stream(DLDevice device) {
  return device.device_type == kDLCUDA ? TVMFFIEnvGetStream(device.device_type, device.device_id) : nullptr;
}

}  // namespace attn
