// Tensors and threads of ONNX Runtime's. A tensor's memory is ONNX Runtime's, or made here and shared by its copies; elements lie in the
// order of their axes unless a kernel has asked for another.

#pragma once

#include <cstdint>
#include <cstring>
#include <exception>
#include <memory>
#include <mutex>
#include <utility>
#include <vector>

#include "errors.h"
#include "onnxruntime_interface.h"
#include "shapes.h"

namespace burnish {

// ONNX Runtime's functions, from when the library was loaded.
inline const OrtApi* api = nullptr;

// Goes on where ONNX Runtime succeeded.
inline void check_call(OrtStatus* status) {
  if (!status) return;
  Error error;
  error.add(api->GetErrorMessage(status));
  api->ReleaseStatus(status);
  throw error;
}

// The call of a kernel that runs on this thread: its threads are those that a kernel may use.
inline thread_local const OrtKernelContext* running = nullptr;

inline size_t bytes_of(ScalarType type) {
  switch (type) {
    case kFloat: return 4;
    case kBFloat16: return 2;
    case kBool: return 1;
    default: return 8;
  }
}

class Tensor {
 public:
  Tensor() = default;
  Tensor(void* data, Sizes sizes, Sizes strides, ScalarType type, std::shared_ptr<char[]> memory = nullptr)
      : data_(data),
        sizes_(sizes.begin(), sizes.end()),
        strides_(strides.begin(), strides.end()),
        type_(type),
        memory_(std::move(memory)) {}

  bool defined() const { return data_; }
  int64_t dim() const { return static_cast<int64_t>(sizes_.size()); }

  int64_t numel() const {
    int64_t count = 1;
    for (int64_t size : sizes_) count *= size;
    return count;
  }

  // The stride of an extent of one says nothing.
  bool is_contiguous() const {
    int64_t expected = 1;
    for (int64_t axis = dim() - 1; axis >= 0; --axis) {
      if (sizes_[axis] != 1 && strides_[axis] != expected) return numel() == 0;
      expected *= sizes_[axis];
    }
    return true;
  }

  ScalarType scalar_type() const { return type_; }
  Sizes sizes() const { return sizes_; }
  Sizes strides() const { return strides_; }
  int64_t size(int64_t axis) const { return sizes_[of_axis(axis)]; }
  int64_t stride(int64_t axis) const { return strides_[of_axis(axis)]; }
  const void* const_data_ptr() const { return data_; }
  void* mutable_data_ptr() const { return data_; }
  const std::shared_ptr<char[]>& memory() const { return memory_; }

  template <typename T>
  const T* const_data_ptr() const {
    check_type(type_of<T>);
    return static_cast<const T*>(data_);
  }

  template <typename T>
  T* mutable_data_ptr() const {
    check_type(type_of<T>);
    return static_cast<T*>(data_);
  }

 private:
  int64_t of_axis(int64_t axis) const {
    BURNISH_CHECK(axis >= -dim() && axis < dim(), "a tensor of ", dim(), " axes has no axis ", axis);
    return axis < 0 ? axis + dim() : axis;
  }

  void check_type(ScalarType expected) const {
    BURNISH_CHECK(type_ == expected, "elements of type number ", static_cast<int64_t>(expected), " expected, found ",
                  static_cast<int64_t>(type_));
  }

  void* data_ = nullptr;
  std::vector<int64_t> sizes_, strides_;
  ScalarType type_ = kFloat;
  std::shared_ptr<char[]> memory_;  // null where it is ONNX Runtime's
};

// In how many parts kernels cut what they sum up by threads, and what they pack for each: ONNX Runtime does not say how many threads it
// has. Of most kernels the bits do not depend on it.
inline thread_local int64_t part_count = 8;
inline int64_t get_num_threads() { return part_count; }

// Another number of parts, as long as this is there.
class Parts {
 public:
  explicit Parts(int64_t count) : before_(part_count) { part_count = std::max<int64_t>(count, 1); }
  Parts(const Parts&) = delete;
  Parts& operator=(const Parts&) = delete;
  ~Parts() { part_count = before_; }

 private:
  int64_t before_;
};

// Calls `run(begin, end)` with parts of a range, of `grain` or more each, on the threads of ONNX Runtime's session. The first exception
// comes out of the call, as it would from a loop: none may pass through a thread of ONNX Runtime's.
template <typename Run>
void parallel_for(int64_t begin, int64_t end, int64_t grain, const Run& run) {
  constexpr int64_t kMostParts = 64;
  int64_t count = end - begin;
  if (count <= 0) return;
  int64_t parts = std::min((count + grain - 1) / std::max<int64_t>(grain, 1), kMostParts);
  if (parts <= 1 || !running) return run(begin, end);
  struct Shared {
    const Run& run;
    int64_t begin, count, parts;
    std::mutex lock;
    std::exception_ptr failure;
  } shared{run, begin, count, parts, {}, nullptr};
  auto call = [](void* data, size_t part) {
    Shared& shared = *static_cast<Shared*>(data);
    int64_t place = static_cast<int64_t>(part);
    try {
      shared.run(shared.begin + shared.count * place / shared.parts, shared.begin + shared.count * (place + 1) / shared.parts);
    } catch (...) {
      std::lock_guard<std::mutex> guard(shared.lock);
      if (!shared.failure) shared.failure = std::current_exception();
    }
  };
  check_call(api->KernelContext_ParallelFor(running, call, static_cast<size_t>(parts), 0, &shared));
  if (shared.failure) std::rethrow_exception(shared.failure);
}

inline Tensor make_strided(Sizes sizes, const std::vector<int64_t>& strides, ScalarType type = kFloat) {
  int64_t count = 1;
  for (int64_t size : sizes) count *= size;
  std::shared_ptr<char[]> memory(new char[static_cast<size_t>(count) * bytes_of(type)]);
  return Tensor(memory.get(), sizes, strides, type, memory);
}

// A view of the same memory.
inline Tensor as_strided(const Tensor& tensor, Sizes sizes, Sizes strides) {
  return Tensor(tensor.mutable_data_ptr(), sizes, strides, tensor.scalar_type(), tensor.memory());
}

inline Tensor copied(const Tensor& tensor, const std::vector<int64_t>& strides) {
  Tensor copy = make_strided(tensor.sizes(), strides, tensor.scalar_type());
  size_t bytes = bytes_of(tensor.scalar_type());
  int64_t rank = tensor.dim(), left = tensor.numel(), from = 0, to = 0;
  std::vector<int64_t> place(rank, 0);
  for (; left > 0; --left) {
    std::memcpy(static_cast<char*>(copy.mutable_data_ptr()) + to * bytes, static_cast<const char*>(tensor.const_data_ptr()) + from * bytes, bytes);
    for (int64_t axis = rank - 1; axis >= 0; --axis) {
      from += tensor.stride(axis), to += strides[axis];
      if (++place[axis] < tensor.size(axis)) break;
      from -= tensor.stride(axis) * place[axis], to -= strides[axis] * place[axis];
      place[axis] = 0;
    }
  }
  return copy;
}

inline Tensor copied_to_contiguous(const Tensor& tensor) { return copied(tensor, strides_of(tensor.sizes())); }
inline Tensor copied_to_channels_last(const Tensor& tensor) { return copied(tensor, channels_last_strides_of(tensor.sizes())); }

}  // namespace burnish
