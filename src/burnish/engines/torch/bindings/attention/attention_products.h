// The products that attention comes down to: blocks of some ten to some hundred lines, of which the right operand is packed into panels
// that are read again for every few rows. The left operand is packed too where it is bfloat16, whose words are of two rows; float32 is
// read as it lies.

#pragma once

#include "matrix.h"
#include "products.h"

namespace burnish::attention {

using products::Lines;

// Rows of the left operand of a product: where they lie, or their strips, as `Products` wants them.
struct Left {
  const float* data;
  int64_t row, step;  // from row to row, and from one element that is summed over to the next
};

template <typename Element>
struct Products;

template <>
struct Products<float> {
  static constexpr int64_t kRows = matrix::kRows;
  static constexpr int64_t kAcross = matrix::kPanel;

  static constexpr int64_t left_words(int64_t, int64_t) { return 0; }
  static constexpr int64_t right_words(int64_t columns, int64_t depth) { return products::round_up(columns, kAcross) * depth; }

  static Left left(const Lines<float>& lines, int64_t, int64_t, float*) { return {lines.data, lines.line_stride, lines.depth_stride}; }

  static void pack_right(const Lines<float>& lines, int64_t columns, int64_t depth, float* panels) {
    products::pack<float, kAcross>(lines, 0, columns, 0, depth, panels);
  }

  // out[rows][columns] (+)= the product, in whole vectors; `step` is from row to row.
  template <bool add>
  static void multiply(int64_t rows, int64_t columns, int64_t depth, const Left& left, const float* panels, float* out, int64_t step) {
    for (int64_t column = 0; column < columns; column += kAcross)
      matrix::multiply<add>(rows, std::min(kAcross, columns - column), depth, left.data, left.row, left.step, panels + column * depth, out + column,
                            step);
  }
};

template <>
struct Products<BFloat16> {
  static constexpr int kVectors = 2;  // of a tile: the usual extents of a head are whole multiples of it
  static constexpr int64_t kRows = products::kRows;
  static constexpr int64_t kAcross = kVectors * kWidth;

  static constexpr int64_t left_words(int64_t rows, int64_t depth) { return products::round_up(rows, kRows) * words(depth); }
  static constexpr int64_t right_words(int64_t columns, int64_t depth) { return products::round_up(columns, kAcross) * words(depth); }

  static Left left(const Lines<BFloat16>& lines, int64_t rows, int64_t depth, float* strips) {
    products::pack<BFloat16, kRows>(lines, 0, rows, 0, depth, strips);
    return {strips, 0, 0};
  }

  static void pack_right(const Lines<BFloat16>& lines, int64_t columns, int64_t depth, float* panels) {
    products::pack<BFloat16, kAcross>(lines, 0, columns, 0, depth, panels);
  }

  // The same, in whole tiles.
  template <bool add>
  static void multiply(int64_t rows, int64_t columns, int64_t depth, const Left& left, const float* panels, float* out, int64_t step) {
    int64_t deep = words(depth);
    for (int64_t row = 0; row < rows; row += kRows)
      for (int64_t column = 0; column < columns; column += kAcross)
        products::multiply_tile<BFloat16, kVectors, add>(deep, left.data + row * deep, panels + column * deep, out + row * step + column, step,
                                                        nullptr, 0);
  }

 private:
  static constexpr int64_t words(int64_t depth) { return products::divide_up(depth, products::kInWord<BFloat16>); }
};

// The product, added to what is there where there is anything yet.
template <typename Element>
void add_up(bool more, int64_t rows, int64_t columns, int64_t depth, const Left& left, const float* panels, float* out, int64_t step) {
  if (more)
    Products<Element>::template multiply<true>(rows, columns, depth, left, panels, out, step);
  else
    Products<Element>::template multiply<false>(rows, columns, depth, left, panels, out, step);
}

}  // namespace burnish::attention
