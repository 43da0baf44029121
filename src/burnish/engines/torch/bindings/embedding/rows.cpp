// Rows of embedding tables: those that a batch reads, the sums of gradients of the same row, and an optimizer's update of these rows where
// they lie. Each row is read once and written once, however often the batch names it, and is fetched before its turn comes: a row of a large
// table lies in no cache.
//
// Gradients of a row are added in the order in which the batch names it, beginning with zero, on any number of threads: the sums are
// those of a dense gradient, bit by bit.

#include <atomic>
#include <memory>
#include <span>
#include <vector>

#include "arithmetic.h"
#include "operators.h"

namespace burnish {
namespace {

constexpr int64_t kBlock = 256;  // elements that a program runs over at once; the blocks of all registers lie in the first-level cache
constexpr int64_t kGrain = 32;   // blocks that are worth a thread
constexpr int64_t kLineBytes = 64;
constexpr int64_t kRowsAhead = 16;
constexpr int64_t kFewIndices = 1 << 14;  // four slots for each take 256 KiB
constexpr int64_t kMost = int64_t{1} << 32;  // rows of a table, and indices: both fit in one word

template <typename T>
std::unique_ptr<T[]> make_array(int64_t count) {
  return std::unique_ptr<T[]>(new T[count]);
}

// Rows one `stride` behind another, of `width` elements side by side.
struct Rows {
  Tensor tensor;  // keeps the memory
  int64_t count, width, stride;
};

// A tensor as rows of so many elements; copied where they do not lie in one stride.
Rows rows_of(const Tensor& tensor, int64_t width) {
  int64_t count = width > 0 ? tensor.numel() / width : 0;
  Sizes sizes = tensor.sizes(), strides = tensor.strides();
  int64_t taken = 1, axis = tensor.dim() - 1;
  for (; axis >= 0 && taken < width; --axis) {
    if (sizes[axis] != 1 && strides[axis] != taken) break;
    taken *= sizes[axis];
  }
  int64_t stride = -1, expected = 0;
  bool even = taken == width;
  for (; even && axis >= 0; --axis) {
    if (sizes[axis] == 1) continue;
    if (stride < 0)
      stride = strides[axis];
    else
      even = strides[axis] == expected;
    expected = strides[axis] * sizes[axis];
  }
  if (even) return {tensor, count, width, stride < 0 ? width : stride};
  return {to_contiguous(tensor), count, width, width};
}

// The indices of a batch by the row that they name: row << 32 | place in the batch.
struct Places {
  uint64_t* keys;
  uint32_t* starts;  // of each row among the keys, and the end
  int64_t count;     // of rows

  int64_t row(int64_t group) const { return static_cast<int64_t>(keys[starts[group]] >> 32); }
};

// Sorts keys by row; those of one row stay in the order they have. Returns where they lie: here or in the spare memory.
uint64_t* sort_by_row(uint64_t* keys, uint64_t* spare, int64_t count, int64_t rows) {
  bool is_sorted = true;
  for (int64_t i = 1; i < count; ++i) is_sorted &= keys[i - 1] >> 32 <= keys[i] >> 32;
  if (is_sorted) return keys;
  int bits = count < 4096 ? 8 : 11;
  uint32_t ends[1 << 11];
  uint64_t mask = (uint64_t{1} << bits) - 1;
  for (int shift = 32; (rows - 1) >> (shift - 32) > 0; shift += bits) {
    std::fill(ends, ends + mask + 1, 0);
    for (int64_t i = 0; i < count; ++i) ++ends[keys[i] >> shift & mask];
    uint32_t start = 0;
    for (uint64_t digit = 0; digit <= mask; ++digit) {
      uint32_t size = ends[digit];
      ends[digit] = start;
      start += size;
    }
    for (int64_t i = 0; i < count; ++i) spare[ends[keys[i] >> shift & mask]++] = keys[i];
    std::swap(keys, spare);
  }
  return keys;
}

// The row that an index names; one below zero counts from the end.
inline bool find_row(int64_t index, int64_t rows, int64_t& row) {
  row = index < 0 ? index + rows : index;
  return static_cast<uint64_t>(row) < static_cast<uint64_t>(rows);
}

[[noreturn, gnu::noinline]] void refuse_index(int64_t table, int64_t index, int64_t rows) {
  refuse({"table ", table, " of this call has ", rows, " rows, and none of index ", index});
}

// Whether all indices are of rows; then `places` has them by row. There are twice as many keys as indices, and one start more.
bool order(const int64_t* indices, int64_t count, int64_t rows, uint64_t* keys, uint32_t* starts, Places& places) {
  bool valid = true;
  for (int64_t i = 0; i < count; ++i) {
    int64_t row;
    valid &= find_row(indices[i], rows, row);
    keys[i] = static_cast<uint64_t>(row) << 32 | static_cast<uint64_t>(i);
  }
  if (!valid) return false;
  keys = sort_by_row(keys, keys + count, count, rows);
  int64_t groups = 0;
  for (int64_t i = 0; i < count; ++i)
    if (i == 0 || keys[i] >> 32 != keys[i - 1] >> 32) starts[groups++] = static_cast<uint32_t>(i);
  starts[groups] = static_cast<uint32_t>(count);
  places = {keys, starts, groups};
  return true;
}

constexpr uint32_t kNone = ~uint32_t{0};

// The rows that the indices of a batch name, in the order in which they come first; and of each row its places in the batch, in order.
class Named {
 public:
  int64_t count = 0;  // of rows

