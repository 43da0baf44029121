// The gradient of Gather: rows are added where they were read, in the order in which they were, so that the bits depend on no threads.

#pragma once

#include <algorithm>
#include <cstdint>

#include "tensor.h"
#include "vectors.h"

namespace burnish::indexing {

constexpr int64_t kGrain = 1 << 14;  // elements that a thread adds, at least

// dy [outer, reads, inner], added to zeros [outer, extent, inner].
struct Extents {
  int64_t outer, reads, extent, inner;
};

inline void add_row(const float* __restrict from, float* __restrict to, int64_t count) {
  int64_t i = 0;
  for (; i + kWidth <= count; i += kWidth) store(to + i, load(to + i) + load(from + i));
  for (; i < count; ++i) to[i] += from[i];
}

// Threads take columns of all rows: some rows are read often, and others never.
inline void add_where_read(const Extents& extents, const float* dy, const int64_t* indices, float* sums) {
  auto [outer, reads, extent, inner] = extents;
  for (int64_t read = 0; read < reads; ++read)
    BURNISH_CHECK(indices[read] >= -extent && indices[read] < extent, "gradient of Gather: index ", indices[read], " of an axis of ", extent);
  int64_t rows = outer * extent;
  parallel_for(0, rows, std::max<int64_t>(1, 4 * kGrain / std::max<int64_t>(inner, 1)),
               [&](int64_t begin, int64_t end) { std::fill(sums + begin * inner, sums + end * inner, 0.f); });
  // Whole lines of the cache, so that no two threads write to one.
  constexpr int64_t line = 64 / sizeof(float);
  int64_t pieces = std::min(get_num_threads(), std::max<int64_t>(1, inner / line)), parts = outer * pieces;
  parallel_for(0, parts, std::max<int64_t>(1, kGrain * pieces / std::max<int64_t>(reads * inner, 1)), [&](int64_t begin, int64_t end) {
    for (int64_t part = begin; part < end; ++part) {
      int64_t piece = part % pieces, first = inner / line * piece / pieces * line;
      int64_t last = piece + 1 == pieces ? inner : inner / line * (piece + 1) / pieces * line;
      const float* from = dy + part / pieces * reads * inner + first;
      float* to = sums + part / pieces * extent * inner + first;
      for (int64_t read = 0; read < reads; ++read) {
        int64_t place = indices[read] < 0 ? indices[read] + extent : indices[read];
        add_row(from + read * inner, to + place * inner, last - first);
      }
    }
  });
}

}  // namespace burnish::indexing
