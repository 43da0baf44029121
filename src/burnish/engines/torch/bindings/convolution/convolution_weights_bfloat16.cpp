// The gradient of a convolution's kernels, bfloat16 with float32 sums: for each of their pixels a product of matrices,
//
//   dw[k][tap][c] = sum over images n and pixels (h, w) of dy[n][h][w][k] x[n][h * stride + i - padding][w * stride + j - padding][c].
//
// One instruction multiplies and adds up two numbers each, and these are pixels at the same place of two images: so packed, every pixel of
// the kernels reads the same words, at an offset. The words are multiplied in runs, whose pixels are neighbours: no padding is multiplied.
//
// Each worker goes over rows of its own, some at a time, whose pixels it packs as they lie in memory, with all channels, and adds up sums
// by itself, in tiles; in the end these are added and rounded. Where there are many weights, workers share the rows and part the kernels.

#include <algorithm>
#include <cstring>
#include <utility>
#include <vector>

#include "operators.h"
#include "products.h"

namespace burnish::convolution_weights {
namespace {

using products::divide_up;
using products::Integers;
using products::multiply_add;
using products::round_up;

// A tile's sums fit the registers beside what they are made of.
constexpr int kRows = kWidth == 16 ? 8 : 4, kVectors = 2;
constexpr int64_t kColumns = kVectors * kWidth;
constexpr int64_t kSkew = 16;  // words between panels, whose lines would meet in the same places of the first-level cache
constexpr int64_t kTile = kRows * kColumns;

// Words that are packed at once, which stay in the second-level cache, and pixels of dy among them at most: a tile's sums are read and
// written once for these.
constexpr int64_t kPacked = 96 << 10, kPixels = 392;

constexpr int64_t kAhead = 8;  // pixels that are fetched before they are multiplied

struct Problem {
  int64_t images, height, width, channels;         // of x
  int64_t out_height, out_width, outputs;          // of dy
  int64_t high, wide;                              // of the kernels
  int64_t stride_h, stride_w, padding_h, padding_w;

