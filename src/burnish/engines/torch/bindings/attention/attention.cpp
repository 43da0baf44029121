// Scaled dot-product attention, softmax(Q K' scale + mask) V, and its gradient, without a matrix of probabilities in
// memory: a block of them is computed for some queries and some keys, and stays in the cache of a core (T. Dao et al.,
// "FlashAttention", 2022; sums of exponentials over blocks of keys as M. Milakov, N. Gimelshein, "Online normalizer calculation for
// softmax", 2018). What is kept of them is the logarithm of the sum of exponentials of each query. The gradient computes them again:
//
//   P = exp(S - logarithm),   dP = dY V',   dS = P (dP - sum(dY Y)) scale,   dV = P' dY,   dK = dS' Q,   dQ = dS K.
//
// Heads are float32 or bfloat16. Scores, their exponentials and the sums of products are float32; what enters a product of bfloat16 is
// rounded to it.

#include <cmath>
#include <limits>
#include <memory>
#include <optional>
#include <tuple>
#include <type_traits>

#include "attention_products.h"
#include "operators.h"
#include "vector_math.h"

namespace burnish::attention {
namespace {

using products::divide_up;
using products::round_up;

constexpr int64_t kQueries = 96, kKeys = 256;  // of a block
constexpr int64_t kRow = kKeys + products::kLine;  // from row to row of a block's scores, which so do not meet in a few lines of a cache

constexpr float kInfinity = std::numeric_limits<float>::infinity();

// Heads [N, H, rows, D] of which the elements of a row lie side by side.
template <typename Element>
struct Heads {
  Element* data;
  int64_t sample, head, row, heads;

  explicit Heads(const Tensor& tensor)
      : data(static_cast<Element*>(const_cast<void*>(tensor.const_data_ptr()))),
        sample(tensor.stride(0)),
        head(tensor.stride(1)),
        row(tensor.stride(2)),
        heads(tensor.size(1)) {}

  Element* of(int64_t item, int64_t index) const { return data + item / heads * sample + item % heads * head + index * row; }

  // Rows, as lines of what is summed over the elements of a head.
  Lines<Element> rows(int64_t item, int64_t index) const { return {of(item, index), row, 1}; }
  // Columns, as lines of what is summed over rows.
  Lines<Element> columns(int64_t item, int64_t index) const { return {of(item, index), 1, row}; }
};

// Has the cache fetch the part of some rows that comes with one of `parts` pieces of work.
template <typename Element>
[[gnu::always_inline]] inline void fetch(const Heads<Element>& heads, int64_t item, int64_t rows, int64_t extent, int64_t part, int64_t parts) {
  for (int64_t row = part * rows / parts; row < (part + 1) * rows / parts; ++row)
    for (int64_t element = 0; element < extent; element += 64 / sizeof(Element)) __builtin_prefetch(heads.of(item, row) + element, 0, 2);
}

// What is added to the scores [N, H, M, L]; a stride is 0 where it repeats itself.
struct Mask {
  const float* data = nullptr;
  int64_t sample = 0, head = 0, row = 0, column = 0, heads = 1;

  Mask() = default;
  Mask(const Tensor& tensor, int64_t head_count)
      : data(tensor.const_data_ptr<float>()),
        sample(step(tensor, 0)),
        head(step(tensor, 1)),
        row(step(tensor, 2)),
        column(step(tensor, 3)),
        heads(head_count) {}

  const float* of(int64_t item, int64_t query, int64_t key) const {
    return data ? data + item / heads * sample + item % heads * head + query * row + key * column : nullptr;
  }

 private:
  static int64_t step(const Tensor& tensor, int64_t axis) { return tensor.size(axis) == 1 ? 0 : tensor.stride(axis); }
};

struct Shape {
  int64_t items, queries, keys, extent;  // extent: elements of a row

