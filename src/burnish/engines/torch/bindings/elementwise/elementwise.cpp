// Elementwise programs as operators of PyTorch's (elementwise.h), and updates of the state by them.

#include <cstring>
#include <span>
#include <vector>

#include "elementwise.h"
#include "operators.h"

namespace burnish {
namespace {

std::vector<Tensor> elementwise(const std::vector<Tensor>& tensors, const std::vector<double>& constants,
                                const std::vector<int64_t>& program, const std::vector<int64_t>& outputs) {
  BURNISH_CHECK(!tensors.empty(), "elementwise: a tensor expected");
  Form form = form_of(tensors);
  std::vector<Tensor> results;
  for (int64_t type : outputs) {
    ScalarType kind = static_cast<ScalarType>(type);
    results.push_back(form.order.empty() ? make_tensor(form.sizes, kind) : make_strided(form.sizes, form.strides, kind));
  }
  run(Pass(Program{constants, program}, tensors.data(), tensors.size(), form, results));
  return results;
}

// What `elementwise` returns, and behind it the sums of `run_and_sum`.
std::vector<Tensor> elementwise_sums(const std::vector<Tensor>& tensors, const std::vector<double>& constants,
                                     const std::vector<int64_t>& program, const std::vector<int64_t>& outputs,
                                     const std::vector<int64_t>& summed, int64_t kept) {
  BURNISH_CHECK(!tensors.empty(), "elementwise: a tensor expected");
  Form form = form_of(tensors);
  form.order.clear(), form.strides.clear();  // rows are the leading axes
  std::vector<int64_t> sizes = kept_sizes(form, kept);
  std::vector<Tensor> results, sums;
  for (int64_t type : outputs) results.push_back(make_tensor(form.sizes, static_cast<ScalarType>(type)));
  for (size_t i = 0; i < summed.size(); ++i) sums.push_back(make_tensor(sizes));
  run_and_sum(Pass(Program{constants, program}, tensors.data(), tensors.size(), form, results), form, summed, kept, sums);
  results.insert(results.end(), sums.begin(), sums.end());
  return results;
}

// A pass over tensors that writes result i over tensors[targets[i]], of its shape.
Pass pass_in_place(const Program& program, const std::vector<Tensor>& tensors, std::span<const int64_t> targets) {
  std::vector<Tensor> results;
  for (int64_t target : targets) {
    BURNISH_CHECK(target >= 0 && target < static_cast<int64_t>(tensors.size()), "elementwise: no tensor ", target);
    results.push_back(tensors[target]);
  }
  Form form = form_of(tensors);
  Form own = form_of(results);  // the order of memory is that of what is written
  BURNISH_CHECK(own.sizes == form.sizes, "elementwise: what is written must have the shape of the result");
  for (const Tensor& result : results) {
    bool laid_out = own.order.empty() ? result.is_contiguous() : same(result.strides(), own.strides);
    BURNISH_CHECK(same(result.sizes(), own.sizes) && laid_out, "elementwise: what is written must lie in memory in one order");
  }
  return Pass(program, tensors.data(), tensors.size(), own, results);
}

// Reads numbers one after another.
template <typename Number>
class Reader {
 public:
  explicit Reader(const Tensor& numbers) : next_(numbers.const_data_ptr<Number>()), left_(numbers.numel()) {}

  bool is_at_end() const { return left_ == 0; }
  Number number() { return numbers(1)[0]; }

  std::span<const Number> numbers(int64_t count) {
    BURNISH_CHECK(count >= 0 && count <= left_, "update_state: ", count, " numbers expected, and ", left_, " are left");
    std::span<const Number> taken(next_, count);
    next_ += count, left_ -= count;
    return taken;
  }

 private:
  const Number* next_;
  int64_t left_;
};

void check_same_form(const Tensor& entry, const Tensor& value) {
  BURNISH_CHECK(same(entry.sizes(), value.sizes()) && entry.scalar_type() == value.scalar_type() && entry.is_contiguous(),
                "update_state: a value of the entry's shape and type, and a contiguous entry expected");
}

template <typename Integer>
void add_to(const Tensor& counter, const Tensor& increment) {
  Integer* to = static_cast<Integer*>(counter.mutable_data_ptr());
  const Integer* by = static_cast<const Integer*>(increment.const_data_ptr());
  for (int64_t i = 0; i < counter.numel(); ++i) to[i] += by[i];
}

// Adds integers, modulo 2^32 or 2^64: signed numbers come to the same bits.
void count(const Tensor& counter, const Tensor& increment) {
  BURNISH_CHECK(increment.is_contiguous(), "update_state: a contiguous increment expected");
  size_t bytes = aoti_torch_dtype_element_size(static_cast<int32_t>(counter.scalar_type()));
  BURNISH_CHECK(bytes == 4 || bytes == 8, "update_state: counters of 32 or 64 bits expected");
  bytes == 4 ? add_to<uint32_t>(counter, increment) : add_to<uint64_t>(counter, increment);
}

// Writes the next state over the present one: the results of elementwise programs over operands of theirs, values as they are, and
// the sums of integers and their increments.
//
// `plan` tells of one program after another: the number of groups of operands, of operands in a group, of targets, of constants and of
// integers of code; which operands of a group are written; the code. `tensors` are the operands, `constants` the constants of all
// programs in this order.
void update_state(const std::vector<Tensor>& tensors, const Tensor& plan, const Tensor& constants, const std::vector<Tensor>& entries,
                  const std::vector<Tensor>& values, const std::vector<Tensor>& counters, const std::vector<Tensor>& increments) {
  BURNISH_CHECK(entries.size() == values.size(), "update_state: a value for each entry expected");
  BURNISH_CHECK(counters.size() == increments.size(), "update_state: an increment for each counter expected");
  for (size_t i = 0; i < entries.size(); ++i) check_same_form(entries[i], values[i]);
  for (size_t i = 0; i < counters.size(); ++i) check_same_form(counters[i], increments[i]);
  Reader<int64_t> steps(plan);
  Reader<double> numbers(constants);
  Passes passes;
  auto first = tensors.begin();
  while (!steps.is_at_end()) {
    int64_t groups = steps.number(), operands = steps.number(), target_count = steps.number();
    int64_t constant_count = steps.number(), length = steps.number();
    BURNISH_CHECK(target_count > 0, "elementwise: a tensor to write to expected");
    BURNISH_CHECK(groups >= 0 && operands > 0 && groups <= (tensors.end() - first) / operands, "elementwise: ", tensors.end() - first,
                  " tensors are no ", groups, " groups of ", operands);
    std::span<const int64_t> targets = steps.numbers(target_count);
    Program program{numbers.numbers(constant_count), steps.numbers(length)};
    for (; groups > 0; --groups, first += operands) {
      passes.add(pass_in_place(program, std::vector<Tensor>(first, first + operands), targets));
    }
  }
  BURNISH_CHECK(first == tensors.end() && numbers.is_at_end(), "update_state: more operands or constants than programs read");
  passes.run();
  for (size_t i = 0; i < entries.size(); ++i) {
    Tensor value = to_contiguous(values[i]);
    std::memmove(entries[i].mutable_data_ptr(), value.const_data_ptr(), value.numel() * aoti_torch_dtype_element_size(static_cast<int32_t>(value.scalar_type())));
  }
  for (size_t i = 0; i < counters.size(); ++i) count(counters[i], increments[i]);
}

}  // namespace

BURNISH_OPERATORS(CPU) {
  operators.implement<&elementwise>("elementwise");
  operators.implement<&elementwise_sums>("elementwise_sums");
  operators.implement<&update_state>("update_state_");
}

}  // namespace burnish
