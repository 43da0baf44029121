// How a tensor [N, C, ...] in the order of its axes is walked over, whose planes of one channel lie in one run each: sums per channel, and a
// pass over all elements. The functions of elements are those of batch_norm_forward.h and batch_norm_backward.h.

#pragma once

#include <algorithm>
#include <vector>

#include "batch_norm_rows.h"

namespace burnish {

constexpr int64_t kSums = 4;           // of vectors side by side, so that one addition does not wait for another
constexpr int64_t kPlaneBlock = 1024;  // elements that are summed in float32 before they enter the float64 sums

template <int64_t count>
class ChannelValues;

struct Planes {
  template <int64_t count>
  using Values = ChannelValues<count>;

  int64_t batch, channels, run;

  explicit Planes(const Tensor& x) : batch(x.size(0)), channels(x.size(1)), run(1) {
    for (int64_t axis = 2; axis < x.dim(); ++axis) run *= x.size(axis);
  }

  int64_t elements() const { return batch * channels * run; }
  int64_t per_channel() const { return batch * run; }
  int64_t start(int64_t sample, int64_t channel) const { return (sample * channels + channel) * run; }
};

// `count` values per channel.
template <int64_t count>
class ChannelValues {
 public:
  explicit ChannelValues(const Planes& planes) : channels_(planes.channels), values_(planes.channels * count) {}

  void set(int64_t index, const float* channels) { std::copy(channels, channels + channels_, values_.begin() + index * channels_); }

  class Reader {
   public:
    Reader(const float* values, int64_t channels) : values_(values), channels_(channels) {}

    template <typename V>
    [[gnu::always_inline]] V get(int64_t index, int64_t channel) const {
      return V{} + values_[index * channels_ + channel];
    }

   private:
    const float* values_;
    int64_t channels_;
  };

  Reader reader() const { return Reader(values_.data(), channels_); }

 private:
  int64_t channels_;
  std::vector<float> values_;
};

inline float total_of(Vector values) {
  float total = 0.f;
  for (int64_t lane = 0; lane < kWidth; ++lane) total += values[lane];
  return total;
}

// Adds up two sums of a channel over a part of its plane.
template <typename Terms, typename Own, typename One>
[[gnu::always_inline]] inline void sum_block(const Terms& terms, const Own& own, const One& one_own, int64_t index, int64_t end, double& first,
                                             double& second) {
  Vector ones[kSums] = {}, others[kSums] = {};
  for (; index + kSums * kWidth <= end; index += kSums * kWidth)
#pragma GCC unroll 4
    for (int64_t sum = 0; sum < kSums; ++sum) terms.add(own, index + sum * kWidth, ones[sum], others[sum]);
  for (; index + kWidth <= end; index += kWidth) terms.add(own, index, ones[0], others[0]);
  float one = 0.f, other = 0.f;
  for (; index < end; ++index) terms.add(one_own, index, one, other);
  first += static_cast<double>(total_of((ones[0] + ones[1]) + (ones[2] + ones[3])) + one);
  second += static_cast<double>(total_of((others[0] + others[1]) + (others[2] + others[3])) + other);
}

// Adds up two sums per channel of all samples. A channel is one thread's: the bits do not depend on how many
// there are.
template <typename Terms>
void sum_channels(const Planes& planes, const Terms& given, std::vector<double>& first, std::vector<double>& second) {
  first.assign(planes.channels, 0.0);
  second.assign(planes.channels, 0.0);
  int64_t grain = std::max<int64_t>(1, kLeastShare / std::max<int64_t>(planes.per_channel(), 1));
  parallel_for(0, planes.channels, grain, [&](int64_t begin, int64_t end) {
    const Terms terms = given;
    for (int64_t channel = begin; channel < end; ++channel) {
      auto own = terms.template columns<Vector>(channel);
      auto one_own = terms.template columns<float>(channel);
      double one = 0.0, other = 0.0;
      for (int64_t sample = 0; sample < planes.batch; ++sample) {
        int64_t start = planes.start(sample, channel), stop = start + planes.run;
        for (int64_t index = start; index < stop; index += kPlaneBlock)
          sum_block(terms, own, one_own, index, std::min(stop, index + kPlaneBlock), one, other);
      }
      first[channel] = one;
      second[channel] = other;
    }
  });
}

// Calls `body.at(columns, index)` for all elements.
template <typename Body>
void for_all(const Planes& planes, const Body& given) {
  int64_t grain = std::max<int64_t>(1, kLeastShare / std::max<int64_t>(planes.run, 1));
  parallel_for(0, planes.batch * planes.channels, grain, [&](int64_t begin, int64_t end) {
    const Body body = given;
    for (int64_t plane = begin; plane < end; ++plane) {
      auto own = body.template columns<Vector>(plane % planes.channels);
      int64_t index = plane * planes.run, stop = index + planes.run;
      for (; index + kWidth <= stop; index += kWidth) body.at(own, index);
      auto one_own = body.template columns<float>(plane % planes.channels);
      for (; index < stop; ++index) body.at(one_own, index);
    }
  });
}

// The mean of elements spread over each channel, counted from the first of them, so that a constant channel has itself as its pilot.
inline void choose_pilot(const float* x, const Planes& planes, float* pilot) {
  int64_t count = std::min(planes.per_channel(), kPilotRows);
  for (int64_t channel = 0; channel < planes.channels; ++channel) {
    float first = x[planes.start(0, channel)], sum = 0.f;
    for (int64_t pick = 1; pick < count; ++pick) {
      int64_t element = planes.per_channel() * pick / count;
      sum += x[planes.start(element / planes.run, channel) + element % planes.run] - first;
    }
    pilot[channel] = first + sum / static_cast<float>(count);
  }
}

}  // namespace burnish