  int64_t key_blocks() const { return divide_up(keys, kKeys); }
  int64_t query_blocks() const { return divide_up(queries, kQueries); }
  // Queries of a block, of which all are about as large.
  int64_t query_step(int64_t rows_of_tile) const { return round_up(divide_up(queries, query_blocks()), rows_of_tile); }
};

// Of the lanes of a vector, those `stride` apart joined: each of them then holds the same.
template <int stride, typename Join>
[[gnu::always_inline]] inline Vector joined(Vector values, const Join& join) {
  products::Integers lanes;
  for (int lane = 0; lane < kWidth; ++lane) lanes[lane] = lane ^ stride;
  return join(values, products::pick(values, values, lanes));
}

template <typename Join>
[[gnu::always_inline]] inline float joined_lanes(Vector values, const Join& join) {
  if constexpr (kWidth > 8) values = joined<8>(values, join);
  if constexpr (kWidth > 4) values = joined<4>(values, join);
  return joined<1>(joined<2>(values, join), join)[0];
}

[[gnu::always_inline]] inline float largest_of(Vector values) {
  return joined_lanes(values, [](Vector one, Vector other) { return other > one ? other : one; });
}

[[gnu::always_inline]] inline float sum_of(Vector values) {
  return joined_lanes(values, [](Vector one, Vector other) { return one + other; });
}

// The scores of a query: scaled, and with what the mask adds; -infinity behind `count`, up to whole vectors. Returns the largest.
[[gnu::noinline]] float finish_scores(float* scores, int64_t count, float scale, const float* mask, int64_t mask_step) {
  std::fill(scores + count, scores + round_up(count, kWidth), -kInfinity);
  Vector largest = Vector{} - kInfinity;
  if (mask && mask_step != 1) {
    for (int64_t i = 0; i < count; ++i) scores[i] = scores[i] * scale + mask[i * mask_step];
    for (int64_t i = 0; i < count; i += kWidth) largest = load(scores + i) > largest ? load(scores + i) : largest;
    return largest_of(largest);
  }
  for (int64_t i = 0; i < count; i += kWidth) {
    Vector value = load(scores + i) * scale;
    if (mask && i + kWidth <= count)
      value += load(mask + i);
    else if (mask)
      for (int64_t lane = 0; lane < count - i; ++lane) value[lane] += mask[i + lane];
    store(scores + i, value);
    largest = value > largest ? value : largest;
  }
  return largest_of(largest);
}

// Of numbers that are not positive, but for what rounding left: as `exponential`, but zero where the result has no full precision.
[[gnu::always_inline]] inline Vector exponential_of_negative(Vector given) {
  using Integers = products::Integers;
  Vector x = given < -87.f ? Vector{} - 87.f : given;
  x = x > 87.f ? Vector{} + 87.f : x;
  Vector k = (x * 1.44269504f + 12582912.f) - 12582912.f;  // to the nearest integer
  Vector whole = x - k * 0.693359375f;                     // exact
  Vector r = whole - k * -2.12194440e-4f;
  Vector left = (whole - r) - k * -2.12194440e-4f;
  Vector p = Vector{} + 0.00139517174f;
  p = p * r + 0.00836959854f;
  p = p * r + 0.0416661873f;
  p = p * r + 0.166665122f;
  p = p * r + 0.5f;
  p = ((p * (r * r) + left) + r) + 1.f;
  Words power = (reinterpret_cast<Words>(__builtin_convertvector(k, Integers)) + 127u) << 23;
  Vector result = p * reinterpret_cast<Vector>(power);
  return given < -87.f ? Vector{} : result;
}

// exp(scores - shift), in their place; returns the sum.
[[gnu::noinline]] float exponentials(float* scores, int64_t count, float shift) {
  Vector sum{};
  for (int64_t i = 0; i < count; i += kWidth) {
    Vector value = exponential_of_negative(load(scores + i) - shift);
    store(scores + i, value);
    sum += value;
  }
  return sum_of(sum);
}

// Sums of products of two rows.
template <typename Element>
float dot(const Element* one, const Element* other, int64_t count) {
  Vector sums{};
  int64_t i = 0;
  for (; i + kWidth <= count; i += kWidth) sums += load(one + i) * load(other + i);
  float sum = sum_of(sums);
  for (; i < count; ++i) sum += static_cast<float>(one[i]) * static_cast<float>(other[i]);
  return sum;
}

[[gnu::always_inline]] inline void store_factor(float* target, Vector value) { store(target, value); }

// To the nearest, for what is multiplied: the instruction writes zeros for numbers so small that a product of bfloat16 reads them as zeros.
[[gnu::always_inline]] inline void store_factor(BFloat16* target, Vector value) {
#if defined(__AVX512BF16__)
  __m256bh halves = _mm512_cvtneps_pbh(reinterpret_cast<__m512>(value));
  std::memcpy(target, &halves, sizeof halves);
#else
  store(target, value);
#endif
}

// Of a query: the probabilities of `count` keys from their scores, and the gradients of the scores from the gradients of the
// probabilities, `slopes`. Both are written in whole vectors, as factors of what follows; what lies behind `count` is not read.
template <typename Element>
[[gnu::noinline]] void finish_slopes(float* scores, const float* slopes, int64_t count, float scale, const float* mask, int64_t mask_step,
                                     float logarithm, float mean, Element* weights, Element* score_slopes) {
  float score_scale = scale;
  if (mask) {
    for (int64_t i = 0; i < count; ++i) scores[i] = scores[i] * scale + mask[i * mask_step];
    score_scale = 1.f;
  }
  for (int64_t i = 0; i < count; i += kWidth) {
    Vector weight = exponential_of_negative(load(scores + i) * score_scale - logarithm);
    store_factor(weights + i, weight);
    store_factor(score_slopes + i, weight * (load(slopes + i) - mean) * scale);
  }
}

template <typename T>
void multiply_row(const float* from, int64_t count, float by, T* to) {
  int64_t i = 0;
  for (; i + kWidth <= count; i += kWidth) store(to + i, load(from + i) * by);
  for (; i < count; ++i) to[i] = static_cast<T>(from[i] * by);
}

// Memory of a thread, handed out in pieces.
class Room {
 public:
  explicit Room(float* next) : next_(next) {}
  float* take(int64_t words) { return std::exchange(next_, next_ + round_up(words, products::kLine)); }