  int64_t taps() const { return high * wide; }
  bool pointwise() const { return high == 1 && wide == 1 && padding_h == 0 && padding_w == 0; }
  // Of rows of dy, one of each image of a pair; where a kernel is one pixel, all images are one, and its halves are a pair.
  int64_t rows_in_pair() const { return pointwise() ? divide_up(images * out_height, 2) : out_height; }
  int64_t rows() const { return pointwise() ? rows_in_pair() : divide_up(images, 2) * out_height; }
};

// Pixels of dy from `dy` on, and as many of x from `x` on, `stride` pixels apart, that are multiplied.
struct Run {
  int64_t dy, x, count;
};

// A row of both images of a pair, or of the one that there is.
struct Row {
  const BFloat16 *one, *other;
};

// Memory that is fetched into the second-level cache, so many bytes for each pixel that is multiplied.
struct Fetch {
  const char* next;
  int64_t pace;
};

// target[kRows][kColumns] (+)= strip [pixels][kRows]' panel [pixels][kColumns] over runs.
template <bool add>
[[gnu::noinline]] void multiply_runs(const Run* run, const Run* end, int64_t stride, const float* __restrict strip, const float* __restrict panel,
                                     float* __restrict target, Fetch fetch) {
  Vector sums[kRows][kVectors];
#pragma GCC unroll 8
  for (int r = 0; r < kRows; ++r)
#pragma GCC unroll 8
    for (int v = 0; v < kVectors; ++v) sums[r][v] = Vector{}, __builtin_prefetch(target + r * kColumns + v * kWidth, 1);
  int64_t step = stride * kColumns;
  for (; run < end; ++run) {
    const float *a = strip + run->dy * kRows, *b = panel + run->x * kColumns;
#pragma GCC unroll 4
    for (int64_t d = 0; d < run->count; ++d) {
      Vector columns[kVectors];
      __builtin_prefetch(fetch.next, 0, 2);
      fetch.next += fetch.pace;
#pragma GCC unroll 8
      for (int v = 0; v < kVectors; ++v) {
        __builtin_prefetch(b + kAhead * step + v * kWidth);
        columns[v] = load(b + v * kWidth);
      }
#pragma GCC unroll 8
      for (int r = 0; r < kRows; ++r) {
        float word = a[r];
#pragma GCC unroll 8
        for (int v = 0; v < kVectors; ++v) sums[r][v] = multiply_add<BFloat16>(sums[r][v], word, columns[v]);
      }
      a += kRows;
      b += step;
    }
  }
#pragma GCC unroll 8
  for (int r = 0; r < kRows; ++r)
#pragma GCC unroll 8
    for (int v = 0; v < kVectors; ++v) {
      float* to = target + r * kColumns + v * kWidth;
      store(to, add ? load(to) + sums[r][v] : sums[r][v]);
    }
}

// Words of the numbers of two pixels.
[[gnu::always_inline]] inline Vector pair(const BFloat16* one, const BFloat16* other) {
  HalfWords low, high;
  std::memcpy(&low, one, sizeof low);
  std::memcpy(&high, other, sizeof high);
  return reinterpret_cast<Vector>(__builtin_convertvector(low, Words) | __builtin_convertvector(high, Words) << 16);
}

// Pixels of a row, `step` numbers apart, to panels [pixels][lines], `panel` words apart, of so many channels; zeros behind these.
// `zeros` are as many, for an image that is not there.
template <int64_t lines>
void pack(const Row& row, int64_t pixels, int64_t step, int64_t channels, const BFloat16* zeros, float* target, int64_t panel) {
  constexpr int64_t piece = std::min(lines, kWidth);  // of a vector that one panel takes
  int64_t other_step = row.other ? step : 0, whole = channels / kWidth * kWidth;
  const BFloat16* images[2] = {row.one, row.other ? row.other : zeros};
  auto place = [&](int64_t pixel, int64_t channel) { return target + channel / lines * panel + pixel * lines + channel % lines; };
  auto put = [&](Vector words, int64_t pixel, int64_t channel) {
#pragma GCC unroll 4
    for (int64_t part = 0; part < kWidth; part += piece)
      if (channel + part < channels) std::memcpy(place(pixel, channel + part), reinterpret_cast<const float*>(&words) + part, piece * 4);
  };
  int64_t pixel = 0;
  if constexpr (2 * lines == kWidth) {  // whole lines of the cache at once
    Integers low, high;
    for (int lane = 0; lane < kWidth; ++lane) low[lane] = lane < lines ? lane : lane + lines, high[lane] = low[lane] + lines;
    for (; pixel + 2 <= pixels; pixel += 2) {
      const BFloat16 *one = images[0] + pixel * step, *other = images[1] + pixel * other_step;
      float* to = target + pixel * lines;
      for (int64_t channel = 0; channel < whole; channel += kWidth, to += 2 * panel) {
        Vector first = pair(one + channel, other + channel), second = pair(one + step + channel, other + other_step + channel);
        store(to, products::pick(first, second, low));
        store(to + panel, products::pick(first, second, high));
      }
    }
  }
  for (; pixel < pixels; ++pixel)
    for (int64_t channel = 0; channel < whole; channel += kWidth)
      put(pair(images[0] + pixel * step + channel, images[1] + pixel * other_step + channel), pixel, channel);
  if (whole == channels && channels % lines == 0) return;
  for (pixel = 0; pixel < pixels; ++pixel) {
    BFloat16 rest[2][kWidth]{};
    std::copy_n(images[0] + pixel * step + whole, channels - whole, rest[0]);
    std::copy_n(images[1] + pixel * other_step + whole, channels - whole, rest[1]);
    put(pair(rest[0], rest[1]), pixel, whole);
    for (int64_t channel = whole + kWidth; channel < round_up(channels, lines); channel += kWidth)
      store(place(pixel, channel), Vector{});
  }
}

// Rows of dy and x that are packed together, and what is multiplied for each pixel of the kernels.
class Band {
 public:
  Band(const Problem& problem, const BFloat16* dy, const BFloat16* x) : problem_(&problem), dy_(dy), x_(x), runs_(problem.taps()) {}

