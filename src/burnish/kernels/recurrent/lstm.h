// One direction of an LSTM through all frames, and its gradient back (Hochreiter and Schmidhuber 1997), gates in the order i, o, f, g:
//
//   i, o, f = logistic(z + h' r), g = tanh(z + h' r), c = f c' + i g, h = o tanh(c)
//
//   dc += dh o (1 - tanh^2 c), dz = (dc g i (1 - i), dh tanh(c) o (1 - o), dc c' f (1 - f), dc i (1 - g^2)), dc' = dc f, dh' = dz r
//
// with h', c' of the frame before. z [T, N, 4 H] holds what frames and biases give; r is [4 H, H].

#pragma once

#include "steps.h"
#include "vector_math.h"

namespace burnish::lstm {

using recurrent::Division;
using recurrent::Extents;
using recurrent::Panels;

constexpr int64_t kGates = 4;

// What the steps write: h, c and g [T, N, H], the gates i, o, f [T, N, 3 H]. `last_h` and `last_c` [N, H] hold the initial states at first,
// and those after the last frame in the end.
struct States {
  float *h, *last_h, *last_c, *c, *iof, *g;
};

// Units [begin, end) of a sequence after a frame.
inline void step(int64_t hidden, int64_t begin, int64_t end, const float* __restrict z, const float* __restrict product, int64_t pitch,
                 const float* __restrict c_before, float* __restrict iof, float* __restrict g, float* __restrict c, float* __restrict h) {
  for (int64_t gate = 0; gate < 3; ++gate) {
    const float *__restrict from = z + gate * hidden, *__restrict recurrent = product + gate * pitch;
    float* __restrict to = iof + gate * hidden;
    for (int64_t k = begin; k < end; ++k) to[k] = logistic(from[k] + recurrent[k]);
  }
  const float *__restrict z_of_g = z + 3 * hidden, *__restrict recurrent_of_g = product + 3 * pitch;
  for (int64_t k = begin; k < end; ++k) g[k] = hyperbolic_tangent(z_of_g[k] + recurrent_of_g[k]);
  const float *__restrict i = iof, *__restrict o = iof + hidden, *__restrict f = iof + 2 * hidden;
  for (int64_t k = begin; k < end; ++k) {
    float state = f[k] * c_before[k] + i[k] * g[k];
    c[k] = state;
    h[k] = o[k] * hyperbolic_tangent(state);
  }
}

inline void run(const Extents& extents, const float* z, const float* r, bool reverse, const States& to) {
  int64_t hidden = extents.hidden, sequences = extents.sequences;
  if (extents.frames * extents.states() == 0) return;
  std::vector<Panels> weights;
  for (int64_t gate = 0; gate < kGates; ++gate) weights.emplace_back(r + gate * hidden * hidden, hidden, hidden, 1, hidden);
  int64_t pitch = weights[0].pitch();
  // As [gate][N][pitch]: each gate is a product by itself.
  Tensor memory = make_tensor({kGates * sequences * pitch});
  float* products = memory.mutable_data_ptr<float>();
  Division(extents, kGates * hidden * hidden).go(0, 1, {true}, [&](int64_t index, int64_t row, int64_t row_end, int, int64_t unit, int64_t unit_end) {
    int64_t first = extents.frame_at(index, reverse) * sequences;
    int64_t before = index ? extents.frame_at(index - 1, reverse) * sequences : 0;
    const float *h_before = index ? to.h + before * hidden : to.last_h, *c_before = index ? to.c + before * hidden : to.last_c;
    for (int64_t number = 0; number < kGates; ++number) {
      int64_t gate = index % 2 ? kGates - 1 - number : number;
      weights[gate].multiply(row_end - row, h_before + row * hidden, hidden, products + (gate * sequences + row) * pitch, unit, unit_end, index % 2);
    }
    for (int64_t n = row; n < row_end; ++n) {
      int64_t place = first + n;
      step(hidden, unit, unit_end, z + place * kGates * hidden, products + n * pitch, sequences * pitch, c_before + n * hidden,
           to.iof + place * 3 * hidden, to.g + place * hidden, to.c + place * hidden, to.h + place * hidden);
    }
  });
  int64_t end = extents.frame_at(extents.frames - 1, reverse) * extents.states();
  std::copy_n(to.h + end, extents.states(), to.last_h);
  std::copy_n(to.c + end, extents.states(), to.last_c);
}

// What the gradient reads: as `run` got it and wrote it, the initial c, and dh [T, N, H] or null for zeros.
struct Saved {
  const float *r, *initial_c, *c, *iof, *g, *dh;
};

// Back over a frame of a sequence, for units [begin, end): dh of its result; dc goes from that of its state to that of the state before.
inline void step_back(int64_t hidden, int64_t begin, int64_t end, const float* __restrict dh, float* __restrict dc, const float* __restrict iof,
                      const float* __restrict g, const float* __restrict c, const float* __restrict c_before, float* __restrict dz) {
  const float *__restrict i = iof, *__restrict o = iof + hidden, *__restrict f = iof + 2 * hidden;
  float *__restrict di = dz, *__restrict d_o = dz + hidden, *__restrict df = dz + 2 * hidden, *__restrict dg = dz + 3 * hidden;
  for (int64_t k = begin; k < end; ++k) {
    float squashed = hyperbolic_tangent(c[k]);
    float flow = dc[k] + dh[k] * (o[k] * (1.f - squashed * squashed));
    di[k] = flow * (g[k] * i[k] * (1.f - i[k]));
    d_o[k] = dh[k] * (squashed * o[k] * (1.f - o[k]));
    df[k] = flow * (c_before[k] * f[k] * (1.f - f[k]));
    dg[k] = flow * (i[k] * (1.f - g[k] * g[k]));
    dc[k] = flow * f[k];
  }
}

// dz [T, N, 4 H]. `d_h` and `d_c` [N, H] hold the cotangents of the last states at first, and those of the initial states in the end.
inline void run_back(const Extents& extents, const Saved& from, bool reverse, float* dz, float* d_h, float* d_c) {
  int64_t hidden = extents.hidden, wide = kGates * hidden, sequences = extents.sequences;
  if (extents.frames * extents.states() == 0) return;
  Panels weights(from.r, wide, hidden, hidden, 1);
  int64_t pitch = weights.pitch();
  Tensor memory = make_tensor({sequences * pitch});
  float* product = memory.mutable_data_ptr<float>();
  auto frame = [&](int64_t index, int64_t row, int64_t row_end, int phase, int64_t unit, int64_t unit_end) {
    int64_t first = extents.frame_at(index, reverse) * sequences;
    if (phase == 1) {
      weights.multiply(row_end - row, dz + (first + row) * wide, wide, product + row * pitch, unit, unit_end, index % 2);
      for (int64_t n = row; n < row_end; ++n) std::copy(product + n * pitch + unit, product + n * pitch + unit_end, d_h + n * hidden + unit);
      return;
    }
    const float* before = index ? from.c + extents.frame_at(index - 1, reverse) * extents.states() : from.initial_c;
    for (int64_t n = row; n < row_end; ++n) {
      int64_t place = first + n;
      float* flow = d_h + n * hidden;
      if (from.dh) {
        const float* __restrict of_frame = from.dh + place * hidden;
        for (int64_t k = unit; k < unit_end; ++k) flow[k] += of_frame[k];
      }
      step_back(hidden, unit, unit_end, flow, d_c + n * hidden, from.iof + place * 3 * hidden, from.g + place * hidden, from.c + place * hidden,
                before + n * hidden, dz + place * wide);
    }
  };
  Division(extents, kGates * hidden * hidden).go(extents.frames - 1, -1, {false, true}, frame);
}

}  // namespace burnish::lstm
