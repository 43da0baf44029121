// Standardization of rows and its gradient, as operators of PyTorch's (standardize.h).

#include "standardize.h"

#include "operators.h"

namespace burnish {
namespace {

Tensor packed(const std::optional<Tensor>& given, int64_t columns) {
  if (!given.has_value()) return Tensor();
  BURNISH_CHECK(given->numel() == columns && given->scalar_type() == kFloat, "standardize: one float32 value per column expected");
  return to_contiguous(*given);
}

// (x, scale, bias) -> y, mean, shift, inverse.
std::tuple<Tensor, Tensor, Tensor, Tensor> standardize(const Tensor& x_given, const std::optional<Tensor>& scale_given,
                                                                       const std::optional<Tensor>& bias_given, int64_t axis, double epsilon,
                                                                       double offset, bool centered) {
  Tensor x = to_contiguous(x_given);
  rows::Shape shape = rows::shape_of(x, axis);
  Tensor scale = packed(scale_given, shape.columns), bias = packed(bias_given, shape.columns);
  std::vector<int64_t> sizes = rows::statistic_sizes(x, axis);
  Tensor y = make_tensor(x.sizes()), mean = make_tensor(sizes), shift = make_tensor(sizes), inverse = make_tensor(sizes);
  rows::standardize_rows(shape, rows::data_of(x), rows::data_of(scale), rows::data_of(bias), epsilon, offset, centered,
                         {y.mutable_data_ptr<float>(), mean.mutable_data_ptr<float>(), shift.mutable_data_ptr<float>(),
                          inverse.mutable_data_ptr<float>()});
  return {y, mean, shift, inverse};
}

// (dy, x, mean, shift, inverse, scale) -> dx, dscale, dbias (empty unless `parameters`). Without mean and shift x is the normalized row.
std::tuple<Tensor, Tensor, Tensor> standardize_gradient(const Tensor& dy_given, const Tensor& x_given,
                                                                    const std::optional<Tensor>& mean_given,
                                                                    const std::optional<Tensor>& shift_given, const Tensor& inverse_given,
                                                                    const std::optional<Tensor>& scale_given, int64_t axis, double offset,
                                                                    bool centered, bool parameters) {
  Tensor dy = to_contiguous(dy_given), x = to_contiguous(x_given), inverse = to_contiguous(inverse_given);
  rows::Shape shape = rows::shape_of(x, axis);
  BURNISH_CHECK(same(dy.sizes(), x.sizes()) && dy.scalar_type() == kFloat && inverse.numel() == shape.rows &&
                  mean_given.has_value() == shift_given.has_value(),
              "standardize_gradient: gradient, rows and statistics of one shape expected");
  Tensor mean = packed(mean_given, shape.rows), shift = packed(shift_given, shape.rows), scale = packed(scale_given, shape.columns);
  std::vector<int64_t> sizes(x.sizes().end() + axis, x.sizes().end());
  if (!parameters) sizes = {0};
  Tensor dx = make_tensor(x.sizes()), dscale = make_tensor(sizes), dbias = make_tensor(sizes);
  rows::RowFlows from{rows::data_of(dy),    rows::data_of(x),       rows::data_of(mean),
                      rows::data_of(shift), rows::data_of(inverse), rows::data_of(scale)};
  rows::standardize_rows_gradient(shape, from, offset, centered, dx.mutable_data_ptr<float>(),
                                  parameters ? dscale.mutable_data_ptr<float>() : nullptr,
                                  parameters ? dbias.mutable_data_ptr<float>() : nullptr);
  return {dx, dscale, dbias};
}

}  // namespace

BURNISH_OPERATORS(CPU) {
  operators.implement<&standardize>("standardize");
  operators.implement<&standardize_gradient>("standardize_gradient");
}

}  // namespace burnish
