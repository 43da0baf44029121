// Exchanges between processes of one machine, through files that all of them map into their memory (``burnish.distributed.shared_memory``).
//
// Every worker has a file: marks, and what it gives. Marks are counters that only their owner writes; a worker goes on when those of all
// others have come to the number of its exchange. Sums are taken in the order of the workers, each in one pass, so that all get the same bits.
// Nothing waits for good: what takes longer than it was given time for is tried again by the caller, which looks up meanwhile.

#include <chrono>
#include <cstring>
#include <iterator>
#include <thread>
#include <type_traits>

#include "operators.h"

namespace burnish {
namespace {

using Tensors = std::vector<Tensor>;
using Clock = std::chrono::steady_clock;

// Places of marks in a file, in numbers of 8 bytes. Counters lie apart, so that writing one takes no other's cache line away.
enum Mark : int64_t { kWritten = 0, kSummed = 16, kLeft = 32, kSizes = 48 };  // two sizes and two kinds: of even and of odd exchanges
enum Outcome : int64_t { kDone = 0, kNotYet = 1, kGone = 2, kDiffers = 3 };
enum Operation : int64_t { kSum = 0, kMin = 1, kMax = 2, kGather = 3 };

constexpr int64_t kMarks = 64, kBlock = 1024;
constexpr ScalarType kInt = static_cast<ScalarType>(3);
constexpr auto kEager = std::chrono::milliseconds(2), kLongestSleep = std::chrono::milliseconds(2);

int64_t* marks_of(const Tensor& marks) {
  BURNISH_CHECK(marks.dim() == 1 && marks.size(0) >= kMarks && marks.scalar_type() == kLong, "shared memory: marks expected");
  return static_cast<int64_t*>(marks.mutable_data_ptr());
}

int64_t seen(const int64_t* mark) { return __atomic_load_n(mark, __ATOMIC_ACQUIRE); }

void show(int64_t* mark, int64_t number) { __atomic_store_n(mark, number, __ATOMIC_RELEASE); }

// Waits ever more patiently: most of what is waited for is a moment away, and a core may have to be shared with whom is waited for.
class Patience {
 public:
  explicit Patience(double seconds) : seconds_(seconds) {}

  // Waits a little; returns whether there is time left.
  bool wait() {
    if (++rounds_ < 64) return true;
    auto waited = Clock::now() - began_;
    if (std::chrono::duration<double>(waited).count() >= seconds_) return false;
    if (waited < kEager)
      std::this_thread::yield();
    else
      std::this_thread::sleep_for(std::min<Clock::duration>(waited / 16, kLongestSleep));
    return true;
  }