  int64_t row(int64_t group) const { return rows_[group]; }
  uint32_t first(int64_t group) const { return first_[group]; }
  uint32_t after(uint32_t place) const { return after_[place]; }  // the next place of the same row; kNone behind the last

  // Words of memory that `find` takes.
  static int64_t words(int64_t indices) { return 4 * indices + slots_of(indices); }

  // Whether all indices are of rows; then the rows are found.
  bool find(const int64_t* indices, int64_t size, int64_t rows, uint32_t* memory) {
    rows_ = memory, first_ = rows_ + size, after_ = first_ + size;
    uint32_t *last = after_ + size, *slots = last + size;
    int64_t slot_count = slots_of(size);
    int shift = 64;
    for (int64_t left = slot_count; left > 1; left /= 2) --shift;
    std::fill(slots, slots + slot_count, kNone);
    count = 0;
    for (int64_t place = 0; place < size; ++place) {
      int64_t row;
      if (!find_row(indices[place], rows, row)) return false;
      uint64_t slot = static_cast<uint64_t>(row) * 0x9e3779b97f4a7c15u >> shift;  // the golden ratio spreads neighbours
      while (slots[slot] != kNone && rows_[slots[slot]] != row) slot = (slot + 1) & (slot_count - 1);
      after_[place] = kNone;
      uint32_t group = slots[slot];
      if (group == kNone) {
        group = slots[slot] = static_cast<uint32_t>(count++);
        rows_[group] = static_cast<uint32_t>(row), first_[group] = static_cast<uint32_t>(place);
      } else {
        after_[last[group]] = static_cast<uint32_t>(place);
      }
      last[group] = static_cast<uint32_t>(place);
    }
    return true;
  }

 private:
  // A power of two, at least twice as many as there can be rows; four times where that fits in the second-level cache, so that fewer rows
  // meet in a slot.
  static int64_t slots_of(int64_t indices) {
    int64_t slots = 2, least = (indices <= kFewIndices ? 4 : 2) * indices;
    while (slots < least) slots *= 2;
    return slots;
  }

