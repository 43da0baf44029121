// Group and instance normalization in training with scale and bias, the activation behind it, and its gradient, which computes what the
// activation was given again from x: nothing of its size is kept.
//
// A unit is what lies together in memory: a sample with its channels last, else the channels of one group. Each is gone through twice in
// a row, for sums and for results, so that the second pass finds it in the caches where it fits. Statistics are taken per channel of x
// minus a pilot, and merged per group (Chan, Golub, LeVeque 1983). x - mean is applied as (x - mean) - shift, with the shift that rounding
// left in the mean.

#include "batch_norm_forward.h"
#include "operators.h"
#include "vector_math.h"

namespace burnish {
namespace {

constexpr int64_t kSilu = 3;  // behind those of batch_norm_rows.h
constexpr int64_t kFewUnits = 4;  // per thread: so few that an uneven number would keep threads waiting

[[gnu::always_inline]] inline float sigmoid(float x) { return logistic(x); }

[[gnu::always_inline]] inline Vector sigmoid(Vector x) {
  float values[kWidth];
  std::memcpy(values, &x, sizeof x);
#pragma omp simd
  for (int64_t i = 0; i < kWidth; ++i) values[i] = logistic(values[i]);
  return load(values);
}

struct Layout {
  bool last;  // channels
  int64_t samples, channels, groups, members, pixels;

  Layout(const Tensor& x, int64_t groups_given) : last(is_channels_last(x)), samples(x.size(0)), channels(x.size(1)) {
    groups = groups_given ? groups_given : channels;
    BURNISH_CHECK(x.scalar_type() == kFloat && x.dim() > 2 && groups > 0 && channels % groups == 0,
                  "group_norm: float32 [N, C, ...] and groups that divide the channels expected");
    members = channels / groups;
    pixels = 1;
    for (int64_t axis = 2; axis < x.dim(); ++axis) pixels *= x.size(axis);
  }

  int64_t elements() const { return samples * channels * pixels; }
  int64_t units() const { return last ? samples : samples * groups; }
  int64_t groups_of_unit() const { return last ? groups : 1; }
  int64_t channels_of_unit() const { return last ? channels : members; }
  int64_t first_channel(int64_t unit) const { return last ? 0 : unit % groups * members; }
  int64_t first_element(int64_t unit) const { return unit * channels_of_unit() * pixels; }
  int64_t first_group(int64_t unit) const { return unit * groups_of_unit(); }  // among those of all samples

  Tensor laid_out(const Tensor& tensor) const { return last ? to_channels_last(tensor) : to_contiguous(tensor); }
  Tensor empty(const Tensor& like) const { return last ? make_channels_last(like.sizes()) : make_tensor(like.sizes()); }

  // Calls `run(unit, threads)`: units side by side, each on one thread, or one after the other, each on all threads.
  template <typename Run>
  void for_units(const Run& run) const {
    int64_t count = units(), threads = get_num_threads(), size = std::max<int64_t>(channels_of_unit() * pixels, 1);
    if (threads > 1 && size >= 2 * kLeastShare && count % threads && count < kFewUnits * threads) {
      for (int64_t unit = 0; unit < count; ++unit) run(unit, threads);
      return;
    }
    parallel_for(0, count, std::max<int64_t>(1, kLeastShare / size), [&](int64_t begin, int64_t end) {
      for (int64_t unit = begin; unit < end; ++unit) run(unit, 1);
    });
  }

  // Calls `run(element, channel, walk)` for what of a unit is gone through in one go, from its first element and channel on.
  template <typename Run>
  void for_pieces(int64_t threads, const Run& run) const {
    if (last) {
      run(0, 0, Walk(channels * pixels, channels, threads));
      return;
    }
    Walk walk(pixels, 1, threads);
    for (int64_t member = 0; member < members; ++member) run(member * pixels, member, walk);
  }
};

enum Value : int64_t { kCenter, kShift, kGain, kBias, kSlope, kOffset, kValues };
using Values = Columns<kValues>;

// What a kernel computes with per channel of a unit.
struct PerChannel {
  explicit PerChannel(int64_t channels) : channels(channels), values(channels * kValues) {}

  float& at(Value value, int64_t channel) { return values[value * channels + channel]; }

  void set(Values& columns, int64_t first) const {
    for (int64_t value = 0; value < kValues; ++value) columns.set(value, values.data() + value * channels + first);
  }

  int64_t channels;
  std::vector<float> values;
};

template <typename V>
struct Affine {
  V center, shift, gain, bias, zero, limit;

