// What Python tells append_qkv.
#pragma once

#include <cstdint>

namespace attn {

struct QkvOptions {
  float norm_eps;
  float norm_offset;
  int32_t is_interleaved;
};

}  // namespace attn
