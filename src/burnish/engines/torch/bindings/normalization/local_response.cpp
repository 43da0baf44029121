// Local response normalization across neighbouring channels, and its gradient (Krizhevsky, Sutskever and Hinton 2012, section 3.3):
//
//   S = bias + alpha / size * (sum of x^2 over the window of a channel), y = x S^-beta,
//   dx = dy S^-beta - 2 alpha beta / size * x * (sum of dy x S^-beta / S over the channels whose window holds this one).
//
// The window of an even size reaches one channel further forward than back; the gradient's sum has the mirrored window. The gradient
// computes S again: its sums and roots in the cache cost less than what would be read back.
//
// A tile is all channels of a run of pixels, in rows: one for each pixel where the channels of a pixel lie side by side, one for each
// channel where each lies by itself. Both are added up in one way: in the buffers a channel's neighbour is `step` further, one element or
// one row, and zeros stand where a window reaches beyond the channels.

#include <algorithm>
#include <cmath>
#include <vector>

#include "operators.h"
#include "vector_math.h"

namespace burnish {
namespace {

constexpr int64_t kGrain = 16384;  // elements for a thread
constexpr int64_t kTile = 4096;  // elements, whose four buffers stay in the nearest caches
constexpr int64_t kLeastRun = 16;  // pixels

struct Settings {
  int64_t before, after;  // channels of the window, no more than there are
  float factor, beta, bias, slope;

  Settings(int64_t size, double alpha, double beta_given, double bias_given, int64_t channels) {
    BURNISH_CHECK(size >= 1, "local_response: a window of at least one channel expected, found ", size);
    int64_t furthest = std::max<int64_t>(channels - 1, 0);
    before = std::min((size - 1) / 2, furthest);
    after = std::min(size - 1 - (size - 1) / 2, furthest);
    factor = static_cast<float>(alpha / size);
    beta = static_cast<float>(beta_given);
    bias = static_cast<float>(bias_given);
    slope = static_cast<float>(2.0 * alpha * beta_given / size);
  }
};

// Where the elements of a tile are: `rows` of `length`, in memory `stride` from one to the next, in the buffers `pitch`.
struct Tile {
  int64_t offset, rows, length, stride, pitch, step;

  int64_t size() const { return rows * pitch; }
};

// How tensors [N, C, ...] are cut into tiles.
struct Layout {
  bool channels_last;
  int64_t channels, pixels, pitch, run, tiles, grain;

  Layout(const Tensor& x, const Settings& settings, bool last) : channels_last(last), channels(x.size(1)), pixels(1), tiles(0), grain(1) {
    for (int64_t axis = 2; axis < x.dim(); ++axis) pixels *= x.size(axis);
    pitch = last ? channels + std::max(settings.before, settings.after) : 0;
    if (!x.numel()) return;
    if (last) {
      pixels *= x.size(0);
      run = std::max<int64_t>(1, kTile / pitch);
      tiles = (pixels + run - 1) / run;
    } else {
      run = std::min(pixels, std::max(kLeastRun, kTile / channels));
      tiles = x.size(0) * ((pixels + run - 1) / run);
    }
    grain = std::max<int64_t>(1, kGrain / (run * channels));
  }

  Tile tile(int64_t index) const {
    int64_t runs = (pixels + run - 1) / run, first = index % runs * run, count = std::min(run, pixels - first);
    if (channels_last) return {first * channels, count, channels, channels, pitch, 1};
    return {index / runs * channels * pixels + first, channels, count, pixels, count, count};
  }
};

// Scratch memory of one thread.
struct Buffers {
  std::vector<float> padded, scale, power;

