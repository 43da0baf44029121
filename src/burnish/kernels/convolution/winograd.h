// Winograd's minimal filtering F(2x2, 3x3): 16 multiplications in place of 36 for a tile of 2x2 results of a 3x3 convolution
// (S. Winograd, "Arithmetic Complexity of Computations", 1980; A. Lavin, S. Gray, "Fast Algorithms for Convolutional Neural Networks",
// 2016). With tiles d of 4x4 inputs that overlap by two, and kernels g of 3x3,
//
//   Y = A^T [(G g G^T) * (B^T d B)] A,    and so, of sums over the tiles,    dg = G^T [(A dY A^T) * (B^T d B)] G.
//
// The elementwise products, summed over channels (or tiles), are 16 products of matrices. All entries of A and B are 0, 1 or -1, those of
// G also 1/2: no digits are lost to constants.

#pragma once

#include <algorithm>
#include <cstdint>

#include "matrix.h"

namespace burnish::winograd {

using namespace matrix;
using matrix::load;  // beside those of vectors.h, which another kernel of the same library may include
using matrix::store;
using matrix::Vector;

constexpr int64_t kPoints = 16;  // entries of a transformed tile

// Images with their channels last.
struct Images {
  const float* data;
  int64_t images, height, width, channels;
};

// How the 2x2 tiles of a convolution's results lie over images that are padded.
struct Tiling {
  int64_t rows, columns;  // of an image
  int64_t top, left;      // padding

  int64_t per_image() const { return rows * columns; }
};

// Whether this is faster than a direct convolution. With few channels the transforms of the tiles cost more than they save, with few
// tiles for a weight those of the kernels do: `weights_per_tile` may be transformed for a tile. Measured with two cores.
inline bool worthwhile(int64_t tiles, int64_t inputs, int64_t outputs, int64_t weights_per_tile) {
  return std::min(inputs, outputs) >= 16 && tiles >= 16 && inputs * outputs <= weights_per_tile * tiles;
}

inline Tiling tiling(int64_t height, int64_t width, int64_t top, int64_t left) {
  return {divide_up(height, 2), divide_up(width, 2), top, left};
}

// Where the pixels of an extent x extent tile begin; those outside of the image are `zeros`.
template <int extent>
inline void pixels_of(const Images& x, const Tiling& tiles, int64_t tile, const float* zeros, const float* (&pixels)[extent][extent]) {
  int64_t image = tile / tiles.per_image(), rest = tile % tiles.per_image();
  int64_t top = rest / tiles.columns * 2 - tiles.top, left = rest % tiles.columns * 2 - tiles.left;
  for (int i = 0; i < extent; ++i)
    for (int j = 0; j < extent; ++j) {
      int64_t row = top + i, column = left + j;
      bool inside = row >= 0 && row < x.height && column >= 0 && column < x.width;
      pixels[i][j] = inside ? x.data + ((image * x.height + row) * x.width + column) * x.channels : zeros;
    }
}

// Where a transformed tile goes: point p of channel c to data[p * point + c / kPanel * panel + c % kPanel].
struct Target {
  float* data;
  int64_t point, panel;

  float* at(int64_t p, int64_t c) const { return data + p * point + c / kPanel * panel + c % kPanel; }
};

// Row `row` of B^T d B, of channels from `first` on, to points 0 to 3 of the target.
template <int row>
inline void transform_input_row(const float* const (&pixels)[4][4], int64_t first, int64_t channels, const Target& target) {
  constexpr int one = row == 0 ? 0 : row == 2 ? 2 : 1;
  constexpr int other = row == 0 || row == 1 ? 2 : row == 2 ? 1 : 3;
  for (int64_t c = 0; c < channels; c += kLanes) {
    int64_t count = channels - c;
    Vector d[4];
#pragma GCC unroll 4
    for (int j = 0; j < 4; ++j) {
      Vector left = load_some(pixels[one][j] + first + c, count), right = load_some(pixels[other][j] + first + c, count);
      d[j] = row == 1 ? left + right : left - right;
    }
    store(target.at(0, c), d[0] - d[2]);
    store(target.at(1, c), d[1] + d[2]);
    store(target.at(2, c), d[2] - d[1]);
    store(target.at(3, c), d[1] - d[3]);
  }
}

}  // namespace burnish::winograd
