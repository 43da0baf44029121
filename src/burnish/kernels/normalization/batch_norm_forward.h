// The passes of batch normalization in training over memory: moments of x, and what is computed of them, with the addition and the activation
// behind it.
//
// Statistics are those of x minus a pilot, a mean of a few rows, so that a large mean costs no digits. x - mean is applied as
// (x - pilot) - shift, which holds the digits that a rounded mean loses.

#pragma once

#include <cmath>
#include <limits>

#include "batch_norm_rows.h"

namespace burnish {

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

// Functions of elements read what belongs to a channel through a Reader: that of rows, or of planes.
template <typename T, typename Reader = Columns<1>::Reader>
struct Moments {
  const T* x;
  Reader pilot;

  template <typename V>
  [[gnu::always_inline]] V columns(int64_t column) const {
    return pilot.template get<V>(0, column);
  }

  template <typename V>
  [[gnu::always_inline]] void add(V pilots, int64_t index, V& one, V& other) const {
    V centered = read<V>(x + index) - pilots;
    one += centered;
    other += centered * centered;
  }
};

// The mean of x minus the pilot, and the variance. Elements are walked over in rows (Walk) or in planes (Planes).
template <typename T, typename Layout>
void moments(const T* x, const Layout& walk, const float* pilot, std::vector<double>& delta, std::vector<double>& variance) {
  using Values = typename Layout::template Values<1>;
  Values columns(walk);
  columns.set(0, pilot);
  sum_channels(walk, Moments<T, typename Values::Reader>{x, columns.reader()}, delta, variance);
  double count = static_cast<double>(walk.per_channel());
  for (int64_t c = 0; c < walk.channels; ++c) {
    delta[c] /= count;
    variance[c] = variance[c] / count - delta[c] * delta[c];
    if (variance[c] < 0.0) variance[c] = 0.0;
  }
}

template <typename T, bool activated, bool residual, typename Reader = Columns<4>::Reader>
struct Application {
  const T *x, *added;
  T* y;
  Reader values;  // pilot, shift, gain, offset
  float limit;  // as limit_of gives it

  template <typename V>
  struct Values {
    V pilot, shift, gain, offset, zero, limit;
  };

  template <typename V>
  [[gnu::always_inline]] Values<V> columns(int64_t column) const {
    return {values.template get<V>(0, column),
            values.template get<V>(1, column),
            values.template get<V>(2, column),
            values.template get<V>(3, column),
            V{},
            V{} + limit};
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
template <typename T, typename Layout>
void pilot_and_moments(const T* x, const Layout& walk, float* pilot, std::vector<double>& delta, std::vector<double>& variance) {
  choose_pilot(x, walk, pilot);
  moments(x, walk, pilot, delta, variance);
  bool far = false;
  for (int64_t c = 0; c < walk.channels; ++c) far |= delta[c] * delta[c] > kFarthestPilot * variance[c] && std::isfinite(delta[c]);
  if (!far) return;
  // The rows of the pilot were not like the others.
  for (int64_t c = 0; c < walk.channels; ++c) pilot[c] = static_cast<float>(pilot[c] + delta[c]);
  moments(x, walk, pilot, delta, variance);
}

// The inverse of the standard deviation; zero of a variance that float32 does not hold, as PyTorch and standard operators have it: what is
// normalized is zero then, and the running variance infinite.
[[gnu::always_inline]] inline double inverse_deviation(double variance, double epsilon) {
  return variance > std::numeric_limits<float>::max() ? 0.0 : 1.0 / std::sqrt(variance + epsilon);
}

// What a layer knows of its channels: [C] each, and the pilot and the shift, [2, C], which its gradient reads.
struct Statistics {
  float *mean, *inverse_std, *variance, *saved;
};

// y = activation((x - mean) inverse_std scale + bias + added) of elements that are not empty: one pass for the sums, one for the result.
// `added` may be null.
template <typename T, typename Layout>
void train(const Layout& walk, const T* x, const T* added, const float* scale, const float* bias, double epsilon, int64_t activation,
           double limit, T* y, const Statistics& to) {
  int64_t channels = walk.channels;
  float *pilot = to.saved, *shift = pilot + channels;
  std::vector<double> delta, spread;
  pilot_and_moments(x, walk, pilot, delta, spread);
  std::vector<float> gain(channels);
#pragma omp simd
  for (int64_t c = 0; c < channels; ++c) {
    double inverse = inverse_deviation(spread[c], epsilon);
    shift[c] = static_cast<float>(delta[c]);
    to.mean[c] = static_cast<float>(pilot[c] + delta[c]);
    to.variance[c] = static_cast<float>(spread[c]);
    to.inverse_std[c] = static_cast<float>(inverse);
    gain[c] = static_cast<float>(scale[c] * inverse);
  }
  using Values = typename Layout::template Values<4>;
  using Reader = typename Values::Reader;
  Values values(walk);
  values.set(0, pilot);
  values.set(1, shift);
  values.set(2, gain.data());
  values.set(3, bias);
  float bound = limit_of(activation, limit);
  with_activation(activation, [&](auto kind) {
    constexpr bool activated = decltype(kind)::value;
    if (added)
      for_all(walk, Application<T, activated, true, Reader>{x, added, y, values.reader(), bound});
    else
      for_all(walk, Application<T, activated, false, Reader>{x, nullptr, y, values.reader(), bound});
  });
}

}  // namespace burnish
