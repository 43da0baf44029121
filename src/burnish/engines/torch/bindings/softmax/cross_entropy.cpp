// Softmax cross-entropy over class indices and its gradient, as operators of PyTorch's (cross_entropy.h).

#include "cross_entropy.h"

#include "operators.h"

namespace burnish {
namespace {

// (logits, labels) -> the sum of the terms, the number of labels that count, and what the gradient reads of every row.
std::tuple<Tensor, Tensor, Tensor> sum_of_terms(const Tensor& logits, const Tensor& labels, int64_t ignored) {
  cross_entropy::Rows rows = cross_entropy::rows_of(logits, labels, ignored);
  std::vector<int64_t> pairs{rows.count, 2}, scalar;
  Tensor saved = make_tensor(pairs), total = make_tensor(scalar), counted = make_tensor(scalar);
  cross_entropy::sum_terms(rows, ignored, total.mutable_data_ptr<float>(), counted.mutable_data_ptr<float>(), saved.mutable_data_ptr<float>());
  return {total, counted, saved};
}

// The cotangent of the logits, from that of the sum of the terms.
Tensor gradient(const Tensor& logits, const Tensor& labels, const Tensor& saved, const Tensor& flow, int64_t ignored) {
  cross_entropy::Rows rows = cross_entropy::rows_of(logits, labels, ignored);
  Tensor result = make_tensor(logits.sizes());
  cross_entropy::gradient_of_logits(rows, ignored, to_contiguous(saved), flow, result.mutable_data_ptr<float>());
  return result;
}

}  // namespace

BURNISH_OPERATORS(CPU) {
  operators.implement<&sum_of_terms>("cross_entropy");
  operators.implement<&gradient>("cross_entropy_gradient");
}

}  // namespace burnish
