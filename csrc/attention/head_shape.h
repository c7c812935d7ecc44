// How many columns the heads have.
#pragma once

#include "common/math.h"
#include "common/platform.h"

namespace attn {

/// Columns of a head of Q and K, and of a head of V and O.
struct HeadDims {
  int32_t qk;
  int32_t v;

  ATTN_HD constexpr HeadDims(int32_t both) : qk(both), v(both) {}
  ATTN_HD constexpr HeadDims(int32_t qk_, int32_t v_) : qk(qk_), v(v_) {}

  ATTN_HD constexpr int32_t widest() const { return max_of(qk, v); }
};

/// HeadDims that a kernel is compiled for.
template <int kQk_, int kV_ = kQk_>
struct HeadShape {
  static constexpr int kQk = kQk_;
  static constexpr int kV = kV_;
  static constexpr HeadDims kDims{kQk_, kV_};
};

}  // namespace attn
