// Products of two matrices with a bias behind them, linear layers and the gradients of their inputs and weights, and of batches of
// matrices, as in attention.

#include "products.h"

#include <optional>

#include "operators.h"

namespace burnish::products {
namespace {

// The lines of a matrix [lines, depth], or [depth, lines] where `columns`.
Lines<float> lines_of(const Tensor& matrix, bool columns) {
  int64_t line = matrix.stride(columns ? 1 : 0), depth = matrix.stride(columns ? 0 : 1);
  return {matrix.const_data_ptr<float>(), line, depth};
}

// The matrix itself where one of its axes lies side by side in memory.
Tensor readable(const Tensor& matrix) { return matrix.stride(0) == 1 || matrix.stride(1) == 1 ? matrix : to_contiguous(matrix); }

// A share of a product with its bias, in the dtype of the result.
template <typename Element, int vectors>
void multiply_into(const Share& share, const Blocks& blocks, int64_t depth, const Lines<Element>& left, const Lines<Element>& right, const float* bias,
                   Element* target, int64_t target_row, float* memory) {
  constexpr bool single = sizeof(Element) == sizeof(float);
  auto finish = [&](float* tile, int64_t tile_row, int64_t row, int64_t column, int64_t high, int64_t wide) {
    if (single && !bias) return;
    for (int64_t r = 0; r < high; ++r) {
      float* sums = tile + r * tile_row;
      Element* to = target + (row + r) * target_row + column;
      int64_t c = 0;
      for (; c + kWidth <= wide; c += kWidth) {
        Vector value = load(sums + c);
        store(to + c, bias ? value + load(bias + column + c) : value);
      }
      for (; c < wide; ++c) to[c] = static_cast<Element>(bias ? sums[c] + bias[column + c] : sums[c]);
    }
  };
  float* sums = single ? reinterpret_cast<float*>(target) : nullptr;
  multiply<Element, vectors>(share, blocks, depth, left, right, sums, target_row, memory, finish);
}

void product_into(const Tensor& left, const Tensor& right, const float* bias, Tensor& result) {
  int64_t rows = left.size(0), depth = left.size(1), columns = right.size(1);
  Grid grid(rows, columns, get_num_threads());
  Blocks blocks(grid.high, grid.wide, kColumns, false);
  int64_t own = blocks.words();
  Tensor memory = make_tensor({grid.count() * own});
  float* work = memory.mutable_data_ptr<float>();
  Lines<float> left_lines = lines_of(left, false), right_lines = lines_of(right, true);
  float* target = result.mutable_data_ptr<float>();
  parallel_for(0, grid.count(), 1, [&](int64_t begin, int64_t end) {
    for (int64_t index = begin; index < end; ++index)
      multiply_into<float, kVectors>(grid.share(index, rows, columns), blocks, depth, left_lines, right_lines, bias, target, columns,
                                       work + index * own);
  });
}

// (left [M, K], right [K, N], bias [N]) -> left right + bias [M, N]; the matrices may be strided.
Tensor product(const Tensor& left_given, const Tensor& right_given, const std::optional<Tensor>& bias_given) {
  BURNISH_CHECK(left_given.scalar_type() == kFloat && right_given.scalar_type() == kFloat && left_given.dim() == 2 && right_given.dim() == 2 &&
                    left_given.size(1) == right_given.size(0),
                "product: two matrices of float32 that fit expected");
  Tensor left = readable(left_given), right = readable(right_given), bias;
  int64_t columns = right.size(1);
  if (bias_given.has_value()) {
    BURNISH_CHECK(bias_given->numel() == columns && bias_given->scalar_type() == kFloat, "product: a bias of one element per column expected");
    bias = to_contiguous(*bias_given);
  }
  Tensor result = make_tensor({left.size(0), columns});
  if (result.numel() > 0) product_into(left, right, bias.defined() ? bias.const_data_ptr<float>() : nullptr, result);
  return result;
}

// The matrices of a batch [A, B, rows, columns].
template <typename Element>
struct Batch {
  const Element* data;
  int64_t outer, inner, row, column;

  explicit Batch(const Tensor& tensor)
      : data(static_cast<const Element*>(tensor.const_data_ptr())),
        outer(tensor.stride(0)),
        inner(tensor.stride(1)),
        row(tensor.stride(2)),
        column(tensor.stride(3)) {}

