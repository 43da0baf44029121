// Standardization of rows, the elements over trailing axes, with the scale and the bias of a layer behind it, and its gradient: layer
// normalization, and with `centered` false root-mean-square normalization.
//
// Sums are float64. x - mean is applied as (x - mean) - shift, with the shift that rounding left in the mean, so that a large mean costs
// no digits and a constant row comes out as zeros. The gradient computes the normalized row again from x: nothing of its size is kept.

#include <ATen/core/Tensor.h>
#include <ATen/Parallel.h>
#include <ATen/ops/empty.h>
#include <torch/library.h>

#include <algorithm>
#include <cmath>
#include <vector>

namespace {

constexpr int64_t kRun = 16;  // rows whose gradients of scale and bias are summed in float32 before they enter the float64 sums
constexpr int64_t kGrain = 16384;  // elements

struct Shape {
  int64_t rows, columns;
};

Shape shape_of(const at::Tensor& x, int64_t axis) {
  TORCH_CHECK(x.scalar_type() == at::kFloat && axis < 0 && -axis <= x.dim(), "standardize: float32 and an axis counted from the end expected");
  int64_t columns = 1;
  for (int64_t position = x.dim() + axis; position < x.dim(); ++position) columns *= x.size(position);
  return {columns ? x.numel() / columns : 0, columns};
}

std::vector<int64_t> statistic_sizes(const at::Tensor& x, int64_t axis) {
  std::vector<int64_t> sizes = x.sizes().vec();
  for (int64_t position = x.dim() + axis; position < x.dim(); ++position) sizes[position] = 1;
  return sizes;
}

at::Tensor packed(const c10::optional<at::Tensor>& given, int64_t columns) {
  if (!given.has_value()) return at::Tensor();
  TORCH_CHECK(given->numel() == columns && given->scalar_type() == at::kFloat, "standardize: one float32 value per column expected");
  return given->contiguous();
}

const float* data_of(const at::Tensor& tensor) { return tensor.defined() ? tensor.const_data_ptr<float>() : nullptr; }

int64_t grain(const Shape& shape) { return std::max<int64_t>(1, kGrain / std::max<int64_t>(shape.columns, 1)); }

double sum(const float* x, int64_t count) {
  double total = 0.0;
#pragma omp simd reduction(+ : total)
  for (int64_t i = 0; i < count; ++i) total += static_cast<double>(x[i]);
  return total;
}

double sum_of_squares(const float* x, int64_t count, float mean, float shift) {
  double total = 0.0;
#pragma omp simd reduction(+ : total)
  for (int64_t i = 0; i < count; ++i) {
    double value = static_cast<double>((x[i] - mean) - shift);
    total += value * value;
  }
  return total;
}

// (x, scale, bias) -> y, mean, shift, inverse: y = ((x - mean) - shift) inverse scale + bias, with inverse = 1 / (std + offset).
std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor> standardize(const at::Tensor& x_given, const c10::optional<at::Tensor>& scale_given,
                                                                       const c10::optional<at::Tensor>& bias_given, int64_t axis, double epsilon,
                                                                       double offset, bool centered) {
  at::Tensor x = x_given.contiguous();
  Shape shape = shape_of(x, axis);
  at::Tensor scale = packed(scale_given, shape.columns), bias = packed(bias_given, shape.columns);
  std::vector<int64_t> sizes = statistic_sizes(x, axis);
  at::Tensor y = at::empty(x.sizes(), x.options()), mean = at::empty(sizes, x.options()), shift = at::empty(sizes, x.options()),
             inverse = at::empty(sizes, x.options());
  const float *from = data_of(x), *scales = data_of(scale), *biases = data_of(bias);
  float *to = y.mutable_data_ptr<float>(), *means = mean.mutable_data_ptr<float>(), *shifts = shift.mutable_data_ptr<float>(),
        *inverses = inverse.mutable_data_ptr<float>();
  int64_t columns = shape.columns;
  at::parallel_for(0, shape.rows, grain(shape), [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) {
      const float* __restrict source = from + row * columns;
      float* __restrict target = to + row * columns;
      float m = 0.f, s = 0.f;
      if (centered) {
        double exact = sum(source, columns) / columns;
        m = static_cast<float>(exact);
        s = static_cast<float>(exact - m);
      }
      double root = std::sqrt(sum_of_squares(source, columns, m, s) / columns + epsilon);
      float r = root + offset == 0.0 ? 0.f : static_cast<float>(1.0 / (root + offset));
      means[row] = m;
      shifts[row] = s;
      inverses[row] = r;
      if (scales && biases)
        for (int64_t i = 0; i < columns; ++i) target[i] = ((source[i] - m) - s) * r * scales[i] + biases[i];
      else if (scales)
        for (int64_t i = 0; i < columns; ++i) target[i] = ((source[i] - m) - s) * r * scales[i];
      else
        for (int64_t i = 0; i < columns; ++i) target[i] = ((source[i] - m) - s) * r;
    }
  });
  return {y, mean, shift, inverse};
}

