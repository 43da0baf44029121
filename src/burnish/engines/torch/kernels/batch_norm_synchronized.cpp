// Batch normalization by statistics of several workers, and its gradient, in the parts that lie before and behind an exchange: the passes are those
// of batch_norm.cpp and batch_norm_gradient.cpp, cut where workers add up what they have found.
//
// What travels is float64. x, y, dy, dx and what is added are float32 or bfloat16, vectors per channel float32. No part is too small: a worker
// without samples has count 0, and means and sums of 0.

#include "batch_norm_backward.h"
#include "batch_norm_forward.h"
#include "operators.h"

namespace burnish {
namespace {

void check_vector(const Tensor& tensor, int64_t extent, ScalarType type, const char* name) {
  BURNISH_CHECK(tensor.dim() == 1 && tensor.size(0) == extent && tensor.scalar_type() == type, name,
                ": a vector with the values and of the type that its channels need expected");
}

Tensor channels_of(const Tensor& tensor, int64_t channels, const char* name) {
  check_vector(tensor, channels, kFloat, name);
  return to_contiguous(tensor);
}

// What x - center is computed by: the pivot, and float(center - pivot), in columns.
template <int64_t pilot, int64_t shift, int64_t count>
void set_centering(Columns<count>& values, const Walk& walk, const Tensor& pivot_given, const Tensor& center_given) {
  check_vector(center_given, walk.channels, kDouble, "batch normalization: center");
  Tensor pivot = channels_of(pivot_given, walk.channels, "batch normalization: pivot"), center = to_contiguous(center_given);
  const float* near = pivot.const_data_ptr<float>();
  const double* exact = center.const_data_ptr<double>();
  std::vector<float> away(walk.channels);
  for (int64_t c = 0; c < walk.channels; ++c) away[c] = static_cast<float>(exact[c] - near[c]);
  values.set(pilot, near);
  values.set(shift, away.data());
}

// Rows of a tensor that may be left out, beside x.
Tensor rows_beside(const std::optional<Tensor>& given, const Tensor& x, const char* name) {
  if (!given.has_value()) return Tensor();
  check_rows(*given, x, name);
  return as_rows(*given);
}

template <typename T>
const T* data_of(const Tensor& tensor) {
  return tensor.defined() ? tensor.const_data_ptr<T>() : nullptr;
}

// x -> moments [1 + 2 C]: count, means, sums of squares about them; and the pivot [C], near the means.
std::tuple<Tensor, Tensor> batch_norm_moments(const Tensor& x_given) {
  return with_element_type(x_given, [&](auto* type) {
    using T = std::remove_pointer_t<decltype(type)>;
    Tensor x = as_rows(x_given);
    Walk walk(x);
    int64_t channels = walk.channels;
    Tensor found = make_tensor({1 + 2 * channels}, kDouble), near = make_tensor({channels});
    double* target = found.mutable_data_ptr<double>();
    float* pivot = near.mutable_data_ptr<float>();
    double count = static_cast<double>(walk.per_channel());
    target[0] = count;
    if (!walk.elements) {
      std::fill_n(target, 1 + 2 * channels, 0.0);
      std::fill_n(pivot, channels, 0.f);
      return std::make_tuple(found, near);
    }
    std::vector<double> delta, variance;
    pilot_and_moments(x.const_data_ptr<T>(), walk, pivot, delta, variance);
    for (int64_t c = 0; c < channels; ++c) {
      target[1 + c] = pivot[c] + delta[c];
      target[1 + channels + c] = variance[c] * count;
    }
    return std::make_tuple(found, near);
  });
}

// (gathered [parts, 1 + 2 C], scale) -> count [1], mean and inverse_std [C] in float64; mean, inverse_std, variance and gain [C]: what the moments
// of all parts come to (Chan, Golub and LeVeque 1983), in the order of the parts.
std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor> batch_norm_merge(
    const Tensor& gathered_given, const Tensor& scale_given, double epsilon) {
  BURNISH_CHECK(gathered_given.dim() == 2 && gathered_given.scalar_type() == kDouble && gathered_given.size(1) % 2 == 1,
                "batch_norm_merge: moments of several parts in float64 expected");
  Tensor gathered = to_contiguous(gathered_given);
  int64_t parts = gathered.size(0), width = gathered.size(1), channels = width / 2;
  Tensor scales = channels_of(scale_given, channels, "batch_norm_merge: scale");
  auto vector = [&](ScalarType type = kFloat) { return make_tensor({channels}, type); };
  Tensor count = make_tensor({1}, kDouble), center = vector(kDouble), precise = vector(kDouble), mean = vector(),
         inverse_std = vector(), variance = vector(), gain = vector();
  const double* from = gathered.const_data_ptr<double>();
  double total = 0.0;
  for (int64_t part = 0; part < parts; ++part) total += from[part * width];
  count.mutable_data_ptr<double>()[0] = total;
  double divisor = std::max(total, 1.0);
  double* merged = center.mutable_data_ptr<double>();
  std::vector<double> sums(channels), squares(channels, 0.0);
  std::fill_n(merged, channels, 0.0);
  // Twice: the means differ by little, and rounding the large sum of them costs more than rounding that of their differences.
  for (int round = 0; round < 2; ++round) {
    std::fill(sums.begin(), sums.end(), 0.0);
    for (int64_t part = 0; part < parts; ++part)
      for (int64_t c = 0; c < channels; ++c) sums[c] += from[part * width] * (from[part * width + 1 + c] - merged[c]);
    for (int64_t c = 0; c < channels; ++c) merged[c] += sums[c] / divisor;
  }
  for (int64_t part = 0; part < parts; ++part)
    for (int64_t c = 0; c < channels; ++c) {
      double away = from[part * width + 1 + c] - merged[c];
      squares[c] += from[part * width + 1 + channels + c] + from[part * width] * away * away;
    }
  const float* scale = scales.const_data_ptr<float>();
  double* inverses = precise.mutable_data_ptr<double>();
  float *means = mean.mutable_data_ptr<float>(), *narrow_inverses = inverse_std.mutable_data_ptr<float>(),
        *variances = variance.mutable_data_ptr<float>(), *gains = gain.mutable_data_ptr<float>();
  for (int64_t c = 0; c < channels; ++c) {
    double spread = squares[c] / divisor, inverse = 1.0 / std::sqrt(spread + epsilon);
    inverses[c] = inverse;
    means[c] = static_cast<float>(merged[c]);
    narrow_inverses[c] = static_cast<float>(inverse);
    variances[c] = static_cast<float>(spread);
    gains[c] = static_cast<float>(scale[c] * inverse);
  }
  return {count, center, precise, mean, inverse_std, variance, gain};
}

// y = activation((x - center) gain + bias + added).
Tensor batch_norm_apply(const Tensor& x_given, const Tensor& pivot, const Tensor& center, const Tensor& gain, const Tensor& bias,
                        const std::optional<Tensor>& added_given, int64_t activation, double limit) {
  return with_element_type(x_given, [&](auto* type) {
    using T = std::remove_pointer_t<decltype(type)>;
    Tensor x = as_rows(x_given), added = rows_beside(added_given, x_given, "batch_norm_apply: added"), y = empty_like_rows(x);
    Walk walk(x);
    Columns<4> values(walk);
    auto set = [&](int64_t index, const Tensor& vector, const char* name) {
      Tensor channels = channels_of(vector, walk.channels, name);
      values.set(index, channels.const_data_ptr<float>());
    };
    set_centering<0, 1>(values, walk, pivot, center);
    set(2, gain, "batch_norm_apply: gain");
    set(3, bias, "batch_norm_apply: bias");
    const T *source = x.const_data_ptr<T>(), *more = data_of<T>(added);
    T* target = y.mutable_data_ptr<T>();
    float bound = static_cast<float>(limit);
    with_activation(activation, [&](auto kind) {
      constexpr int64_t k = decltype(kind)::value;
      if (more)
        for_all(walk, Application<T, k, true>{source, more, target, values.reader(), bound});
      else
        for_all(walk, Application<T, k, false>{source, nullptr, target, values.reader(), bound});
    });
    return y;
  });
}

// Calls `run` with the activation and where its gradient finds the layer's result, as constants.
template <typename Run>
auto with_mask(int64_t activation, bool kept, const Run& run) {
  return with_activation(activation, [&](auto kind) {
    if (decltype(kind)::value == kNone || kept) return run(kind, std::integral_constant<Result, Result::kKept>());
    return run(kind, std::integral_constant<Result, Result::kAgain>());
  });
}

// (dy, x, pivot, center, y or gain and bias, more) -> Σ g and, behind it, Σ g (x - center), float64 [2 C], of the gradient g before the
// activation; and g itself, where `keep` says so or `more` is there (else empty). The gradient of the output is dy + more. With gain and bias in
// place of y nothing was added to the layer's result.
std::tuple<Tensor, Tensor> batch_norm_gradient_sums(
    const Tensor& dy_given, const Tensor& x_given, const Tensor& pivot, const Tensor& center, const std::optional<Tensor>& y_given,
    const std::optional<Tensor>& gain, const std::optional<Tensor>& bias, const std::optional<Tensor>& more_given, int64_t activation,
    double limit, bool keep) {
  BURNISH_CHECK(activation == kNone || y_given.has_value() || (gain.has_value() && bias.has_value()),
                "batch_norm_gradient_sums: y, or gain and bias, expected");
  return with_element_type(x_given, [&](auto* type) {
    using T = std::remove_pointer_t<decltype(type)>;
    Tensor x = as_rows(x_given), dy = rows_beside(dy_given, x_given, "batch_norm_gradient_sums: dy"),
           y = rows_beside(y_given, x_given, "batch_norm_gradient_sums: y"),
           more = rows_beside(more_given, x_given, "batch_norm_gradient_sums: more");
    Operands<T> from{data_of<T>(dy), data_of<T>(x), data_of<T>(y), data_of<T>(more), nullptr, static_cast<float>(limit)};
    Walk walk(x);
    Values values(walk);
    auto set = [&](int64_t index, const Tensor& vector, const char* name) {
      Tensor channels = channels_of(vector, walk.channels, name);
      values.set(index, channels.const_data_ptr<float>());
    };
    set_centering<kPilot, kShift>(values, walk, pivot, center);
    if (gain.has_value()) set(kGain, *gain, "batch_norm_gradient_sums: gain");
    if (bias.has_value()) set(kBias, *bias, "batch_norm_gradient_sums: bias");
    bool keeps = more.defined() || (keep && activation != kNone);
    Tensor before = keeps ? empty_like_rows(x) : make_tensor({0}, x.scalar_type());
    T* kept = before.mutable_data_ptr<T>();
    std::vector<double> first, second;
    with_mask(activation, from.y != nullptr, [&](auto kind, auto result) {
      constexpr int64_t k = decltype(kind)::value;
      constexpr Result r = decltype(result)::value;
      if (keeps)
        sum_channels(walk, Sums<T, k, r, true>{from, values.reader(), kept}, first, second);
      else
        sum_channels(walk, Sums<T, k, r, false>{from, values.reader(), nullptr}, first, second);
    });
    Tensor sums = make_tensor({2 * walk.channels}, kDouble);
    std::copy(second.begin(), second.end(), std::copy(first.begin(), first.end(), sums.mutable_data_ptr<double>()));
    return std::make_tuple(sums, before);
  });
}

// (total [2 C], count [1], inverse_std [C], all float64, scale) -> slope, offset, dscale, dbias [C]: with r the inverse deviation, w the scale,
// S1 = Σ dy and S2 = Σ dy (x - mean), slope = -w r^3 S2 / n and offset = -w r S1 / n   (Ioffe and Szegedy 2015, section 3)
std::tuple<Tensor, Tensor, Tensor, Tensor> batch_norm_gradient_merge(const Tensor& total_given, const Tensor& count_given,
                                                                     const Tensor& inverse_std_given, const Tensor& scale_given) {
  int64_t channels = scale_given.numel();
  check_vector(total_given, 2 * channels, kDouble, "batch_norm_gradient_merge: total");
  check_vector(count_given, 1, kDouble, "batch_norm_gradient_merge: count");
  check_vector(inverse_std_given, channels, kDouble, "batch_norm_gradient_merge: inverse_std");
  Tensor total = to_contiguous(total_given), inverse_std = to_contiguous(inverse_std_given),
         scale = channels_of(scale_given, channels, "batch_norm_gradient_merge: scale");
  auto vector = [&] { return make_tensor({channels}); };
  Tensor slope = vector(), offset = vector(), dscale = vector(), dbias = vector();
  const double *first = total.const_data_ptr<double>(), *second = first + channels, *inverses = inverse_std.const_data_ptr<double>();
  const float* scales = scale.const_data_ptr<float>();
  float *slopes = slope.mutable_data_ptr<float>(), *offsets = offset.mutable_data_ptr<float>(),
        *scale_gradient = dscale.mutable_data_ptr<float>(), *bias_gradient = dbias.mutable_data_ptr<float>();
  double divisor = std::max(count_given.const_data_ptr<double>()[0], 1.0);
  for (int64_t c = 0; c < channels; ++c) {
    double r = inverses[c], weight = scales[c] * r;
    slopes[c] = static_cast<float>(-weight * r * r * second[c] / divisor);
    offsets[c] = static_cast<float>(-weight * first[c] / divisor);
    scale_gradient[c] = static_cast<float>(second[c] * r);
    bias_gradient[c] = static_cast<float>(first[c]);
  }
  return {slope, offset, dscale, dbias};
}

// dx = g gain + (x - center) slope + offset of the gradient g before the activation; operands as for the sums.
Tensor batch_norm_gradient_apply(const Tensor& dy_given, const Tensor& x_given, const Tensor& pivot, const Tensor& center, const Tensor& gain,
                                 const Tensor& slope, const Tensor& offset, const std::optional<Tensor>& y_given,
                                 const std::optional<Tensor>& bias, int64_t activation, double limit) {
  BURNISH_CHECK(activation == kNone || y_given.has_value() || bias.has_value(), "batch_norm_gradient_apply: y or the bias expected");
  return with_element_type(x_given, [&](auto* type) {
    using T = std::remove_pointer_t<decltype(type)>;
    Tensor x = as_rows(x_given), dy = rows_beside(dy_given, x_given, "batch_norm_gradient_apply: dy"),
           y = rows_beside(y_given, x_given, "batch_norm_gradient_apply: y"), dx = empty_like_rows(x);
    Operands<T> from{data_of<T>(dy), data_of<T>(x), data_of<T>(y), nullptr, nullptr, static_cast<float>(limit)};
    Walk walk(x);
    Values values(walk);
    auto set = [&](int64_t index, const Tensor& vector, const char* name) {
      Tensor channels = channels_of(vector, walk.channels, name);
      values.set(index, channels.const_data_ptr<float>());
    };
    set_centering<kPilot, kShift>(values, walk, pivot, center);
    set(kGain, gain, "batch_norm_gradient_apply: gain");
    set(kSlope, slope, "batch_norm_gradient_apply: slope");
    set(kOffset, offset, "batch_norm_gradient_apply: offset");
    if (bias.has_value()) set(kBias, *bias, "batch_norm_gradient_apply: bias");
    T* target = dx.mutable_data_ptr<T>();
    with_mask(activation, from.y != nullptr, [&](auto kind, auto result) {
      for_all(walk, InputGradient<T, decltype(kind)::value, decltype(result)::value>{from, values.reader(), target});
    });
    return dx;
  });
}

}  // namespace

BURNISH_OPERATORS(CPU) {
  operators.implement<&batch_norm_moments>("batch_norm_moments");
  operators.implement<&batch_norm_merge>("batch_norm_merge");
  operators.implement<&batch_norm_apply>("batch_norm_apply");
  operators.implement<&batch_norm_gradient_sums>("batch_norm_gradient_sums");
  operators.implement<&batch_norm_gradient_merge>("batch_norm_gradient_merge");
  operators.implement<&batch_norm_gradient_apply>("batch_norm_gradient_apply");
}

}  // namespace burnish
