// The gradient of Gather as an operator of ONNX Runtime's (gather_gradient.h).

#pragma once

#include <vector>

#include "gather_gradient.h"
#include "operators.h"

namespace burnish {
namespace {

struct FusedGatherGrad {
  int64_t axis, extent, threads;

  explicit FusedGatherGrad(const Attributes& attributes)
      : axis(attributes.number("axis")), extent(attributes.number("extent")), threads(attributes.number("threads")) {}

  // (dy, indices) -> d_data
  void run(Call& call) const {
    Parts parts(threads);
    Tensor dy = call.input(0), indices = call.input(1);
    int64_t read = indices.dim();
    BURNISH_CHECK(axis >= 0 && dy.dim() >= axis + read && same(Sizes(dy.sizes().begin() + axis, read), indices.sizes()),
                  "gradient of Gather: float32 elements [..., those of the indices, ...] expected");
    std::vector<int64_t> sizes(dy.sizes().begin(), dy.sizes().begin() + axis);
    sizes.push_back(extent);
    sizes.insert(sizes.end(), dy.sizes().begin() + axis + read, dy.sizes().end());
    indexing::Extents extents{1, indices.numel(), extent, 1};
    for (int64_t place = 0; place < axis; ++place) extents.outer *= dy.size(place);
    for (int64_t place = axis + read; place < dy.dim(); ++place) extents.inner *= dy.size(place);
    float* sums = call.output(0, sizes, kFloat).mutable_data_ptr<float>();
    indexing::add_where_read(extents, dy.const_data_ptr<float>(), indices.const_data_ptr<int64_t>(), sums);
  }

  static void infer(Inference& inference) {
    std::vector<Extent> shape = inference.shape(0);
    int64_t axis = inference.number("axis"), read = static_cast<int64_t>(inference.shape(1).size());
    if (axis + read > static_cast<int64_t>(shape.size())) return;
    shape.erase(shape.begin() + axis, shape.begin() + axis + read);
    shape.insert(shape.begin() + axis, {inference.number("extent"), ""});
    inference.set_output(0, ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT, shape);
  }
};

const Operator<FusedGatherGrad> fused_gather_grad("FusedGatherGrad");

}  // namespace
}  // namespace burnish
