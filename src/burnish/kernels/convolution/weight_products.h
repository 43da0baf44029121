// The gradient of a convolution's kernels as products of matrices: of each pixel (i, j) of the kernels,
//
//   dw[:, i, j, :] = dy^T x',
//
// where the rows of dy [pixels, K] are the convolution's results, and those of x' [pixels, C] the pixels of the input that (i, j) meets.
// The products are cut into parts whose sums stay in the cache of a core: some channels of dy, some of x. A part goes over all pixels.

#pragma once

#include <algorithm>
#include <numeric>

#include "matrix.h"
#include "tensor.h"

namespace burnish::weight_products {

using namespace matrix;
using matrix::load;  // beside those of vectors.h, which another kernel of the same library may include
using matrix::store;
using matrix::Vector;

constexpr int64_t kDepth = 64;     // pixels that are summed in registers before they enter the sums of all pixels
constexpr int64_t kExtent = 256;   // channels of a part

// A convolution of images with their channels last.
struct Convolution {
  int64_t images, height, width, channels;        // of x
  int64_t out_height, out_width, outputs;         // of dy
  int64_t kernel_height, kernel_width;
  int64_t stride_height, stride_width, top, left;
  int64_t dilation_height = 1, dilation_width = 1;

  int64_t pixels() const { return images * out_height * out_width; }
  int64_t places() const { return kernel_height * kernel_width; }
};

// How the work is cut: part (place in the kernels, block of k, block of c), each over `splits` ranges of the pixels.
struct Parts {
  int64_t k_extent, c_extent;  // of a block
  int64_t k_blocks, c_blocks, each, splits;

