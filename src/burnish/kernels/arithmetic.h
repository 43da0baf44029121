// Elementwise arithmetic over blocks of float32 that stay in the cache, as instructions of small programs: what the kernel of chains and
// that of updates by rows run. Functions that need vector_math.h are the former's own.

#pragma once

#include <algorithm>
#include <cmath>

#include "aligned_memory.h"
#include "vectors.h"

namespace burnish {
namespace {

constexpr int64_t kInstruction = 5;  // integers of one

// Of both kernels; programs.py has the same numbers.
enum Operation : int64_t {
  kAdd, kSub, kMul, kDiv, kMax, kMin, kNeg, kSqrt, kReciprocal, kAbs, kRelu, kCopy,
  kExp, kLog, kTanh, kErf, kSigmoid, kLess, kLessOrEqual, kGreater, kGreaterOrEqual, kEqual, kAnd, kOr, kNot, kWhere, kReluGrad, kNotZero,
  kMulAdd, kMulSub, kSubMul, kNormal, kRowMean
};

// What an instruction reads: a block of values, or one that is repeated over a vector.
struct Operand {
  const float* data;
  int64_t step;  // 1, or 0 for one value
};

// Functions of their own for every operation: as a part of a large one, GCC gives up inlining, and with it vector code.
// A result may lie where an operand does, element on element. Operands are taken by value: what is written might be a part of them else.
template <typename Function>
[[gnu::noinline]] void map(Operand a, float* out, int64_t count, Function function) {
  const float* x = a.data;
  if (a.step) {
#pragma omp simd
    for (int64_t i = 0; i < count; ++i) out[i] = function(x[i]);
  } else {
    std::fill(out, out + count, function(*x));
  }
}

// `function` takes vectors and, for the elements that fill none, numbers.
template <typename Function>
[[gnu::noinline]] void map(Operand a, Operand b, float* out, int64_t count, Function function) {
  const float *x = a.data, *y = b.data;
  int64_t i = 0;
  for (; i + kWidth <= count; i += kWidth, x += a.step * kWidth, y += b.step * kWidth) store(out + i, function(load(x), load(y)));
  for (; i < count; ++i, x += a.step, y += b.step) out[i] = function(*x, *y);
}

// A product that is rounded before anything is added to it: results do not depend on which instructions are joined.
template <typename V>
[[gnu::always_inline]] inline V rounded(V product) {
#if defined(__x86_64__)
  asm("" : "+v"(product));
#elif defined(__aarch64__)
  asm("" : "+w"(product));
#endif
  return product;
}

template <typename Function>
[[gnu::noinline]] void map(Operand a, Operand b, Operand c, float* out, int64_t count, Function function) {
  const float *x = a.data, *y = b.data, *z = c.data;
  int64_t i = 0;
  for (; i + kWidth <= count; i += kWidth, x += a.step * kWidth, y += b.step * kWidth, z += c.step * kWidth)
    store(out + i, function(load(x), load(y), load(z)));
  for (; i < count; ++i, x += a.step, y += b.step, z += c.step) out[i] = function(*x, *y, *z);
}

inline void select(Operand a, Operand b, Operand c, float* out, int64_t count) {
  const float *condition = a.data, *x = b.data, *y = c.data;
  int64_t i = 0;
  for (; i + kWidth <= count; i += kWidth, condition += a.step * kWidth, x += b.step * kWidth, y += c.step * kWidth)
    store(out + i, load(condition) != Vector{} ? load(x) : load(y));
  for (; i < count; ++i, condition += a.step, x += b.step, y += c.step) out[i] = *condition != 0.f ? *x : *y;
}

template <typename V>
[[gnu::always_inline]] inline V zero(V) {
  return V{};
}

template <typename V>
[[gnu::always_inline]] inline V one(V) {
  return V{} + 1.f;
}

inline void execute_arithmetic(int64_t operation, const Operand& a, const Operand& b, const Operand& c, float* out, int64_t count) {
  switch (operation) {
    case kAdd: return map(a, b, out, count, [](auto x, auto y) { return x + y; });
    case kSub: return map(a, b, out, count, [](auto x, auto y) { return x - y; });
    case kMul: return map(a, b, out, count, [](auto x, auto y) { return x * y; });
    case kDiv: return map(a, b, out, count, [](auto x, auto y) { return x / y; });
    // NaN comes through, as in ATen.
    case kMax: return map(a, b, out, count, [](auto x, auto y) { return ((x != x) | (x > y)) ? x : y; });
    case kMin: return map(a, b, out, count, [](auto x, auto y) { return ((x != x) | (x < y)) ? x : y; });
    case kNeg: return map(a, out, count, [](float x) { return -x; });
    case kSqrt: return map(a, out, count, [](float x) { return std::sqrt(x); });
    case kReciprocal: return map(a, out, count, [](float x) { return 1.f / x; });
    case kAbs: return map(a, out, count, [](float x) { return std::fabs(x); });
    case kRelu: return map(a, out, count, [](float x) { return x < 0.f ? 0.f : x; });
    case kCopy: return map(a, out, count, [](float x) { return x; });
    case kLess: return map(a, b, out, count, [](auto x, auto y) { return x < y ? one(x) : zero(x); });
    case kLessOrEqual: return map(a, b, out, count, [](auto x, auto y) { return x <= y ? one(x) : zero(x); });
    case kGreater: return map(a, b, out, count, [](auto x, auto y) { return x > y ? one(x) : zero(x); });
    case kGreaterOrEqual: return map(a, b, out, count, [](auto x, auto y) { return x >= y ? one(x) : zero(x); });
    case kEqual: return map(a, b, out, count, [](auto x, auto y) { return x == y ? one(x) : zero(x); });
    case kAnd: return map(a, b, out, count, [](auto x, auto y) { return x * y; });
    case kOr: return map(a, b, out, count, [](auto x, auto y) { return x > y ? x : y; });
    case kNot: return map(a, out, count, [](float x) { return 1.f - x; });
    case kWhere: return select(a, b, c, out, count);
    // (dy, x): what is not at most zero lets its gradient through, NaN too, as in ATen.
    case kReluGrad: return map(a, b, out, count, [](auto x, auto y) { return y <= zero(y) ? zero(x) : x; });
    case kMulAdd: return map(a, b, c, out, count, [](auto x, auto y, auto z) { return rounded(x * y) + z; });
    case kMulSub: return map(a, b, c, out, count, [](auto x, auto y, auto z) { return rounded(x * y) - z; });
    case kSubMul: return map(a, b, c, out, count, [](auto x, auto y, auto z) { return z - rounded(x * y); });
    case kNotZero: return map(a, out, count, [](float x) { return x != 0.f ? 1.f : 0.f; });
    default: BURNISH_CHECK(false, "elementwise: no operation ", operation);
  }
}

}  // namespace
}  // namespace burnish
