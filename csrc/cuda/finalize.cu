// From digits to loss, denominator and row state, one row a thread (SPEC 6); and the order of the stages.
#include "fused.h"

namespace dce {
namespace cuda {
namespace {

// Of rows whose logits are all here.
template <class T>
__global__ void finalize_whole_kernel(const int64_t* digits, const int64_t* logit_words, Logits logits, Targets targets, const float* row_max, RowOptions options, RowOutputs out) {
  const int64_t row = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  if (row >= logits.rows) return;
  const float max = canonical_max(row_max[row]), x = target_logit<T>(logits, targets, row);
  int64_t words[kWords];
  for (int i = 0; i < kWords; ++i) words[i] = digits[row * kWords + i];
  write_row(out, options, row, finalize_row(words, row_words(logit_words, row), max, target_at(targets, row), x, logits.columns, targets.ignore_index, options));
}

__global__ void finalize_kernel(const int64_t* digits, const int64_t* logit_words, const float* target_logits, Targets targets, const float* row_max, int64_t rows, int64_t columns,
                                RowOptions options, RowOutputs out) {
  const int64_t row = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  if (row >= rows) return;
  const int64_t* words = digits + row * kWords;
  const int64_t size = columns < 0 ? columns_of(words) : columns;
  const float max = canonical_max(row_max[row]);
  write_row(out, options, row, finalize_row(words, row_words(logit_words, row), max, target_at(targets, row), target_logits[row], size, targets.ignore_index, options));
}

__global__ void finalize_stats_kernel(const int64_t* digits, const int64_t* stat_words, const float* least, const float* target_logits, Targets targets, const float* row_max,
                                      int64_t rows, int64_t columns, LogitMap map, StatOutputs out) {
  const int64_t row = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  if (row >= rows) return;
  write_stats(out, row, digits + row * kWords, stat_words + row * kStatWords, canonical_max(row_max[row]), least[row], target_at(targets, row), target_logits[row], columns,
              targets.ignore_index, map);
}
// Of rows whose logits are all here.
template <class T>
__global__ void finalize_whole_stats_kernel(const int64_t* digits, RowWords words, Logits logits, Targets targets, const float* row_max, LogitMap map, StatOutputs out) {
  const int64_t row = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  if (row >= logits.rows) return;
  write_stats(out, row, digits + row * kWords, words.stats + row * kStatWords, canonical_max(row_max[row]), words.least[row], target_at(targets, row),
              target_logit<T>(logits, targets, row), logits.columns, targets.ignore_index, map);
}

constexpr int kThreads = 64;
unsigned blocks_of(int64_t rows) { return static_cast<unsigned>((rows + kThreads - 1) / kThreads); }

void finalize_whole(const Scratch& scratch, const Logits& logits, const Targets& targets, const float* row_max, const RowOptions& options, const RowOutputs& out, Context context) {
  with_dtype(logits.dtype, [&](auto type) {
    finalize_whole_kernel<decltype(type)>
        <<<blocks_of(logits.rows), kThreads, 0, stream_of(context)>>>(scratch.digits, scratch.words.logits, logits, targets, row_max, options, out);
  });
  check(cudaGetLastError(), "finalize");
}

}  // namespace

void finalize(const int64_t* digits, const int64_t* logit_words, const float* target_logits, const Targets& targets, const float* row_max, int64_t rows, int64_t columns,
              const RowOptions& options, const RowOutputs& out, Context context) {
  finalize_kernel<<<blocks_of(rows), kThreads, 0, stream_of(context)>>>(digits, logit_words, target_logits, targets, row_max, rows, columns, options, out);
  check(cudaGetLastError(), "finalize");
}

void finalize_stats(const int64_t* digits, const int64_t* stat_words, const float* least, const float* target_logits, const Targets& targets, const float* row_max, int64_t rows,
                    int64_t columns, const LogitMap& map, const StatOutputs& out, Context context) {
  finalize_stats_kernel<<<blocks_of(rows), kThreads, 0, stream_of(context)>>>(digits, stat_words, least, target_logits, targets, row_max, rows, columns, map, out);
  check(cudaGetLastError(), "finalize_stats");
}

namespace {

// Words of rows that kernels add to.
void clear(int64_t* words, int64_t count, Context context) { check(cudaMemsetAsync(words, 0, count * sizeof(int64_t), stream_of(context)), "cudaMemsetAsync"); }

// forward, stage by stage, but for the statistics' results.
void by_stages(const Logits& logits, const Targets& targets, const RowOptions& options, const Scratch& scratch, float* row_max, const RowOutputs& out, const Total& total,
               Context context) {
  const Shard whole = {0, logits.columns, 0};
  row_max_of(logits, targets, whole, row_max, context);
  accumulate(logits, targets, row_max, whole, options.map, scratch.digits, false, context);
  if (options.smoothing != 0.0) {
    clear(scratch.words.logits, logits.rows * kLogitWords, context);
    sum_logits(logits, targets, row_max, whole, options.map, options.weights, scratch.words.logits, context);
  }
  if (scratch.words.stats != nullptr) {
    sum_stats(logits, targets, row_max, whole, options.map, scratch.words.stats, context);
    row_least(logits, targets, whole, scratch.words.least, context);
  }
  finalize_whole(scratch, logits, targets, row_max, options, out, context);
  if (total.out != nullptr) reduce_losses(out.loss, targets, logits.rows, scratch.zeros, total, context);
}

}  // namespace

void forward(const Logits& logits, const Targets& targets, const RowOptions& options, const Scratch& scratch, float* row_max, const RowOutputs& out, const StatOutputs& stats,
             const Total& total, Context context) {
  forward_backward(logits, targets, options, scratch, row_max, out, stats, total, nullptr, 0, context);
}

void forward_backward(const Logits& logits, const Targets& targets, const RowOptions& options, const Scratch& scratch, float* row_max, const RowOutputs& out,
                      const StatOutputs& stats, const Total& total, void* grad, int64_t grad_stride, Context context) {
  if (scratch.words.stats != nullptr) clear(scratch.words.stats, logits.rows * kStatWords, context);
  if (!fused(logits, targets, options, scratch, row_max, out, total, grad, grad_stride, context)) {
    by_stages(logits, targets, options, scratch, row_max, out, total, context);
    if (grad != nullptr)
      backward(logits, targets, row_max, {out.state, state_width(options)}, upstream_one(scratch.zeros, total.divisor), {0, logits.columns, 0}, columns_of(options), grad, grad_stride,
               context);
  }
  if (stats.entropy == nullptr) return;
  with_dtype(logits.dtype, [&](auto type) {
    finalize_whole_stats_kernel<decltype(type)>
        <<<blocks_of(logits.rows), kThreads, 0, stream_of(context)>>>(scratch.digits, scratch.words, logits, targets, row_max, options.map, stats);
  });
  check(cudaGetLastError(), "finalize_stats");
}

void zero_columns(void* grad, Dtype dtype, int64_t rows, int64_t stride, int64_t lo, int64_t hi, Context context) {
  const int64_t bytes = element_bytes(dtype);
  check(cudaMemset2DAsync(static_cast<unsigned char*>(grad) + lo * bytes, stride * bytes, 0, (hi - lo) * bytes, rows, stream_of(context)), "cudaMemset2DAsync");
}

}  // namespace cuda
}  // namespace dce
