// Chains of elementwise float32 arithmetic in one pass over memory: a small program runs over blocks of elements that stay in the cache.
//
// Registers are numbered: tensors first, then scalar tensors, then constants, then what instructions write. An instruction is four
// integers: operation, destination, left, right (-1 where there is none). Every tensor is read once, every result written once.

#include <ATen/core/Tensor.h>
#include <ATen/Parallel.h>
#include <ATen/ops/empty_strided.h>
#include <torch/library.h>

#include <algorithm>
#include <cmath>
#include <memory>
#include <vector>

namespace {

constexpr int64_t kBlock = 1024;
constexpr int64_t kGrain = 16 * kBlock;

enum Operation : int64_t { kAdd, kSub, kMul, kDiv, kMax, kMin, kNeg, kSqrt, kReciprocal, kAbs, kRelu, kCopy };

struct Operand {
  const float* data;  // null for a scalar
  float value;
};

template <typename Function>
inline void run(const Operand& a, const Operand& b, float* __restrict out, int64_t count, const Function& function) {
  if (a.data && b.data)
    for (int64_t i = 0; i < count; ++i) out[i] = function(a.data[i], b.data[i]);
  else if (a.data)
    for (int64_t i = 0; i < count; ++i) out[i] = function(a.data[i], b.value);
  else if (b.data)
    for (int64_t i = 0; i < count; ++i) out[i] = function(a.value, b.data[i]);
  else
    for (int64_t i = 0; i < count; ++i) out[i] = function(a.value, b.value);
}

void execute(int64_t operation, const Operand& a, const Operand& b, float* out, int64_t count) {
  switch (operation) {
    case kAdd: return run(a, b, out, count, [](float x, float y) { return x + y; });
    case kSub: return run(a, b, out, count, [](float x, float y) { return x - y; });
    case kMul: return run(a, b, out, count, [](float x, float y) { return x * y; });
    case kDiv: return run(a, b, out, count, [](float x, float y) { return x / y; });
    // NaN comes through, as in ATen.
    case kMax: return run(a, b, out, count, [](float x, float y) { return (x != x || x > y) ? x : y; });
    case kMin: return run(a, b, out, count, [](float x, float y) { return (x != x || x < y) ? x : y; });
    case kNeg: return run(a, b, out, count, [](float x, float) { return -x; });
    case kSqrt: return run(a, b, out, count, [](float x, float) { return std::sqrt(x); });
    case kReciprocal: return run(a, b, out, count, [](float x, float) { return 1.f / x; });
    case kAbs: return run(a, b, out, count, [](float x, float) { return std::fabs(x); });
    case kRelu: return run(a, b, out, count, [](float x, float) { return x < 0.f ? 0.f : x; });
    default: return run(a, b, out, count, [](float x, float) { return x; });
  }
}

std::vector<at::Tensor> elementwise(at::TensorList tensors, at::TensorList scalars, at::ArrayRef<double> constants,
                                    at::IntArrayRef program, at::IntArrayRef outputs) {
  TORCH_CHECK(!tensors.empty() && program.size() % 4 == 0, "elementwise: a tensor and whole instructions expected");
  const at::Tensor& first = tensors[0];
  bool dense = first.is_non_overlapping_and_dense();
  std::vector<at::Tensor> laid_out;
  laid_out.reserve(tensors.size());
  at::Tensor form = dense ? first : first.contiguous();
  for (const at::Tensor& tensor : tensors) {
    TORCH_CHECK(tensor.scalar_type() == at::kFloat && tensor.sizes() == first.sizes(), "elementwise: float32 of one shape expected");
    if (tensor.strides() == form.strides() && tensor.is_non_overlapping_and_dense()) {
      laid_out.push_back(tensor);
    } else {
      at::Tensor copy = at::empty_strided(form.sizes(), form.strides(), form.options());
      copy.copy_(tensor);
      laid_out.push_back(copy);
    }
  }
  int64_t tensor_count = tensors.size(), scalar_count = scalars.size();
  int64_t instructions = program.size() / 4;
  int64_t inputs = tensor_count + scalar_count + static_cast<int64_t>(constants.size());
  std::vector<Operand> registers(inputs + instructions, Operand{nullptr, 0.f});
  for (int64_t i = 0; i < scalar_count; ++i) registers[tensor_count + i].value = scalars[i].item<float>();
  for (size_t i = 0; i < constants.size(); ++i) registers[tensor_count + scalar_count + i].value = static_cast<float>(constants[i]);
  std::vector<at::Tensor> results;
  std::vector<float*> targets(instructions, nullptr);
  for (int64_t output : outputs) {
    results.push_back(at::empty_strided(form.sizes(), form.strides(), form.options()));
    targets[output - inputs] = results.back().mutable_data_ptr<float>();
  }
  std::vector<const float*> sources;
  for (const at::Tensor& tensor : laid_out) sources.push_back(tensor.const_data_ptr<float>());
  int64_t total = first.numel();
  at::parallel_for(0, total, kGrain, [&](int64_t begin, int64_t end) {
    std::vector<Operand> local(registers);
    std::unique_ptr<float[]> scratch(new float[instructions * kBlock]);
    for (int64_t start = begin; start < end; start += kBlock) {
      int64_t count = std::min(kBlock, end - start);
      for (int64_t i = 0; i < tensor_count; ++i) local[i].data = sources[i] + start;
      for (int64_t i = 0; i < instructions; ++i) {
        const int64_t* code = program.data() + 4 * i;
        float* target = targets[i] ? targets[i] + start : scratch.get() + i * kBlock;
        execute(code[0], local[code[2]], code[3] < 0 ? local[code[2]] : local[code[3]], target, count);
        local[inputs + i].data = target;
      }
    }
  });
  return results;
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(burnish, library) {
  library.def("elementwise(Tensor[] tensors, Tensor[] scalars, float[] constants, int[] program, int[] outputs) -> Tensor[]");
}

TORCH_LIBRARY_IMPL(burnish, CPU, library) { library.impl("elementwise", elementwise); }
