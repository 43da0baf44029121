// Convolutions of images with their channels last, their gradients and max pooling, as operators of ONNX Runtime's. Images are tensors
// [N, H, W, C]; kernels lie as ONNX has them, [K, C / group, height, width]. Which way is taken follows from the sizes of a call.

#pragma once

#include <algorithm>
#include <vector>

#include "depthwise_calls.h"
#include "max_pool.h"
#include "operators.h"
#include "pointwise_gradient.h"
#include "windows.h"
#include "winograd_forward.h"
#include "winograd_weights.h"

namespace burnish {
namespace {

// From which sizes on a way was measured to win, as the PyTorch engine has it (its thresholds.py); but for the gradients of kernels of 3x3,
// which with few tiles are faster as products: kernels come in another order than Winograd's filtering takes.
constexpr int64_t kWeightsPerTile = 4096;
constexpr int64_t kMostWeightsOfBoth = 1 << 17, kLeastPixelsOfBoth = 96, kLeastOfWider = 64;

// Extents of the windows of a convolution or a pool along one axis.
int64_t window_count(int64_t size, int64_t begin, int64_t end, int64_t kernel, int64_t stride, int64_t dilation) {
  int64_t reach = size + begin + end - (kernel - 1) * dilation - 1;
  BURNISH_CHECK(reach >= 0, "convolution: the kernel is larger than the padded image");
  return reach / stride + 1;
}

// What a node says of its windows; lists have an entry for the height and one for the width.
struct Window {
  std::vector<int64_t> kernel, strides, dilations, pads;
  int64_t group, threads;

  explicit Window(const Attributes& attributes)
      : kernel(attributes.numbers("kernel_shape")),
        strides(attributes.numbers("strides")),
        dilations(attributes.numbers("dilations")),
        pads(attributes.numbers("pads")),
        group(attributes.number("group")),
        threads(attributes.number("threads")) {
    BURNISH_CHECK(kernel.size() == 2 && strides.size() == 2 && dilations.size() == 2 && pads.size() == 4,
                  "convolution: windows of two axes expected");
    BURNISH_CHECK(std::min(strides[0], strides[1]) > 0 && std::min(dilations[0], dilations[1]) > 0, "convolution: steps of one or more expected");
    BURNISH_CHECK(*std::min_element(pads.begin(), pads.end()) >= 0, "convolution: pads of zero or more expected");
  }

  bool is_depthwise() const { return group > 1; }
  bool is_plain() const { return strides[0] == 1 && strides[1] == 1 && dilations[0] == 1 && dilations[1] == 1; }
  bool is_one_pixel() const {
    return is_plain() && kernel[0] == 1 && kernel[1] == 1 && *std::max_element(pads.begin(), pads.end()) == 0;
  }
  bool suits_winograd() const {
    return is_plain() && kernel[0] == 3 && kernel[1] == 3 && *std::max_element(pads.begin(), pads.end()) <= 2;
  }

  weight_products::Convolution over(const Tensor& x, const Tensor& w) const {
    BURNISH_CHECK(x.dim() == 4 && w.dim() == 4 && w.size(2) == kernel[0] && w.size(3) == kernel[1] && x.size(3) == w.size(1) * group,
                  "convolution: images [N, H, W, C] and kernels [K, C / group, height, width] that fit expected");
    int64_t rows = window_count(x.size(1), pads[0], pads[2], kernel[0], strides[0], dilations[0]);
    int64_t columns = window_count(x.size(2), pads[1], pads[3], kernel[1], strides[1], dilations[1]);
    return {x.size(0), x.size(1), x.size(2), x.size(3),  rows,    columns, w.size(0),    kernel[0],
            kernel[1], strides[0], strides[1], pads[0], pads[1], dilations[0], dilations[1]};
  }

