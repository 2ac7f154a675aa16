// Which kernel, of those that fused.cuh describes; each dtype is a file of its own, for they take long to compile.
#include "fused.h"
#include "layout.cuh"

namespace dce {
namespace cuda {

void zero_words(int64_t* words, Context) { *words = kMailAt + static_cast<int64_t>(processors()) * kMailboxes * (sizeof(Mail<true>) / sizeof(int64_t)); }

bool fused(const Logits& logits, const Targets& targets, const RowOptions& options, const Scratch& scratch, float* row_max, const RowOutputs& out, const Total& total, void* grad,
           int64_t grad_stride, Context context) {
  if (options.smoothing != 0.0 && options.weights.data != nullptr) return false;  // a weight for every logit would have to be read with it
  bool done = false;
  with_dtype(logits.dtype, [&](auto type) { done = fused_of<decltype(type)>(logits, targets, options, scratch, row_max, out, total, grad, grad_stride, context); });
  return done;
}

}  // namespace cuda
}  // namespace dce
