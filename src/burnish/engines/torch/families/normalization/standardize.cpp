// Standardization of rows, the elements over trailing axes, with the scale and the bias of a layer behind it, and its gradient: layer
// normalization, and with `centered` false root-mean-square normalization.
//
// Sums are float64. x - mean is applied as (x - mean) - shift, with the shift that rounding left in the mean, so that a large mean costs
// no digits and a constant row comes out as zeros. The gradient computes the normalized row again from x: nothing of its size is kept.

#include <algorithm>
#include <cmath>
#include <vector>

#include "operators.h"

namespace burnish {
namespace {

constexpr int64_t kRun = 16;  // rows whose gradients of scale and bias are summed in float32 before they enter the float64 sums
constexpr int64_t kGrain = 16384;  // elements

struct Shape {
  int64_t rows, columns;
};

Shape shape_of(const Tensor& x, int64_t axis) {
  BURNISH_CHECK(x.scalar_type() == kFloat && axis < 0 && -axis <= x.dim(), "standardize: float32 and an axis counted from the end expected");
  int64_t columns = 1;
  for (int64_t position = x.dim() + axis; position < x.dim(); ++position) columns *= x.size(position);
  return {columns ? x.numel() / columns : 0, columns};
}

std::vector<int64_t> statistic_sizes(const Tensor& x, int64_t axis) {
  std::vector<int64_t> sizes(x.sizes().begin(), x.sizes().end());
  for (int64_t position = x.dim() + axis; position < x.dim(); ++position) sizes[position] = 1;
  return sizes;
}

Tensor packed(const std::optional<Tensor>& given, int64_t columns) {
  if (!given.has_value()) return Tensor();
  BURNISH_CHECK(given->numel() == columns && given->scalar_type() == kFloat, "standardize: one float32 value per column expected");
  return to_contiguous(*given);
}

const float* data_of(const Tensor& tensor) { return tensor.defined() ? tensor.const_data_ptr<float>() : nullptr; }

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
std::tuple<Tensor, Tensor, Tensor, Tensor> standardize(const Tensor& x_given, const std::optional<Tensor>& scale_given,
                                                                       const std::optional<Tensor>& bias_given, int64_t axis, double epsilon,
                                                                       double offset, bool centered) {
  Tensor x = to_contiguous(x_given);
  Shape shape = shape_of(x, axis);
  Tensor scale = packed(scale_given, shape.columns), bias = packed(bias_given, shape.columns);
  std::vector<int64_t> sizes = statistic_sizes(x, axis);
  Tensor y = make_tensor(x.sizes()), mean = make_tensor(sizes), shift = make_tensor(sizes),
             inverse = make_tensor(sizes);
  const float *from = data_of(x), *scales = data_of(scale), *biases = data_of(bias);
  float *to = y.mutable_data_ptr<float>(), *means = mean.mutable_data_ptr<float>(), *shifts = shift.mutable_data_ptr<float>(),
        *inverses = inverse.mutable_data_ptr<float>();
  int64_t columns = shape.columns;
  parallel_for(0, shape.rows, grain(shape), [&](int64_t begin, int64_t end) {
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
std::tuple<Tensor, Tensor, Tensor> standardize_gradient(const Tensor& dy_given, const Tensor& x_given,
                                                                    const std::optional<Tensor>& mean_given,
                                                                    const std::optional<Tensor>& shift_given, const Tensor& inverse_given,
                                                                    const std::optional<Tensor>& scale_given, int64_t axis, double offset,
                                                                    bool centered, bool parameters) {
  Tensor dy = to_contiguous(dy_given), x = to_contiguous(x_given), inverse = to_contiguous(inverse_given);
  Shape shape = shape_of(x, axis);
  BURNISH_CHECK(same(dy.sizes(), x.sizes()) && dy.scalar_type() == kFloat && inverse.numel() == shape.rows &&
                  mean_given.has_value() == shift_given.has_value(),
              "standardize_gradient: gradient, rows and statistics of one shape expected");
  Tensor mean = packed(mean_given, shape.rows), shift = packed(shift_given, shape.rows), scale = packed(scale_given, shape.columns);
  Tensor dx = make_tensor(x.sizes());
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
    parallel_for(0, rows, grain(shape), [&](int64_t begin, int64_t end) {
      for (int64_t row = begin; row < end; ++row) run(row, nullptr, nullptr);
    });
    Tensor none = make_tensor({0});
    return {dx, none, none};
  }
  int64_t threads = std::max<int64_t>(1, std::min<int64_t>(get_num_threads(), rows / grain(shape)));
  int64_t share = (rows + threads - 1) / threads;
  std::vector<std::vector<double>> flow_totals(threads), product_totals(threads);
  parallel_for(0, threads, 1, [&](int64_t begin, int64_t end) {
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
  Tensor dscale = make_tensor(sizes), dbias = make_tensor(sizes);
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

BURNISH_OPERATORS(CPU) {
  operators.implement<&standardize>("standardize");
  operators.implement<&standardize_gradient>("standardize_gradient");
}

}  // namespace burnish
