// Functions of float32 without branches, which compilers turn into vector code. Errors are below 2 units in the last place over the whole
// range where nothing else is said; infinities, NaN and denormal numbers come out as they should.
//
// They are always inlined: a call in a loop would keep it from being vector code. Polynomials are minimax fits of our own, weighted by
// the relative error of the function.

#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>

namespace burnish {

[[gnu::always_inline]] inline uint32_t bits_of(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof bits);
  return bits;
}

[[gnu::always_inline]] inline float float_of(uint32_t bits) {
  float value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}

// 2^k e^r with |r| <= log(2) / 2; in two factors, since 2^k alone may overflow, or lose the digits of a denormal result.
[[gnu::always_inline]] inline float exponential(float x) {
  float c = x > 89.f ? 89.f : x;
  c = c < -104.5f ? -104.5f : c;
  float k = (c * 1.44269504f + 12582912.f) - 12582912.f;  // to the nearest integer
  float whole = c - k * 0.693359375f;  // exact
  float r = whole - k * -2.12194440e-4f;
  float left = (whole - r) - k * -2.12194440e-4f;
  float p = 0.00139517174f;
  p = p * r + 0.00836959854f;
  p = p * r + 0.0416661873f;
  p = p * r + 0.166665122f;
  p = p * r + 0.5f;
  p = ((p * (r * r) + left) + r) + 1.f;
  int32_t n = static_cast<int32_t>(k), half = n >> 1;
  return p * float_of(static_cast<uint32_t>(half + 127) << 23) * float_of(static_cast<uint32_t>(n - half + 127) << 23);
}

// e^r of the remainder r that is left of a number once multiples of log(2) are taken off.
[[gnu::always_inline]] inline float exponential_of_remainder(float r) {
  float p = 0.00139517174f;
  p = p * r + 0.00836959854f;
  p = p * r + 0.0416661873f;
  p = p * r + 0.166665122f;
  p = p * r + 0.5f;
  return (p * (r * r) + r) + 1.f;
}

// e^x of a number that is never positive: as above in fewer instructions, as 2^(k + 64) is no denormal number for any of them.
[[gnu::always_inline]] inline float falling_exponential(float x) {
  float c = x < -104.5f ? -104.5f : x;
  constexpr float kShift = 12582912.f + 127.f + 64.f;  // adding it rounds to an integer; the lowest bits hold what makes 2^(k + 64)
  float shifted = c * 1.44269504f + kShift;
  float k = shifted - kShift;
  float whole = c - k * 0.693359375f;  // exact
  float r = whole - k * -2.12194440e-4f;
  float p = exponential_of_remainder(r);
  return p * float_of(bits_of(shifted) << 23) * 0x1p-64f;
}

// log(2^e m) = e log(2) + log(1 + r) with m = 1 + r between sqrt(1/2) and sqrt(2).
[[gnu::always_inline]] inline float logarithm(float x) {
  bool denormal = x < 1.17549435e-38f;
  uint32_t bits = bits_of(denormal ? x * 8388608.f : x);
  int32_t exponent = static_cast<int32_t>(bits - 0x3f3504f3u) >> 23;
  float r = float_of(bits - (static_cast<uint32_t>(exponent) << 23)) - 1.f;
  float e = static_cast<float>(exponent) - (denormal ? 23.f : 0.f);
  float q = 0.0674668476f;
  q = q * r - 0.116757721f;
  q = q * r + 0.11888209f;
  q = q * r - 0.124055736f;
  q = q * r + 0.142195448f;
  q = q * r - 0.166679963f;
  q = q * r + 0.200021192f;
  q = q * r - 0.250000089f;
  q = q * r + 0.333333135f;
  float square = r * r;
  float tail = (square * r) * q + e * -2.12194440e-4f;
  tail -= 0.5f * square;
  float result = (r + tail) + e * 0.693359375f;
  float outside = x == 0.f ? -std::numeric_limits<float>::infinity() : std::numeric_limits<float>::quiet_NaN();
  result = x > std::numeric_limits<float>::max() ? x : result;
  return x > 0.f ? result : outside;
}

[[gnu::always_inline]] inline float hyperbolic_tangent(float x) {
  float a = std::fabs(x), z = x * x;
  float p = 0.00214295881f;
  p = p * z - 0.00817739498f;
  p = p * z + 0.0217007007f;
  p = p * z - 0.0539467633f;
  p = p * z + 0.133332059f;
  p = p * z - 0.333333313f;
  float near = x + (x * z) * p;
  float e = falling_exponential(-2.f * a);
  float far = 1.f - 2.f * e / (1.f + e);
  return std::copysign(a < 0.625f ? near : far, x);
}

