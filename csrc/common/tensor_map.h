// A tensor as TMA sees it.
#pragma once

#include "common/data_type.h"
#include "common/platform.h"

namespace attn {

/// Encoded by the driver, read by the hardware (CUtensorMap).
struct alignas(64) TensorMap {
  uint64_t words[16];
};

/// A tensor of elements of one or two bytes, and the boxes of it that TMA loads or stores. Strides in elements; the
/// first dimension has stride 1. A box's rows have 128 or 64 bytes. Their 16-byte chunks are permuted: chunk ^ number
/// of 128 bytes, modulo the chunks of a row.
struct Tensor4d {
  const void* data;
  DataType dtype;
  int64_t sizes[4];
  int64_t strides[3];
  int32_t box[4];
};

}  // namespace attn
