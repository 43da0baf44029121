// 3x3 convolution of stride 1 by F(2x2, 3x3), forward and for the gradient of its input, which is such a convolution of dy.
//
// A block of tiles is transformed, multiplied by the transformed kernels and transformed back while it lies in the cache of a core.

#pragma once

#include <algorithm>

#include "tensor.h"
#include "winograd.h"

namespace burnish::winograd {
namespace {

constexpr int64_t kBlock = 4096;  // floats of one point of a block of transformed tiles
constexpr int64_t kWeightsPerTile = 4096, kTurnedWeightsPerTile = 16384;

// G g G^T of the kernels, as panels: [point][panel of columns][depth][kPanel].
struct Kernels {
  Tensor tensor;
  const float* data;
  int64_t depth, columns;
  int64_t panel() const { return depth * kPanel; }
  int64_t point() const { return divide_up(columns, kPanel) * panel(); }
};

[[gnu::always_inline]] inline void transform_kernel(const Vector (&g)[3][3], Vector (&u)[4][4]) {
  Vector t[4][3];
#pragma GCC unroll 3
  for (int j = 0; j < 3; ++j) {
    Vector outer = (g[0][j] + g[2][j]) * 0.5f, middle = g[1][j] * 0.5f;
    t[0][j] = g[0][j];
    t[1][j] = outer + middle;
    t[2][j] = outer - middle;
    t[3][j] = g[2][j];
  }
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) {
    Vector outer = (t[i][0] + t[i][2]) * 0.5f, middle = t[i][1] * 0.5f;
    u[i][0] = t[i][0];
    u[i][1] = outer + middle;
    u[i][2] = outer - middle;
    u[i][3] = t[i][2];
  }
}

// The lanes of two vectors, counted on from one to the other, that `which` names.
[[gnu::always_inline]] inline Vector pick(Vector one, Vector other, Integers which) {
#ifdef __clang__
  Vector result;
  for (int lane = 0; lane < kLanes; ++lane) result[lane] = which[lane] < kLanes ? one[which[lane]] : other[which[lane] - kLanes];
  return result;
#else
  return __builtin_shuffle(one, other, which);
#endif
}

// Exchanges blocks of `stride` lanes between neighbouring blocks of `stride` rows.
template <int64_t stride>
[[gnu::always_inline]] inline void exchange(Vector (&rows)[kLanes]) {
  Integers low, high;
  for (int lane = 0; lane < kLanes; ++lane) {
    bool own = (lane & stride) == 0;
    low[lane] = own ? lane : static_cast<int>(kLanes - stride) + lane;
    high[lane] = own ? lane + static_cast<int>(stride) : static_cast<int>(kLanes) + lane;
  }
#pragma GCC unroll 16
  for (int64_t row = 0; row < kLanes; ++row)
    if ((row & stride) == 0) {
      Vector one = rows[row], other = rows[row + stride];
      rows[row] = pick(one, other, low);
      rows[row + stride] = pick(one, other, high);
    }
}

[[gnu::always_inline]] inline void transpose(Vector (&rows)[kLanes]) {
  if constexpr (kLanes > 8) exchange<8>(rows);
  exchange<4>(rows);
  exchange<2>(rows);
  exchange<1>(rows);
}

// weight [K, 3, 3, C] -> kernels of depth C and columns K; with `turned`, turned by 180 degrees, of depth K and columns C.
Kernels transformed(const float* w, int64_t outputs, int64_t inputs, bool turned) {
  int64_t depth = turned ? outputs : inputs, columns = turned ? inputs : outputs;
  Kernels result{Tensor(), nullptr, depth, columns};
  result.tensor = make_tensor({kPoints * result.point()});
  float* u = result.tensor.mutable_data_ptr<float>();
  result.data = u;
  int64_t point = result.point(), panel = result.panel();
  auto read = [&](int64_t k, int64_t c, Vector(&points)[4][4]) {
    Vector g[3][3];
    for (int i = 0; i < 3; ++i)
      for (int j = 0; j < 3; ++j) {
        int place = turned ? 8 - 3 * i - j : 3 * i + j;
        g[i][j] = load_some(w + (k * 9 + place) * inputs + c, inputs - c);
      }
    transform_kernel(g, points);
  };
  if (turned) {
    parallel_for(0, outputs, 4, [&](int64_t begin, int64_t end) {
      Vector points[4][4];
      for (int64_t k = begin; k < end; ++k)
        for (int64_t c = 0; c < inputs; c += kLanes) {
          read(k, c, points);
          for (int p = 0; p < kPoints; ++p) store(u + p * point + c / kPanel * panel + k * kPanel + c % kPanel, points[p / 4][p % 4]);
        }
    });
  } else {
    parallel_for(0, divide_up(outputs, kLanes), 1, [&](int64_t begin, int64_t end) {
      Vector kept[kPoints][kLanes], points[4][4];  // [point][k], vectors of c
      for (int64_t k = begin * kLanes; k < std::min(end * kLanes, outputs); k += kLanes)
        for (int64_t c = 0; c < inputs; c += kLanes) {
          for (int64_t lane = 0; lane < kLanes; ++lane) {
            if (k + lane < outputs) read(k + lane, c, points);
            for (int p = 0; p < kPoints; ++p) kept[p][lane] = k + lane < outputs ? points[p / 4][p % 4] : Vector{};
          }
          for (int p = 0; p < kPoints; ++p) {
            transpose(kept[p]);
            for (int64_t l = 0; l < std::min(kLanes, inputs - c); ++l)
              store(u + p * point + k / kPanel * panel + (c + l) * kPanel + k % kPanel, kept[p][l]);
          }
        }
    });
  }
  return result;
}

// A^T m A of one tile, for all its channels, to the results that lie inside of the image.
inline void transform_output(const float* m, int64_t point, const float* bias, int64_t channels, float* const (&y)[2][2]) {
  for (int64_t c = 0; c < channels; c += kLanes) {
    Vector t[2][4];
#pragma GCC unroll 4
    for (int j = 0; j < 4; ++j) {
      Vector one = load(m + (4 + j) * point + c), two = load(m + (8 + j) * point + c);
      t[0][j] = load(m + j * point + c) + one + two;
      t[1][j] = one - two - load(m + (12 + j) * point + c);
    }
    Vector more = bias ? load_some(bias + c, channels - c) : Vector{};
#pragma GCC unroll 2
    for (int i = 0; i < 2; ++i) {
      if (y[i][0]) store_some(y[i][0] + c, t[i][0] + t[i][1] + t[i][2] + more, channels - c);
      if (y[i][1]) store_some(y[i][1] + c, t[i][1] - t[i][2] - t[i][3] + more, channels - c);
    }
  }
}

void convolve(const Images& x, const Kernels& kernels, int64_t top, int64_t left, const float* bias, float* y, int64_t height,
              int64_t width) {
  Tiling tiles = tiling(height, width, top, left);
  int64_t total = x.images * tiles.per_image();
  int64_t channels = x.channels, outputs = kernels.columns;
  int64_t threads = get_num_threads();
  int64_t depth = round_up(channels, kLanes), wide = round_up(outputs, kLanes);
  int64_t most = std::max<int64_t>(kRows, kBlock / std::max(depth, wide) / kRows * kRows);
  int64_t blocks = round_up(divide_up(total, most), threads);
  int64_t count = std::min(round_up(divide_up(total, blocks), kRows), total);
  blocks = divide_up(total, count);
  int64_t workers = std::min(threads, blocks);
  int64_t source_point = count * depth + kSkew, product_point = count * wide + kSkew;
  int64_t room = kPoints * (source_point + product_point);
  Tensor memory = make_tensor({workers * room + 2 * depth});
  float* work = memory.mutable_data_ptr<float>();
  float* zeros = work + workers * room;
  std::fill(zeros, zeros + depth, 0.f);
  parallel_for(0, workers, 1, [&](int64_t begin, int64_t end) {
    for (int64_t worker = begin; worker < end; ++worker) {
      float* source = work + worker * room;
      float* product = source + kPoints * source_point;
      for (int64_t block = worker * blocks / workers; block < (worker + 1) * blocks / workers; ++block) {
        int64_t first = block * count, rows = std::min(count, total - first);
        for (int64_t t = 0; t < rows; ++t) {
          const float* pixels[4][4];
          pixels_of(x, tiles, first + t, zeros, pixels);
          Target target{source + t * depth, source_point, kPanel};
          transform_input_row<0>(pixels, 0, channels, target);
          target.data += 4 * source_point;
          transform_input_row<1>(pixels, 0, channels, target);
          target.data += 4 * source_point;
          transform_input_row<2>(pixels, 0, channels, target);
          target.data += 4 * source_point;
          transform_input_row<3>(pixels, 0, channels, target);
        }
        for (int64_t p = 0; p < kPoints; ++p)
          for (int64_t k = 0; k < outputs; k += kPanel)
            multiply<false>(rows, std::min(kPanel, outputs - k), channels, source + p * source_point, depth, 1,
                            kernels.data + p * kernels.point() + k / kPanel * kernels.panel(), product + p * product_point + k, wide);
        for (int64_t t = 0; t < rows; ++t) {
          int64_t image = (first + t) / tiles.per_image(), rest = (first + t) % tiles.per_image();
          int64_t row = rest / tiles.columns * 2, column = rest % tiles.columns * 2;
          float* results[2][2];
          for (int i = 0; i < 2; ++i)
            for (int j = 0; j < 2; ++j) {
              bool inside = row + i < height && column + j < width;
              results[i][j] = inside ? y + ((image * height + row + i) * width + column + j) * outputs : nullptr;
            }
          transform_output(product + t * wide, product_point, bias, outputs, results);
        }
      }
    }
  });
}

// Whether this is faster than a direct convolution of results of this extent by kernels of so many channels.
inline bool wins(int64_t images, int64_t height, int64_t width, int64_t inputs, int64_t outputs, int64_t weights_per_tile) {
  return worthwhile(images * tiling(height, width, 0, 0).per_image(), inputs, outputs, weights_per_tile);
}

}  // namespace
}  // namespace burnish::winograd
