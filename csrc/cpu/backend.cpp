// The stages on the CPU: what runs on which thread. A row is one task, or, where rows are few, cut into pieces that compose by addition.
#include "../ranks.h"

#include <torch/csrc/stable/ops.h>

#include <cstdlib>
#include <cstring>
#include <type_traits>
#include <vector>

#include "loops.h"
#include "rounding.h"

namespace dce {
namespace cpu {
namespace {

const LoopTable* choose_loops() {
#if defined(__x86_64__) && defined(__GNUC__)
  __builtin_cpu_init();
  // DCE_CPU lets the tests reach every path that this processor has; all give the same bytes
  const char* cap = std::getenv("DCE_CPU");
  const bool any = cap == nullptr || *cap == '\0', only_portable = !any && std::strcmp(cap, "portable") == 0;
  const bool only_avx2 = !any && std::strcmp(cap, "avx2") == 0;
  if (!only_portable && !only_avx2 && avx512_loops() && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
      __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl"))
    return avx512_loops();
  if (!only_portable && avx2_loops() && __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c")) return avx2_loops();
#endif
  return portable_loops();
}
const LoopTable& loops() {
  static const LoopTable* const chosen = choose_loops();
  return *chosen;
}
const RowLoops<float>& loops_for(float) { return loops().f32; }
const RowLoops<Bf16>& loops_for(Bf16) { return loops().bf16; }
const RowLoops<Fp16>& loops_for(Fp16) { return loops().fp16; }

constexpr int64_t kGrain = 16384;  // columns a thread takes at least

template <class Body>
void parallel(int64_t tasks, int64_t columns_a_task, const Body& body) {
  const int64_t grain = columns_a_task >= kGrain ? 1 : kGrain / (columns_a_task > 0 ? columns_a_task : 1);
  torch::stable::parallel_for(0, tasks, grain, [&](int64_t begin, int64_t end) {
    const DefaultRounding rounding;
    for (int64_t i = begin; i < end; ++i) body(i);
  });
}

// Each row in `pieces` equal cuts.
struct Cut {
  int64_t pieces, length;
  Cut(int64_t rows, int64_t columns) {
    const int64_t threads = torch::stable::get_num_threads();
    pieces = rows >= 4 * threads ? 1 : 4 * threads;
    const int64_t most = columns / kGrain + 1;
    if (pieces > most) pieces = most;
    length = (columns + pieces - 1) / pieces;
  }
};

template <class F>
void with_dtype(Dtype dtype, const F& f) {
  switch (dtype) {
    case Dtype::kFloat32: return f(float{});
    case Dtype::kBFloat16: return f(Bf16{});
    case Dtype::kFloat16: return f(Fp16{});
  }
}

template <class T>
void digits_of(const T* x, int64_t n, float max, const LogitMap& map, int64_t* digits) {
  if (is_degenerate(max, map)) {
    if (max < 0) digits[kColumnsWord] += loops_for(T{}).count_above(x, n, max) * kOneFault;
  } else {
    digits[kColumnsWord] += loops_for(T{}).digits_checked(x, n, row_frame(mapped(map, max)), map, max, digits) * kOneFault;
  }
}

// The logit of a row's target, 0 if the tensor has none.
template <class T>
float target_logit(const Logits& logits, const Targets& targets, int64_t row) {
  const int64_t target = target_at(targets, row);
  const bool readable = target >= 0 && target < logits.columns && target != targets.ignore_index;
  return readable ? widen(static_cast<const T*>(logits.data)[row * logits.row_stride + target]) : 0.0f;
}

template <class T>
void finalize_one(const int64_t* digits, const int64_t* logit_words, const Logits& logits, const Targets& targets, const RowOptions& options, float max, const RowOutputs& out,
                  int64_t row) {
  const float x = target_logit<T>(logits, targets, row);
  write_row(out, options, row, finalize_row(digits, logit_words, max, target_at(targets, row), x, logits.columns, targets.ignore_index, options));
}

// Calls body(x, n, row, begin, words) for each piece of each row that is not ignored: n columns at x, the first of which is column `begin` of the tensor, and
// kCount words of its own, 0 at first. Then done(words, row) with the sum of the pieces' words.
template <int kCount, class Body, class Done>
void by_pieces(const Logits& logits, const Targets& ignored, const Shard& shard, const Body& body, const Done& done) {
  const int64_t n = shard.hi - shard.lo;
  const Cut cut(logits.rows, n);
  std::vector<int64_t> part(logits.rows * cut.pieces * kCount, 0);
  with_dtype(logits.dtype, [&](auto type) {
    using T = decltype(type);
    parallel(logits.rows * cut.pieces, cut.length, [&](int64_t i) {
      const int64_t row = i / cut.pieces, begin = shard.lo + i % cut.pieces * cut.length, left = shard.hi - begin;
      const T* x = static_cast<const T*>(logits.data) + row * logits.row_stride + begin;
      if (left > 0 && !is_ignored(ignored, row)) body(x, left < cut.length ? left : cut.length, row, begin, &part[i * kCount]);
    });
  });
  for (int64_t row = 0; row < logits.rows; ++row) {
    int64_t words[kCount] = {};
    for (int64_t piece = 0; piece < cut.pieces; ++piece)
      for (int i = 0; i < kCount; ++i) words[i] = wrapping_add(words[i], part[(row * cut.pieces + piece) * kCount + i]);
    done(words, row);
  }
}

}  // namespace

namespace {

// The greatest of the pieces' order images, as image(loops, x, n) gives them; rows that `ignored` marks are not read. Then done(image, row).
template <class Image, class Done>
void greatest_of(const Logits& logits, const Targets& ignored, const Shard& shard, const Image& image_of, const Done& done) {
  const int64_t n = shard.hi - shard.lo;
  const Cut cut(logits.rows, n);
  std::vector<int32_t> image(logits.rows * cut.pieces, kImageOfNegInf);
  with_dtype(logits.dtype, [&](auto type) {
    using T = decltype(type);
    parallel(logits.rows * cut.pieces, cut.length, [&](int64_t i) {
      const int64_t row = i / cut.pieces, begin = i % cut.pieces * cut.length, left = n - begin;
      const T* x = static_cast<const T*>(logits.data) + row * logits.row_stride + shard.lo + begin;
      if (left > 0 && !is_ignored(ignored, row)) image[i] = image_of(loops_for(T{}), x, left < cut.length ? left : cut.length);
    });
  });
  for (int64_t row = 0; row < logits.rows; ++row) {
    int32_t greatest = kImageOfNegInf;
    for (int64_t piece = 0; piece < cut.pieces; ++piece) greatest = image[row * cut.pieces + piece] > greatest ? image[row * cut.pieces + piece] : greatest;
    done(greatest, row);
  }
}

void row_max_of(const Logits& logits, const Targets& ignored, const Shard& shard, float* out) {
  greatest_of(
      logits, ignored, shard, [](const auto& loops, const auto* x, int64_t n) { return loops.max_image(x, n); }, [&](int32_t image, int64_t row) { out[row] = from_order_image(image); });
}

void digits_of_rows(const Logits& logits, const Targets& ignored, const float* row_max, const Shard& shard, const LogitMap& map, int64_t* digits) {
  const int64_t n = shard.hi - shard.lo;
  by_pieces<kWords>(
      logits, ignored, shard,
      [&](const auto* x, int64_t count, int64_t row, int64_t, int64_t* words) { digits_of(x, count, canonical_max(row_max[row]), map, words); },
      [&](int64_t* words, int64_t row) {
        if (n > 0) {
          carry(words);
          words[kColumnsWord] += n;
          words[kTagWord] = shard_tag(canonical_max(row_max[row]), shard.start + shard.lo, shard.start + shard.hi, map_salt(map));
        }
        std::memcpy(digits + row * kWords, words, kWords * sizeof(int64_t));
      });
}

void logit_digits_of(const Logits& logits, const Targets& ignored, const float* row_max, const Shard& shard, const LogitMap& map, const Weights& weights, int64_t* logit_words) {
  by_pieces<kLogitWords>(
      logits, ignored, shard,
      [&](const auto* x, int64_t n, int64_t row, int64_t begin, int64_t* words) {
        using T = std::remove_const_t<std::remove_pointer_t<decltype(x)>>;
        const float max = canonical_max(row_max[row]);
        if (is_degenerate(max, map)) return;
        loops_for(T{}).logit_sum(x, n, row_shift(mapped(map, max)), map, max, weights.data != nullptr ? weights.data + shard.start + begin : nullptr, words);
      },
      [&](int64_t* words, int64_t row) {
        canonical_logit_words(words);
        std::memcpy(logit_words + row * kLogitWords, words, kLogitWords * sizeof(int64_t));
      });
}

}  // namespace

void row_max(const Logits& logits, const Shard& shard, float* out, Context) { row_max_of(logits, kNoTargets, shard, out); }

void denom_digits(const Logits& logits, const float* row_max, const Shard& shard, const LogitMap& map, int64_t* digits, Context) {
  digits_of_rows(logits, kNoTargets, row_max, shard, map, digits);
}

void logit_digits(const Logits& logits, const float* row_max, const Shard& shard, const LogitMap& map, const Weights& weights, int64_t* logit_words, Context) {
  logit_digits_of(logits, kNoTargets, row_max, shard, map, weights, logit_words);
}

void row_least(const Logits& logits, const Targets& ignored, const Shard& shard, float* out, Context) {
  greatest_of(
      logits, ignored, shard, [](const auto& loops, const auto* x, int64_t n) { return order_image(-loops.least(x, n)); },
      [&](int32_t image, int64_t row) { out[row] = canonical_max(-from_order_image(image)); });
}

void stat_digits(const Logits& logits, const Targets& targets, const float* row_max, const Shard& shard, const LogitMap& map, int64_t* stat_words, Context) {
  by_pieces<kStatWords>(
      logits, targets, shard,
      [&](const auto* x, int64_t n, int64_t row, int64_t begin, int64_t* words) {
        using T = std::remove_const_t<std::remove_pointer_t<decltype(x)>>;
        const float max = canonical_max(row_max[row]);
        if (is_degenerate(max, map)) return;
        const int64_t before = target_at(targets, row) - shard.start - begin;
        const bool in_range = target_at(targets, row) >= 0;
        loops_for(T{}).stats(x, n, row_frame(mapped(map, max)), map, max, !in_range || before < 0 ? 0 : before < n ? before : n, words);
      },
      [&](int64_t* words, int64_t row) {
        canonical_stat_words(words);
        std::memcpy(stat_words + row * kStatWords, words, kStatWords * sizeof(int64_t));
      });
}

void shard_tags(const float* row_max, int64_t rows, const Shard& shard, uint64_t salt, int64_t* tags, Context) {
  for (int64_t row = 0; row < rows; ++row) tags[row] = shard_tag(canonical_max(row_max[row]), shard.start + shard.lo, shard.start + shard.hi, salt);
}

void target_logits(const Logits& logits, const Targets& targets, const Shard& shard, float* out, Context) {
  with_dtype(logits.dtype, [&](auto type) {
    using T = decltype(type);
    for (int64_t row = 0; row < logits.rows; ++row) {
      const int64_t column = own_column(targets, shard, row);
      out[row] = column < 0 ? 0.0f : widen(static_cast<const T*>(logits.data)[row * logits.row_stride + column]);
    }
  });
}

void finalize(const int64_t* digits, const int64_t* logit_words, const float* target_logits, const Targets& targets, const float* row_max, int64_t rows, int64_t columns,
              const RowOptions& options, const RowOutputs& out, Context) {
  parallel(rows, 64, [&](int64_t row) {
    const int64_t* words = digits + row * kWords;
    const int64_t size = columns < 0 ? columns_of(words) : columns;
    write_row(out, options, row,
              finalize_row(words, row_words(logit_words, row), canonical_max(row_max[row]), target_at(targets, row), target_logits[row], size, targets.ignore_index, options));
  });
}

void finalize_stats(const int64_t* digits, const int64_t* stat_words, const float* least, const float* target_logits, const Targets& targets, const float* row_max, int64_t rows,
                    int64_t columns, const LogitMap& map, const StatOutputs& out, Context) {
  parallel(rows, 64, [&](int64_t row) {
    write_stats(out, row, digits + row * kWords, stat_words + row * kStatWords, canonical_max(row_max[row]), least[row], target_at(targets, row), target_logits[row], columns,
                targets.ignore_index, map);
  });
}

void order_images(const float* x, int64_t rows, int32_t* image, Context) {
  for (int64_t row = 0; row < rows; ++row) image[row] = order_image(x[row]);
}

void hash_weights(const Weights& weights, int64_t* hash, Context) {
  uint64_t sum = 0;
  for (int64_t v = 0; v < weights.size; ++v) sum += weight_hash(v, weights.data[v]);
  *hash = static_cast<int64_t>(sum);
}

void rank_words(const Logits& logits, const Targets& targets, const int32_t* image, const Shard& shard, const Agreement& agree, float* row_max, int64_t* words,
                Context) {
  with_dtype(logits.dtype, [&](auto type) {
    using T = decltype(type);
    for (int64_t row = 0; row < logits.rows; ++row) {
      const int64_t column = own_column(targets, shard, row);
      row_max[row] = from_order_image(image[row]);
      const float logit = column < 0 ? 0.0f : widen(static_cast<const T*>(logits.data)[row * logits.row_stride + column]);
      words[row] = rank_word(agree, target_at(targets, row), column >= 0, logit);
    }
  });
}

void settle_targets(const int64_t* words, const Targets& targets, int64_t rows, void* settled, float* target_logits, Context) {
  for (int64_t row = 0; row < rows; ++row) {
    const Settled s = settle(words[row], target_at(targets, row), targets.ignore_index);
    set_target(settled, targets.is_int64, row, s.target);
    target_logits[row] = s.logit;
  }
}

namespace {

// The gradient of a stretch of a row that begins at column `begin` of the vocabulary.
template <class T>
void gradient_of(const T* x, int64_t n, int64_t begin, int64_t target, int64_t ignore_index, float max, RowScale f, const ColumnOptions& columns, T* to) {
  if (target == ignore_index) {
    std::memset(to, 0, n * sizeof(T));
  } else if (!is_finite(f)) {
    for (int64_t j = 0; j < n; ++j) narrow(from_bits(kNaN32), to[j]);
  } else {
    if (columns.on) {
      loops_for(T{}).gradient_with(x, to, n, row_frame(mapped(columns.map, max)), f, columns.map, columns.weights != nullptr ? columns.weights + begin : nullptr);
    } else {
      loops_for(T{}).gradient(x, to, n, row_frame(max), f.scale);
    }
    if (target >= begin && target - begin < n) narrow(f.target, to[target - begin]);
  }
}

// Forward, row by row while it is in the cache; and the gradient, if grad is not null; the digits are kept if there is where.
void rows_in_one(const Logits& logits, const Targets& targets, const RowOptions& options, int64_t* scratch_digits, float* row_max_out, const RowOutputs& out, const Upstream& upstream,
                 void* grad, int64_t grad_stride) {
  const RowStates states = {out.state, state_width(options)};
  const ColumnOptions columns = columns_of(options);
  with_dtype(logits.dtype, [&](auto type) {
    using T = decltype(type);
    parallel(logits.rows, logits.columns, [&](int64_t row) {
      int64_t words[kWords] = {0, 0, 0, 0, 0, 0, 0, 0}, logit_words[kLogitWords] = {0, 0, 0, 0};
      float max = -HUGE_VALF;
      const T* x = static_cast<const T*>(logits.data) + row * logits.row_stride;
      const int64_t target = target_at(targets, row);
      if (target != targets.ignore_index) {
        max = from_order_image(loops_for(T{}).max_image(x, logits.columns));
        if (!is_degenerate(max, options.map)) {
          const RowFrame frame = row_frame(mapped(options.map, max));
          loops_for(T{}).digits(x, logits.columns, frame, options.map, words);
          if (options.smoothing != 0.0) loops_for(T{}).logit_sum(x, logits.columns, frame.shift, options.map, max, options.weights.data, logit_words);
        }
        words[kColumnsWord] = logits.columns;
        words[kTagWord] = shard_tag(max, 0, logits.columns, map_salt(options.map));
      }
      row_max_out[row] = max;
      finalize_one<T>(words, logit_words, logits, targets, options, max, out, row);
      if (scratch_digits != nullptr) std::memcpy(scratch_digits + row * kWords, words, sizeof(words));
      if (grad == nullptr) return;
      gradient_of(x, logits.columns, 0, target, targets.ignore_index, max, row_scale_of(upstream, states, row), columns, static_cast<T*>(grad) + row * grad_stride);
    });
  });
}

}  // namespace

namespace {

void rows_in_pieces(const Logits& logits, const Targets& targets, const RowOptions& options, const Scratch& scratch, float* row_max_out, const RowOutputs& out) {
  const Shard whole = {0, logits.columns, 0};
  row_max_of(logits, targets, whole, row_max_out);
  digits_of_rows(logits, targets, row_max_out, whole, options.map, scratch.digits);
  if (options.smoothing != 0.0) logit_digits_of(logits, targets, row_max_out, whole, options.map, options.weights, scratch.words.logits);
  with_dtype(logits.dtype, [&](auto type) {
    parallel(logits.rows, 64, [&](int64_t row) {
      finalize_one<decltype(type)>(scratch.digits + row * kWords, row_words(scratch.words.logits, row), logits, targets, options, canonical_max(row_max_out[row]), out, row);
    });
  });
}

}  // namespace

void forward(const Logits& logits, const Targets& targets, const RowOptions& options, const Scratch& scratch, float* row_max_out, const RowOutputs& out, const StatOutputs& stats,
             const Total& total, Context context) {
  forward_backward(logits, targets, options, scratch, row_max_out, out, stats, total, nullptr, 0, context);
}

void forward_backward(const Logits& logits, const Targets& targets, const RowOptions& options, const Scratch& scratch, float* row_max_out, const RowOutputs& out,
                      const StatOutputs& stats, const Total& total, void* grad, int64_t grad_stride, Context context) {
  const Upstream one = upstream_one(scratch.zeros, total.divisor);
  const Shard whole = {0, logits.columns, 0};
  const bool has_stats = stats.entropy != nullptr;
  if (Cut(logits.rows, logits.columns).pieces == 1) {
    rows_in_one(logits, targets, options, has_stats ? scratch.digits : nullptr, row_max_out, out, one, grad, grad_stride);
  } else {
    rows_in_pieces(logits, targets, options, scratch, row_max_out, out);
    if (grad != nullptr) backward(logits, targets, row_max_out, {out.state, state_width(options)}, one, whole, columns_of(options), grad, grad_stride, context);
  }
  if (has_stats) {
    std::vector<float> least(logits.rows), of_targets(logits.rows);
    row_least(logits, targets, whole, least.data(), context);
    stat_digits(logits, targets, row_max_out, whole, options.map, scratch.words.stats, context);
    target_logits(logits, targets, whole, of_targets.data(), context);
    finalize_stats(scratch.digits, scratch.words.stats, least.data(), of_targets.data(), targets, row_max_out, logits.rows, logits.columns, options.map, stats, context);
  }
  if (total.out != nullptr) reduce_losses(out.loss, targets, logits.rows, scratch.zeros, total, context);
}

void backward(const Logits& logits, const Targets& targets, const float* row_max, const RowStates& states, const Upstream& upstream, const Shard& shard, const ColumnOptions& columns,
              void* grad, int64_t grad_stride, Context) {
  const int64_t n = shard.hi - shard.lo;
  const Cut cut(logits.rows, n);
  with_dtype(logits.dtype, [&](auto type) {
    using T = decltype(type);
    parallel(logits.rows * cut.pieces, cut.length, [&](int64_t i) {
      const int64_t row = i / cut.pieces, begin = i % cut.pieces * cut.length, left = n - begin;
      if (left <= 0) return;
      const T* x = static_cast<const T*>(logits.data) + row * logits.row_stride + shard.lo + begin;
      const RowScale f = row_scale_of(upstream, states, row);
      gradient_of(x, left < cut.length ? left : cut.length, shard.start + shard.lo + begin, target_at(targets, row), targets.ignore_index, row_max[row], f, columns,
                  static_cast<T*>(grad) + row * grad_stride + begin);
    });
  });
}

void backward_unless_one(const Logits& logits, const Targets& targets, const float* row_max, const RowStates& states, const Upstream& upstream, const ColumnOptions& columns, void* grad,
                         int64_t grad_stride, Context context) {
  if (*upstream.grad != 1.0f) backward(logits, targets, row_max, states, upstream, {0, logits.columns, 0}, columns, grad, grad_stride, context);
}

void zero_columns(void* grad, Dtype dtype, int64_t rows, int64_t stride, int64_t lo, int64_t hi, Context) {
  with_dtype(dtype, [&](auto type) {
    using T = decltype(type);
    for (int64_t row = 0; row < rows; ++row) std::memset(static_cast<T*>(grad) + row * stride + lo, 0, (hi - lo) * sizeof(T));
  });
}

void zero_words(int64_t* words, Context) { *words = kBatchWords + 1; }

void count_targets(const Targets& targets, int64_t rows, int64_t* sums, int64_t words, Context) {
  std::memset(sums, 0, words * sizeof(int64_t));
  for (int64_t row = 0; row < rows; ++row) sums[kCountWord] += !is_ignored(targets, row);
}

void sum_losses(const float* loss, const Targets& targets, int64_t rows, int64_t* sums, Context) {
  for (int64_t row = 0; row < rows; ++row)
    if (!is_ignored(targets, row)) add_loss(loss[row], sums);
}

void sum_weights(const Weights& weights, const Targets& targets, int64_t rows, int64_t* sums, Context) {
  for (int64_t row = 0; row < rows; ++row)
    if (!is_ignored(targets, row)) add_loss(weight_of(weights, target_at(targets, row)), sums);
}

void round_sums(const int64_t* sums, Divisor divisor, float* out, Context) {
  const DefaultRounding rounding;
  *out = round_sum(sums, divisor);
}

void reduce_losses(const float* loss, const Targets& targets, int64_t rows, int64_t* sums, const Total& total, Context context) {
  sum_losses(loss, targets, rows, sums, context);
  round_sums(sums, total.divisor, total.out, context);
}

void terms(const float* x, int64_t count, int32_t* significand, int32_t* exponent, Context) {
  parallel(count, 1, [&](int64_t i) {
    const Term e = term(x[i]);
    significand[i] = static_cast<int32_t>(term_significand(e));
    exponent[i] = term_exponent(e);
  });
}

}  // namespace cpu
}  // namespace dce
