// The stages on the CPU: what runs on which thread. A row is one task, or, where rows are few, cut into pieces that compose by addition.
#include "../ranks.h"

#include <torch/csrc/stable/ops.h>

#include <cfenv>
#include <cstdlib>
#include <cstring>
#include <vector>

#include "loops.h"

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

// Rounding to nearest with subnormals kept, whatever the caller's thread is set to (torch.set_flush_denormal).
class DefaultRounding {
 public:
  DefaultRounding() {
    std::fegetenv(&saved_);
    std::fesetenv(FE_DFL_ENV);
  }
  ~DefaultRounding() { std::fesetenv(&saved_); }
  DefaultRounding(const DefaultRounding&) = delete;
  DefaultRounding& operator=(const DefaultRounding&) = delete;

 private:
  std::fenv_t saved_;
};

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
void digits_of(const T* x, int64_t n, float max, int64_t* digits) {
  if (is_degenerate(max)) {
    if (max < 0) digits[kColumnsWord] += loops_for(T{}).count_above(x, n, max) * kOneFault;
  } else {
    digits[kColumnsWord] += loops_for(T{}).digits_checked(x, n, row_frame(max), max, digits) * kOneFault;
  }
}

template <class T>
void finalize_one(const int64_t* digits, const Logits& logits, const Targets& targets, const RowOptions& options, float max, const RowOutputs& out, int64_t row) {
  const int64_t target = target_at(targets, row);
  const bool readable = target >= 0 && target < logits.columns && target != targets.ignore_index;
  const float x = readable ? widen(static_cast<const T*>(logits.data)[row * logits.row_stride + target]) : 0.0f;
  write_row(out, row, finalize_row(digits, max, target, x, logits.columns, targets.ignore_index, options));
}

}  // namespace

namespace {

// Rows that `ignored` marks are not read.
void row_max_of(const Logits& logits, const Targets& ignored, const Shard& shard, float* out) {
  const int64_t n = shard.hi - shard.lo;
  const Cut cut(logits.rows, n);
  std::vector<int32_t> image(logits.rows * cut.pieces, kImageOfNegInf);
  with_dtype(logits.dtype, [&](auto type) {
    using T = decltype(type);
    parallel(logits.rows * cut.pieces, cut.length, [&](int64_t i) {
      const int64_t row = i / cut.pieces, begin = i % cut.pieces * cut.length, left = n - begin;
      const T* x = static_cast<const T*>(logits.data) + row * logits.row_stride + shard.lo + begin;
      if (left > 0 && !is_ignored(ignored, row)) image[i] = loops_for(T{}).max_image(x, left < cut.length ? left : cut.length);
    });
  });
  for (int64_t i = 0; i < logits.rows * cut.pieces; ++i) {
    int32_t& first = image[i / cut.pieces * cut.pieces];
    if (image[i] > first) first = image[i];
  }
  for (int64_t row = 0; row < logits.rows; ++row) out[row] = from_order_image(image[row * cut.pieces]);
}

void digits_of_rows(const Logits& logits, const Targets& ignored, const float* row_max, const Shard& shard, int64_t* digits) {
  const int64_t n = shard.hi - shard.lo;
  const Cut cut(logits.rows, n);
  std::vector<int64_t> part(logits.rows * cut.pieces * kWords, 0);
  with_dtype(logits.dtype, [&](auto type) {
    using T = decltype(type);
    parallel(logits.rows * cut.pieces, cut.length, [&](int64_t i) {
      const int64_t row = i / cut.pieces, begin = i % cut.pieces * cut.length, left = n - begin;
      const T* x = static_cast<const T*>(logits.data) + row * logits.row_stride + shard.lo + begin;
      if (left > 0 && !is_ignored(ignored, row)) digits_of(x, left < cut.length ? left : cut.length, canonical_max(row_max[row]), &part[i * kWords]);
    });
  });
  for (int64_t row = 0; row < logits.rows; ++row) {
    int64_t* words = digits + row * kWords;
    std::memset(words, 0, kWords * sizeof(int64_t));
    if (n == 0) continue;
    for (int64_t piece = 0; piece < cut.pieces; ++piece)
      for (int i = 0; i < kWords; ++i) words[i] += part[(row * cut.pieces + piece) * kWords + i];
    carry(words);
    words[kColumnsWord] += n;
    words[kTagWord] = shard_tag(canonical_max(row_max[row]), shard.start + shard.lo, shard.start + shard.hi);
  }
}

}  // namespace

