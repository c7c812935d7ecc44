// The functions that variants call: those that Python functions are traced into, and what a variant in C++ may want.
// Relative errors are about 1e-6 (tanh on a GPU: absolute). On a GPU they are short; g++ vectorizes loops over them
// with -fno-math-errno -fno-trapping-math. (-ffast-math would break them.)
#pragma once

#include "attention/variant/variants.h"
#include "common/math.h"
#include "common/platform.h"

namespace attn {

/// Elements of a bfloat16 tensor; computed with as float.
struct StoredBFloat16 {
  unsigned short bits;

  ATTN_HD operator float() const { return bits_float(static_cast<uint32_t>(bits) << 16); }
};

/// Elements of a float16 tensor; computed with as float.
struct StoredFloat16 {
  unsigned short bits;

  ATTN_HD operator float() const {
#if defined(__CUDA_ARCH__)
    float value;
    asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"(bits));
    return value;
#else
    // Moves exponent and mantissa to where a float has them, then corrects the exponent's bias. An infinity or a NaN
    // keeps the largest exponent.
    const uint32_t magnitude = (bits & 0x7fffu) << 13;
    const uint32_t special = magnitude >= 0x0f800000u ? 0x7f800000u : 0u;
    return bits_float(float_bits(bits_float(magnitude) * 0x1p112f) | (bits & 0x8000u) << 16 | special);
#endif
  }
};

ATTN_HD float infinity() { return bits_float(0x7f800000u); }

template <class T>
ATTN_HD T select(bool condition, T yes, T no) {
  return condition ? yes : no;
}

/// a // b, rounded down; 0 for b == 0, so that nothing stops where a token does not exist.
ATTN_HD int32_t floor_divide(int32_t a, int32_t b) {
  const bool is_plain = b != 0 && b != -1;  // INT_MIN / -1 does not fit in an int32
  const int32_t divisor = is_plain ? b : 1;
  const int32_t quotient = a / divisor;
  const int32_t floor = quotient - ((a % divisor != 0) & ((a < 0) != (divisor < 0)));
  return is_plain ? floor : b == 0 ? 0 : static_cast<int32_t>(0u - static_cast<uint32_t>(a));
}

/// a % b, with the sign of b; 0 for b == 0.
ATTN_HD int32_t floor_modulo(int32_t a, int32_t b) {
  const int32_t divisor = b != 0 && b != -1 ? b : 1;
  const int32_t rest = a % divisor;
  return rest + ((rest != 0) & ((rest < 0) != (divisor < 0)) ? divisor : 0);
}

#if defined(__CUDACC__)
ATTN_HD float floor(float x) { return ::floorf(x); }
ATTN_HD float ceil(float x) { return ::ceilf(x); }
ATTN_HD float sqrt(float x) { return ::sqrtf(x); }
#else
ATTN_HD float floor(float x) { return __builtin_floorf(x); }
ATTN_HD float ceil(float x) { return __builtin_ceilf(x); }
ATTN_HD float sqrt(float x) { return __builtin_sqrtf(x); }
#endif

ATTN_HD float floor_divide(float a, float b) { return floor(a / b); }
ATTN_HD float floor_modulo(float a, float b) { return a - floor(a / b) * b; }

ATTN_HD float abs(float x) {
#if defined(__CUDA_ARCH__)
  return ::fabsf(x);
#else
  return __builtin_fabsf(x);
#endif
}
ATTN_HD int32_t abs(int32_t x) { return x < 0 ? -x : x; }

template <class T>
ATTN_HD T min(T a, T b) {
  return min_of(a, b);
}

template <class T>
ATTN_HD T max(T a, T b) {
  return max_of(a, b);
}

/// a / b for what goes into a logit: on a GPU not rounded to the last bit, and 0 for |b| > 2^126.
ATTN_HD float quick_divide(float a, float b) {
#if defined(__CUDA_ARCH__)
  return __fdividef(a, b);
#else
  return a / b;
#endif
}

/// For -126 <= exponent <= 127.
ATTN_HD float power_of_2(int32_t exponent) { return bits_float(static_cast<uint32_t>((exponent + 127) << 23)); }

/// e^rest * 2^exponent for |rest| <= ln(2) / 2, -152 <= exponent <= 129.
ATTN_HD float scaled_exp(float rest, float exponent) {
  float power = 1.3981999e-3f;
  power = power * rest + 8.3731264e-3f;
  power = power * rest + 4.1666467e-2f;
  power = power * rest + 0.16666503f;
  power = power * rest + 0.5f;
  power = power * rest + 1.0f;
  power = power * rest + 1.0f;
  // In two steps: the smallest and largest powers are none of a float's exponents.
  const int32_t both = static_cast<int32_t>(exponent), half = both >> 1;
  return power * power_of_2(half) * power_of_2(both - half);
}

/// Rounds to the nearest integer, for |x| < 2^22.
ATTN_HD float round_to_integer(float x) { return (x + 12582912.0f) - 12582912.0f; }

ATTN_HD float exp2(float x) {
#if defined(__CUDA_ARCH__)
  float power;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(power) : "f"(x));
  return power;
#else
  x = clamp(x, -152.0f, 129.0f);
  const float exponent = round_to_integer(x);
  return scaled_exp((x - exponent) * kLn2, exponent);
#endif
}

