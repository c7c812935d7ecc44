// Element types of tensors, as the CPU kernels see them.
#pragma once

#include <cstdint>

#include "common/data_type.h"

namespace attn::cpu {

struct Half {
  uint16_t bits;
};

struct BFloat16 {
  uint16_t bits;
};

struct Float8E4M3 {
  uint8_t bits;
};

struct Float8E5M2 {
  uint8_t bits;
};

/// The other 16-bit type; of float, itself.
template <class Element>
struct OtherElementOf {
  using Type = Element;
};
template <>
struct OtherElementOf<Half> {
  using Type = BFloat16;
};
template <>
struct OtherElementOf<BFloat16> {
  using Type = Half;
};

/// Returns body(Element{}), with the type of `dtype`: float32, float16 or bfloat16.
template <class Body>
ATTN_HD auto visit_float(DataType dtype, const Body& body) {
  if (dtype == DataType::kFloat32) return body(float{});
  if (dtype == DataType::kFloat16) return body(Half{});
  return body(BFloat16{});
}

}  // namespace attn::cpu
