// Products of matrices, float32 and bfloat16 with float32 sums: both operands are packed into panels whose lines lie side by side, and
// tiles of the result are summed up in registers (K. Goto, R. van de Geijn, "Anatomy of High-Performance Matrix Multiplication", 2008).
// Of each block that is multiplied, one operand's panels stay in the second-level cache and are gone through again for each panel of
// the other: with vectors of 512 bits those of the columns, else those of the rows, which are the narrower and so the fewer bytes to read.
//
// A panel holds words of 32 bits: a float32, or two bfloat16 that are neighbours in depth, which one instruction multiplies and adds up.

#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>

#include "vectors.h"

#if defined(__AVX512BF16__)
#include <immintrin.h>
#endif

namespace burnish::products {

using Integers = int32_t __attribute__((vector_size(kWidth * 4)));

// A tile is of kRows rows and kVectors vectors, at most: its sums, and what they are made of, fit the registers. Depth is in words; longer
// sums are cut. kStrips strips of rows are multiplied at once with kPanels panels of columns.
#if defined(__AVX512F__)
constexpr int kRows = 8, kVectors = 3;
constexpr int64_t kDepth = 256, kStrips = 4, kPanels = 16;
constexpr int64_t kAhead = 8;  // words of depth that are fetched before they are multiplied
constexpr int kUnrolled = 2;   // words that are multiplied between two branches
#else
constexpr int kRows = kWidth > 4 ? 6 : 4, kVectors = 2;
constexpr int64_t kDepth = 256, kStrips = 32, kPanels = 192;
constexpr int64_t kAhead = 0;
constexpr int kUnrolled = 4;
#endif
constexpr int64_t kColumns = kVectors * kWidth;
constexpr int64_t kLine = 64 / sizeof(float);  // words that a cache fetches at once

constexpr int64_t divide_up(int64_t number, int64_t by) { return (number + by - 1) / by; }
constexpr int64_t round_up(int64_t number, int64_t to) { return divide_up(number, to) * to; }

// Elements of a matrix's lines, rows of the left operand or columns of the right one: data[line * line_stride + depth * depth_stride].
// One of the strides is one.
template <typename Element>
struct Lines {
  const Element* data;
  int64_t line_stride, depth_stride;
};

template <typename Element>
constexpr int64_t kInWord = sizeof(float) / sizeof(Element);

// sums + the products of the elements of a word and of those of a vector of words.
template <typename Element>
[[gnu::always_inline]] inline Vector multiply_add(Vector sums, float word, Vector words);

template <>
[[gnu::always_inline]] inline Vector multiply_add<float>(Vector sums, float word, Vector words) {
  return sums + word * words;
}

template <>
[[gnu::always_inline]] inline Vector multiply_add<BFloat16>(Vector sums, float word, Vector words) {
#if defined(__AVX512BF16__)
  return reinterpret_cast<Vector>(_mm512_dpbf16_ps(reinterpret_cast<__m512>(sums), reinterpret_cast<__m512bh>(_mm512_set1_ps(word)),
                                                   reinterpret_cast<__m512bh>(words)));
#else
  Words left = reinterpret_cast<Words>(Vector{} + word), right = reinterpret_cast<Words>(words);
  if (word != word) std::memcpy(&left, &word, 4), left = Words{} + left[0];  // the sum may have changed the digits of a NaN
  constexpr uint32_t high = 0xffff0000u;
  sums += reinterpret_cast<Vector>(left << 16) * reinterpret_cast<Vector>(right << 16);
  return sums + reinterpret_cast<Vector>(left & high) * reinterpret_cast<Vector>(right & high);
#endif
}

// c[kRows][columns] (+)= a b, of panels a [depth][kRows] and b [depth][columns], where columns are those of so many vectors. Meanwhile
// `lines` of the cache are fetched from `next`.
template <typename Element, int vectors, bool add>
[[gnu::noinline]] void multiply_tile(int64_t depth, const float* __restrict a, const float* __restrict b, float* __restrict c, int64_t c_row,
                                     const float* next, int64_t lines) {
  constexpr int64_t width = vectors * kWidth;
  Vector sums[kRows][vectors];
#pragma GCC unroll 8
  for (int r = 0; r < kRows; ++r)
#pragma GCC unroll 8
    for (int v = 0; v < vectors; ++v) sums[r][v] = Vector{}, __builtin_prefetch(c + r * c_row + v * kWidth, 1);
  for (int64_t line = 0; line < lines; ++line) __builtin_prefetch(next + line * kLine, 0, 2);
#pragma GCC unroll kUnrolled
  for (int64_t d = 0; d < depth; ++d) {
    Vector columns[vectors];
#pragma GCC unroll 8
    for (int v = 0; v < vectors; ++v) {
      if constexpr (kAhead > 0) __builtin_prefetch(b + kAhead * width + v * kWidth);
      columns[v] = load(b + v * kWidth);
    }
#pragma GCC unroll 8
    for (int r = 0; r < kRows; ++r) {
      float word = a[r];
#pragma GCC unroll 8
      for (int v = 0; v < vectors; ++v) sums[r][v] = multiply_add<Element>(sums[r][v], word, columns[v]);
    }
    a += kRows;
    b += width;
  }
#pragma GCC unroll 8
  for (int r = 0; r < kRows; ++r)
#pragma GCC unroll 8
    for (int v = 0; v < vectors; ++v) {
      float* target = c + r * c_row + v * kWidth;
      store(target, add ? load(target) + sums[r][v] : sums[r][v]);
    }
}

// The lanes of two vectors, counted on from one to the other, that `which` names.
[[gnu::always_inline]] inline Vector pick(Vector one, Vector other, Integers which) {
#ifdef __clang__
  Vector result;
  for (int lane = 0; lane < kWidth; ++lane) result[lane] = which[lane] < kWidth ? one[which[lane]] : other[which[lane] - kWidth];
  return result;
#else
  return __builtin_shuffle(one, other, which);
#endif
}

// Exchanges blocks of `stride` lanes between neighbouring blocks of `stride` rows.
template <int64_t stride>
[[gnu::always_inline]] inline void exchange(Vector (&rows)[kWidth]) {
  Integers low, high;
  for (int lane = 0; lane < kWidth; ++lane) {
    bool own = (lane & stride) == 0;
    low[lane] = own ? lane : static_cast<int>(kWidth - stride) + lane;
    high[lane] = own ? lane + static_cast<int>(stride) : static_cast<int>(kWidth) + lane;
  }
#pragma GCC unroll 16
  for (int64_t row = 0; row < kWidth; ++row)
    if ((row & stride) == 0) {
      Vector one = rows[row], other = rows[row + stride];
      rows[row] = pick(one, other, low);
      rows[row + stride] = pick(one, other, high);
    }
}

[[gnu::always_inline]] inline void transpose(Vector (&rows)[kWidth]) {
  if constexpr (kWidth > 8) exchange<8>(rows);
  if constexpr (kWidth > 4) exchange<4>(rows);
  exchange<2>(rows);
  exchange<1>(rows);
}

// The first `count` bytes from `source`, zeros behind them.
[[gnu::always_inline]] inline Vector load_bytes(const void* source, int64_t count) {
  Vector value{};
  if (count >= kWidth * 4)
    std::memcpy(&value, source, sizeof value);
  else if (count > 0)
    std::memcpy(&value, source, count);
  return value;
}

// Has the second-level cache fetch what `pack` will read, so much of it as falls to one of `parts` pieces of other work.
template <typename Element>
void fetch(const Lines<Element>& source, int64_t first, int64_t count, int64_t depth, int64_t extent, int64_t part, int64_t parts) {
  bool along = source.depth_stride == 1;
  int64_t rows = along ? count : extent, elements = along ? extent : count, stride = along ? source.line_stride : source.depth_stride;
  const Element* data = source.data + first * source.line_stride + depth * source.depth_stride;
  for (int64_t row = part * rows / parts; row < (part + 1) * rows / parts; ++row) {
    for (int64_t element = 0; element < elements; element += 64 / sizeof(Element)) __builtin_prefetch(data + row * stride + element, 0, 2);
    __builtin_prefetch(data + row * stride + elements - 1, 0, 2);  // a row may begin in the middle of a line of the cache
  }
}

// Lines `first` to `first + count` of a matrix, from `depth` on, to panels [words][lines], one behind the other; zeros where there are
// fewer.
template <typename Element, int64_t lines>
void pack(const Lines<Element>& source, int64_t first, int64_t count, int64_t depth, int64_t extent, float* panels) {
  constexpr int64_t in_word = kInWord<Element>;
  constexpr int64_t group = lines < kWidth ? kWidth / lines * lines : kWidth;  // lines that a vector holds
  constexpr int64_t piece = std::min(lines, group);                           // of them in one panel
  static_assert(group <= 2 * piece && (lines % piece == 0));
  int64_t words = divide_up(extent, in_word), end = round_up(count, lines);
  const Element* data = source.data + first * source.line_stride + depth * source.depth_stride;
  // Where the words of a line go.
  auto place = [&](int64_t line) { return panels + line / lines * lines * words + line % lines; };
  // Words of the lines of a vector, to their panels.
  auto put = [&](const auto& vector, int64_t word, int64_t line, float* target) {
    const float* values = reinterpret_cast<const float*>(&vector);
    std::memcpy(target + word * lines, values, piece * 4);
    if constexpr (piece < group)
      if (line + piece < end) std::memcpy(target + (words + word) * lines, values + piece, piece * 4);
  };
  if (source.depth_stride == 1) {
    for (int64_t line = 0; line < end; line += group) {
      float* target = place(line);
      for (int64_t word = 0; word < words; word += kWidth) {
        int64_t bytes = (extent - word * in_word) * static_cast<int64_t>(sizeof(Element));
        // The cache does not see by itself that the lines behind these come next.
        if (line + group < end)
#pragma GCC unroll 16
          for (int64_t i = 0; i < group; ++i) __builtin_prefetch(data + (line + group + i) * source.line_stride + word * in_word, 0, 2);
        Vector square[kWidth];
#pragma GCC unroll 16
        for (int64_t i = 0; i < kWidth; ++i)
          square[i] = i < group && line + i < count ? load_bytes(data + (line + i) * source.line_stride + word * in_word, bytes) : Vector{};
        transpose(square);
        int64_t present = std::min(kWidth, words - word);
        if (present == kWidth) {
#pragma GCC unroll 16
          for (int64_t i = 0; i < kWidth; ++i) put(square[i], word + i, line, target);
        } else {
          for (int64_t i = 0; i < present; ++i) put(square[i], word + i, line, target);
        }
      }
    }
    return;
  }
  if constexpr (in_word == 1) {
    for (int64_t line = 0; line < end; line += lines)
      for (int64_t word = 0; word < words; ++word) {
        const float* row = data + word * source.depth_stride + line;
        float* target = panels + line * words + word * lines;
        if (line + 2 * lines <= count)
#pragma GCC unroll 16
          for (int64_t i = 0; i < lines; i += kLine) __builtin_prefetch(row + lines + i, 0, 2);
        if (line + lines <= count) {
          std::memcpy(target, row, lines * 4);
        } else {
          std::memcpy(target, row, (count - line) * 4);
          std::fill(target + count - line, target + lines, 0.f);
        }
      }
  } else {
    // Words of the elements of two rows, of as many lines in turn as whole lines of the cache hold.
    constexpr int64_t together = round_up(std::max<int64_t>(lines, 128 / sizeof(Element)), std::max(lines, group));
    for (int64_t begin = 0; begin < end; begin += together)
      for (int64_t word = 0; word < words; ++word) {
        const Element *even = data + 2 * word * source.depth_stride, *odd = even + source.depth_stride;
        bool paired = 2 * word + 1 < extent;
        for (int64_t line = begin; line < std::min(begin + together, end); line += group) {
          int64_t bytes = std::max<int64_t>(0, std::min(group, count - line)) * 2;
          HalfWords low{}, high{};
          if (bytes == group * 2) {
            std::memcpy(&low, even + line, group * 2);
            if (paired) std::memcpy(&high, odd + line, group * 2);
          } else if (bytes) {
            std::memcpy(&low, even + line, bytes);
            if (paired) std::memcpy(&high, odd + line, bytes);
          }
          put(__builtin_convertvector(low, Words) | __builtin_convertvector(high, Words) << 16, word, line, place(line));
        }
      }
  }
}

// A share of a product: rows and columns of the result, from where to where.
struct Share {
  int64_t row, row_end, column, column_end;
};

// How a product is cut among threads, so that these pack as little as they can.
struct Grid {
  int64_t rows, columns;  // of shares
  int64_t high, wide;     // extents of a share

