// Small kernels for test_emulation.py, through ctypes: each right, or with a fault that the emulation must notice.
#include <cstring>

#include "cuda_emulation.h"

alignas(1024) char memory[64 << 10];  // shared memory

namespace emulation {

char* const shared_memory = memory;
const size_t shared_bytes = sizeof(memory);
uint64_t time() { return 0; }
bool loses_messages() { return false; }

}  // namespace emulation

#include "common/ptx/barrier.cuh"
#include "common/ptx/cluster.cuh"
#include "common/ptx/copy.cuh"
#include "common/ptx/mma.cuh"
#include "common/ptx/warp.cuh"
#include "common/ptx/wgmma.cuh"

namespace {

using namespace attn;

constexpr int32_t kThreads = 128;
constexpr uint32_t kBarrier = 0, kTile = 1024, kTileBytes = 64 * 128, kSecondTile = kTile + kTileBytes;

/// Of the running kernel.
struct Launched {
  const uint16_t* a;  // [64, 64]
  const uint16_t* b;  // [64, 64]
  float* out;         // [64, 64]
  int32_t fault;      // 0: none
} launched;
TensorMap map;

bool is_fault(int32_t number) { return launched.fault == number; }

/// Element (row, column) of a tile of 64 x 64, permuted as TMA does it.
uint32_t place(int32_t row, int32_t column) {
  return static_cast<uint32_t>(row * 128 + ((column / 8 ^ row % 8) * 8 + column % 8) * 2);
}

float element(uint32_t address) {
  uint16_t bits;
  std::memcpy(&bits, memory + address, sizeof(bits));
  return ptx::bf16_element(bits, 0);
}

/// The tile at kTile, read by threads.
void write_tile() {
  for (int32_t i = threadIdx.x; i < 64 * 64; i += kThreads) launched.out[i] = element(kTile + place(i / 64, i % 64));
}

/// 1: a warp does not come. 2: it comes to another barrier.
void named_barrier() {
  if (threadIdx.x >= 64) return;
  if (is_fault(1) && threadIdx.x >= 32) return;
  ptx::barrier_sync(is_fault(2) && threadIdx.x >= 32 ? 3 : 2, 64);
  launched.out[threadIdx.x] = 1.0f;
}

/// Three warpgroups. 1: none gives registers.
void registers() {
  if (threadIdx.x < kThreads) {
    if (!is_fault(1)) ptx::give_registers<88>();
  } else {
    ptx::take_registers<208>();
  }
  launched.out[threadIdx.x] = 1.0f;
}

/// 1: no wait. 2: a wait that leaves this group.
void copy_async() {
  for (int32_t i = threadIdx.x; i < 64 * 8; i += kThreads)
    ptx::cp_async_16(kTile + place(i / 8, i % 8 * 8), launched.a + i * 8);
  ptx::cp_async_commit();
  if (is_fault(2)) ptx::cp_async_wait<1>();
  if (!is_fault(1) && !is_fault(2)) ptx::cp_async_wait<0>();
  __syncthreads();
  write_tile();
  ptx::cp_async_wait<0>();
}

void write_rows(uint32_t tile, const uint16_t* from) {
  for (int32_t i = threadIdx.x; i < 64 * 8; i += kThreads) {
    uint4 chunk;
    std::memcpy(&chunk, from + i * 8, sizeof(chunk));
    *reinterpret_cast<uint4*>(memory + tile + place(i / 8, i % 8 * 8)) = chunk;
  }
}

/// The last 8 rows and columns of the box lie outside the tensor. 1: no wait. 2: too few bytes are expected. 3: the
/// phase before is waited for. 4: no fence after what the box replaces.
void load_box() {
  if (threadIdx.x == 0) ptx::mbarrier_init(kBarrier, 1);
  write_rows(kTile, launched.a);
  if (!is_fault(4)) ptx::fence_async_proxy();
  __syncthreads();
  if (threadIdx.x == 0) {
    ptx::mbarrier_arrive_expect(kBarrier, kTileBytes - (is_fault(2) ? 16 : 0));
    ptx::copy_box(kTile, map, kBarrier, 8, 8, 0, 0, ptx::kKeepNormally);
  }
  if (!is_fault(1)) ptx::mbarrier_wait(kBarrier, is_fault(3) ? 1 : 0);
  write_tile();
}

/// 1: no fence. 2: no wait before the thread ends.
void store_box() {
  write_rows(kTile, launched.a);
  if (!is_fault(1)) ptx::fence_async_proxy();
  __syncthreads();
  if (threadIdx.x != 0) return;
  ptx::store_box(map, kTile, 8, 8, 0, 0);
  ptx::bulk_commit();
  if (!is_fault(2)) ptx::bulk_wait_read();
}

/// Each of two CTAs copies a tile, A or B, to the other, which writes half of its rows. 1: no fence. 2: no wait. 3: too
/// few bytes are expected. 4: a CTA ends before it has the tile. 5: no fence after what the copy replaces.
void copy_to_cta() {
  const uint32_t rank = ptx::cluster_rank(), own = static_cast<uint32_t>(ptx::own_shared(memory) - memory);
  if (threadIdx.x == 0) ptx::mbarrier_init(own + kBarrier, 1);
  write_rows(own + kTile, rank == 0 ? launched.a : launched.b);
  if (!is_fault(1)) ptx::fence_async_proxy();
  write_rows(own + kSecondTile, launched.a);
  if (!is_fault(1) && !is_fault(5)) ptx::fence_async_proxy();
  ptx::cluster_sync();
  if (threadIdx.x == 0) {
    ptx::mbarrier_arrive_expect(own + kBarrier, kTileBytes - (is_fault(3) ? 16 : 0));
    ptx::copy_to_cta(ptx::cluster_address(own + kSecondTile, rank ^ 1), own + kTile, kTileBytes,
                     ptx::cluster_address(own + kBarrier, rank ^ 1));
  }
  if (is_fault(4) && rank == 1) return;
  if (!is_fault(2)) ptx::mbarrier_wait(own + kBarrier, 0);
  for (int32_t i = threadIdx.x; i < 64 * 64; i += kThreads) {
    if (i / 64 % 2 == static_cast<int32_t>(rank)) launched.out[i] = element(own + kSecondTile + place(i / 64, i % 64));
  }
  ptx::cluster_sync();
}

/// out = A B^T, or A B with A in registers or in shared memory. 1: no fence.proxy.async. 2: no wgmma.fence. 3: no
/// commit. 4: no wait. 5: a wait that leaves this group. 6: B is overwritten, 7: A in registers is, before the wait. 8:
/// one warp multiplies other rows of B.
template <bool kInRegisters, bool kRowsOfB = kInRegisters>
void multiply() {
  write_rows(kTile, launched.a);
  write_rows(kSecondTile, launched.b);
  if (!is_fault(1)) ptx::fence_async_proxy();
  __syncthreads();
  const int32_t lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  float c[8][4];
  uint32_t fragments[4][4];
  const ptx::MatrixDescriptor a(kTile, 0);
  const ptx::MatrixDescriptor b(kSecondTile + (is_fault(8) && warp == 2 ? 1024 : 0), 0);
  for (int32_t k = 0; k < 4 && kInRegisters; ++k)
    ptx::ldmatrix_x4(fragments[k], kTile + place(warp * 16 + lane % 16, k * 16 + lane / 16 * 8));
  if (!is_fault(2)) ptx::wgmma_fence();
  for (int32_t k = 0; k < 4; ++k) {
    if constexpr (kInRegisters)
      ptx::wgmma_registers<ptx::MmaType::kBFloat16>(c, fragments[k], b.advanced(static_cast<uint32_t>(k) * 16 * 128),
                                                    k > 0);
    else if constexpr (kRowsOfB)
      ptx::wgmma_shared_rows<ptx::MmaType::kBFloat16>(c, a.advanced(static_cast<uint32_t>(k) * 32),
                                                      b.advanced(static_cast<uint32_t>(k) * 16 * 128), k > 0);
    else
      ptx::wgmma_shared<ptx::MmaType::kBFloat16>(c, a.advanced(static_cast<uint32_t>(k) * 32),
                                                 b.advanced(static_cast<uint32_t>(k) * 32), k > 0);
  }
  if (!is_fault(3)) ptx::wgmma_commit();
  if (is_fault(6)) write_rows(kSecondTile, launched.a);
  for (int32_t k = 0; k < 4 && is_fault(7); ++k) fragments[k][0] = 0;
  if (is_fault(5)) ptx::wgmma_wait<1>();
  if (!is_fault(4) && !is_fault(5)) ptx::wgmma_wait<0>();
  for (int32_t n = 0; n < 8; ++n) {
    for (int32_t i = 0; i < 4; ++i)
      launched.out[(warp * 16 + lane / 4 + i / 2 * 8) * 64 + n * 8 + lane % 4 * 2 + i % 2] = c[n][i];
  }
}

/// The same of e4m3 matrices [64, 128], A B^T, with A in shared memory or in registers. 1, 2, 6, 7 as above.
template <bool kInRegisters>
void multiply_float8() {
  write_rows(kTile, launched.a);
  write_rows(kSecondTile, launched.b);
  if (!is_fault(1)) ptx::fence_async_proxy();
  __syncthreads();
  const int32_t lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  float c[8][4];
  uint32_t fragments[4][4];
  const ptx::MatrixDescriptor a(kTile, 0), b(kSecondTile, 0);
  for (int32_t k = 0; k < 4; ++k) {
    for (int32_t i = 0; i < 4; ++i) {
      const int32_t row = warp * 16 + lane / 4 + i % 2 * 8, column = k * 32 + lane % 4 * 4 + i / 2 * 16;
      std::memcpy(&fragments[k][i], memory + kTile + place(row, column / 2), 4);
    }
  }
  if (!is_fault(2)) ptx::wgmma_fence();
  for (int32_t k = 0; k < 4; ++k) {
    if constexpr (kInRegisters)
      ptx::wgmma_registers<ptx::MmaType::kFloat8E4M3>(c, fragments[k], b.advanced(static_cast<uint32_t>(k) * 32),
                                                      k > 0);
    else
      ptx::wgmma_shared<ptx::MmaType::kFloat8E4M3>(c, a.advanced(static_cast<uint32_t>(k) * 32),
                                                   b.advanced(static_cast<uint32_t>(k) * 32), k > 0);
  }
  ptx::wgmma_commit();
  if (is_fault(6)) write_rows(kSecondTile, launched.a);
  for (int32_t k = 0; k < 4 && is_fault(7); ++k) fragments[k][0] = 0;
  ptx::wgmma_wait<0>();
  for (int32_t n = 0; n < 8; ++n) {
    for (int32_t i = 0; i < 4; ++i)
      launched.out[(warp * 16 + lane / 4 + i / 2 * 8) * 64 + n * 8 + lane % 4 * 2 + i % 2] = c[n][i];
  }
}

}  // namespace

/// kernel: its number in this order. Tensors as in Launched. tensor: what TMA loads from or stores to, [56, 56] with
/// rows of 64. Returns what failed, or nullptr.
extern "C" const char* run_kernel(int32_t kernel, int32_t fault, const uint16_t* a, const uint16_t* b, float* out,
                                  uint16_t* tensor, uint32_t seed) {
  void (*const kernels[])() = {named_barrier,
                               registers,
                               copy_async,
                               load_box,
                               store_box,
                               copy_to_cta,
                               multiply<false>,
                               multiply<true>,
                               multiply<false, true>,
                               multiply_float8<false>,
                               multiply_float8<true>};
  launched = Launched{a, b, out, fault};
  return emulation::failure_of(seed, [&] {
    const Tensor4d described{tensor, DataType::kBFloat16, {56, 56, 1, 1}, {64, 0, 0}, {64, 64, 1, 1}};
    if (!ptx::encode(described, map)) emulation::fail("the map is refused");
    emulation::run_cluster(kernels[kernel] == copy_to_cta ? 2 : 1,
                           kernels[kernel] == registers ? 3 * kThreads : kThreads, seed, kernels[kernel]);
  });
}
