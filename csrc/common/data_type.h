// Element types of tensors.
#pragma once

#include "common/platform.h"

namespace attn {

enum class DataType : int32_t { kFloat32 = 0, kFloat16 = 1, kBFloat16 = 2 };

}  // namespace attn
