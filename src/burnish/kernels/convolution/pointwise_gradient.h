// Both gradients of a convolution of one pixel in one pass over the gradient of its results,
//
//   dx = dy W,   dw = dy^T x,
//
// where the rows of dy [pixels, K] and of x [pixels, C] are pixels. Each worker goes over pixels of its own, some at a time, which it
// packs once for both products, and adds up dw by itself; in the end these sums are added.

#pragma once

#include <algorithm>

#include "tensor.h"
#include "weight_products.h"

namespace burnish::pointwise_gradient {
namespace {

using namespace matrix;
using matrix::load;  // beside those of vectors.h, which another kernel of the same library may include
using matrix::store;
using matrix::Vector;
using weight_products::copy_row;
using weight_products::kDepth;

// Columns [0, columns) of a matrix with `step` numbers between its rows, as panels [panel][row][kPanel].
void pack(const float* source, int64_t rows, int64_t columns, int64_t step, int64_t panel, float* target) {
  for (int64_t row = 0; row < rows; ++row)
    for (int64_t column = 0; column < columns; column += kPanel)
      copy_row(source + row * step + column, target + column / kPanel * panel + row * kPanel, std::min(kPanel, columns - column));
}

// dy [pixels, K], x [pixels, C], w [K, C] -> dx [pixels, C], dw [K, C].
void gradients(int64_t pixels, int64_t outputs, int64_t channels, const float* dy, const float* x, const float* w, float* dx, float* dw) {
  int64_t workers = std::min(get_num_threads(), divide_up(pixels, kDepth));
  int64_t padded = round_up(channels, kPanel), wide = round_up(channels, kLanes), dy_step = round_up(outputs, kLanes) + kSkew;
  int64_t room = outputs * wide + kDepth * (padded + dy_step + wide);
  Tensor memory = make_tensor({outputs * padded + workers * room});
  float* weights = memory.mutable_data_ptr<float>();
  float* work = weights + outputs * padded;
  pack(w, outputs, channels, channels, outputs * kPanel, weights);
  bool whole = channels == wide;
  parallel_for(0, workers, 1, [&](int64_t begin, int64_t end) {
    for (int64_t worker = begin; worker < end; ++worker) {
      float* sums = work + worker * room;
      float* x_packed = sums + outputs * wide;
      float* dy_packed = x_packed + kDepth * padded;
      float* results = dy_packed + kDepth * dy_step;
      std::fill(sums, sums + outputs * wide, 0.f);
      int64_t stop = (worker + 1) * pixels / workers;
      for (int64_t first = worker * pixels / workers; first < stop; first += kDepth) {
        int64_t count = std::min(kDepth, stop - first);
        pack(x + first * channels, count, channels, channels, kDepth * kPanel, x_packed);
        for (int64_t pixel = 0; pixel < count; ++pixel)
          copy_row(dy + (first + pixel) * outputs, dy_packed + pixel * dy_step, outputs);
        float* target = whole ? dx + first * channels : results;
        for (int64_t column = 0; column < channels; column += kPanel) {
          int64_t columns = std::min(kPanel, channels - column);
          multiply<false>(count, columns, outputs, dy_packed, dy_step, 1, weights + column * outputs, target + column, wide);
          multiply<true>(outputs, columns, count, dy_packed, 1, dy_step, x_packed + column * kDepth, sums + column, wide);
        }
        if (!whole)
          for (int64_t pixel = 0; pixel < count; ++pixel)
            std::copy_n(results + pixel * wide, channels, dx + (first + pixel) * channels);
      }
    }
  });
  parallel_for(0, outputs, std::max<int64_t>(1, (1 << 14) / wide), [&](int64_t begin, int64_t end) {
    for (int64_t k = begin; k < end; ++k)
      for (int64_t c = 0; c < channels; c += kLanes) {
        Vector sum{};
        for (int64_t worker = 0; worker < workers; ++worker) sum += load(work + worker * room + k * wide + c);
        store_some(dw + k * channels + c, sum, channels - c);
      }
  });
}

}  // namespace
}  // namespace burnish::pointwise_gradient