  Buffers(const Layout& layout, const Settings& settings) {
    Tile longest = layout.tile(0);
    padded.resize(longest.size() + (settings.before + settings.after) * longest.step);
    scale.resize(longest.size());
    power.resize(longest.size());
  }
};

// sums[i] = sum of padded[i + k step] for the channels of a window.
void add_up(const float* __restrict padded, float* __restrict sums, int64_t count, int64_t window, int64_t step) {
  std::copy_n(padded, count, sums);
  for (int64_t k = 1; k < window; ++k) {
    const float* __restrict shifted = padded + k * step;
    for (int64_t i = 0; i < count; ++i) sums[i] += shifted[i];
  }
}

// Zeros around the rows, which begin after `before` neighbours.
void pad(float* padded, int64_t before, int64_t after, const Tile& tile) {
  float* rows = padded + before * tile.step;
  std::fill_n(padded, before * tile.step, 0.f);
  std::fill_n(rows + tile.size(), after * tile.step, 0.f);
  for (int64_t row = 0; row < tile.rows; ++row) std::fill_n(rows + row * tile.pitch + tile.length, tile.pitch - tile.length, 0.f);
}

// S in buffers.scale, and S^-beta in buffers.power.
void find_scales(const float* __restrict x, const Tile& tile, const Settings& settings, Buffers& buffers) {
  pad(buffers.padded.data(), settings.before, settings.after, tile);
  float* squares = buffers.padded.data() + settings.before * tile.step;
  for (int64_t row = 0; row < tile.rows; ++row) {
    const float* __restrict from = x + row * tile.stride;
    float* __restrict to = squares + row * tile.pitch;
    for (int64_t i = 0; i < tile.length; ++i) to[i] = from[i] * from[i];
  }
  float* __restrict scale = buffers.scale.data();
  float* __restrict power = buffers.power.data();
  int64_t count = tile.size();
  add_up(buffers.padded.data(), scale, count, settings.before + settings.after + 1, tile.step);
  float factor = settings.factor, bias = settings.bias, beta = settings.beta;
  for (int64_t i = 0; i < count; ++i) scale[i] = scale[i] * factor + bias;
  if (beta == 0.75f)  // as in AlexNet and GoogLeNet
    for (int64_t i = 0; i < count; ++i) {
      float root = std::sqrt(scale[i]);
      power[i] = 1.f / (root * std::sqrt(root));
    }
  else
    for (int64_t i = 0; i < count; ++i) power[i] = exponential(-beta * logarithm(scale[i]));
}

// The operand in memory that tiles can be cut from, and whether its channels lie side by side.
Tensor laid_out(const Tensor& given, bool channels_last) {
  return channels_last ? to_channels_last(given) : to_contiguous(given);
}

bool has_channels_last(const Tensor& x) { return !x.is_contiguous() && is_channels_last(x); }

void check(const Tensor& x) {
  BURNISH_CHECK(x.dim() >= 2 && x.scalar_type() == kFloat, "local_response: float32 [N, C, ...] expected");
}

// x [N, C, ...] -> y, in the layout of x.
Tensor local_response(const Tensor& given, int64_t size, double alpha, double beta, double bias) {
  check(given);
  bool last = has_channels_last(given);
  Tensor x = laid_out(given, last), y = last ? make_channels_last(x.sizes()) : make_tensor(x.sizes());
  Settings settings(size, alpha, beta, bias, x.size(1));
  Layout layout(x, settings, last);
  const float* from = x.const_data_ptr<float>();
  float* to = y.mutable_data_ptr<float>();
  parallel_for(0, layout.tiles, layout.grain, [&](int64_t begin, int64_t end) {
    Buffers buffers(layout, settings);
    for (int64_t index = begin; index < end; ++index) {
      Tile tile = layout.tile(index);
      find_scales(from + tile.offset, tile, settings, buffers);
      for (int64_t row = 0; row < tile.rows; ++row) {
        const float* __restrict source = from + tile.offset + row * tile.stride;
        const float* __restrict power = buffers.power.data() + row * tile.pitch;
        float* __restrict target = to + tile.offset + row * tile.stride;
        for (int64_t i = 0; i < tile.length; ++i) target[i] = source[i] * power[i];
      }
    }
  });
  return y;
}

void gradient_of_tile(const float* dy, const float* x, float* dx, const Tile& tile, const Settings& settings, Buffers& buffers) {
  find_scales(x, tile, settings, buffers);
  pad(buffers.padded.data(), settings.after, settings.before, tile);
  float* terms = buffers.padded.data() + settings.after * tile.step;
  for (int64_t row = 0; row < tile.rows; ++row) {
    const float* __restrict flow = dy + row * tile.stride;
    const float* __restrict source = x + row * tile.stride;
    const float* __restrict scale = buffers.scale.data() + row * tile.pitch;
    const float* __restrict power = buffers.power.data() + row * tile.pitch;
    float* __restrict to = terms + row * tile.pitch;
    for (int64_t i = 0; i < tile.length; ++i) to[i] = flow[i] * (source[i] * power[i]) / scale[i];
  }
  float* sums = buffers.scale.data();
  add_up(buffers.padded.data(), sums, tile.size(), settings.before + settings.after + 1, tile.step);
  float slope = settings.slope;
  for (int64_t row = 0; row < tile.rows; ++row) {
    const float* __restrict flow = dy + row * tile.stride;
    const float* __restrict source = x + row * tile.stride;
    const float* __restrict sum = sums + row * tile.pitch;
    const float* __restrict power = buffers.power.data() + row * tile.pitch;
    float* __restrict to = dx + row * tile.stride;
    for (int64_t i = 0; i < tile.length; ++i) to[i] = flow[i] * power[i] - slope * source[i] * sum[i];
  }
}

// (dy, x) -> dx, in the layout of x.
Tensor local_response_gradient(const Tensor& dy_given, const Tensor& x_given, int64_t size, double alpha, double beta, double bias) {
  check(x_given);
  BURNISH_CHECK(dy_given.scalar_type() == kFloat && same(dy_given.sizes(), x_given.sizes()),
                "local_response_gradient: a float32 gradient of the shape of x expected");
  bool last = has_channels_last(x_given);
  Tensor x = laid_out(x_given, last), dy = laid_out(dy_given, last);
  Tensor dx = last ? make_channels_last(x.sizes()) : make_tensor(x.sizes());
  Settings settings(size, alpha, beta, bias, x.size(1));
  Layout layout(x, settings, last);
  const float *flows = dy.const_data_ptr<float>(), *sources = x.const_data_ptr<float>();
  float* targets = dx.mutable_data_ptr<float>();
  parallel_for(0, layout.tiles, layout.grain, [&](int64_t begin, int64_t end) {
    Buffers buffers(layout, settings);
    for (int64_t index = begin; index < end; ++index) {
      Tile tile = layout.tile(index);
      gradient_of_tile(flows + tile.offset, sources + tile.offset, targets + tile.offset, tile, settings, buffers);
    }
  });
  return dx;
}

}  // namespace

BURNISH_OPERATORS(CPU) {
  operators.implement<&local_response>("local_response");
  operators.implement<&local_response_gradient>("local_response_gradient");
}

}  // namespace burnish