  uint32_t *rows_ = nullptr, *first_ = nullptr, *after_ = nullptr;
};

void check_valid(const int64_t* indices, int64_t count, int64_t rows, int64_t table) {
  int64_t row;
  for (int64_t i = 0; i < count; ++i)
    if (!find_row(indices[i], rows, row)) refuse_index(table, indices[i], rows);
}

// out = 0 + the rows of a group, one after another.
template <typename Element>
void add_group(const Places& places, int64_t group, const Element* data, int64_t stride, int64_t width, Element* out) {
  const uint64_t *key = places.keys + places.starts[group], *end = places.keys + places.starts[group + 1];
  const Element* row = data + static_cast<int64_t>(*key & 0xffffffffu) * stride;
#pragma omp simd
  for (int64_t i = 0; i < width; ++i) out[i] = Element(0) + row[i];
  while (++key != end) {
    row = data + static_cast<int64_t>(*key & 0xffffffffu) * stride;
#pragma omp simd
    for (int64_t i = 0; i < width; ++i) out[i] += row[i];
  }
}

// Has the cache fetch the lines that some bytes lie in: to be read, or written too. Inlined always: GCC drops calls of what only fetches,
// as if that had no effect.
template <int writes>
[[gnu::always_inline]] inline void fetch(const void* data, int64_t bytes) {
  uintptr_t from = reinterpret_cast<uintptr_t>(data);
  for (uintptr_t line = from / kLineBytes * kLineBytes; line < from + bytes; line += kLineBytes)
    __builtin_prefetch(reinterpret_cast<const void*>(line), writes, 3);
}

inline void copy_row(const float* from, float* to, int64_t width) {
  int64_t i = 0;
  for (; i + kWidth <= width; i += kWidth) store(to + i, load(from + i));
  for (; i < width; ++i) to[i] = from[i];
}

template <int count>
[[gnu::always_inline]] inline void copy_vectors(const float* from, float* to) {
  Vector row[count];
  for (int i = 0; i < count; ++i) row[i] = load(from + i * kWidth);
  for (int i = 0; i < count; ++i) store(to + i * kWidth, row[i]);
}

int64_t checked_count(const Tensor& indices) {
  BURNISH_CHECK(indices.scalar_type() == kLong, "rows: indices of int64 expected");
  int64_t count = indices.numel();
  BURNISH_CHECK(count < kMost, "rows: fewer than 2^32 indices expected");
  return count;
}

int64_t checked_rows(const Tensor& table) {
  BURNISH_CHECK(table.dim() > 0 && table.is_contiguous(), "rows: a contiguous table expected");
  BURNISH_CHECK(table.size(0) < kMost, "rows: a table of fewer than 2^32 rows expected");
  return table.size(0);
}

template <typename Element>
Tensor sums_of(const Places& places, const Rows& rows, const std::vector<int64_t>& sizes) {
  Tensor sums = make_tensor(sizes, type_of<Element>);
  const Element* from = rows.tensor.const_data_ptr<Element>();
  Element* to = sums.mutable_data_ptr<Element>();
  parallel_for(0, places.count, std::max<int64_t>(kGrain * kBlock / std::max<int64_t>(rows.width, 1), 1), [&](int64_t begin, int64_t end) {
    for (int64_t group = begin; group < end; ++group) add_group(places, group, from, rows.stride, rows.width, to + group * rows.width);
  });
  return sums;
}

// Indices [n], not negative, and rows [n, ...] to the indices that differ, ascending, and the sum of the rows of each.
std::tuple<Tensor, Tensor> coalesce_rows(const Tensor& indices, const Tensor& gradient) {
  int64_t count = checked_count(indices);
  BURNISH_CHECK(gradient.dim() > 0 && gradient.size(0) == count, "rows: a gradient for each index expected");
  int64_t width = 1;
  for (int64_t axis = 1; axis < gradient.dim(); ++axis) width *= gradient.size(axis);
  Tensor packed = to_contiguous(indices);
  const int64_t* data = packed.const_data_ptr<int64_t>();
  int64_t largest = 0;
  for (int64_t i = 0; i < count; ++i) {
    BURNISH_CHECK(data[i] >= 0 && data[i] < kMost, "rows: an index between 0 and 2^32 expected, not ", data[i]);
    largest = std::max(largest, data[i]);
  }
  auto keys = make_array<uint64_t>(2 * count);
  auto starts = make_array<uint32_t>(count + 1);
  Places places{};
  order(data, count, largest + 1, keys.get(), starts.get(), places);
  Tensor distinct = make_tensor({places.count}, kLong);
  int64_t* to = distinct.mutable_data_ptr<int64_t>();
  for (int64_t group = 0; group < places.count; ++group) to[group] = places.row(group);
  std::vector<int64_t> sizes(gradient.sizes().begin(), gradient.sizes().end());
  sizes[0] = places.count;
  Rows rows = rows_of(gradient, width);
  if (gradient.scalar_type() == kDouble) return {distinct, sums_of<double>(places, rows, sizes)};
  return {distinct, sums_of<float>(places, rows, sizes)};
}

// For each of some tables the rows that its indices name: the shape of the indices, and behind it that of a row.
std::vector<Tensor> lookup_rows(const std::vector<Tensor>& tables, const std::vector<Tensor>& indices) {
  BURNISH_CHECK(tables.size() == indices.size(), "rows: indices for each table expected");
  struct Lookup {
    const int64_t* indices;
    const char* from;
    char* to;
    int64_t rows, bytes, count;
  };
  std::vector<Tensor> results, packed;
  std::vector<Lookup> lookups;
  std::vector<int64_t> starts{0};
  for (size_t table = 0; table < tables.size(); ++table) {
    packed.push_back(to_contiguous(indices[table]));
    Lookup lookup;
    lookup.count = checked_count(packed.back()), lookup.rows = checked_rows(tables[table]);
    Sizes row = tables[table].sizes(), shape = indices[table].sizes();
    std::vector<int64_t> sizes(shape.begin(), shape.end());
    sizes.insert(sizes.end(), row.begin() + 1, row.end());
    results.push_back(make_tensor(sizes, tables[table].scalar_type()));
    lookup.bytes = aoti_torch_dtype_element_size(static_cast<int32_t>(tables[table].scalar_type()));
    for (size_t axis = 1; axis < row.size(); ++axis) lookup.bytes *= row[axis];
    lookup.indices = packed.back().const_data_ptr<int64_t>();
    lookup.from = static_cast<const char*>(tables[table].const_data_ptr());
    lookup.to = static_cast<char*>(results.back().mutable_data_ptr());
    if (lookup.bytes == 0) lookup.count = 0;
    lookups.push_back(lookup);
    starts.push_back(starts.back() + lookup.count);
  }
  std::atomic<bool> valid{true};
  parallel_for(0, starts.back(), 2048, [&](int64_t begin, int64_t end) {
    size_t table = std::upper_bound(starts.begin(), starts.end(), begin) - starts.begin() - 1;
    for (; table < lookups.size() && starts[table] < end; ++table) {
      const Lookup& lookup = lookups[table];
      int64_t first = std::max<int64_t>(begin - starts[table], 0), last = std::min(end - starts[table], lookup.count);
      int64_t row;
      for (int64_t i = first; i < std::min(first + kRowsAhead, last); ++i)
        if (find_row(lookup.indices[i], lookup.rows, row)) fetch<0>(lookup.from + row * lookup.bytes, lookup.bytes);
      for (int64_t i = first; i < last; ++i) {
        if (i + kRowsAhead < last && find_row(lookup.indices[i + kRowsAhead], lookup.rows, row))
          fetch<0>(lookup.from + row * lookup.bytes, lookup.bytes);
        if (!find_row(lookup.indices[i], lookup.rows, row)) {
          valid = false;
          return;
        }
        const char* from = lookup.from + row * lookup.bytes;
        char* to = lookup.to + i * lookup.bytes;
        if (lookup.bytes % kLineBytes == 0)  // without a call for each row
          for (int64_t byte = 0; byte < lookup.bytes; byte += kLineBytes) std::memcpy(to + byte, from + byte, kLineBytes);
        else
          std::memcpy(to, from, lookup.bytes);
      }
    }
  });
  if (!valid)
    for (size_t table = 0; table < lookups.size(); ++table)
      check_valid(lookups[table].indices, lookups[table].count, lookups[table].rows, static_cast<int64_t>(table));
  return results;
}

enum Kind : int64_t { kState, kGradient, kScalar };  // of what a program reads

// How many values a register holds for a block: as many as a row has for each row, or one for each.
enum Extent : uint8_t { kRow, kElements };

// The program of an update, for tables that are alike.
struct Plan {
  std::span<const int64_t> kinds, targets, code;
  std::span<const double> constants;
};

// The update of one table's rows.
class Update {
 public:
  Update(const Plan& plan, const Tensor* tensors) : plan_(plan), indices_(to_contiguous(tensors[0])) {
    count_ = checked_count(indices_);
    int64_t width = -1;
    for (size_t i = 0; i < plan.kinds.size(); ++i) {
      if (plan.kinds[i] != kState) continue;
      int64_t rows = checked_rows(tensors[i + 1]);
      BURNISH_CHECK(rows_ < 0 || rows == rows_, "rows: states of one number of rows expected");
      rows_ = rows;
    }
    BURNISH_CHECK(rows_ >= 0, "rows: a state to update expected");
    if (count_ == 0) return;
    BURNISH_CHECK(rows_ > 0, "rows: a table of no row has none to update");
    for (size_t i = 0; i < plan.kinds.size(); ++i)
      if (plan.kinds[i] == kGradient) width = tensors[i + 1].numel() / count_;
    BURNISH_CHECK(width > 0, "rows: a gradient expected");
    width_ = width;
    rows_of_block_ = std::max<int64_t>(kBlock / width_, 1);
    block_size_ = (rows_of_block_ * width_ + kWidth - 1) / kWidth * kWidth;
    add_registers(tensors + 1);
    add_instructions();
  }

