// The steps of LSTM and GRU layers, and their gradients, as operators of ONNX Runtime's (lstm.h, gru.h). `present` says which operands a node
// has.

#pragma once

#include <algorithm>
#include <vector>

#include "gru.h"
#include "lstm.h"
#include "operators.h"
#include "present_operands.h"

namespace burnish {
namespace {

// What the nodes of both kinds of layer say.
struct Layer {
  std::vector<int64_t> present;
  int64_t hidden, threads;
  bool reverse;

  explicit Layer(const Attributes& attributes)
      : present(attributes.numbers("present")),
        hidden(attributes.number("hidden_size")),
        threads(attributes.number("threads")),
        reverse(attributes.number("reverse")) {}

  // Of a tensor [T, N, `multiple` H].
  recurrent::Extents over(const Tensor& frames, int64_t multiple) const {
    BURNISH_CHECK(hidden > 0 && frames.dim() == 3 && frames.size(2) == multiple * hidden && frames.scalar_type() == kFloat,
                  "recurrent layer: float32 frames [T, N, ", multiple, " H] of ", hidden, " hidden units expected");
    return {frames.size(0), frames.size(1), hidden};
  }
};

// The numbers of an operand of these sizes; null where it is left out.
const float* numbers_of(const Tensor& tensor, bool is_present, Sizes sizes) {
  if (!is_present) return nullptr;
  BURNISH_CHECK(same(tensor.sizes(), sizes), "recurrent layer: an operand has another shape than its frames and hidden units ask for");
  return tensor.const_data_ptr<float>();
}

// An output that begins as an operand does, or with zeros.
float* begun(Call& call, size_t index, const recurrent::Extents& extents, const float* source) {
  float* data = call.output(index, {extents.sequences, extents.hidden}, kFloat).mutable_data_ptr<float>();
  if (source)
    std::copy_n(source, extents.states(), data);
  else
    std::fill_n(data, extents.states(), 0.f);
  return data;
}

float* frames_out(Call& call, size_t index, const recurrent::Extents& extents, int64_t multiple) {
  return call.output(index, {extents.frames, extents.sequences, multiple * extents.hidden}, kFloat).mutable_data_ptr<float>();
}

// The operands of a node by their places.
class Operands {
 public:
  Operands(const Call& call, const Layer& layer, size_t count) : present_(layer.present), tensors_(by_place(call, layer.present, count)) {
    present_.resize(count, 0);
  }

  const Tensor& at(size_t place) const { return tensors_[place]; }
  const float* states(size_t place, const recurrent::Extents& extents) const {
    return numbers_of(at(place), present_[place], {extents.sequences, extents.hidden});
  }
  const float* frames(size_t place, const recurrent::Extents& extents, int64_t multiple) const {
    return numbers_of(at(place), present_[place], {extents.frames, extents.sequences, multiple * extents.hidden});
  }
  const float* weight(size_t place, int64_t gates, int64_t hidden) const { return numbers_of(at(place), present_[place], {gates * hidden, hidden}); }
  const float* row(size_t place, int64_t hidden) const { return numbers_of(at(place), present_[place], {hidden}); }

 private:
  std::vector<int64_t> present_;
  std::vector<Tensor> tensors_;
};

// Shapes of outputs: like an input, with so many times the hidden size at the end.
void set_states(Inference& inference, size_t output, size_t input, int64_t multiple) {
  std::vector<Extent> shape = inference.shape(input);
  if (shape.empty()) return;
  shape.back() = {multiple * inference.number("hidden_size"), ""};
  inference.set_output(output, ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT, shape);
}

struct FusedLstmSteps {
  Layer layer;

  explicit FusedLstmSteps(const Attributes& attributes) : layer(attributes) {}

  // (z, r, initial h, initial c) -> h, the last h and c, c, the gates i o f, and g
  void run(Call& call) const {
    Parts parts(layer.threads);
    Operands operands(call, layer, 6);
    recurrent::Extents extents = layer.over(operands.at(0), lstm::kGates);
    const float *h = operands.states(2, extents), *c = operands.states(3, extents);
    lstm::States to{frames_out(call, 0, extents, 1), begun(call, 1, extents, h),       begun(call, 2, extents, c),
                    frames_out(call, 3, extents, 1), frames_out(call, 4, extents, 3), frames_out(call, 5, extents, 1)};
    const float* weight = operands.weight(1, lstm::kGates, extents.hidden);
    lstm::run(extents, operands.frames(0, extents, lstm::kGates), weight, layer.reverse, to);
  }

