// Elementwise programs as operators of ONNX Runtime's (elementwise.h).

#pragma once

#include <vector>

#include "elementwise.h"
#include "operators.h"

namespace burnish {
namespace {

// What a node says of its program. Lists that may be empty have one number too many: an attribute cannot be empty.
struct Held {
  std::vector<double> constants;
  std::vector<int64_t> code;

  Held(const Attributes& attributes, bool has_one_too_many) : code(attributes.numbers("program")) {
    for (float constant : attributes.floats("constants")) constants.push_back(constant);
    int64_t count = attributes.number("constant_count");
    BURNISH_CHECK(count >= 0 && count <= static_cast<int64_t>(constants.size()), "elementwise: no ", count, " constants");
    constants.resize(static_cast<size_t>(count));
    if (has_one_too_many) code.pop_back();
  }

  Program program() const { return {constants, code}; }
};

// The shape that the shapes of inputs broadcast to, as far as it is known.
std::vector<Extent> broadcast_inputs(const Inference& inference, size_t first, size_t count) {
  std::vector<Extent> result;
  for (size_t index = first; index < first + count; ++index) {
    std::vector<Extent> shape = inference.shape(index);
    if (shape.size() > result.size()) result.insert(result.begin(), shape.size() - result.size(), Extent{1, ""});
    for (size_t axis = 0; axis < shape.size(); ++axis) {
      Extent& extent = result[result.size() - shape.size() + axis];
      // One that is not known may be one: a number beside it, unless that is one, is what both broadcast to.
      bool is_one = extent.number == 1;
      if (is_one || (!extent.is_known() && shape[axis].is_known() && shape[axis].number != 1)) extent = shape[axis];
    }
  }
  return result;
}

struct FusedElementwise {
  Held held;
  std::vector<int64_t> types;

  explicit FusedElementwise(const Attributes& attributes) : held(attributes, false), types(attributes.numbers("dtypes")) {}

  void run(Call& call) const {
    std::vector<Tensor> tensors = call.inputs(), results;
    Form form = form_of(tensors);
    for (size_t i = 0; i < types.size(); ++i) results.push_back(call.output(i, form.sizes, scalar_type_of(types[i])));
    burnish::run(Pass(held.program(), tensors.data(), tensors.size(), form, results));
  }

  static void infer(Inference& inference) {
    std::vector<Extent> shape = broadcast_inputs(inference, 0, inference.input_count());
    std::vector<int64_t> types = inference.numbers("dtypes");
    for (size_t i = 0; i < types.size(); ++i) inference.set_output(i, types[i], shape);
  }
};

struct FusedElementwiseSums {
  Held held;
  std::vector<int64_t> types, summed;
  int64_t kept;

  explicit FusedElementwiseSums(const Attributes& attributes)
      : held(attributes, true), types(attributes.numbers("dtypes")), summed(attributes.numbers("summed")), kept(attributes.number("kept")) {
    types.pop_back();
  }

  void run(Call& call) const {
    std::vector<Tensor> tensors = call.inputs(), results, sums;
    Form form = form_of(tensors);
    std::vector<int64_t> sizes = kept_sizes(form, kept);
    for (size_t i = 0; i < types.size(); ++i) results.push_back(call.output(i, form.sizes, scalar_type_of(types[i])));
    for (size_t i = 0; i < summed.size(); ++i) sums.push_back(call.output(types.size() + i, sizes, kFloat));
    run_and_sum(Pass(held.program(), tensors.data(), tensors.size(), form, results), form, summed, kept, sums);
  }

  static void infer(Inference& inference) {
    std::vector<Extent> shape = broadcast_inputs(inference, 0, inference.input_count());
    std::vector<int64_t> types = inference.numbers("dtypes");
    size_t kept = static_cast<size_t>(inference.number("kept")), count = types.size() - 1, sums = inference.numbers("summed").size();
    for (size_t i = 0; i < count; ++i) inference.set_output(i, types[i], shape);
    BURNISH_CHECK(kept <= shape.size(), "elementwise: no ", static_cast<int64_t>(kept), " axes to keep");
    std::vector<Extent> of_sums(shape.end() - kept, shape.end());
    for (size_t i = 0; i < sums; ++i) inference.set_output(count + i, ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT, of_sums);
  }
};

// One program over groups of operands, each of a shape of its own: what updates small parameters.
struct FusedElementwiseGroups {
  Held held;
  std::vector<int64_t> types;
  size_t operands;  // of a group

  explicit FusedElementwiseGroups(const Attributes& attributes)
      : held(attributes, false), types(attributes.numbers("dtypes")), operands(static_cast<size_t>(attributes.number("operands"))) {}

  void run(Call& call) const {
    std::vector<Tensor> tensors = call.inputs();
    BURNISH_CHECK(operands > 0 && tensors.size() % operands == 0, "elementwise: whole groups of operands expected");
    Passes passes;
    for (size_t group = 0; group < tensors.size() / operands; ++group) {
      std::vector<Tensor> read(tensors.begin() + group * operands, tensors.begin() + (group + 1) * operands), results;
      Form form = form_of(read);
      for (size_t i = 0; i < types.size(); ++i)
        results.push_back(call.output(group * types.size() + i, form.sizes, scalar_type_of(types[i])));
      passes.add(Pass(held.program(), read.data(), read.size(), form, results));
    }
    passes.run();
  }

  static void infer(Inference& inference) {
    std::vector<int64_t> types = inference.numbers("dtypes");
    size_t operands = static_cast<size_t>(inference.number("operands"));
    for (size_t group = 0; operands && group < inference.input_count() / operands; ++group) {
      std::vector<Extent> shape = broadcast_inputs(inference, group * operands, operands);
      for (size_t i = 0; i < types.size(); ++i) inference.set_output(group * types.size() + i, types[i], shape);
    }
  }
};

const Operator<FusedElementwise> fused_elementwise("FusedElementwise");
const Operator<FusedElementwiseSums> fused_elementwise_sums("FusedElementwiseSums");
const Operator<FusedElementwiseGroups> fused_elementwise_groups("FusedElementwiseGroups");

}  // namespace
}  // namespace burnish
