// A tensor as TMA sees it.
#pragma once

#include "common/data_type.h"
#include "common/platform.h"

namespace attn {

/// Encoded by the driver, read by the hardware (CUtensorMap).
struct alignas(64) TensorMap {
  uint64_t words[16];
};

/// How TMA permutes the 16-byte chunks of a box: within rows of this number of bytes (CU_TENSOR_MAP_SWIZZLE_*).
enum class Swizzle : int32_t { kNone, k32, k64, k128 };

/// A tensor of elements of one or two bytes, and the boxes of it that TMA loads or stores. Strides in elements; the
/// first dimension has stride 1.
struct Tensor4d {
  const void* data;
  DataType dtype;
  uint64_t sizes[4];
  int64_t strides[3];
  uint32_t box[4];
  Swizzle swizzle = Swizzle::k128;
};

}  // namespace attn