// One row of the gradient, dx = r (g - mean(g) - k n mean(g n)) with g = dy scale and the normalized n, and what it adds to the sums of dy
// and of dy n per column (null where they are not asked for).
template <bool scaled>
void gradient_row(const float* __restrict dy, const float* __restrict x, const float* __restrict scale, float* __restrict dx,
                  float* __restrict flow_sum, float* __restrict product_sum, float mean, float shift, float gain, float r, double offset,
                  bool centered, int64_t columns) {
  double total = 0.0, along = 0.0;
#pragma omp simd reduction(+ : total, along)
  for (int64_t i = 0; i < columns; ++i) {
    float n = ((x[i] - mean) - shift) * gain;
    double g = static_cast<double>(scaled ? dy[i] * scale[i] : dy[i]);
    total += g;
    along += g * static_cast<double>(n);
  }
  if (flow_sum)
    for (int64_t i = 0; i < columns; ++i) {
      flow_sum[i] += dy[i];
      product_sum[i] += dy[i] * (((x[i] - mean) - shift) * gain);
    }
  double slope = 1.0;
  if (offset != 0.0) {
    double share = 1.0 - r * offset;
    slope = share <= 0.0 ? 0.0 : 1.0 / share;
  }
  float middle = centered ? static_cast<float>(total / columns) : 0.f;
  float weight = static_cast<float>(slope * along / columns);
  for (int64_t i = 0; i < columns; ++i) {
    float n = ((x[i] - mean) - shift) * gain;
    float g = scaled ? dy[i] * scale[i] : dy[i];
    dx[i] = ((g - middle) - n * weight) * r;
  }
}

