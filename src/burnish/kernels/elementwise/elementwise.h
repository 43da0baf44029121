// Chains of elementwise arithmetic in one pass over memory: a small program runs over blocks of elements that stay in the cache.
//
// Registers are numbered: tensors first, then constants, then outputs, then what is temporary. An instruction is five integers:
// operation, destination and three operands (-1 where there is none); kNormal has one operand, and a second destination behind it.
// Every tensor is read once, every output written once. Arithmetic is float32; tensors may be bfloat16, and bool as 0 and 1. Tensors
// broadcast as in NumPy.

#pragma once

#include <algorithm>
#include <cstring>
#include <numeric>
#include <span>
#include <vector>

#include "arithmetic.h"
#include "tensor.h"
#include "vector_math.h"
#include "vectors.h"

namespace burnish {
namespace {

constexpr int64_t kBlock = 256;  // elements; the blocks of all registers together fit in the first-level cache
constexpr int64_t kGrain = 64 * kBlock;
constexpr int64_t kAhead = 2;  // blocks between the one that is computed and the one that is fetched

[[gnu::noinline]] void normals(Operand a, float* distribution, float* density, int64_t count) {
  const float* x = a.data;
  int64_t computed = a.step ? count : 1;
#pragma omp simd
  for (int64_t i = 0; i < computed; ++i) {
    Normal result = normal(x[i]);
    distribution[i] = result.distribution, density[i] = result.density;
  }
  std::fill(distribution + computed, distribution + count, *distribution);
  std::fill(density + computed, density + count, *density);
}

void execute(int64_t operation, const Operand& a, const Operand& b, const Operand& c, float* out, int64_t count) {
  switch (operation) {
    case kExp: return map(a, out, count, [](float x) { return exponential(x); });
    case kLog: return map(a, out, count, [](float x) { return logarithm(x); });
    case kTanh: return map(a, out, count, [](float x) { return hyperbolic_tangent(x); });
    case kErf: return map(a, out, count, [](float x) { return error_function(x); });
    case kSigmoid: return map(a, out, count, [](float x) { return logistic(x); });
    default: return execute_arithmetic(operation, a, b, c, out, count);
  }
}

inline float as_float(float value) { return value; }
inline float as_float(BFloat16 value) { return value; }
inline float as_float(bool value) { return value ? 1.f : 0.f; }

// A tensor as blocks are read from it: the element of place i is data[(i / (middle * trailing)) * trailing + i % trailing].
struct Source {
  Tensor tensor;  // keeps the memory
  const void* data;
  ScalarType type;
  int64_t middle, trailing;
};

template <typename Element>
void gather(const Source& source, int64_t start, int64_t count, float* __restrict out) {
  const Element* data = static_cast<const Element*>(source.data);
  if (source.middle == 1) {
    for (int64_t i = 0; i < count; ++i) out[i] = as_float(data[start + i]);
  } else if (source.trailing == 1) {
    int64_t row = start / source.middle, left = source.middle - start % source.middle;
    for (int64_t i = 0; i < count; left = source.middle, ++row) {
      int64_t run = std::min(left, count - i);
      std::fill(out + i, out + i + run, as_float(data[row]));
      i += run;
    }
  } else {
    int64_t group = start / (source.middle * source.trailing), repetition = start / source.trailing % source.middle;
    int64_t place = start % source.trailing;
    for (int64_t i = 0; i < count; place = 0) {
      int64_t run = std::min(source.trailing - place, count - i);
      const Element* from = data + group * source.trailing + place;
      for (int64_t j = 0; j < run; ++j) out[i + j] = as_float(from[j]);
      i += run;
      if (++repetition == source.middle) repetition = 0, ++group;
    }
  }
}

const float* block_of(const Source& source, int64_t start, int64_t count, float* scratch) {
  if (source.type == kFloat) {
    const float* data = static_cast<const float*>(source.data);
    if (source.middle == 1) return data + start;
    int64_t place = start % source.trailing;
    if (place + count <= source.trailing) return data + start / (source.middle * source.trailing) * source.trailing + place;
    gather<float>(source, start, count, scratch);
  } else if (source.type == kBFloat16) {
    gather<BFloat16>(source, start, count, scratch);
  } else {
    gather<bool>(source, start, count, scratch);
  }
  return scratch;
}

// Has the second-level cache fetch the block from a place on, where one element lies behind another: while a block is computed the cache
// would fetch nothing, and arithmetic and memory would wait for each other.
void fetch(const Source& source, int64_t start) {
  if (source.middle != 1) return;
  int64_t size = source.type == kFloat ? sizeof(float) : source.type == kBFloat16 ? sizeof(BFloat16) : sizeof(bool);
  const char* data = static_cast<const char*>(source.data) + start * size;
  for (int64_t byte = 0; byte < kBlock * size; byte += 64) __builtin_prefetch(data + byte, 0, 2);
}

void store(const float* from, ScalarType type, void* to, int64_t start, int64_t count) {
  if (type == kFloat) {
    std::copy(from, from + count, static_cast<float*>(to) + start);
  } else if (type == kBFloat16) {
    uint16_t* target = static_cast<uint16_t*>(to) + start;
    for (int64_t i = 0; i < count; ++i) {
      uint32_t bits = bits_of(from[i]);
      uint32_t rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;  // to nearest, ties to even
      target[i] = static_cast<uint16_t>(from[i] != from[i] ? 0x7fc0u : rounded);
    }
  } else {
    bool* target = static_cast<bool*>(to) + start;
    for (int64_t i = 0; i < count; ++i) target[i] = from[i] != 0.f;
  }
}

// The shape that all tensors broadcast to, and the order of its axes in memory: that of the first tensor of this shape.
struct Form {
  std::vector<int64_t> sizes;
  std::vector<int64_t> order;    // axes, outermost first; empty where they are in order
  std::vector<int64_t> strides;  // where they are not
};

// Sorts axes by their strides, the smallest first, those of the same in the order they have: a few, which std::sort is not worth compiling for.
void sort_axes(std::vector<int64_t>& axes, Sizes strides) {
  for (size_t end = 1; end < axes.size(); ++end)
    for (size_t place = end; place > 0 && strides[axes[place - 1]] > strides[axes[place]]; --place) std::swap(axes[place - 1], axes[place]);
}

// Whether the elements of a tensor fill its memory, in whatever order.
bool is_dense(const Tensor& tensor) {
  Sizes sizes = tensor.sizes(), strides = tensor.strides();
  std::vector<int64_t> order;
  for (int64_t axis = 0; axis < tensor.dim(); ++axis)
    if (sizes[axis] != 1) order.push_back(axis);
  sort_axes(order, strides);
  int64_t expected = 1;
  for (int64_t axis : order) {
    if (strides[axis] != expected) return false;
    expected *= sizes[axis];
  }
  return true;
}

Form form_of(const std::vector<Tensor>& tensors) {
  Form form;
  for (const Tensor& tensor : tensors) {
    if (static_cast<size_t>(tensor.dim()) > form.sizes.size()) form.sizes.insert(form.sizes.begin(), tensor.dim() - form.sizes.size(), 1);
    int64_t before = form.sizes.size() - tensor.dim();
    for (int64_t axis = 0; axis < tensor.dim(); ++axis) {
      int64_t& size = form.sizes[before + axis];
      BURNISH_CHECK(tensor.size(axis) == size || tensor.size(axis) == 1 || size == 1, "elementwise: shapes that broadcast expected");
      if (size == 1) size = tensor.size(axis);
    }
  }
  for (const Tensor& tensor : tensors) {
    if (!same(tensor.sizes(), form.sizes)) continue;
    if (tensor.is_contiguous()) break;
    if (!is_dense(tensor)) continue;
    form.strides.assign(tensor.strides().begin(), tensor.strides().end());
    form.order.resize(form.sizes.size());
    std::iota(form.order.begin(), form.order.end(), 0);
    std::reverse(form.order.begin(), form.order.end());
    sort_axes(form.order, form.strides);
    std::reverse(form.order.begin(), form.order.end());
    break;
  }
  return form;
}

Source source_of(const Tensor& tensor, const Form& form) {
  auto source = [&](const Tensor& packed, int64_t middle, int64_t trailing) {
    return Source{packed, packed.const_data_ptr(), packed.scalar_type(), middle, trailing};
  };
  bool whole = same(tensor.sizes(), form.sizes);
  if (whole && (form.order.empty() ? tensor.is_contiguous() : same(tensor.strides(), form.strides))) return source(tensor, 1, 1);
  // In the order of memory, with an extent of 1 where the tensor repeats itself.
  int64_t rank = form.sizes.size(), before = rank - tensor.dim();
  std::vector<int64_t> sizes(rank, 1), strides(rank, 0), target(rank);
  for (int64_t position = 0; position < rank; ++position) {
    int64_t axis = form.order.empty() ? position : form.order[position];
    target[position] = form.sizes[axis];
    if (axis < before || tensor.stride(axis - before) == 0 || tensor.size(axis - before) == 1) continue;
    sizes[position] = tensor.size(axis - before);
    strides[position] = tensor.stride(axis - before);
  }
  Tensor view = as_strided(tensor, sizes, strides);
  int64_t middle = 1, trailing = 1, changes = 0;
  bool repeats = false;
  for (int64_t position = rank - 1; position >= 0; --position) {
    if (target[position] == 1) continue;
    bool here = sizes[position] == 1;
    if (here != repeats) ++changes, repeats = here;
    if (here)
      middle *= target[position];
    else if (changes == 0)
      trailing *= target[position];
  }
  if (changes > 2) return source(to_contiguous(as_strided(tensor, target, strides)), 1, 1);
  return source(to_contiguous(view), middle, trailing);
}

// Totals over leading axes, of what some registers hold, one buffer after another: an element for each place in the axes that are kept.
struct Totals {
  const std::vector<int64_t>& registers;
  int64_t columns;
  float* data;
};

// Adds a block whose first element belongs to the column `place`.
[[gnu::noinline]] void add_up(Operand block, int64_t count, int64_t place, int64_t columns, float* totals) {
  for (int64_t i = 0; i < count; place = 0) {
    int64_t run = std::min(columns - place, count - i);
    const float* values = block.data + i * block.step;
    float* to = totals + place;
    if (block.step) {
#pragma omp simd
      for (int64_t j = 0; j < run; ++j) to[j] += values[j];
    } else {
      float value = *values;
      for (int64_t j = 0; j < run; ++j) to[j] += value;
    }
    i += run;
  }
}

// Instructions, and the constants that they read.
struct Program {
  std::span<const double> constants;
  std::span<const int64_t> code;
};

// A program over tensors of its own, whose results have a place.
class Pass {
 public:
  Pass(const Program& program, const Tensor* tensors, int64_t tensor_count, const Form& form, const std::vector<Tensor>& results)
      : program_(program), inputs_(tensor_count + static_cast<int64_t>(program.constants.size())), sources_(tensor_count) {
    BURNISH_CHECK(program.code.size() % kInstruction == 0, "elementwise: whole instructions expected");
    for (int64_t size : form.sizes) total_ *= size;
    int64_t count = inputs_ + static_cast<int64_t>(results.size());
    for (size_t i = 0; i < program.code.size(); i += kInstruction)
      count = std::max(count, (program.code[i] == kNormal ? std::max(program.code[i + 1], program.code[i + 3]) : program.code[i + 1]) + 1);
    registers_.assign(count, Operand{nullptr, 1});
    values_.resize(inputs_ * kWidth);
    for (int64_t i = 0; i < tensor_count; ++i) {
      const Tensor& tensor = tensors[i];
      ScalarType type = tensor.scalar_type();
      BURNISH_CHECK(type == kFloat || type == kBFloat16 || type == kBool, "elementwise: float32, bfloat16 or bool expected");
      if (tensor.numel() == 1) {
        Source one{tensor, tensor.const_data_ptr(), type, 1, 1};
        float value;
        repeat(i, *block_of(one, 0, 1, &value));
        sources_[i].data = nullptr;
      } else {
        sources_[i] = source_of(tensor, form);
      }
    }
    for (size_t i = 0; i < program.constants.size(); ++i) repeat(tensor_count + i, static_cast<float>(program.constants[i]));
    for (const Tensor& result : results) targets_.push_back(target_of(result, targets_.size()));
  }

