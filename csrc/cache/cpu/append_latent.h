// append_latent on CPU threads: what cache/append_latent.cuh is on a GPU.
#pragma once

#include "cache/latent_params.h"

namespace attn::cpu {

void append_latent(const LatentParams& params);

}  // namespace attn::cpu