  depthwise::Geometry geometry(const weight_products::Convolution& shape) const {
    BURNISH_CHECK(group == shape.channels && shape.outputs == group && kernel[0] == kernel[1] && (kernel[0] == 3 || kernel[0] == 5) &&
                      strides[0] == strides[1] && strides[0] <= 2 && group >= kWidth,
                  "convolution: of several groups one kernel of 3x3 or 5x5 for each of ", kWidth, " channels or more is taken");
    return {shape.images, shape.channels, shape.height, shape.width, shape.out_height, shape.out_width, shape.top, shape.left};
  }
};

bool is_streamed(const float* target, int64_t channels, int64_t count) {
  return channels % kWidth == 0 && reinterpret_cast<uintptr_t>(target) % (kWidth * sizeof(float)) == 0 &&
         count * static_cast<int64_t>(sizeof(float)) >= depthwise::kStreamed;
}

bool winograd_wins(const weight_products::Convolution& shape, int64_t height, int64_t width, int64_t weights_per_tile) {
  return winograd::wins(shape.images, height, width, shape.channels, shape.outputs, weights_per_tile);
}

// Kernels with their channels last, and what holds them.
Tensor reordered(const weight_products::Convolution& shape, const float* w) {
  Tensor kernels = make_tensor({shape.outputs * windows::window_size(shape)});
  windows::kernels_channels_last(shape, w, kernels.mutable_data_ptr<float>());
  return kernels;
}

winograd::Images images_of(const Tensor& x) { return {x.const_data_ptr<float>(), x.size(0), x.size(1), x.size(2), x.size(3)}; }

Extent extent_of_result(const Extent& size, int64_t begin, int64_t end, int64_t kernel, int64_t stride, int64_t dilation) {
  if (!size.is_known()) return {-1, ""};
  return {window_count(size.number, begin, end, kernel, stride, dilation), ""};
}

struct ChannelsLastConv {
  Window window;

  explicit ChannelsLastConv(const Attributes& attributes) : window(attributes) {}

  // (x, w, b) -> y; the bias may be left out.
  void run(Call& call) const {
    Parts parts(window.threads);
    Tensor x = call.input(0), w = call.input(1), b;
    if (call.input_count() > 2) b = call.input(2);
    weight_products::Convolution shape = window.over(x, w);
    BURNISH_CHECK(!b.defined() || b.numel() == shape.outputs, "convolution: a bias of ", shape.outputs, " numbers expected, found ", b.numel());
    Tensor y = call.output(0, {shape.images, shape.out_height, shape.out_width, shape.outputs}, kFloat);
    const float *images = x.const_data_ptr<float>(), *kernels = w.const_data_ptr<float>();
    const float* bias = b.defined() ? b.const_data_ptr<float>() : nullptr;
    float* results = y.mutable_data_ptr<float>();
    if (y.numel() == 0) return;
    if (window.is_depthwise()) {
      depthwise::convolve(window.kernel[0], images, kernels, bias, results, window.geometry(shape), window.strides[0],
                          is_streamed(results, shape.channels, y.numel()));
    } else if (window.suits_winograd() && winograd_wins(shape, shape.out_height, shape.out_width, kWeightsPerTile)) {
      Tensor last = reordered(shape, kernels);
      winograd::convolve(images_of(x), winograd::transformed(last.const_data_ptr<float>(), shape.outputs, shape.channels, false), shape.top,
                         shape.left, bias, results, shape.out_height, shape.out_width);
    } else {
      windows::convolve(shape, images, kernels, bias, results);
    }
  }

  static void infer(Inference& inference) {
    std::vector<Extent> x = inference.shape(0), w = inference.shape(1);
    std::vector<int64_t> kernel = inference.numbers("kernel_shape"), strides = inference.numbers("strides");
    std::vector<int64_t> dilations = inference.numbers("dilations"), pads = inference.numbers("pads");
    inference.set_output(0, ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT,
                         {x.at(0), extent_of_result(x.at(1), pads.at(0), pads.at(2), kernel.at(0), strides.at(0), dilations.at(0)),
                          extent_of_result(x.at(2), pads.at(1), pads.at(3), kernel.at(1), strides.at(1), dilations.at(1)), w.at(0)});
  }
};

struct ChannelsLastConvGrad {
  Window window;
  bool wants_input, wants_weight;

