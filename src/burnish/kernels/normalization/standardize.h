// Standardization of rows, the elements over trailing axes, with the scale and the bias of a layer behind it, and its gradient: layer
// normalization, and with `centered` false root-mean-square normalization.
//
// Sums are float64. x - mean is applied as (x - mean) - shift, with the shift that rounding left in the mean, so that a large mean costs
// no digits and a constant row comes out as zeros. The gradient computes the normalized row again from x: nothing of its size is kept.

#pragma once

#include <algorithm>
#include <cmath>
#include <vector>

#include "tensor.h"

namespace burnish::rows {
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

// What is computed of rows: where it goes.
struct StandardizedRows {
  float *y, *mean, *shift, *inverse;  // the last three one number for each row
};

// y = ((x - mean) - shift) inverse scale + bias, with inverse = 1 / (std + offset); scale and bias, one number per column, may be null, and
// bias is where scale is.
inline void standardize_rows(const Shape& shape, const float* from, const float* scales, const float* biases, double epsilon, double offset,
                             bool centered, const StandardizedRows& to) {
  int64_t columns = shape.columns;
  parallel_for(0, shape.rows, grain(shape), [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) {
      const float* __restrict source = from + row * columns;
      float* __restrict target = to.y + row * columns;
      float m = 0.f, s = 0.f;
      if (centered) {
        double exact = sum(source, columns) / columns;
        m = static_cast<float>(exact);
        s = static_cast<float>(exact - m);
      }
      double root = std::sqrt(sum_of_squares(source, columns, m, s) / columns + epsilon);
      float r = root + offset == 0.0 ? 0.f : static_cast<float>(1.0 / (root + offset));
      to.mean[row] = m;
      to.shift[row] = s;
      to.inverse[row] = r;
      if (scales && biases)
        for (int64_t i = 0; i < columns; ++i) target[i] = ((source[i] - m) - s) * r * scales[i] + biases[i];
      else if (scales)
        for (int64_t i = 0; i < columns; ++i) target[i] = ((source[i] - m) - s) * r * scales[i];
      else
        for (int64_t i = 0; i < columns; ++i) target[i] = ((source[i] - m) - s) * r;
    }
  });
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

// Operands of the gradient. Without mean and shift x holds the normalized rows; scale may be null.
struct RowFlows {
  const float *dy, *x, *mean, *shift, *inverse, *scale;
};

// dx, and the gradients of scale and bias, one number per column, where these are not null: both or none.
inline void standardize_rows_gradient(const Shape& shape, const RowFlows& from, double offset, bool centered, float* dx, float* dscale,
                                      float* dbias) {
  int64_t columns = shape.columns, rows = shape.rows;
  auto run = [&](int64_t row, float* flow_sum, float* product_sum) {
    float r = from.inverse[row], m = from.mean ? from.mean[row] : 0.f, s = from.shift ? from.shift[row] : 0.f, gain = from.mean ? r : 1.f;
    const float *flow = from.dy + row * columns, *source = from.x + row * columns;
    float* target = dx + row * columns;
    if (from.scale)
      gradient_row<true>(flow, source, from.scale, target, flow_sum, product_sum, m, s, gain, r, offset, centered, columns);
    else
      gradient_row<false>(flow, source, nullptr, target, flow_sum, product_sum, m, s, gain, r, offset, centered, columns);
  };
  if (!dscale) {
    parallel_for(0, rows, grain(shape), [&](int64_t begin, int64_t end) {
      for (int64_t row = begin; row < end; ++row) run(row, nullptr, nullptr);
    });
    return;
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
  for (int64_t i = 0; i < columns; ++i) {
    double flow = 0.0, product = 0.0;
    for (int64_t thread = 0; thread < threads; ++thread) {  // in a fixed order: the same bits for the same number of threads
      flow += flow_totals[thread][i];
      product += product_totals[thread][i];
    }
    dbias[i] = static_cast<float>(flow);
    dscale[i] = static_cast<float>(product);
  }
}

}  // namespace
}  // namespace burnish::rows
