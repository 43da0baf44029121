// What batch normalization and its gradient share: how a tensor [N, C] or a channels_last image is walked over, and sums per channel.
//
// Memory is seen as rows of `period` elements, a multiple of the channels and of the vector's size, so that every vector has its columns of
// per-channel values whatever the number of channels is; a remainder that fills no such row is gone through element by element. Each thread
// has one share of the rows, the same in every pass, and reads it as two streams, which keeps more reads of memory in flight than one.
// Addresses only ascend within a stream, as the processor's prefetchers want it.

#pragma once

#include <algorithm>
#include <cmath>
#include <numeric>
#include <type_traits>
#include <utility>
#include <vector>

#include "tensor.h"
#include "vectors.h"

namespace burnish {

enum Activation : int64_t { kNone = 0, kRelu = 1, kClipped = 2 };  // kClipped: min(max(y, 0), limit)

// The limit that kernels compare with: for a ReLU NaN, which nothing is above, so that one kernel serves both.
inline float limit_of(int64_t activation, double limit) { return activation == kClipped ? static_cast<float>(limit) : NAN; }

constexpr int64_t kRun = 16;  // rows of each stream that are summed in float32 before they enter the float64 sums
constexpr int64_t kShortestPeriod = 128;  // elements: shorter rows would wait for their own sums
constexpr int64_t kLeastShare = 8192;  // elements that are worth a thread
constexpr int64_t kPilotRows = 16;    // of which the pilot is the mean
constexpr int64_t kChunk = 128 << 10;  // elements of a stream that are read back in one go

// A kernel written for a type V of values runs for whole vectors (V = Vector) and for the elements that fill none (V = float).
template <typename V, typename T>
[[gnu::always_inline]] inline V read(const T* source) {
  if constexpr (std::is_same_v<V, float>)
    return static_cast<float>(*source);
  else
    return load(source);
}

template <typename V, typename T>
[[gnu::always_inline]] inline void write(T* target, V value) {
  if constexpr (std::is_same_v<V, float>)
    *target = static_cast<T>(value);
  else
    store(target, value);
}

inline Tensor as_rows(const Tensor& tensor) {
  return tensor.dim() == 4 ? to_channels_last(tensor) : to_contiguous(tensor);
}

inline Tensor empty_like_rows(const Tensor& like) {
  return like.dim() == 4 ? make_channels_last(like.sizes(), like.scalar_type()) : make_tensor(like.sizes(), like.scalar_type());
}

inline void check_rows(const Tensor& tensor, const Tensor& like, const char* name) {
  BURNISH_CHECK(same(tensor.sizes(), like.sizes()) && tensor.scalar_type() == like.scalar_type(), name,
                ": the shape and the type of x expected");
}

template <int64_t count>
class Columns;

struct Walk {
  template <int64_t count>
  using Values = Columns<count>;

  int64_t elements, channels, period, rows, threads, share;

  explicit Walk(const Tensor& x) : Walk(x.numel(), x.size(1), get_num_threads()) {}

  Walk(int64_t elements, int64_t channels, int64_t most_threads) : elements(elements), channels(channels) {
    int64_t common = std::lcm(std::max<int64_t>(channels, 1), kWidth);
    period = common * ((kShortestPeriod + common - 1) / common);
    rows = elements / period;
    threads = std::clamp<int64_t>(elements / kLeastShare, 1, most_threads);
    share = (rows + threads - 1) / threads;
  }

  int64_t per_channel() const { return channels ? elements / channels : 0; }

  // Calls `run(thread, begin, end)` with the shares of the rows.
  template <typename Run>
  void in_shares(const Run& run) const {
    parallel_for(0, threads, 1, [&](int64_t first, int64_t last) {
      for (int64_t thread = first; thread < last; ++thread)
        run(thread, std::min(rows, thread * share), std::min(rows, (thread + 1) * share));
    });
  }
};

// Where the value `index` of `count` values of a column lies: those of one vector of columns lie side by side.
[[gnu::always_inline]] inline int64_t place(int64_t column, int64_t index, int64_t count) {
  return (column / kWidth * count + index) * kWidth + column % kWidth;
}

// `count` values per channel, repeated over a period.
template <int64_t count>
class Columns {
 public:
  explicit Columns(const Walk& walk) : channels_(walk.channels), values_(walk.period * count) {}

  void set(int64_t index, const float* channels) {
    int64_t period = static_cast<int64_t>(values_.size()) / count;
    for (int64_t column = 0, channel = 0; column < period; ++column) {
      values_[place(column, index, count)] = channels[channel];
      if (++channel == channels_) channel = 0;
    }
  }

  class Reader {
   public:
    explicit Reader(const float* values) : values_(values) {}

    template <typename V>
    [[gnu::always_inline]] V get(int64_t index, int64_t column) const {
      if constexpr (std::is_same_v<V, float>)
        return values_[place(column, index, count)];
      else
        return read<V>(values_ + column * count + index * kWidth);
    }

