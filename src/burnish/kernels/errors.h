// What a kernel refuses: exceptions, which its engine turns into an error of the caller's. <stdexcept> and <string> would take as long to
// compile as a small kernel.

#pragma once

#include <cstdint>
#include <cstring>
#include <exception>
#include <initializer_list>

namespace burnish {

class Error : public std::exception {
 public:
  void add(const char* text) {
    for (; *text && size_ + 1 < sizeof text_; ++text) text_[size_++] = *text;
  }

  void add(int64_t number) {
    char digits[24];
    int64_t place = sizeof digits - 1;
    digits[place] = 0;
    uint64_t left = number < 0 ? -static_cast<uint64_t>(number) : static_cast<uint64_t>(number);
    do digits[--place] = static_cast<char>('0' + left % 10);
    while (left /= 10);
    if (number < 0) digits[--place] = '-';
    add(digits + place);
  }

  const char* what() const noexcept override { return text_; }

 private:
  char text_[1024] = {};
  size_t size_ = 0;
};

// A part of a message: text, or a number.
struct Part {
  const char* text = nullptr;
  int64_t number = 0;

  Part(const char* given) : text(given) {}
  Part(int64_t given) : number(given) {}
};

[[noreturn, gnu::cold, gnu::noinline]] inline void refuse(std::initializer_list<Part> parts) {
  Error error;
  for (const Part& part : parts) part.text ? error.add(part.text) : error.add(part.number);
  throw error;
}

}  // namespace burnish

#define BURNISH_CHECK(condition, ...) \
  do                                  \
    if (!(condition)) [[unlikely]]    \
      ::burnish::refuse({__VA_ARGS__}); \
  while (false)