void row_max(const Logits& logits, const Shard& shard, float* out, Context) { row_max_of(logits, kNoTargets, shard, out); }

void denom_digits(const Logits& logits, const float* row_max, const Shard& shard, int64_t* digits, Context) {
  digits_of_rows(logits, kNoTargets, row_max, shard, digits);
}

void finalize(const int64_t* digits, const float* target_logits, const Targets& targets, const float* row_max, int64_t rows, int64_t columns, const RowOptions& options,
              const RowOutputs& out, Context) {
  parallel(rows, 64, [&](int64_t row) {
    const int64_t* words = digits + row * kWords;
    const int64_t size = columns < 0 ? columns_of(words) : columns;
    write_row(out, row, finalize_row(words, canonical_max(row_max[row]), target_at(targets, row), target_logits[row], size, targets.ignore_index, options));
  });
}

void order_images(const float* x, int64_t rows, int32_t* image, Context) {
  for (int64_t row = 0; row < rows; ++row) image[row] = order_image(x[row]);
}

void rank_words(const Logits& logits, const Targets& targets, const int32_t* image, const Shard& shard, const Agreement& agree, float* row_max, int64_t* owner,
                int64_t* agreement, Context) {
  with_dtype(logits.dtype, [&](auto type) {
    using T = decltype(type);
    for (int64_t row = 0; row < logits.rows; ++row) {
      const int64_t column = own_column(targets, shard, row);
      row_max[row] = from_order_image(image[row]);
      owner[row] = column < 0 ? 0 : kOneOwner + bits(widen(static_cast<const T*>(logits.data)[row * logits.row_stride + column]));
      agreement[row] = agreement_word(agree, target_at(targets, row));
    }
  });
}

void settle_targets(const int64_t* owner, const int64_t* agreement, const Targets& targets, int64_t rows, void* settled, float* target_logits, Context) {
  for (int64_t row = 0; row < rows; ++row) {
    const Settled s = settle(owner[row], agreement[row], target_at(targets, row), targets.ignore_index);
    set_target(settled, targets.is_int64, row, s.target);
    target_logits[row] = s.logit;
  }
}

namespace {

// The gradient of a stretch of a row that begins at column `begin` of the vocabulary.
template <class T>
void gradient_of(const T* x, int64_t n, int64_t begin, int64_t target, int64_t ignore_index, float max, RowScale f, T* to) {
  if (target == ignore_index) {
    std::memset(to, 0, n * sizeof(T));
  } else if (!is_finite(f.scale)) {
    for (int64_t j = 0; j < n; ++j) narrow(from_bits(kNaN32), to[j]);
  } else {
    loops_for(T{}).gradient(x, to, n, row_frame(max), f.scale);
    if (target >= begin && target - begin < n) narrow(f.target, to[target - begin]);
  }
}

// Forward, row by row while it is in the cache; and the gradient, if grad is not null.
void rows_in_one(const Logits& logits, const Targets& targets, const RowOptions& options, float* row_max_out, const RowOutputs& out, const Upstream& upstream, void* grad,
                 int64_t grad_stride) {
  const RowStates states = {out.state, options.on ? 4 : 2};
  with_dtype(logits.dtype, [&](auto type) {
    using T = decltype(type);
    parallel(logits.rows, logits.columns, [&](int64_t row) {
      int64_t words[kWords] = {0, 0, 0, 0, 0, 0, 0, 0};
      float max = -HUGE_VALF;
      const T* x = static_cast<const T*>(logits.data) + row * logits.row_stride;
      const int64_t target = target_at(targets, row);
      if (target != targets.ignore_index) {
        max = from_order_image(loops_for(T{}).max_image(x, logits.columns));
        if (!is_degenerate(max)) loops_for(T{}).digits(x, logits.columns, row_frame(max), words);
        words[kColumnsWord] = logits.columns;
        words[kTagWord] = shard_tag(max, 0, logits.columns);
      }
      row_max_out[row] = max;
      finalize_one<T>(words, logits, targets, options, max, out, row);
      if (grad == nullptr) return;
      gradient_of(x, logits.columns, 0, target, targets.ignore_index, max, row_scale_of(upstream, states, row), static_cast<T*>(grad) + row * grad_stride);
    });
  });
}

}  // namespace

