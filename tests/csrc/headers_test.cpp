// Checks of the headers that host and device share. Prints what is wrong; exits with the number of failures.
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <initializer_list>
#include <random>

#include "attn/math.h"
#include "attn/planning.h"
#include "attn/schedule.h"
#include "attn/variants.h"

namespace {

int failures = 0;

void expect(bool right, const char* what, int64_t a, int64_t b) {
  if (right) return;
  std::printf("%s: %lld, %lld\n", what, static_cast<long long>(a), static_cast<long long>(b));
  ++failures;
}

void check_divisor(int32_t d, int32_t n) {
  const attn::FastDivisor divisor(d);
  expect(divisor.divide(n) == n / d, "FastDivisor::divide", n, d);
  expect(divisor.modulo(n) == n % d, "FastDivisor::modulo", n, d);
}

/// Every divisor up to 3000 and random ones, at the numerators where a rounding error would show: around multiples, and the largest.
void test_fast_divisor() {
  std::mt19937 random(0);
  const auto around_multiples = [&](int32_t d) {
    const int32_t quotients[] = {0, 1, 2, 3, INT32_MAX / d - 1, INT32_MAX / d, static_cast<int32_t>(random() % (INT32_MAX / d + 1u))};
    for (const int64_t quotient : quotients) {
      for (int64_t n = quotient * d - 1; n <= quotient * d + 1; ++n) {
        if (n >= 0 && n <= INT32_MAX) check_divisor(d, static_cast<int32_t>(n));
      }
    }
    check_divisor(d, INT32_MAX);
  };
  for (int32_t d = 1; d <= 3000; ++d) around_multiples(d);
  for (int i = 0; i < 100000; ++i) around_multiples(static_cast<int32_t>(random() >> (1 + random() % 31)) | 1);
  for (int shift = 0; shift < 31; ++shift) {
    for (int64_t d = (int64_t{1} << shift) - 1; d <= (int64_t{1} << shift) + 1; ++d) {
      if (d >= 1) around_multiples(static_cast<int32_t>(d));
    }
  }
  around_multiples(INT32_MAX);
}

void test_tanh() {
  for (int32_t i = -2000000; i <= 2000000; ++i) {
    const float x = static_cast<float>(i) * 1e-5f;      // -20 .. 20
    const double right = std::tanh(static_cast<double>(x));
    const double wrong = std::fabs(attn::tanh_rational(x) - right);
    expect(wrong <= 4e-7 * std::fabs(right), "tanh_rational() at i * 1e-5, error in 1e-9", i, static_cast<int64_t>(wrong * 1e9));
    expect(std::fabs(attn::tanh_rational(x)) <= 1.0f + 2e-7f, "tanh_rational() beyond 1 at i * 1e-5", i, 0);
  }
  for (const float x : {1e-30f, 1e-10f, 1e-4f}) expect(std::fabs(attn::tanh_rational(x) / x - 1.0f) <= 4e-7f, "tanh_rational() near 0", 0, 0);
  for (const float x : {1e3f, 1e30f, INFINITY}) expect(std::fabs(attn::tanh_rational(x) - 1.0f) <= 4e-7f, "tanh_rational() far out", 0, 0);
}

/// any() and all() of a mask against visible(), pair by pair.
void test_mask_ranges() {
  using Variant = attn::StandardVariant;
  for (int32_t causal : {0, 1}) {
    for (int32_t window_left : {-1, 0, 1, 3, 8, 1000, INT32_MAX}) {
      const attn::VariantParams params{1.0f, 0.0f, causal, window_left};
      for (int32_t first = -6; first < 12; ++first) {
        for (int32_t last = first; last < first + 5; ++last) {
          const attn::TokenRange any = Variant::any(params, first, last, attn::TokenRange{0, 10});
          const attn::TokenRange all = Variant::all(params, first, last, attn::TokenRange{0, 10});
          for (int32_t token = 0; token < 10; ++token) {
            int visible = 0;
            for (int32_t position = first; position <= last; ++position) visible += Variant::visible(params, position, token);
            expect(visible == 0 || (token >= any.begin && token < any.end), "any() leaves out a visible token", token, first);
            expect(visible == last - first + 1 || token < all.begin || token >= all.end, "all() holds a hidden token", token, first);
          }
        }
      }
    }
  }
}

/// The bound of row tiles: reached, never passed.
void test_max_row_tiles() {
  std::mt19937 random(1);
  for (int i = 0; i < 20000; ++i) {
    attn::ScheduleConfig config{};
    config.group_size = 1 + static_cast<int32_t>(random() % 20);
    config.max_kind = static_cast<int32_t>(random() % attn::kNumTileKinds);
    const int32_t groups = 1 + static_cast<int32_t>(random() % 10);
    int64_t rows = 0, tiles = 0;
    for (int32_t g = 0; g < groups; ++g) {
      attn::RowGroup group{};
      group.qo_len = static_cast<int32_t>(random() % 100);
      group.kind = attn::choose_kind(config, int64_t{group.qo_len} * config.group_size);
      rows += group.qo_len;
      tiles += attn::count_row_tiles(config, group);
    }
    expect(tiles <= attn::max_row_tiles(groups, rows, config.group_size, config.max_kind), "more row tiles than max_row_tiles()", tiles, rows);
  }
}

}  // namespace

int main() {
  test_fast_divisor();
  test_tanh();
  test_mask_ranges();
  test_max_row_tiles();
  return failures > 100 ? 100 : failures;
}