  Pass(Pass&&) = default;  // never copied: registers point into values_

  int64_t total() const { return total_; }

  // Elements that the blocks of all registers take.
  int64_t scratch() const { return static_cast<int64_t>(registers_.size()) * kBlock; }

  // How many registers there are.
  int64_t registers() const { return static_cast<int64_t>(registers_.size()); }

  // Computes elements from `begin` to `end`. Results may lie in the memory of operands of their own shape. Totals are added to; with
  // them `begin` is in the first column.
  void run(int64_t begin, int64_t end, float* scratch, const Totals* totals = nullptr) const {
    std::vector<Operand> local(registers_);
    int64_t output_count = static_cast<int64_t>(targets_.size());
    for (int64_t start = begin; start < end; start += kBlock) {
      int64_t count = std::min(kBlock, end - start);
      for (size_t i = 0; i < sources_.size(); ++i)
        if (sources_[i].data) {
          if (start + kAhead * kBlock < end) fetch(sources_[i], start + kAhead * kBlock);
          local[i].data = block_of(sources_[i], start, count, scratch + i * kBlock);
        }
      for (const int64_t* code = program_.code.data(); code != program_.code.data() + program_.code.size(); code += kInstruction) {
        float* target = place_of(code[1], start, scratch);
        const Operand& a = local[code[2]];
        if (code[0] == kNormal) {
          float* density = place_of(code[3], start, scratch);
          normals(a, target, density, count);
          local[code[3]].data = density;
        } else {
          execute(code[0], a, code[3] < 0 ? a : local[code[3]], code[4] < 0 ? a : local[code[4]], target, count);
        }
        local[code[1]].data = target;
      }
      for (int64_t output = 0; output < output_count; ++output)
        if (!targets_[output].direct) store(scratch + (inputs_ + output) * kBlock, targets_[output].type, targets_[output].data, start, count);
      for (size_t i = 0; totals && i < totals->registers.size(); ++i) {
        float* sums = totals->data + static_cast<int64_t>(i) * totals->columns;
        add_up(local[totals->registers[i]], count, (start - begin) % totals->columns, totals->columns, sums);
      }
    }
  }

