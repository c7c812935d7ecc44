// Checks of the headers that host and device share. Prints what is wrong; exits with the number of failures.
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <initializer_list>
#include <random>
#include <vector>

#include "common/math.h"
#include "planner/params.h"
#include "planner/schedule.h"
#include "planner/steps.h"
#include "planner/visibility.h"
#include "planner/work_list.h"
#include "sampling/sampling.h"

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

/// Every divisor up to 3000 and random ones, at the numerators where a rounding error would show: around multiples, and
/// the largest.
void test_fast_divisor() {
  std::mt19937 random(0);
  const auto around_multiples = [&](int32_t d) {
    const int32_t quotients[] = {
        0, 1, 2, 3, INT32_MAX / d - 1, INT32_MAX / d, static_cast<int32_t>(random() % (INT32_MAX / d + 1u))};
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
    const float x = static_cast<float>(i) * 1e-5f;  // -20 .. 20
    const double right = std::tanh(static_cast<double>(x));
    const double wrong = std::fabs(attn::tanh_rational(x) - right);
    expect(wrong <= 4e-7 * std::fabs(right), "tanh_rational() at i * 1e-5, error in 1e-9", i,
           static_cast<int64_t>(wrong * 1e9));
    expect(std::fabs(attn::tanh_rational(x)) <= 1.0f + 2e-7f, "tanh_rational() beyond 1 at i * 1e-5", i, 0);
  }
  for (const float x : {1e-30f, 1e-10f, 1e-4f})
    expect(std::fabs(attn::tanh_rational(x) / x - 1.0f) <= 4e-7f, "tanh_rational() near 0", 0, 0);
  for (const float x : {1e3f, 1e30f, INFINITY})
    expect(std::fabs(attn::tanh_rational(x) - 1.0f) <= 4e-7f, "tanh_rational() far out", 0, 0);
}

/// A query at position q sees the tokens [q - window_left, q] if causal, else from q - window_left on.
bool sees(const attn::Visibility& visibility, int32_t position, int32_t token) {
  return (visibility.causal == 0 || token <= position) &&
         (visibility.window_left < 0 || position - token <= visibility.window_left);
}