  explicit ChannelsLastConvGrad(const Attributes& attributes)
      : window(attributes), wants_input(attributes.number("input")), wants_weight(attributes.number("weight")) {}

  // (dy, x, w) -> dx, dw, of which those are left out that nothing wants.
  void run(Call& call) const {
    Parts parts(window.threads);
    Tensor dy = call.input(0), x = call.input(1), w = call.input(2), dx, dw;
    weight_products::Convolution shape = window.over(x, w);
    BURNISH_CHECK(same(dy.sizes(), {shape.images, shape.out_height, shape.out_width, shape.outputs}),
                  "convolution: the gradient of its result expected");
    if (wants_input) dx = call.output(0, x.sizes(), kFloat);
    if (wants_weight) dw = call.output(wants_input ? 1 : 0, w.sizes(), kFloat);
    float *of_x = dx.defined() ? dx.mutable_data_ptr<float>() : nullptr, *of_w = dw.defined() ? dw.mutable_data_ptr<float>() : nullptr;
    if (dy.numel() == 0 || x.numel() == 0) {
      if (of_x) std::fill_n(of_x, dx.numel(), 0.f);
      if (of_w) std::fill_n(of_w, dw.numel(), 0.f);
      return;
    }
    const float *flow = dy.const_data_ptr<float>(), *images = x.const_data_ptr<float>(), *kernels = w.const_data_ptr<float>();
    if (window.is_depthwise()) {
      depthwise::differentiate(window.kernel[0], flow, images, kernels, of_x, of_w, window.geometry(shape), window.strides[0],
                               of_x && is_streamed(of_x, shape.channels, dx.numel()));
    } else if (of_x && of_w && window.is_one_pixel() && suits_both(shape)) {
      pointwise_gradient::gradients(shape.pixels(), shape.outputs, shape.channels, flow, images, kernels, of_x, of_w);
    } else {
      if (of_x) input_gradient(shape, dy, kernels, of_x);
      if (of_w) weight_gradient(shape, dy, x, of_w);
    }
  }

  static void infer(Inference& inference) {
    size_t next = 0;
    if (inference.number("input")) inference.set_output(next++, ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT, inference.shape(1));
    if (inference.number("weight")) inference.set_output(next, ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT, inference.shape(2));
  }

 private:
  static bool suits_both(const weight_products::Convolution& shape) {
    return shape.pixels() >= kLeastPixelsOfBoth * get_num_threads() && shape.outputs * shape.channels <= kMostWeightsOfBoth &&
           std::max(shape.outputs, shape.channels) >= kLeastOfWider && std::min(shape.outputs, shape.channels) >= windows::kFewChannels;
  }

  void input_gradient(const weight_products::Convolution& shape, const Tensor& dy, const float* kernels, float* dx) const {
    if (!window.suits_winograd() || !winograd_wins(shape, shape.height, shape.width, kWeightsPerTile))
      return windows::input_gradient(shape, dy.const_data_ptr<float>(), kernels, dx);
    Tensor last = reordered(shape, kernels);
    winograd::convolve(images_of(dy), winograd::transformed(last.const_data_ptr<float>(), shape.outputs, shape.channels, true), 2 - shape.top,
                       2 - shape.left, nullptr, dx, shape.height, shape.width);
  }

  void weight_gradient(const weight_products::Convolution& shape, const Tensor& dy, const Tensor& x, float* dw) const {
    if (!window.suits_winograd() || !winograd_wins(shape, shape.out_height, shape.out_width, kWeightsPerTile))
      return windows::weight_gradient(shape, dy.const_data_ptr<float>(), x.const_data_ptr<float>(), dw);
    Tensor last = make_tensor({shape.outputs * windows::window_size(shape)});
    winograd_weights::weight_gradient(images_of(x), images_of(dy), shape.top, shape.left, last.mutable_data_ptr<float>());
    windows::reorder_kernels(shape, last.const_data_ptr<float>(), dw);
  }
};

struct Pooling {
  std::vector<int64_t> kernel, strides, pads;

