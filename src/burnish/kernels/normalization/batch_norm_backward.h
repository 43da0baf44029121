// The passes of batch normalization's gradient over memory: sums per channel, and what is computed of them, with the gradients of the addition and
// the activation behind the layer.

#pragma once

#include "batch_norm_rows.h"

namespace burnish {

// Where the gradient of the activation finds the layer's result: kept, or computed again from x, which saves reading it.
enum class Result { kKept, kAgain };

template <typename T>
struct Operands {
  const T *dy, *x, *y, *more;
  const float* bias;
  float limit;  // as limit_of gives it
};

template <typename V>
struct Centering {
  V pilot, shift, gain, bias, zero, limit;
};

enum Value : int64_t { kPilot, kShift, kGain, kBias, kSlope, kOffset, kValues };
using Values = Columns<kValues>;

template <typename V, bool biased, typename Reader>
[[gnu::always_inline]] inline Centering<V> centering(const Reader& values, int64_t column, float limit) {
  return {values.template get<V>(kPilot, column),
          values.template get<V>(kShift, column),
          values.template get<V>(kGain, column),
          biased ? values.template get<V>(kBias, column) : V{},
          V{},
          V{} + limit};
}

// The gradient before the activation, where its result is above zero and below the limit.
template <bool activated, Result result, typename V, typename T>
[[gnu::always_inline]] inline V masked(V flow, V centered, const Centering<V>& own, const T* y, int64_t index) {
  if constexpr (!activated) return flow;
  V value;
  if constexpr (result == Result::kAgain)
    value = centered * own.gain + own.bias;
  else
    value = read<V>(y + index);
  flow = value > own.zero ? flow : own.zero;
  return value >= own.limit ? own.zero : flow;
}

// Sums of the gradient before the activation and of its products with x - mean; `before`, if any, gets that gradient, which is what the
// addition passes on.
template <typename T, bool activated, Result result, bool keeps, typename Reader = Values::Reader>
struct Sums {
  Operands<T> from;
  Reader values;
  T* before;

  template <typename V>
  [[gnu::always_inline]] Centering<V> columns(int64_t column) const {
    return centering<V, activated && result == Result::kAgain>(values, column, from.limit);
  }

  template <typename V>
  [[gnu::always_inline]] void add(const Centering<V>& own, int64_t index, V& one, V& other) const {
    V centered = (read<V>(from.x + index) - own.pilot) - own.shift, flow = read<V>(from.dy + index);
    if constexpr (keeps)
      if (from.more) {
        flow += read<V>(from.more + index);
        if constexpr (!std::is_same_v<T, float>) {  // rounded as it is kept
          write(before + index, flow);
          flow = read<V>(before + index);
        }
      }
    flow = masked<activated, result>(flow, centered, own, from.y, index);
    if constexpr (keeps) write(before + index, flow);
    one += flow;
    other += flow * centered;
  }
};

template <typename T, bool activated, Result result, typename Reader = Values::Reader>
struct InputGradient {
  Operands<T> from;
  Reader values;
  T* dx;

  template <typename V>
  struct Own {
    Centering<V> centering;
    V slope, offset;
  };

  template <typename V>
  [[gnu::always_inline]] Own<V> columns(int64_t column) const {
    return {centering<V, activated && result == Result::kAgain>(values, column, from.limit), values.template get<V>(kSlope, column),
            values.template get<V>(kOffset, column)};
  }

  template <typename V>
  [[gnu::always_inline]] void at(const Own<V>& own, int64_t index) const {
    const Centering<V>& c = own.centering;
    V centered = (read<V>(from.x + index) - c.pilot) - c.shift;
    V flow = masked<activated, result>(read<V>(from.dy + index), centered, c, from.y, index);
    write(dx + index, flow * c.gain + (centered * own.slope + own.offset));
  }
};

template <typename T>
struct Gradients {
  T* dx;
  float *dscale, *dbias;
};

// With r the inverse deviation, w the scale, N the elements of a channel, g the gradient before the activation:
// dx = w r (g - sum(g) / N - (x - mean) r^2 sum(g (x - mean)) / N)   (Ioffe and Szegedy 2015, section 3)
//
// `before` gets g where it is not null, as it must where more is added to dy.
template <typename T, bool activated, Result result, typename Layout>
void differentiate(const Layout& walk, Operands<T> from, const float* scale, const float* inverse_std, const float* saved, T* before,
                   const Gradients<T>& to) {
  using Values = typename Layout::template Values<kValues>;
  using Reader = typename Values::Reader;
  int64_t channels = walk.channels;
  std::vector<float> gain(channels), slope(channels), offset(channels);
  for (int64_t c = 0; c < channels; ++c) gain[c] = static_cast<float>(static_cast<double>(scale[c]) * inverse_std[c]);
  Values values(walk);
  values.set(kPilot, saved);
  values.set(kShift, saved + channels);
  values.set(kGain, gain.data());
  if (from.bias) values.set(kBias, from.bias);
  std::vector<double> first, second;
  if (before)
    sum_channels(walk, Sums<T, activated, result, true, Reader>{from, values.reader(), before}, first, second);
  else
    sum_channels(walk, Sums<T, activated, result, false, Reader>{from, values.reader(), nullptr}, first, second);
  double count = static_cast<double>(walk.per_channel());
  for (int64_t c = 0; c < channels; ++c) {
    double r = inverse_std[c], weight = scale[c] * r;
    to.dscale[c] = static_cast<float>(second[c] * r);
    to.dbias[c] = static_cast<float>(first[c]);
    slope[c] = static_cast<float>(-weight * r * r * second[c] / count);
    offset[c] = static_cast<float>(-weight * first[c] / count);
  }
  values.set(kSlope, slope.data());
  values.set(kOffset, offset.data());
  if (before) {
    from.dy = before;
    for_all(walk, InputGradient<T, false, Result::kKept, Reader>{from, values.reader(), to.dx});
  } else {
    for_all(walk, InputGradient<T, activated, result, Reader>{from, values.reader(), to.dx});
  }
}

}  // namespace burnish
