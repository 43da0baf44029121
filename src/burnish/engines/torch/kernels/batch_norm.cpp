// Batch normalization in training, with the addition and the activation behind it, and its gradient: one pass for the sums, one for the
// result. Tensors are read as rows of channels: channels_last images, or [N, C].
//
// Statistics are those of x minus a pilot, the mean of the first rows, so that a large mean costs no digits; sums over short runs of rows
// are float32, sums over these are float64. x - mean is applied as (x - pilot) - shift, which holds the digits that a rounded mean loses.

#include <algorithm>
#include <cmath>
#include <vector>

#include "tensor.h"

namespace burnish {
namespace {

constexpr int64_t kRun = 32;  // rows that are summed in float32 before they enter the float64 sums
constexpr int64_t kPilotRows = 256;

enum Activation : int64_t { kNone = 0, kRelu = 1, kClipped = 2 };  // kClipped: min(max(y, 0), limit)

struct Rows {
  Tensor tensor;  // keeps the memory
  const float* data;
  int64_t rows, channels;
};

Tensor as_rows(const Tensor& tensor) {
  return tensor.dim() == 4 ? to_channels_last(tensor) : to_contiguous(tensor);
}

Rows rows_of(const Tensor& given) {
  BURNISH_CHECK(given.scalar_type() == kFloat && (given.dim() == 4 || given.dim() == 2), "float32 images or rows expected");
  Tensor tensor = as_rows(given);
  int64_t channels = tensor.size(1);
  return {tensor, tensor.const_data_ptr<float>(), channels ? tensor.numel() / channels : 0, channels};
}

Tensor empty_like_rows(const Tensor& like) {
  return like.dim() == 4 ? make_channels_last(like.sizes()) : make_tensor(like.sizes());
}

int64_t grain(int64_t rows, int64_t channels) {
  return std::max<int64_t>(kRun, std::min<int64_t>(rows, 16384 / std::max<int64_t>(channels, 1) + 1));
}

// Adds up two sums per channel over all rows; `add(row, one, other)` adds a row to runs of float32 sums.
template <typename Add>
void sum_rows(int64_t rows, int64_t channels, std::vector<double>& first, std::vector<double>& second, const Add& add) {
  int64_t threads = std::max<int64_t>(1, std::min<int64_t>(get_num_threads(), rows / kRun));
  std::vector<std::vector<double>> firsts(threads), seconds(threads);
  int64_t share = (rows + threads - 1) / threads;
  parallel_for(0, threads, 1, [&](int64_t begin, int64_t end) {
    std::vector<float> one(channels), other(channels);
    for (int64_t thread = begin; thread < end; ++thread) {
      firsts[thread].assign(channels, 0.0);
      seconds[thread].assign(channels, 0.0);
      double* total_first = firsts[thread].data();
      double* total_second = seconds[thread].data();
      int64_t stop = std::min(rows, (thread + 1) * share);
      for (int64_t run = thread * share; run < stop; run += kRun) {
        std::fill(one.begin(), one.end(), 0.f);
        std::fill(other.begin(), other.end(), 0.f);
        for (int64_t row = run; row < std::min(stop, run + kRun); ++row) add(row, one.data(), other.data());
#pragma omp simd
        for (int64_t c = 0; c < channels; ++c) {
          total_first[c] += one[c];
          total_second[c] += other[c];
        }
      }
    }
  });
  first.assign(channels, 0.0);
  second.assign(channels, 0.0);
  for (int64_t thread = 0; thread < threads; ++thread)  // in a fixed order: the same bits for the same number of threads
#pragma omp simd
    for (int64_t c = 0; c < channels; ++c) {
      first[c] += firsts[thread][c];
      second[c] += seconds[thread][c];
    }
}

template <int64_t activation>
inline float activate(float value, float limit) {
  if constexpr (activation == kNone) return value;
  value = value > 0.f ? value : 0.f;
  if constexpr (activation == kClipped) value = value < limit ? value : limit;
  return value;
}

template <int64_t activation>
inline float masked(float gradient, float y, float limit) {
  if constexpr (activation == kNone) return gradient;
  if constexpr (activation == kRelu) return y > 0.f ? gradient : 0.f;
  return (y > 0.f && y < limit) ? gradient : 0.f;
}

template <int64_t activation, bool residual>
void apply(const Rows& x, const float* gain, const float* offset, const float* pilot, const float* shift, const float* added, float* y,
           float limit) {
  int64_t channels = x.channels;
  parallel_for(0, x.rows, grain(x.rows, channels), [&](int64_t begin, int64_t end) {
    for (int64_t row = end; row-- > begin;) {  // from the end: what was read last may still be in the cache
      const float* source = x.data + row * channels;
      const float* more = residual ? added + row * channels : nullptr;
      float* target = y + row * channels;
#pragma omp simd
      for (int64_t c = 0; c < channels; ++c) {
        float value = ((source[c] - pilot[c]) - shift[c]) * gain[c] + offset[c];
        if constexpr (residual) value += more[c];
        target[c] = activate<activation>(value, limit);
      }
    }
  });
}

// (x, scale, bias, added) -> y, mean, inverse_std, variance, saved: y = activation((x - mean) inverse_std scale + bias + added).
std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor> batch_norm_training(
    const Tensor& x_given, const Tensor& scale, const Tensor& bias, const std::optional<Tensor>& added, double epsilon,
    int64_t activation, double limit) {
  Rows x = rows_of(x_given);
  int64_t channels = x.channels;
  auto vector = [&] { return make_tensor({channels}); };
  Tensor mean = vector(), inverse_std = vector(), variance = vector(), saved = make_tensor({2, channels});
  float* pilot = saved.mutable_data_ptr<float>();
  float* shift = pilot + channels;
  {
    int64_t count = std::min(x.rows, kPilotRows);
    std::vector<double> sums(channels, 0.0);
    for (int64_t row = 0; row < count; ++row)
#pragma omp simd
      for (int64_t c = 0; c < channels; ++c) sums[c] += x.data[row * channels + c];
#pragma omp simd
    for (int64_t c = 0; c < channels; ++c) pilot[c] = static_cast<float>(sums[c] / count);
  }
  std::vector<double> first, second;
  sum_rows(x.rows, channels, first, second, [&](int64_t row, float* one, float* other) {
    const float* source = x.data + row * channels;
#pragma omp simd
    for (int64_t c = 0; c < channels; ++c) {
      float centered = source[c] - pilot[c];
      one[c] += centered;
      other[c] += centered * centered;
    }
  });
  Tensor scale_row = to_contiguous(scale), bias_row = to_contiguous(bias);
  const float* scales = scale_row.const_data_ptr<float>();
  std::vector<float> gain(channels);
#pragma omp simd
  for (int64_t c = 0; c < channels; ++c) {
    double delta = first[c] / x.rows;
    double spread = std::max(second[c] / x.rows - delta * delta, 0.0);
    double inverse = 1.0 / std::sqrt(spread + epsilon);
    shift[c] = static_cast<float>(delta);
    mean.mutable_data_ptr<float>()[c] = static_cast<float>(pilot[c] + delta);
    variance.mutable_data_ptr<float>()[c] = static_cast<float>(spread);
    inverse_std.mutable_data_ptr<float>()[c] = static_cast<float>(inverse);
    gain[c] = static_cast<float>(scales[c] * inverse);
  }
  Tensor y = empty_like_rows(x.tensor);
  Tensor more = added.has_value() ? as_rows(*added) : Tensor();
  const float* extra = added.has_value() ? more.const_data_ptr<float>() : nullptr;
  float* target = y.mutable_data_ptr<float>();
  const float* offset = bias_row.const_data_ptr<float>();
  float bound = static_cast<float>(limit);
  auto run = [&](auto kind) {
    constexpr int64_t k = decltype(kind)::value;
    if (extra)
      apply<k, true>(x, gain.data(), offset, pilot, shift, extra, target, bound);
    else
      apply<k, false>(x, gain.data(), offset, pilot, shift, nullptr, target, bound);
  };
  if (activation == kRelu)
    run(std::integral_constant<int64_t, kRelu>());
  else if (activation == kClipped)
    run(std::integral_constant<int64_t, kClipped>());
  else
    run(std::integral_constant<int64_t, kNone>());
  return {y, mean, inverse_std, variance, saved};
}

// What the gradient of the activation is masked by: the layer's result as it was kept, or computed again from x, which saves reading it.
struct Result {
  const float* y;     // null: computed again
  const float* bias;  // for that
};

template <int64_t activation, bool again>
std::tuple<Tensor, Tensor, Tensor, Tensor> gradient(const Rows& dy, const Rows& x, const Tensor& scale,
                                                                    const Tensor& inverse_std, const Tensor& saved,
                                                                    const Result& result, const float* more, float limit, bool keep) {
  int64_t channels = x.channels, rows = x.rows;
  const float* pilot = saved.const_data_ptr<float>();
  const float* shift = pilot + channels;
  Tensor scale_row = to_contiguous(scale), inverse_row = to_contiguous(inverse_std);
  const float* scales = scale_row.const_data_ptr<float>();
  const float* inverse = inverse_row.const_data_ptr<float>();
  std::vector<float> gains(channels), slopes(channels), offsets(channels);
  for (int64_t c = 0; c < channels; ++c) gains[c] = static_cast<float>(static_cast<double>(scales[c]) * inverse[c]);
  const float* gain = gains.data();
  auto before_activation = [&](const float* kept, const float* source, int64_t c) {
    if constexpr (activation == kNone) return 0.f;
    if constexpr (again) return ((source[c] - pilot[c]) - shift[c]) * gain[c] + result.bias[c];
    return kept[c];
  };
  // The gradient before the activation is what the addition passes on; where it is asked for it is written once and read again.
  keep = keep || more;
  Tensor before = keep ? empty_like_rows(x.tensor) : Tensor();
  float* kept = keep ? before.mutable_data_ptr<float>() : nullptr;
  std::vector<double> first, second;
  sum_rows(rows, channels, first, second, [&](int64_t row, float* one, float* other) {
    const float* flow = dy.data + row * channels;
    const float* source = x.data + row * channels;
    const float* y = result.y ? result.y + row * channels : nullptr;
    if (kept) {
      float* target = kept + row * channels;
      const float* branch = more ? more + row * channels : nullptr;
#pragma omp simd
      for (int64_t c = 0; c < channels; ++c) {
        float total = branch ? flow[c] + branch[c] : flow[c];
        float value = masked<activation>(total, before_activation(y, source, c), limit);
        target[c] = value;
        one[c] += value;
        other[c] += value * ((source[c] - pilot[c]) - shift[c]);
      }
    } else {
#pragma omp simd
      for (int64_t c = 0; c < channels; ++c) {
        float value = masked<activation>(flow[c], before_activation(y, source, c), limit);
        one[c] += value;
        other[c] += value * ((source[c] - pilot[c]) - shift[c]);
      }
    }
  });
  Tensor dscale = make_tensor({channels}), dbias = make_tensor({channels});
  float* scale_gradient = dscale.mutable_data_ptr<float>();
  float* bias_gradient = dbias.mutable_data_ptr<float>();
  for (int64_t c = 0; c < channels; ++c) {
    double r = inverse[c], weight = scales[c] * r;
    scale_gradient[c] = static_cast<float>(second[c] * r);
    bias_gradient[c] = static_cast<float>(first[c]);
    slopes[c] = static_cast<float>(-weight * r * r * second[c] / rows);
    offsets[c] = static_cast<float>(-weight * first[c] / rows);
  }
  const float* slope = slopes.data();
  const float* offset = offsets.data();
  Tensor dx = empty_like_rows(x.tensor);
  float* out = dx.mutable_data_ptr<float>();
  parallel_for(0, rows, grain(rows, channels), [&](int64_t begin, int64_t end) {
    for (int64_t row = end; row-- > begin;) {  // from the end: what was read last may still be in the cache
      const float* flow = (kept ? kept : dy.data) + row * channels;
      const float* source = x.data + row * channels;
      float* target = out + row * channels;
      if (kept || activation == kNone) {
#pragma omp simd
        for (int64_t c = 0; c < channels; ++c)
          target[c] = flow[c] * gain[c] + ((source[c] - pilot[c]) - shift[c]) * slope[c] + offset[c];
      } else {
        const float* y = result.y ? result.y + row * channels : nullptr;
#pragma omp simd
        for (int64_t c = 0; c < channels; ++c) {
          float value = masked<activation>(flow[c], before_activation(y, source, c), limit);
          target[c] = value * gain[c] + ((source[c] - pilot[c]) - shift[c]) * slope[c] + offset[c];
        }
      }
    }
  });
  return {dx, dscale, dbias, before};
}

// (dy, x, scale, inverse_std, saved, y or bias, more) -> dx, dscale, dbias, and the gradient of what was added (empty unless `keep`).
// The gradient of the output is dy + more. With the bias in place of y nothing was added to the layer's result.
std::tuple<Tensor, Tensor, Tensor, Tensor> batch_norm_gradient(
    const Tensor& dy_given, const Tensor& x_given, const Tensor& scale, const Tensor& inverse_std,
    const Tensor& saved, const std::optional<Tensor>& y_given, const std::optional<Tensor>& more_given,
    const std::optional<Tensor>& bias_given, int64_t activation, double limit, bool keep) {
  BURNISH_CHECK(activation == kNone || y_given.has_value() || bias_given.has_value(), "batch_norm_gradient: y or the bias expected");
  Rows nothing{Tensor(), nullptr, 0, 0};
  Rows dy = rows_of(dy_given), x = rows_of(x_given);
  Rows y = y_given.has_value() ? rows_of(*y_given) : nothing;
  Rows more = more_given.has_value() ? rows_of(*more_given) : nothing;
  Tensor bias = bias_given.has_value() ? to_contiguous(*bias_given) : Tensor();
  Result result{y.data, bias.defined() ? bias.const_data_ptr<float>() : nullptr};
  float bound = static_cast<float>(limit);
  auto run = [&](auto kind, auto again) {
    return gradient<decltype(kind)::value, decltype(again)::value>(dy, x, scale, inverse_std, saved, result, more.data, bound, keep);
  };
  using None = std::integral_constant<int64_t, kNone>;
  using Relu = std::integral_constant<int64_t, kRelu>;
  using Clipped = std::integral_constant<int64_t, kClipped>;
  std::tuple<Tensor, Tensor, Tensor, Tensor> results;
  if (activation == kNone) {
    keep = false;
    results = run(None(), std::false_type());
  } else if (y.data) {
    results = activation == kRelu ? run(Relu(), std::false_type()) : run(Clipped(), std::false_type());
  } else {
    results = activation == kRelu ? run(Relu(), std::true_type()) : run(Clipped(), std::true_type());
  }
  if (!std::get<3>(results).defined()) std::get<3>(results) = make_tensor({0});
  return results;
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(burnish, CPU, library) {
  library.impl("batch_norm_training", TORCH_BOX(&batch_norm_training));
  library.impl("batch_norm_gradient", TORCH_BOX(&batch_norm_gradient));
}

}  // namespace burnish
