// The gradient of batch normalization in training with the addition and the activation behind it: one pass for the sums, one for the result.

#pragma once

#include "batch_norm_backward.h"
#include "operators.h"

namespace burnish {

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
  differentiate<T, activated, result>(walk, from, scale.const_data_ptr<float>(), inverse_std.const_data_ptr<float>(),
                                      saved.const_data_ptr<float>(), keeps ? before.template mutable_data_ptr<T>() : nullptr,
                                      {dx.template mutable_data_ptr<T>(), scale_gradient, bias_gradient});
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
