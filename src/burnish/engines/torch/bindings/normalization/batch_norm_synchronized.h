// Batch normalization by statistics of several workers, and its gradient, as operators of PyTorch's (synchronized.h).
//
// x, y, dy, dx and what is added are of type T, vectors per channel float32. No part is too small.

#pragma once

#include "operators.h"
#include "synchronized.h"

namespace burnish {

inline void check_vector(const Tensor& tensor, int64_t extent, ScalarType type, const char* name) {
  BURNISH_CHECK(tensor.dim() == 1 && tensor.size(0) == extent && tensor.scalar_type() == type, name,
                ": a vector with the values and of the type that its channels need expected");
}

inline Tensor channels_of(const Tensor& tensor, int64_t channels, const char* name) {
  check_vector(tensor, channels, kFloat, name);
  return to_contiguous(tensor);
}

// What x - center is computed by: the pivot, and float(center - pivot), in columns.
template <int64_t pilot, int64_t shift, int64_t count>
void set_centering(Columns<count>& values, const Walk& walk, const Tensor& pivot_given, const Tensor& center_given) {
  check_vector(center_given, walk.channels, kDouble, "batch normalization: center");
  Tensor pivot = channels_of(pivot_given, walk.channels, "batch normalization: pivot"), center = to_contiguous(center_given);
  const float* near = pivot.const_data_ptr<float>();
  values.set(pilot, near);
  values.set(shift, away_from_pivot(near, center.const_data_ptr<double>(), walk.channels).data());
}

// Rows of a tensor that may be left out, beside x.
inline Tensor rows_beside(const std::optional<Tensor>& given, const Tensor& x, const char* name) {
  if (!given.has_value()) return Tensor();
  check_rows(*given, x, name);
  return as_rows(*given);
}

template <typename T>
const T* data_of(const Tensor& tensor) {
  return tensor.defined() ? tensor.const_data_ptr<T>() : nullptr;
}

// x -> moments [1 + 2 C]: count, means, sums of squares about them; and the pivot [C], near the means.
template <typename T>
std::tuple<Tensor, Tensor> batch_norm_moments(const Tensor& x_given) {
  check_elements<T>(x_given);
  Tensor x = as_rows(x_given);
  Walk walk(x);
  Tensor found = make_tensor({1 + 2 * walk.channels}, kDouble), near = make_tensor({walk.channels});
  find_moments(x.const_data_ptr<T>(), walk.elements, walk, found.mutable_data_ptr<double>(), near.mutable_data_ptr<float>());
  return std::make_tuple(found, near);
}

// y = activation((x - center) gain + bias + added).
template <typename T>
Tensor batch_norm_apply(const Tensor& x_given, const Tensor& pivot, const Tensor& center, const Tensor& gain, const Tensor& bias,
                        const std::optional<Tensor>& added_given, int64_t activation, double limit) {
  check_elements<T>(x_given);
  Tensor x = as_rows(x_given), added = rows_beside(added_given, x_given, "batch_norm_apply: added"), y = empty_like_rows(x);
  Walk walk(x);
  Columns<4> values(walk);
  auto set = [&](int64_t index, const Tensor& vector, const char* name) {
    Tensor channels = channels_of(vector, walk.channels, name);
    values.set(index, channels.const_data_ptr<float>());
  };
  set_centering<0, 1>(values, walk, pivot, center);
  set(2, gain, "batch_norm_apply: gain");
  set(3, bias, "batch_norm_apply: bias");
  apply_normalization(walk, values, x.const_data_ptr<T>(), data_of<T>(added), activation, limit, y.mutable_data_ptr<T>());
  return y;
}

// (dy, x, pivot, center, y or gain and bias, more) -> Σ g and, behind it, Σ g (x - center), float64 [2 C], of the gradient g before the
// activation; and g itself, where `keep` says so or `more` is there (else empty). The gradient of the output is dy + more. With gain and bias in
// place of y nothing was added to the layer's result.
template <typename T>
std::tuple<Tensor, Tensor> batch_norm_gradient_sums(
    const Tensor& dy_given, const Tensor& x_given, const Tensor& pivot, const Tensor& center, const std::optional<Tensor>& y_given,
    const std::optional<Tensor>& gain, const std::optional<Tensor>& bias, const std::optional<Tensor>& more_given, int64_t activation,
    double limit, bool keep) {
  BURNISH_CHECK(activation == kNone || y_given.has_value() || (gain.has_value() && bias.has_value()),
                "batch_norm_gradient_sums: y, or gain and bias, expected");
  check_elements<T>(x_given);
  Tensor x = as_rows(x_given), dy = rows_beside(dy_given, x_given, "batch_norm_gradient_sums: dy"),
         y = rows_beside(y_given, x_given, "batch_norm_gradient_sums: y"),
         more = rows_beside(more_given, x_given, "batch_norm_gradient_sums: more");
  Operands<T> from{data_of<T>(dy), data_of<T>(x), data_of<T>(y), data_of<T>(more), nullptr, limit_of(activation, limit)};
  Walk walk(x);
  Values values(walk);
  auto set = [&](int64_t index, const Tensor& vector, const char* name) {
    Tensor channels = channels_of(vector, walk.channels, name);
    values.set(index, channels.const_data_ptr<float>());
  };
  set_centering<kPilot, kShift>(values, walk, pivot, center);
  if (gain.has_value()) set(kGain, *gain, "batch_norm_gradient_sums: gain");
  if (bias.has_value()) set(kBias, *bias, "batch_norm_gradient_sums: bias");
  bool keeps = more.defined() || (keep && activation != kNone);
  Tensor before = keeps ? empty_like_rows(x) : make_tensor({0}, x.scalar_type());
  Tensor sums = make_tensor({2 * walk.channels}, kDouble);
  T* kept = keeps ? before.mutable_data_ptr<T>() : nullptr;
  sum_gradients(walk, values, from, activation, kept, sums.mutable_data_ptr<double>());
  return std::make_tuple(sums, before);
}

// dx = g gain + (x - center) slope + offset of the gradient g before the activation; operands as for the sums.
template <typename T>
Tensor batch_norm_gradient_apply(const Tensor& dy_given, const Tensor& x_given, const Tensor& pivot, const Tensor& center, const Tensor& gain,
                                 const Tensor& slope, const Tensor& offset, const std::optional<Tensor>& y_given,
                                 const std::optional<Tensor>& bias, int64_t activation, double limit) {
  BURNISH_CHECK(activation == kNone || y_given.has_value() || bias.has_value(), "batch_norm_gradient_apply: y or the bias expected");
  check_elements<T>(x_given);
  Tensor x = as_rows(x_given), dy = rows_beside(dy_given, x_given, "batch_norm_gradient_apply: dy"),
         y = rows_beside(y_given, x_given, "batch_norm_gradient_apply: y"), dx = empty_like_rows(x);
  Operands<T> from{data_of<T>(dy), data_of<T>(x), data_of<T>(y), nullptr, nullptr, limit_of(activation, limit)};
  Walk walk(x);
  Values values(walk);
  auto set = [&](int64_t index, const Tensor& vector, const char* name) {
    Tensor channels = channels_of(vector, walk.channels, name);
    values.set(index, channels.const_data_ptr<float>());
  };
  set_centering<kPilot, kShift>(values, walk, pivot, center);
  set(kGain, gain, "batch_norm_gradient_apply: gain");
  set(kSlope, slope, "batch_norm_gradient_apply: slope");
  set(kOffset, offset, "batch_norm_gradient_apply: offset");
  if (bias.has_value()) set(kBias, *bias, "batch_norm_gradient_apply: bias");
  apply_gradient(walk, values, from, activation, dx.mutable_data_ptr<T>());
  return dx;
}

}  // namespace burnish
