// What the steps of recurrent layers have in common: weights in panels, and how the work of a frame is cut among threads.

#pragma once

#include <algorithm>
#include <vector>

#include "matrix.h"
#include "tensor.h"

namespace burnish::recurrent {

constexpr int64_t kLeastSequences = 4;       // of a thread: each reads all of the weight for every frame
constexpr int64_t kCachedWeights = 1 << 17;  // numbers of a weight that a core's cache holds beside what else it reads

struct Extents {
  int64_t frames, sequences, hidden;

  int64_t states() const { return sequences * hidden; }
  // The frame that is read at place `index` of the order.
  int64_t frame_at(int64_t index, bool reverse) const { return reverse ? frames - 1 - index : index; }
};

// A matrix in panels, to multiply rows with: elements b[depth][column] of data[depth * depth_stride + column * column_stride].
class Panels {
 public:
  Panels(const float* data, int64_t depth, int64_t columns, int64_t depth_stride, int64_t column_stride)
      : depth_(depth), columns_(columns), packed_(matrix::round_up(columns, matrix::kPanel) * depth, 0.f) {
    parallel_for(0, matrix::divide_up(columns, matrix::kPanel), std::max<int64_t>(1, (1 << 16) / (depth * matrix::kPanel)), [&](int64_t begin, int64_t end) {
      for (int64_t first = begin * matrix::kPanel; first < std::min(end * matrix::kPanel, columns); first += matrix::kPanel) {
        int64_t wide = std::min(matrix::kPanel, columns - first);
        float* panel = packed_.data() + first * depth;
        if (depth_stride == 1)
          for (int64_t column = 0; column < wide; ++column)
            for (int64_t d = 0; d < depth; ++d) panel[d * matrix::kPanel + column] = data[d + (first + column) * column_stride];
        else
          for (int64_t d = 0; d < depth; ++d) std::copy_n(data + d * depth_stride + first, wide, panel + d * matrix::kPanel);
      }
    });
  }

  // Elements between rows of a product: whole vectors are written.
  int64_t pitch() const { return matrix::round_up(columns_, matrix::kLanes); }

  // Columns [begin, end), the first one of a panel, of product[rows][pitch] = rows_of[rows][depth] b, rows `step` numbers apart.
  void multiply(int64_t rows, const float* rows_of, int64_t step, float* product, int64_t begin, int64_t end) const {
    for (int64_t first = begin; first < end; first += matrix::kPanel)
      matrix::multiply<false>(rows, std::min(matrix::kPanel, end - first), depth_, rows_of, step, 1, packed_.data() + first * depth_,
                              product + first, pitch());
  }

 private:
  int64_t depth_, columns_;
  std::vector<float> packed_;
};

// Sequences do not know of each other: where there are enough of them, and all of the weight stays in a core's cache, each thread takes some
// through all frames. Else each thread takes some of the hidden units, so that it reads only their part of the weight, and waits for the
// others at each frame. The bits are the same.
class Division {
 public:
  Division(const Extents& extents, int64_t weights)
      : extents_(extents), threads_(std::max<int64_t>(get_num_threads(), 1)), panels_(matrix::divide_up(extents.hidden, matrix::kPanel)) {
    bool few = extents.sequences < 2 * kLeastSequences && weights >= kCachedWeights / 2;
    by_units_ = threads_ > 1 && panels_ > 1 && (weights > kCachedWeights || few);
  }

  // Calls `frame(index, row, row_end, phase, unit, unit_end)` for the places `from`, `from + step`, ... of `frames` frames, in each for the
  // phases 0, 1, ...: a phase begins for a row once all units of the one before are done.
  template <typename Frame>
  void go(int64_t from, int64_t step, int phases, const Frame& frame) const {
    int64_t hidden = extents_.hidden;
    if (by_units_) {
      for (int64_t count = 0; count < extents_.frames; ++count)
        for (int phase = 0; phase < phases; ++phase)
          parallel_for(0, panels_, matrix::divide_up(panels_, threads_), [&](int64_t begin, int64_t end) {
            frame(from + count * step, 0, extents_.sequences, phase, begin * matrix::kPanel, std::min(end * matrix::kPanel, hidden));
          });
      return;
    }
    int64_t least = std::max(kLeastSequences, matrix::divide_up(extents_.sequences, threads_));
    parallel_for(0, extents_.sequences, least, [&](int64_t begin, int64_t end) {
      for (int64_t count = 0; count < extents_.frames; ++count)
        for (int phase = 0; phase < phases; ++phase) frame(from + count * step, begin, end, phase, 0, hidden);
    });
  }

 private:
  Extents extents_;
  int64_t threads_, panels_;
  bool by_units_;
};

}  // namespace burnish::recurrent
