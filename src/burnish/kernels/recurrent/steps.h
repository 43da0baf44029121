// What the steps of recurrent layers have in common: weights in panels, and how the work of a frame is cut among threads.

#pragma once

#include <algorithm>
#include <initializer_list>
#include <vector>

#include "aligned_memory.h"
#include "matrix.h"
#include "products.h"
#include "tensor.h"
#include "turns.h"

namespace burnish::recurrent {

constexpr int64_t kLeastSequences = matrix::kLanes / 2;  // of a thread that reads all of the weight, in the time that it multiplies it in
constexpr int64_t kSmallWeights = 1 << 16;               // numbers of a weight that a thread reads sooner than it waits for another
constexpr int64_t kLargeWeights = 1 << 20;               // those that the cache which all cores share may not hold

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
      : depth_(depth), columns_(columns), packed_(make_aligned(matrix::round_up(columns, matrix::kPanel) * depth)) {
    products::Lines<float> lines{data, column_stride, depth_stride};
    parallel_for(0, matrix::divide_up(columns, matrix::kPanel), std::max<int64_t>(1, (1 << 16) / (depth * matrix::kPanel)), [&](int64_t begin, int64_t end) {
      int64_t first = begin * matrix::kPanel, count = std::min(end * matrix::kPanel, columns) - first;
      products::pack<float, matrix::kPanel>(lines, first, count, 0, depth, packed_.get() + first * depth);
    });
  }

  // Elements between rows of a product: whole vectors are written.
  int64_t pitch() const { return matrix::round_up(columns_, matrix::kLanes); }

  // Columns [begin, end), the first one of a panel, of product[rows][pitch] = rows_of[rows][depth] b, rows `step` numbers apart. A frame that
  // goes through the panels backwards after one that went forwards begins with those that are still in the cache.
  void multiply(int64_t rows, const float* rows_of, int64_t step, float* product, int64_t begin, int64_t end, bool backwards) const {
    int64_t pairs = rows <= matrix::kFew ? (end - begin) / (2 * matrix::kPanel) : 0, single = begin + pairs * 2 * matrix::kPanel;
    int64_t count = pairs + matrix::divide_up(end - single, matrix::kPanel);
    for (int64_t index = 0; index < count; ++index) {
      int64_t place = backwards ? count - 1 - index : index;
      int64_t first = place < pairs ? begin + place * 2 * matrix::kPanel : single + (place - pairs) * matrix::kPanel;
      const float* panel = packed_.get() + first * depth_;
      if (place < pairs)
        matrix::multiply_by_two_panels(rows, depth_, rows_of, step, panel, product + first, pitch());
      else
        matrix::multiply<false>(rows, std::min(matrix::kPanel, end - first), depth_, rows_of, step, 1, panel, product + first, pitch());
    }
  }

 private:
  int64_t depth_, columns_;
  AlignedFloats packed_;
};

// Sequences do not know of each other: where there are enough of them for all threads, each takes some through all frames. Else each takes
// some of the hidden units, so that it reads only their part of the weight, and waits for the others at each frame (turns.h), whose results
// it has to fetch from their caches. The bits are the same.
class Division {
 public:
  Division(const Extents& extents, int64_t weights)
      : extents_(extents), threads_(std::max<int64_t>(get_num_threads(), 1)), panels_(matrix::divide_up(extents.hidden, matrix::kPanel)) {
    bool few = extents.sequences < threads_ * kLeastSequences && weights >= kSmallWeights;
    by_units_ = threads_ > 1 && panels_ > 1 && (few || weights > kLargeWeights);
  }

  // Calls `frame(index, row, row_end, phase, unit, unit_end)` for the places `from`, `from + step`, ... of `frames` frames, in each for the
  // phases 0, 1, ... For each of these `waits` says whether it reads what the phase before, of the same frame or the one before, has made of
  // other units: then it begins once that is done. `frame` throws nothing: others would wait for it.
  template <typename Frame>
  void go(int64_t from, int64_t step, std::initializer_list<bool> waits, const Frame& frame) const {
    int64_t hidden = extents_.hidden, phases = static_cast<int64_t>(waits.size()), count = extents_.frames * phases;
    auto run = [&](int64_t begin, int64_t end, int64_t row, int64_t row_end, int64_t unit, int64_t unit_end) {
      for (int64_t index = begin; index < end; ++index)
        frame(from + index / phases * step, row, row_end, static_cast<int>(index % phases), unit, unit_end);
    };
    if (by_units_) {
      std::vector<int64_t> starts;
      for (int64_t index = 0; index < count; ++index)
        if (index == 0 || waits.begin()[index % phases]) starts.push_back(index);
      starts.push_back(count);
      int64_t shares = std::min(threads_, panels_);
      Turns turns(shares, static_cast<int64_t>(starts.size()) - 1);
      parallel_for(0, shares, 1, [&](int64_t begin, int64_t end) {
        for (int64_t own = begin; own < end; ++own)
          turns.take_part(own, [&](int64_t turn, int64_t share) {
            int64_t unit = panels_ * share / shares * matrix::kPanel, unit_end = panels_ * (share + 1) / shares * matrix::kPanel;
            run(starts[turn], starts[turn + 1], 0, extents_.sequences, unit, std::min(unit_end, hidden));
          });
      });
      return;
    }
    int64_t least = std::max(kLeastSequences, matrix::divide_up(extents_.sequences, threads_));
    parallel_for(0, extents_.sequences, least, [&](int64_t begin, int64_t end) { run(0, count, begin, end, 0, hidden); });
  }

 private:
  Extents extents_;
  int64_t threads_, panels_;
  bool by_units_;
};

}  // namespace burnish::recurrent
