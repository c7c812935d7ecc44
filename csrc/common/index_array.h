// Integer arrays that an engine owns.
#pragma once

#include "common/platform.h"

namespace attn {

/// Reads what nobody writes while a kernel runs.
ATTN_HD int32_t read_only(const int32_t* from) {
#if defined(__CUDA_ARCH__)
  return __ldg(from);
#else
  return *from;
#endif
}

/// An array of int32 or int64 that the engine owns (SGLang's lengths are int64, vLLM's are int32).
struct IndexArray {
  const void* data = nullptr;
  int32_t is_int64 = 0;

  ATTN_HD explicit operator bool() const { return data != nullptr; }
  ATTN_HD int64_t operator[](int64_t i) const {
#if defined(__CUDA_ARCH__)
    // Without a branch, so that loads from several arrays overlap.
    const int32_t* words = static_cast<const int32_t*>(data);
    const int32_t low = __ldg(words + (i << is_int64));
    const int32_t high = is_int64 ? __ldg(words + 2 * i + 1) : low >> 31;
    return static_cast<int64_t>(high) << 32 | static_cast<uint32_t>(low);
#else
    return is_int64 ? static_cast<const int64_t*>(data)[i] : static_cast<const int32_t*>(data)[i];
#endif
  }

  /// The bits of element i; an int32 is in the low half. They are not used before narrow(), so that loads from several
  /// arrays overlap.
  struct Words {
    int32_t low;
    int32_t high;
  };
  ATTN_HD Words words(int32_t i) const {
    const char* element = static_cast<const char*>(data) + static_cast<int64_t>(i) * (is_int64 ? 8 : 4);
    const int32_t* at = reinterpret_cast<const int32_t*>(element);
    return Words{read_only(at), read_only(at + is_int64)};  // `high` of an int32 is not used
  }

  /// An element as an int32, clamped.
  ATTN_HD int32_t narrow(Words element) const {
    return !is_int64 || element.high == element.low >> 31 ? element.low : element.high >> 31 ^ 0x7fffffff;
  }
};

}  // namespace attn
