// The steps of an LSTM and their gradient (lstm.h), as operators of PyTorch's.

#include "lstm.h"

#include <optional>
#include <tuple>

#include "operators.h"

namespace burnish {
namespace {

using lstm::kGates;
using recurrent::Extents;

void check(const Tensor& tensor, Sizes sizes, const char* name) {
  BURNISH_CHECK(tensor.scalar_type() == kFloat && same(tensor.sizes(), sizes), "lstm_steps: ", name, " is not float32 of the shape that fits z and r");
}

// A state [N, H] that a kernel may change.
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
  lstm::run(extents, z.const_data_ptr<float>(), r.const_data_ptr<float>(), reverse,
            {h.mutable_data_ptr<float>(), last_h.mutable_data_ptr<float>(), last_c.mutable_data_ptr<float>(), c.mutable_data_ptr<float>(),
             iof.mutable_data_ptr<float>(), g.mutable_data_ptr<float>()});
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
  lstm::Saved from{r.const_data_ptr<float>(),   start.const_data_ptr<float>(), c.const_data_ptr<float>(),
                   iof.const_data_ptr<float>(), g.const_data_ptr<float>(),     dh.defined() ? dh.const_data_ptr<float>() : nullptr};
  lstm::run_back(extents, from, reverse, dz.mutable_data_ptr<float>(), d_h.mutable_data_ptr<float>(), d_c.mutable_data_ptr<float>());
  return {dz, d_h, d_c};
}

}  // namespace

BURNISH_OPERATORS(CPU) {
  operators.implement<&lstm_steps>("lstm_steps");
  operators.implement<&lstm_steps_gradient>("lstm_steps_gradient");
}

}  // namespace burnish
