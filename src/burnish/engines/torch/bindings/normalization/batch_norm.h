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
  const T* more = added.defined() ? added.const_data_ptr<T>() : nullptr;
  Statistics statistics{mean.mutable_data_ptr<float>(), inverse_std.mutable_data_ptr<float>(), variance.mutable_data_ptr<float>(),
                        saved.mutable_data_ptr<float>()};
  train(walk, x.const_data_ptr<T>(), more, scale.const_data_ptr<float>(), bias.const_data_ptr<float>(), epsilon, activation, limit,
        y.mutable_data_ptr<T>(), statistics);
  return std::make_tuple(y, mean, inverse_std, variance, saved);
}

}  // namespace burnish
