// 3x3 convolution of stride 1 by F(2x2, 3x3), and the gradient of its input (winograd_forward.h), as operators of PyTorch's.

#include <optional>

#include "direct.h"
#include "operators.h"
#include "winograd_forward.h"

namespace burnish::winograd {
namespace {

Images images_of(const Tensor& x) { return {x.const_data_ptr<float>(), x.size(0), x.size(2), x.size(3), x.size(1)}; }

Kernels kernels_of(const Tensor& weight, bool turned) {
  return transformed(weight.const_data_ptr<float>(), weight.size(0), weight.size(1), turned);
}

void check(const Tensor& x, const Tensor& weight, const std::vector<int64_t>& padding) {
  BURNISH_CHECK(x.dim() == 4 && weight.dim() == 4 && x.scalar_type() == kFloat && weight.scalar_type() == kFloat,
              "float32 images and kernels expected");
  BURNISH_CHECK(weight.size(2) == 3 && weight.size(3) == 3, "kernels of 3x3 expected");
  BURNISH_CHECK(padding.size() == 2 && std::min(padding[0], padding[1]) >= 0 && std::max(padding[0], padding[1]) <= 2,
              "padding of 0 to 2 expected");
}

// (x [N, C, H, W], weight [K, C, 3, 3], bias [K], padding of the height and of the width) -> y.
Tensor winograd_convolution(const Tensor& x_given, const Tensor& weight_given, const std::optional<Tensor>& bias,
                                const std::vector<int64_t>& padding) {
  check(x_given, weight_given, padding);
  BURNISH_CHECK(x_given.size(1) == weight_given.size(1), "images and kernels of the same number of channels expected");
  int64_t height = x_given.size(2) + 2 * padding[0] - 2, width = x_given.size(3) + 2 * padding[1] - 2;
  if (!wins(x_given.size(0), height, width, weight_given.size(1), weight_given.size(0), kWeightsPerTile))
    return direct::convolution(x_given, weight_given, bias, padding);
  Tensor x = to_channels_last(x_given), weight = to_channels_last(weight_given);
  Tensor y = make_channels_last({x.size(0), weight.size(0), height, width});
  std::optional<Tensor> added;
  if (bias.has_value()) added = to_contiguous(*bias);
  convolve(images_of(x), kernels_of(weight, false), padding[0], padding[1], added.has_value() ? added->const_data_ptr<float>() : nullptr,
           y.mutable_data_ptr<float>(), height, width);
  return y;
}

// (dy [N, K, H', W'], weight [K, C, 3, 3], padding of the convolution) -> dx.
Tensor winograd_input_gradient(const Tensor& dy_given, const Tensor& weight_given, const std::vector<int64_t>& padding) {
  check(dy_given, weight_given, padding);
  BURNISH_CHECK(dy_given.size(1) == weight_given.size(0), "a channel of dy for each kernel expected");
  int64_t height = dy_given.size(2) + 2 - 2 * padding[0], width = dy_given.size(3) + 2 - 2 * padding[1];
  Tensor dx = make_channels_last({dy_given.size(0), weight_given.size(1), height, width});
  if (!wins(dx.size(0), height, width, weight_given.size(1), weight_given.size(0), kTurnedWeightsPerTile))
    return direct::gradient(dy_given, dx, weight_given, padding, true);
  Tensor dy = to_channels_last(dy_given), weight = to_channels_last(weight_given);
  convolve(images_of(dy), kernels_of(weight, true), 2 - padding[0], 2 - padding[1], nullptr, dx.mutable_data_ptr<float>(), height, width);
  return dx;
}

}  // namespace

BURNISH_OPERATORS(CPU) {
  operators.implement<&winograd_convolution>("winograd_convolution");
  operators.implement<&winograd_input_gradient>("winograd_input_gradient");
}

}  // namespace burnish::winograd