[[gnu::always_inline]] inline float error_function(float x) {
  float a = std::fabs(x), z = x * x;
  float p = -9.64151513e-06f;
  p = p * z + 0.000112569476f;
  p = p * z - 0.000848282885f;
  p = p * z + 0.00522094546f;
  p = p * z - 0.0268654004f;
  p = p * z + 0.112837821f;
  p = p * z - 0.376126379f;
  p = p * z + 0.128379167f;
  float near = x + x * p;
  float b = a > 4.f ? 4.f : a;
  float q = 2.10950511e-05f;  // -log(1 - erf(b))
  q = q * b - 0.000434462621f;
  q = q * b + 0.00417106319f;
  q = q * b - 0.0251194276f;
  q = q * b + 0.108280092f;
  q = q * b + 0.633346915f;
  q = q * b + 1.12951493f;
  q = q * b - 0.000174684435f;
  float far = std::copysign(1.f - exponential(-q), x);
  return a < 1.f ? near : far;
}

// Of the standard normal distribution: how likely a value below x is, and the density there.
struct Normal {
  float distribution, density;
};

// What rounding left of the product p of two numbers: factor * other - p.
[[gnu::always_inline]] inline float rest_of(float p, float factor, float other) {
#if defined(__FMA__) || defined(__aarch64__)
  return __builtin_fmaf(factor, other, -p);
#else
  float high = float_of(bits_of(factor) & 0xfffff000u), low = factor - high;
  float other_high = float_of(bits_of(other) & 0xfffff000u), other_low = other - other_high;
  return ((high * other_high - p) + high * other_low + low * other_high) + low * other_low;
#endif
}

// The distribution below -|x| is e^(-x^2 / 2) times a function that falls slowly, a quotient of polynomials here: it keeps its digits
// however far out x is, and shares the exponential with the density. The exponential is as above for a power that is never positive,
// with the digits that the square of x lost. Errors of the distribution are below 3.5 units in the last place from -1 on, 2.5 where
// multiplication and addition round once, and below 8 in the tail before.
[[gnu::always_inline]] inline Normal normal(float x) {
  float a = std::fabs(x);
  a = a > 14.5f ? 14.5f : a;  // where both are 0 in float32
  float minus_half = -0.5f * a;
  float power = minus_half * a, lost = rest_of(power, minus_half, a);
  constexpr float kShift = 12582912.f + 127.f + 64.f;  // adding it rounds to an integer; the lowest bits hold what makes 2^(k + 64)
  float shifted = power * 1.44269504f + kShift;
  float k = shifted - kShift;
#if defined(__FMA__) || defined(__aarch64__)
  float r = __builtin_fmaf(k, -0.693359375f, power);
#else
  float r = power - k * 0.693359375f;
#endif
  r = (r - k * -2.12194440e-4f) + lost;
  float p = exponential_of_remainder(r);
  float e = p * float_of(bits_of(shifted) << 23) * 0x1p-64f;
  float above = 0.00364335235f;
  above = above * a + 0.0375727641f;
  above = above * a + 0.174371505f;
  above = above * a + 0.426683301f;
  above = above * a + 0.499999993f;
  float below = 0.00913235317f;
  below = below * a + 0.0941900286f;
  below = below * a + 0.446017169f;
  below = below * a + 1.16625062f;
  below = below * a + 1.65125118f;
  below = below * a + 1.f;
  float tail = e * (above / below), z = x * x;
  float s = -7.65390447e-06f;
  s = s * z + 0.000113485606f;
  s = s * z - 0.00118632929f;
  s = s * z + 0.00997332321f;
  s = s * z - 0.0664903599f;
  s = s * z + 0.398942280f;
  float far = x < 0.f ? tail : 1.f - tail;
  return {a < 1.f ? 0.5f + x * s : far, e * 0.398942280f};
}

// 1 / (1 + e) or e / (1 + e), less what rounding lost of 1 + e.
[[gnu::always_inline]] inline float logistic(float x) {
  float e = falling_exponential(-std::fabs(x));
  float sum = 1.f + e, left = e - (sum - 1.f);
  float y = (x < 0.f ? e : 1.f) / sum;
  return y - y * left;
}

}  // namespace burnish
