// Batch normalization by statistics of several workers, and its gradient, as operators of ONNX Runtime's (synchronized.h).

#pragma once

#include "normalization_operators.h"
#include "synchronized.h"

namespace burnish {
namespace {

template <typename Number>
const Number* channels_of(const Tensor& tensor, int64_t channels, const char* name) {
  BURNISH_CHECK(tensor.dim() == 1 && tensor.size(0) == channels && tensor.scalar_type() == type_of<Number>, "batch normalization: ", name,
                ": a vector of ", channels, " values expected");
  return tensor.const_data_ptr<Number>();
}

// Lets columns of values say what x - center is computed by: the pivot, and float(center - pivot).
template <typename Values>
void set_centering(Values& values, int64_t channels, const Tensor& pivot, const Tensor& center, int64_t first_place) {
  const float* near = channels_of<float>(pivot, channels, "pivot");
  values.set(first_place, near);
  values.set(first_place + 1, away_from_pivot(near, channels_of<double>(center, channels, "center"), channels).data());
}

// An operand of the shape of x, or none.
const float* beside(const Tensor& tensor, const Tensor& x, const char* name) {
  BURNISH_CHECK(!tensor.defined() || same(tensor.sizes(), x.sizes()), "batch normalization: ", name, " of the shape of x expected");
  return floats_of(tensor);
}

// What nodes over images say: how their channels lie, and the activation.
struct OverImages {
  std::vector<int64_t> present;
  int64_t activation;
  double limit;
  bool channels_last;

  explicit OverImages(const Attributes& attributes)
      : present(attributes.numbers("present")),
        activation(attributes.number("activation")),
        limit(attributes.real("limit")),
        channels_last(attributes.number("channels_last", 0)) {}

  Tensor rows(const Tensor& x) const { return channels_last ? rows_of(x) : x; }
};

Extent channel_extent(const Inference& inference, size_t input) {
  std::vector<Extent> shape = inference.shape(input);
  return inference.number("channels_last", 0) ? shape.back() : shape.at(1);
}

// A vector of two blocks of channels, and as many numbers ahead of them.
Extent blocks_of(const Extent& channels, int64_t ahead) { return {channels.is_known() ? ahead + 2 * channels.number : -1, ""}; }

struct FusedBatchNormMoments {
  bool channels_last;

  explicit FusedBatchNormMoments(const Attributes& attributes) : channels_last(attributes.number("channels_last", 0)) {}

  // x -> moments [1 + 2 C]: count, means, sums of squares about them; and the pivot [C], near the means
  void run(Call& call) const {
    Tensor given = call.input(0), x = channels_last ? rows_of(given) : given;
    with_layout(x, [&](const auto& layout) {
      double* found = call.output(0, {1 + 2 * layout.channels}, kDouble).template mutable_data_ptr<double>();
      float* pivot = call.output(1, {layout.channels}, kFloat).template mutable_data_ptr<float>();
      find_moments(floats_of(x), x.numel(), layout, found, pivot);
    });
  }

  static void infer(Inference& inference) {
    Extent channels = channel_extent(inference, 0);
    inference.set_output(0, ONNX_TENSOR_ELEMENT_DATA_TYPE_DOUBLE, {blocks_of(channels, 1)});
    inference.set_output(1, ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT, {channels});
  }
};

struct FusedBatchNormMerge {
  double epsilon;

  explicit FusedBatchNormMerge(const Attributes& attributes) : epsilon(attributes.real("epsilon")) {}

  // (gathered [parts, 1 + 2 C], scale) -> count [1], mean and inverse_std [C] in float64; mean, inverse_std, variance and gain [C]
  void run(Call& call) const {
    Tensor gathered = call.input(0);
    BURNISH_CHECK(gathered.dim() == 2 && gathered.size(1) % 2 == 1, "batch normalization: moments of several parts expected");
    int64_t channels = gathered.size(1) / 2;
    auto exact = [&](size_t index, int64_t extent) { return call.output(index, {extent}, kDouble).mutable_data_ptr<double>(); };
    auto vector = [&](size_t index) { return call.output(index, {channels}, kFloat).mutable_data_ptr<float>(); };
    merge_moments(gathered.const_data_ptr<double>(), gathered.size(0), channels, channels_of<float>(call.input(1), channels, "scale"), epsilon,
                  {exact(0, 1), exact(1, channels), exact(2, channels), vector(3), vector(4), vector(5), vector(6)});
  }

  static void infer(Inference& inference) {
    std::vector<Extent> vector = inference.shape(1);
    inference.set_output(0, ONNX_TENSOR_ELEMENT_DATA_TYPE_DOUBLE, {Extent{1, ""}});
    for (size_t index = 1; index < 7; ++index)
      inference.set_output(index, index < 3 ? ONNX_TENSOR_ELEMENT_DATA_TYPE_DOUBLE : ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT, vector);
  }
};

struct FusedBatchNormApply : OverImages {
  using OverImages::OverImages;

  // (x, pivot, center, gain, bias, added) -> y = activation((x - center) gain + bias + added)
  void run(Call& call) const {
    std::vector<Tensor> operands = by_place(call, present, 6);
    Tensor x = rows(operands[0]);
    const float *source = floats_of(x), *more = beside(operands[5], operands[0], "what is added");
    float* target = call.output(0, operands[0].sizes(), kFloat).mutable_data_ptr<float>();
    with_layout(x, [&](const auto& layout) {
      using Values = typename std::decay_t<decltype(layout)>::template Values<4>;
      Values values(layout);
      set_centering(values, layout.channels, operands[1], operands[2], 0);
      values.set(2, channels_of<float>(operands[3], layout.channels, "gain"));
      values.set(3, channels_of<float>(operands[4], layout.channels, "bias"));
      apply_normalization(layout, values, source, more, activation, limit, target);
    });
  }

