// From digits to loss, denominator and row state, one row a thread (SPEC 6); and the order of the stages.
#include "fused.h"

namespace dce {
namespace cuda {
namespace {

// Of rows whose logits are all here.
template <class T>
__global__ void finalize_whole_kernel(const int64_t* digits, Logits logits, Targets targets, const float* row_max, RowOptions options, RowOutputs out) {
  const int64_t row = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  if (row >= logits.rows) return;
  const int64_t target = target_at(targets, row);
  const bool readable = target >= 0 && target < logits.columns && target != targets.ignore_index;
  const float x = readable ? widen(static_cast<const T*>(logits.data)[row * logits.row_stride + target]) : 0.0f;
  const float max = canonical_max(row_max[row]);
  int64_t words[kWords];
  for (int i = 0; i < kWords; ++i) words[i] = digits[row * kWords + i];
  write_row(out, row, finalize_row(words, max, target, x, logits.columns, targets.ignore_index, options));
}

__global__ void finalize_kernel(const int64_t* digits, const float* target_logits, Targets targets, const float* row_max, int64_t rows, int64_t columns, RowOptions options,
                                RowOutputs out) {
  const int64_t row = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  if (row >= rows) return;
  const int64_t* words = digits + row * kWords;
  const int64_t size = columns < 0 ? columns_of(words) : columns;
  write_row(out, row, finalize_row(words, canonical_max(row_max[row]), target_at(targets, row), target_logits[row], size, targets.ignore_index, options));
}

constexpr int kThreads = 64;
unsigned blocks_of(int64_t rows) { return static_cast<unsigned>((rows + kThreads - 1) / kThreads); }

void finalize_whole(const int64_t* digits, const Logits& logits, const Targets& targets, const float* row_max, const RowOptions& options, const RowOutputs& out,
                    Context context) {
  with_dtype(logits.dtype, [&](auto type) {
    finalize_whole_kernel<decltype(type)><<<blocks_of(logits.rows), kThreads, 0, stream_of(context)>>>(digits, logits, targets, row_max, options, out);
  });
  check(cudaGetLastError(), "finalize");
}

}  // namespace

void finalize(const int64_t* digits, const float* target_logits, const Targets& targets, const float* row_max, int64_t rows, int64_t columns, const RowOptions& options,
              const RowOutputs& out, Context context) {
  finalize_kernel<<<blocks_of(rows), kThreads, 0, stream_of(context)>>>(digits, target_logits, targets, row_max, rows, columns, options, out);
  check(cudaGetLastError(), "finalize");
}

namespace {

// forward, stage by stage.
void by_stages(const Logits& logits, const Targets& targets, const RowOptions& options, const Scratch& scratch, float* row_max, const RowOutputs& out, const Total& total,
               Context context) {
  const Shard whole = {0, logits.columns, 0};
  row_max_of(logits, targets, whole, row_max, context);
  accumulate(logits, targets, row_max, whole, scratch.digits, false, context);
  finalize_whole(scratch.digits, logits, targets, row_max, options, out, context);
  if (total.out != nullptr) reduce_losses(out.loss, targets, logits.rows, scratch.zeros, total, context);
}

}  // namespace

void forward(const Logits& logits, const Targets& targets, const RowOptions& options, const Scratch& scratch, float* row_max, const RowOutputs& out, const Total& total,
             Context context) {
  if (!fused(logits, targets, options, scratch, row_max, out, total, nullptr, 0, context)) by_stages(logits, targets, options, scratch, row_max, out, total, context);
}

void forward_backward(const Logits& logits, const Targets& targets, const RowOptions& options, const Scratch& scratch, float* row_max, const RowOutputs& out, const Total& total,
                      void* grad, int64_t grad_stride, Context context) {
  if (fused(logits, targets, options, scratch, row_max, out, total, grad, grad_stride, context)) return;
  forward(logits, targets, options, scratch, row_max, out, total, context);
  backward(logits, targets, row_max, {out.state, options.on ? 4 : 2}, upstream_one(scratch.zeros, total.divisor), {0, logits.columns, 0}, grad, grad_stride, context);
}

void zero_columns(void* grad, Dtype dtype, int64_t rows, int64_t stride, int64_t lo, int64_t hi, Context context) {
  const int64_t bytes = element_bytes(dtype);
  check(cudaMemset2DAsync(static_cast<unsigned char*>(grad) + lo * bytes, stride * bytes, 0, (hi - lo) * bytes, rows, stream_of(context)), "cudaMemset2DAsync");
}

}  // namespace cuda
}  // namespace dce