// (dy, x, mean, shift, inverse, scale) -> dx, dscale, dbias (empty unless `parameters`). Without mean and shift x is the normalized row.
std::tuple<at::Tensor, at::Tensor, at::Tensor> standardize_gradient(const at::Tensor& dy_given, const at::Tensor& x_given,
                                                                    const c10::optional<at::Tensor>& mean_given,
                                                                    const c10::optional<at::Tensor>& shift_given, const at::Tensor& inverse_given,
                                                                    const c10::optional<at::Tensor>& scale_given, int64_t axis, double offset,
                                                                    bool centered, bool parameters) {
  at::Tensor dy = dy_given.contiguous(), x = x_given.contiguous(), inverse = inverse_given.contiguous();
  Shape shape = shape_of(x, axis);
  TORCH_CHECK(dy.sizes() == x.sizes() && dy.scalar_type() == at::kFloat && inverse.numel() == shape.rows &&
                  mean_given.has_value() == shift_given.has_value(),
              "standardize_gradient: gradient, rows and statistics of one shape expected");
  at::Tensor mean = packed(mean_given, shape.rows), shift = packed(shift_given, shape.rows), scale = packed(scale_given, shape.columns);
  at::Tensor dx = at::empty(x.sizes(), x.options());
  const float *flows = data_of(dy), *sources = data_of(x), *inverses = data_of(inverse), *means = data_of(mean), *shifts = data_of(shift),
              *scales = data_of(scale);
  float* targets = dx.mutable_data_ptr<float>();
  int64_t columns = shape.columns, rows = shape.rows;
  auto run = [&](int64_t row, float* flow_sum, float* product_sum) {
    float r = inverses[row], m = means ? means[row] : 0.f, s = shifts ? shifts[row] : 0.f, gain = means ? r : 1.f;
    const float *flow = flows + row * columns, *source = sources + row * columns;
    float* target = targets + row * columns;
    if (scales)
      gradient_row<true>(flow, source, scales, target, flow_sum, product_sum, m, s, gain, r, offset, centered, columns);
    else
      gradient_row<false>(flow, source, nullptr, target, flow_sum, product_sum, m, s, gain, r, offset, centered, columns);
  };
  if (!parameters) {
    at::parallel_for(0, rows, grain(shape), [&](int64_t begin, int64_t end) {
      for (int64_t row = begin; row < end; ++row) run(row, nullptr, nullptr);
    });
    at::Tensor none = at::empty({0}, x.options());
    return {dx, none, none};
  }
  int64_t threads = std::max<int64_t>(1, std::min<int64_t>(at::get_num_threads(), rows / grain(shape)));
  int64_t share = (rows + threads - 1) / threads;
  std::vector<std::vector<double>> flow_totals(threads), product_totals(threads);
  at::parallel_for(0, threads, 1, [&](int64_t begin, int64_t end) {
    std::vector<float> flow_sum(columns), product_sum(columns);
    for (int64_t thread = begin; thread < end; ++thread) {
      std::vector<double>&flow_total = flow_totals[thread], &product_total = product_totals[thread];
      flow_total.assign(columns, 0.0);
      product_total.assign(columns, 0.0);
      int64_t stop = std::min(rows, (thread + 1) * share);
      for (int64_t first = thread * share; first < stop; first += kRun) {
        std::fill(flow_sum.begin(), flow_sum.end(), 0.f);
        std::fill(product_sum.begin(), product_sum.end(), 0.f);
        for (int64_t row = first; row < std::min(stop, first + kRun); ++row) run(row, flow_sum.data(), product_sum.data());
        for (int64_t i = 0; i < columns; ++i) {
          flow_total[i] += flow_sum[i];
          product_total[i] += product_sum[i];
        }
      }
    }
  });
  std::vector<int64_t> sizes(x.sizes().end() + axis, x.sizes().end());
  at::Tensor dscale = at::empty(sizes, x.options()), dbias = at::empty(sizes, x.options());
  float *scale_gradient = dscale.mutable_data_ptr<float>(), *bias_gradient = dbias.mutable_data_ptr<float>();
  for (int64_t i = 0; i < columns; ++i) {
    double flow = 0.0, product = 0.0;
    for (int64_t thread = 0; thread < threads; ++thread) {  // in a fixed order: the same bits for the same number of threads
      flow += flow_totals[thread][i];
      product += product_totals[thread][i];
    }
    bias_gradient[i] = static_cast<float>(flow);
    scale_gradient[i] = static_cast<float>(product);
  }
  return {dx, dscale, dbias};
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(burnish, library) {
  library.def(
      "standardize(Tensor x, Tensor? scale, Tensor? bias, int axis, float epsilon, float offset, bool centered) -> "
      "(Tensor, Tensor, Tensor, Tensor)");
  library.def(
      "standardize_gradient(Tensor dy, Tensor x, Tensor? mean, Tensor? shift, Tensor inverse, Tensor? scale, int axis, float offset, "
      "bool centered, bool parameters) -> (Tensor, Tensor, Tensor)");
}

TORCH_LIBRARY_IMPL(burnish, CPU, library) {
  library.impl("standardize", standardize);
  library.impl("standardize_gradient", standardize_gradient);
}