  Update(Update&&) = default;  // never copied: registers point into values_

  const int64_t* indices() const { return indices_.const_data_ptr<int64_t>(); }
  int64_t count() const { return count_; }
  int64_t rows() const { return rows_; }
  int64_t rows_of_block() const { return rows_of_block_; }
  int64_t blocks() const { return count_ == 0 ? 0 : (named.count + rows_of_block() - 1) / rows_of_block(); }
  int64_t scratch() const { return count_ == 0 ? 0 : (static_cast<int64_t>(registers_.size()) + 3) * block_size(); }

  // Computes blocks from `begin` to `end`.
  void run(int64_t begin, int64_t end, float* scratch) const {
    if (width_ == kWidth) return run_blocks<1>(begin, end, scratch);
    if (width_ == 2 * kWidth) return run_blocks<2>(begin, end, scratch);
    if (width_ == 4 * kWidth) return run_blocks<4>(begin, end, scratch);
    if (width_ == 8 * kWidth) return run_blocks<8>(begin, end, scratch);
    run_blocks<0>(begin, end, scratch);
  }

  Named named;

 private:
  struct State {
    float* data = nullptr;  // of a state entry
    int64_t width = 0, index = 0;
  };

  struct Instruction {
    int64_t operation, result, operands[3];
    Extent extent;
    bool spread[3];  // whether an operand of one value for a row is one of a row's elements
  };

