// Convolutions of 3x3 and stride 1 by PyTorch's own operators, for what Winograd's filtering would not compute faster.

#pragma once

#include <optional>

#include "tensor.h"

namespace burnish::direct {

constexpr int64_t kOnes[2] = {1, 1}, kZeros[2] = {0, 0};

inline Tensor convolution(const Tensor& x, const Tensor& weight, const std::optional<Tensor>& bias, const std::vector<int64_t>& padding) {
  AtenTensorHandle added = bias.has_value() ? bias->get() : nullptr, made;
  check_call(aoti_torch_cpu_convolution(x.get(), weight.get(), bias.has_value() ? &added : nullptr, kOnes, 2, padding.data(), 2,
                                                    kOnes, 2, 0, kZeros, 2, 1, &made));
  return Tensor(made);
}

// dx where `input`, dw else; of the other operand, x or weight, the sizes alone are read.
inline Tensor gradient(const Tensor& dy, const Tensor& x, const Tensor& weight, const std::vector<int64_t>& padding, bool input) {
  const int32_t wanted[3] = {input, !input, 0};
  AtenTensorHandle made[3];
  check_call(aoti_torch_cpu_convolution_backward(dy.get(), x.get(), weight.get(), nullptr, 0, kOnes, 2, padding.data(), 2,
                                                             kOnes, 2, 0, kZeros, 2, 1, wanted, 3, &made[0], &made[1], &made[2]));
  Tensor results[3] = {Tensor(made[0]), Tensor(made[1]), Tensor(made[2])};
  return results[input ? 0 : 1];
}

}  // namespace burnish::direct