 private:
  struct Target {
    void* data;
    ScalarType type;
    bool direct;  // whether the program writes it where it lies; else a block is stored when the whole program has run on it
  };

  // Where a block of what an instruction writes goes.
  float* place_of(int64_t index, int64_t start, float* scratch) const {
    int64_t output = index - inputs_;
    bool direct = output >= 0 && output < static_cast<int64_t>(targets_.size()) && targets_[output].direct;
    return direct ? static_cast<float*>(targets_[output].data) + start : scratch + index * kBlock;
  }

  void repeat(int64_t index, float value) {
    float* values = values_.data() + index * kWidth;
    std::fill(values, values + kWidth, value);
    registers_[index] = Operand{values, 0};
  }

  // A result is computed where it lies if no operand there is read behind the instruction that writes it. That instruction itself may
  // read it, element by element.
  Target target_of(const Tensor& result, size_t output) const {
    Target target{result.mutable_data_ptr(), result.scalar_type(), result.scalar_type() == kFloat};
    bool written = false;
    for (size_t i = 0; i < program_.code.size(); i += kInstruction) {
      for (size_t place = i + 2; written && place < i + kInstruction; ++place) {
        int64_t operand = program_.code[place];
        if (operand >= 0 && operand < static_cast<int64_t>(sources_.size()) && sources_[operand].data == target.data) target.direct = false;
      }
      int64_t index = inputs_ + static_cast<int64_t>(output);
      written |= program_.code[i + 1] == index || (program_.code[i] == kNormal && program_.code[i + 3] == index);
    }
    return target;
  }

