// The twin of csrc/common/ptx/message.cuh. CTAs run one after another. A message arrives as a whole, at any time after
// it was sent.
#pragma once

#include <deque>
#include <map>

#include "cuda_emulation.h"

namespace attn::ptx {

struct alignas(16) Message {
  uint64_t low;
  uint64_t high;
};

/// Messages that have not arrived yet.
inline std::map<Message*, std::deque<Message>> messages_under_way;

inline void send(Message* slot, const Message& message) {
  if (!emulation::loses_messages()) messages_under_way[slot].push_back(message);
}

inline Message receive(Message* slot) {
  emulation::pause();
  const auto waiting = messages_under_way.find(slot);
  if (waiting != messages_under_way.end() && emulation::random() % 3 == 0) {
    *slot = waiting->second.front();
    waiting->second.pop_front();
    if (waiting->second.empty()) messages_under_way.erase(waiting);
  }
  return *slot;
}

inline uint32_t load_relaxed(const uint32_t* word) {
  emulation::pause();
  return *word;
}
inline void store_relaxed(uint32_t* word, uint32_t value) { *word = value; }

/// All messages have arrived when a launch ends.
inline void deliver_all() {
  for (const auto& [slot, waiting] : messages_under_way) *slot = waiting.back();
  messages_under_way.clear();
}

}  // namespace attn::ptx
