// Products of a tall matrix with a weight, and the weight's gradient, by oneDNN where it is the faster library: its float32 products of
// some size beat BLAS on most processors, small ones do not. PyTorch itself takes BLAS for all of them.

#include <ATen/Context.h>
#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/add.h>
#include <ATen/ops/addmm.h>
#include <ATen/ops/matmul.h>
#include <ATen/ops/mm.h>
#include <torch/library.h>

#include <algorithm>
#include <string_view>
#include <vector>

namespace {

constexpr int64_t kLargeProduct = int64_t{1} << 24;  // multiplications; below, what oneDNN does before it begins costs more than it gains

using Linear = at::Tensor(const at::Tensor&, const at::Tensor&, const std::optional<at::Tensor>&, std::string_view,
                          c10::List<std::optional<at::Scalar>>, std::optional<std::string_view>);

// oneDNN's x weight' + bias as PyTorch's compiler calls it, or nothing where this build of PyTorch is without it.
const std::optional<c10::TypedOperatorHandle<Linear>>& pointwise() {
  static const std::optional<c10::TypedOperatorHandle<Linear>> found = []() -> std::optional<c10::TypedOperatorHandle<Linear>> {
    if (!at::globalContext().hasMKLDNN()) return std::nullopt;
    auto handle = c10::Dispatcher::singleton().findSchema({"mkldnn::_linear_pointwise", ""});
    if (!handle.has_value() || !handle->hasKernelForDispatchKey(c10::DispatchKey::CPU)) return std::nullopt;
    return handle->typed<Linear>();
  }();
  return found;
}

// x [M, K] times weight [N, K] transposed, plus bias [N]; all of them may be strided.
at::Tensor product(const at::Tensor& x, const at::Tensor& weight, const std::optional<at::Tensor>& bias) {
  bool large = x.size(0) * x.size(1) > kLargeProduct / std::max<int64_t>(weight.size(0), 1);
  if (large && x.scalar_type() == at::kFloat && at::globalContext().userEnabledMkldnn() && pointwise().has_value())
    return pointwise()->call(x, weight, bias, "none", c10::List<std::optional<at::Scalar>>(), "");
  return bias.has_value() ? at::addmm(*bias, x, weight.t()) : at::mm(x, weight.t());
}

// x [..., K] and weight, [N, K] where `transposed`, [K, N] else -> [..., N].
at::Tensor linear(const at::Tensor& x, const at::Tensor& weight, const std::optional<at::Tensor>& bias, bool transposed) {
  TORCH_CHECK(x.dim() >= 2 && weight.dim() == 2, "linear: a matrix or more, and a weight of two axes expected");
  at::Tensor columns = transposed ? weight : weight.t();
  TORCH_CHECK(columns.size(1) == x.size(-1), "linear: ", x.size(-1), " columns meet a weight for ", columns.size(1));
  if (x.numel() == 0 || weight.numel() == 0) {
    at::Tensor empty = at::matmul(x, columns.t());
    return bias.has_value() ? at::add(empty, *bias) : empty;
  }
  if (x.dim() == 2) return product(x, columns, bias);
  std::vector<int64_t> sizes(x.sizes().begin(), x.sizes().end() - 1);
  sizes.push_back(columns.size(0));
  return product(x.reshape({-1, x.size(-1)}), columns, bias).view(sizes);
}

// left [M, N] and right [M, K] -> left' right [N, K].
at::Tensor linear_weight_gradient(const at::Tensor& left, const at::Tensor& right) {
  TORCH_CHECK(left.dim() == 2 && right.dim() == 2 && left.size(0) == right.size(0), "linear: two matrices of as many rows expected");
  // BLAS is as fast as oneDNN where the result is tall, and reads the transposed matrices as they are.
  if (left.size(1) >= right.size(1) || left.numel() == 0) return at::mm(left.t(), right);
  return product(left.t(), right.t(), std::nullopt);
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(burnish, library) {
  library.def("linear(Tensor x, Tensor weight, Tensor? bias, bool transposed) -> Tensor");
  library.def("linear_weight_gradient(Tensor left, Tensor right) -> Tensor");
}

TORCH_LIBRARY_IMPL(burnish, CPU, library) {
  library.impl("linear", linear);
  library.impl("linear_weight_gradient", linear_weight_gradient);
}
