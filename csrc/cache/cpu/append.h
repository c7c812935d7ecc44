// What writes to the cache on CPU threads: what the kernels of csrc/cache are on a GPU.
#pragma once

#include "cache/params.h"
#include "common/data_type.h"

namespace attn::cpu {

void append(const AppendParams& params);
void append_latent(const LatentParams& params);
void append_qkv(const QkvParams& params, DataType dtype);

}  // namespace attn::cpu
