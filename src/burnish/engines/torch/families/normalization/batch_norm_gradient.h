// The gradient of batch normalization in training with the addition and the activation behind it: one pass for the sums, one for the result.

#pragma once

#include "batch_norm_backward.h"
#include "operators.h"

namespace burnish {

// With r the inverse deviation, w the scale, N the elements of a channel, g the gradient before the activation:
// dx = w r (g - sum(g) / N - (x - mean) r^2 sum(g (x - mean)) / N)   (Ioffe and Szegedy 2015, section 3)
template <typename T, bool activated, Result result>
std::tuple<Tensor, Tensor, Tensor, Tensor> gradient(Operands<T> from, const Tensor& x, const Tensor& scale, const Tensor& inverse_std,
                                                    const Tensor& saved, bool keeps) {
  Walk walk(x);
  int64_t channels = walk.channels;
  Tensor dscale = make_tensor({channels}), dbias = make_tensor({channels}), dx = empty_like_rows(x);
  Tensor before = keeps ? empty_like_rows(x) : make_tensor({0}, x.scalar_type());
  float *scale_gradient = dscale.mutable_data_ptr<float>(), *bias_gradient = dbias.mutable_data_ptr<float>();
  if (!walk.elements) {
    std::fill_n(scale_gradient, channels, 0.f);
    std::fill_n(bias_gradient, channels, 0.f);
    return {dx, dscale, dbias, before};
  }
  const float *scales = scale.const_data_ptr<float>(), *inverses = inverse_std.const_data_ptr<float>();
  const float* pilot = saved.const_data_ptr<float>();
  std::vector<float> gain(channels), slope(channels), offset(channels);
  for (int64_t c = 0; c < channels; ++c) gain[c] = static_cast<float>(static_cast<double>(scales[c]) * inverses[c]);
  Values values(walk);
  values.set(kPilot, pilot);
  values.set(kShift, pilot + channels);
  values.set(kGain, gain.data());
  if (from.bias) values.set(kBias, from.bias);
  T* kept = before.template mutable_data_ptr<T>();
  std::vector<double> first, second;
  if (keeps)
    sum_channels(walk, Sums<T, activated, result, true>{from, values.reader(), kept}, first, second);
  else
    sum_channels(walk, Sums<T, activated, result, false>{from, values.reader(), nullptr}, first, second);
  double count = static_cast<double>(walk.per_channel());
  for (int64_t c = 0; c < channels; ++c) {
    double r = inverses[c], weight = scales[c] * r;
    scale_gradient[c] = static_cast<float>(second[c] * r);
    bias_gradient[c] = static_cast<float>(first[c]);
    slope[c] = static_cast<float>(-weight * r * r * second[c] / count);
    offset[c] = static_cast<float>(-weight * first[c] / count);
  }
  values.set(kSlope, slope.data());
  values.set(kOffset, offset.data());
  T* target = dx.template mutable_data_ptr<T>();
  if (keeps) {
    from.dy = kept;
    for_all(walk, InputGradient<T, false, Result::kKept>{from, values.reader(), target});
  } else {
    for_all(walk, InputGradient<T, activated, result>{from, values.reader(), target});
  }
  return {dx, dscale, dbias, before};
}

// (dy, x, scale, inverse_std, saved, y or bias, more) -> dx, dscale, dbias, and the gradient of what was added (empty unless `keep`).
// The gradient of the output is dy + more. With the bias in place of y nothing was added to the layer's result. dy, x, y, more, dx and the
// last result are of type T, all else is float32.
template <typename T>
std::tuple<Tensor, Tensor, Tensor, Tensor> batch_norm_gradient(
    const Tensor& dy_given, const Tensor& x_given, const Tensor& scale, const Tensor& inverse_std, const Tensor& saved,
    const std::optional<Tensor>& y_given, const std::optional<Tensor>& more_given, const std::optional<Tensor>& bias_given,
    int64_t activation, double limit, bool keep) {
  BURNISH_CHECK(activation == kNone || y_given.has_value() || bias_given.has_value(), "batch_norm_gradient: y or the bias expected");
  check_elements<T>(x_given);
  auto rows_of = [&](const std::optional<Tensor>& given, const char* name) {
    if (!given.has_value()) return Tensor();
    check_rows(*given, x_given, name);
    return as_rows(*given);
  };
  auto data_of = [](const Tensor& tensor) { return tensor.defined() ? tensor.const_data_ptr<T>() : nullptr; };
  Tensor x = as_rows(x_given), dy = rows_of(dy_given, "batch_norm_gradient: dy"), y = rows_of(y_given, "batch_norm_gradient: y"),
         more = rows_of(more_given, "batch_norm_gradient: more");
  Tensor bias = bias_given.has_value() ? to_contiguous(*bias_given) : Tensor();
  Operands<T> from{data_of(dy), data_of(x), data_of(y), data_of(more), bias.defined() ? bias.const_data_ptr<float>() : nullptr,
                   limit_of(activation, limit)};
  bool keeps = activation == kNone ? more.defined() : keep || more.defined();
  Tensor scales = to_contiguous(scale), inverses = to_contiguous(inverse_std), centers = to_contiguous(saved);
  return with_activation(activation, [&](auto kind) {
    constexpr bool activated = decltype(kind)::value;
    if constexpr (activated)
      if (!from.y) return gradient<T, true, Result::kAgain>(from, x, scales, inverses, centers, keeps);
    return gradient<T, activated, Result::kKept>(from, x, scales, inverses, centers, keeps);
  });
}

}  // namespace burnish
