// Operands that a node may lack. ONNX Runtime gives operators of libraries no empty operands before others: a node has those that are there,
// and an attribute `present` that says which.

#pragma once

#include <vector>

#include "operators.h"

namespace burnish {
namespace {

// The operands of a node by their places, of which there are `count`; those that are left out are undefined.
std::vector<Tensor> by_place(const Call& call, const std::vector<int64_t>& present, size_t count) {
  BURNISH_CHECK(present.size() <= count, "more operands than there are places for");
  std::vector<Tensor> operands(count);
  size_t next = 0;
  for (size_t place = 0; place < present.size(); ++place)
    if (present[place]) operands[place] = call.input(next++);
  return operands;
}

}  // namespace
}  // namespace burnish