  [[gnu::always_inline]] V centered(V x) const { return (x - center) - shift; }
};

template <typename V>
[[gnu::always_inline]] inline Affine<V> affine(const Values::Reader& values, int64_t column, float limit) {
  return {values.get<V>(kCenter, column), values.get<V>(kShift, column), values.get<V>(kGain, column), values.get<V>(kBias, column),
          V{},                            V{} + limit};
}

// The result of a layer and its activation.
template <int64_t activation>
struct Result {
  const float* x;
  float* y;
  Values::Reader values;
  float limit;  // as limit_of gives it

  template <typename V>
  [[gnu::always_inline]] Affine<V> columns(int64_t column) const {
    return affine<V>(values, column, limit);
  }

  template <typename V>
  [[gnu::always_inline]] void at(const Affine<V>& own, int64_t index) const {
    V value = own.centered(read<V>(x + index)) * own.gain + own.bias;
    if constexpr (activation == kRelu) {  // the comparisons leave NaN as it is
      value = value < own.zero ? own.zero : value;
      value = value > own.limit ? own.limit : value;
    }
    if constexpr (activation == kSilu) value *= sigmoid(value);
    write(y + index, value);
  }
};

// The gradient before the activation.
template <int64_t activation, typename V>
[[gnu::always_inline]] inline V before(V flow, V centered, const Affine<V>& own) {
  if constexpr (activation == kNone) return flow;
  V value = centered * own.gain + own.bias;
  if constexpr (activation == kSilu) {
    V gate = sigmoid(value);
    return flow * (gate * (value * (1.f - gate) + 1.f));
  }
  flow = value > own.zero ? flow : own.zero;
  return value >= own.limit ? own.zero : flow;
}

// That of a sigmoid takes longer to compute again than to keep between the two passes.
constexpr bool is_kept(int64_t activation) { return activation == kSilu; }

// Sums of that gradient and of its products with x - mean; where it is kept, in `kept`.
template <int64_t activation>
struct FlowSums {
  const float *dy, *x;
  float* kept;
  Values::Reader values;
  float limit;

  template <typename V>
  [[gnu::always_inline]] Affine<V> columns(int64_t column) const {
    return affine<V>(values, column, limit);
  }

  template <typename V>
  [[gnu::always_inline]] void add(const Affine<V>& own, int64_t index, V& one, V& other) const {
    V centered = own.centered(read<V>(x + index));
    V flow = before<activation>(read<V>(dy + index), centered, own);
    if constexpr (is_kept(activation)) write(kept + index, flow);
    one += flow;
    other += flow * centered;
  }
};

template <int64_t activation>
struct InputGradient {
  const float *dy, *x;
  float* dx;
  Values::Reader values;
  float limit;

  template <typename V>
  struct Own {
    Affine<V> affine;
    V slope, offset;
  };

  template <typename V>
  [[gnu::always_inline]] Own<V> columns(int64_t column) const {
    return {affine<V>(values, column, limit), values.get<V>(kSlope, column), values.get<V>(kOffset, column)};
  }

