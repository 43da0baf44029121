// Batch normalization in training, with the addition and the activation behind it: one pass for the sums, one for the result.

#pragma once

#include "batch_norm_forward.h"
#include "operators.h"

namespace burnish {

// (x, scale, bias, added) -> y, mean, inverse_std, variance, saved: y = activation((x - mean) inverse_std scale + bias + added). x, added and
// y are of type T, all else is float32; saved [2, C] is pilot and shift.
template <typename T>
std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor> batch_norm_training(
    const Tensor& x_given, const Tensor& scale_given, const Tensor& bias_given, const std::optional<Tensor>& added_given,
    double epsilon, int64_t activation, double limit) {
  check_elements<T>(x_given);
  Tensor x = as_rows(x_given), scale = to_contiguous(scale_given), bias = to_contiguous(bias_given);
  if (added_given.has_value()) check_rows(*added_given, x, "batch_norm_training: added");
  Tensor added = added_given.has_value() ? as_rows(*added_given) : Tensor();
  Walk walk(x);
  int64_t channels = walk.channels;
  auto vector = [&] { return make_tensor({channels}); };
  Tensor mean = vector(), inverse_std = vector(), variance = vector(), saved = make_tensor({2, channels});
  Tensor y = empty_like_rows(x);
  if (!walk.elements) {
    for (const Tensor& statistic : {mean, inverse_std, variance, saved})
      std::fill_n(statistic.mutable_data_ptr<float>(), statistic.numel(), NAN);
    return std::make_tuple(y, mean, inverse_std, variance, saved);
  }
  const T* source = x.const_data_ptr<T>();
  float *pilot = saved.mutable_data_ptr<float>(), *shift = pilot + channels;
  std::vector<double> delta, spread;
  pilot_and_moments(source, walk, pilot, delta, spread);
  std::vector<float> gain(channels);
  float *means = mean.mutable_data_ptr<float>(), *inverses = inverse_std.mutable_data_ptr<float>(),
        *variances = variance.mutable_data_ptr<float>();
  const float* scales = scale.const_data_ptr<float>();
#pragma omp simd
  for (int64_t c = 0; c < channels; ++c) {
    double inverse = 1.0 / std::sqrt(spread[c] + epsilon);
    shift[c] = static_cast<float>(delta[c]);
    means[c] = static_cast<float>(pilot[c] + delta[c]);
    variances[c] = static_cast<float>(spread[c]);
    inverses[c] = static_cast<float>(inverse);
    gain[c] = static_cast<float>(scales[c] * inverse);
  }
  Columns<4> values(walk);
  values.set(0, pilot);
  values.set(1, shift);
  values.set(2, gain.data());
  values.set(3, bias.const_data_ptr<float>());
  T* target = y.mutable_data_ptr<T>();
  float bound = limit_of(activation, limit);
  with_activation(activation, [&](auto kind) {
    constexpr bool activated = decltype(kind)::value;
    if (added.defined())
      for_all(walk, Application<T, activated, true>{source, added.const_data_ptr<T>(), target, values.reader(), bound});
    else
      for_all(walk, Application<T, activated, false>{source, nullptr, target, values.reader(), bound});
  });
  return std::make_tuple(y, mean, inverse_std, variance, saved);
}

}  // namespace burnish
