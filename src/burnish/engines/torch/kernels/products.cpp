// Products of two matrices with a bias behind them: linear layers and the gradients of their inputs and weights.

#include "products.h"

#include <optional>

#include "operators.h"

namespace burnish::products {
namespace {

// The lines of a matrix [lines, depth], or [depth, lines] where `columns`.
template <typename Element>
Lines<Element> lines_of(const Tensor& matrix, bool columns) {
  const Element* data = static_cast<const Element*>(matrix.const_data_ptr());
  int64_t line = matrix.stride(columns ? 1 : 0), depth = matrix.stride(columns ? 0 : 1);
  return {data, line, depth};
}

// The matrix itself where one of its axes lies side by side in memory.
Tensor readable(const Tensor& matrix) { return matrix.stride(0) == 1 || matrix.stride(1) == 1 ? matrix : to_contiguous(matrix); }

// A contiguous tensor of float32 or bfloat16, in float32.
Tensor in_float(const Tensor& tensor) {
  if (tensor.scalar_type() == kFloat) return tensor;
  Tensor result = make_tensor(tensor.sizes());
  std::copy_n(tensor.const_data_ptr<BFloat16>(), tensor.numel(), result.mutable_data_ptr<float>());
  return result;
}

template <typename Element>
void product_into(const Tensor& left, const Tensor& right, const float* bias, Tensor& result) {
  int64_t rows = left.size(0), depth = left.size(1), columns = right.size(1);
  Grid grid(rows, columns, get_num_threads());
  constexpr bool single = sizeof(Element) == sizeof(float);
  int64_t own = room(grid, !single);
  Tensor memory = make_tensor({grid.count() * own});
  float* work = memory.mutable_data_ptr<float>();
  Lines<Element> left_lines = lines_of<Element>(left, false), right_lines = lines_of<Element>(right, true);
  Element* target = static_cast<Element*>(result.mutable_data_ptr());
  parallel_for(0, grid.count(), 1, [&](int64_t begin, int64_t end) {
    for (int64_t index = begin; index < end; ++index) {
      auto finish = [&](float* tile, int64_t tile_row, int64_t row, int64_t column, int64_t high, int64_t wide) {
        if (single && !bias) return;
        for (int64_t r = 0; r < high; ++r) {
          float* sums = tile + r * tile_row;
          Element* to = target + (row + r) * columns + column;
          int64_t c = 0;
          for (; c + kWidth <= wide; c += kWidth) {
            Vector value = load(sums + c);
            store(to + c, bias ? value + load(bias + column + c) : value);
          }
          for (; c < wide; ++c) to[c] = static_cast<Element>(bias ? sums[c] + bias[column + c] : sums[c]);
        }
      };
      multiply<Element>(grid.share(index, rows, columns), depth, left_lines, right_lines, single ? reinterpret_cast<float*>(target) : nullptr,
                        columns, work + index * own, finish);
    }
  });
}

// (left [M, K], right [K, N], bias [N]) -> left right + bias [M, N]; the matrices may be strided.
Tensor product(const Tensor& left_given, const Tensor& right_given, const std::optional<Tensor>& bias_given) {
  ScalarType type = left_given.scalar_type();
  BURNISH_CHECK((type == kFloat || type == kBFloat16) && right_given.scalar_type() == type && left_given.dim() == 2 && right_given.dim() == 2 &&
                    left_given.size(1) == right_given.size(0),
                "product: two matrices of float32 or bfloat16 that fit expected");
  Tensor left = readable(left_given), right = readable(right_given), bias;
  int64_t columns = right.size(1);
  if (bias_given.has_value()) {
    BURNISH_CHECK(bias_given->numel() == columns && bias_given->scalar_type() == type, "product: a bias of one element per column expected");
    bias = in_float(to_contiguous(*bias_given));
  }
  Tensor result = make_tensor({left.size(0), columns}, type);
  if (result.numel() == 0) return result;
  const float* added = bias.defined() ? bias.const_data_ptr<float>() : nullptr;
  if (type == kFloat)
    product_into<float>(left, right, added, result);
  else
    product_into<BFloat16>(left, right, added, result);
  return result;
}

}  // namespace

BURNISH_OPERATORS(CPU) { operators.implement<&product>("product"); }

}  // namespace burnish::products