  int64_t sums() const { return k_extent * c_extent; }
};

inline Parts parts_of(const Convolution& shape, int64_t threads) {
  Parts parts;
  parts.k_extent = divide_up(shape.outputs, divide_up(shape.outputs, kExtent));
  parts.c_extent = round_up(divide_up(shape.channels, divide_up(shape.channels, kExtent)), kLanes);
  parts.k_blocks = divide_up(shape.outputs, parts.k_extent);
  parts.c_blocks = divide_up(shape.channels, parts.c_extent);
  parts.each = shape.places() * parts.k_blocks * parts.c_blocks;
  // As many for each thread, where there are enough pixels.
  bool few = parts.each < 4 * threads;
  int64_t most = std::max<int64_t>(1, divide_up(shape.pixels(), kDepth));
  parts.splits = few ? std::min(threads / std::gcd(parts.each, threads), most) : 1;
  return parts;
}

// Some channels of a row, whole vectors of them; zeros behind the last.
[[gnu::always_inline]] inline void copy_row(const float* source, float* target, int64_t count) {
  for (int64_t c = 0; c < count; c += kLanes) store(target + c, load_some(source + c, count - c));
}

// The channels [c, c + inputs) of the pixels of x that dy's pixels [first, first + count) meet, as panels [panel][pixel][kPanel].
inline void pack_inputs(const float* x, const Convolution& shape, int64_t row, int64_t column, int64_t first, int64_t count, int64_t c,
                        int64_t inputs, const float* zeros, float* target) {
  int64_t out_column = first % shape.out_width, rest = first / shape.out_width;
  int64_t out_row = rest % shape.out_height, image = rest / shape.out_height;
  for (int64_t pixel = 0; pixel < count; ++pixel) {
    int64_t h = out_row * shape.stride_height - shape.top + row * shape.dilation_height;
    int64_t w = out_column * shape.stride_width - shape.left + column * shape.dilation_width;
    bool inside = h >= 0 && h < shape.height && w >= 0 && w < shape.width;
    const float* source = inside ? x + ((image * shape.height + h) * shape.width + w) * shape.channels + c : zeros;
    for (int64_t from = 0; from < inputs; from += kPanel)
      copy_row(source + from, target + from * kDepth + pixel * kPanel, std::min(kPanel, inputs - from));
    if (++out_column == shape.out_width) {
      out_column = 0;
      if (++out_row == shape.out_height) {
        out_row = 0;
        ++image;
      }
    }
  }
}

// x [images, height, width, C], dy [images, out_height, out_width, K] -> dw [K, kernel_height, kernel_width, C].
inline void weight_gradient(const Convolution& shape, const float* x, const float* dy, float* dw) {
  int64_t threads = get_num_threads();
  Parts parts = parts_of(shape, threads);
  int64_t jobs = parts.each * parts.splits, workers = std::min(threads, jobs), pixels = shape.pixels();
  int64_t dy_step = round_up(parts.k_extent, kLanes) + kSkew;
  int64_t packed = round_up(parts.c_extent, kPanel) * kDepth, room = packed + kDepth * dy_step;
  bool alone = parts.splits == 1;
  Tensor memory = make_tensor({(alone ? workers : jobs) * parts.sums() + workers * room + kExtent});
  float* all_sums = memory.mutable_data_ptr<float>();
  float* work = all_sums + (alone ? workers : jobs) * parts.sums();
  float* zeros = work + workers * room;
  std::fill(zeros, zeros + kExtent, 0.f);
  auto add_up = [&](int64_t part, const float* sums, int64_t from, int64_t to) {  // rows [from, to) of a part, to dw
    int64_t place = part % shape.places(), k = part / shape.places() % parts.k_blocks * parts.k_extent;
    int64_t c = part / shape.places() / parts.k_blocks * parts.c_extent, inputs = std::min(parts.c_extent, shape.channels - c);
    for (int64_t r = from; r < std::min(to, shape.outputs - k); ++r) {
      float* target = dw + ((k + r) * shape.places() + place) * shape.channels + c;
      for (int64_t at = 0; at < inputs; at += kLanes) {
        Vector sum = load(sums + r * parts.c_extent + at);
        for (int64_t split = 1; split < parts.splits; ++split) sum += load(sums + split * parts.sums() + r * parts.c_extent + at);
        store_some(target + at, sum, inputs - at);
      }
    }
  };
  parallel_for(0, workers, 1, [&](int64_t begin, int64_t end) {
    for (int64_t worker = begin; worker < end; ++worker)
      for (int64_t job = worker * jobs / workers; job < (worker + 1) * jobs / workers; ++job) {
        float* inputs_packed = work + worker * room;
        float* dy_packed = inputs_packed + packed;
        float* sums = all_sums + (alone ? worker : job) * parts.sums();
        int64_t split = job % parts.splits, part = job / parts.splits;
        int64_t place = part % shape.places(), k = part / shape.places() % parts.k_blocks * parts.k_extent;
        int64_t c = part / shape.places() / parts.k_blocks * parts.c_extent;
        int64_t outputs = std::min(parts.k_extent, shape.outputs - k), inputs = std::min(parts.c_extent, shape.channels - c);
        int64_t start = split * pixels / parts.splits, stop = (split + 1) * pixels / parts.splits;
        std::fill(sums, sums + parts.sums(), 0.f);
        int64_t most = divide_up(stop - start, std::max<int64_t>(1, divide_up(stop - start, kDepth)));  // none much shorter
        for (int64_t first = start; first < stop; first += most) {
          int64_t count = std::min(most, stop - first);
          pack_inputs(x, shape, place / shape.kernel_width, place % shape.kernel_width, first, count, c, inputs, zeros, inputs_packed);
          for (int64_t pixel = 0; pixel < count; ++pixel)
            copy_row(dy + (first + pixel) * shape.outputs + k, dy_packed + pixel * dy_step, outputs);
          for (int64_t column = 0; column < inputs; column += kPanel)
            multiply<true>(outputs, std::min(kPanel, inputs - column), count, dy_packed, 1, dy_step, inputs_packed + column * kDepth,
                           sums + column, parts.c_extent);
        }
        if (alone) add_up(part, sums, 0, outputs);
      }
  });
  if (alone) return;
  int64_t rows = parts.each * parts.k_extent;
  parallel_for(0, rows, std::max<int64_t>(1, (1 << 14) / parts.c_extent), [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) {
      int64_t part = row / parts.k_extent, r = row % parts.k_extent;
      add_up(part, all_sums + part * parts.splits * parts.sums(), r, r + 1);
    }
  });
}

}  // namespace burnish::weight_products