  int64_t block_size() const { return block_size_; }

  void add_registers(const Tensor* tensors) {
    inputs_ = static_cast<int64_t>(plan_.kinds.size() + plan_.constants.size());
    int64_t count = inputs_ + static_cast<int64_t>(plan_.targets.size());
    for (size_t i = 0; i < plan_.code.size(); i += kInstruction)
      for (int64_t place = 1; place < kInstruction; ++place) count = std::max(count, plan_.code[i + place] + 1);
    registers_.assign(count, Operand{nullptr, 1});
    extents_.assign(count, kElements);
    values_.resize(inputs_ * kWidth);
    states_.resize(plan_.kinds.size());
    for (size_t i = 0; i < plan_.kinds.size(); ++i) {
      const Tensor& tensor = tensors[i];
      if (plan_.kinds[i] == kScalar) {
        BURNISH_CHECK(tensor.numel() == 1, "rows: a number expected");
        bool is_flag = tensor.scalar_type() == kBool;
        repeat(i, is_flag ? (*tensor.const_data_ptr<bool>() ? 1.f : 0.f) : *tensor.const_data_ptr<float>());
      } else if (plan_.kinds[i] == kGradient) {
        BURNISH_CHECK(tensor.scalar_type() == kFloat && tensor.numel() == count_ * width_, "rows: a gradient of float32 for each index expected");
        gradient_ = rows_of(tensor, width_);
        gradient_data_ = gradient_.tensor.const_data_ptr<float>();
        gradient_register_ = static_cast<int64_t>(i);
      } else {
        states_[i] = {tensor.mutable_data_ptr<float>(), tensor.numel() / rows_, static_cast<int64_t>(i)};
        read_.push_back(states_[i]);
        BURNISH_CHECK(states_[i].width == width_ || states_[i].width == 1, "rows: a state of a row's elements or of one expected");
        if (states_[i].width != width_) extents_[i] = kRow;
      }
    }
    for (size_t i = 0; i < plan_.constants.size(); ++i) repeat(plan_.kinds.size() + i, static_cast<float>(plan_.constants[i]));
  }

