// Both gradients of a convolution of one pixel (pointwise_gradient.h) as an operator of PyTorch's.

#include <tuple>

#include "operators.h"
#include "pointwise_gradient.h"

namespace burnish::pointwise_gradient {
namespace {

// (dy [N, K, H, W], x [N, C, H, W], weight [K, C, 1, 1]) -> dx, dw, of a convolution without strides and padding.
std::tuple<Tensor, Tensor> pointwise_gradient(const Tensor& dy_given, const Tensor& x_given, const Tensor& weight_given) {
  BURNISH_CHECK(x_given.dim() == 4 && dy_given.dim() == 4 && weight_given.dim() == 4, "images and kernels expected");
  BURNISH_CHECK(x_given.scalar_type() == kFloat && dy_given.scalar_type() == kFloat && weight_given.scalar_type() == kFloat,
              "float32 images expected");
  BURNISH_CHECK(x_given.size(0) == dy_given.size(0) && x_given.size(2) == dy_given.size(2) && x_given.size(3) == dy_given.size(3) &&
                  weight_given.size(0) == dy_given.size(1) && weight_given.size(1) == x_given.size(1) && weight_given.size(2) == 1 &&
                  weight_given.size(3) == 1,
              "images and the gradient of their 1x1 convolution expected");
  Tensor dy = to_channels_last(dy_given), x = to_channels_last(x_given), weight = to_contiguous(weight_given);
  Tensor dx = make_channels_last(x.sizes()), dw = make_channels_last(weight.sizes());
  gradients(x.size(0) * x.size(2) * x.size(3), dy.size(1), x.size(1), dy.const_data_ptr<float>(), x.const_data_ptr<float>(),
            weight.const_data_ptr<float>(), dx.mutable_data_ptr<float>(), dw.mutable_data_ptr<float>());
  return {std::move(dx), std::move(dw)};
}

}  // namespace

BURNISH_OPERATORS(CPU) { operators.implement<&pointwise_gradient>("pointwise_gradient"); }

}  // namespace burnish::pointwise_gradient