 private:
  float* next_;
};

int64_t total(std::initializer_list<int64_t> pieces) {
  int64_t words = 0;
  for (int64_t piece : pieces) words += round_up(piece, products::kLine);
  return words + products::kAhead * products::kColumns;
}

// Memory for what enters a product in place of a block of float32: those numbers themselves, or their rounded ones.
template <typename Element>
Element* factors(float* block, [[maybe_unused]] Room& room, [[maybe_unused]] int64_t words) {
  if constexpr (std::is_same_v<Element, float>)
    return block;
  else
    return reinterpret_cast<Element*>(room.take(words / products::kInWord<Element>));
}

// Results, and the logarithms of the sums of exponentials, of a block of queries after another.
template <typename Element>
void attend(const Shape& shape, const Heads<Element>& query, const Heads<Element>& key, const Heads<Element>& value, const Mask& mask, float scale,
            bool zeros, const Heads<Element>& result, float* logarithms) {
  using Of = Products<Element>;
  int64_t blocks = shape.query_blocks(), step = shape.query_step(Of::kRows), units = shape.items * blocks, extent = shape.extent;
  int64_t wide = round_up(extent, Of::kAcross);
  int64_t workers = std::min(get_num_threads(), units);
  int64_t key_panels = Of::right_words(kKeys, extent), value_panels = Of::right_words(extent, kKeys);
  int64_t query_strips = Of::left_words(step, extent), strips = Of::left_words(step, kKeys);
  int64_t key_words = shape.key_blocks() * key_panels, value_words = shape.key_blocks() * value_panels;
  int64_t own = total({key_words, value_words, query_strips, strips, step * kRow, step * kRow, step * wide, step, step});
  Tensor memory = make_tensor({workers * own});
  float* work = memory.mutable_data_ptr<float>();
  parallel_for(0, workers, 1, [&](int64_t begin, int64_t end) {
    for (int64_t worker = begin; worker < end; ++worker) {
      Room room(work + worker * own);
      float *keys = room.take(key_words), *values = room.take(value_words), *own_queries = room.take(query_strips), *own_weights = room.take(strips);
      float* scores = room.take(step * kRow);
      Element* weights = factors<Element>(scores, room, step * kRow);
      float *sums = room.take(step * wide), *largest = room.take(step), *norms = room.take(step);
      int64_t held = -1;  // the item whose keys and values are packed
      for (int64_t unit = worker * units / workers; unit < (worker + 1) * units / workers; ++unit) {
        int64_t item = unit / blocks, first = unit % blocks * step, rows = std::min(step, shape.queries - first);
        if (rows <= 0) continue;
        bool fresh = item != held;
        bool last = unit % blocks == blocks - 1 && unit + 1 < (worker + 1) * units / workers;
        held = item;
        Left queries = Of::left(query.rows(item, first), rows, extent, own_queries);
        std::fill_n(largest, rows, -kInfinity);
        std::fill_n(norms, rows, 0.f);
        for (int64_t block = 0, start = 0; start < shape.keys; ++block, start += kKeys) {
          int64_t count = std::min(kKeys, shape.keys - start);
          if (fresh) {
            Of::pack_right(key.rows(item, start), count, extent, keys + block * key_panels);
            Of::pack_right(value.columns(item, start), extent, count, values + block * value_panels);
          }
          bool ahead = last && start + kKeys >= shape.keys;
          Of::template multiply<false>(rows, count, extent, queries, keys + block * key_panels, scores, kRow);
          for (int64_t r = 0; r < rows; ++r) {
            float* row = scores + r * kRow;
            if (ahead) {
              fetch(query, item + 1, std::min(step, shape.queries), extent, r, rows);
              fetch(key, item + 1, std::min(kKeys, shape.keys), extent, r, rows);
              fetch(value, item + 1, std::min(kKeys, shape.keys), extent, r, rows);
            }
            float most = finish_scores(row, count, scale, mask.of(item, first + r, start), mask.column);
            // What is -infinity throughout has no exponentials yet; they come to NaN only if no other key has any.
            float before = largest[r], shift = most > before ? most : before;
            float sum = exponentials(row, count, shift == -kInfinity ? 0.f : shift);
            if (block) {
              float by = before == shift ? 1.f : exponential(before - shift);
              norms[r] *= by;
              if (by != 1.f) multiply_row(sums + r * wide, wide, by, sums + r * wide);
            }
            norms[r] += sum;
            largest[r] = shift;
            if constexpr (!std::is_same_v<Element, float>)
              for (int64_t i = 0; i < count; i += kWidth) store_factor(weights + r * kRow + i, load(row + i));
          }
          Left left = Of::left({weights, kRow, 1}, rows, count, own_weights);
          add_up<Element>(block > 0, rows, extent, count, left, values + block * value_panels, sums, wide);
        }
        for (int64_t r = 0; r < rows; ++r) {
          Element* target = result.of(item, first + r);
          float& logarithm = logarithms[item * shape.queries + first + r];
          bool none = largest[r] == -kInfinity || std::isnan(norms[r]);
          logarithm = none ? (zeros ? kInfinity : NAN) : largest[r] + std::log(norms[r]);
          if (none)
            std::fill_n(target, extent, Element(zeros ? 0.f : NAN));
          else
            multiply_row(sums + r * wide, extent, 1.f / norms[r], target);
        }
      }
    }
  });
}

// Where the sums of rows of a gradient lie: in their place where that takes float32 in whole vectors, else in memory of a thread's own.
struct Sums {
  float* data;
  int64_t row;
  bool apart;

