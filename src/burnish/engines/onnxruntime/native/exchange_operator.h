// An exchange with other workers within a graph: a function of Python's makes it, which is told the number of the exchange.
//
// Exchanges of a graph are chained: the last input and the last output of each are a token, so that ONNX Runtime runs them in one order.

#pragma once

#include <atomic>
#include <vector>

#include "operators.h"

namespace burnish {

// An operand as the function gets it: its memory, its extents, and its type as ONNX numbers it.
struct ExchangeOperand {
  const void* data;
  const int64_t* sizes;
  int64_t rank, type;
};

// Makes an exchange; returns 1 where it is made. `context` is for burnish_exchange_output.
using ExchangeFunction = int (*)(int64_t number, const ExchangeOperand* operands, int64_t count, void* context);

inline std::atomic<ExchangeFunction> exchange_function{nullptr};

namespace {

struct Exchange {
  int64_t number;
  bool chained;

  explicit Exchange(const Attributes& attributes) : number(attributes.number("number")), chained(attributes.number("chained")) {}

  // (operands..., token) -> results..., token
  void run(Call& call) const {
    ExchangeFunction function = exchange_function.load();
    BURNISH_CHECK(function, "an exchange between workers ran outside of a session of burnish");
    size_t count = call.input_count() - chained;
    std::vector<std::vector<int64_t>> sizes(count);
    std::vector<ExchangeOperand> operands(count);
    for (size_t index = 0; index < count; ++index) operands[index] = operand(call, index, sizes[index]);
    BURNISH_CHECK(function(number, operands.data(), static_cast<int64_t>(count), call.context()) == 1, "exchange ", number,
                  " between workers failed");
    if (chained) call.output(call.output_count() - 1, {1}, kLong).mutable_data_ptr<int64_t>()[0] = number;
  }

  static ExchangeOperand operand(const Call& call, size_t index, std::vector<int64_t>& sizes) {
    const OrtValue* value;
    check_call(api->KernelContext_GetInput(call.context(), index, &value));
    Information information;
    check_call(api->GetTensorTypeAndShape(value, &information.held));
    sizes = sizes_of(information.held);
    void* data;
    check_call(api->GetTensorMutableData(const_cast<OrtValue*>(value), &data));
    return {data, sizes.data(), static_cast<int64_t>(sizes.size()), onnx_type_of(information.held)};
  }

  // Types and shapes of the outputs, one after the other; an extent that is not known is -1. The extents have one too many: an attribute
  // cannot be empty.
  static void infer(Inference& inference) {
    std::vector<int64_t> types = inference.numbers("types"), ranks = inference.numbers("ranks"), extents = inference.numbers("extents");
    size_t next = 0;
    for (size_t index = 0; index < types.size(); ++index) {
      std::vector<Extent> shape;
      for (int64_t axis = 0; axis < ranks[index]; ++axis) shape.push_back({extents.at(next++), ""});
      inference.set_output(index, types[index], shape);
    }
  }
};

const Operator<Exchange> exchange("Exchange");

}  // namespace
}  // namespace burnish

// Lets this function make the exchanges of all sessions.
extern "C" [[gnu::visibility("default")]] void burnish_set_exchange(burnish::ExchangeFunction function) { burnish::exchange_function = function; }

// Gives the memory of a result of an exchange, of this shape; returns 0 where there is some.
extern "C" [[gnu::visibility("default")]] int burnish_exchange_output(void* context, int64_t index, const int64_t* sizes, int64_t rank,
                                                                      void** data) {
  OrtValue* value;
  OrtStatus* status = burnish::api->KernelContext_GetOutput(static_cast<OrtKernelContext*>(context), static_cast<size_t>(index), sizes,
                                                            static_cast<size_t>(rank), &value);
  if (!status) status = burnish::api->GetTensorMutableData(value, data);
  if (!status) return 0;
  burnish::api->ReleaseStatus(status);
  return 1;
}
