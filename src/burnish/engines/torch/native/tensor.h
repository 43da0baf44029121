// What kernels see of PyTorch: tensors by their sizes, strides and memory, and threads of PyTorch's own pool. All of it is PyTorch's stable
// interface (torch_interface.h). operators.h, which a kernel includes, tells PyTorch of the operators.

#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <utility>
#include <vector>

#include "errors.h"

namespace burnish {

// As PyTorch numbers them.
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

// A handle to a tensor of PyTorch's, which copies share.
class Tensor {
 public:
  Tensor() = default;
  explicit Tensor(AtenTensorHandle owned) : handle_(owned) {}
  Tensor(Tensor&& other) noexcept : handle_(other.release()) {}
  Tensor(const Tensor& other) {
    if (other.handle_) check_call(aoti_torch_new_tensor_handle(other.handle_, &handle_));
  }
  Tensor& operator=(Tensor other) noexcept {
    std::swap(handle_, other.handle_);
    return *this;
  }
  ~Tensor() {
    if (handle_) aoti_torch_delete_tensor_object(handle_);
  }

  AtenTensorHandle get() const { return handle_; }
  bool defined() const { return handle_; }

  // Gives the handle away.
  AtenTensorHandle release() { return std::exchange(handle_, nullptr); }

  int64_t dim() const { return asked<int64_t>(aoti_torch_get_dim); }
  int64_t numel() const { return asked<int64_t>(aoti_torch_get_numel); }
  bool is_contiguous() const { return asked<bool>(aoti_torch_is_contiguous); }
  ScalarType scalar_type() const { return static_cast<ScalarType>(asked<int32_t>(aoti_torch_get_dtype)); }
  Sizes sizes() const { return {asked<int64_t*>(aoti_torch_get_sizes), static_cast<size_t>(dim())}; }
  Sizes strides() const { return {asked<int64_t*>(aoti_torch_get_strides), static_cast<size_t>(dim())}; }
  int64_t size(int64_t axis) const { return asked<int64_t*>(aoti_torch_get_sizes)[of_axis(axis)]; }
  int64_t stride(int64_t axis) const { return asked<int64_t*>(aoti_torch_get_strides)[of_axis(axis)]; }

  const void* const_data_ptr() const { return asked<const void*>(torch_get_const_data_ptr); }
  void* mutable_data_ptr() const { return asked<void*>(torch_get_mutable_data_ptr); }

  template <typename T>
  const T* const_data_ptr() const {
    check_type(type_of<T>);
    return static_cast<const T*>(const_data_ptr());
  }

  template <typename T>
  T* mutable_data_ptr() const {
    check_type(type_of<T>);
    return static_cast<T*>(mutable_data_ptr());
  }

 private:
  template <typename Answer>
  Answer asked(int32_t (*question)(AtenTensorHandle, Answer*)) const {
    Answer answer;
    check_call(question(handle_, &answer));
    return answer;
  }

  int64_t of_axis(int64_t axis) const {
    int64_t rank = dim();
    BURNISH_CHECK(axis >= -rank && axis < rank, "a tensor of ", rank, " axes has no axis ", axis);
    return axis < 0 ? axis + rank : axis;
  }

  void check_type(ScalarType expected) const {
    ScalarType found = scalar_type();
    BURNISH_CHECK(found == expected, "elements of PyTorch's type number ", static_cast<int64_t>(expected), " expected, found ",
                  static_cast<int64_t>(found));
  }

  AtenTensorHandle handle_ = nullptr;
};

inline int64_t get_num_threads() {
  uint32_t threads;
  check_call(torch_get_num_threads(&threads));
  return threads;
}

// Calls `run(begin, end)` with parts of a range, of `grain` or more each, on PyTorch's threads.
template <typename Run>
void parallel_for(int64_t begin, int64_t end, int64_t grain, const Run& run) {
  auto call = [](int64_t first, int64_t last, void* context) { (*static_cast<const Run*>(context))(first, last); };
  check_call(torch_parallel_for(begin, end, grain, call, const_cast<void*>(static_cast<const void*>(&run))));
}

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
  AtenTensorHandle made;
  check_call(aoti_torch_empty_strided(static_cast<int64_t>(sizes.size()), sizes.data(), strides.data(), static_cast<int32_t>(type),
                                      aoti_torch_device_type_cpu(), 0, &made));
  return Tensor(made);
}

inline Tensor make_tensor(Sizes sizes, ScalarType type = kFloat) { return make_strided(sizes, strides_of(sizes), type); }

inline Tensor make_channels_last(Sizes sizes, ScalarType type = kFloat) {
  return make_strided(sizes, channels_last_strides_of(sizes), type);
}

// A view of the same memory.
inline Tensor as_strided(const Tensor& tensor, Sizes sizes, Sizes strides) {
  AtenTensorHandle made;
  check_call(aoti_torch__reinterpret_tensor(tensor.get(), static_cast<int64_t>(sizes.size()), sizes.data(), strides.data(), 0, &made));
  return Tensor(made);
}

inline Tensor copied_to(const Tensor& tensor, int32_t memory_format) {
  Tensor shared(tensor);
  StableIValue stack[2] = {0, 0};
  AtenTensorHandle handle = shared.release();
  std::memcpy(&stack[0], &handle, sizeof handle);
  std::memcpy(&stack[1], &memory_format, sizeof memory_format);
  check_call(torch_call_dispatcher("aten::contiguous", "", stack, kInterfaceVersion));
  std::memcpy(&handle, &stack[0], sizeof handle);
  return Tensor(handle);
}

inline Tensor to_contiguous(const Tensor& tensor) {
  return tensor.is_contiguous() ? tensor : copied_to(tensor, aoti_torch_memory_format_contiguous_format());
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

inline Tensor to_channels_last(const Tensor& tensor) {
  return is_channels_last(tensor) ? tensor : copied_to(tensor, aoti_torch_memory_format_channels_last());
}

}  // namespace burnish
