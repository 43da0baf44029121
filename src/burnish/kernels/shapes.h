// What kernels know of tensors beside their memory: types of elements, extents and strides.

#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <vector>

#include "errors.h"

namespace burnish {

// As PyTorch numbers them; ONNX numbers them in another way.
enum class ScalarType : int32_t { Long = 4, Float = 6, Double = 7, Bool = 11, BFloat16 = 15 };

constexpr ScalarType kFloat = ScalarType::Float, kBFloat16 = ScalarType::BFloat16, kBool = ScalarType::Bool, kLong = ScalarType::Long,
                     kDouble = ScalarType::Double;

// The upper half of a float32.
struct BFloat16 {
  uint16_t bits;

  BFloat16() = default;

  // To the nearest, ties to even.
  explicit BFloat16(float value) {
    uint32_t word;
    std::memcpy(&word, &value, sizeof word);
    bits = static_cast<uint16_t>(value != value ? 0x7fc0u : (word + 0x7fffu + ((word >> 16) & 1u)) >> 16);
  }

  operator float() const {
    uint32_t word = static_cast<uint32_t>(bits) << 16;
    float value;
    std::memcpy(&value, &word, sizeof value);
    return value;
  }
};

template <typename T>
constexpr ScalarType type_of = ScalarType(-1);
template <>
inline constexpr ScalarType type_of<float> = kFloat;
template <>
inline constexpr ScalarType type_of<double> = kDouble;
template <>
inline constexpr ScalarType type_of<int64_t> = kLong;
template <>
inline constexpr ScalarType type_of<bool> = kBool;
template <>
inline constexpr ScalarType type_of<BFloat16> = kBFloat16;

// Extents or strides that lie elsewhere.
class Sizes {
 public:
  Sizes(const int64_t* data, size_t size) : data_(data), size_(size) {}
  Sizes(const std::vector<int64_t>& sizes) : Sizes(sizes.data(), sizes.size()) {}
  Sizes(std::initializer_list<int64_t> sizes) : Sizes(sizes.begin(), sizes.size()) {}

  const int64_t* data() const { return data_; }
  size_t size() const { return size_; }
  const int64_t* begin() const { return data_; }
  const int64_t* end() const { return data_ + size_; }
  int64_t operator[](size_t index) const { return data_[index]; }

 private:
  const int64_t* data_;
  size_t size_;
};

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

}  // namespace burnish