  template <typename V>
  [[gnu::always_inline]] void at(const Own<V>& own, int64_t index) const {
    V centered = own.affine.centered(read<V>(x + index));
    V flow = before<activation>(read<V>(dy + index), centered, own.affine);
    write(dx + index, flow * own.affine.gain + (centered * own.slope + own.offset));
  }
};

// Calls `run` with the kind of activation as a constant; a clipped one is a ReLU with a limit.
template <typename Run>
void with_kind(int64_t activation, const Run& run) {
  if (activation == kNone) return run(std::integral_constant<int64_t, kNone>());
  if (activation == kSilu) return run(std::integral_constant<int64_t, kSilu>());
  run(std::integral_constant<int64_t, kRelu>());
}

Tensor vector_of(const Tensor& given, int64_t size, const char* name) {
  BURNISH_CHECK(given.numel() == size && given.scalar_type() == kFloat, "group_norm: ", name, ": ", size, " float32 values expected");
  return to_contiguous(given);
}

struct Moments {
  double mean, variance;
};

// Of a group, from those of its channels, which have as many elements each.
Moments merged(const float* pilot, const double* delta, const double* variance, int64_t members) {
  double mean = 0.0, total = 0.0;
  for (int64_t c = 0; c < members; ++c) mean += pilot[c] + delta[c];
  mean /= members;
  for (int64_t c = 0; c < members; ++c) {
    double distance = members == 1 ? 0.0 : pilot[c] + delta[c] - mean;
    total += variance[c] + distance * distance;
  }
  return {mean, total / members};
}

// (x, scale, bias) -> y, mean, inverse_std, shift: y = activation(((x - mean) - shift) inverse_std scale + bias), statistics [N, groups].
std::tuple<Tensor, Tensor, Tensor, Tensor> group_norm(const Tensor& x_given, const Tensor& scale_given, const Tensor& bias_given,
                                                      int64_t num_groups, double epsilon, int64_t activation, double limit) {
  Layout layout(x_given, num_groups);
  Tensor x = layout.laid_out(x_given), y = layout.empty(x);
  Tensor scale = vector_of(scale_given, layout.channels, "scale"), bias = vector_of(bias_given, layout.channels, "bias");
  auto statistic = [&] { return make_tensor({layout.samples, layout.groups}); };
  Tensor mean = statistic(), inverse_std = statistic(), shift = statistic();
  float *means = mean.mutable_data_ptr<float>(), *inverses = inverse_std.mutable_data_ptr<float>(), *shifts = shift.mutable_data_ptr<float>();
  if (!layout.elements()) {
    for (float* values : {means, inverses, shifts}) std::fill_n(values, mean.numel(), NAN);
    return {y, mean, inverse_std, shift};
  }
  const float *sources = x.const_data_ptr<float>(), *scales = scale.const_data_ptr<float>(), *biases = bias.const_data_ptr<float>();
  float* targets = y.mutable_data_ptr<float>();
  float bound = limit_of(activation, limit);
  layout.for_units([&](int64_t unit, int64_t threads) {
    int64_t channels = layout.channels_of_unit(), channel = layout.first_channel(unit);
    const float* source = sources + layout.first_element(unit);
    float* target = targets + layout.first_element(unit);
    std::vector<float> pilot(channels);
    std::vector<double> delta(channels), variance(channels), piece_delta, piece_variance;
    layout.for_pieces(threads, [&](int64_t element, int64_t first, const Walk& walk) {
      pilot_and_moments(source + element, walk, pilot.data() + first, piece_delta, piece_variance);
      std::copy(piece_delta.begin(), piece_delta.end(), delta.begin() + first);
      std::copy(piece_variance.begin(), piece_variance.end(), variance.begin() + first);
    });
    PerChannel own(channels);
    for (int64_t group = 0; group < layout.groups_of_unit(); ++group) {
      int64_t first = group * layout.members, place = layout.first_group(unit) + group;
      Moments moments = merged(pilot.data() + first, delta.data() + first, variance.data() + first, layout.members);
      double root = std::sqrt(moments.variance + epsilon), inverse = root == 0.0 ? 0.0 : 1.0 / root;
      means[place] = static_cast<float>(moments.mean);
      shifts[place] = static_cast<float>(moments.mean - means[place]);
      inverses[place] = static_cast<float>(inverse);
      for (int64_t c = first; c < first + layout.members; ++c) {
        own.at(kCenter, c) = means[place];
        own.at(kShift, c) = shifts[place];
        own.at(kGain, c) = static_cast<float>(scales[channel + c] * inverse);
        own.at(kBias, c) = biases[channel + c];
      }
    }
    with_kind(activation, [&](auto kind) {
      layout.for_pieces(threads, [&](int64_t element, int64_t first, const Walk& walk) {
        Values values(walk);
        own.set(values, first);
        for_all(walk, Result<decltype(kind)::value>{source + element, target + element, values.reader(), bound});
      });
    });
  });
  return {y, mean, inverse_std, shift};
}

// (dy, x, scale, bias, mean, inverse_std, shift) -> dx, dscale, dbias. With r the inverse deviation, w the scale, M the elements of a group,
// g the gradient before the activation: dx = w r g - r sum(w g) / M - (x - mean) r^3 sum(w g (x - mean)) / M   (Wu and He 2018)
std::tuple<Tensor, Tensor, Tensor> group_norm_gradient(const Tensor& dy_given, const Tensor& x_given, const Tensor& scale_given,
                                                       const Tensor& bias_given, const Tensor& mean_given, const Tensor& inverse_given,
                                                       const Tensor& shift_given, int64_t num_groups, int64_t activation, double limit) {
  Layout layout(x_given, num_groups);
  BURNISH_CHECK(same(dy_given.sizes(), x_given.sizes()) && dy_given.scalar_type() == kFloat, "group_norm_gradient: dy like x expected");
  Tensor x = layout.laid_out(x_given), dy = layout.laid_out(dy_given), dx = layout.empty(x);
  int64_t channels = layout.channels, statistics = layout.samples * layout.groups;
  Tensor scale = vector_of(scale_given, channels, "scale"), bias = vector_of(bias_given, channels, "bias"),
         mean = vector_of(mean_given, statistics, "mean"), inverse_std = vector_of(inverse_given, statistics, "inverse_std"),
         shift = vector_of(shift_given, statistics, "shift");
  Tensor dscale = make_tensor({channels}), dbias = make_tensor({channels});
  const float *flows = dy.const_data_ptr<float>(), *sources = x.const_data_ptr<float>(), *scales = scale.const_data_ptr<float>(),
              *biases = bias.const_data_ptr<float>(), *means = mean.const_data_ptr<float>(),
              *inverses = inverse_std.const_data_ptr<float>(), *shifts = shift.const_data_ptr<float>();
  float* targets = dx.mutable_data_ptr<float>();
  float bound = limit_of(activation, limit);
  std::vector<double> totals(layout.samples * channels), products(layout.samples * channels);  // per sample and channel
  if (layout.elements()) layout.for_units([&](int64_t unit, int64_t threads) {
    int64_t own_channels = layout.channels_of_unit(), channel = layout.first_channel(unit), place = unit * own_channels;
    const float *flow = flows + layout.first_element(unit), *source = sources + layout.first_element(unit);
    float* target = targets + layout.first_element(unit);
    PerChannel own(own_channels);
    for (int64_t c = 0; c < own_channels; ++c) {
      int64_t group = layout.first_group(unit) + c / layout.members;
      own.at(kCenter, c) = means[group];
      own.at(kShift, c) = shifts[group];
      own.at(kGain, c) = static_cast<float>(static_cast<double>(scales[channel + c]) * inverses[group]);
      own.at(kBias, c) = biases[channel + c];
    }
    with_kind(activation, [&](auto kind) {
      constexpr int64_t active = decltype(kind)::value;
      layout.for_pieces(threads, [&](int64_t element, int64_t first, const Walk& walk) {
        Values values(walk);
        own.set(values, first);
        std::vector<double> total, product;
        sum_channels(walk, FlowSums<active>{flow + element, source + element, target + element, values.reader(), bound}, total, product);
        std::copy(total.begin(), total.end(), totals.begin() + place + first);
        std::copy(product.begin(), product.end(), products.begin() + place + first);
      });
      for (int64_t group = 0; group < layout.groups_of_unit(); ++group) {
        double r = inverses[layout.first_group(unit) + group], count = static_cast<double>(layout.members * layout.pixels);
        double total = 0.0, product = 0.0;
        for (int64_t c = group * layout.members; c < (group + 1) * layout.members; ++c) {
          total += scales[channel + c] * totals[place + c];
          product += scales[channel + c] * products[place + c];
        }
        for (int64_t c = group * layout.members; c < (group + 1) * layout.members; ++c) {
          own.at(kSlope, c) = static_cast<float>(-r * r * r * product / count);
          own.at(kOffset, c) = static_cast<float>(-r * total / count);
        }
      }
      layout.for_pieces(threads, [&](int64_t element, int64_t first, const Walk& walk) {
        Values values(walk);
        own.set(values, first);
        if constexpr (is_kept(active))
          for_all(walk, InputGradient<kNone>{target + element, source + element, target + element, values.reader(), bound});
        else
          for_all(walk, InputGradient<active>{flow + element, source + element, target + element, values.reader(), bound});
      });
    });
  });
  float *scale_gradient = dscale.mutable_data_ptr<float>(), *bias_gradient = dbias.mutable_data_ptr<float>();
  for (int64_t c = 0; c < channels; ++c) {
    double total = 0.0, product = 0.0;
    for (int64_t sample = 0; sample < layout.samples; ++sample) {
      total += totals[sample * channels + c];
      product += products[sample * channels + c] * inverses[sample * layout.groups + c / layout.members];
    }
    bias_gradient[c] = static_cast<float>(total);
    scale_gradient[c] = static_cast<float>(product);
  }
  return {dx, dscale, dbias};
}

}  // namespace

BURNISH_OPERATORS(CPU) {
  operators.implement<&group_norm>("group_norm");
  operators.implement<&group_norm_gradient>("group_norm_gradient");
}

}  // namespace burnish