  Grid(int64_t m, int64_t n, int64_t threads) : rows(1), columns(1) {
    int64_t least = -1;
    for (int64_t across = 1; across <= threads; ++across) {
      int64_t down = threads / across;
      int64_t tall = round_up(divide_up(m, down), kRows), broad = round_up(divide_up(n, across), kColumns);
      int64_t cost = tall * broad + 16 * (tall + broad);  // an element that is packed costs as much as some multiplications
      if (least < 0 || cost < least) least = cost, rows = divide_up(m, tall), columns = divide_up(n, broad), high = tall, wide = broad;
    }
  }

  int64_t count() const { return rows * columns; }

  Share share(int64_t index, int64_t m, int64_t n) const {
    int64_t row = index / columns * high, column = index % columns * wide;
    return {row, std::min(row + high, m), column, std::min(column + wide, n)};
  }
};

// How a share is multiplied: blocks of strips of rows and of panels of columns, and the memory for them.
struct Blocks {
  int64_t rows, columns;  // of a block
  int64_t panels, strips, sums;

  // Sums are kept of all rows and a block of columns, where the result is not float32.
  Blocks(int64_t high, int64_t wide, int64_t width, bool kept) {
    rows = std::min(kStrips * kRows, round_up(high, kRows));
    columns = std::min(kPanels * kColumns / width * width, round_up(wide, width));
    panels = kDepth * columns + kAhead * kColumns;
    strips = kDepth * rows;
    sums = kept ? round_up(high, kRows) * columns : 0;
  }