  // The rows [begin, end) of dy, over all pairs.
  void select(int64_t begin, int64_t end) {
    dy_rows.clear(), x_rows.clear();
    for (auto& runs : runs_) runs.clear();
    const Problem& p = *problem_;
    int64_t in_pair = p.rows_in_pair(), pair_before = -1, next = 0;
    for (int64_t index = begin; index < end; ++index) {
      int64_t pair = index / in_pair, row = index % in_pair;
      if (p.pointwise()) {
        bool both = row + in_pair < p.images * p.out_height;
        int64_t other = row + in_pair;
        dy_rows.push_back({dy_row(row / p.out_height, row % p.out_height), both ? dy_row(other / p.out_height, other % p.out_height) : nullptr});
        x_rows.push_back({x_row(row / p.out_height, row % p.out_height * p.stride_h),
                          both ? x_row(other / p.out_height, other % p.out_height * p.stride_h) : nullptr});
        add(0, {(index - begin) * p.out_width, (index - begin) * p.out_width, p.out_width});
        continue;
      }
      bool both = 2 * pair + 1 < p.images;
      dy_rows.push_back({dy_row(2 * pair, row), both ? dy_row(2 * pair + 1, row) : nullptr});
      int64_t top = row * p.stride_h - p.padding_h;
      if (pair != pair_before) next = std::max<int64_t>(0, top), pair_before = pair;
      for (next = std::max(next, top); next < std::min(top + p.high, p.height); ++next)
        x_rows.push_back({x_row(2 * pair, next), both ? x_row(2 * pair + 1, next) : nullptr});
      int64_t last = static_cast<int64_t>(x_rows.size());  // the place behind that of row `next` - 1
      for (int64_t i = 0; i < p.high; ++i) {
        if (top + i < 0 || top + i >= p.height) continue;
        int64_t place = (last - (next - (top + i))) * p.width;
        for (int64_t j = 0; j < p.wide; ++j) {
          int64_t first = std::max<int64_t>(0, divide_up(p.padding_w - j, p.stride_w));
          int64_t stop = std::min(p.out_width, divide_up(p.width + p.padding_w - j, p.stride_w));
          if (first < stop)
            add(i * p.wide + j, {(index - begin) * p.out_width + first, place + first * p.stride_w + j - p.padding_w, stop - first});
        }
      }
    }
  }

  const std::vector<Run>& runs(int64_t tap) const { return runs_[tap]; }
  int64_t dy_pixels() const { return static_cast<int64_t>(dy_rows.size()) * problem_->out_width; }
  int64_t x_pixels() const { return static_cast<int64_t>(x_rows.size()) * x_width(); }

  // Of a kernel of one pixel, the pixels that it sees are packed.
  int64_t x_width() const { return problem_->pointwise() ? problem_->out_width : problem_->width; }
  int64_t x_step() const { return problem_->pointwise() ? problem_->stride_w : 1; }
  int64_t run_stride() const { return problem_->pointwise() ? 1 : problem_->stride_w; }

  std::vector<Row> dy_rows, x_rows;

 private:
  const BFloat16* dy_row(int64_t image, int64_t row) const {
    return dy_ + (image * problem_->out_height + row) * problem_->out_width * problem_->outputs;
  }
  const BFloat16* x_row(int64_t image, int64_t row) const { return x_ + (image * problem_->height + row) * problem_->width * problem_->channels; }