   private:
    const float* values_;
  };

  Reader reader() const { return Reader(values_.data()); }

 private:
  int64_t channels_;
  std::vector<float> values_;
};

// Adds up two sums per channel: `terms.template columns<V>(column)` loads what belongs to the columns, and `terms.add(columns, index, one,
// other)` adds what belongs to the elements from `index` on.
template <typename Terms>
void sum_channels(const Walk& walk, const Terms& given, std::vector<double>& first, std::vector<double>& second) {
  std::vector<std::vector<double>> totals(walk.threads);
  walk.in_shares([&](int64_t thread, int64_t begin, int64_t end) {
    const Terms terms = given;  // copies, which stores through pointers cannot change: else they would be loaded again after each store
    const int64_t period = walk.period, half = (end - begin) / 2;
    std::vector<float> run_sums(2 * period);
    std::vector<double>& total = totals[thread];
    total.assign(2 * period, 0.0);
    float* const runs = run_sums.data();
    auto close = [&] {
      double* target = total.data();
#pragma omp simd
      for (int64_t i = 0; i < 2 * period; ++i) target[i] += static_cast<double>(runs[i]);
      std::fill(runs, runs + 2 * period, 0.f);
    };
    for (int64_t run = 0; run < half; run += kRun) {
      for (int64_t row = run; row < std::min(half, run + kRun); ++row) {
        const int64_t here = (begin + row) * period, there = here + half * period;
        for (int64_t column = 0; column < period; column += kWidth) {
          auto columns = terms.template columns<Vector>(column);
          Vector one = read<Vector>(runs + 2 * column), other = read<Vector>(runs + 2 * column + kWidth);
          terms.add(columns, here + column, one, other);
          terms.add(columns, there + column, one, other);
          write(runs + 2 * column, one);
          write(runs + 2 * column + kWidth, other);
        }
      }
      close();
    }
    if ((end - begin) % 2) {
      for (int64_t column = 0; column < period; column += kWidth) {
        Vector one{}, other{};
        terms.add(terms.template columns<Vector>(column), (end - 1) * period + column, one, other);
        write(runs + 2 * column, one);
        write(runs + 2 * column + kWidth, other);
      }
      close();
    }
    if (thread + 1 < walk.threads) return;
    for (int64_t index = walk.rows * period; index < walk.elements; ++index) {
      int64_t column = index - walk.rows * period;
      float one = 0.f, other = 0.f;
      terms.add(terms.template columns<float>(column), index, one, other);
      total[place(column, 0, 2)] += one;
      total[place(column, 1, 2)] += other;
    }
  });
  first.assign(walk.channels, 0.0);
  second.assign(walk.channels, 0.0);
  for (const std::vector<double>& total : totals)  // in a fixed order: the same bits for the same number of threads
    for (int64_t column = 0, channel = 0; column < walk.period; ++column) {
      first[channel] += total[place(column, 0, 2)];
      second[channel] += total[place(column, 1, 2)];
      if (++channel == walk.channels) channel = 0;
    }
}

// Calls `body.at(columns, index)` for all elements, with `body.template columns<V>(column)` as above. The end of each stream is gone
// through first: what was read last may still be in the cache.
template <typename Body>
void for_all(const Walk& walk, const Body& given) {
  walk.in_shares([&](int64_t thread, int64_t begin, int64_t end) {
    const Body body = given;
    const int64_t period = walk.period, chunk = std::max<int64_t>(1, kChunk / period), half = (end - begin) / 2;
    if ((end - begin) % 2)
      for (int64_t column = 0; column < period; column += kWidth)
        body.at(body.template columns<Vector>(column), (end - 1) * period + column);
    for (int64_t stop = half; stop > 0; stop -= chunk)
      for (int64_t row = std::max<int64_t>(0, stop - chunk); row < stop; ++row) {
        const int64_t here = (begin + row) * period, there = here + half * period;
        for (int64_t column = 0; column < period; column += kWidth) {
          auto columns = body.template columns<Vector>(column);
          body.at(columns, here + column);
          body.at(columns, there + column);
        }
      }
    if (thread + 1 == walk.threads)
      for (int64_t index = walk.rows * period; index < walk.elements; ++index)
        body.at(body.template columns<float>(index - walk.rows * period), index);
  });
}

// Calls `run` with whether there is an activation, as a constant.
template <typename Run>
auto with_activation(int64_t activation, const Run& run) {
  if (activation == kNone) return run(std::false_type());
  return run(std::true_type());
}

template <typename T>
void check_elements(const Tensor& x) {
  constexpr bool wide = std::is_same_v<T, float>;
  BURNISH_CHECK(x.scalar_type() == (wide ? kFloat : kBFloat16) && (x.dim() == 4 || x.dim() == 2),
                "batch normalization: images or rows of ", wide ? "float32" : "bfloat16", " expected");
}

}  // namespace burnish
