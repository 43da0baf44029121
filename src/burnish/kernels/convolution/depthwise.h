// Depthwise convolution of images with their channels last, and its two gradients: every channel has a square kernel of its own.
//
// A row is walked in tiles of a few pixels. In a tile, one vector of channels after the other keeps its results in registers, so that
// a pixel is loaded once per row of the kernel. Both gradients come from one pass over dy: x and dy are read once, dx is written once.
//
// Columns and rows of x are counted with the padding before them: x[i] is the padded row's entry q = i + pad, and
// y[j] = sum over k of w[k] x[stride j + k - pad].

#pragma once

#include <algorithm>
#include <vector>

#include "vectors.h"

namespace burnish::depthwise {

constexpr int64_t kTile = kRegisters / 4;  // pixels whose results are in registers
constexpr int64_t kAhead = 2;                       // tiles between fetching pixels and reading them
constexpr int64_t kRun = 256;                       // pixels that are summed in float32 before they enter the float64 sums
constexpr int64_t kStreamed = 8 << 20;              // bytes; what is larger is written past the caches

struct Geometry {
  int64_t images, channels, height, width, out_height, out_width, pad_top, pad_left;
  int64_t blocks() const { return (channels + kWidth - 1) / kWidth; }
  // Of a vector of channels; the last one may overlap the one before.
  int64_t channel(int64_t block) const { return std::min(block * kWidth, channels - kWidth); }
};

template <typename Scalar>
[[gnu::always_inline]] inline void write(Scalar* target, Vector value, bool streamed) {
  if (streamed)
    stream(target, value);
  else
    store(target, value);
}

template <typename Scalar>
bool is_streamed(const Tensor& tensor) {
  bool aligned = tensor.size(1) % kWidth == 0 && reinterpret_cast<uintptr_t>(tensor.const_data_ptr()) % (kWidth * sizeof(float)) == 0;
  return sizeof(Scalar) == sizeof(float) && aligned && tensor.numel() * static_cast<int64_t>(sizeof(Scalar)) >= kStreamed;
}

// [channels, 1, kernel, kernel] to [blocks, kernel * kernel, kWidth].
template <typename Scalar>
std::vector<float> packed(const Scalar* weights, const Geometry& g, int64_t taps) {
  std::vector<float> result(g.blocks() * taps * kWidth);
  for (int64_t block = 0; block < g.blocks(); ++block)
    for (int64_t lane = 0; lane < kWidth; ++lane)
      for (int64_t tap = 0; tap < taps; ++tap)
        result[(block * taps + tap) * kWidth + lane] = static_cast<float>(weights[(g.channel(block) + lane) * taps + tap]);
  return result;
}

// Starts to fetch the pixels of the tile `kAhead` tiles on into the second cache: processors do not foresee which lines come next.
template <int64_t pixels, typename Scalar>
[[gnu::always_inline]] inline void fetch(const Scalar* source, int64_t channels) {
#pragma GCC unroll 32
  for (int64_t pixel = 0; pixel < pixels; ++pixel) __builtin_prefetch(source + (kAhead * pixels + pixel) * channels, 0, 2);
}

// y of `kTile` pixels from (row, first) on and one vector of channels. `edge`: some read beyond the image, or are beyond the row.
template <typename Scalar, int64_t kernel, int64_t stride, bool edge>
[[gnu::always_inline]] inline void forward_tile(const Scalar* image, const float* weights, Vector bias, Scalar* target,
                                                const Geometry& g, int64_t row, int64_t first, bool streamed) {
  Vector sums[kTile];
#pragma GCC unroll 16
  for (int64_t t = 0; t < kTile; ++t) sums[t] = bias;
  int64_t left = first * stride - g.pad_left;
  for (int64_t kh = 0; kh < kernel; ++kh) {
    int64_t source_row = row * stride + kh - g.pad_top;
    if (source_row < 0 || source_row >= g.height) continue;
    const Scalar* source = image + (source_row * g.width + left) * g.channels;
    if (kh >= kernel - stride) fetch<kTile * stride>(source, g.channels);
    Vector taps[kernel];
#pragma GCC unroll 16
    for (int64_t kw = 0; kw < kernel; ++kw) taps[kw] = load(weights + (kh * kernel + kw) * kWidth);
#pragma GCC unroll 32
    for (int64_t column = 0; column < (kTile - 1) * stride + kernel; ++column) {
      if (edge && (left + column < 0 || left + column >= g.width)) continue;
      Vector value = load(source + column * g.channels);
#pragma GCC unroll 16
      for (int64_t kw = 0; kw < kernel; ++kw)
        if (column >= kw && (column - kw) % stride == 0 && (column - kw) / stride < kTile)
          sums[(column - kw) / stride] += taps[kw] * value;
    }
  }
#pragma GCC unroll 16
  for (int64_t t = 0; t < kTile; ++t)
    if (!edge || first + t < g.out_width) write(target + t * g.channels, sums[t], streamed);
}

template <typename Scalar, int64_t kernel, int64_t stride>
void forward(const Scalar* x, const std::vector<float>& weights, const std::vector<float>& bias, Scalar* y, const Geometry& g,
             bool streamed) {
  int64_t blocks = g.blocks();
  parallel_for(0, g.images * g.out_height, 1, [&](int64_t begin, int64_t end) {
    for (int64_t unit = begin; unit < end; ++unit) {
      int64_t row = unit % g.out_height;
      const Scalar* image = x + unit / g.out_height * g.height * g.width * g.channels;
      for (int64_t first = 0; first < g.out_width; first += kTile) {
        int64_t left = first * stride - g.pad_left;
        bool edge = left < 0 || left + (kTile - 1) * stride + kernel > g.width || first + kTile > g.out_width;
        Scalar* target = y + (unit * g.out_width + first) * g.channels;
        auto run = [&](auto kind) {
          for (int64_t block = 0; block < blocks; ++block) {
            int64_t c = g.channel(block);
            Vector start = bias.empty() ? Vector{} : load(bias.data() + c);
            forward_tile<Scalar, kernel, stride, decltype(kind)::value>(image + c, weights.data() + block * kernel * kernel * kWidth,
                                                                        start, target + c, g, row, first, streamed);
          }
        };
        if (edge)
          run(std::true_type());
        else
          run(std::false_type());
      }
    }
    if (streamed) fence();
  });
}

// dx of `kTile` pixels from (row, first) on, counted with the padding, and what they add to dw, of one vector of channels.
template <typename Scalar, int64_t kernel, int64_t stride, bool edge, bool input, bool weight>
[[gnu::always_inline]] inline void gradient_tile(const Scalar* flow_image, const Scalar* source, const float* weights, Scalar* target,
                                                 float* sums, const Geometry& g, int64_t row, int64_t first, bool streamed) {
  int64_t begin = edge ? g.pad_left - first : 0, end = edge ? g.pad_left + g.width - first : kTile;  // pixels of the image
  if (weight) fetch<kTile>(source, g.channels);
  Vector values[kTile], results[kTile];
#pragma GCC unroll 16
  for (int64_t t = 0; t < kTile; ++t) {
    if (input) results[t] = Vector{};
    if (weight) values[t] = edge && (t < begin || t >= end) ? Vector{} : load(source + t * g.channels);
  }
  for (int64_t kh = row % stride; kh < kernel; kh += stride) {
    int64_t flow_row = (row - kh) / stride;
    if (row < kh || flow_row >= g.out_height) continue;
    const Scalar* flow = flow_image + (flow_row * g.out_width + first / stride) * g.channels;
    if (kh < stride) fetch<kTile / stride>(flow, g.channels);
    Vector taps[kernel], totals[kernel];
#pragma GCC unroll 16
    for (int64_t kw = 0; kw < kernel; ++kw) {
      if (input) taps[kw] = load(weights + (kh * kernel + kw) * kWidth);
      if (weight) totals[kw] = load(sums + (kh * kernel + kw) * kWidth);
    }
#pragma GCC unroll 32
    for (int64_t column = -((kernel - 1) / stride); column <= (kTile - 1) / stride; ++column) {
      if (edge && (first / stride + column < 0 || first / stride + column >= g.out_width)) continue;
      Vector value = load(flow + column * g.channels);
#pragma GCC unroll 16
      for (int64_t kw = 0; kw < kernel; ++kw) {
        int64_t t = stride * column + kw;
        if (t < 0 || t >= kTile) continue;
        if (input) results[t] += taps[kw] * value;
        // A pixel of the padding adds nothing, not zero times what may be infinite.
        if (weight && (!edge || (t >= begin && t < end))) totals[kw] += values[t] * value;
      }
    }
#pragma GCC unroll 16
    for (int64_t kw = 0; kw < kernel; ++kw)
      if (weight) store(sums + (kh * kernel + kw) * kWidth, totals[kw]);
  }
#pragma GCC unroll 16
  for (int64_t t = 0; t < kTile; ++t)
    if (input && (!edge || (t >= begin && t < end))) write(target + t * g.channels, results[t], streamed);
}

// The sums of dw, as weights are packed, over threads in their order: the same bits for the same number of threads.
template <typename Scalar, int64_t kernel, int64_t stride, bool input, bool weight>
std::vector<double> gradients(const Scalar* dy, const Scalar* x, const std::vector<float>& weights, Scalar* dx, const Geometry& g,
                              bool streamed) {
  constexpr int64_t taps = kernel * kernel;
  int64_t blocks = g.blocks(), rows = g.images * g.height, count = weight ? blocks * taps * kWidth : 0;
  int64_t threads = std::max<int64_t>(1, std::min<int64_t>(get_num_threads(), rows));
  int64_t share = (rows + threads - 1) / threads, run = std::max<int64_t>(1, kRun / g.width);
  std::vector<std::vector<double>> parts(threads);
  parallel_for(0, threads, 1, [&](int64_t from, int64_t to) {
    std::vector<float> sums(count);
    for (int64_t thread = from; thread < to; ++thread) {
      std::vector<double>& part = parts[thread];
      part.assign(count, 0.0);
      int64_t stop = std::min(rows, (thread + 1) * share);
      for (int64_t unit = thread * share; unit < stop; ++unit) {
        int64_t row = unit % g.height + g.pad_top;
        const Scalar* flow_image = dy + unit / g.height * g.out_height * g.out_width * g.channels;
        for (int64_t first = g.pad_left / stride * stride; first < g.pad_left + g.width; first += kTile) {
          bool edge = first < g.pad_left || first + kTile > g.pad_left + g.width || first / stride < (kernel - 1) / stride ||
                      first / stride + (kTile - 1) / stride >= g.out_width;
          int64_t place = (unit * g.width + first - g.pad_left) * g.channels;
          auto compute = [&](auto kind) {
            for (int64_t block = 0; block < blocks; ++block) {
              int64_t c = g.channel(block), packed_at = block * taps * kWidth;
              gradient_tile<Scalar, kernel, stride, decltype(kind)::value, input, weight>(
                  flow_image + c, x + place + c, weights.data() + packed_at, dx + place + c, sums.data() + packed_at, g, row, first,
                  streamed);
            }
          };
          if (edge)
            compute(std::true_type());
          else
            compute(std::false_type());
        }
        if (weight && ((unit - thread * share + 1) % run == 0 || unit + 1 == stop)) {
          for (int64_t index = 0; index < count; ++index) part[index] += sums[index];
          std::fill(sums.begin(), sums.end(), 0.f);
        }
      }
    }
    if (streamed) fence();
  });
  std::vector<double> total(count, 0.0);
  for (const std::vector<double>& part : parts)
    for (int64_t index = 0; index < count; ++index) total[index] += part[index];
  return total;
}

// Calls `run` with the stride of the kernel as a constant.
template <typename Run>
auto with_stride(int64_t stride, const Run& run) {
  if (stride == 1) return run(std::integral_constant<int64_t, 1>());
  return run(std::integral_constant<int64_t, 2>());
}

// What a forward pass takes: x [N, H, W, C] and weights [C, 1, kernel, kernel] to y [N, H', W', C], with a bias [C] or null.
template <typename Scalar, int64_t kernel>
void convolve(const Scalar* x, const Scalar* weight, const Scalar* bias, Scalar* y, const Geometry& g, int64_t stride, bool streamed) {
  std::vector<float> weights = packed(weight, g, kernel * kernel), start;
  if (bias) start.assign(bias, bias + g.channels);
  with_stride(stride, [&](auto step) { forward<Scalar, kernel, decltype(step)::value>(x, weights, start, y, g, streamed); });
}

// (dy, x, weight) -> dx, dw, each null unless wanted; x is read for dw alone.
template <typename Scalar, int64_t kernel>
void differentiate(const Scalar* dy, const Scalar* x, const Scalar* weight, Scalar* dx, Scalar* dw, const Geometry& g, int64_t stride,
                   bool streamed) {
  constexpr int64_t taps = kernel * kernel;
  std::vector<float> weights = packed(weight, g, taps);
  std::vector<double> sums = with_stride(stride, [&](auto step) {
    auto run = [&](auto first, auto second) {
      return gradients<Scalar, kernel, decltype(step)::value, decltype(first)::value, decltype(second)::value>(dy, x, weights, dx, g,
                                                                                                               streamed);
    };
    if (dx && dw) return run(std::true_type(), std::true_type());
    if (dw) return run(std::false_type(), std::true_type());
    if (dx) return run(std::true_type(), std::false_type());
    return std::vector<double>();
  });
  if (!dw) return;
  for (int64_t block = 0; block < g.blocks(); ++block)
    for (int64_t lane = 0; lane < kWidth; ++lane)
      for (int64_t tap = 0; tap < taps; ++tap)
        dw[(g.channel(block) + lane) * taps + tap] = static_cast<Scalar>(static_cast<float>(sums[(block * taps + tap) * kWidth + lane]));
}

}  // namespace burnish::depthwise
