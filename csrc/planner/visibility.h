// Which tokens a query sees, as far as planning knows it: plain data of a level.
#pragma once

#include "common/math.h"
#include "common/platform.h"

namespace attn {

/// Tokens [begin, end).
struct TokenRange {
  int32_t begin;
  int32_t end;

  ATTN_HD bool contains(int32_t token) const { return begin <= token && token < end; }
};

/// The tokens of both.
ATTN_HD TokenRange intersection(TokenRange a, TokenRange b) {
  return TokenRange{max_of(a.begin, b.begin), min_of(a.end, b.end)};
}

/// A query at position q sees the tokens [q - window_left, q] if causal, else from q - window_left on. Positions are
/// absolute: query row i of a request with qo_len rows and kv_len tokens stands at kv_len - qo_len + i (below 0 for a
/// query that is longer than its KV). A window may be as long as an int32 holds: no difference here wraps around.
struct Visibility {
  int32_t causal = 0;
  int32_t window_left = -1;  // tokens to the left of the query; -1: all

  /// Narrows `range` to the tokens that any query in [first, last] sees.
  ATTN_HD TokenRange seen_by_any(int32_t first, int32_t last, TokenRange range) const {
    if (causal) range.end = min_of(range.end, last + 1);
    if (window_left >= 0) range.begin = max_of(range.begin, max_of(first, 0) - window_left);
    return range;
  }

  /// Narrows `range` to the tokens that every query in [first, last] sees.
  ATTN_HD TokenRange seen_by_all(int32_t first, int32_t last, TokenRange range) const {
    if (causal) range.end = min_of(range.end, first + 1);
    if (window_left >= 0) range.begin = max_of(range.begin, max_of(last, 0) - window_left);
    return range;
  }
};

}  // namespace attn
