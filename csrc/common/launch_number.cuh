// The number of the running launch, by which its CTAs recognize each other's messages (docs/adr/0001).
#pragma once

#include "common/ptx/message.cuh"
#include "common/ptx/warp.cuh"

namespace attn {

/// A word in global memory that holds the number of the running launch. Every CTA reads it and tags its message with
/// it. One CTA, the receiver, waits for the messages and then advances the number for the next launch.
///
/// A CTA may start after the receiver's wait has expired. It must not see a number that the next launch uses, so the
/// receiver then leaves the number closed: no CTA sends with a closed number. The receiver of the next launch opens it,
/// and the senders of that launch wait for this. A number is thus open in one launch only, whatever the word held
/// before.
struct LaunchNumber {
  uint32_t* word;

  static constexpr uint32_t kClosed = 1u << 31;
  /// Nanoseconds. A sender that gives up costs its launch the message, not its correctness.
  static constexpr uint64_t kMaxWaitForReceiver = 100'000'000;

  /// Called by every CTA, at any time before it sends or waits. The number may be closed.
  __device__ __forceinline__ uint32_t read() const { return ptx::load_relaxed(word); }

  /// Called by a sender before it sends. Returns whether the number is open, and must tag the message.
  __device__ __forceinline__ bool wait_until_open(uint32_t& number) const {
    if ((number & kClosed) == 0) return true;
    const uint64_t begin = ptx::global_timer();
    do {
      if (ptx::global_timer() - begin > kMaxWaitForReceiver) return false;
      number = read();
    } while ((number & kClosed) != 0);
    return true;
  }

  /// Called by the receiver before it waits, with the number that it has read. Returns the open number.
  __device__ __forceinline__ uint32_t open(uint32_t number) const {
    if ((number & kClosed) == 0) return number;
    ptx::store_relaxed(word, next(number));
    return next(number);
  }

  /// Called by the receiver when its wait has ended. If all messages have arrived, all CTAs have read the number.
  __device__ __forceinline__ void advance(uint32_t number, bool has_all_messages) const {
    ptx::store_relaxed(word, next(number) | (has_all_messages ? 0 : kClosed));
  }

 private:
  static __device__ __forceinline__ uint32_t next(uint32_t number) { return (number + 1) & ~kClosed; }
};

}  // namespace attn
