// The passes of batch normalization in training over memory: moments of x, and what is computed of them, with the addition and the activation
// behind it.
//
// Statistics are those of x minus a pilot, a mean of a few rows, so that a large mean costs no digits. x - mean is applied as
// (x - pilot) - shift, which holds the digits that a rounded mean loses.

#pragma once

#include "batch_norm_rows.h"

namespace burnish {

constexpr int64_t kPilotRows = 16;
constexpr double kFarthestPilot = 4.0;  // (pilot - mean)^2 in variances: with a pilot farther off, the variance would lose digits

// The mean of rows spread over x. It is counted from the first of them, so that a constant channel has itself as its pilot.
template <typename T>
void choose_pilot(const T* x, const Walk& walk, float* pilot) {
  int64_t channels = walk.channels, rows = walk.per_channel(), count = std::min(rows, kPilotRows);
  std::vector<float> sums(channels, 0.f);
  for (int64_t pick = 1; pick < count; ++pick) {
    const T* row = x + rows * pick / count * channels;
#pragma omp simd
    for (int64_t c = 0; c < channels; ++c) sums[c] += static_cast<float>(row[c]) - static_cast<float>(x[c]);
  }
  for (int64_t c = 0; c < channels; ++c) pilot[c] = static_cast<float>(x[c]) + sums[c] / static_cast<float>(count);
}

template <typename T>
struct Moments {
  const T* x;
  Columns<1>::Reader pilot;

  template <typename V>
  [[gnu::always_inline]] V columns(int64_t column) const {
    return pilot.get<V>(0, column);
  }

  template <typename V>
  [[gnu::always_inline]] void add(V pilots, int64_t index, V& one, V& other) const {
    V centered = read<V>(x + index) - pilots;
    one += centered;
    other += centered * centered;
  }
};

// The mean of x minus the pilot, and the variance.
template <typename T>
void moments(const T* x, const Walk& walk, const float* pilot, std::vector<double>& delta, std::vector<double>& variance) {
  Columns<1> columns(walk);
  columns.set(0, pilot);
  sum_channels(walk, Moments<T>{x, columns.reader()}, delta, variance);
  double count = static_cast<double>(walk.per_channel());
  for (int64_t c = 0; c < walk.channels; ++c) {
    delta[c] /= count;
    variance[c] = variance[c] / count - delta[c] * delta[c];
    if (variance[c] < 0.0) variance[c] = 0.0;
  }
}

template <typename T, bool activated, bool residual>
struct Application {
  const T *x, *added;
  T* y;
  Columns<4>::Reader values;  // pilot, shift, gain, offset
  float limit;  // as limit_of gives it

  template <typename V>
  struct Values {
    V pilot, shift, gain, offset, zero, limit;
  };

  template <typename V>
  [[gnu::always_inline]] Values<V> columns(int64_t column) const {
    return {values.get<V>(0, column), values.get<V>(1, column), values.get<V>(2, column), values.get<V>(3, column), V{}, V{} + limit};
  }

  template <typename V>
  [[gnu::always_inline]] void at(const Values<V>& own, int64_t index) const {
    V value = ((read<V>(x + index) - own.pilot) - own.shift) * own.gain + own.offset;
    if constexpr (residual) value += read<V>(added + index);
    if constexpr (activated) {  // the comparisons leave NaN as it is
      value = value < own.zero ? own.zero : value;
      value = value > own.limit ? own.limit : value;
    }
    write(y + index, value);
  }
};

// The pilot, the mean of x minus the pilot, and the variance; x is not empty.
template <typename T>
void pilot_and_moments(const T* x, const Walk& walk, float* pilot, std::vector<double>& delta, std::vector<double>& variance) {
  choose_pilot(x, walk, pilot);
  moments(x, walk, pilot, delta, variance);
  bool far = false;
  for (int64_t c = 0; c < walk.channels; ++c) far |= delta[c] * delta[c] > kFarthestPilot * variance[c] && std::isfinite(delta[c]);
  if (!far) return;
  // The rows of the pilot were not like the others.
  for (int64_t c = 0; c < walk.channels; ++c) pilot[c] = static_cast<float>(pilot[c] + delta[c]);
  moments(x, walk, pilot, delta, variance);
}

}  // namespace burnish
