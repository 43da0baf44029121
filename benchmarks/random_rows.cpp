// The rate at which this machine reads and writes rows at random: a loop over rows, each fetched before its turn, and nothing else. What
// benchmarks/embeddings.py compares lookups and updates with.

#include <cstdint>
#include <cstring>
#include <initializer_list>

namespace {

constexpr int64_t kAhead = 16, kLine = 16;  // rows; floats of a line of the cache

[[gnu::always_inline]] inline void fetch(const float* row, int64_t width) {
  for (int64_t i = 0; i < width; i += kLine) __builtin_prefetch(row + i, 1, 3);
}

}  // namespace

extern "C" void gather_rows(const float* table, const int64_t* rows, int64_t count, int64_t width, float* out) {
  for (int64_t i = 0; i < count; ++i) {
    if (i + kAhead < count) fetch(table + rows[i + kAhead] * width, width);
    std::memcpy(out + i * width, table + rows[i] * width, width * sizeof(float));
  }
}

// Adds to rows of one table, or of two where there is a second.
extern "C" void add_to_rows(float* one, float* two, const int64_t* rows, int64_t count, int64_t width, const float* added) {
  for (int64_t i = 0; i < count; ++i) {
    if (i + kAhead < count) {
      fetch(one + rows[i + kAhead] * width, width);
      if (two) fetch(two + rows[i + kAhead] * width, width);
    }
    for (float* table : {one, two}) {
      if (!table) continue;
      float* row = table + rows[i] * width;
      for (int64_t j = 0; j < width; ++j) row[j] += added[i * width + j];
    }
  }
}
