// As csrc/common/ptx/cp_async.cuh. A copy is done when its thread waits for it, or when no thread can continue without
// it; until then its target holds NaN: who reads too early, and who writes what is still read, is found out.
#pragma once

#include <vector>

#include "common/ptx/shared_address.h"
#include "cuda_emulation.h"

namespace attn::ptx {

/// Of one thread, in their order.
struct Copies {
  struct Copy {
    uint32_t to;
    const void* from;  // nullptr: zeros
    uint32_t bytes;
  };
  std::vector<Copy> all;
  std::vector<size_t> groups;  // where each commit group ends
  size_t done;

  void finish(size_t count) {
    for (; done < count; ++done) {
      char* const to = shared_pointer(all[done].to, all[done].bytes);
      if (all[done].from != nullptr)
        std::memcpy(to, all[done].from, all[done].bytes);
      else
        std::memset(to, 0, all[done].bytes);
    }
  }
};

/// Of each thread of a cluster.
inline Copies copies_of_threads[1024];
inline Copies& own_copies() { return copies_of_threads[emulation::fiber()]; }

inline void begin_copies() {
  for (Copies& copies : copies_of_threads) copies = Copies{};
}
inline void end_copies() {
  for (const Copies& copies : copies_of_threads) {
    if (copies.done < copies.all.size()) emulation::fail("a thread has ended before its cp.async");
  }
}
inline const bool kHasCopies = emulation::add_unit({begin_copies, end_copies});

inline void copy_later(uint32_t shared, const void* global, uint32_t bytes) {
  if (reinterpret_cast<uintptr_t>(global) % bytes != 0)
    emulation::fail("bytes are copied together that do not lie together");
  std::memset(shared_pointer(shared, bytes), emulation::kUnwritten, bytes);
  emulation::replace_shared(shared, bytes);
  own_copies().all.push_back({shared, global, bytes});
}

inline void cp_async_16(uint32_t shared, const void* global) { copy_later(shared, global, 16); }
inline void cp_async_16_or_zero(uint32_t shared, const void* global, bool exists) {
  copy_later(shared, exists ? global : nullptr, 16);
}
inline void cp_async_8_or_zero(uint32_t shared, const void* global, bool exists) {
  copy_later(shared, exists ? global : nullptr, 8);
}

inline void cp_async_commit() { own_copies().groups.push_back(own_copies().all.size()); }

template <int kPending>
void cp_async_wait() {
  Copies& copies = own_copies();
  if (copies.groups.size() > kPending) copies.finish(copies.groups[copies.groups.size() - 1 - kPending]);
}

}  // namespace attn::ptx
