#include "batch_norm_synchronized.h"

namespace burnish {
namespace {

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
    double spread = squares[c] / divisor, inverse = inverse_deviation(spread, epsilon);
    inverses[c] = inverse;
    means[c] = static_cast<float>(merged[c]);
    narrow_inverses[c] = static_cast<float>(inverse);
    variances[c] = static_cast<float>(spread);
    gains[c] = static_cast<float>(scale[c] * inverse);
  }
  return {count, center, precise, mean, inverse_std, variance, gain};
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

}  // namespace

BURNISH_OPERATORS(CPU) {
  operators.implement<&batch_norm_merge>("batch_norm_merge");
  operators.implement<&batch_norm_gradient_merge>("batch_norm_gradient_merge");
  operators.implement<&batch_norm_moments<float>>("batch_norm_moments");
  operators.implement<&batch_norm_apply<float>>("batch_norm_apply");
  operators.implement<&batch_norm_gradient_sums<float>>("batch_norm_gradient_sums");
  operators.implement<&batch_norm_gradient_apply<float>>("batch_norm_gradient_apply");
}

}  // namespace burnish
