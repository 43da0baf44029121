// Batch normalization in training, with the addition and the activation behind it, and its gradient, as operators of ONNX Runtime's
// (batch_norm_forward.h, batch_norm_backward.h). Operands that a layer lacks are left out: `present` says which are there.

#pragma once

#include <cmath>
#include <vector>

#include "batch_norm_backward.h"
#include "batch_norm_forward.h"
#include "batch_norm_planes.h"
#include "operators.h"
#include "present_operands.h"

namespace burnish {
namespace {

const float* floats_of(const Tensor& tensor) { return tensor.defined() ? tensor.const_data_ptr<float>() : nullptr; }

// Images [N, H, W, C] as rows of their channels.
Tensor rows_of(const Tensor& x) {
  if (!x.defined()) return x;
  BURNISH_CHECK(x.dim() >= 1, "batch normalization: a tensor with its channels last expected");
  int64_t channels = x.size(-1);
  return Tensor(x.mutable_data_ptr(), {channels ? x.numel() / channels : 0, channels}, {channels, 1}, x.scalar_type(), x.memory());
}

// Calls `run` with how the elements of [N, C, ...] are walked over: where a plane is one element, channels lie side by side.
template <typename Run>
void with_layout(const Tensor& x, const Run& run) {
  BURNISH_CHECK(x.dim() >= 2, "batch normalization: a tensor of two axes or more expected");
  Planes planes(x);
  if (planes.run == 1)
    run(Walk(x));
  else
    run(planes);
}

struct FusedBatchNorm {
  std::vector<int64_t> present;
  double epsilon, limit;
  int64_t activation;
  bool channels_last;

  explicit FusedBatchNorm(const Attributes& attributes)
      : present(attributes.numbers("present")),
        epsilon(attributes.real("epsilon")),
        limit(attributes.real("limit")),
        activation(attributes.number("activation")),
        channels_last(attributes.number("channels_last", 0)) {}

  // (x, scale, bias, added) -> y, mean, inverse_std, variance, saved
  void run(Call& call) const {
    std::vector<Tensor> operands = by_place(call, present, 4);
    BURNISH_CHECK(operands[0].dim() >= 2, "batch normalization: a tensor of two axes or more expected");
    Tensor y = call.output(0, operands[0].sizes(), kFloat), x = channels_last ? rows_of(operands[0]) : operands[0];
    int64_t channels = x.size(1);
    std::vector<float*> vectors;
    for (size_t index = 1; index < 4; ++index) vectors.push_back(call.output(index, {channels}, kFloat).mutable_data_ptr<float>());
    vectors.push_back(call.output(4, {2, channels}, kFloat).mutable_data_ptr<float>());
    if (x.numel() == 0) {
      for (size_t index = 0; index < vectors.size(); ++index) std::fill_n(vectors[index], index == 3 ? 2 * channels : channels, NAN);
      return;
    }
    with_layout(x, [&](const auto& layout) {
      train(layout, floats_of(x), floats_of(operands[3]), floats_of(operands[1]), floats_of(operands[2]), epsilon, activation, limit,
            y.mutable_data_ptr<float>(), {vectors[0], vectors[1], vectors[2], vectors[3]});
    });
  }

  static void infer(Inference& inference) {
    std::vector<Extent> shape = inference.shape(0), vector{inference.number("channels_last", 0) ? shape.back() : shape.at(1)};
    inference.set_output(0, ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT, shape);
    for (size_t index = 1; index < 4; ++index) inference.set_output(index, ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT, vector);
    inference.set_output(4, ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT, {Extent{2, ""}, vector[0]});
  }
};

struct FusedBatchNormGrad {
  std::vector<int64_t> present;
  double limit;
  int64_t activation;
  bool channels_last;

  explicit FusedBatchNormGrad(const Attributes& attributes)
      : present(attributes.numbers("present")),
        limit(attributes.real("limit")),
        activation(attributes.number("activation")),
        channels_last(attributes.number("channels_last", 0)) {}

  // (dy, x, scale, inverse_std, saved, y, more, bias) -> dx, dscale, dbias, and, where a fourth is asked for, the gradient before the
  // activation
  void run(Call& call) const {
    std::vector<Tensor> operands = by_place(call, present, 8);
    BURNISH_CHECK(operands[1].dim() >= 2 && same(operands[0].sizes(), operands[1].sizes()),
                  "batch normalization: dy of the shape of x expected");
    Sizes sizes = operands[1].sizes();
    const Tensor x = channels_last ? rows_of(operands[1]) : operands[1], &more = operands[6];
    int64_t channels = x.size(1);
    Tensor dx = call.output(0, sizes, kFloat), dscale = call.output(1, {channels}, kFloat), dbias = call.output(2, {channels}, kFloat);
    Tensor before;
    if (call.output_count() > 3)
      before = call.output(3, sizes, kFloat);
    else if (more.defined())
      before = make_tensor(x.sizes());
    if (x.numel() == 0) {
      std::fill_n(dscale.mutable_data_ptr<float>(), channels, 0.f);
      std::fill_n(dbias.mutable_data_ptr<float>(), channels, 0.f);
      return;
    }
    Operands<float> from{floats_of(operands[0]), floats_of(x),           floats_of(operands[5]), floats_of(more),
                         floats_of(operands[7]), limit_of(activation, limit)};
    BURNISH_CHECK(activation == kNone || from.y || from.bias, "batch normalization: y or the bias expected");
    float* kept = before.defined() ? before.mutable_data_ptr<float>() : nullptr;
    Gradients<float> to{dx.mutable_data_ptr<float>(), dscale.mutable_data_ptr<float>(), dbias.mutable_data_ptr<float>()};
    const float *scale = floats_of(operands[2]), *inverse_std = floats_of(operands[3]), *saved = floats_of(operands[4]);
    with_layout(x, [&](const auto& layout) {
      if (activation == kNone)
        differentiate<float, false, Result::kKept>(layout, from, scale, inverse_std, saved, kept, to);
      else if (from.y)
        differentiate<float, true, Result::kKept>(layout, from, scale, inverse_std, saved, kept, to);
      else
        differentiate<float, true, Result::kAgain>(layout, from, scale, inverse_std, saved, kept, to);
    });
  }

  static void infer(Inference& inference) {
    std::vector<Extent> shape = inference.shape(1), vector{inference.number("channels_last", 0) ? shape.back() : shape.at(1)};
    inference.set_output(0, ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT, shape);
    for (size_t index = 1; index < 3; ++index) inference.set_output(index, ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT, vector);
    if (inference.number("output_count") > 3) inference.set_output(3, ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT, shape);
  }
};

const Operator<FusedBatchNorm> fused_batch_norm("FusedBatchNorm");
const Operator<FusedBatchNormGrad> fused_batch_norm_grad("FusedBatchNormGrad");

}  // namespace
}  // namespace burnish
