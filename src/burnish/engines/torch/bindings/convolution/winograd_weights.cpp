// The gradients of the kernels of a convolution, by F(2x2, 3x3) or as products of matrices (winograd_weights.h, weight_products.h), as
// operators of PyTorch's.

#include "direct.h"
#include "operators.h"
#include "weight_products.h"
#include "winograd_weights.h"

namespace burnish::winograd_weights {
namespace {

Images images_of(const Tensor& x) { return {x.const_data_ptr<float>(), x.size(0), x.size(2), x.size(3), x.size(1)}; }

// (dy [N, K, H', W'], x [N, C, H, W], padding of the convolution) -> dw [K, C, 3, 3].
Tensor winograd_weight_gradient(const Tensor& dy_given, const Tensor& x_given, const std::vector<int64_t>& padding) {
  BURNISH_CHECK(x_given.dim() == 4 && dy_given.dim() == 4 && x_given.scalar_type() == kFloat && dy_given.scalar_type() == kFloat,
              "float32 images expected");
  BURNISH_CHECK(padding.size() == 2 && x_given.size(0) == dy_given.size(0) && x_given.size(2) + 2 * padding[0] - 2 == dy_given.size(2) &&
                  x_given.size(3) + 2 * padding[1] - 2 == dy_given.size(3),
              "images and the gradient of their 3x3 convolution expected");
  int64_t tiles = x_given.size(0) * tiling(dy_given.size(2), dy_given.size(3), 0, 0).per_image();
  Tensor dw = make_channels_last({dy_given.size(1), x_given.size(1), 3, 3});
  if (!worthwhile(tiles, x_given.size(1), dy_given.size(1), kWeightsPerTile))
    return direct::gradient(dy_given, x_given, dw, padding, false);
  Tensor dy = to_channels_last(dy_given), x = to_channels_last(x_given);
  weight_gradient(images_of(x), images_of(dy), padding[0], padding[1], dw.mutable_data_ptr<float>());
  return dw;
}

// (dy [N, K, H', W'], x [N, C, H, W], extents of the kernels, strides and padding of the convolution) -> dw [K, C, *extents].
Tensor convolution_weight_gradient(const Tensor& dy_given, const Tensor& x_given, const std::vector<int64_t>& extents,
                                   const std::vector<int64_t>& strides, const std::vector<int64_t>& padding) {
  BURNISH_CHECK(x_given.dim() == 4 && dy_given.dim() == 4 && x_given.scalar_type() == kFloat && dy_given.scalar_type() == kFloat,
              "float32 images expected");
  BURNISH_CHECK(extents.size() == 2 && strides.size() == 2 && padding.size() == 2 && std::min(strides[0], strides[1]) > 0,
              "extents, strides and padding of two axes expected");
  bool fits = x_given.size(0) == dy_given.size(0);
  for (int axis : {0, 1})
    fits = fits && (x_given.size(2 + axis) + 2 * padding[axis] - extents[axis]) / strides[axis] + 1 == dy_given.size(2 + axis);
  BURNISH_CHECK(fits, "images and the gradient of their convolution expected");
  Tensor dw = make_channels_last({dy_given.size(1), x_given.size(1), extents[0], extents[1]});
  Tensor dy = to_channels_last(dy_given), x = to_channels_last(x_given);
  weight_products::weight_gradient({x.size(0), x.size(2), x.size(3), x.size(1), dy.size(2), dy.size(3), dy.size(1), extents[0], extents[1],
                                    strides[0], strides[1], padding[0], padding[1]},
                                   x.const_data_ptr<float>(), dy.const_data_ptr<float>(), dw.mutable_data_ptr<float>());
  return dw;
}

}  // namespace

BURNISH_OPERATORS(CPU) {
  operators.implement<&winograd_weight_gradient>("winograd_weight_gradient");
  operators.implement<&convolution_weight_gradient>("convolution_weight_gradient");
}

}  // namespace burnish::winograd_weights