  // A run, with the one before where it goes on with that.
  void add(int64_t tap, const Run& run) {
    std::vector<Run>& runs = runs_[tap];
    if (!runs.empty() && runs.back().dy + runs.back().count == run.dy && runs.back().x + runs.back().count * run_stride() == run.x)
      runs.back().count += run.count;
    else
      runs.push_back(run);
  }

  const Problem* problem_;
  const BFloat16 *dy_, *x_;
  std::vector<std::vector<Run>> runs_;
};

// What the next band is made of, to be fetched while this one is multiplied.
class Ahead {
 public:
  void clear() { pieces_.clear(), at_ = 0, total_ = 0; }

  // Rows of so many numbers.
  void add(const std::vector<Row>& rows, int64_t numbers) {
    int64_t bytes = numbers * static_cast<int64_t>(sizeof(BFloat16));
    for (auto which : {&Row::one, &Row::other})
      for (const Row& row : rows) {
        const char* first = reinterpret_cast<const char*>(row.*which);
        if (!first) continue;
        if (!pieces_.empty() && pieces_.back().first + pieces_.back().second == first)
          pieces_.back().second += bytes;
        else
          pieces_.push_back({first, bytes});
        total_ += bytes;
      }
  }

  int64_t total() const { return total_; }

  // `bytes` of it, or as many as one piece has left, for so many pixels; where nothing is left, what is in the caches anyway.
  Fetch take(int64_t bytes, int64_t pixels) {
    while (at_ < pieces_.size() && pieces_[at_].second <= 0) ++at_;
    if (at_ == pieces_.size() || bytes == 0 || pixels == 0) return {reinterpret_cast<const char*>(this), 0};
    auto& [first, left] = pieces_[at_];
    int64_t taken = std::min(bytes, left);
    Fetch fetch{first, divide_up(taken, pixels)};
    first += taken, left -= taken;
    return fetch;
  }

 private:
  std::vector<std::pair<const char*, int64_t>> pieces_;
  size_t at_ = 0;
  int64_t total_ = 0;
};

// How the work is cut: workers for parts of the rows, and of the kernels; rows at a time, and channels of x.
struct Plan {
  int64_t over_rows = 1, over_outputs = 1;
  int64_t outputs = 0;                    // of a part, whole strips
  int64_t rows = 0, channels = 0;         // of a band
  int64_t dy_words = 0, x_words = 0;      // of its memory
  int64_t sums = 0;                       // of a worker

  Plan(const Problem& p, int64_t threads) {
    // Of x, for a row of dy and a pixel in it.
    int64_t x_rows = p.pointwise() ? 1 : p.stride_h, x_width = p.pointwise() ? p.out_width : p.width;
    double per_pixel = static_cast<double>(p.channels * p.taps()), least = -1;
    for (int64_t across = 1; across <= threads; ++across) {
      int64_t down = std::min(threads / across, p.rows()), part = round_up(divide_up(p.outputs, across), kRows);
      // Packing of a word and adding up of a sum cost as much as some multiplications.
      double packed = 8. * (part * p.out_width + p.channels * x_rows * x_width);
      double cost = divide_up(p.rows(), down) * (p.out_width * per_pixel * part + packed) + 8. * per_pixel * p.outputs * down / threads;
      if (least < 0 || cost < least) least = cost, over_rows = down, over_outputs = divide_up(p.outputs, part), outputs = part;
    }
    int64_t padded = round_up(p.channels, kColumns), most = std::max<int64_t>(1, kPixels / p.out_width);
    rows = std::clamp(kPacked / (outputs * p.out_width + padded * x_rows * x_width), divide_up(most, 4), most);
    // Behind the last row of dy of every pair, a kernel reaches further.
    int64_t pairs = divide_up(rows, p.out_height) + 1, further = p.pointwise() ? 0 : std::max<int64_t>(0, p.high - p.stride_h);
    int64_t pixels = (rows * x_rows + pairs * further) * x_width;
    channels = std::clamp(kPacked / pixels / kColumns * kColumns, kColumns, padded);
    dy_words = (rows * p.out_width * kRows + kSkew) * (outputs / kRows);
    x_words = (pixels * kColumns + kSkew) * (channels / kColumns);
    sums = outputs * padded * p.taps();
  }

