// append_qkv on CPU threads: what cache/append_qkv.cuh is on a GPU.
#pragma once

#include "cache/qkv_params.h"
#include "common/data_type.h"

namespace attn::cpu {

void append_qkv(const QkvParams& params, DataType dtype);

}  // namespace attn::cpu
