// The gradient of the kernels of a 3x3 convolution of stride 1 by F(2x2, 3x3).
//
// Its 16 products of matrices, dY~^T X~ over all tiles, are cut into parts that keep their sums in the cache of a core: one row of the
// transformed tiles (or all four), some channels of dy, some of x. A part transforms what it needs of a block of tiles, and adds.

#pragma once

#include <algorithm>
#include <type_traits>

#include "tensor.h"
#include "winograd.h"

namespace burnish::winograd_weights {
namespace {

using namespace winograd;
using matrix::load;
using matrix::store;
using matrix::Vector;

constexpr int64_t kTiles = 32;  // tiles that are summed in registers before they enter the sums of all tiles
constexpr int64_t kExtent = 128, kWholeExtent = 64;  // channels of a part: of one row of the transformed tiles, of all four
constexpr int64_t kWeightsPerTile = 16384;

// Row `row` of A dY A^T, of channels from `first` on, to points 0 to 3.
template <int row>
inline void transform_output_gradient_row(const float* const (&pixels)[2][2], int64_t first, int64_t channels, float* target,
                                          int64_t point) {
  for (int64_t k = 0; k < channels; k += kLanes) {
    int64_t count = channels - k;
    Vector e[2];
#pragma GCC unroll 2
    for (int j = 0; j < 2; ++j) {
      Vector upper = row == 3 ? Vector{} : load_some(pixels[0][j] + first + k, count);
      Vector lower = row == 0 ? Vector{} : load_some(pixels[1][j] + first + k, count);
      e[j] = row == 0 ? upper : row == 1 ? upper + lower : row == 2 ? upper - lower : -lower;
    }
    store(target + k, e[0]);
    store(target + point + k, e[0] + e[1]);
    store(target + 2 * point + k, e[0] - e[1]);
    store(target + 3 * point + k, -e[1]);
  }
}

// How the work is cut: part (split, row, block of k, block of c).
struct Parts {
  int64_t rows, points;        // sets of rows of the transformed tiles, points in one
  int64_t k_extent, c_extent;  // of a block
  int64_t k_blocks, c_blocks, splits;

