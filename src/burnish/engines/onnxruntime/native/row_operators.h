// Standardization of rows and softmax cross-entropy, and their gradients, as operators of ONNX Runtime's (standardize.h, cross_entropy.h).
// Operands that a layer lacks are left out: `present` says which are there.

#pragma once

#include <vector>

#include "cross_entropy.h"
#include "operators.h"
#include "present_operands.h"
#include "standardize.h"

namespace burnish {
namespace {

// One float32 number for each of `count` places; null where the operand is left out.
const float* checked_floats(const Tensor& tensor, int64_t count) {
  BURNISH_CHECK(!tensor.defined() || (tensor.scalar_type() == kFloat && tensor.numel() == count), "standardize: ", count,
                " float32 numbers expected, found ", tensor.defined() ? tensor.numel() : 0);
  return rows::data_of(tensor);
}

struct FusedStandardize {
  std::vector<int64_t> present;
  int64_t axis, centered;
  double epsilon, offset;

  explicit FusedStandardize(const Attributes& attributes)
      : present(attributes.numbers("present")),
        axis(attributes.number("axis")),
        centered(attributes.number("centered")),
        epsilon(attributes.real("epsilon")),
        offset(attributes.real("offset")) {}

  // (x, scale, bias) -> y, mean, shift, inverse
  void run(Call& call) const {
    std::vector<Tensor> operands = by_place(call, present, 3);
    const Tensor& x = operands[0];
    rows::Shape shape = rows::shape_of(x, axis);
    std::vector<int64_t> sizes = rows::statistic_sizes(x, axis);
    rows::StandardizedRows to{call.output(0, x.sizes(), kFloat).mutable_data_ptr<float>(), nullptr, nullptr, nullptr};
    float** statistics[] = {&to.mean, &to.shift, &to.inverse};
    for (size_t index = 0; index < 3; ++index) *statistics[index] = call.output(index + 1, sizes, kFloat).mutable_data_ptr<float>();
    const float *scale = checked_floats(operands[1], shape.columns), *bias = checked_floats(operands[2], shape.columns);
    rows::standardize_rows(shape, rows::data_of(x), scale, bias, epsilon, offset, centered, to);
  }

  static void infer(Inference& inference) {
    std::vector<Extent> shape = inference.shape(0), statistics = shape;
    int64_t axis = inference.number("axis");
    for (int64_t place = static_cast<int64_t>(shape.size()) + axis; place < static_cast<int64_t>(shape.size()); ++place)
      if (place >= 0) statistics[place] = {1, ""};
    inference.set_output(0, ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT, shape);
    for (size_t index = 1; index < 4; ++index) inference.set_output(index, ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT, statistics);
  }
};

struct FusedStandardizeGrad {
  std::vector<int64_t> present;
  int64_t axis, centered, parameters;
  double offset;

  explicit FusedStandardizeGrad(const Attributes& attributes)
      : present(attributes.numbers("present")),
        axis(attributes.number("axis")),
        centered(attributes.number("centered")),
        parameters(attributes.number("parameters")),
        offset(attributes.real("offset")) {}

  // (dy, x, mean, shift, inverse, scale) -> dx, dscale, dbias, the latter two where there are `parameters`
  void run(Call& call) const {
    std::vector<Tensor> operands = by_place(call, present, 6);
    const Tensor &dy = operands[0], &x = operands[1];
    rows::Shape shape = rows::shape_of(x, axis);
    // Memory without elements is undefined.
    BURNISH_CHECK(same(dy.sizes(), x.sizes()) && operands[4].defined() == (shape.rows > 0) && operands[2].defined() == operands[3].defined(),
                  "standardize: gradient, rows and statistics of one shape expected");
    rows::RowFlows from{dy.const_data_ptr<float>(),
                        rows::data_of(x),
                        checked_floats(operands[2], shape.rows),
                        checked_floats(operands[3], shape.rows),
                        checked_floats(operands[4], shape.rows),
                        checked_floats(operands[5], shape.columns)};
    float *dx = call.output(0, x.sizes(), kFloat).mutable_data_ptr<float>(), *dscale = nullptr, *dbias = nullptr;
    if (parameters) {
      std::vector<int64_t> sizes(x.sizes().end() + axis, x.sizes().end());
      dscale = call.output(1, sizes, kFloat).mutable_data_ptr<float>();
      dbias = call.output(2, sizes, kFloat).mutable_data_ptr<float>();
    }
    rows::standardize_rows_gradient(shape, from, offset, centered, dx, dscale, dbias);
  }

  static void infer(Inference& inference) {
    std::vector<Extent> shape = inference.shape(1);
    inference.set_output(0, ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT, shape);
    int64_t columns = -inference.number("axis");
    if (!inference.number("parameters") || columns < 0 || columns > static_cast<int64_t>(shape.size())) return;
    std::vector<Extent> row(shape.end() - columns, shape.end());
    for (size_t index = 1; index < 3; ++index) inference.set_output(index, ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT, row);
  }
};

struct FusedCrossEntropy {
  int64_t ignored;

  explicit FusedCrossEntropy(const Attributes& attributes) : ignored(attributes.number("ignored")) {}

  // (logits, labels) -> total, counted, saved
  void run(Call& call) const {
    cross_entropy::Rows rows = cross_entropy::rows_of(call.input(0), call.input(1), ignored);
    std::vector<int64_t> scalar;
    float *total = call.output(0, scalar, kFloat).mutable_data_ptr<float>(), *counted = call.output(1, scalar, kFloat).mutable_data_ptr<float>();
    cross_entropy::sum_terms(rows, ignored, total, counted, call.output(2, {rows.count, 2}, kFloat).mutable_data_ptr<float>());
  }

  static void infer(Inference& inference) {
    for (size_t index = 0; index < 2; ++index) inference.set_output(index, ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT, {});
    inference.set_output(2, ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT, {inference.shape(0).at(0), {2, ""}});
  }
};

struct FusedCrossEntropyGrad {
  int64_t ignored;

  explicit FusedCrossEntropyGrad(const Attributes& attributes) : ignored(attributes.number("ignored")) {}

  // (logits, labels, saved, flow) -> dlogits
  void run(Call& call) const {
    Tensor logits = call.input(0);
    cross_entropy::Rows rows = cross_entropy::rows_of(logits, call.input(1), ignored);
    Tensor gradient = call.output(0, logits.sizes(), kFloat);
    cross_entropy::gradient_of_logits(rows, ignored, call.input(2), call.input(3), gradient.mutable_data_ptr<float>());
  }

  static void infer(Inference& inference) { inference.set_output(0, ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT, inference.shape(0)); }
};

const Operator<FusedStandardize> fused_standardize("FusedStandardize");
const Operator<FusedStandardizeGrad> fused_standardize_grad("FusedStandardizeGrad");
const Operator<FusedCrossEntropy> fused_cross_entropy("FusedCrossEntropy");
const Operator<FusedCrossEntropyGrad> fused_cross_entropy_grad("FusedCrossEntropyGrad");

}  // namespace
}  // namespace burnish