  Program program_;
  int64_t inputs_, total_ = 1;
  std::vector<Operand> registers_;
  std::vector<float> values_;  // of the registers that hold one value, each repeated over a vector
  std::vector<Source> sources_;
  std::vector<Target> targets_;
};

// Passes that run in one call: tensors of a few elements, each too small for a call of its own, and large ones, which all threads work on.
class Passes {
 public:
  void add(Pass pass) {
    starts_.push_back(starts_.back() + (pass.total() + kBlock - 1) / kBlock * kBlock);
    scratch_ = std::max(scratch_, pass.scratch());
    passes_.push_back(std::move(pass));
  }

  // All of them together are cut into pieces for the threads.
  void run() const {
    parallel_for(0, starts_.back() / kBlock, kGrain / kBlock, [&](int64_t begin, int64_t end) {
      auto scratch = make_aligned(scratch_);
      size_t index = std::upper_bound(starts_.begin(), starts_.end(), begin * kBlock) - starts_.begin() - 1;
      for (; index < passes_.size() && starts_[index] < end * kBlock; ++index) {
        int64_t from = std::max<int64_t>(begin * kBlock - starts_[index], 0);
        passes_[index].run(from, std::min(end * kBlock - starts_[index], passes_[index].total()), scratch.get());
      }
    });
  }

