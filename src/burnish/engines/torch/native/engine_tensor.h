// Tensors and threads of PyTorch's, all by its stable interface (torch_interface.h). operators.h, which a kernel includes, tells PyTorch
// of the operators.

#pragma once

#include <cstring>
#include <utility>

#include "errors.h"
#include "shapes.h"
#include "torch_interface.h"

namespace burnish {

// Goes on where PyTorch succeeded.
inline void check_call(int32_t code) {
  if (code == 0) return;
  if (torch_exception_get_what_without_backtrace) refuse({torch_exception_get_what_without_backtrace()});
  refuse({"PyTorch failed in a function that a kernel called"});
}

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

inline Tensor make_strided(Sizes sizes, const std::vector<int64_t>& strides, ScalarType type = kFloat) {
  AtenTensorHandle made;
  check_call(aoti_torch_empty_strided(static_cast<int64_t>(sizes.size()), sizes.data(), strides.data(), static_cast<int32_t>(type),
                                      aoti_torch_device_type_cpu(), 0, &made));
  return Tensor(made);
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

inline Tensor copied_to_contiguous(const Tensor& tensor) {
  return copied_to(tensor, aoti_torch_memory_format_contiguous_format());
}

inline Tensor copied_to_channels_last(const Tensor& tensor) {
  return copied_to(tensor, aoti_torch_memory_format_channels_last());
}

}  // namespace burnish