  int64_t words() const { return panels + strips + kRows * kColumns + sums; }
};

// A share of the product of `left` and `right` over `depth`, to `result`, or where that is null, to memory. `finish(tile, tile_row, row,
// column, rows, columns)` is called for each tile once its sums are complete.
template <typename Element, int vectors, typename Finish>
void multiply(const Share& share, const Blocks& blocks, int64_t depth, const Lines<Element>& left, const Lines<Element>& right, float* result,
              int64_t result_row, float* memory, const Finish& finish) {
  constexpr int64_t in_word = kInWord<Element>, width = vectors * kWidth;
  int64_t parts = std::max<int64_t>(1, divide_up(depth, kDepth * in_word));
  int64_t part = std::max<int64_t>(1, round_up(divide_up(depth, parts), in_word));
  float* panels = memory;
  float* strips = panels + blocks.panels;
  float* tile = strips + blocks.strips;
  float* sums = tile + kRows * kColumns;
  for (int64_t first = share.column; first < share.column_end; first += blocks.columns) {
    int64_t wide = std::min(blocks.columns, share.column_end - first);
    for (int64_t start = 0; start == 0 || start < depth; start += part) {
      int64_t extent = std::min(part, depth - start), words = divide_up(extent, in_word);
      pack<Element, width>(right, first, wide, start, extent, panels);
      bool complete = start + part >= depth;
      for (int64_t top = share.row; top < share.row_end; top += blocks.rows) {
        int64_t bottom = std::min(top + blocks.rows, share.row_end);
        pack<Element, kRows>(left, top, bottom - top, start, extent, strips);
        // The next panel is fetched in as many slices as there are strips.
        int64_t slice = kAhead == 0 ? divide_up(words * width, divide_up(bottom - top, kRows) * kLine) : 0;
        int64_t rows_ahead = std::min(blocks.rows, share.row_end - bottom), done = 0;
        int64_t tiles = divide_up(bottom - top, kRows) * divide_up(wide, width);
        for (int64_t column = 0; column < wide; column += width) {
          int64_t across = std::min(width, wide - column), lines = column + width < wide ? slice : 0;
          const float *panel = panels + column * words, *next = panel + words * width;
          for (int64_t row = top; row < bottom; row += kRows, next += lines * kLine) {
            int64_t high = std::min<int64_t>(kRows, bottom - row);
            if (rows_ahead > 0) fetch(left, bottom, rows_ahead, start, extent, done++, tiles);
            const float* strip = strips + (row - top) * words;
            float* target = result ? result + row * result_row + first + column : sums + (row - share.row) * blocks.columns + column;
            int64_t target_row = result ? result_row : blocks.columns;
            if (result && (high < kRows || across < width)) {  // sums beyond the result go nowhere
              multiply_tile<Element, vectors, false>(words, strip, panel, tile, width, next, lines);
              for (int64_t r = 0; r < high; ++r)
                for (int64_t c = 0; c < across; ++c)
                  target[r * target_row + c] = tile[r * width + c] + (start ? target[r * target_row + c] : 0.f);
            } else if (start) {
              multiply_tile<Element, vectors, true>(words, strip, panel, target, target_row, next, lines);
            } else {
              multiply_tile<Element, vectors, false>(words, strip, panel, target, target_row, next, lines);
            }
            if (complete) finish(target, target_row, row, first + column, high, across);
          }
        }
      }
    }
  }
}

}  // namespace burnish::products
