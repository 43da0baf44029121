// Scaled dot-product attention, softmax(Q K' scale + mask) V, and its gradient, of bfloat16, without a matrix of probabilities in
// memory: a block of them is computed for some queries and some keys, and stays in the cache of a core (T. Dao et al.,
// "FlashAttention", 2022; sums of exponentials over blocks of keys as M. Milakov, N. Gimelshein, "Online normalizer calculation for
// softmax", 2018). What is kept of them is the logarithm of the sum of exponentials of each query. The gradient computes them again:
//
//   P = exp(S - logarithm),   dP = dY V',   dS = P (dP - sum(dY Y)) scale,   dV = P' dY,   dK = dS' Q,   dQ = dS K.
//
// Scores, their exponentials and the sums of products are float32; what enters a product is rounded to bfloat16.

#include <cmath>
#include <limits>
#include <memory>
#include <optional>
#include <tuple>

#include "operators.h"
#include "products.h"
#include "vector_math.h"

namespace burnish::attention {
namespace {

using products::divide_up;
using products::kRows;
using products::round_up;
using Lines = products::Lines<BFloat16>;

constexpr int64_t kInWord = products::kInWord<BFloat16>;

constexpr int kVectors = 2;  // of a tile: the usual extents of a head are whole multiples of it
constexpr int64_t kAcross = kVectors * kWidth;
constexpr int64_t kQueries = 96, kKeys = 256;  // of a block
static_assert(kQueries % kRows == 0 && kKeys % kAcross == 0);

constexpr float kInfinity = std::numeric_limits<float>::infinity();

// Heads [N, H, rows, D] of which the elements of a row lie side by side.
struct Heads {
  BFloat16* data;
  int64_t sample, head, row, heads;

  explicit Heads(const Tensor& tensor)
      : data(static_cast<BFloat16*>(const_cast<void*>(tensor.const_data_ptr()))),
        sample(tensor.stride(0)),
        head(tensor.stride(1)),
        row(tensor.stride(2)),
        heads(tensor.size(1)) {}

  BFloat16* of(int64_t item, int64_t index) const { return data + item / heads * sample + item % heads * head + index * row; }

  // Rows, as lines of what is summed over the elements of a head.
  Lines rows(int64_t item, int64_t index) const { return {of(item, index), row, 1}; }
  // Columns, as lines of what is summed over rows.
  Lines columns(int64_t item, int64_t index) const { return {of(item, index), 1, row}; }
};

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

