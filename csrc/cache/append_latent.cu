// The entry of append_latent.

#include "cache/append_latent.cuh"

extern "C" __global__ void __launch_bounds__(attn::kAppendLatentThreads)
    append_latent_kernel(const __grid_constant__ attn::LatentParams params) {
  attn::ptx::wait_for_previous_grid();
  attn::ptx::allow_next_grid();  // it waits for this one itself, before it reads the cache
  attn::append_latent(params);
}