 private:
  double seconds_;
  int64_t rounds_ = 0;
  Clock::time_point began_ = Clock::now();
};

// Waits until a counter of all workers has come to a number.
Outcome wait_for(const Tensors& marks, int64_t which, int64_t number, double seconds) {
  Patience patience(seconds);
  for (const Tensor& each : marks) {
    const int64_t* own = marks_of(each);
    while (seen(own + which) < number) {
      // Who left wrote all that it had to before it did.
      if (seen(own + kLeft)) {
        if (seen(own + which) >= number) break;
        return kGone;
      }
      if (!patience.wait()) return kNotYet;
    }
  }
  return kDone;
}

template <typename T>
using Wide = std::conditional_t<std::is_same_v<T, BFloat16>, float, T>;

template <int64_t operation, typename T>
inline T combined(T one, T other) {
  if constexpr (operation == kSum) {
    if constexpr (std::is_integral_v<T>)
      return static_cast<T>(static_cast<std::make_unsigned_t<T>>(one) + static_cast<std::make_unsigned_t<T>>(other));
    else
      return one + other;
  } else {
    // NaN stays what it is.
    if (one != one) return one;
    return (operation == kMin ? other >= one : other <= one) ? one : other;
  }
}

// targets[..][begin, end) = the terms from the first to the last, combined.
template <int64_t operation, typename T>
void combine(const std::vector<const T*>& terms, const std::vector<T*>& targets, int64_t begin, int64_t end) {
  Wide<T> total[kBlock];
  for (; begin < end; begin += kBlock) {
    int64_t count = std::min(kBlock, end - begin);
    for (int64_t i = 0; i < count; ++i) total[i] = static_cast<Wide<T>>(terms[0][begin + i]);
    for (size_t term = 1; term < terms.size(); ++term)
      for (int64_t i = 0; i < count; ++i) total[i] = combined<operation>(total[i], static_cast<Wide<T>>(terms[term][begin + i]));
    for (T* target : targets)
      for (int64_t i = 0; i < count; ++i) target[begin + i] = static_cast<T>(total[i]);
  }
}

template <typename Use>
void with_type(ScalarType type, const Use& use) {
  switch (type) {
    case ScalarType::Float: return use(static_cast<float*>(nullptr));
    case ScalarType::Double: return use(static_cast<double*>(nullptr));
    case ScalarType::BFloat16: return use(static_cast<BFloat16*>(nullptr));
    case ScalarType::Long: return use(static_cast<int64_t*>(nullptr));
    case kInt: return use(static_cast<int32_t*>(nullptr));
    default: BURNISH_CHECK(false, "shared memory: numbers of this type are not added up here");
  }
}

template <typename T>
void combine_all(int64_t operation, const std::vector<const T*>& terms, const std::vector<T*>& targets, int64_t begin, int64_t end) {
  switch (operation) {
    case kSum: return combine<kSum>(terms, targets, begin, end);
    case kMin: return combine<kMin>(terms, targets, begin, end);
    default: return combine<kMax>(terms, targets, begin, end);
  }
}

// What is gathered may be of any type, by PyTorch's number of it.
int64_t bytes_of(const Tensor& tensor) {
  constexpr int64_t kWidths[] = {1, 1, 2, 4, 8, 2, 4, 8, 0, 0, 0, 1, 0, 0, 0, 2};
  size_t type = static_cast<size_t>(tensor.scalar_type());
  BURNISH_CHECK(type < std::size(kWidths) && kWidths[type], "shared memory: elements of PyTorch's type number ", static_cast<int64_t>(type),
                " are not exchanged");
  return tensor.numel() * kWidths[type];
}

// Gives a value to the others: in one half of the own file, and the next one in the other, while some still read this one.
void shared_give(const Tensor& marks_given, const Tensor& slots, const Tensor& value_given, int64_t number, int64_t operation) {
  int64_t *marks = marks_of(marks_given), half = number & 1, room = slots.numel() / 2;
  Tensor value = to_contiguous(value_given);
  int64_t bytes = bytes_of(value);
  BURNISH_CHECK(bytes <= room, "shared memory: ", bytes, " bytes in a place of ", room);
  if (bytes) std::memcpy(static_cast<char*>(slots.mutable_data_ptr()) + half * room, value.mutable_data_ptr(), bytes);
  marks[kSizes + half] = bytes;
  marks[kSizes + 2 + half] = operation * 256 + static_cast<int64_t>(value.scalar_type());
  show(marks + kWritten, number);
}

// Takes what all gave under a number: into the rows of `result`, or combined into it.
int64_t shared_take(const Tensors& marks, const Tensors& slots, const Tensor& result, int64_t number, int64_t operation, double seconds) {
  Outcome outcome = wait_for(marks, kWritten, number, seconds);
  if (outcome != kDone) return outcome;
  BURNISH_CHECK(result.is_contiguous(), "shared memory: a contiguous result expected");
  int64_t half = number & 1, workers = marks.size(), bytes = bytes_of(result) / (operation == kGather ? workers : 1);
  int64_t kind = operation * 256 + static_cast<int64_t>(result.scalar_type());
  for (const Tensor& each : marks) {
    const int64_t* own = marks_of(each);
    if (own[kSizes + half] != bytes || own[kSizes + 2 + half] != kind) return kDiffers;
  }
  auto given = [&](int64_t worker) {
    return static_cast<const char*>(slots[worker].mutable_data_ptr()) + half * (slots[worker].numel() / 2);
  };
  if (!bytes) return kDone;
  if (operation == kGather) {
    for (int64_t worker = 0; worker < workers; ++worker)
      std::memcpy(static_cast<char*>(result.mutable_data_ptr()) + worker * bytes, given(worker), bytes);
    return kDone;
  }
  with_type(result.scalar_type(), [&](auto* type) {
    using T = std::remove_pointer_t<decltype(type)>;
    std::vector<const T*> terms;
    for (int64_t worker = 0; worker < workers; ++worker) terms.push_back(reinterpret_cast<const T*>(given(worker)));
    std::vector<T*> targets{static_cast<T*>(result.mutable_data_ptr())};
    combine_all<T>(operation, terms, targets, 0, result.numel());
  });
  return kDone;
}

// Lets the others know that the own buffer holds what it gives to the exchange of this number.
void shared_show(const Tensor& marks, int64_t number) { show(marks_of(marks) + kWritten, number); }

// Adds up elements [first, last) of all buffers, and writes the sums into some of them.
void add_up(const Tensors& buffers, const Tensors& into, int64_t first, int64_t last) {
  with_type(buffers[0].scalar_type(), [&](auto* type) {
    using T = std::remove_pointer_t<decltype(type)>;
    std::vector<const T*> terms;
    for (const Tensor& buffer : buffers) terms.push_back(static_cast<const T*>(buffer.mutable_data_ptr()));
    std::vector<T*> targets;
    for (const Tensor& buffer : into) targets.push_back(static_cast<T*>(buffer.mutable_data_ptr()));
    int64_t blocks = (last - first + kBlock - 1) / kBlock;
    parallel_for(0, blocks, 32, [&](int64_t begin, int64_t end) {
      combine<kSum>(terms, targets, first + begin * kBlock, std::min(first + end * kBlock, last));
    });
  });
}

// Adds up this worker's part of all buffers, and writes the sums into all of them.
int64_t shared_sum(const Tensors& marks, const Tensors& buffers, int64_t rank, int64_t number, double seconds) {
  Outcome outcome = wait_for(marks, kWritten, number, seconds);
  if (outcome != kDone) return outcome;
  int64_t workers = buffers.size(), elements = buffers[0].numel();
  // Whole cache lines, of whatever type.
  int64_t width = ((elements + workers - 1) / workers + 63) / 64 * 64;
  int64_t first = std::min(rank * width, elements), last = std::min(first + width, elements);
  add_up(buffers, buffers, first, last);
  show(marks_of(marks[rank]) + kSummed, number);
  return kDone;
}

// Adds up elements [first, last) of all buffers, which are this worker's, and writes the sums into its own buffer alone.
int64_t shared_section(const Tensors& marks, const Tensors& buffers, int64_t rank, int64_t first, int64_t last, int64_t number,
                       double seconds) {
  Outcome outcome = wait_for(marks, kWritten, number, seconds);
  if (outcome != kDone) return outcome;
  BURNISH_CHECK(0 <= first && first <= last && last <= buffers[rank].numel(), "shared memory: a section outside of the buffer");
  add_up(buffers, {buffers[rank]}, first, last);
  show(marks_of(marks[rank]) + kSummed, number);
  return kDone;
}

// Waits until the buffers of all workers hold what they give to the exchange of this number.
int64_t shared_await(const Tensors& marks, int64_t number, double seconds) { return wait_for(marks, kWritten, number, seconds); }

// Lets the others know that this worker has read what it wanted of their buffers.
void shared_release(const Tensor& marks, int64_t number) { show(marks_of(marks) + kSummed, number); }

// Waits until all workers have added up their parts, or read what they wanted.
int64_t shared_settle(const Tensors& marks, int64_t number, double seconds) { return wait_for(marks, kSummed, number, seconds); }

// Lets the others know that nothing more comes from here.
void shared_leave(const Tensor& marks) { show(marks_of(marks) + kLeft, 1); }

}  // namespace

BURNISH_OPERATORS(CPU) {
  operators.implement<&shared_give>("shared_give");
  operators.implement<&shared_take>("shared_take");
  operators.implement<&shared_show>("shared_show");
  operators.implement<&shared_sum>("shared_sum");
  operators.implement<&shared_section>("shared_section");
  operators.implement<&shared_await>("shared_await");
  operators.implement<&shared_release>("shared_release");
  operators.implement<&shared_settle>("shared_settle");
  operators.implement<&shared_leave>("shared_leave");
}

}  // namespace burnish
