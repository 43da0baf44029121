// Batch normalization by statistics of several workers, and its gradient: what lies before and behind an exchange. The passes over memory are those
// of batch normalization in one process, cut where workers add up what they have found.
//
// What travels is float64. A worker without samples has count 0, and means and sums of 0.

#pragma once

#include <algorithm>
#include <vector>

#include "batch_norm_backward.h"
#include "batch_norm_forward.h"

namespace burnish {

// float(center - pivot): with the pivot, what x - center is computed by.
inline std::vector<float> away_from_pivot(const float* pivot, const double* center, int64_t channels) {
  std::vector<float> away(channels);
  for (int64_t c = 0; c < channels; ++c) away[c] = static_cast<float>(center[c] - pivot[c]);
  return away;
}

// Moments [1 + 2 C] of x, which has so many elements: count, means, sums of squares about them; and the pivot [C], near the means.
template <typename T, typename Layout>
void find_moments(const T* x, int64_t elements, const Layout& layout, double* found, float* pivot) {
  int64_t channels = layout.channels;
  std::fill_n(found, 1 + 2 * channels, 0.0);
  std::fill_n(pivot, channels, 0.f);
  if (!elements) return;
  std::vector<double> delta, variance;
  pilot_and_moments(x, layout, pivot, delta, variance);
  double count = found[0] = static_cast<double>(layout.per_channel());
  for (int64_t c = 0; c < channels; ++c) {
    found[1 + c] = pivot[c] + delta[c];
    found[1 + channels + c] = variance[c] * count;
  }
}

// What the moments of all parts come to: count [1], all others [C].
struct MergedMoments {
  double *count, *center, *precise_inverse;
  float *mean, *inverse_std, *variance, *gain;
};

// Merges moments [parts, 1 + 2 C] (Chan, Golub and LeVeque 1983), in the order of the parts.
inline void merge_moments(const double* from, int64_t parts, int64_t channels, const float* scale, double epsilon, const MergedMoments& to) {
  int64_t width = 1 + 2 * channels;
  double total = 0.0;
  for (int64_t part = 0; part < parts; ++part) total += from[part * width];
  *to.count = total;
  double divisor = std::max(total, 1.0);
  std::vector<double> sums(channels), squares(channels, 0.0);
  std::fill_n(to.center, channels, 0.0);
  // Twice: the means differ by little, and rounding the large sum of them costs more than rounding that of their differences.
  for (int round = 0; round < 2; ++round) {
    std::fill(sums.begin(), sums.end(), 0.0);
    for (int64_t part = 0; part < parts; ++part)
      for (int64_t c = 0; c < channels; ++c) sums[c] += from[part * width] * (from[part * width + 1 + c] - to.center[c]);
    for (int64_t c = 0; c < channels; ++c) to.center[c] += sums[c] / divisor;
  }
  for (int64_t part = 0; part < parts; ++part)
    for (int64_t c = 0; c < channels; ++c) {
      double away = from[part * width + 1 + c] - to.center[c];
      squares[c] += from[part * width + 1 + channels + c] + from[part * width] * away * away;
    }
  for (int64_t c = 0; c < channels; ++c) {
    double spread = squares[c] / divisor, inverse = inverse_deviation(spread, epsilon);
    to.precise_inverse[c] = inverse;
    to.mean[c] = static_cast<float>(to.center[c]);
    to.inverse_std[c] = static_cast<float>(inverse);
    to.variance[c] = static_cast<float>(spread);
    to.gain[c] = static_cast<float>(scale[c] * inverse);
  }
}

// y = activation((x - center) gain + bias + added), with the pivot, center - pivot, the gain and the bias as values; `added` may be null.
template <typename T, typename Layout, typename Values>
void apply_normalization(const Layout& layout, const Values& values, const T* x, const T* added, int64_t activation, double limit, T* y) {
  using Reader = typename Values::Reader;
  float bound = limit_of(activation, limit);
  with_activation(activation, [&](auto kind) {
    constexpr bool activated = decltype(kind)::value;
    if (added)
      for_all(layout, Application<T, activated, true, Reader>{x, added, y, values.reader(), bound});
    else
      for_all(layout, Application<T, activated, false, Reader>{x, nullptr, y, values.reader(), bound});
  });
}

// Calls `run` with whether there is an activation and where its gradient finds the layer's result, as constants.
template <typename Run>
void with_mask(int64_t activation, bool kept, const Run& run) {
  if (activation == kNone) return run(std::false_type(), std::integral_constant<Result, Result::kKept>());
  if (kept) return run(std::true_type(), std::integral_constant<Result, Result::kKept>());
  run(std::true_type(), std::integral_constant<Result, Result::kAgain>());
}

// Σ g and, behind it, Σ g (x - center), [2 C], of the gradient g before the activation; and g itself, where `before` is not null.
template <typename T, typename Layout, typename Values>
void sum_gradients(const Layout& layout, const Values& values, const Operands<T>& from, int64_t activation, T* before, double* sums) {
  using Reader = typename Values::Reader;
  std::vector<double> first, second;
  with_mask(activation, from.y, [&](auto kind, auto result) {
    constexpr bool activated = decltype(kind)::value;
    constexpr Result r = decltype(result)::value;
    if (before)
      sum_channels(layout, Sums<T, activated, r, true, Reader>{from, values.reader(), before}, first, second);
    else
      sum_channels(layout, Sums<T, activated, r, false, Reader>{from, values.reader(), nullptr}, first, second);
  });
  std::copy(second.begin(), second.end(), std::copy(first.begin(), first.end(), sums));
}

// What the sums over all parts come to, [C] each.
struct MergedGradients {
  float *slope, *offset, *dscale, *dbias;
};

// With r the inverse deviation, w the scale, S1 = Σ dy and S2 = Σ dy (x - mean): slope = -w r^3 S2 / n and offset = -w r S1 / n
// (Ioffe and Szegedy 2015, section 3).
inline void merge_gradients(const double* sums, double count, const double* inverses, const float* scale, int64_t channels,
                            const MergedGradients& to) {
  const double *first = sums, *second = sums + channels;
  double divisor = std::max(count, 1.0);
  for (int64_t c = 0; c < channels; ++c) {
    double r = inverses[c], weight = scale[c] * r;
    to.slope[c] = static_cast<float>(-weight * r * r * second[c] / divisor);
    to.offset[c] = static_cast<float>(-weight * first[c] / divisor);
    to.dscale[c] = static_cast<float>(second[c] * r);
    to.dbias[c] = static_cast<float>(first[c]);
  }
}

// dx = g gain + (x - center) slope + offset of the gradient g before the activation.
template <typename T, typename Layout, typename Values>
void apply_gradient(const Layout& layout, const Values& values, const Operands<T>& from, int64_t activation, T* dx) {
  with_mask(activation, from.y, [&](auto kind, auto result) {
    for_all(layout, InputGradient<T, decltype(kind)::value, decltype(result)::value, typename Values::Reader>{from, values.reader(), dx});
  });
}

}  // namespace burnish
