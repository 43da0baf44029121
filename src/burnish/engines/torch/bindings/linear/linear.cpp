// A small linear layer in one call, and its gradients in another: where products take microseconds, so does every call.

#include <optional>
#include <tuple>
#include <vector>

#include "operators.h"

namespace burnish {
namespace {

Tensor swapped_axes(const Tensor& matrix) {
  return as_strided(matrix, {matrix.size(1), matrix.size(0)}, {matrix.stride(1), matrix.stride(0)});
}

Tensor product(const Tensor& left, const Tensor& right) {
  Tensor result = make_tensor({left.size(0), right.size(1)});
  check_call(aoti_torch_cpu_mm_out(result.get(), left.get(), right.get()));
  return result;
}

// x [M, K] times W, [N, K] where `transposed` and [K, N] else, plus the bias [N]; where `relu`, negative elements become 0.
Tensor linear(const Tensor& x, const Tensor& weight, const std::optional<Tensor>& bias, bool transposed, bool relu) {
  BURNISH_CHECK(x.dim() == 2 && weight.dim() == 2 && x.size(1) == weight.size(transposed ? 1 : 0), "linear: x [M, K] and W that fit expected");
  BURNISH_CHECK(x.scalar_type() == kFloat && weight.scalar_type() == kFloat, "linear: float32 expected");
  Tensor result = product(x, transposed ? swapped_axes(weight) : weight);
  int64_t rows = result.size(0), columns = result.size(1);
  Tensor added = bias ? to_contiguous(*bias) : Tensor();
  BURNISH_CHECK(!bias || added.numel() == columns, "linear: a bias of one element per column expected");
  float* to = result.mutable_data_ptr<float>();
  if (bias) {
    const float* __restrict from = added.const_data_ptr<float>();
    for (int64_t row = 0; row < rows; ++row)
      for (int64_t i = 0; i < columns; ++i) to[row * columns + i] += from[i];
  }
  if (relu)  // NaN comes through, as in ATen
    for (int64_t i = 0; i < rows * columns; ++i) to[i] = to[i] < 0.f ? 0.f : to[i];
  return result;
}

// dx [M, K] where x [M, K] is positive or NaN, as in ATen.
void mask(const Tensor& dx, const Tensor& x_given) {
  Tensor x = to_contiguous(x_given);
  BURNISH_CHECK(same(dx.sizes(), x.sizes()), "linear_gradient: gradients of the shape of x expected");
  const float* __restrict from = x.const_data_ptr<float>();
  float* __restrict to = dx.mutable_data_ptr<float>();
  int64_t count = dx.numel();
  for (int64_t i = 0; i < count; ++i) to[i] = from[i] <= 0.f ? 0.f : to[i];
}

// The sums of the columns of dy [M, N], in float64.
Tensor column_sums(const Tensor& dy_given) {
  Tensor dy = to_contiguous(dy_given), result = make_tensor({dy.size(1)});
  int64_t rows = dy.size(0), columns = dy.size(1);
  const float* __restrict from = dy.const_data_ptr<float>();
  std::vector<double> sums(columns);
  double* __restrict sum = sums.data();
  for (int64_t row = 0; row < rows; ++row, from += columns)
    for (int64_t i = 0; i < columns; ++i) sum[i] += from[i];
  float* to = result.mutable_data_ptr<float>();
  for (int64_t i = 0; i < columns; ++i) to[i] = static_cast<float>(sum[i]);
  return result;
}

// (dy [M, N], x [M, K], W) -> the gradients of x, of W and of the bias; those that are not wanted are empty.
//
// That of x is wanted where there is a W: it is dy W, or dy W' where `transposed`; where `relu`, x is the result of a ReLU, and the
// gradient is that of what the ReLU was given. The gradient of W is dy' x, or x' dy where `swapped`.
std::tuple<Tensor, Tensor, Tensor> linear_gradient(const Tensor& dy, const Tensor& x, const std::optional<Tensor>& weight, bool transposed,
                                                   bool swapped, bool relu, bool bias) {
  BURNISH_CHECK(dy.dim() == 2 && x.dim() == 2 && dy.size(0) == x.size(0), "linear_gradient: dy [M, N] and x [M, K] expected");
  BURNISH_CHECK(dy.scalar_type() == kFloat && x.scalar_type() == kFloat, "linear_gradient: float32 expected");
  Tensor dx = weight ? product(dy, transposed ? swapped_axes(*weight) : *weight) : make_tensor({0});
  if (weight && relu) mask(dx, x);
  Tensor dw = swapped ? product(swapped_axes(x), dy) : product(swapped_axes(dy), x);
  Tensor sums = bias ? column_sums(dy) : make_tensor({0});
  return {std::move(dx), std::move(dw), std::move(sums)};
}

}  // namespace

BURNISH_OPERATORS(CPU) {
  operators.implement<&linear>("linear");
  operators.implement<&linear_gradient>("linear_gradient");
}

}  // namespace burnish
