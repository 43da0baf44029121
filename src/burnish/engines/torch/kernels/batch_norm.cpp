// Batch normalization in training, with the addition and the activation behind it: one pass for the sums, one for the result. Its gradient
// is in batch_norm_gradient.cpp.
//
// Statistics are those of x minus a pilot, a mean of a few rows, so that a large mean costs no digits. x - mean is applied as
// (x - pilot) - shift, which holds the digits that a rounded mean loses.

#include "batch_norm_rows.h"

namespace burnish {
namespace {

constexpr int64_t kPilotRows = 16;
constexpr double kFarthestPilot = 4.0;  // (pilot - mean)^2 in variances: with a pilot farther off, the variance would lose digits

// The mean of rows spread over x. It is counted from the first of them, so that a constant channel has itself as its pilot.
template <typename T>
void choose_pilot(const T* x, const Walk& walk, float* pilot) {
  int64_t channels = walk.channels, rows = walk.per_channel(), count = std::min(rows, kPilotRows);
  std::vector<float> sums(channels, 0.f);
  for (int64_t pick = 1; pick < count; ++pick) {
    const T* row = x + rows * pick / count * channels;
#pragma omp simd
    for (int64_t c = 0; c < channels; ++c) sums[c] += static_cast<float>(row[c]) - static_cast<float>(x[c]);
  }
  for (int64_t c = 0; c < channels; ++c) pilot[c] = static_cast<float>(x[c]) + sums[c] / static_cast<float>(count);
}

template <typename T>
struct Moments {
  const T* x;
  Columns<1>::Reader pilot;

  template <typename V>
  [[gnu::always_inline]] V columns(int64_t column) const {
    return pilot.get<V>(0, column);
  }

  template <typename V>
  [[gnu::always_inline]] void add(V pilots, int64_t index, V& one, V& other) const {
    V centered = read<V>(x + index) - pilots;
    one += centered;
    other += centered * centered;
  }
};

// The mean of x minus the pilot, and the variance.
template <typename T>
void moments(const T* x, const Walk& walk, const float* pilot, std::vector<double>& delta, std::vector<double>& variance) {
  Columns<1> columns(walk);
  columns.set(0, pilot);
  sum_channels(walk, Moments<T>{x, columns.reader()}, delta, variance);
  double count = static_cast<double>(walk.per_channel());
  for (int64_t c = 0; c < walk.channels; ++c) {
    delta[c] /= count;
    variance[c] = variance[c] / count - delta[c] * delta[c];
    if (variance[c] < 0.0) variance[c] = 0.0;
  }
}

template <typename T, int64_t activation, bool residual>
struct Application {
  const T *x, *added;
  T* y;
  Columns<4>::Reader values;  // pilot, shift, gain, offset
  float limit;

  template <typename V>
  struct Values {
    V pilot, shift, gain, offset, zero, limit;
  };

  template <typename V>
  [[gnu::always_inline]] Values<V> columns(int64_t column) const {
    return {values.get<V>(0, column), values.get<V>(1, column), values.get<V>(2, column), values.get<V>(3, column), V{}, V{} + limit};
  }

  template <typename V>
  [[gnu::always_inline]] void at(const Values<V>& own, int64_t index) const {
    V value = ((read<V>(x + index) - own.pilot) - own.shift) * own.gain + own.offset;
    if constexpr (residual) value += read<V>(added + index);
    // The comparisons leave NaN as it is.
    if constexpr (activation != kNone) value = value < own.zero ? own.zero : value;
    if constexpr (activation == kClipped) value = value > own.limit ? own.limit : value;
    write(y + index, value);
  }
};

// (x, scale, bias, added) -> y, mean, inverse_std, variance, saved: y = activation((x - mean) inverse_std scale + bias + added). x, added and
// y are float32 or bfloat16, all else is float32; saved [2, C] is pilot and shift.
std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor> batch_norm_training(
    const Tensor& x_given, const Tensor& scale_given, const Tensor& bias_given, const std::optional<Tensor>& added_given,
    double epsilon, int64_t activation, double limit) {
  return with_element_type(x_given, [&](auto* type) {
    using T = std::remove_pointer_t<decltype(type)>;
    Tensor x = as_rows(x_given), scale = to_contiguous(scale_given), bias = to_contiguous(bias_given);
    if (added_given.has_value()) check_rows(*added_given, x, "batch_norm_training: added");
    Tensor added = added_given.has_value() ? as_rows(*added_given) : Tensor();
    Walk walk(x);
    int64_t channels = walk.channels;
    auto vector = [&] { return make_tensor({channels}); };
    Tensor mean = vector(), inverse_std = vector(), variance = vector(), saved = make_tensor({2, channels});
    Tensor y = empty_like_rows(x);
    if (!walk.elements) {
      for (const Tensor& statistic : {mean, inverse_std, variance, saved})
        std::fill_n(statistic.mutable_data_ptr<float>(), statistic.numel(), NAN);
      return std::make_tuple(y, mean, inverse_std, variance, saved);
    }
    const T* source = x.const_data_ptr<T>();
    float *pilot = saved.mutable_data_ptr<float>(), *shift = pilot + channels;
    std::vector<double> delta, spread;
    choose_pilot(source, walk, pilot);
    moments(source, walk, pilot, delta, spread);
    bool far = false;
    for (int64_t c = 0; c < channels; ++c) far |= delta[c] * delta[c] > kFarthestPilot * spread[c] && std::isfinite(delta[c]);
    if (far) {  // the rows of the pilot were not like the others
      for (int64_t c = 0; c < channels; ++c) pilot[c] = static_cast<float>(pilot[c] + delta[c]);
      moments(source, walk, pilot, delta, spread);
    }
    std::vector<float> gain(channels);
    float *means = mean.mutable_data_ptr<float>(), *inverses = inverse_std.mutable_data_ptr<float>(),
          *variances = variance.mutable_data_ptr<float>();
    const float* scales = scale.const_data_ptr<float>();
#pragma omp simd
    for (int64_t c = 0; c < channels; ++c) {
      double inverse = 1.0 / std::sqrt(spread[c] + epsilon);
      shift[c] = static_cast<float>(delta[c]);
      means[c] = static_cast<float>(pilot[c] + delta[c]);
      variances[c] = static_cast<float>(spread[c]);
      inverses[c] = static_cast<float>(inverse);
      gain[c] = static_cast<float>(scales[c] * inverse);
    }
    Columns<4> values(walk);
    values.set(0, pilot);
    values.set(1, shift);
    values.set(2, gain.data());
    values.set(3, bias.const_data_ptr<float>());
    T* target = y.mutable_data_ptr<T>();
    float bound = static_cast<float>(limit);
    with_activation(activation, [&](auto kind) {
      constexpr int64_t k = decltype(kind)::value;
      if (added.defined())
        for_all(walk, Application<T, k, true>{source, added.const_data_ptr<T>(), target, values.reader(), bound});
      else
        for_all(walk, Application<T, k, false>{source, nullptr, target, values.reader(), bound});
    });
    return std::make_tuple(y, mean, inverse_std, variance, saved);
  });
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(burnish, CPU, library) { library.impl("batch_norm_training", TORCH_BOX(&batch_norm_training)); }

}  // namespace burnish