  int64_t wide() const { return round_up(extent, kAcross); }
  int64_t key_blocks() const { return divide_up(keys, kKeys); }
  int64_t query_blocks() const { return divide_up(queries, kQueries); }
  // Queries of a block, of which all are about as large.
  int64_t query_step() const { return round_up(divide_up(queries, query_blocks()), kRows); }
};

// Words that lines take when they are packed.
int64_t packed(int64_t lines, int64_t group, int64_t depth) {
  return round_up(lines, group) * divide_up(depth, kInWord);
}

void pack_rows(const Lines& lines, int64_t count, int64_t depth, float* strips) {
  products::pack<BFloat16, kRows>(lines, 0, count, 0, depth, strips);
}

void pack_columns(const Lines& lines, int64_t count, int64_t depth, float* panels) {
  products::pack<BFloat16, kAcross>(lines, 0, count, 0, depth, panels);
}

// out[rows][columns] (+)= what was packed, in whole tiles; `step` is from row to row.
template <bool add>
void multiply(int64_t rows, int64_t columns, int64_t depth, const float* strips, const float* panels, float* out, int64_t step) {
  int64_t words = divide_up(depth, kInWord);
  for (int64_t row = 0; row < rows; row += kRows)
    for (int64_t column = 0; column < columns; column += kAcross)
      products::multiply_tile<BFloat16, kVectors, add>(words, strips + row * words, panels + column * words, out + row * step + column, step,
                                                      nullptr, 0);
}

// The same, added to what is there where there is anything yet.
void add_up(bool more, int64_t rows, int64_t columns, int64_t depth, const float* strips, const float* panels, float* out, int64_t step) {
  if (more)
    multiply<true>(rows, columns, depth, strips, panels, out, step);
  else
    multiply<false>(rows, columns, depth, strips, panels, out, step);
}

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
float dot(const BFloat16* one, const BFloat16* other, int64_t count) {
  Vector sums{};
  int64_t i = 0;
  for (; i + kWidth <= count; i += kWidth) sums += load(one + i) * load(other + i);
  float sum = sum_of(sums);
  for (; i < count; ++i) sum += static_cast<float>(one[i]) * static_cast<float>(other[i]);
  return sum;
}

// To the nearest, for what is multiplied: the instruction writes zeros for numbers so small that a product of bfloat16 reads them as zeros.
[[gnu::always_inline]] inline void store_factor(BFloat16* target, Vector value) {
#if defined(__AVX512BF16__)
  __m256bh halves = _mm512_cvtneps_pbh(reinterpret_cast<__m512>(value));
  std::memcpy(target, &halves, sizeof halves);
#else
  store(target, value);
#endif
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

// Results, and the logarithms of the sums of exponentials, of a block of queries after another.
void attend(const Shape& shape, const Heads& query, const Heads& key, const Heads& value, const Mask& mask, float scale,
            bool zeros, const Heads& result, float* logarithms) {
  int64_t blocks = shape.query_blocks(), step = shape.query_step(), units = shape.items * blocks, wide = shape.wide(), extent = shape.extent;
  int64_t workers = std::min(get_num_threads(), units);
  int64_t key_panels = packed(kKeys, kAcross, extent), value_panels = packed(wide, kAcross, kKeys);
  int64_t query_strips = packed(step, kRows, extent), strips = packed(step, kRows, kKeys);
  int64_t key_words = shape.key_blocks() * key_panels, value_words = shape.key_blocks() * value_panels;
  int64_t own = total({key_words, value_words, query_strips, strips, step * kKeys, step * kKeys / kInWord, step * wide, step, step});
  Tensor memory = make_tensor({workers * own});
  float* work = memory.mutable_data_ptr<float>();
  parallel_for(0, workers, 1, [&](int64_t begin, int64_t end) {
    for (int64_t worker = begin; worker < end; ++worker) {
      Room room(work + worker * own);
      float *keys = room.take(key_words), *values = room.take(value_words), *queries = room.take(query_strips), *weights = room.take(strips);
      float* scores = room.take(step * kKeys);
      BFloat16* rounded = reinterpret_cast<BFloat16*>(room.take(step * kKeys / kInWord));
      float *sums = room.take(step * wide), *largest = room.take(step), *norms = room.take(step);
      int64_t held = -1;  // the item whose keys and values are packed
      for (int64_t unit = worker * units / workers; unit < (worker + 1) * units / workers; ++unit) {
        int64_t item = unit / blocks, first = unit % blocks * step, rows = std::min(step, shape.queries - first);
        if (rows <= 0) continue;
        bool fresh = item != held;
        held = item;
        pack_rows(query.rows(item, first), rows, extent, queries);
        std::fill_n(largest, rows, -kInfinity);
        std::fill_n(norms, rows, 0.f);
        for (int64_t block = 0, start = 0; start < shape.keys; ++block, start += kKeys) {
          int64_t count = std::min(kKeys, shape.keys - start);
          if (fresh) {
            pack_columns(key.rows(item, start), count, extent, keys + block * key_panels);
            pack_columns(value.columns(item, start), extent, count, values + block * value_panels);
          }
          multiply<false>(rows, count, extent, queries, keys + block * key_panels, scores, kKeys);
          for (int64_t r = 0; r < rows; ++r) {
            float* row = scores + r * kKeys;
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
            for (int64_t i = 0; i < count; i += kWidth) store_factor(rounded + r * kKeys + i, load(row + i));
          }
          pack_rows(Lines{rounded, kKeys, 1}, rows, count, weights);
          add_up(block > 0, rows, extent, count, weights, values + block * value_panels, sums, wide);
        }
        for (int64_t r = 0; r < rows; ++r) {
          BFloat16* target = result.of(item, first + r);
          float& logarithm = logarithms[item * shape.queries + first + r];
          bool none = largest[r] == -kInfinity || std::isnan(norms[r]);
          logarithm = none ? (zeros ? kInfinity : NAN) : largest[r] + std::log(norms[r]);
          if (none)
            std::fill_n(target, extent, BFloat16(zeros ? 0.f : NAN));
          else
            multiply_row(sums + r * wide, extent, 1.f / norms[r], target);
        }
      }
    }
  });
}

struct Gradients {
  Heads query, key, value;
};

// The gradients of queries, keys and values, one item after another.
void attend_back(const Shape& shape, const Heads& flow, const Heads& query, const Heads& key,
                 const Heads& value, const Heads& result, const float* logarithms, const Mask& mask, float scale,
                 const Gradients& gradients) {
  int64_t blocks = shape.query_blocks(), step = shape.query_step(), wide = shape.wide(), extent = shape.extent;
  int64_t workers = std::min(get_num_threads(), shape.items), padded = shape.keys + kRows;
  int64_t panels = packed(kKeys, kAcross, extent), columns = packed(wide, kAcross, kKeys);
  int64_t strips = packed(step, kRows, extent), query_columns = packed(wide, kAcross, step);
  int64_t turned = packed(round_up(kKeys, kRows), kRows, step), straight = packed(step, kRows, kKeys);
  int64_t of_all = shape.key_blocks() * panels, columns_of_all = shape.key_blocks() * columns;
  int64_t block_words = step * kKeys;
  int64_t own = total({of_all, of_all, columns_of_all, strips, strips, query_columns, query_columns, turned, straight, block_words, block_words,
                       block_words / kInWord, block_words / kInWord, step * wide, step, padded * wide, padded * wide});
  Tensor memory = make_tensor({workers * own});
  float* work = memory.mutable_data_ptr<float>();
  parallel_for(0, workers, 1, [&](int64_t begin, int64_t end) {
    for (int64_t worker = begin; worker < end; ++worker) {
      Room room(work + worker * own);
      float *key_panels = room.take(of_all), *value_panels = room.take(of_all), *key_columns = room.take(columns_of_all);
      float *query_strips = room.take(strips), *flow_strips = room.take(strips);
      float *queries = room.take(query_columns), *flows = room.take(query_columns);
      float *turned_strips = room.take(turned), *straight_strips = room.take(straight);
      float *scores = room.take(block_words), *weights = room.take(block_words);
      BFloat16* rounded = reinterpret_cast<BFloat16*>(room.take(block_words / kInWord));
      BFloat16* rounded_scores = reinterpret_cast<BFloat16*>(room.take(block_words / kInWord));
      float *query_sums = room.take(step * wide), *means = room.take(step);
      float *key_sums = room.take(padded * wide), *value_sums = room.take(padded * wide);
      for (int64_t item = worker * shape.items / workers; item < (worker + 1) * shape.items / workers; ++item) {
        for (int64_t unit = 0; unit < blocks; ++unit) {
          int64_t first = unit * step, rows = std::min(step, shape.queries - first);
          if (rows <= 0) break;
          pack_rows(query.rows(item, first), rows, extent, query_strips);
          pack_rows(flow.rows(item, first), rows, extent, flow_strips);
          pack_columns(query.columns(item, first), extent, rows, queries);
          pack_columns(flow.columns(item, first), extent, rows, flows);
          for (int64_t r = 0; r < rows; ++r) means[r] = dot(flow.of(item, first + r), result.of(item, first + r), extent);
          for (int64_t block = 0, start = 0; start < shape.keys; ++block, start += kKeys) {
            int64_t count = std::min(kKeys, shape.keys - start);
            if (!unit) {
              pack_columns(key.rows(item, start), count, extent, key_panels + block * panels);
              pack_columns(value.rows(item, start), count, extent, value_panels + block * panels);
              pack_columns(key.columns(item, start), extent, count, key_columns + block * columns);
            }
            multiply<false>(rows, count, extent, query_strips, key_panels + block * panels, scores, kKeys);
            multiply<false>(rows, count, extent, flow_strips, value_panels + block * panels, weights, kKeys);
            for (int64_t r = 0; r < rows; ++r) {
              float *row = scores + r * kKeys, *slopes = weights + r * kKeys;
              finish_scores(row, count, scale, mask.of(item, first + r, start), mask.column);
              float logarithm = logarithms[item * shape.queries + first + r];
              if (logarithm == kInfinity) {  // a query without a probability, which has no gradient
                std::fill_n(rounded + r * kKeys, kKeys, BFloat16(0.f));
                std::fill_n(rounded_scores + r * kKeys, kKeys, BFloat16(0.f));
                continue;
              }
              exponentials(row, count, logarithm);
              for (int64_t i = 0; i < count; i += kWidth) {
                Vector weight = load(row + i);
                store_factor(rounded + r * kKeys + i, weight);
                store_factor(rounded_scores + r * kKeys + i, weight * (load(slopes + i) - means[r]) * scale);
              }
            }
            pack_rows(Lines{rounded, 1, kKeys}, count, rows, turned_strips);
            add_up(unit > 0, count, extent, rows, turned_strips, flows, value_sums + start * wide, wide);
            pack_rows(Lines{rounded_scores, 1, kKeys}, count, rows, turned_strips);
            add_up(unit > 0, count, extent, rows, turned_strips, queries, key_sums + start * wide, wide);
            pack_rows(Lines{rounded_scores, kKeys, 1}, rows, count, straight_strips);
            add_up(block > 0, rows, extent, count, straight_strips, key_columns + block * columns, query_sums, wide);
          }
          for (int64_t r = 0; r < rows; ++r) multiply_row(query_sums + r * wide, extent, 1.f, gradients.query.of(item, first + r));
        }
        for (int64_t r = 0; r < shape.keys; ++r) {
          multiply_row(key_sums + r * wide, extent, 1.f, gradients.key.of(item, r));
          multiply_row(value_sums + r * wide, extent, 1.f, gradients.value.of(item, r));
        }
      }
    }
  });
}

// Heads whose rows' elements lie side by side.
Tensor readable(const Tensor& heads) { return heads.stride(3) == 1 ? heads : to_contiguous(heads); }

// [N, H, rows, D], which lies in memory as [N, rows, H, D].
Tensor make_heads(Sizes sizes) {
  auto extent = [&](int axis) { return std::max<int64_t>(sizes[axis], 1); };
  return make_strided(sizes, {extent(1) * extent(2) * extent(3), extent(3), extent(1) * extent(3), 1}, kBFloat16);
}

void clear(const Tensor& heads) { std::memset(heads.mutable_data_ptr(), 0, heads.numel() * sizeof(BFloat16)); }

Shape shape_of(const Tensor& query, const Tensor& key, const Tensor& value) {
  for (const Tensor* tensor : {&query, &key, &value})
    BURNISH_CHECK(tensor->scalar_type() == kBFloat16 && tensor->dim() == 4, "attention: heads of bfloat16 with four axes expected");
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
  Tensor result = make_heads(query.sizes()), logarithms = make_tensor({query.size(0), query.size(1), query.size(2)});
  if (result.numel() == 0 || !shape.keys) {
    clear(result);
    std::fill_n(logarithms.mutable_data_ptr<float>(), logarithms.numel(), 0.f);
    return {result, logarithms};
  }
  attend(shape, Heads(query), Heads(key), Heads(value), mask, static_cast<float>(scale), zeros, Heads(result),
         logarithms.mutable_data_ptr<float>());
  return {result, logarithms};
}

// (flow [N, H, M, D], and what `attention` got and gave) -> the gradients of query, key and value.
std::tuple<Tensor, Tensor, Tensor> attention_gradient(const Tensor& flow_given, const Tensor& query_given, const Tensor& key_given,
                                                      const Tensor& value_given, const Tensor& result_given, const Tensor& logarithms_given,
                                                      const std::optional<Tensor>& mask_given, double scale) {
  Shape shape = shape_of(query_given, key_given, value_given);
  Mask mask = mask_of(mask_given, query_given, key_given);
  for (const Tensor* tensor : {&flow_given, &result_given})
    BURNISH_CHECK(same(tensor->sizes(), query_given.sizes()) && tensor->scalar_type() == kBFloat16,
                  "attention_gradient: the shape and the type of the queries expected");
  BURNISH_CHECK(logarithms_given.numel() == shape.items * shape.queries && logarithms_given.scalar_type() == kFloat,
                "attention_gradient: a logarithm for each query expected");
  Tensor flow = readable(flow_given), query = readable(query_given), key = readable(key_given), value = readable(value_given);
  Tensor result = readable(result_given), logarithms = to_contiguous(logarithms_given);
  Tensor of_query = make_heads(query.sizes()), of_key = make_heads(key.sizes()), of_value = make_heads(key.sizes());
  if (of_query.numel() == 0 || of_key.numel() == 0) {
    for (const Tensor* tensor : {&of_query, &of_key, &of_value}) clear(*tensor);
    return {of_query, of_key, of_value};
  }
  attend_back(shape, Heads(flow), Heads(query), Heads(key), Heads(value), Heads(result), logarithms.const_data_ptr<float>(), mask,
              static_cast<float>(scale), {Heads(of_query), Heads(of_key), Heads(of_value)});
  return {of_query, of_key, of_value};
}

}  // namespace

BURNISH_OPERATORS(CPU) {
  operators.implement<&attention>("attention");
  operators.implement<&attention_gradient>("attention_gradient");
}

}  // namespace burnish::attention