  static void infer(Inference& inference) {
    for (size_t output : {0, 3, 5}) set_states(inference, output, 0, 1);
    for (size_t output : {1, 2}) set_states(inference, output, output + 1, 1);
    set_states(inference, 4, 0, 3);
  }
};

struct FusedLstmStepsGrad {
  Layer layer;

  explicit FusedLstmStepsGrad(const Attributes& attributes) : layer(attributes) {}

  // (r, initial c, c, i o f, g, and the cotangents of h and of the last h and c) -> those of z and of the initial h and c
  void run(Call& call) const {
    Parts parts(layer.threads);
    Operands operands(call, layer, 10);
    recurrent::Extents extents = layer.over(operands.at(2), 1);
    lstm::Saved from{operands.weight(0, lstm::kGates, extents.hidden), operands.states(1, extents),    operands.frames(2, extents, 1),
                     operands.frames(3, extents, 3),                   operands.frames(4, extents, 1), operands.frames(5, extents, 1)};
    float *d_h = begun(call, 1, extents, operands.states(6, extents)), *d_c = begun(call, 2, extents, operands.states(7, extents));
    lstm::run_back(extents, from, layer.reverse, frames_out(call, 0, extents, lstm::kGates), d_h, d_c);
  }

  static void infer(Inference& inference) {
    set_states(inference, 0, 2, lstm::kGates);
    for (size_t output : {1, 2}) set_states(inference, output, 1, 1);
  }
};

struct FusedGruSteps {
  Layer layer;
  bool linear;

  explicit FusedGruSteps(const Attributes& attributes) : layer(attributes), linear(attributes.number("linear_before_reset")) {}

  // (z, r, initial h, bias) -> h, the last h, u and r, n, and with a linear product that
  void run(Call& call) const {
    Parts parts(layer.threads);
    Operands operands(call, layer, 5);
    recurrent::Extents extents = layer.over(operands.at(0), gru::kGates);
    const float* h = operands.states(2, extents);
    gru::States to{frames_out(call, 0, extents, 1), begun(call, 1, extents, h), frames_out(call, 2, extents, 2), frames_out(call, 3, extents, 1),
                   linear ? frames_out(call, 4, extents, 1) : nullptr};
    const float *weight = operands.weight(1, gru::kGates, extents.hidden), *bias = operands.row(3, extents.hidden);
    gru::run(extents, operands.frames(0, extents, gru::kGates), weight, bias, layer.reverse, to);
  }

  static void infer(Inference& inference) {
    for (size_t output : {0, 3}) set_states(inference, output, 0, 1);
    set_states(inference, 1, 2, 1);
    set_states(inference, 2, 0, 2);
    if (inference.number("linear_before_reset")) set_states(inference, 4, 0, 1);
  }
};

struct FusedGruStepsGrad {
  Layer layer;
  bool linear;

  explicit FusedGruStepsGrad(const Attributes& attributes) : layer(attributes), linear(attributes.number("linear_before_reset")) {}

  // (r, initial h, h, u and r, n, the linear product, and the cotangents of h and of the last h) -> those of z, of the initial h, and of the
  // linear product
  void run(Call& call) const {
    Parts parts(layer.threads);
    Operands operands(call, layer, 9);
    recurrent::Extents extents = layer.over(operands.at(2), 1);
    gru::Saved from{operands.weight(0, gru::kGates, extents.hidden), operands.states(1, extents),    operands.frames(2, extents, 1),
                    operands.frames(3, extents, 2),                  operands.frames(4, extents, 1), operands.frames(5, extents, 1),
                    operands.frames(6, extents, 1)};
    float *dz = frames_out(call, 0, extents, gru::kGates), *d_h = begun(call, 1, extents, operands.states(7, extents));
    gru::run_back(extents, from, layer.reverse, dz, linear ? frames_out(call, 2, extents, 1) : nullptr, d_h);
  }

  static void infer(Inference& inference) {
    set_states(inference, 0, 2, gru::kGates);
    set_states(inference, 1, 1, 1);
    if (inference.number("linear_before_reset")) set_states(inference, 2, 2, 1);
  }
};

const Operator<FusedLstmSteps> fused_lstm_steps("FusedLstmSteps");
const Operator<FusedLstmStepsGrad> fused_lstm_steps_grad("FusedLstmStepsGrad");
const Operator<FusedGruSteps> fused_gru_steps("FusedGruSteps");
const Operator<FusedGruStepsGrad> fused_gru_steps_grad("FusedGruStepsGrad");

}  // namespace
}  // namespace burnish
