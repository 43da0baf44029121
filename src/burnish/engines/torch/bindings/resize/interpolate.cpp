// Interpolation of images along their rows and columns, and its gradient: every result is a sum of a few elements, whose places and weights
// are given. The gradient is the same kernel with the places turned around, so that no result is written by two threads.
//
// Images have their channels last, with other channels between those of two pixels where they are a part of what was joined, or lie channel
// by channel. Rows are added up first, in the cache: neighbouring columns read the sums.

#include <algorithm>
#include <vector>

#include "operators.h"
#include "vectors.h"

namespace burnish {
namespace {

constexpr int64_t kGrain = 16384;  // elements

// The elements that results along an axis are sums of: those of result i are at starts[i] to starts[i + 1]. Without starts each is itself.
struct Sums {
  int64_t results;
  const int64_t* starts = nullptr;
  const int64_t* places = nullptr;
  const float* weights = nullptr;

  Sums(const Tensor& starts_given, const Tensor& places_given, const Tensor& weights_given, int64_t extent) : results(extent) {
    if (!starts_given.numel()) return;
    BURNISH_CHECK(starts_given.is_contiguous() && places_given.is_contiguous() && weights_given.is_contiguous() &&
                    places_given.numel() == weights_given.numel(),
                  "interpolate: contiguous places, and a weight for each, expected");
    results = starts_given.numel() - 1;
    starts = starts_given.const_data_ptr<int64_t>();
    places = places_given.const_data_ptr<int64_t>();
    weights = weights_given.const_data_ptr<float>();
    bool inside = starts[0] == 0 && starts[results] == places_given.numel();
    for (int64_t i = 0; i < results; ++i) inside = inside && starts[i] <= starts[i + 1];
    for (int64_t i = 0; i < places_given.numel(); ++i) inside = inside && places[i] >= 0 && places[i] < extent;
    BURNISH_CHECK(inside, "interpolate: places inside of the image expected");
  }
};

// to[0, count) (+)= weight from[0, count)
void add(float* __restrict to, const float* __restrict from, float weight, int64_t count, bool first) {
  if (first)
    for (int64_t i = 0; i < count; ++i) to[i] = weight * from[i];
  else
    for (int64_t i = 0; i < count; ++i) to[i] += weight * from[i];
}

struct Geometry {
  int64_t columns, channels, pixel;  // elements from one pixel to the next
};

// The sum of rows, packed, in `sum`; or a row itself, where it is one.
const float* sum_rows(const float* image, int64_t row_stride, const Sums& rows, int64_t result, const Geometry& geometry, float* sum,
                      int64_t* pixel) {
  *pixel = geometry.pixel;
  if (!rows.starts) return image + result * row_stride;
  int64_t begin = rows.starts[result], end = rows.starts[result + 1];
  *pixel = geometry.channels;
  if (begin == end) std::fill_n(sum, geometry.columns * geometry.channels, 0.f);
  for (int64_t i = begin; i < end; ++i) {
    const float* row = image + rows.places[i] * row_stride;
    if (geometry.pixel == geometry.channels)
      add(sum, row, rows.weights[i], geometry.columns * geometry.channels, i == begin);
    else
      for (int64_t column = 0; column < geometry.columns; ++column)
        add(sum + column * geometry.channels, row + column * geometry.pixel, rows.weights[i], geometry.channels, i == begin);
  }
  return sum;
}

void sum_columns(const float* __restrict row, int64_t pixel, const Sums& columns, int64_t channels, float* __restrict to) {
  if (!columns.starts) {
    for (int64_t column = 0; column < columns.results; ++column) std::copy_n(row + column * pixel, channels, to + column * channels);
    return;
  }
  for (int64_t column = 0; column < columns.results; ++column, to += channels) {
    int64_t begin = columns.starts[column], end = columns.starts[column + 1], channel = 0;
    for (; channel + kWidth <= channels; channel += kWidth) {
      Vector sum{};
      for (int64_t i = begin; i < end; ++i) sum += load(row + columns.places[i] * pixel + channel) * columns.weights[i];
      store(to + channel, sum);
    }
    for (; channel < channels; ++channel) {
      float sum = 0.f;
      for (int64_t i = begin; i < end; ++i) sum += row[columns.places[i] * pixel + channel] * columns.weights[i];
      to[channel] = sum;
    }
  }
}

// (x [N, C, H, W], starts, places and weights for rows, and for columns) -> the images of sums, in the layout of x. Without starts an axis
// stays as it is.
Tensor interpolate(const Tensor& given, const Tensor& row_starts, const Tensor& row_places, const Tensor& row_weights,
                   const Tensor& column_starts, const Tensor& column_places, const Tensor& column_weights) {
  BURNISH_CHECK(given.dim() == 4 && given.scalar_type() == kFloat, "interpolate: float32 images expected");
  bool last = given.size(1) > 1 ? given.stride(1) == 1 && given.stride(3) >= given.size(1) : is_channels_last(given);
  Tensor x = last ? given : to_contiguous(given);
  Sums rows(row_starts, row_places, row_weights, x.size(2)), columns(column_starts, column_places, column_weights, x.size(3));
  int64_t samples = x.size(0), channels = x.size(1);
  std::vector<int64_t> sizes{samples, channels, rows.results, columns.results};
  Tensor y = last ? make_channels_last(sizes) : make_tensor(sizes);
  int64_t images = last ? samples : samples * channels;
  int64_t image_stride = last ? x.stride(0) : x.size(2) * x.size(3), row_stride = last ? x.stride(2) : x.size(3);
  Geometry geometry{x.size(3), last ? channels : 1, last ? x.stride(3) : 1};
  const float* from = x.const_data_ptr<float>();
  float* to = y.mutable_data_ptr<float>();
  int64_t width = columns.results * geometry.channels;
  if (!y.numel()) return y;
  int64_t work = std::max<int64_t>(width, geometry.columns * geometry.channels);
  parallel_for(0, images * rows.results, std::max<int64_t>(1, kGrain / work), [&](int64_t begin, int64_t end) {
    std::vector<float> sum(rows.starts ? geometry.columns * geometry.channels : 0);
    for (int64_t line = begin; line < end; ++line) {
      int64_t pixel;
      const float* image = from + line / rows.results * image_stride;
      const float* row = sum_rows(image, row_stride, rows, line % rows.results, geometry, sum.data(), &pixel);
      sum_columns(row, pixel, columns, geometry.channels, to + line * width);
    }
  });
  return y;
}

}  // namespace

BURNISH_OPERATORS(CPU) { operators.implement<&interpolate>("interpolate"); }

}  // namespace burnish
