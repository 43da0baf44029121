// Tensors by their sizes, strides and memory, and threads: what kernels see of the engine that they run in. Each engine has an
// engine_tensor.h of its own.

#pragma once

#include "engine_tensor.h"
#include "shapes.h"

namespace burnish {

inline Tensor make_tensor(Sizes sizes, ScalarType type = kFloat) { return make_strided(sizes, strides_of(sizes), type); }

inline Tensor make_channels_last(Sizes sizes, ScalarType type = kFloat) {
  return make_strided(sizes, channels_last_strides_of(sizes), type);
}

// Whether images lie in memory with their channels side by side; the stride of an extent of one says nothing.
inline bool is_channels_last(const Tensor& tensor) {
  if (tensor.dim() != 4) return false;
  Sizes sizes = tensor.sizes(), strides = tensor.strides();
  int64_t expected = 1;
  for (int axis : {1, 3, 2, 0}) {
    if (sizes[axis] != 1 && strides[axis] != expected) return false;
    expected *= sizes[axis];
  }
  return true;
}

inline Tensor to_contiguous(const Tensor& tensor) { return tensor.is_contiguous() ? tensor : copied_to_contiguous(tensor); }

inline Tensor to_channels_last(const Tensor& tensor) {
  return is_channels_last(tensor) ? tensor : copied_to_channels_last(tensor);
}

}  // namespace burnish