 private:
  std::vector<Pass> passes_;
  std::vector<int64_t> starts_{0};  // elements before each pass, rounded up to whole blocks
  int64_t scratch_ = 0;
};

inline void run(const Pass& pass) {
  parallel_for(0, pass.total(), kGrain, [&](int64_t begin, int64_t end) {
    auto scratch = make_aligned(pass.scratch());
    pass.run(begin, end, scratch.get());
  });
}

// Extents of the axes that sums keep, the last `kept`.
inline std::vector<int64_t> kept_sizes(const Form& form, int64_t kept) {
  BURNISH_CHECK(kept >= 0 && kept <= static_cast<int64_t>(form.sizes.size()), "elementwise: no ", kept, " axes to keep");
  return {form.sizes.end() - kept, form.sizes.end()};
}

// Runs a pass over tensors in the order of their axes, and writes into `sums` those over all axes but the last `kept` of what the registers
// `summed` hold: float32, and from values that are not rounded to the type of a result.
//
// Sixteen rows at a time are added up in float32, these sums in float64. Rows are shared out in up to kParts parts, whatever the number of
// threads is: neither does the result depend on it.
inline void run_and_sum(const Pass& pass, const Form& form, const std::vector<int64_t>& summed, int64_t kept, const std::vector<Tensor>& sums) {
  constexpr int64_t kRows = 16, kParts = 32;
  for (int64_t index : summed) BURNISH_CHECK(index >= 0 && index < pass.registers(), "elementwise: no register ", index);
  int64_t columns = 1, rows = 1;
  for (size_t axis = 0; axis < form.sizes.size(); ++axis) (axis + kept < form.sizes.size() ? rows : columns) *= form.sizes[axis];
  int64_t count = static_cast<int64_t>(summed.size()), width = count * columns;
  int64_t share = ((rows + kParts - 1) / kParts + kRows - 1) / kRows * kRows;
  int64_t parts = width > 0 && rows > 0 ? (rows + share - 1) / share : 0;
  Tensor partial = make_tensor({parts, width}, kDouble);
  parallel_for(0, parts, 1, [&](int64_t begin, int64_t end) {
    auto scratch = make_aligned(pass.scratch()), block = make_aligned(width);
    Totals totals{summed, columns, block.get()};
    for (int64_t part = begin; part < end; ++part) {
      double* to = partial.mutable_data_ptr<double>() + part * width;
      std::fill(to, to + width, 0.);
      int64_t last = std::min((part + 1) * share, rows);
      for (int64_t row = part * share; row < last; row += kRows) {
        std::fill(block.get(), block.get() + width, 0.f);
        pass.run(row * columns, std::min(row + kRows, last) * columns, scratch.get(), &totals);
        for (int64_t i = 0; i < width; ++i) to[i] += static_cast<double>(block[i]);
      }
    }
  });
  for (int64_t index = 0; index < count; ++index) {
    float* result = sums[index].mutable_data_ptr<float>();
    parallel_for(0, columns, 4096, [&](int64_t begin, int64_t end) {
      std::vector<double> total(end - begin);
      for (int64_t part = 0; part < parts; ++part) {
        const double* from = partial.const_data_ptr<double>() + part * width + index * columns + begin;
        for (int64_t i = 0; i < end - begin; ++i) total[i] += from[i];
      }
      for (int64_t i = begin; i < end; ++i) result[i] = static_cast<float>(total[i - begin]);
    });
  }
}

}  // namespace
}  // namespace burnish
