// One direction of a GRU through all frames, and its gradient back (Cho et al. 2014), gates in the order u (update), r (reset), n:
//
//   u, r = logistic(z + h' R),  n = tanh(z + (r h') R), or with a linear product before the reset tanh(z + r (h' R + b)),  h = n + u (h' - n)
//
//   dn = dh (1 - u) (1 - n^2),  du = dh (h' - n) u (1 - u),  dh' = (du, dr, dn) R + dh u,
//
// where with the linear product dr = dn (h' R + b) r (1 - r), and dn r is what goes through R; without it, q = dn R is what r h' gets:
// dr = q h' r (1 - r), and dh' has q r in place of dn R. z [T, N, 3 H] holds what frames and biases give; R is [3 H, H].

#pragma once

#include "steps.h"
#include "vector_math.h"

namespace burnish::gru {

using recurrent::Division;
using recurrent::Extents;
using recurrent::Panels;

constexpr int64_t kGates = 3;

// What the steps write: h and n [T, N, H], u and r [T, N, 2 H], and with a linear product that, [T, N, H]; else null. `last_h` [N, H] holds
// the initial state at first, and that after the last frame in the end.
struct States {
  float *h, *last_h, *update_reset, *candidate, *inside;
};

// bias [H] is that of the linear product, or null.
inline void run(const Extents& extents, const float* z, const float* r, const float* bias, bool reverse, const States& to) {
  int64_t hidden = extents.hidden, sequences = extents.sequences;
  if (extents.frames * extents.states() == 0) return;
  bool linear = to.inside;
  std::vector<Panels> weights;
  for (int64_t gate = 0; gate < kGates; ++gate) weights.emplace_back(r + gate * hidden * hidden, hidden, hidden, 1, hidden);
  int64_t pitch = weights[0].pitch();
  // As [gate][N][pitch], and r h' [N, H] behind.
  Tensor memory = make_tensor({kGates * sequences * pitch + extents.states()});
  float *products = memory.mutable_data_ptr<float>(), *gated = products + kGates * sequences * pitch;
  auto multiply = [&](int64_t index, int64_t gate, const float* rows, int64_t row, int64_t row_end, int64_t unit, int64_t unit_end) {
    weights[gate].multiply(row_end - row, rows + row * hidden, hidden, products + (gate * sequences + row) * pitch, unit, unit_end, index % 2);
  };
  auto frame = [&](int64_t index, int64_t row, int64_t row_end, int phase, int64_t unit, int64_t unit_end) {
    int64_t first = extents.frame_at(index, reverse) * sequences;
    const float* h_before = index ? to.h + extents.frame_at(index - 1, reverse) * extents.states() : to.last_h;
    if (phase == 0)
      for (int64_t number = 0; number < 2; ++number) multiply(index, index % 2 ? 1 - number : number, h_before, row, row_end, unit, unit_end);
    if (linear || phase == 1) multiply(index, 2, linear ? h_before : gated, row, row_end, unit, unit_end);
    for (int64_t n = row; n < row_end; ++n) {
      int64_t place = first + n;
      const float *__restrict from = z + place * kGates * hidden, *__restrict before = h_before + n * hidden;
      float *__restrict update = to.update_reset + place * 2 * hidden, *__restrict reset = update + hidden;
      if (phase == 0) {
        const float *__restrict of_update = products + n * pitch, *__restrict of_reset = products + (sequences + n) * pitch;
        for (int64_t k = unit; k < unit_end; ++k) update[k] = logistic(from[k] + of_update[k]);
        for (int64_t k = unit; k < unit_end; ++k) reset[k] = logistic(from[hidden + k] + of_reset[k]);
        float* __restrict product = gated + n * hidden;
        if (!linear)
          for (int64_t k = unit; k < unit_end; ++k) product[k] = reset[k] * before[k];
      }
      if (!linear && phase == 0) continue;
      float *__restrict candidate = to.candidate + place * hidden, *__restrict h = to.h + place * hidden;
      const float *__restrict product = products + (2 * sequences + n) * pitch, *__restrict of_frame = from + 2 * hidden;
      if (linear) {
        float* __restrict inside = to.inside + place * hidden;
        for (int64_t k = unit; k < unit_end; ++k) inside[k] = bias ? product[k] + bias[k] : product[k];
        for (int64_t k = unit; k < unit_end; ++k) candidate[k] = hyperbolic_tangent(of_frame[k] + reset[k] * inside[k]);
      } else {
        for (int64_t k = unit; k < unit_end; ++k) candidate[k] = hyperbolic_tangent(of_frame[k] + product[k]);
      }
      for (int64_t k = unit; k < unit_end; ++k) h[k] = candidate[k] + update[k] * (before[k] - candidate[k]);
    }
  };
  Division division(extents, kGates * hidden * hidden);
  if (linear)
    division.go(0, 1, {true}, frame);
  else
    division.go(0, 1, {true, true}, frame);
  std::copy_n(to.h + extents.frame_at(extents.frames - 1, reverse) * extents.states(), extents.states(), to.last_h);
}

// What the gradient reads: as `run` got it and wrote it, the initial h, and dh [T, N, H] or null for zeros.
struct Saved {
  const float *r, *initial_h, *h, *update_reset, *candidate, *inside, *dh;
};

// dz [T, N, 3 H], and with a linear product d_inside [T, N, H], else null. `d_h` [N, H] holds the cotangent of the last state at first, and
// that of the initial state in the end.
inline void run_back(const Extents& extents, const Saved& from, bool reverse, float* dz, float* d_inside, float* d_h) {
  int64_t hidden = extents.hidden, wide = kGates * hidden, sequences = extents.sequences;
  if (extents.frames * extents.states() == 0) return;
  bool linear = d_inside;
  Panels of_gates(from.r, 2 * hidden, hidden, hidden, 1), of_candidate(from.r + 2 * hidden * hidden, hidden, hidden, hidden, 1);
  int64_t pitch = of_gates.pitch();
  Tensor memory = make_tensor({2 * sequences * pitch});
  float *through_gates = memory.mutable_data_ptr<float>(), *through_candidate = through_gates + sequences * pitch;
  auto frame = [&](int64_t index, int64_t row, int64_t row_end, int phase, int64_t unit, int64_t unit_end) {
    int64_t first = extents.frame_at(index, reverse) * sequences, rows = row_end - row;
    const float* h_before = index ? from.h + extents.frame_at(index - 1, reverse) * extents.states() : from.initial_h;
    float* of_frame = dz + (first + row) * wide;
    if (phase == 1)
      of_candidate.multiply(rows, linear ? d_inside + (first + row) * hidden : of_frame + 2 * hidden, linear ? hidden : wide,
                            through_candidate + row * pitch, unit, unit_end, index % 2);
    if (phase == 2) of_gates.multiply(rows, of_frame, wide, through_gates + row * pitch, unit, unit_end, index % 2);
    for (int64_t n = row; n < row_end; ++n) {
      int64_t place = first + n;
      const float *__restrict update = from.update_reset + place * 2 * hidden, *__restrict reset = update + hidden;
      const float *__restrict candidate = from.candidate + place * hidden, *__restrict before = h_before + n * hidden;
      const float* __restrict product = through_candidate + n * pitch;
      float *__restrict du = dz + place * wide, *__restrict dr = du + hidden, *__restrict dn = dr + hidden, *__restrict flow = d_h + n * hidden;
      if (phase == 0) {
        if (from.dh) {
          const float* __restrict added = from.dh + place * hidden;
          for (int64_t k = unit; k < unit_end; ++k) flow[k] += added[k];
        }
        for (int64_t k = unit; k < unit_end; ++k) {
          dn[k] = flow[k] * ((1.f - update[k]) * (1.f - candidate[k] * candidate[k]));
          du[k] = flow[k] * ((before[k] - candidate[k]) * update[k] * (1.f - update[k]));
        }
        if (linear) {
          const float* __restrict inside = from.inside + place * hidden;
          float* __restrict through = d_inside + place * hidden;
          for (int64_t k = unit; k < unit_end; ++k) {
            dr[k] = dn[k] * (inside[k] * reset[k] * (1.f - reset[k]));
            through[k] = dn[k] * reset[k];
          }
        }
      } else if (phase == 1 && !linear) {
        for (int64_t k = unit; k < unit_end; ++k) dr[k] = product[k] * (before[k] * reset[k] * (1.f - reset[k]));
      } else if (phase == 2) {
        const float* __restrict gates = through_gates + n * pitch;
        for (int64_t k = unit; k < unit_end; ++k) flow[k] = gates[k] + flow[k] * update[k] + (linear ? product[k] : product[k] * reset[k]);
      }
    }
  };
  Division(extents, kGates * hidden * hidden).go(extents.frames - 1, -1, {false, true, !linear}, frame);
}

}  // namespace burnish::gru
