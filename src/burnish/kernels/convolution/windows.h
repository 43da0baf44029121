// Convolutions of any window as products of matrices: the windows of the images are the rows of a matrix. Images have their channels last,
// kernels the order of ONNX, [K, C, height, width]. Where there are more windows than kernels, a row is [pixel of the window][channel], as
// the pixels lie in memory, and the kernels are put into that order; else it is [channel][pixel of the window], as the kernels lie.

#pragma once

#include <algorithm>
#include <vector>

#include "interleave.h"
#include "product.h"
#include "weight_products.h"

namespace burnish::windows {

using matrix::divide_up;
using products::Lines;
using products::multiply_matrices;
using weight_products::Convolution;

constexpr int64_t kMostWindows = 1 << 20;  // numbers of the matrix of windows that are in memory at once
constexpr int64_t kCachedWindows = 1 << 18;  // that the second-level caches hold of it
constexpr int64_t kFewChannels = 16;       // with fewer, a window's pixels are too short to be multiplied one by one
constexpr int64_t kCopied = 1 << 14;       // numbers that are worth a thread

// Whether windows are the pixels themselves, one after another.
inline bool is_plain(const Convolution& shape) {
  return shape.places() == 1 && shape.stride_height == 1 && shape.stride_width == 1 && shape.top == 0 && shape.left == 0 &&
         shape.out_height == shape.height && shape.out_width == shape.width;
}

inline int64_t window_size(const Convolution& shape) { return shape.channels * shape.places(); }

// Windows of a matrix that is in memory at once.
inline int64_t windows_at_once(const Convolution& shape) {
  int64_t most = std::max<int64_t>(1, kMostWindows / std::max<int64_t>(window_size(shape), 1));
  return divide_up(shape.pixels(), divide_up(std::max<int64_t>(shape.pixels(), 1), most));
}

// The places in x of the pixels of the window of result `pixel`; -1 for those outside of the image.
inline void find_places(const Convolution& shape, int64_t pixel, int64_t* places) {
  int64_t column = pixel % shape.out_width, rest = pixel / shape.out_width, row = rest % shape.out_height, image = rest / shape.out_height;
  int64_t top = row * shape.stride_height - shape.top, left = column * shape.stride_width - shape.left;
  for (int64_t i = 0; i < shape.kernel_height; ++i)
    for (int64_t j = 0; j < shape.kernel_width; ++j) {
      int64_t h = top + i * shape.dilation_height, w = left + j * shape.dilation_width;
      bool inside = h >= 0 && h < shape.height && w >= 0 && w < shape.width;
      *places++ = inside ? ((image * shape.height + h) * shape.width + w) * shape.channels : -1;
    }
}

// The windows of results [first, first + count), as rows [C][pixel of the window].
inline void gather(const Convolution& shape, const float* x, int64_t first, int64_t count, float* rows) {
  int64_t size = window_size(shape), places = shape.places();
  std::vector<float> zeros(shape.channels, 0.f);
  parallel_for(0, count, std::max<int64_t>(1, kCopied / std::max<int64_t>(size, 1)), [&](int64_t begin, int64_t end) {
    std::vector<int64_t> from(places);
    auto pixel = [&](int64_t place) { return from[place] < 0 ? zeros.data() : x + from[place]; };
    for (int64_t row = begin; row < end; ++row) {
      find_places(shape, first + row, from.data());
      interleave::join(pixel, places, shape.channels, rows + row * size);
    }
  });
}

// Adds rows of windows to where the pixels of x lie that they are of. Each thread has some of the channels.
inline void add_windows(const Convolution& shape, const float* rows, int64_t first, int64_t count, float* dx) {
  int64_t size = window_size(shape), places = shape.places(), side = interleave::kSide;
  int64_t least = std::max<int64_t>(1, kCopied / std::max<int64_t>(count * places * side, 1));
  parallel_for(0, divide_up(shape.channels, side), least, [&](int64_t begin, int64_t end) {
    int64_t channel = begin * side, channels = std::min(end * side, shape.channels) - channel;
    std::vector<float> parts(places * channels);
    std::vector<int64_t> to(places);
    for (int64_t row = 0; row < count; ++row) {
      find_places(shape, first + row, to.data());
      interleave::part(rows + row * size + channel * places, places, channels, [&](int64_t place) { return parts.data() + place * channels; });
      for (int64_t place = 0; place < places; ++place) {
        if (to[place] < 0) continue;
        float* target = dx + to[place] + channel;
        const float* source = parts.data() + place * channels;
        for (int64_t c = 0; c < channels; ++c) target[c] += source[c];
      }
    }
  });
}

// Whether it costs less to put the kernels into the order of the windows than the windows into that of the kernels.
inline bool follows_pixels(const Convolution& shape) { return shape.pixels() >= shape.outputs; }

// Windows of a matrix that is multiplied while it lies in the cache: as many as there are kernels at the least, which are packed each time.
inline int64_t windows_in_cache(const Convolution& shape) {
  int64_t most = std::max(kCachedWindows / std::max<int64_t>(window_size(shape), 1), std::max<int64_t>(shape.outputs, 1));
  return divide_up(shape.pixels(), divide_up(std::max<int64_t>(shape.pixels(), 1), most));
}

// Copies few numbers without a call; `count` of them.
[[gnu::always_inline]] inline void copy_few(const float* source, int64_t count, float* target) {
  using Line = interleave::Line;
  int64_t done = 0;
  for (; done + interleave::kSide <= count; done += interleave::kSide) std::memcpy(target + done, source + done, sizeof(Line));
  for (; done < count; ++done) target[done] = source[done];
}

// The window whose first pixel is (top, left) of an image, as [pixel of the window][C].
inline void copy_window(const Convolution& shape, const float* image, int64_t top, int64_t left, float* target) {
  int64_t channels = shape.channels, step = shape.dilation_width, wide = shape.kernel_width * channels;
  // Pixels of a row of the window that lie in the image.
  int64_t begin = left < 0 ? std::min(divide_up(-left, step), shape.kernel_width) : 0;
  int64_t end = left < shape.width ? std::clamp(divide_up(shape.width - left, step), begin, shape.kernel_width) : begin;
  for (int64_t i = 0; i < shape.kernel_height; ++i, target += wide) {
    int64_t h = top + i * shape.dilation_height;
    if (h < 0 || h >= shape.height) {
      std::fill_n(target, wide, 0.f);
      continue;
    }
    const float* line = image + (h * shape.width + left) * channels;
    for (int64_t c = 0; c < begin * channels; ++c) target[c] = 0.f;
    if (step == 1)
      copy_few(line + begin * channels, (end - begin) * channels, target + begin * channels);
    else
      for (int64_t j = begin; j < end; ++j) copy_few(line + j * step * channels, channels, target + j * channels);
    for (int64_t c = end * channels; c < wide; ++c) target[c] = 0.f;
  }
}

// The windows of results [first, first + count), as rows [pixel of the window][C].
inline void copy_windows(const Convolution& shape, const float* x, int64_t first, int64_t count, float* rows) {
  int64_t size = window_size(shape), whole = shape.height * shape.width * shape.channels;
  parallel_for(0, count, std::max<int64_t>(1, kCopied / std::max<int64_t>(size, 1)), [&](int64_t begin, int64_t end) {
    int64_t column = (first + begin) % shape.out_width, rest = (first + begin) / shape.out_width;
    int64_t row = rest % shape.out_height, image = rest / shape.out_height;
    for (int64_t window = begin; window < end; ++window) {
      copy_window(shape, x + image * whole, row * shape.stride_height - shape.top, column * shape.stride_width - shape.left, rows + window * size);
      if (++column < shape.out_width) continue;
      column = 0;
      if (++row == shape.out_height) row = 0, ++image;
    }
  });
}

// Adds rows [pixel of the window][C] to where the pixels of x lie that they are of. Each thread has some of the channels.
inline void add_copied_windows(const Convolution& shape, const float* rows, int64_t first, int64_t count, float* dx) {
  int64_t size = window_size(shape), places = shape.places(), side = interleave::kSide;
  int64_t least = std::max<int64_t>(1, kCopied / std::max<int64_t>(count * places * side, 1));
  parallel_for(0, divide_up(shape.channels, side), least, [&](int64_t begin, int64_t end) {
    int64_t channel = begin * side, channels = std::min(end * side, shape.channels) - channel;
    std::vector<int64_t> to(places);
    for (int64_t row = 0; row < count; ++row) {
      find_places(shape, first + row, to.data());
      for (int64_t place = 0; place < places; ++place) {
        if (to[place] < 0) continue;
        float* __restrict target = dx + to[place] + channel;
        const float* __restrict source = rows + row * size + place * shape.channels + channel;
        for (int64_t c = 0; c < channels; ++c) target[c] += source[c];
      }
    }
  });
}

// x [N, H, W, C], kernels [K, kh, kw, C], b [K] or null -> y [N, H', W', K].
inline void convolve_in_order(const Convolution& shape, const float* x, const float* kernels, const float* b, float* y) {
  int64_t size = window_size(shape), most = windows_in_cache(shape);
  Tensor memory = make_tensor({most * size});
  float* rows = memory.mutable_data_ptr<float>();
  for (int64_t first = 0; first < shape.pixels(); first += most) {
    int64_t count = std::min(most, shape.pixels() - first);
    copy_windows(shape, x, first, count, rows);
    multiply_matrices(count, shape.outputs, size, {rows, size, 1}, {kernels, size, 1}, b, y + first * shape.outputs, shape.outputs);
  }
}

// The convolution of dy that gives dx where windows go on by one pixel.
inline Convolution transposed(const Convolution& shape) {
  Convolution other = shape;
  std::swap(other.height, other.out_height), std::swap(other.width, other.out_width), std::swap(other.channels, other.outputs);
  other.top = (shape.kernel_height - 1) * shape.dilation_height - shape.top;
  other.left = (shape.kernel_width - 1) * shape.dilation_width - shape.left;
  return other;
}

// w [K, C, kh, kw] -> [C, kh, kw, K], the pixels in the opposite order.
inline void kernels_of_gradient(const Convolution& shape, const float* w, float* kernels) {
  int64_t size = window_size(shape), places = shape.places(), outputs = shape.outputs;
  parallel_for(0, shape.channels, std::max<int64_t>(1, kCopied / std::max<int64_t>(outputs * places, 1)), [&](int64_t begin, int64_t end) {
    for (int64_t c = begin; c < end; ++c)
      for (int64_t k = 0; k < outputs; ++k)
        for (int64_t place = 0; place < places; ++place)
          kernels[(c * places + places - 1 - place) * outputs + k] = w[k * size + c * places + place];
  });
}

// dw [K][kh][kw][C] to [K][C][kh][kw].
inline void reorder_kernels(const Convolution& shape, const float* channels_last, float* dw) {
  int64_t size = window_size(shape);
  parallel_for(0, shape.outputs, std::max<int64_t>(1, kCopied / std::max<int64_t>(size, 1)), [&](int64_t begin, int64_t end) {
    for (int64_t k = begin; k < end; ++k)
      interleave::join([&](int64_t place) { return channels_last + k * size + place * shape.channels; }, shape.places(), shape.channels,
                       dw + k * size);
  });
}

// w [K][C][kh][kw] to [K][kh][kw][C].
inline void kernels_channels_last(const Convolution& shape, const float* w, float* channels_last) {
  int64_t size = window_size(shape);
  parallel_for(0, shape.outputs, std::max<int64_t>(1, kCopied / std::max<int64_t>(size, 1)), [&](int64_t begin, int64_t end) {
    for (int64_t k = begin; k < end; ++k)
      interleave::part(w + k * size, shape.places(), shape.channels,
                       [&](int64_t place) { return channels_last + k * size + place * shape.channels; });
  });
}

// x [N, H, W, C], w [K, C, kh, kw], b [K] or null -> y [N, H', W', K].
inline void convolve(const Convolution& shape, const float* x, const float* w, const float* b, float* y) {
  int64_t size = window_size(shape);
  Lines<float> kernels{w, size, 1};
  if (is_plain(shape)) return multiply_matrices(shape.pixels(), shape.outputs, size, {x, size, 1}, kernels, b, y, shape.outputs);
  if (follows_pixels(shape)) {
    Tensor ordered = make_tensor({shape.outputs * size});
    kernels_channels_last(shape, w, ordered.mutable_data_ptr<float>());
    return convolve_in_order(shape, x, ordered.const_data_ptr<float>(), b, y);
  }
  int64_t most = windows_at_once(shape);
  Tensor memory = make_tensor({most * size});
  float* rows = memory.mutable_data_ptr<float>();
  for (int64_t first = 0; first < shape.pixels(); first += most) {
    int64_t count = std::min(most, shape.pixels() - first);
    gather(shape, x, first, count, rows);
    multiply_matrices(count, shape.outputs, size, {rows, size, 1}, kernels, b, y + first * shape.outputs, shape.outputs);
  }
}

// dy [N, H', W', K], w [K, C, kh, kw] -> dx [N, H, W, C].
inline void input_gradient(const Convolution& shape, const float* dy, const float* w, float* dx) {
  int64_t size = window_size(shape);
  Lines<float> kernels{w, 1, size};
  if (is_plain(shape)) return multiply_matrices(shape.pixels(), size, shape.outputs, {dy, shape.outputs, 1}, kernels, nullptr, dx, size);
  bool follows = follows_pixels(shape);
  Tensor ordered = make_tensor({follows ? shape.outputs * size : 0});
  if (follows && shape.stride_height == 1 && shape.stride_width == 1) {
    kernels_of_gradient(shape, w, ordered.mutable_data_ptr<float>());
    return convolve_in_order(transposed(shape), dy, ordered.const_data_ptr<float>(), nullptr, dx);
  }
  if (follows) {
    kernels_channels_last(shape, w, ordered.mutable_data_ptr<float>());
    kernels.data = ordered.const_data_ptr<float>();
  }
  int64_t most = follows ? windows_in_cache(shape) : windows_at_once(shape), image = shape.height * shape.width * shape.channels;
  Tensor memory = make_tensor({most * size});
  float* rows = memory.mutable_data_ptr<float>();
  parallel_for(0, shape.images * image, kCopied, [&](int64_t begin, int64_t end) { std::fill(dx + begin, dx + end, 0.f); });
  for (int64_t first = 0; first < shape.pixels(); first += most) {
    int64_t count = std::min(most, shape.pixels() - first);
    multiply_matrices(count, size, shape.outputs, {dy + first * shape.outputs, shape.outputs, 1}, kernels, nullptr, rows, size);
    if (follows)
      add_copied_windows(shape, rows, first, count, dx);
    else
      add_windows(shape, rows, first, count, dx);
  }
}

// dy [N, H', W', K], x [N, H, W, C] -> dw [K, C, kh, kw].
inline void weight_gradient(const Convolution& shape, const float* dy, const float* x, float* dw) {
  int64_t size = window_size(shape), pixels = shape.pixels(), outputs = shape.outputs;
  bool follows = follows_pixels(shape) && shape.places() > 1;
  int64_t most = follows ? std::max(windows_in_cache(shape), products::kDepth) : windows_at_once(shape);
  if (!follows && shape.channels >= kFewChannels && (most < pixels || (is_plain(shape) && outputs * size < pixels))) {
    Tensor memory = make_tensor({outputs * size});
    float* sums = shape.places() == 1 ? dw : memory.mutable_data_ptr<float>();
    weight_products::weight_gradient(shape, x, dy, sums);
    if (sums != dw) reorder_kernels(shape, sums, dw);
    return;
  }
  if (is_plain(shape)) return multiply_matrices(outputs, size, pixels, {dy, 1, outputs}, {x, 1, size}, nullptr, dw, size);
  bool whole = most >= pixels;
  Tensor memory = make_tensor({most * size + (whole ? 0 : outputs * size) + (follows ? outputs * size : 0)});
  float *rows = memory.mutable_data_ptr<float>(), *sums = rows + most * size, *target = follows ? sums + (whole ? 0 : outputs * size) : dw;
  for (int64_t first = 0; first < pixels; first += most) {
    int64_t count = std::min(most, pixels - first);
    if (follows)
      copy_windows(shape, x, first, count, rows);
    else
      gather(shape, x, first, count, rows);
    multiply_matrices(outputs, size, count, {dy + first * outputs, 1, outputs}, {rows, 1, size}, nullptr, first ? sums : target, size);
    if (first)
      parallel_for(0, outputs * size, kCopied, [&](int64_t begin, int64_t end) {
        for (int64_t index = begin; index < end; ++index) target[index] += sums[index];
      });
  }
  if (pixels == 0)
    std::fill_n(dw, outputs * size, 0.f);
  else if (follows)
    reorder_kernels(shape, target, dw);
}

}  // namespace burnish::windows
