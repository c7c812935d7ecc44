// As csrc/common/ptx/mail.cuh. CTAs run one after another, the one that waits last: what it waits for has been sent,
// but is seen word by word, sooner or later.
#pragma once

#include <deque>
#include <map>

#include "cuda_emulation.h"

namespace attn::ptx {

struct alignas(16) Mail {
  uint64_t low;
  uint64_t high;
};

/// Words that nobody has seen yet.
inline std::map<Mail*, std::deque<Mail>> mail_under_way;

inline void send(Mail* slot, const Mail& mail) {
  if (!emulation::loses_mail()) mail_under_way[slot].push_back(mail);
}

inline Mail receive(Mail* slot) {
  const auto words = mail_under_way.find(slot);
  if (words != mail_under_way.end() && emulation::random() % 3 == 0) {
    *slot = words->second.front();
    words->second.pop_front();
    if (words->second.empty()) mail_under_way.erase(words);
  }
  return *slot;
}

/// The first word of a slot, as one who receives it sees it; or a word that is no mail.
inline uint64_t load_relaxed(uint64_t* word) {
  Mail* const slot = reinterpret_cast<Mail*>(word);
  return mail_under_way.count(slot) != 0 ? receive(slot).low : *word;
}
inline void store_relaxed(uint64_t* word, uint64_t value) { *word = value; }

inline uint32_t load_relaxed(const uint32_t* word) { return *word; }
inline void store_relaxed(uint32_t* word, uint32_t value) { *word = value; }

/// When a launch ends, all that was sent has come.
inline void deliver_all() {
  for (const auto& [slot, words] : mail_under_way) *slot = words.back();
  mail_under_way.clear();
}

}  // namespace attn::ptx
