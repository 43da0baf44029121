// Rows of numbers to columns that lie side by side, and back: [parts][count] and [count][parts]. Kernels of a convolution lie in a file with
// the pixels of a channel side by side, and are multiplied with the channels of a pixel side by side.

#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>

namespace burnish::interleave {

constexpr int64_t kSide = 8;
using Line = float __attribute__((vector_size(kSide * sizeof(float))));
using Places = int32_t __attribute__((vector_size(kSide * sizeof(int32_t))));

[[gnu::always_inline]] inline Line pick(Line one, Line other, Places which) {
#ifdef __clang__
  Line result;
  for (int lane = 0; lane < kSide; ++lane) result[lane] = which[lane] < kSide ? one[which[lane]] : other[which[lane] - kSide];
  return result;
#else
  return __builtin_shuffle(one, other, which);
#endif
}

// Exchanges blocks of `stride` lanes between neighbouring blocks of `stride` rows.
template <int stride>
[[gnu::always_inline]] inline void exchange(Line (&rows)[kSide]) {
  Places low, high;
  for (int lane = 0; lane < kSide; ++lane) {
    bool own = (lane & stride) == 0;
    low[lane] = own ? lane : static_cast<int>(kSide) - stride + lane;
    high[lane] = own ? lane + stride : static_cast<int>(kSide) + lane;
  }
#pragma GCC unroll 8
  for (int row = 0; row < kSide; ++row)
    if ((row & stride) == 0) {
      Line one = rows[row], other = rows[row + stride];
      rows[row] = pick(one, other, low);
      rows[row + stride] = pick(one, other, high);
    }
}

[[gnu::always_inline]] inline void transpose(Line (&rows)[kSide]) {
  exchange<4>(rows);
  exchange<2>(rows);
  exchange<1>(rows);
}

// target[c * parts + p] = row(p)[c] for all parts p and c < count.
template <typename Row>
void join(const Row& row, int64_t parts, int64_t count, float* target) {
  int64_t whole_parts = parts / kSide * kSide, whole = count / kSide * kSide;
  for (int64_t p = 0; p < whole_parts; p += kSide)
    for (int64_t c = 0; c < whole; c += kSide) {
      Line square[kSide];
      for (int i = 0; i < kSide; ++i) std::memcpy(&square[i], row(p + i) + c, sizeof(Line));
      transpose(square);
      for (int i = 0; i < kSide; ++i) std::memcpy(target + (c + i) * parts + p, &square[i], sizeof(Line));
    }
  for (int64_t p = 0; p < parts; ++p) {
    const float* source = row(p);
    for (int64_t c = p < whole_parts ? whole : 0; c < count; ++c) target[c * parts + p] = source[c];
  }
}

// row(p)[c] = source[c * parts + p] for all parts p and c < count.
template <typename Row>
void part(const float* source, int64_t parts, int64_t count, const Row& row) {
  int64_t whole_parts = parts / kSide * kSide, whole = count / kSide * kSide;
  for (int64_t p = 0; p < whole_parts; p += kSide)
    for (int64_t c = 0; c < whole; c += kSide) {
      Line square[kSide];
      for (int i = 0; i < kSide; ++i) std::memcpy(&square[i], source + (c + i) * parts + p, sizeof(Line));
      transpose(square);
      for (int i = 0; i < kSide; ++i) std::memcpy(row(p + i) + c, &square[i], sizeof(Line));
    }
  for (int64_t p = 0; p < parts; ++p) {
    float* target = row(p);
    for (int64_t c = p < whole_parts ? whole : 0; c < count; ++c) target[c] = source[c * parts + p];
  }
}

}  // namespace burnish::interleave