  void repeat(size_t index, float value) {
    float* values = values_.data() + index * kWidth;
    std::fill(values, values + kWidth, value);
    registers_[index] = Operand{values, 0};
    extents_[index] = kRow;
  }

  void add_instructions() {
    for (size_t i = 0; i < plan_.code.size(); i += kInstruction) {
      const int64_t* code = plan_.code.data() + i;
      Instruction instruction{code[0], code[1], {code[2], code[3], code[4]}, kRow, {}};
      for (int64_t operand : instruction.operands)
        if (operand >= 0 && extents_[operand] == kElements) instruction.extent = kElements;
      if (instruction.operation == kRowMean) {
        instruction.spread[0] = extents_[code[2]] == kRow;
        instruction.extent = kRow;
      } else {
        for (int i = 0; i < 3; ++i) {
          int64_t operand = instruction.operands[i];
          instruction.spread[i] = operand >= 0 && instruction.extent == kElements && extents_[operand] == kRow && registers_[operand].step;
        }
      }
      extents_[instruction.result] = width_ == 1 ? kElements : instruction.extent;
      instructions_.push_back(instruction);
    }
    for (size_t i = 0; i < plan_.targets.size(); ++i) {
      const State& state = states_[plan_.targets[i]];
      BURNISH_CHECK(state.data, "rows: a state to write to expected");
      bool is_whole = extents_[inputs_ + static_cast<int64_t>(i)] == kElements;
      BURNISH_CHECK(is_whole == (state.width == width_), "rows: a result of the width of its state expected");
    }
  }

  // Rows of so many vectors, or, for 0, of any width: a row is short, and a loop that is not unrolled takes longer than its arithmetic.
  template <int vectors>
  void run_blocks(int64_t begin, int64_t end, float* scratch) const {
    int64_t block_rows = rows_of_block(), last = std::min(end * block_rows, named.count);
    for (int64_t group = begin * block_rows; group < std::min(begin * block_rows + kRowsAhead, last); ++group) fetch_row(group);
    for (int64_t first = begin * block_rows; first < last; first += block_rows) {
      int64_t rows = std::min(block_rows, last - first);
      for (int64_t group = first + kRowsAhead; group < std::min(first + rows + kRowsAhead, last); ++group) fetch_row(group);
      for (const State& state : read_) {
        float* to = scratch + state.index * block_size();
        for_rows<vectors>(state, first, rows, [=](float* row, int64_t place, auto copy) { copy(row, to + place); });
      }
      float* sums = scratch + gradient_register_ * block_size();
      for (int64_t row = 0; row < rows; ++row) add_up<vectors>(named.first(first + row), sums + row * width_);
      for (size_t i = 0; i < instructions_.size(); ++i) execute(instructions_[i], rows, scratch);
      for (size_t i = 0; i < plan_.targets.size(); ++i) {
        const float* from = scratch + (inputs_ + static_cast<int64_t>(i)) * block_size();
        for_rows<vectors>(states_[plan_.targets[i]], first, rows, [=](float* row, int64_t place, auto copy) { copy(from + place, row); });
      }
    }
  }

  // Calls a function with each of some rows of a state, where the row has its place in a block, and with what copies a row.
  template <int vectors, typename Function>
  [[gnu::always_inline]] void for_rows(const State& state, int64_t first, int64_t rows, Function function) const {
    int64_t width = state.width;
    if (width == 1 && width_ != 1) {
      for (int64_t row = 0; row < rows; ++row)
        function(state.data + named.row(first + row), row, [](const float* from, float* to) { *to = *from; });
    } else if constexpr (vectors > 0) {
      constexpr int64_t fixed = vectors * kWidth;
      for (int64_t row = 0; row < rows; ++row)
        function(state.data + named.row(first + row) * fixed, row * fixed, [](const float* from, float* to) { copy_vectors<vectors>(from, to); });
    } else {
      for (int64_t row = 0; row < rows; ++row)
        function(state.data + named.row(first + row) * width, row * width, [=](const float* from, float* to) { copy_row(from, to, width); });
    }
  }