ATTN_HD float exp(float x) {
#if defined(__CUDA_ARCH__)
  // The rounding error of x * log2(e) becomes a factor close to 1. Above the upper end all is infinite: no NaN there.
  x = ::fminf(::fmaxf(x, -105.0f), 88.75f);
  const float exponent = x * kLog2E;
  const float lost = __fmaf_rn(x, 1.925963033e-8f, __fmaf_rn(x, kLog2E, -exponent));
  const float power = exp2(exponent);
  return __fmaf_rn(power, ::fmaxf(lost, exponent >= 128.0f ? 0x1p-30f : -1.0f) * kLn2, power);
#else
  x = clamp(x, -105.0f, 89.0f);
  const float exponent = round_to_integer(x * kLog2E);
  return scaled_exp((x - exponent * 0.693359375f) - exponent * -2.12194440e-4f, exponent);
#endif
}

/// -infinity for 0 and what is smaller than a normal float, NaN below 0.
ATTN_HD float log(float x) {
  const int32_t bits = static_cast<int32_t>(float_bits(x));
  // x = 2^exponent * mantissa, which is in [sqrt(1/2), sqrt(2)).
  const int32_t exponent = (bits - 0x3f3504f3) >> 23;
  const float mantissa = bits_float(static_cast<uint32_t>(bits - exponent * (1 << 23)));
  // ln(m) = 2 atanh((m - 1) / (m + 1)), with |(m - 1) / (m + 1)| < 0.172
  const float s = quick_divide(mantissa - 1.0f, mantissa + 1.0f), t = s * s;
  const float series = (((0.2222222f * t + 0.2857143f) * t + 0.4f) * t + 0.6666667f) * t + 2.0f;
  const float scale = static_cast<float>(exponent);
  const float result = s * series + scale * -2.12194440e-4f + scale * 0.693359375f;
  const bool is_normal = x >= 0x1p-126f && x < infinity();
  return is_normal ? result : x < 0.0f ? infinity() - infinity() : x < 1.0f ? -infinity() : x;
}

ATTN_HD float log2(float x) { return log(x) * kLog2E; }

ATTN_HD float sigmoid(float x) {
#if defined(__CUDA_ARCH__)
  float inverse;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(inverse) : "f"(exp2(-kLog2E * x) + 1.0f));
  return inverse;
#else
  return 1.0f / (1.0f + exp(-x));
#endif
}

ATTN_HD float tanh(float x) {
#if defined(__CUDA_ARCH__)
  return 2.0f * sigmoid(2.0f * x) - 1.0f;
#else
  return tanh_rational(x);
#endif
}

/// position * (high + low) turns without the whole ones: the rest lies in [-1/2, 1/2] and is right to 2^-24, for
/// |position| < 2^24 and |high| <= 1/4. `high`: the turns of one position, rounded to a float; `low`: what rounding
/// lost.
ATTN_HD float turns_of(int32_t position, float high, float low) {
#if defined(__CUDA_ARCH__)
  const float at = static_cast<float>(position);
  return __fmaf_rn(at, low, __fmaf_rn(at, high, -round_to_integer(at * high)));
#else
  const double at = position, turns = at * high + at * low;
  return static_cast<float>(turns - ((turns + 0x1.8p52) - 0x1.8p52));
#endif
}

/// The pair turned about the origin by -1/2 to 1/2 turns: (first cos - second sin, second cos + first sin).
ATTN_HD Pair rotated(const Pair& x, float turns) {
#if defined(__CUDA_ARCH__)
  // Right to 2^-20 in [-pi, pi].
  const float angle = turns * 6.2831853071795865f;
  float sine, cosine;
  asm("sin.approx.ftz.f32 %0, %1;" : "=f"(sine) : "f"(angle));
  asm("cos.approx.ftz.f32 %0, %1;" : "=f"(cosine) : "f"(angle));
#else
  // The nearest quarter, and polynomials for the rest, in [-pi / 4, pi / 4].
  const float quarters = round_to_integer(turns * 4.0f);
  const float rest = (turns * 4.0f - quarters) * 1.5707963267948966f, s = rest * rest;
  const float odd =
      rest + rest * s * ((2.7557319e-6f * s - 1.9841270e-4f) * s + 8.3333333e-3f) * s - rest * s * 0.16666667f;
  const float even =
      1.0f + s * ((((-2.7557319e-7f * s + 2.4801587e-5f) * s - 1.3888889e-3f) * s + 4.1666667e-2f) * s - 0.5f);
  const int32_t quarter = static_cast<int32_t>(quarters);
  const float swapped_sine = (quarter & 1) != 0 ? even : odd, swapped_cosine = (quarter & 1) != 0 ? odd : even;
  const float sine = (quarter & 2) != 0 ? -swapped_sine : swapped_sine;
  const float cosine = ((quarter + 1) & 2) != 0 ? -swapped_cosine : swapped_cosine;
#endif
  return Pair{x.first * cosine - x.second * sine, x.second * cosine + x.first * sine};
}

}  // namespace attn