/// seen_by_any() and seen_by_all() against sees(), pair by pair.
void test_visibility() {
  for (int32_t causal : {0, 1}) {
    for (int32_t window_left : {-1, 0, 1, 3, 8, 1000, INT32_MAX}) {
      const attn::Visibility visibility{causal, window_left};
      for (int32_t first = -6; first < 12; ++first) {
        for (int32_t last = first; last < first + 5; ++last) {
          const attn::TokenRange any = visibility.seen_by_any(first, last, attn::TokenRange{0, 10});
          const attn::TokenRange all = visibility.seen_by_all(first, last, attn::TokenRange{0, 10});
          for (int32_t token = 0; token < 10; ++token) {
            int visible = 0;
            for (int32_t position = first; position <= last; ++position) visible += sees(visibility, position, token);
            expect(visible == 0 || (token >= any.begin && token < any.end), "seen_by_any() leaves out a visible token",
                   token, first);
            expect(visible == last - first + 1 || token < all.begin || token >= all.end,
                   "seen_by_all() holds a hidden token", token, first);
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
    expect(tiles <= attn::max_row_tiles(groups, rows, config.group_size, config.max_kind),
           "more row tiles than max_row_tiles()", tiles, rows);
  }
}

/// Weights against 2^t in double, everywhere monotone as far as a token's rank goes, 2^40 for the most likely token, 0
/// below 2^-40.
void test_weights() {
  for (const float temperature : {0.01f, 0.6f, 1.0f, 3.0f, 1e30f, 1e-30f}) {
    const float scale = attn::clamp(attn::kLog2E / temperature, 1e-36f, 1e36f);
    const attn::LogitWeights weights(5.0f, scale);
    expect(weights(5.0f) == uint64_t{1} << 40, "weight of the reference", static_cast<int64_t>(weights(5.0f)), 0);
    expect(weights(-INFINITY) == 0, "weight of -inf", static_cast<int64_t>(weights(-INFINITY)), 0);
    for (int32_t i = 0; i <= 400000; ++i) {
      const float logit = 5.0f - static_cast<float>(i) * 1e-4f / scale;
      const double right = std::exp2(static_cast<double>(logit - 5.0f) * scale + 40.0);
      const double wrong = std::fabs(static_cast<double>(weights(logit)) - right);
      expect(wrong <= 4e-7 * right + 1.0, "weight at i * 1e-4 powers of two below, error", i,
             static_cast<int64_t>(wrong));
    }
  }
  for (const float prob : {1.0f, 0.75f, 0.3f, 1e-3f, 1e-9f}) {
    const double right = static_cast<double>(prob) * std::exp2(40.0);
    expect(std::fabs(static_cast<double>(attn::ProbWeights(1.0f)(prob)) - right) <= 1e-7 * right + 1.0,
           "weight of a probability", 0, 0);
  }
  expect(attn::ProbWeights(1.0f)(0.0f) == 0 && attn::ProbWeights(1.0f)(-INFINITY) == 0, "weight of nothing", 0, 0);
}

void test_log2() {
  std::mt19937 random(2);
  for (int i = 0; i < 1000000; ++i) {
    const float x = attn::bits_float(0x00800000u + random() % 0x7f000000u);
    const double right = std::log2(static_cast<double>(x));
    expect(std::fabs(attn::log2_of(x) - right) <= 3e-7 * std::fmax(1.0, std::fabs(right)), "log2_of()", i, 0);
  }
}

/// The exponential numbers of the race against their logarithm in double; bits at the ends and at the seam of the two
/// ways to compute them among them.
void test_race_gain() {
  std::mt19937_64 random(5);
  for (int i = 0; i < 1000000; ++i) {
    const uint64_t seam = uint64_t{1} << 46, all = (uint64_t{1} << 48) - 1;
    const uint64_t ends[] = {0, 1, 2, seam - 1, seam, seam + 1, all - 1, all};
    const uint64_t bits = i < 8 ? ends[i] : (random() & all) >> (i % 3 == 0 ? random() % 48 : 0);
    const double x = (static_cast<double>(bits) + 0.5) * std::exp2(-48.0);
    const double right = -std::log2(-std::log1p(-x));
    const double gain = attn::race_gain(bits);
    expect(std::fabs(gain - right) <= 4e-7 * std::fmax(1.0, std::fabs(right)), "race_gain()", i,
           static_cast<int64_t>(bits));
    expect(gain <= -std::log2(x) + 2e-5, "race_gain() is more than -log2(x)", i, static_cast<int64_t>(bits));
  }
}

void test_philox() {
  uint32_t zero[4] = {0, 0, 0, 0};  // a known answer of Random123
  attn::philox(0, zero);
  expect(zero[0] == 0x6627e8d5u && zero[1] == 0xe169c58du && zero[2] == 0xbc57ac4cu && zero[3] == 0x9b00dbd8u,
         "philox()", zero[0], zero[1]);
  // Every token has bits of its own.
  std::vector<int32_t> owners(4 * 512 * 2, -1);
  for (int32_t token = 0; token < 4 * 512; ++token) {
    const size_t at = attn::race_block(token) * 8 + attn::race_word(token) * 2 + static_cast<size_t>(token % 2);
    expect(at < 4 * 512 && owners[at] < 0, "race_block(), race_word()", token, static_cast<int64_t>(at));
    if (at < owners.size()) owners[at] = token;
  }
}

/// Keys order floats as the floats are ordered, and give them back.
void test_keys() {
  std::mt19937 random(3);
  for (int i = 0; i < 1000000; ++i) {
    const float a = attn::bits_float(static_cast<uint32_t>(random())),
                b = i % 3 == 0 ? -a : attn::bits_float(static_cast<uint32_t>(random()));
    if (std::isnan(a) || std::isnan(b)) continue;
    expect(
        (a < b) == (attn::order_key(a) < attn::order_key(b)) && (a == b) == (attn::order_key(a) == attn::order_key(b)),
        "order_key()", i, 0);
    expect(attn::key_value(attn::order_key(a)) == a, "key_value()", i, 0);
  }
  expect(attn::order_key(-INFINITY) == attn::kExcludedKey && attn::order_key(INFINITY) == attn::kInfiniteKey,
         "keys of infinities", 0, 0);
}

/// A mass scaled by a factor never falls when the mass grows, and is mass * factor / 2^40 rounded down.
void test_scale_mass() {
  std::mt19937_64 random(4);
  for (int i = 0; i < 1000000; ++i) {
    const uint64_t mass = random() >> (14 + random() % 50), factor = (uint64_t{1} << 40) >> (random() % 41);
    const unsigned __int128 right = static_cast<unsigned __int128>(mass) * factor >> 40;
    expect(attn::scale_mass(mass, factor) == static_cast<uint64_t>(right), "scale_mass()", static_cast<int64_t>(mass),
           static_cast<int64_t>(factor));
  }
}

}  // namespace

int main() {
  test_weights();
  test_log2();
  test_race_gain();
  test_philox();
  test_keys();
  test_scale_mass();
  test_fast_divisor();
  test_tanh();
  test_visibility();
  test_max_row_tiles();
  return failures > 100 ? 100 : failures;
}