  // The sum of the gradients of a row, of which one has this place in the batch and the others come after it.
  template <int vectors>
  [[gnu::always_inline]] void add_up(uint32_t place, float* sum) const {
    const float* gradient = gradient_row(place);
    if constexpr (vectors > 0) {
      Vector total[vectors];
      for (int i = 0; i < vectors; ++i) total[i] = Vector{} + load(gradient + i * kWidth);
      while ((place = named.after(place)) != kNone) {
        gradient = gradient_row(place);
        for (int i = 0; i < vectors; ++i) total[i] += load(gradient + i * kWidth);
      }
      for (int i = 0; i < vectors; ++i) store(sum + i * kWidth, total[i]);
    } else {
      add_row(gradient, [](auto, auto x) { return zero(x) + x; }, sum);
      while ((place = named.after(place)) != kNone) add_row(gradient_row(place), [](auto total, auto x) { return total + x; }, sum);
    }
  }

  template <typename Function>
  [[gnu::always_inline]] void add_row(const float* gradient, Function function, float* sum) const {
    int64_t i = 0;
    for (; i + kWidth <= width_; i += kWidth) store(sum + i, function(load(sum + i), load(gradient + i)));
    for (; i < width_; ++i) sum[i] = function(sum[i], gradient[i]);
  }

  const float* gradient_row(uint32_t place) const { return gradient_data_ + static_cast<int64_t>(place) * gradient_.stride; }

  [[gnu::always_inline]] void fetch_row(int64_t group) const {
    int64_t row = named.row(group);
    for (const State& state : read_) fetch<1>(state.data + row * state.width, state.width * static_cast<int64_t>(sizeof(float)));
    fetch<0>(gradient_row(named.first(group)), width_ * static_cast<int64_t>(sizeof(float)));
  }

  void execute(const Instruction& instruction, int64_t rows, float* scratch) const {
    float* spare = scratch + static_cast<int64_t>(registers_.size()) * block_size();
    float* result = scratch + instruction.result * block_size();
    Operand operands[3];
    for (int i = 0; i < 3; ++i) {
      int64_t index = instruction.operands[i];
      if (index < 0) {
        operands[i] = operands[0];
        continue;
      }
      operands[i] = registers_[index].step ? Operand{scratch + index * block_size(), 1} : registers_[index];
      if (instruction.spread[i] && instruction.operation != kRowMean) {
        float* to = spare + i * block_size();
        for (int64_t row = 0; row < rows; ++row) std::fill(to + row * width_, to + (row + 1) * width_, operands[i].data[row]);
        operands[i].data = to;
      }
    }
    if (instruction.operation == kRowMean)
      take_means(operands[0].data, instruction.spread[0] ? 1 : width_, rows, result);
    else
      execute_arithmetic(instruction.operation, operands[0], operands[1], operands[2], result,
                         instruction.extent == kElements ? rows * width_ : rows);
  }

  static void take_means(const float* data, int64_t width, int64_t rows, float* out) {
    for (int64_t row = 0; row < rows; ++row, data += width) {
      Vector sums{};
      int64_t i = 0;
      for (; i + kWidth <= width; i += kWidth) sums += load(data + i);
      float lanes[kWidth];
      store(lanes, sums);
      for (int64_t lane = 0; i + lane < width; ++lane) lanes[lane] += data[i + lane];
      for (int64_t half = kWidth / 2; half > 0; half /= 2)
        for (int64_t lane = 0; lane < half; ++lane) lanes[lane] += lanes[lane + half];
      out[row] = lanes[0] / static_cast<float>(width);
    }
  }