  explicit Pooling(const Attributes& attributes)
      : kernel(attributes.numbers("kernel_shape")), strides(attributes.numbers("strides")), pads(attributes.numbers("pads")) {
    BURNISH_CHECK(kernel.size() == 2 && strides.size() == 2 && pads.size() == 4, "pooling: windows of two axes expected");
    BURNISH_CHECK(std::min({kernel[0], kernel[1], strides[0], strides[1]}) > 0 && *std::min_element(pads.begin(), pads.end()) >= 0,
                  "pooling: windows and steps of one or more, and pads of zero or more, expected");
  }

  max_pool::Pool over(const Tensor& x) const {
    BURNISH_CHECK(x.dim() == 4, "pooling: images [N, H, W, C] expected");
    int64_t rows = window_count(x.size(1), pads[0], pads[2], kernel[0], strides[0], 1);
    int64_t columns = window_count(x.size(2), pads[1], pads[3], kernel[1], strides[1], 1);
    return {x.size(0), x.size(1), x.size(2), x.size(3), rows, columns, kernel[0], kernel[1], strides[0], strides[1], pads[0], pads[1]};
  }
};

struct ChannelsLastMaxPool {
  Pooling pooling;

  explicit ChannelsLastMaxPool(const Attributes& attributes) : pooling(attributes) {}

  void run(Call& call) const {
    Tensor x = call.input(0);
    max_pool::Pool shape = pooling.over(x);
    Tensor y = call.output(0, {shape.images, shape.out_height, shape.out_width, shape.channels}, kFloat);
    max_pool::pool(shape, x.const_data_ptr<float>(), y.mutable_data_ptr<float>());
  }

  static void infer(Inference& inference) {
    std::vector<Extent> x = inference.shape(0);
    std::vector<int64_t> kernel = inference.numbers("kernel_shape"), strides = inference.numbers("strides"), pads = inference.numbers("pads");
    inference.set_output(0, ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT,
                         {x.at(0), extent_of_result(x.at(1), pads.at(0), pads.at(2), kernel.at(0), strides.at(0), 1),
                          extent_of_result(x.at(2), pads.at(1), pads.at(3), kernel.at(1), strides.at(1), 1), x.at(3)});
  }
};

struct ChannelsLastMaxPoolGrad {
  Pooling pooling;

  explicit ChannelsLastMaxPoolGrad(const Attributes& attributes) : pooling(attributes) {}

  // (dy, x, y) -> dx.
  void run(Call& call) const {
    Tensor dy = call.input(0), x = call.input(1), y = call.input(2);
    max_pool::Pool shape = pooling.over(x);
    BURNISH_CHECK(same(dy.sizes(), y.sizes()) && same(y.sizes(), {shape.images, shape.out_height, shape.out_width, shape.channels}),
                  "pooling: results and their gradient expected");
    Tensor dx = call.output(0, x.sizes(), kFloat);
    max_pool::differentiate(shape, dy.const_data_ptr<float>(), x.const_data_ptr<float>(), y.const_data_ptr<float>(), dx.mutable_data_ptr<float>());
  }

  static void infer(Inference& inference) { inference.set_output(0, ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT, inference.shape(1)); }
};

const Operator<ChannelsLastConv> channels_last_conv("ChannelsLastConv");
const Operator<ChannelsLastConvGrad> channels_last_conv_grad("ChannelsLastConvGrad");
const Operator<ChannelsLastMaxPool> channels_last_max_pool("ChannelsLastMaxPool");
const Operator<ChannelsLastMaxPoolGrad> channels_last_max_pool_grad("ChannelsLastMaxPoolGrad");

}  // namespace
}  // namespace burnish
