// As csrc/common/ptx/message.cuh. CTAs run one after another, the one that waits last: what it waits for has been sent,
// but is seen word by word, sooner or later.
#pragma once

#include <deque>
#include <map>

#include "cuda_emulation.h"

namespace attn::ptx {

struct alignas(16) Message {
  uint64_t low;
  uint64_t high;
};

/// Messages that have not been received yet.
inline std::map<Message*, std::deque<Message>> messages_under_way;

inline void send(Message* slot, const Message& message) {
  if (!emulation::loses_messages()) messages_under_way[slot].push_back(message);
}

inline Message receive(Message* slot) {
  const auto waiting = messages_under_way.find(slot);
  if (waiting != messages_under_way.end() && emulation::random() % 3 == 0) {
    *slot = waiting->second.front();
    waiting->second.pop_front();
    if (waiting->second.empty()) messages_under_way.erase(waiting);
  }
  return *slot;
}

/// The first word of a slot, as one who receives it sees it; or a word that is no message.
inline uint64_t load_relaxed(uint64_t* word) {
  Message* const slot = reinterpret_cast<Message*>(word);
  return messages_under_way.count(slot) != 0 ? receive(slot).low : *word;
}
inline void store_relaxed(uint64_t* word, uint64_t value) { *word = value; }

inline uint32_t load_relaxed(const uint32_t* word) { return *word; }
inline void store_relaxed(uint32_t* word, uint32_t value) { *word = value; }

/// When a launch ends, all that was sent has come.
inline void deliver_all() {
  for (const auto& [slot, waiting] : messages_under_way) *slot = waiting.back();
  messages_under_way.clear();
}

}  // namespace attn::ptx
