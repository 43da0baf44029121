// Max pooling of images with their channels last, and its gradient, which goes to the first of the largest elements of a window, in the
// order of rows. NaN is the largest.

#pragma once

#include <algorithm>

#include "vectors.h"

namespace burnish::max_pool {

struct Pool {
  int64_t images, height, width, channels, out_height, out_width, kernel_height, kernel_width, stride_height, stride_width, top, left;

  // Rows of x in the window of a row of results.
  int64_t first_row(int64_t row) const { return std::max<int64_t>(0, row * stride_height - top); }
  int64_t end_row(int64_t row) const { return std::min(height, row * stride_height - top + kernel_height); }
  int64_t first_column(int64_t column) const { return std::max<int64_t>(0, column * stride_width - left); }
  int64_t end_column(int64_t column) const { return std::min(width, column * stride_width - left + kernel_width); }
};

using Flags = int32_t __attribute__((vector_size(kWidth * 4)));

// x [N, H, W, C] -> y [N, H', W', C].
inline void pool(const Pool& shape, const float* x, float* y) {
  int64_t channels = shape.channels;
  parallel_for(0, shape.images * shape.out_height, 1, [&](int64_t begin, int64_t end) {
    for (int64_t unit = begin; unit < end; ++unit) {
      int64_t row = unit % shape.out_height;
      const float* image = x + unit / shape.out_height * shape.height * shape.width * channels;
      for (int64_t column = 0; column < shape.out_width; ++column) {
        float* target = y + (unit * shape.out_width + column) * channels;
        auto largest = [&](auto kind, int64_t c) {
          using V = decltype(kind);
          V most = V{} - __builtin_inff();
          for (int64_t h = shape.first_row(row); h < shape.end_row(row); ++h)
            for (int64_t w = shape.first_column(column); w < shape.end_column(column); ++w) {
              V value;
              std::memcpy(&value, image + (h * shape.width + w) * channels + c, sizeof value);
              most = ((value > most) | (value != value)) ? value : most;
            }
          std::memcpy(target + c, &most, sizeof most);
        };
        int64_t c = 0;
        for (; c + kWidth <= channels; c += kWidth) largest(Vector{}, c);
        for (; c < channels; ++c) largest(0.f, c);
      }
    }
  });
}

// (dy, x, y) -> dx. Each thread has some rows of dx, and looks through all windows that reach them.
inline void differentiate(const Pool& shape, const float* dy, const float* x, const float* y, float* dx) {
  int64_t channels = shape.channels, row_size = shape.width * channels;
  // Windows of some rows in a row, so that few are looked through twice.
  int64_t grain = std::max<int64_t>(1, 4 * shape.kernel_height);
  parallel_for(0, shape.images * shape.height, grain, [&](int64_t begin, int64_t end) {
    std::fill(dx + begin * row_size, dx + end * row_size, 0.f);
    for (int64_t image = begin / shape.height; image * shape.height < end; ++image) {
      int64_t from = std::max(begin - image * shape.height, int64_t{0}), to = std::min(end - image * shape.height, shape.height);
      const float* source = x + image * shape.height * row_size;
      float* target = dx + image * shape.height * row_size;
      for (int64_t row = 0; row < shape.out_height; ++row) {
        if (shape.end_row(row) <= from || shape.first_row(row) >= to) continue;
        for (int64_t column = 0; column < shape.out_width; ++column) {
          int64_t place = ((image * shape.out_height + row) * shape.out_width + column) * channels;
          auto give = [&](auto kind, auto none, int64_t c) {
            using V = decltype(kind);
            using Found = decltype(none);
            V most, flow;
            std::memcpy(&most, y + place + c, sizeof most);
            std::memcpy(&flow, dy + place + c, sizeof flow);
            Found open = none;
            for (int64_t h = shape.first_row(row); h < shape.end_row(row); ++h)
              for (int64_t w = shape.first_column(column); w < shape.end_column(column); ++w) {
                int64_t at = (h * shape.width + w) * channels + c;
                V value, sum;
                std::memcpy(&value, source + at, sizeof value);
                Found here = open & ((value == most) | (value != value));
                open &= ~here;
                if (h < from || h >= to) continue;
                std::memcpy(&sum, target + at, sizeof sum);
                sum += here ? flow : V{};
                std::memcpy(target + at, &sum, sizeof sum);
              }
          };
          int64_t c = 0;
          for (; c + kWidth <= channels; c += kWidth) give(Vector{}, ~Flags{}, c);
          for (; c < channels; ++c) give(0.f, 1, c);
        }
      }
    }
  });
}

}  // namespace burnish::max_pool