  Plan plan_;
  Tensor indices_;
  Rows gradient_{};
  const float* gradient_data_ = nullptr;
  int64_t count_ = 0, rows_ = -1, width_ = 1, inputs_ = 0, gradient_register_ = 0, rows_of_block_ = 1, block_size_ = 0;
  std::vector<State> states_, read_;  // by operand; those that there are
  std::vector<Operand> registers_;
  std::vector<Extent> extents_;
  std::vector<float> values_;  // of the registers that hold one number, each repeated over a vector
  std::vector<Instruction> instructions_;
};

// Writes the next values of the rows of tables, and of what an optimizer keeps for them, over the present ones.
//
// `plan` tells of one program after another: the number of tables, of operands, of targets, of constants and of integers of code; the
// kinds of the operands; which of them are written; the code. `tensors` are, for each table, the indices of its gradient's rows and the
// operands. Nothing is written where an index is of no row.
void update_rows(const std::vector<Tensor>& tensors, const Tensor& plan, const Tensor& constants) {
  std::vector<Update> updates;
  const int64_t *next = plan.const_data_ptr<int64_t>(), *end = next + plan.numel();
  const double *number = constants.const_data_ptr<double>(), *last = number + constants.numel();
  auto first = tensors.begin();
  int64_t total = 0, scratch = 0;
  while (next != end) {
    BURNISH_CHECK(end - next >= 5, "rows: a whole plan expected");
    int64_t tables = next[0], operands = next[1], targets = next[2], numbers = next[3], length = next[4];
    next += 5;
    BURNISH_CHECK(operands > 0 && targets > 0 && length >= 0 && end - next >= operands + targets + length && numbers >= 0 && last - number >= numbers,
                  "rows: a whole plan expected");
    Plan program;
    program.kinds = {next, static_cast<size_t>(operands)}, program.targets = {next + operands, static_cast<size_t>(targets)};
    program.code = {next + operands + targets, static_cast<size_t>(length)}, program.constants = {number, static_cast<size_t>(numbers)};
    next += operands + targets + length, number += numbers;
    for (; tables > 0; --tables, first += operands + 1) {
      BURNISH_CHECK(tensors.end() - first >= operands + 1, "rows: operands of each table expected");
      updates.emplace_back(program, &*first);
      total += updates.back().count();
      scratch = std::max(scratch, updates.back().scratch());
    }
  }
  BURNISH_CHECK(first == tensors.end(), "rows: more operands than programs read");
  std::vector<int64_t> words{0};
  for (const Update& update : updates) words.push_back(words.back() + Named::words(update.count()));
  Tensor workspace = make_tensor({words.back() / 2 + 1}, kLong);  // PyTorch's memory, whose pages the engine keeps
  uint32_t* memory = reinterpret_cast<uint32_t*>(workspace.mutable_data_ptr<int64_t>());
  std::atomic<bool> valid{true};
  int64_t count = static_cast<int64_t>(updates.size());
  parallel_for(0, count, std::max<int64_t>(4096 * count / std::max<int64_t>(total, 1), 1), [&](int64_t begin, int64_t stop) {
    for (int64_t i = begin; i < stop; ++i)
      if (!updates[i].named.find(updates[i].indices(), updates[i].count(), updates[i].rows(), memory + words[i])) valid = false;
  });
  if (!valid)
    for (int64_t i = 0; i < count; ++i) check_valid(updates[i].indices(), updates[i].count(), updates[i].rows(), i);
  std::vector<int64_t> starts{0};
  for (const Update& update : updates) starts.push_back(starts.back() + update.blocks());
  parallel_for(0, starts.back(), kGrain, [&](int64_t begin, int64_t stop) {
    auto blocks = make_aligned(scratch);
    size_t index = std::upper_bound(starts.begin(), starts.end(), begin) - starts.begin() - 1;
    for (; index < updates.size() && starts[index] < stop; ++index)
      updates[index].run(std::max<int64_t>(begin - starts[index], 0), std::min(stop, starts[index + 1]) - starts[index], blocks.get());
  });
}

}  // namespace

BURNISH_OPERATORS(CPU) {
  operators.implement<&coalesce_rows>("coalesce_rows");
  operators.implement<&lookup_rows>("lookup_rows");
  operators.implement<&update_rows>("update_rows_");
}

}  // namespace burnish
