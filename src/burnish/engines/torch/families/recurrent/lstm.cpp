// One direction of an LSTM through all frames, and its gradient back (Hochreiter and Schmidhuber 1997), gates in the order i, o, f, g:
//
//   i, o, f = logistic(z + h' r), g = tanh(z + h' r), c = f c' + i g, h = o tanh(c)
//
//   dc += dh o (1 - tanh^2 c), dz = (dc g i (1 - i), dh tanh(c) o (1 - o), dc c' f (1 - f), dc i (1 - g^2)), dc' = dc f, dh' = dz r
//
// with h', c' of the frame before. z [T, N, 4 H] holds what frames and biases give. Sequences do not know of each other: each thread takes
// some of them through all frames, with the recurrent weight packed once for all.

#include <algorithm>
#include <optional>
#include <tuple>
#include <vector>

#include "matrix.h"
#include "operators.h"
#include "vector_math.h"

namespace burnish {
namespace {

constexpr int64_t kGates = 4;
constexpr int64_t kLeastSequences = 4;  // of a thread: each reads all of the weight for every frame

struct Extents {
  int64_t frames, sequences, hidden;

  int64_t states() const { return sequences * hidden; }
};

// A matrix in panels, to multiply rows with: elements b[depth][column] of data[depth * depth_stride + column * column_stride].
class Panels {
 public:
  Panels(const float* data, int64_t depth, int64_t columns, int64_t depth_stride, int64_t column_stride)
      : depth_(depth), columns_(columns), packed_(matrix::round_up(columns, matrix::kPanel) * depth, 0.f) {
    for (int64_t first = 0; first < columns; first += matrix::kPanel) {
      int64_t wide = std::min(matrix::kPanel, columns - first);
      float* panel = packed_.data() + first * depth;
      if (depth_stride == 1)
        for (int64_t column = 0; column < wide; ++column)
          for (int64_t d = 0; d < depth; ++d) panel[d * matrix::kPanel + column] = data[d + (first + column) * column_stride];
      else
        for (int64_t d = 0; d < depth; ++d)
          std::copy_n(data + d * depth_stride + first, wide, panel + d * matrix::kPanel);
    }
  }

  // Elements between rows of a product: whole vectors are written.
  int64_t pitch() const { return matrix::round_up(columns_, matrix::kLanes); }

  // product[rows][pitch] = rows_of[rows][depth] b.
  void multiply(int64_t rows, const float* rows_of, float* product) const {
    for (int64_t first = 0; first < columns_; first += matrix::kPanel)
      matrix::multiply<false>(rows, std::min(matrix::kPanel, columns_ - first), depth_, rows_of, depth_, 1, packed_.data() + first * depth_,
                              product + first, pitch());
  }

