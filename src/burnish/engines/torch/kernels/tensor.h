// What kernels see of PyTorch: tensors by their sizes, strides and memory, threads of PyTorch's own pool, and the operators' registration.
// All of it is PyTorch's stable interface. A file that includes nothing else of PyTorch compiles in a second; <torch/library.h> and
// <ATen/...> would cost five more, in every first run on a machine.

#pragma once

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <algorithm>
#include <cstdint>
#include <optional>
#include <tuple>
#include <vector>

#define BURNISH_CHECK STD_TORCH_CHECK

namespace burnish {

using Tensor = torch::stable::Tensor;
using Sizes = torch::headeronly::IntHeaderOnlyArrayRef;
using ScalarType = torch::headeronly::ScalarType;
using MemoryFormat = torch::headeronly::MemoryFormat;
using torch::stable::parallel_for;

constexpr ScalarType kFloat = ScalarType::Float, kBFloat16 = ScalarType::BFloat16, kBool = ScalarType::Bool, kLong = ScalarType::Long;

inline int64_t get_num_threads() { return torch::stable::get_num_threads(); }

inline bool same(Sizes one, Sizes other) { return one.size() == other.size() && std::equal(one.begin(), one.end(), other.begin()); }

inline std::vector<int64_t> strides_of(Sizes sizes) {
  std::vector<int64_t> strides(sizes.size(), 1);
  for (int64_t axis = static_cast<int64_t>(sizes.size()) - 2; axis >= 0; --axis)
    strides[axis] = strides[axis + 1] * std::max<int64_t>(sizes[axis + 1], 1);
  return strides;
}

// Of images [N, C, H, W] whose channels lie side by side.
inline std::vector<int64_t> channels_last_strides_of(Sizes sizes) {
  auto extent = [&](int axis) { return std::max<int64_t>(sizes[axis], 1); };
  return {extent(1) * extent(2) * extent(3), 1, extent(1) * extent(3), extent(1)};
}

inline Tensor make_strided(Sizes sizes, const std::vector<int64_t>& strides, ScalarType type = kFloat) {
  int32_t number = torch::stable::detail::to<int32_t>(torch::stable::detail::from(type));
  AtenTensorHandle made;
  TORCH_ERROR_CODE_CHECK(
      aoti_torch_empty_strided(sizes.size(), sizes.data(), strides.data(), number, aoti_torch_device_type_cpu(), 0, &made));
  return Tensor(made);
}

inline Tensor make_tensor(Sizes sizes, ScalarType type = kFloat) { return make_strided(sizes, strides_of(sizes), type); }

inline Tensor make_channels_last(Sizes sizes, ScalarType type = kFloat) {
  return make_strided(sizes, channels_last_strides_of(sizes), type);
}

// A view of the same memory with as many axes or more.
inline Tensor as_strided(const Tensor& tensor, Sizes sizes, Sizes strides) {
  std::vector<int64_t> own(sizes.size() - tensor.dim(), 1);
  own.insert(own.end(), tensor.sizes().begin(), tensor.sizes().end());
  Tensor ranked = own.size() == static_cast<size_t>(tensor.dim()) ? tensor : torch::stable::view(tensor, own);
  AtenTensorHandle made;
  TORCH_ERROR_CODE_CHECK(aoti_torch_as_strided(ranked.get(), sizes.data(), strides.data(), &made));  // of as many axes as it is given
  return Tensor(made);
}

inline Tensor to_contiguous(const Tensor& tensor) { return tensor.is_contiguous() ? tensor : torch::stable::contiguous(tensor); }

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

inline Tensor to_channels_last(const Tensor& tensor) {
  return is_channels_last(tensor) ? tensor : torch::stable::contiguous(tensor, MemoryFormat::ChannelsLast);
}

}  // namespace burnish
