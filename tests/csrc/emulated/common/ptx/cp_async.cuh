// As csrc/common/ptx/cp_async.cuh. A copy is done at once, or not before its thread waits for it: who reads too early,
// and who writes what is still read, is found out.
#pragma once

#include <deque>
#include <vector>

#include "cuda_emulation.h"

namespace attn::ptx {

struct CopyUnderWay {
  char* to;
  const void* from;
};

/// Commit groups of each thread of a cluster, the last one open.
inline std::deque<std::vector<CopyUnderWay>> copies_under_way[1024];

inline std::deque<std::vector<CopyUnderWay>>& own_copies() {
  auto& groups = copies_under_way[emulation::fiber()];
  if (groups.empty()) groups.emplace_back();
  return groups;
}

inline uint32_t shared_address(const void* pointer) {
  const auto offset = static_cast<size_t>(static_cast<const char*>(pointer) - emulation::shared_memory);
  if (offset >= emulation::shared_bytes) emulation::fail("this is no shared memory");
  return static_cast<uint32_t>(offset);
}

inline char* shared_pointer(uint32_t address, size_t bytes) {
  if (address % bytes != 0 || address + bytes > emulation::shared_bytes)
    emulation::fail("a wrong address of shared memory");
  return emulation::shared_memory + address;
}

inline void cp_async_16(uint32_t shared, const void* global) {
  if (reinterpret_cast<uintptr_t>(global) % 16 != 0) emulation::fail("16 bytes are copied that do not lie together");
  char* to = shared_pointer(shared, 16);
  if (emulation::random() % 2 == 0)
    std::memcpy(to, global, 16);
  else
    own_copies().back().push_back({to, global});
}

inline void cp_async_commit() { own_copies().emplace_back(); }

template <int kPending>
void cp_async_wait() {
  auto& groups = own_copies();
  for (; groups.size() > kPending + 1; groups.pop_front()) {
    for (const CopyUnderWay& copy : groups.front()) std::memcpy(copy.to, copy.from, 16);
  }
}

}  // namespace attn::ptx
