// Products of float32 matrices, blocks of whole vectors held in registers: what the kernels of convolutions come down to.

#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>

namespace burnish::matrix {

#ifdef __AVX512F__
constexpr int64_t kLanes = 16;
constexpr int kVectors = 4;
#else
constexpr int64_t kLanes = 8;
constexpr int kVectors = 2;
#endif
constexpr int kRows = 6;                       // kRows * kVectors sums, and what they are made of, fit the registers
constexpr int64_t kPanel = kLanes * kVectors;  // columns of a matrix that lie side by side
constexpr int64_t kSkew = kLanes;              // between matrices, so that not all of them meet in the same lines of a cache

using Vector = float __attribute__((vector_size(kLanes * sizeof(float))));
using Integers = int32_t __attribute__((vector_size(kLanes * sizeof(int32_t))));
// A typedef: Clang does not apply `aligned` to what `using` declares, and would load and store with instructions that fault.
typedef float Unaligned __attribute__((vector_size(kLanes * sizeof(float)), aligned(alignof(float)), may_alias));
static_assert(alignof(Unaligned) == alignof(float));

[[gnu::always_inline]] inline Vector load(const float* source) { return *reinterpret_cast<const Unaligned*>(source); }
[[gnu::always_inline]] inline void store(float* target, Vector value) { *reinterpret_cast<Unaligned*>(target) = value; }

inline int64_t divide_up(int64_t number, int64_t by) { return (number + by - 1) / by; }
inline int64_t round_up(int64_t number, int64_t to) { return divide_up(number, to) * to; }

// The same vector, which stays in a register: GCC would load one again for each of few rows that it multiplies, and loading would take longer
// than multiplying.
[[gnu::always_inline]] inline Vector held(Vector value) {
#if defined(__AVX__)  // else a vector takes two registers
  asm("" : "+v"(value));
#endif
  return value;
}

// c[rows][vectors] = a[rows][depth] b[depth][vectors], or added to c; b in panels of kPanel columns. What is added is summed by itself
// first: sums of many short sums keep more digits than long ones.
template <int rows, int vectors, bool add>
[[gnu::always_inline]] inline void multiply_block(int64_t depth, const float* a, int64_t a_row, int64_t a_step, const float* b, float* c,
                                                  int64_t c_row) {
  Vector sums[rows][vectors];
#pragma GCC unroll 8
  for (int r = 0; r < rows; ++r)
#pragma GCC unroll 8
    for (int v = 0; v < vectors; ++v) sums[r][v] = Vector{};
  for (int64_t d = 0; d < depth; ++d) {
    Vector columns[vectors];
#pragma GCC unroll 8
    for (int v = 0; v < vectors; ++v) columns[v] = held(load(b + d * kPanel + v * kLanes));
#pragma GCC unroll 8
    for (int r = 0; r < rows; ++r) {
      float factor = a[r * a_row + d * a_step];
#pragma GCC unroll 8
      for (int v = 0; v < vectors; ++v) sums[r][v] += factor * columns[v];
    }
  }
#pragma GCC unroll 8
  for (int r = 0; r < rows; ++r)
#pragma GCC unroll 8
    for (int v = 0; v < vectors; ++v) {
      float* target = c + r * c_row + v * kLanes;
      store(target, add ? load(target) + sums[r][v] : sums[r][v]);
    }
}

template <int rows, bool add>
inline void multiply_rows(int vectors, int64_t depth, const float* a, int64_t a_row, int64_t a_step, const float* b, float* c,
                          int64_t c_row) {
  if (vectors == kVectors) return multiply_block<rows, kVectors, add>(depth, a, a_row, a_step, b, c, c_row);
  if constexpr (kVectors > 2) {
    if (vectors == 3) return multiply_block<rows, 3, add>(depth, a, a_row, a_step, b, c, c_row);
    if (vectors == 2) return multiply_block<rows, 2, add>(depth, a, a_row, a_step, b, c, c_row);
  }
  multiply_block<rows, 1, add>(depth, a, a_row, a_step, b, c, c_row);
}

// One panel of a product of matrices: c[rows][columns] (+)= a[rows][depth] b[depth][columns], columns <= kPanel, whole vectors written.
template <bool add>
void multiply(int64_t rows, int64_t columns, int64_t depth, const float* a, int64_t a_row, int64_t a_step, const float* b, float* c,
              int64_t c_row) {
  int vectors = static_cast<int>(divide_up(columns, kLanes));
  // Blocks of about as many rows: one of few rows would have too few sums, and wait for each product that is added to them.
  for (int64_t blocks = divide_up(rows, kRows); blocks > 0; --blocks) {
    int64_t count = divide_up(rows, blocks);
    switch (count) {
      case 6: multiply_rows<6, add>(vectors, depth, a, a_row, a_step, b, c, c_row); break;
      case 5: multiply_rows<5, add>(vectors, depth, a, a_row, a_step, b, c, c_row); break;
      case 4: multiply_rows<4, add>(vectors, depth, a, a_row, a_step, b, c, c_row); break;
      case 3: multiply_rows<3, add>(vectors, depth, a, a_row, a_step, b, c, c_row); break;
      case 2: multiply_rows<2, add>(vectors, depth, a, a_row, a_step, b, c, c_row); break;
      default: multiply_rows<1, add>(vectors, depth, a, a_row, a_step, b, c, c_row); break;
    }
    a += count * a_row;
    c += count * c_row;
    rows -= count;
  }
}

// `rows` <= kFew rows by two whole panels, one after the other, to 2 kPanel columns of c, in the bits of `multiply`: twice the sums, as a
// sum waits for the product that was added to it last.
constexpr int64_t kFew = 3;

template <int rows>
inline void multiply_few(int64_t depth, const float* a, int64_t a_row, const float* b, float* c, int64_t c_row) {
  Vector sums[rows][2 * kVectors];
#pragma GCC unroll 8
  for (int r = 0; r < rows; ++r)
#pragma GCC unroll 8
    for (int v = 0; v < 2 * kVectors; ++v) sums[r][v] = Vector{};
  for (int64_t d = 0; d < depth; ++d) {
    float factors[rows];
#pragma GCC unroll 8
    for (int r = 0; r < rows; ++r) factors[r] = a[r * a_row + d];
#pragma GCC unroll 8
    for (int v = 0; v < 2 * kVectors; ++v) {
      Vector columns = held(load(b + (v / kVectors * depth + d) * kPanel + v % kVectors * kLanes));
#pragma GCC unroll 8
      for (int r = 0; r < rows; ++r) sums[r][v] += factors[r] * columns;
    }
  }
#pragma GCC unroll 8
  for (int r = 0; r < rows; ++r)
#pragma GCC unroll 8
    for (int v = 0; v < 2 * kVectors; ++v) store(c + r * c_row + v * kLanes, sums[r][v]);
}

inline void multiply_by_two_panels(int64_t rows, int64_t depth, const float* a, int64_t a_row, const float* b, float* c, int64_t c_row) {
  switch (rows) {
    case 3: return multiply_few<3>(depth, a, a_row, b, c, c_row);
    case 2: return multiply_few<2>(depth, a, a_row, b, c, c_row);
    default: return multiply_few<1>(depth, a, a_row, b, c, c_row);
  }
}

// The first `count` floats from `source`, zeros behind them.
[[gnu::always_inline]] inline Vector load_some(const float* source, int64_t count) {
  if (count >= kLanes) return load(source);
  Vector value{};
  std::memcpy(&value, source, count * sizeof(float));
  return value;
}

[[gnu::always_inline]] inline void store_some(float* target, Vector value, int64_t count) {
  if (count >= kLanes)
    store(target, value);
  else
    std::memcpy(target, &value, count * sizeof(float));
}

}  // namespace burnish::matrix
