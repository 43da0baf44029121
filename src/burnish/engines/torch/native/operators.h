// How PyTorch calls operators: with a stack of words, which hold the arguments first and the results afterwards. An operator is an
// ordinary function of tensors, numbers, flags, vectors of these, and std::optional<Tensor>; BURNISH_OPERATORS tells PyTorch of it:
//
//   BURNISH_OPERATORS(CPU) { implement<&name>("name"); }

#pragma once

#include <cstring>
#include <optional>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

#include "errors.h"
#include "tensor.h"

namespace burnish {

static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__, "words are read from their lowest byte on");

template <typename T>
T read_word(StableIValue word) {
  T value;
  std::memcpy(&value, &word, sizeof value);
  return value;
}

template <typename T>
StableIValue word_of(T value) {
  StableIValue word = 0;
  std::memcpy(&word, &value, sizeof value);
  return word;
}

// An argument, which a word owns until it is taken.
template <typename T>
struct Taken {
  T value;
  explicit Taken(StableIValue word) : value(read_word<T>(word)) {}
};

template <>
struct Taken<Tensor> {
  Tensor value;
  explicit Taken(StableIValue word) : value(read_word<AtenTensorHandle>(word)) {}
};

template <>
struct Taken<std::optional<Tensor>> {
  std::optional<Tensor> value;
  explicit Taken(StableIValue word) {
    StableIValue* inner = read_word<StableIValue*>(word);
    if (!inner) return;
    value.emplace(read_word<AtenTensorHandle>(*inner));
    if (torch_delete_stable_ivalue)
      check_call(torch_delete_stable_ivalue(inner));
    else
      delete inner;
  }
};

template <typename T>
struct Taken<std::vector<T>> {
  std::vector<T> value;
  explicit Taken(StableIValue word) {
    StableListHandle list = read_word<StableListHandle>(word);
    size_t size = 0;
    check_call(torch_list_size(list, &size));
    value.reserve(size);
    for (size_t index = 0; index < size; ++index) {
      StableIValue item;
      check_call(torch_list_get_item(list, index, &item));
      value.push_back(std::move(Taken<T>(item).value));
    }
    check_call(torch_delete_list(list));
  }
};

// Of the very types that PyTorch knows: a number that became a flag on its way would lose its value.
template <typename T, std::enable_if_t<std::is_same_v<T, bool> || std::is_same_v<T, int64_t> || std::is_same_v<T, double>, int> = 0>
StableIValue given(T result) {
  return word_of(result);
}

inline StableIValue given(Tensor& result) { return word_of(result.release()); }

inline StableIValue given(std::vector<Tensor>& results) {
  StableListHandle list;
  check_call(torch_new_list_reserve_size(results.size(), &list));
  for (Tensor& result : results) check_call(torch_list_push_back(list, given(result)));
  return word_of(list);
}

template <typename Result>
void give(StableIValue* stack, Result& result) {
  stack[0] = given(result);
}

template <typename... Results>
void give(StableIValue* stack, std::tuple<Results...>& results) {
  std::apply([&](auto&... result) { ((*stack++ = given(result)), ...); }, results);
}

template <auto function, typename Function>
struct Boxed;

template <auto function, typename Result, typename... Arguments>
struct Boxed<function, Result (*)(Arguments...)> {
  static void run(StableIValue* stack, uint64_t arguments, uint64_t) {
    BURNISH_CHECK(arguments == sizeof...(Arguments), "an operator of ", static_cast<int64_t>(sizeof...(Arguments)), " arguments got ",
                  static_cast<int64_t>(arguments));
    call(stack, std::index_sequence_for<Arguments...>());
  }

  template <size_t... index>
  static void call(StableIValue* stack, std::index_sequence<index...>) {
    if constexpr (std::is_void_v<Result>) {
      function(Taken<std::decay_t<Arguments>>(stack[index]).value...);
    } else {
      Result result = function(Taken<std::decay_t<Arguments>>(stack[index]).value...);
      give(stack, result);
    }
  }
};

// The operators of a file, which stay as long as the process.
class Operators {
 public:
  Operators(const char* key, const char* file, void (*implement_all)(Operators&)) {
    check_call(aoti_torch_library_init_impl("burnish", key, file, 0, &library_));
    implement_all(*this);
  }

  template <auto function>
  void implement(const char* name) {
    check_call(torch_library_impl(library_, name, &Boxed<function, decltype(function)>::run, kInterfaceVersion));
  }

 private:
  TorchLibraryHandle library_ = nullptr;
};

}  // namespace burnish

#define BURNISH_OPERATORS(key)                                                               \
  static void implement_operators(::burnish::Operators&);                                    \
  static const ::burnish::Operators operators_of_this_file(#key, __FILE__, &implement_operators); \
  static void implement_operators(::burnish::Operators& operators)
