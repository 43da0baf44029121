// A product of two matrices of float32, cut among threads (products.h). Its bits do not depend on how many there are.

#pragma once

#include "products.h"
#include "tensor.h"

namespace burnish::products {

// left [rows, depth] right [depth, columns] + bias [columns], or null, to result, whose rows lie `result_row` numbers apart.
inline void multiply_matrices(int64_t rows, int64_t columns, int64_t depth, const Lines<float>& left, const Lines<float>& right,
                              const float* bias, float* result, int64_t result_row) {
  if (rows == 0 || columns == 0) return;
  auto finish = [bias](float* tile, int64_t tile_row, int64_t, int64_t column, int64_t high, int64_t wide) {
    if (!bias) return;
    for (int64_t r = 0; r < high; ++r)
      for (int64_t c = 0; c < wide; ++c) tile[r * tile_row + c] += bias[column + c];
  };
  Grid grid(rows, columns, get_num_threads());
  Blocks blocks(grid.high, grid.wide, kColumns, false);
  int64_t own = blocks.words();
  Tensor memory = make_tensor({grid.count() * own});
  float* work = memory.mutable_data_ptr<float>();
  parallel_for(0, grid.count(), 1, [&](int64_t begin, int64_t end) {
    for (int64_t index = begin; index < end; ++index)
      multiply<float, kVectors>(grid.share(index, rows, columns), blocks, depth, left, right, result, result_row, work + index * own, finish);
  });
}

}  // namespace burnish::products
