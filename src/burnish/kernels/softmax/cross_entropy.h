// Softmax cross-entropy over class indices, and its gradient. Logits are [N, C]; a row whose label is `ignored` adds nothing.
//
// With m = max(x) and s = log(sum exp(x - m)), a row's term is (m - x[y]) + s, and the gradient of the logits d (exp((x - m) - s) - [y]).
// Sums are float64, over the rows in their order: they are the same bits for any number of threads.

#pragma once

#include <cmath>
#include <vector>

#include "tensor.h"
#include "vector_math.h"

namespace burnish::cross_entropy {
namespace {

constexpr int64_t kGrain = 1 << 13;  // logits for a thread

struct Rows {
  Tensor logits, labels;
  const float* data;
  const int64_t* label;
  int64_t count, classes;

  // The class of a row; negative ones are counted from the end, as where elements are gathered.
  int64_t at(int64_t row) const { return label[row] < 0 ? label[row] + classes : label[row]; }
};

// Checked: a label that is out of range would read past its row.
Rows rows_of(const Tensor& logits_given, const Tensor& labels_given, int64_t ignored) {
  BURNISH_CHECK(logits_given.dim() == 2 && logits_given.scalar_type() == kFloat, "cross_entropy: float32 logits [N, C] expected");
  BURNISH_CHECK(labels_given.dim() == 1 && labels_given.scalar_type() == kLong && labels_given.size(0) == logits_given.size(0),
                "cross_entropy: an int64 label per row expected");
  Rows rows{to_contiguous(logits_given), to_contiguous(labels_given), nullptr, nullptr, logits_given.size(0), logits_given.size(1)};
  rows.data = rows.logits.const_data_ptr<float>();
  rows.label = rows.labels.const_data_ptr<int64_t>();
  for (int64_t row = 0; row < rows.count; ++row) {
    int64_t label = rows.label[row];
    BURNISH_CHECK(label == ignored || (label >= -rows.classes && label < rows.classes), "cross_entropy: label ", label, " in row ", row,
                  " is out of range for ", rows.classes, " classes");
  }
  return rows;
}

int64_t grain(const Rows& rows) { return std::max<int64_t>(kGrain / std::max<int64_t>(rows.classes, 1), 1); }

float maximum(const float* __restrict x, int64_t count) {
  float largest = x[0];
#pragma omp simd reduction(max : largest)
  for (int64_t i = 1; i < count; ++i) largest = x[i] > largest ? x[i] : largest;
  return largest;
}

double sum_of_exponentials(const float* __restrict x, int64_t count, float shift) {
  double total = 0.0;
#pragma omp simd reduction(+ : total)
  for (int64_t i = 0; i < count; ++i) total += static_cast<double>(exponential(x[i] - shift));
  return total;
}

// The sum of the terms, the number of labels that count, and for every row m and s, which the gradient reads.
inline void sum_terms(const Rows& rows, int64_t ignored, float* total, float* counted, float* statistics) {
  std::vector<double> terms(rows.count);
  parallel_for(0, rows.count, grain(rows), [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) {
      const float* x = rows.data + row * rows.classes;
      float largest = rows.classes > 0 ? maximum(x, rows.classes) : 0.f;
      double logarithm_of_sum = std::log(sum_of_exponentials(x, rows.classes, largest));
      statistics[2 * row] = largest;
      statistics[2 * row + 1] = static_cast<float>(logarithm_of_sum);
      if (rows.label[row] != ignored) terms[row] = (static_cast<double>(largest) - x[rows.at(row)]) + logarithm_of_sum;
    }
  });
  double sum = 0.0;
  int64_t number = 0;
  for (int64_t row = 0; row < rows.count; ++row) {
    if (rows.label[row] == ignored) continue;
    sum += terms[row];
    ++number;
  }
  *total = static_cast<float>(sum);
  *counted = static_cast<float>(number);
}

// The cotangent of the logits, from that of the sum of the terms and the statistics of the rows.
inline void gradient_of_logits(const Rows& rows, int64_t ignored, const Tensor& saved, const Tensor& flow, float* to) {
  BURNISH_CHECK(saved.scalar_type() == kFloat && saved.numel() == 2 * rows.count, "cross_entropy: two numbers per row expected");
  BURNISH_CHECK(flow.scalar_type() == kFloat && flow.numel() == 1, "cross_entropy: one float32 cotangent expected");
  const float* statistics = saved.const_data_ptr<float>();
  float given = *flow.const_data_ptr<float>();
  parallel_for(0, rows.count, grain(rows), [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) {
      bool counts = rows.label[row] != ignored;
      const float* __restrict x = rows.data + row * rows.classes;
      float* __restrict out = to + row * rows.classes;
      float m = statistics[2 * row], s = statistics[2 * row + 1], d = counts ? given : 0.f;
      for (int64_t i = 0; i < rows.classes; ++i) out[i] = exponential((x[i] - m) - s) * d;
      if (counts) out[rows.at(row)] -= d;
    }
  });
}

}  // namespace
}  // namespace burnish::cross_entropy
