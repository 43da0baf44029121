#include "batch_norm_synchronized.h"

namespace burnish {
namespace {

// (gathered [parts, 1 + 2 C], scale) -> count [1], mean and inverse_std [C] in float64; mean, inverse_std, variance and gain [C].
std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor> batch_norm_merge(
    const Tensor& gathered_given, const Tensor& scale_given, double epsilon) {
  BURNISH_CHECK(gathered_given.dim() == 2 && gathered_given.scalar_type() == kDouble && gathered_given.size(1) % 2 == 1,
                "batch_norm_merge: moments of several parts in float64 expected");
  Tensor gathered = to_contiguous(gathered_given);
  int64_t channels = gathered.size(1) / 2;
  Tensor scales = channels_of(scale_given, channels, "batch_norm_merge: scale");
  auto vector = [&](ScalarType type = kFloat) { return make_tensor({channels}, type); };
  Tensor count = make_tensor({1}, kDouble), center = vector(kDouble), precise = vector(kDouble), mean = vector(),
         inverse_std = vector(), variance = vector(), gain = vector();
  merge_moments(gathered.const_data_ptr<double>(), gathered.size(0), channels, scales.const_data_ptr<float>(), epsilon,
                {count.mutable_data_ptr<double>(), center.mutable_data_ptr<double>(), precise.mutable_data_ptr<double>(),
                 mean.mutable_data_ptr<float>(), inverse_std.mutable_data_ptr<float>(), variance.mutable_data_ptr<float>(),
                 gain.mutable_data_ptr<float>()});
  return {count, center, precise, mean, inverse_std, variance, gain};
}

// (total [2 C], count [1], inverse_std [C], all float64, scale) -> slope, offset, dscale, dbias [C].
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
  merge_gradients(total.const_data_ptr<double>(), count_given.const_data_ptr<double>()[0], inverse_std.const_data_ptr<double>(),
                  scale.const_data_ptr<float>(), channels,
                  {slope.mutable_data_ptr<float>(), offset.mutable_data_ptr<float>(), dscale.mutable_data_ptr<float>(),
                   dbias.mutable_data_ptr<float>()});
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