  template <typename Element>
  static bool are_apart(int64_t extent) {
    return !std::is_same_v<Element, float> || extent % matrix::kLanes != 0;
  }

  template <typename Element>
  Sums(const Heads<Element>& heads, int64_t item, int64_t first, int64_t extent, float* own, int64_t wide)
      : data(own), row(wide), apart(are_apart<Element>(extent)) {
    if constexpr (std::is_same_v<Element, float>)
      if (!apart) data = heads.of(item, first), row = heads.row;
  }

  float* of(int64_t index) const { return data + index * row; }

  template <typename Element>
  void finish(const Heads<Element>& heads, int64_t item, int64_t first, int64_t rows, int64_t extent) const {
    for (int64_t r = 0; apart && r < rows; ++r) multiply_row(of(r), extent, 1.f, heads.of(item, first + r));
  }
};

template <typename Element>
struct Gradients {
  Heads<Element> query, key, value;
};

// The gradients of queries, keys and values, one item after another.
template <typename Element>
void attend_back(const Shape& shape, const Heads<Element>& flow, const Heads<Element>& query, const Heads<Element>& key,
                 const Heads<Element>& value, const Heads<Element>& result, const float* logarithms, const Mask& mask, float scale,
                 const Gradients<Element>& gradients) {
  using Of = Products<Element>;
  int64_t blocks = shape.query_blocks(), step = shape.query_step(Of::kRows), extent = shape.extent, wide = round_up(extent, Of::kAcross);
  int64_t workers = std::min(get_num_threads(), shape.items);
  // Whole tiles are written.
  bool apart = Sums::are_apart<Element>(extent);
  int64_t query_words = apart ? step * wide : 0, key_words = apart ? (shape.keys + Of::kRows) * wide : 0;
  int64_t panels = Of::right_words(kKeys, extent), columns = Of::right_words(extent, kKeys);
  int64_t strips = Of::left_words(step, extent), query_columns = Of::right_words(extent, step);
  int64_t turned = Of::left_words(kKeys, step), straight = Of::left_words(step, kKeys);
  int64_t of_all = shape.key_blocks() * panels, columns_of_all = shape.key_blocks() * columns;
  int64_t block_words = step * kRow;
  int64_t own = total({of_all, of_all, columns_of_all, strips, strips, query_columns, query_columns, turned, straight, block_words, block_words,
                       block_words, block_words, query_words, step, key_words, key_words});
  Tensor memory = make_tensor({workers * own});
  float* work = memory.mutable_data_ptr<float>();
  parallel_for(0, workers, 1, [&](int64_t begin, int64_t end) {
    for (int64_t worker = begin; worker < end; ++worker) {
      Room room(work + worker * own);
      float *key_panels = room.take(of_all), *value_panels = room.take(of_all), *key_columns = room.take(columns_of_all);
      float *own_queries = room.take(strips), *own_flows = room.take(strips);
      float *queries = room.take(query_columns), *flows = room.take(query_columns);
      float *own_turned = room.take(turned), *own_straight = room.take(straight);
      float *scores = room.take(block_words), *slopes = room.take(block_words);
      Element *weights = factors<Element>(scores, room, block_words), *score_slopes = factors<Element>(slopes, room, block_words);
      float *query_sums = room.take(query_words), *means = room.take(step);
      float *key_sums = room.take(key_words), *value_sums = room.take(key_words);
      for (int64_t item = worker * shape.items / workers; item < (worker + 1) * shape.items / workers; ++item) {
        Sums of_keys(gradients.key, item, 0, extent, key_sums, wide), of_values(gradients.value, item, 0, extent, value_sums, wide);
        for (int64_t unit = 0; unit < blocks; ++unit) {
          int64_t first = unit * step, rows = std::min(step, shape.queries - first);
          if (rows <= 0) break;
          Sums of_queries(gradients.query, item, first, extent, query_sums, wide);
          Left query_rows = Of::left(query.rows(item, first), rows, extent, own_queries);
          Left flow_rows = Of::left(flow.rows(item, first), rows, extent, own_flows);
          Of::pack_right(query.columns(item, first), extent, rows, queries);
          Of::pack_right(flow.columns(item, first), extent, rows, flows);
          for (int64_t r = 0; r < rows; ++r) means[r] = dot(flow.of(item, first + r), result.of(item, first + r), extent);
          for (int64_t block = 0, start = 0; start < shape.keys; ++block, start += kKeys) {
            int64_t count = std::min(kKeys, shape.keys - start);
            if (!unit) {
              Of::pack_right(key.rows(item, start), count, extent, key_panels + block * panels);
              Of::pack_right(value.rows(item, start), count, extent, value_panels + block * panels);
              Of::pack_right(key.columns(item, start), extent, count, key_columns + block * columns);
            }
            bool ahead = unit == blocks - 1 && start + kKeys >= shape.keys && item + 1 < (worker + 1) * shape.items / workers;
            Of::template multiply<false>(rows, count, extent, query_rows, key_panels + block * panels, scores, kRow);
            Of::template multiply<false>(rows, count, extent, flow_rows, value_panels + block * panels, slopes, kRow);
            for (int64_t r = 0; r < rows; ++r) {
              float *row = scores + r * kRow, *slope = slopes + r * kRow;
              if (ahead) {
                for (const Heads<Element>* heads : {&query, &flow, &result}) fetch(*heads, item + 1, std::min(step, shape.queries), extent, r, rows);
                for (const Heads<Element>* heads : {&key, &value}) fetch(*heads, item + 1, std::min(kKeys, shape.keys), extent, r, rows);
              }
              float logarithm = logarithms[item * shape.queries + first + r];
              if (logarithm == kInfinity) {  // a query without a probability, which has no gradient
                std::fill_n(weights + r * kRow, kKeys, Element(0.f));
                std::fill_n(score_slopes + r * kRow, kKeys, Element(0.f));
                continue;
              }
              finish_slopes(row, slope, count, scale, mask.of(item, first + r, start), mask.column, logarithm, means[r], weights + r * kRow,
                            score_slopes + r * kRow);
            }
            Left left = Of::left({weights, 1, kRow}, count, rows, own_turned);
            add_up<Element>(unit > 0, count, extent, rows, left, flows, of_values.of(start), of_values.row);
            left = Of::left({score_slopes, 1, kRow}, count, rows, own_turned);
            add_up<Element>(unit > 0, count, extent, rows, left, queries, of_keys.of(start), of_keys.row);
            left = Of::left({score_slopes, kRow, 1}, rows, count, own_straight);
            add_up<Element>(block > 0, rows, extent, count, left, key_columns + block * columns, of_queries.of(0), of_queries.row);
          }
          of_queries.finish(gradients.query, item, first, rows, extent);
        }
        of_keys.finish(gradients.key, item, 0, shape.keys, extent);
        of_values.finish(gradients.value, item, 0, shape.keys, extent);
      }
    }
  });
}

// Heads whose rows' elements lie side by side.
Tensor readable(const Tensor& heads) { return heads.stride(3) == 1 ? heads : to_contiguous(heads); }

// [N, H, rows, D], which lies in memory as [N, rows, H, D].
Tensor make_heads(Sizes sizes, ScalarType type) {
  auto extent = [&](int axis) { return std::max<int64_t>(sizes[axis], 1); };
  return make_strided(sizes, {extent(1) * extent(2) * extent(3), extent(3), extent(1) * extent(3), 1}, type);
}

void clear(const Tensor& heads) {
  std::memset(heads.mutable_data_ptr(), 0, heads.numel() * (heads.scalar_type() == kFloat ? sizeof(float) : sizeof(BFloat16)));
}

Shape shape_of(const Tensor& query, const Tensor& key, const Tensor& value) {
  for (const Tensor* tensor : {&query, &key, &value})
    BURNISH_CHECK((tensor->scalar_type() == kFloat || tensor->scalar_type() == kBFloat16) && tensor->scalar_type() == query.scalar_type() &&
                      tensor->dim() == 4,
                  "attention: heads of float32 or bfloat16 with four axes expected");
  BURNISH_CHECK(same(key.sizes(), value.sizes()) && query.size(0) == key.size(0) && query.size(1) == key.size(1) &&
                    query.size(3) == key.size(3),
                "attention: queries, keys and values that fit expected");
  return {query.size(0) * query.size(1), query.size(2), key.size(2), query.size(3)};
}

Mask mask_of(const std::optional<Tensor>& given, const Tensor& query, const Tensor& key) {
  if (!given.has_value()) return {};
  BURNISH_CHECK(given->scalar_type() == kFloat && given->dim() == 4, "attention: a mask of float32 with four axes expected");
  int64_t wanted[] = {query.size(0), query.size(1), query.size(2), key.size(2)};
  for (int axis = 0; axis < 4; ++axis)
    BURNISH_CHECK(given->size(axis) == 1 || given->size(axis) == wanted[axis], "attention: a mask that broadcasts to the scores expected");
  return Mask(*given, query.size(1));
}

// (query [N, H, M, D], key and value [N, H, L, D], mask that broadcasts to [N, H, M, L]) -> the result [N, H, M, D], and the logarithms of
// the sums of exponentials [N, H, M]. A query without a probability, whose scores are -infinity throughout or NaN, has NaN for both; or
// with `zeros`, zeros for its result and infinity, by which the gradient knows it.
std::tuple<Tensor, Tensor> attention(const Tensor& query_given, const Tensor& key_given, const Tensor& value_given,
                                     const std::optional<Tensor>& mask_given, double scale, bool zeros) {
  Shape shape = shape_of(query_given, key_given, value_given);
  Mask mask = mask_of(mask_given, query_given, key_given);
  Tensor query = readable(query_given), key = readable(key_given), value = readable(value_given);
  Tensor result = make_heads(query.sizes(), query.scalar_type()), logarithms = make_tensor({query.size(0), query.size(1), query.size(2)});
  if (result.numel() == 0 || !shape.keys) {
    clear(result);
    std::fill_n(logarithms.mutable_data_ptr<float>(), logarithms.numel(), 0.f);
    return {result, logarithms};
  }
  auto run = [&]<typename Element>(Element) {
    using Of = Heads<Element>;
    attend<Element>(shape, Of(query), Of(key), Of(value), mask, static_cast<float>(scale), zeros, Of(result), logarithms.mutable_data_ptr<float>());
  };
  query.scalar_type() == kFloat ? run(0.f) : run(BFloat16(0.f));
  return {result, logarithms};
}

// (flow [N, H, M, D], and what `attention` got and gave) -> the gradients of query, key and value.
std::tuple<Tensor, Tensor, Tensor> attention_gradient(const Tensor& flow_given, const Tensor& query_given, const Tensor& key_given,
                                                      const Tensor& value_given, const Tensor& result_given, const Tensor& logarithms_given,
                                                      const std::optional<Tensor>& mask_given, double scale) {
  Shape shape = shape_of(query_given, key_given, value_given);
  Mask mask = mask_of(mask_given, query_given, key_given);
  for (const Tensor* tensor : {&flow_given, &result_given})
    BURNISH_CHECK(same(tensor->sizes(), query_given.sizes()) && tensor->scalar_type() == query_given.scalar_type(),
                  "attention_gradient: the shape and the type of the queries expected");
  BURNISH_CHECK(logarithms_given.numel() == shape.items * shape.queries && logarithms_given.scalar_type() == kFloat,
                "attention_gradient: a logarithm for each query expected");
  Tensor flow = readable(flow_given), query = readable(query_given), key = readable(key_given), value = readable(value_given);
  Tensor result = readable(result_given), logarithms = to_contiguous(logarithms_given);
  ScalarType type = query.scalar_type();
  Tensor of_query = make_heads(query.sizes(), type), of_key = make_heads(key.sizes(), type), of_value = make_heads(key.sizes(), type);
  if (of_query.numel() == 0 || of_key.numel() == 0) {
    for (const Tensor* tensor : {&of_query, &of_key, &of_value}) clear(*tensor);
    return {of_query, of_key, of_value};
  }
  auto run = [&]<typename Element>(Element) {
    using Of = Heads<Element>;
    attend_back<Element>(shape, Of(flow), Of(query), Of(key), Of(value), Of(result), logarithms.const_data_ptr<float>(), mask,
                         static_cast<float>(scale), {Of(of_query), Of(of_key), Of(of_value)});
  };
  type == kFloat ? run(0.f) : run(BFloat16(0.f));
  return {of_query, of_key, of_value};
}

}  // namespace

BURNISH_OPERATORS(CPU) {
  operators.implement<&attention>("attention");
  operators.implement<&attention_gradient>("attention_gradient");
}

}  // namespace burnish::attention
