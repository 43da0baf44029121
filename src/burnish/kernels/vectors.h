// Vectors of float32 as wide as the processor's registers, loaded from and stored to float32 and bfloat16.

#pragma once

#include <cstdint>
#include <cstring>

#include "tensor.h"

namespace burnish {

#if defined(__AVX512F__)
constexpr int64_t kWidth = 16;
constexpr int64_t kRegisters = 32;
#elif defined(__AVX__)
constexpr int64_t kWidth = 8;
constexpr int64_t kRegisters = 16;
#elif defined(__aarch64__)
constexpr int64_t kWidth = 4;
constexpr int64_t kRegisters = 32;
#else
constexpr int64_t kWidth = 4;
constexpr int64_t kRegisters = 16;
#endif

typedef float Vector __attribute__((vector_size(kWidth * 4)));
typedef uint32_t Words __attribute__((vector_size(kWidth * 4)));
typedef uint16_t HalfWords __attribute__((vector_size(kWidth * 2)));

[[gnu::always_inline]] inline Vector load(const float* source) {
  Vector value;
  std::memcpy(&value, source, sizeof value);
  return value;
}

[[gnu::always_inline]] inline Vector load(const BFloat16* source) {
  HalfWords halves;
  std::memcpy(&halves, source, sizeof halves);
  return reinterpret_cast<Vector>(__builtin_convertvector(halves, Words) << 16);
}

[[gnu::always_inline]] inline void store(float* target, Vector value) { std::memcpy(target, &value, sizeof value); }

// To the nearest, ties to even; a NaN stays one.
[[gnu::always_inline]] inline void store(BFloat16* target, Vector value) {
  Words bits = reinterpret_cast<Words>(value);
  Words rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
  HalfWords halves = __builtin_convertvector(value == value ? rounded : (bits >> 16) | 0x40u, HalfWords);
  std::memcpy(target, &halves, sizeof halves);
}

// Past the caches, so that no line is read before it is overwritten; `target` is aligned to a vector. A fence must follow.
[[gnu::always_inline]] inline void stream(float* target, Vector value) {
#if defined(__clang__)
  __builtin_nontemporal_store(value, reinterpret_cast<Vector*>(target));
#elif defined(__AVX512F__)
  __builtin_ia32_movntps512(target, value);
#elif defined(__AVX__)
  __builtin_ia32_movntps256(target, value);
#else
  store(target, value);
#endif
}

[[gnu::always_inline]] inline void stream(BFloat16* target, Vector value) { store(target, value); }

inline void fence() {
#if defined(__x86_64__)
  __builtin_ia32_sfence();
#endif
}

}  // namespace burnish