  int64_t each() const { return rows * k_blocks * c_blocks; }
  int64_t sums() const { return points * k_extent * c_extent; }  // of one part
};

Parts parts_of(int64_t outputs, int64_t inputs, int64_t tiles, int64_t threads) {
  Parts parts;
  bool whole = outputs <= kWholeExtent && inputs <= kWholeExtent;
  parts.rows = whole ? 1 : 4;
  parts.points = kPoints / parts.rows;
  int64_t extent = whole ? kWholeExtent : kExtent;
  parts.k_extent = round_up(divide_up(outputs, divide_up(outputs, extent)), kLanes);
  parts.c_extent = round_up(divide_up(inputs, divide_up(inputs, extent)), kLanes);
  parts.k_blocks = divide_up(outputs, parts.k_extent);
  parts.c_blocks = divide_up(inputs, parts.c_extent);
  parts.splits = std::min(divide_up(threads, parts.each()), divide_up(tiles, kTiles));
  return parts;
}

template <int row>
void transform_block_row(const Images& x, const Tiling& x_tiles, const Images& dy, const Tiling& dy_tiles, int64_t first, int64_t count,
                         int64_t c, int64_t inputs, int64_t k, int64_t outputs, const float* zeros, const Target& x_target, float* dy_target,
                         int64_t dy_point, int64_t dy_step) {
  for (int64_t t = 0; t < count; ++t) {
    const float* pixels[4][4];
    pixels_of(x, x_tiles, first + t, zeros, pixels);
    Target target{x_target.data + t * kPanel, x_target.point, x_target.panel};
    transform_input_row<row>(pixels, c, inputs, target);
    const float* results[2][2];
    pixels_of(dy, dy_tiles, first + t, zeros, results);
    transform_output_gradient_row<row>(results, k, outputs, dy_target + t * dy_step, dy_point);
  }
}

// dg = G^T U G.
[[gnu::always_inline]] inline void transform_kernel_gradient(const Vector (&u)[4][4], Vector (&g)[3][3]) {
  Vector t[3][4];
#pragma GCC unroll 4
  for (int j = 0; j < 4; ++j) {
    Vector sum = (u[1][j] + u[2][j]) * 0.5f;
    t[0][j] = u[0][j] + sum;
    t[1][j] = (u[1][j] - u[2][j]) * 0.5f;
    t[2][j] = u[3][j] + sum;
  }
#pragma GCC unroll 3
  for (int i = 0; i < 3; ++i) {
    Vector sum = (t[i][1] + t[i][2]) * 0.5f;
    g[i][0] = t[i][0] + sum;
    g[i][1] = (t[i][1] - t[i][2]) * 0.5f;
    g[i][2] = t[i][3] + sum;
  }
}

void weight_gradient(const Images& x, const Images& dy, int64_t top, int64_t left, float* dw) {
  Tiling x_tiles = tiling(dy.height, dy.width, top, left), dy_tiles = tiling(dy.height, dy.width, 0, 0);
  int64_t total = x.images * x_tiles.per_image();
  int64_t threads = get_num_threads();
  Parts parts = parts_of(dy.channels, x.channels, total, threads);
  int64_t jobs = parts.each() * parts.splits;
  int64_t workers = std::min(threads, jobs);
  int64_t panel = kTiles * kPanel;
  int64_t x_point = divide_up(parts.c_extent, kPanel) * panel + kSkew;
  int64_t dy_step = parts.k_extent + kSkew, dy_point = kTiles * dy_step + kSkew;
  int64_t room = parts.points * (x_point + dy_point);
  int64_t widest = std::max(x.channels, dy.channels);
  Tensor memory = make_tensor({jobs * parts.sums() + workers * room + widest});
  float* sums = memory.mutable_data_ptr<float>();
  float* work = sums + jobs * parts.sums();
  float* zeros = work + workers * room;
  std::fill(zeros, zeros + widest, 0.f);
  parallel_for(0, workers, 1, [&](int64_t begin, int64_t end) {
    for (int64_t worker = begin; worker < end; ++worker)
      for (int64_t job = worker * jobs / workers; job < (worker + 1) * jobs / workers; ++job) {
        float* source = work + worker * room;
        float* gradient = source + parts.points * x_point;
        float* target = sums + job * parts.sums();
        int64_t split = job % parts.splits, part = job / parts.splits;
        int64_t row = part % parts.rows, k_block = part / parts.rows % parts.k_blocks, c_block = part / parts.rows / parts.k_blocks;
        int64_t c = c_block * parts.c_extent, inputs = std::min(parts.c_extent, x.channels - c);
        int64_t k = k_block * parts.k_extent, outputs = std::min(parts.k_extent, dy.channels - k);
        int64_t start = split * total / parts.splits, stop = (split + 1) * total / parts.splits;
        std::fill(target, target + parts.sums(), 0.f);
        for (int64_t first = start; first < stop; first += kTiles) {
          int64_t count = std::min(kTiles, stop - first);
          auto transform_row = [&](auto which, int64_t place) {
            transform_block_row<decltype(which)::value>(x, x_tiles, dy, dy_tiles, first, count, c, inputs, k, outputs, zeros,
                                                        {source + 4 * place * x_point, x_point, panel}, gradient + 4 * place * dy_point,
                                                        dy_point, dy_step);
          };
          bool all = parts.rows == 1;
          if (all || row == 0) transform_row(std::integral_constant<int, 0>(), 0);
          if (all || row == 1) transform_row(std::integral_constant<int, 1>(), all ? 1 : 0);
          if (all || row == 2) transform_row(std::integral_constant<int, 2>(), all ? 2 : 0);
          if (all || row == 3) transform_row(std::integral_constant<int, 3>(), all ? 3 : 0);
          for (int64_t p = 0; p < parts.points; ++p)
            for (int64_t column = 0; column < inputs; column += kPanel)
              multiply<true>(outputs, std::min(kPanel, inputs - column), count, gradient + p * dy_point, 1, dy_step,
                             source + p * x_point + column / kPanel * panel, target + p * parts.k_extent * parts.c_extent + column,
                             parts.c_extent);
        }
      }
  });
  parallel_for(0, dy.channels, 1, [&](int64_t begin, int64_t end) {
    for (int64_t k = begin; k < end; ++k)
      for (int64_t c = 0; c < x.channels; c += kLanes) {
        int64_t block = (c / parts.c_extent * parts.k_blocks + k / parts.k_extent) * parts.rows * parts.splits;
        int64_t place = k % parts.k_extent * parts.c_extent + c % parts.c_extent;
        Vector u[4][4], g[3][3];
#pragma GCC unroll 16
        for (int p = 0; p < kPoints; ++p) {
          const float* source =
              sums + (block + p / parts.points * parts.splits) * parts.sums() + p % parts.points * parts.k_extent * parts.c_extent + place;
          u[p / 4][p % 4] = load(source);
          for (int64_t split = 1; split < parts.splits; ++split) u[p / 4][p % 4] += load(source + split * parts.sums());
        }
        transform_kernel_gradient(u, g);
        for (int i = 0; i < 9; ++i) store_some(dw + (k * 9 + i) * x.channels + c, g[i / 3][i % 3], x.channels - c);
      }
  });
}

}  // namespace
}  // namespace burnish::winograd_weights