  Lines<Element> rows(int64_t a, int64_t b) const { return {data + a * outer + b * inner, row, column}; }
  Lines<Element> columns(int64_t a, int64_t b) const { return {data + a * outer + b * inner, column, row}; }
};

// A product that lies `turned` in memory, its columns one after another, is that of the transposed operands, exchanged.
template <typename Element>
void batch_into(const Tensor& left, const Tensor& right, Tensor& result, bool turned) {
  int64_t rows = result.size(turned ? 3 : 2), columns = result.size(turned ? 2 : 3), depth = left.size(3), inner = left.size(1);
  int64_t items = left.size(0) * inner, row_stride = result.stride(turned ? 3 : 2);
  Batch<Element> one(left), other(right);
  Element* target = static_cast<Element*>(result.mutable_data_ptr());
  bool narrow = round_up(columns, (kVectors - 1) * kWidth) < round_up(columns, kColumns);
  Blocks blocks(rows, columns, narrow ? (kVectors - 1) * kWidth : kColumns, sizeof(Element) != sizeof(float));
  int64_t own = blocks.words(), workers = std::min<int64_t>(get_num_threads(), items);
  Tensor memory = make_tensor({workers * own});
  float* work = memory.mutable_data_ptr<float>();
  parallel_for(0, workers, 1, [&](int64_t begin, int64_t end) {
    for (int64_t worker = begin; worker < end; ++worker)
      for (int64_t item = worker * items / workers; item < (worker + 1) * items / workers; ++item) {
        int64_t a = item / inner, b = item % inner;
        Lines<Element> lines = turned ? other.columns(a, b) : one.rows(a, b), across = turned ? one.rows(a, b) : other.columns(a, b);
        Element* to = target + a * result.stride(0) + b * result.stride(1);
        Share whole{0, rows, 0, columns};
        if (narrow)
          multiply_into<Element, kVectors - 1>(whole, blocks, depth, lines, across, nullptr, to, row_stride, work + worker * own);
        else
          multiply_into<Element, kVectors>(whole, blocks, depth, lines, across, nullptr, to, row_stride, work + worker * own);
      }
  });
}

Tensor readable_batch(const Tensor& batch) { return batch.stride(2) == 1 || batch.stride(3) == 1 ? batch : to_contiguous(batch); }

// (left [A, B, M, K], right [A, B, K, N]) -> left right [A, B, M, N], whose axes lie in memory in this order, outermost first. The
// operands may be strided: they are read as they lie.
Tensor batched_product(const Tensor& left_given, const Tensor& right_given, const std::vector<int64_t>& order) {
  ScalarType type = left_given.scalar_type();
  BURNISH_CHECK((type == kFloat || type == kBFloat16) && right_given.scalar_type() == type && left_given.dim() == 4 && right_given.dim() == 4 &&
                    left_given.size(0) == right_given.size(0) && left_given.size(1) == right_given.size(1) &&
                    left_given.size(3) == right_given.size(2),
                "batched_product: two batches of matrices of float32 or bfloat16 that fit expected");
  std::vector<int64_t> axes(order);
  std::sort(axes.begin(), axes.end());
  BURNISH_CHECK((axes == std::vector<int64_t>{0, 1, 2, 3}) && order[3] >= 2, "batched_product: an order of axes with a matrix's last expected");
  Tensor left = readable_batch(left_given), right = readable_batch(right_given);
  std::vector<int64_t> sizes{left.size(0), left.size(1), left.size(2), right.size(3)}, strides(4);
  int64_t stride = 1;
  for (int position = 3; position >= 0; --position) {
    strides[order[position]] = stride;
    stride *= std::max<int64_t>(sizes[order[position]], 1);
  }
  Tensor result = make_strided(sizes, strides, type);
  if (result.numel() == 0) return result;
  if (type == kFloat)
    batch_into<float>(left, right, result, order[3] == 2);
  else
    batch_into<BFloat16>(left, right, result, order[3] == 2);
  return result;
}

}  // namespace

BURNISH_OPERATORS(CPU) {
  operators.implement<&product>("product");
  operators.implement<&batched_product>("batched_product");
}

}  // namespace burnish::products