 private:
  int64_t depth_, columns_;
  std::vector<float> packed_;
};

// The states of a sequence after a frame.
void step(int64_t hidden, const float* __restrict z, const float* __restrict recurrent, const float* __restrict c_before,
          float* __restrict iof, float* __restrict g, float* __restrict c, float* __restrict h) {
  for (int64_t k = 0; k < 3 * hidden; ++k) iof[k] = logistic(z[k] + recurrent[k]);
  const float *__restrict z_of_g = z + 3 * hidden, *__restrict recurrent_of_g = recurrent + 3 * hidden;
  for (int64_t k = 0; k < hidden; ++k) g[k] = hyperbolic_tangent(z_of_g[k] + recurrent_of_g[k]);
  const float *__restrict i = iof, *__restrict o = iof + hidden, *__restrict f = iof + 2 * hidden;
  for (int64_t k = 0; k < hidden; ++k) {
    float state = f[k] * c_before[k] + i[k] * g[k];
    c[k] = state;
    h[k] = o[k] * hyperbolic_tangent(state);
  }
}

// Back over a frame of a sequence: dh of its result; dc goes from that of its state to that of the state before.
void step_back(int64_t hidden, const float* __restrict dh, float* __restrict dc, const float* __restrict iof, const float* __restrict g,
               const float* __restrict c, const float* __restrict c_before, float* __restrict dz) {
  const float *__restrict i = iof, *__restrict o = iof + hidden, *__restrict f = iof + 2 * hidden;
  float *__restrict di = dz, *__restrict d_o = dz + hidden, *__restrict df = dz + 2 * hidden, *__restrict dg = dz + 3 * hidden;
  for (int64_t k = 0; k < hidden; ++k) {
    float squashed = hyperbolic_tangent(c[k]);
    float flow = dc[k] + dh[k] * (o[k] * (1.f - squashed * squashed));
    di[k] = flow * (g[k] * i[k] * (1.f - i[k]));
    d_o[k] = dh[k] * (squashed * o[k] * (1.f - o[k]));
    df[k] = flow * (c_before[k] * f[k] * (1.f - f[k]));
    dg[k] = flow * (i[k] * (1.f - g[k] * g[k]));
    dc[k] = flow * f[k];
  }
}

void check(const Tensor& tensor, Sizes sizes, const char* name) {
  BURNISH_CHECK(tensor.scalar_type() == kFloat && same(tensor.sizes(), sizes), "lstm_steps: ", name, " is not float32 of the shape that fits z and r");
}

// A state [N, H] that a thread may change.
Tensor copied(const std::optional<Tensor>& given, const Extents& extents, const char* name) {
  Tensor state = make_tensor({extents.sequences, extents.hidden});
  float* data = state.mutable_data_ptr<float>();
  if (!given.has_value()) {
    std::fill_n(data, extents.states(), 0.f);
    return state;
  }
  check(*given, {extents.sequences, extents.hidden}, name);
  std::copy_n(to_contiguous(*given).const_data_ptr<float>(), extents.states(), data);
  return state;
}

// The frame that is read at place `index` of the order.
int64_t frame_at(int64_t index, const Extents& extents, bool reverse) { return reverse ? extents.frames - 1 - index : index; }

// (z [T, N, 4 H], r [4 H, H], initial h and c [N, H]) -> h [T, N, H], the last h and c, c [T, N, H], the gates i, o, f [T, N, 3 H], and g.
std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor> lstm_steps(const Tensor& z_given, const Tensor& r_given, const Tensor& initial_h,
                                                                      const Tensor& initial_c, bool reverse) {
  BURNISH_CHECK(z_given.dim() == 3 && r_given.dim() == 2, "lstm_steps: z [T, N, 4 H] and r [4 H, H] expected");
  Extents extents{z_given.size(0), z_given.size(1), r_given.size(1)};
  int64_t hidden = extents.hidden, wide = kGates * hidden;
  check(z_given, {extents.frames, extents.sequences, wide}, "z");
  check(r_given, {wide, hidden}, "r");
  Tensor z = to_contiguous(z_given), r = to_contiguous(r_given);
  Tensor last_h = copied(initial_h, extents, "initial_h"), last_c = copied(initial_c, extents, "initial_c");
  Tensor h = make_tensor({extents.frames, extents.sequences, hidden}), c = make_tensor(h.sizes()), g = make_tensor(h.sizes());
  Tensor iof = make_tensor({extents.frames, extents.sequences, 3 * hidden});
  if (!h.numel()) return {h, last_h, last_c, c, iof, g};
  Panels panels(r.const_data_ptr<float>(), hidden, wide, 1, hidden);
  const float* frames = z.const_data_ptr<float>();
  float *to_h = h.mutable_data_ptr<float>(), *to_c = c.mutable_data_ptr<float>(), *to_iof = iof.mutable_data_ptr<float>();
  float *to_g = g.mutable_data_ptr<float>(), *end_h = last_h.mutable_data_ptr<float>(), *end_c = last_c.mutable_data_ptr<float>();
  parallel_for(0, extents.sequences, kLeastSequences, [&](int64_t begin, int64_t end) {
    int64_t rows = end - begin;
    std::vector<float> recurrent(rows * panels.pitch());
    const float *h_before = end_h + begin * hidden, *c_before = end_c + begin * hidden;
    for (int64_t index = 0; index < extents.frames; ++index) {
      int64_t first = frame_at(index, extents, reverse) * extents.sequences + begin;
      panels.multiply(rows, h_before, recurrent.data());
      for (int64_t row = 0; row < rows; ++row) {
        int64_t place = first + row;
        step(hidden, frames + place * wide, recurrent.data() + row * panels.pitch(), c_before + row * hidden, to_iof + place * 3 * hidden,
             to_g + place * hidden, to_c + place * hidden, to_h + place * hidden);
      }
      h_before = to_h + first * hidden, c_before = to_c + first * hidden;
    }
    std::copy_n(h_before, rows * hidden, end_h + begin * hidden);
    std::copy_n(c_before, rows * hidden, end_c + begin * hidden);
  });
  return {h, last_h, last_c, c, iof, g};
}

// (r, initial c, c, i o f and g as lstm_steps gives them, and the cotangents of h, of the last h and of the last c, none for zeros)
// -> those of z, of the initial h and of the initial c.
std::tuple<Tensor, Tensor, Tensor> lstm_steps_gradient(const Tensor& r_given, const Tensor& initial_c, const Tensor& c_given, const Tensor& iof_given,
                                                       const Tensor& g_given, const std::optional<Tensor>& dh_given,
                                                       const std::optional<Tensor>& d_last_h, const std::optional<Tensor>& d_last_c, bool reverse) {
  BURNISH_CHECK(c_given.dim() == 3, "lstm_steps_gradient: c [T, N, H] expected");
  Extents extents{c_given.size(0), c_given.size(1), c_given.size(2)};
  int64_t hidden = extents.hidden, wide = kGates * hidden;
  std::vector<int64_t> of_states{extents.frames, extents.sequences, hidden};
  check(r_given, {wide, hidden}, "r");
  check(initial_c, {extents.sequences, hidden}, "initial_c");
  check(iof_given, {extents.frames, extents.sequences, 3 * hidden}, "iof");
  check(c_given, of_states, "c");
  check(g_given, of_states, "g");
  Tensor r = to_contiguous(r_given), c = to_contiguous(c_given), iof = to_contiguous(iof_given), g = to_contiguous(g_given), dh;
  Tensor start = to_contiguous(initial_c), d_h = copied(d_last_h, extents, "d_last_h"), d_c = copied(d_last_c, extents, "d_last_c");
  if (dh_given.has_value()) {
    check(*dh_given, of_states, "dh");
    dh = to_contiguous(*dh_given);
  }
  Tensor dz = make_tensor({extents.frames, extents.sequences, wide});
  if (!c.numel()) return {dz, d_h, d_c};
  Panels panels(r.const_data_ptr<float>(), wide, hidden, hidden, 1);
  const float *flows = dh.defined() ? dh.const_data_ptr<float>() : nullptr, *of_c = c.const_data_ptr<float>(), *of_g = g.const_data_ptr<float>();
  const float *of_iof = iof.const_data_ptr<float>(), *at_start = start.const_data_ptr<float>();
  float *to_dz = dz.mutable_data_ptr<float>(), *to_h = d_h.mutable_data_ptr<float>(), *to_c = d_c.mutable_data_ptr<float>();
  parallel_for(0, extents.sequences, kLeastSequences, [&](int64_t begin, int64_t end) {
    int64_t rows = end - begin;
    std::vector<float> product(rows * panels.pitch());
    for (int64_t index = extents.frames - 1; index >= 0; --index) {
      int64_t first = frame_at(index, extents, reverse) * extents.sequences + begin;
      const float* before = index ? of_c + (frame_at(index - 1, extents, reverse) * extents.sequences + begin) * hidden : at_start + begin * hidden;
      for (int64_t row = 0; row < rows; ++row) {
        int64_t place = first + row;
        float *flow = to_h + (begin + row) * hidden, *cell_flow = to_c + (begin + row) * hidden;
        if (flows) {
          const float* __restrict of_frame = flows + place * hidden;
          for (int64_t k = 0; k < hidden; ++k) flow[k] += of_frame[k];
        }
        step_back(hidden, flow, cell_flow, of_iof + place * 3 * hidden, of_g + place * hidden, of_c + place * hidden, before + row * hidden,
                  to_dz + place * wide);
      }
      panels.multiply(rows, to_dz + first * wide, product.data());
      for (int64_t row = 0; row < rows; ++row) std::copy_n(product.data() + row * panels.pitch(), hidden, to_h + (begin + row) * hidden);
    }
  });
  return {dz, d_h, d_c};
}

}  // namespace

BURNISH_OPERATORS(CPU) {
  operators.implement<&lstm_steps>("lstm_steps");
  operators.implement<&lstm_steps_gradient>("lstm_steps_gradient");
}

}  // namespace burnish
