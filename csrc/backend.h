// What a device must be able to do: one function a stage, on raw memory. csrc/cpu and csrc/cuda implement it, csrc/ops.cpp
// checks tensors, allocates and calls. Every result is a fixed function of its inputs (docs/SPEC.md), so the two must agree byte for byte.
#pragma once

#include <cstdint>

namespace dce {

enum class Dtype : int { kFloat32, kBFloat16, kFloat16 };

struct Logits {
  const void* data;
  Dtype dtype;
  int64_t rows;
  int64_t columns;     // of the tensor, 1 <= columns < 2^31
  int64_t row_stride;  // elements; columns are adjacent
};

struct Targets {
  const void* data;  // one a row
  bool is_int64;     // else int32
  int64_t ignore_index;
};

// Columns [lo, hi) of the tensor, which are [start + lo, start + hi) of the vocabulary.
struct Shard {
  int64_t lo, hi, start;
};

// What finalize writes, one a row.
struct RowOutputs {
  float* loss;
  float* denom;
  double* state;  // two a row: inv, tgt
  int32_t* status;
};

#define DCE_BACKEND_FUNCTIONS(Context)                                                                                              \
  void row_max(const Logits&, const Shard&, float* out, Context);                                                                   \
  void denom_digits(const Logits&, const float* row_max, const Shard&, int64_t* digits, Context);                                   \
  void finalize(const int64_t* digits, const Logits&, const Targets&, const float* row_max, const RowOutputs&, Context);            \
  /* all stages over one tensor; digits: rows x 8 words, scratch */                                                                 \
  void forward(const Logits&, const Targets&, int64_t* digits, float* row_max, const RowOutputs&, Context);                         \
  /* grad: one value a row (grad_stride 1) or one for all (0); sums: for a mean, the words its count is read from, else null */     \
  void backward(const Logits&, const Targets&, const float* row_max, const double* state, const float* grad, int64_t grad_stride,   \
                const int64_t* sums, const Shard&, void* out, Context);                                                             \
  void sum_losses(const float* loss, const Targets&, int64_t rows, int64_t* sums, Context);                                         \
  void round_sums(const int64_t* sums, bool mean, float* out, Context);                                                             \
  void terms(const float* x, int64_t count, int32_t* significand, int32_t* exponent, Context);

namespace cpu {
struct Context {};
DCE_BACKEND_FUNCTIONS(Context)
}  // namespace cpu

#if defined(CUDA_KERNEL)
namespace cuda {
struct Context {
  void* stream;  // cudaStream_t; the tensors' device is current
};
DCE_BACKEND_FUNCTIONS(Context)
}  // namespace cuda
#endif

}  // namespace dce
