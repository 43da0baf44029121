// Depthwise convolution and its gradients as operators of PyTorch's (depthwise.h).

#pragma once

#include <optional>
#include <tuple>

#include "depthwise.h"
#include "operators.h"

namespace burnish::depthwise {

template <typename Scalar, int64_t kernel>
void check_window(const Tensor& x, const Tensor& weight, int64_t stride, const std::vector<int64_t>& pads) {
  constexpr bool wide = std::is_same_v<Scalar, float>;
  constexpr ScalarType type = wide ? kFloat : kBFloat16;
  BURNISH_CHECK(x.dim() == 4 && x.scalar_type() == type, "depthwise convolution: images in ", wide ? "float32" : "bfloat16", " expected");
  BURNISH_CHECK(weight.scalar_type() == type, "depthwise convolution: images and kernels of one type expected");
  BURNISH_CHECK(weight.dim() == 4 && weight.size(0) == x.size(1) && weight.size(1) == 1 && weight.size(2) == kernel &&
                    weight.size(3) == kernel && x.size(1) >= kWidth,
                "depthwise convolution: one kernel of ", kernel, "x", kernel, " for each of ", kWidth, " channels or more expected");
  BURNISH_CHECK((stride == 1 || stride == 2) && pads.size() == 4 && *std::min_element(pads.begin(), pads.end()) >= 0,
                "depthwise convolution: a stride of 1 or 2 and four pads of zero or more expected");
}

inline Geometry geometry(const Tensor& x, int64_t kernel, int64_t stride, const std::vector<int64_t>& pads) {
  auto outputs = [&](int64_t axis) {
    int64_t reach = x.size(axis + 2) + pads[axis] + pads[axis + 2] - kernel;
    BURNISH_CHECK(reach >= 0, "depthwise convolution: the kernel is larger than the padded image");
    return reach / stride + 1;
  };
  return {x.size(0), x.size(1), x.size(2), x.size(3), outputs(0), outputs(1), pads[0], pads[1]};
}

// (x, weight, bias) -> y. x [N, C, H, W], weight [C, 1, k, k]; pads: top, left, bottom, right.
template <typename Scalar, int64_t kernel>
Tensor depthwise_convolution(const Tensor& x_given, const Tensor& weight_given, const std::optional<Tensor>& bias_given, int64_t stride,
                             const std::vector<int64_t>& pads) {
  check_window<Scalar, kernel>(x_given, weight_given, stride, pads);
  Tensor x = to_channels_last(x_given), weight = to_contiguous(weight_given), bias;
  Geometry g = geometry(x, kernel, stride, pads);
  Tensor y = make_channels_last({g.images, g.channels, g.out_height, g.out_width}, x.scalar_type());
  if (bias_given.has_value()) bias = to_contiguous(*bias_given);
  convolve<Scalar, kernel>(x.const_data_ptr<Scalar>(), weight.const_data_ptr<Scalar>(), bias.defined() ? bias.const_data_ptr<Scalar>() : nullptr,
                           y.mutable_data_ptr<Scalar>(), g, stride, is_streamed<Scalar>(y));
  return y;
}

// (dy, x, weight) -> dx, dw, each empty unless wanted.
template <typename Scalar, int64_t kernel>
std::tuple<Tensor, Tensor> depthwise_convolution_gradient(const Tensor& dy_given, const Tensor& x_given, const Tensor& weight_given,
                                                          int64_t stride, const std::vector<int64_t>& pads, bool input,
                                                          bool weight_too) {
  check_window<Scalar, kernel>(x_given, weight_given, stride, pads);
  Tensor dy = to_channels_last(dy_given), weight = to_contiguous(weight_given);
  Tensor x = weight_too ? to_channels_last(x_given) : x_given;
  Geometry g = geometry(x, kernel, stride, pads);
  BURNISH_CHECK(dy.scalar_type() == x.scalar_type() && same(dy.sizes(), {g.images, g.channels, g.out_height, g.out_width}),
                "depthwise convolution: the gradient of its output expected");
  Tensor dx = input ? make_channels_last(x.sizes(), x.scalar_type()) : make_tensor({0}, x.scalar_type());
  Tensor dw = weight_too ? make_tensor(weight.sizes(), x.scalar_type()) : make_tensor({0}, x.scalar_type());
  differentiate<Scalar, kernel>(dy.const_data_ptr<Scalar>(), x.const_data_ptr<Scalar>(), weight.const_data_ptr<Scalar>(),
                                input ? dx.mutable_data_ptr<Scalar>() : nullptr, weight_too ? dw.mutable_data_ptr<Scalar>() : nullptr, g,
                                stride, input && is_streamed<Scalar>(dx));
  return {dx, dw};
}

}  // namespace burnish::depthwise
