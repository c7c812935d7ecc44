// As csrc/common/ptx/cp_async.cuh. A copy is done when its thread waits for it, or when nobody can go on without it;
// until then its target holds NaN: who reads too early, and who writes what is still read, is found out.
#pragma once

#include <vector>

#include "common/ptx/shared_address.h"
#include "cuda_emulation.h"

namespace attn::ptx {

constexpr uint32_t kCopyBytes = 16;

/// Of one thread, in their order.
struct Copies {
  struct Copy {
    uint32_t to;
    const void* from;  // nullptr: zeros
  };
  std::vector<Copy> all;
  std::vector<size_t> groups;  // where each commit group ends
  size_t done;

  void finish(size_t count) {
    for (; done < count; ++done) {
      char* const to = shared_pointer(all[done].to, kCopyBytes);
      if (all[done].from != nullptr)
        std::memcpy(to, all[done].from, kCopyBytes);
      else
        std::memset(to, 0, kCopyBytes);
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

inline void copy_later(uint32_t shared, const void* global) {
  if (reinterpret_cast<uintptr_t>(global) % kCopyBytes != 0)
    emulation::fail("16 bytes are copied that do not lie together");
  std::memset(shared_pointer(shared, kCopyBytes), emulation::kUnwritten, kCopyBytes);
  emulation::replace_shared(shared, kCopyBytes);
  own_copies().all.push_back({shared, global});
}

inline void cp_async_16(uint32_t shared, const void* global) { copy_later(shared, global); }
inline void cp_async_16_or_zero(uint32_t shared, const void* global, bool exists) {
  copy_later(shared, exists ? global : nullptr);
}

inline void cp_async_commit() { own_copies().groups.push_back(own_copies().all.size()); }

template <int kPending>
void cp_async_wait() {
  Copies& copies = own_copies();
  if (copies.groups.size() > kPending) copies.finish(copies.groups[copies.groups.size() - 1 - kPending]);
}

}  // namespace attn::ptx