  static void infer(Inference& inference) { inference.set_output(0, ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT, inference.shape(0)); }
};

struct FusedBatchNormGradSums : OverImages {
  using OverImages::OverImages;

  // (dy, x, pivot, center, y, gain, bias, more) -> sums, float64 [2 C]; and the gradient before the activation, where it is asked for. The gradient of the output is dy + more. With gain and bias in place of y
  // nothing was added to the layer's result.
  void run(Call& call) const {
    std::vector<Tensor> operands = by_place(call, present, 8);
    const Tensor &whole = operands[1], &more = operands[7];
    Tensor x = rows(whole), before;
    if (call.output_count() > 1)
      before = call.output(1, whole.sizes(), kFloat);
    else if (more.defined())
      before = make_tensor(whole.sizes());
    Operands<float> from{beside(operands[0], whole, "dy"), floats_of(x), beside(operands[4], whole, "y"),
                         beside(more, whole, "more"),      nullptr,      limit_of(activation, limit)};
    BURNISH_CHECK(activation == kNone || from.y || (operands[5].defined() && operands[6].defined()),
                  "batch normalization: y, or gain and bias, expected");
    float* kept = before.defined() ? before.mutable_data_ptr<float>() : nullptr;
    with_layout(x, [&](const auto& layout) {
      using Values = typename std::decay_t<decltype(layout)>::template Values<kValues>;
      int64_t channels = layout.channels;
      Values values(layout);
      set_centering(values, channels, operands[2], operands[3], kPilot);
      if (operands[5].defined()) values.set(kGain, channels_of<float>(operands[5], channels, "gain"));
      if (operands[6].defined()) values.set(kBias, channels_of<float>(operands[6], channels, "bias"));
      sum_gradients(layout, values, from, activation, kept, call.output(0, {2 * channels}, kDouble).template mutable_data_ptr<double>());
    });
  }

  static void infer(Inference& inference) {
    inference.set_output(0, ONNX_TENSOR_ELEMENT_DATA_TYPE_DOUBLE, {blocks_of(inference.shape(2).at(0), 0)});
    if (inference.number("output_count") > 1) inference.set_output(1, ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT, inference.shape(1));
  }
};

struct FusedBatchNormGradMerge {
  explicit FusedBatchNormGradMerge(const Attributes&) {}

  // (total [2 C], count [1], inverse_std [C], all float64, scale) -> slope, offset, dscale, dbias [C]
  void run(Call& call) const {
    int64_t channels = call.input(3).numel();
    auto vector = [&](size_t index) { return call.output(index, {channels}, kFloat).mutable_data_ptr<float>(); };
    merge_gradients(channels_of<double>(call.input(0), 2 * channels, "sums"), *channels_of<double>(call.input(1), 1, "count"),
                    channels_of<double>(call.input(2), channels, "inverse deviation"), channels_of<float>(call.input(3), channels, "scale"),
                    channels, {vector(0), vector(1), vector(2), vector(3)});
  }

  static void infer(Inference& inference) {
    for (size_t index = 0; index < 4; ++index) inference.set_output(index, ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT, inference.shape(3));
  }
};

struct FusedBatchNormGradApply : OverImages {
  using OverImages::OverImages;

  // (dy, x, pivot, center, gain, slope, offset, y, bias) -> dx = g gain + (x - center) slope + offset of the gradient g before the activation
  void run(Call& call) const {
    std::vector<Tensor> operands = by_place(call, present, 9);
    const Tensor& whole = operands[1];
    Tensor x = rows(whole);
    Operands<float> from{beside(operands[0], whole, "dy"), floats_of(x), beside(operands[7], whole, "y"), nullptr, nullptr,
                         limit_of(activation, limit)};
    BURNISH_CHECK(activation == kNone || from.y || operands[8].defined(), "batch normalization: y or the bias expected");
    float* target = call.output(0, whole.sizes(), kFloat).mutable_data_ptr<float>();
    with_layout(x, [&](const auto& layout) {
      using Values = typename std::decay_t<decltype(layout)>::template Values<kValues>;
      int64_t channels = layout.channels;
      Values values(layout);
      set_centering(values, channels, operands[2], operands[3], kPilot);
      values.set(kGain, channels_of<float>(operands[4], channels, "gain"));
      values.set(kSlope, channels_of<float>(operands[5], channels, "slope"));
      values.set(kOffset, channels_of<float>(operands[6], channels, "offset"));
      if (operands[8].defined()) values.set(kBias, channels_of<float>(operands[8], channels, "bias"));
      apply_gradient(layout, values, from, activation, target);
    });
  }

  static void infer(Inference& inference) { inference.set_output(0, ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT, inference.shape(1)); }
};

const Operator<FusedBatchNormMoments> fused_batch_norm_moments("FusedBatchNormMoments");
const Operator<FusedBatchNormMerge> fused_batch_norm_merge("FusedBatchNormMerge");
const Operator<FusedBatchNormApply> fused_batch_norm_apply("FusedBatchNormApply");
const Operator<FusedBatchNormGradSums> fused_batch_norm_grad_sums("FusedBatchNormGradSums");
const Operator<FusedBatchNormGradMerge> fused_batch_norm_grad_merge("FusedBatchNormGradMerge");
const Operator<FusedBatchNormGradApply> fused_batch_norm_grad_apply("FusedBatchNormGradApply");

}  // namespace
}  // namespace burnish