  int64_t workers() const { return over_rows * over_outputs; }
  int64_t words() const { return round_up(dy_words + x_words + sums, 16); }
};

// Sums [columns][strips][taps][kRows][kColumns] of a part of the kernels over rows.
void add_up(const Problem& p, const Plan& plan, const BFloat16* dy, const BFloat16* x, int64_t worker, float* sums, float* memory) {
  int64_t part = worker % plan.over_outputs, share = worker / plan.over_outputs;
  int64_t first_output = part * plan.outputs, outputs = std::min(plan.outputs, p.outputs - first_output);
  int64_t strips = divide_up(outputs, kRows), taps = p.taps();
  int64_t begin = share * p.rows() / plan.over_rows, end = (share + 1) * p.rows() / plan.over_rows;
  float *dy_packed = memory, *x_packed = memory + plan.dy_words;
  std::vector<BFloat16> zeros(std::max(p.outputs, p.channels), BFloat16(0.f));
  Band band(p, dy, x), following(p, dy, x);
  Ahead ahead;
  band.select(begin, std::min(begin + plan.rows, end));
  for (int64_t start = begin; start < end; start += plan.rows, std::swap(band, following)) {
    ahead.clear();
    following.select(std::min(start + plan.rows, end), std::min(start + 2 * plan.rows, end));
    ahead.add(following.dy_rows, p.out_width * p.outputs);
    ahead.add(following.x_rows, p.width * p.channels);
    int64_t tiles = strips * divide_up(p.channels, kColumns) * taps, quota = divide_up(ahead.total(), tiles);
    int64_t strip_words = band.dy_pixels() * kRows + kSkew, panel_words = band.x_pixels() * kColumns + kSkew;
    for (size_t row = 0; row < band.dy_rows.size(); ++row) {
      Row source = band.dy_rows[row];
      source.one += first_output;
      if (source.other) source.other += first_output;
      pack<kRows>(source, p.out_width, p.outputs, outputs, zeros.data(), dy_packed + row * p.out_width * kRows, strip_words);
    }
    for (int64_t first = 0; first < p.channels; first += plan.channels) {
      int64_t channels = std::min(plan.channels, p.channels - first);
      for (size_t row = 0; row < band.x_rows.size(); ++row) {
        Row source = band.x_rows[row];
        source.one += first;
        if (source.other) source.other += first;
        pack<kColumns>(source, band.x_width(), p.channels * band.x_step(), channels, zeros.data(), x_packed + row * band.x_width() * kColumns, panel_words);
      }
      for (int64_t column = 0; column < channels; column += kColumns) {
        float* target = sums + (first + column) / kColumns * (plan.outputs / kRows) * taps * kTile;
        for (int64_t strip = 0; strip < strips; ++strip)
          for (int64_t tap = 0; tap < taps; ++tap, target += kTile) {
            const std::vector<Run>& runs = band.runs(tap);
            (start == begin ? multiply_runs<false> : multiply_runs<true>)(
              runs.data(), runs.data() + runs.size(), band.run_stride(), dy_packed + strip * strip_words,
              x_packed + column / kColumns * panel_words, target, ahead.take(quota, band.dy_pixels()));
          }
      }
    }
  }
}

// dy [images][out_height][out_width][outputs], x [images][height][width][channels] -> dw [outputs][taps][channels].
void gradient(const Problem& p, const BFloat16* dy, const BFloat16* x, BFloat16* dw) {
  Plan plan(p, get_num_threads());
  Tensor memory = make_tensor({plan.workers() * plan.words()});
  float* work = memory.mutable_data_ptr<float>();
  parallel_for(0, plan.workers(), 1, [&](int64_t begin, int64_t end) {
    for (int64_t worker = begin; worker < end; ++worker) {
      float* sums = work + worker * plan.words();
      add_up(p, plan, dy, x, worker, sums, sums + plan.sums);
    }
  });
  int64_t taps = p.taps(), strips = plan.outputs / kRows;
  int64_t grain = std::max<int64_t>(1, (1 << 14) / (kRows * taps * p.channels));
  parallel_for(0, divide_up(p.outputs, kRows), grain, [&](int64_t begin, int64_t end) {
    for (int64_t strip = begin; strip < end; ++strip) {
      int64_t part = strip / strips, outputs = std::min<int64_t>(kRows, p.outputs - strip * kRows);
      for (int64_t column = 0; column < p.channels; column += kColumns)
        for (int64_t tap = 0; tap < taps; ++tap) {
          const float* tile = work + part * plan.words() + ((column / kColumns * strips + strip % strips) * taps + tap) * kTile;
          for (int64_t r = 0; r < outputs; ++r)
            for (int64_t c = column; c < std::min(column + kColumns, p.channels); c += kWidth) {
              Vector sum{};
              for (int64_t share = 0; share < plan.over_rows; ++share)
                sum += load(tile + share * plan.over_outputs * plan.words() + r * kColumns + c - column);
              BFloat16* target = dw + ((strip * kRows + r) * taps + tap) * p.channels + c;
              if (c + kWidth <= p.channels) {
                store(target, sum);
              } else {
                BFloat16 rounded[kWidth];
                store(rounded, sum);
                std::copy_n(rounded, p.channels - c, target);
              }
            }
        }
    }
  });
}

// (dy [N, K, H', W'], x [N, C, H, W], extents of the kernels, strides and padding of the convolution) -> dw [K, C, *extents].
Tensor convolution_weight_gradient(const Tensor& dy_given, const Tensor& x_given, const std::vector<int64_t>& extents,
                                   const std::vector<int64_t>& strides, const std::vector<int64_t>& padding) {
  BURNISH_CHECK(x_given.dim() == 4 && dy_given.dim() == 4 && x_given.scalar_type() == kBFloat16 && dy_given.scalar_type() == kBFloat16,
                "bfloat16 images expected");
  BURNISH_CHECK(extents.size() == 2 && strides.size() == 2 && padding.size() == 2 && std::min(strides[0], strides[1]) > 0 &&
                  std::min(extents[0], extents[1]) > 0 && std::min(padding[0], padding[1]) >= 0,
                "extents, strides and padding of two axes expected");
  bool fits = x_given.size(0) == dy_given.size(0);
  for (int axis : {0, 1}) {
    int64_t reach = x_given.size(2 + axis) + 2 * padding[axis] - extents[axis];
    fits = fits && reach >= 0 && reach / strides[axis] + 1 == dy_given.size(2 + axis);
  }
  BURNISH_CHECK(fits, "images and the gradient of their convolution expected");
  Tensor dw = make_channels_last({dy_given.size(1), x_given.size(1), extents[0], extents[1]}, kBFloat16);
  BFloat16* result = dw.mutable_data_ptr<BFloat16>();
  if (dy_given.numel() == 0 || x_given.numel() == 0) {
    std::fill(result, result + dw.numel(), BFloat16(0.f));
    return dw;
  }
  Tensor dy = to_channels_last(dy_given), x = to_channels_last(x_given);
  gradient({x.size(0), x.size(2), x.size(3), x.size(1), dy.size(2), dy.size(3), dy.size(1), extents[0], extents[1], strides[0], strides[1],
            padding[0], padding[1]},
           dy.const_data_ptr<BFloat16>(), x.const_data_ptr<BFloat16>(), result);
  return dw;
}

}  // namespace

BURNISH_OPERATORS(CPU) { operators.implement<&convolution_weight_gradient>("convolution_weight_gradient_bfloat16"); }

}  // namespace burnish::convolution_weights