namespace {

void rows_in_pieces(const Logits& logits, const Targets& targets, const RowOptions& options, const Scratch& scratch, float* row_max_out, const RowOutputs& out) {
  const Shard whole = {0, logits.columns, 0};
  row_max_of(logits, targets, whole, row_max_out);
  digits_of_rows(logits, targets, row_max_out, whole, scratch.digits);
  with_dtype(logits.dtype, [&](auto type) {
    parallel(logits.rows, 64, [&](int64_t row) {
      finalize_one<decltype(type)>(scratch.digits + row * kWords, logits, targets, options, canonical_max(row_max_out[row]), out, row);
    });
  });
}

}  // namespace

void forward(const Logits& logits, const Targets& targets, const RowOptions& options, const Scratch& scratch, float* row_max_out, const RowOutputs& out, const Total& total,
             Context context) {
  forward_backward(logits, targets, options, scratch, row_max_out, out, total, nullptr, 0, context);
}

void forward_backward(const Logits& logits, const Targets& targets, const RowOptions& options, const Scratch& scratch, float* row_max_out, const RowOutputs& out,
                      const Total& total, void* grad, int64_t grad_stride, Context context) {
  const Upstream one = upstream_one(scratch.zeros, total.divisor);
  if (Cut(logits.rows, logits.columns).pieces == 1) {
    rows_in_one(logits, targets, options, row_max_out, out, one, grad, grad_stride);
  } else {
    rows_in_pieces(logits, targets, options, scratch, row_max_out, out);
    if (grad != nullptr) backward(logits, targets, row_max_out, {out.state, options.on ? 4 : 2}, one, {0, logits.columns, 0}, grad, grad_stride, context);
  }
  if (total.out != nullptr) reduce_losses(out.loss, targets, logits.rows, scratch.zeros, total, context);
}

void backward(const Logits& logits, const Targets& targets, const float* row_max, const RowStates& states, const Upstream& upstream, const Shard& shard, void* grad, int64_t grad_stride,
              Context) {
  const int64_t n = shard.hi - shard.lo;
  const Cut cut(logits.rows, n);
  with_dtype(logits.dtype, [&](auto type) {
    using T = decltype(type);
    parallel(logits.rows * cut.pieces, cut.length, [&](int64_t i) {
      const int64_t row = i / cut.pieces, begin = i % cut.pieces * cut.length, left = n - begin;
      if (left <= 0) return;
      const T* x = static_cast<const T*>(logits.data) + row * logits.row_stride + shard.lo + begin;
      const RowScale f = row_scale_of(upstream, states, row);
      gradient_of(x, left < cut.length ? left : cut.length, shard.start + shard.lo + begin, target_at(targets, row), targets.ignore_index, row_max[row], f,
                  static_cast<T*>(grad) + row * grad_stride + begin);
    });
  });
}

void backward_unless_one(const Logits& logits, const Targets& targets, const float* row_max, const RowStates& states, const Upstream& upstream, void* grad, int64_t grad_stride,
                         Context context) {
  if (*upstream.grad != 1.0f) backward(logits, targets, row_max, states, upstream, {0, logits.columns, 0}, grad, grad_stride, context);
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
