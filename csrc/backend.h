// What a device must be able to do: one function a stage, on raw memory. csrc/cpu and csrc/cuda implement it, csrc/ops.cpp
// checks tensors, allocates and calls. Every result is a fixed function of its inputs (docs/SPEC.md), so the two must agree byte for byte.
#pragma once

#include <cstdint>

#include "logit.h"

namespace dce {

enum class Dtype : int { kFloat32, kBFloat16, kFloat16 };

struct Logits {
  const void* data;
  Dtype dtype;
  int64_t rows;
  int64_t columns;     // of the tensor, 0 <= columns < 2^31
  int64_t row_stride;  // elements; columns are adjacent
};

struct Targets {
  const void* data;  // one a row; null: none, so that no row is ignored
  bool is_int64;     // else int32
  int64_t ignore_index;
};
constexpr Targets kNoTargets = {nullptr, true, 0};

// Columns [lo, hi) of the tensor, which are [start + lo, start + hi) of the vocabulary.
struct Shard {
  int64_t lo, hi, start;
};

struct Agreement;  // ranks.h

// float32, one a class; null: no weights.
struct Weights {
  const float* data;
  int64_t size;  // classes, [0, 2^31); the weight of any other is NaN
};

// SPEC 12.
struct RowOptions {
  bool on;        // false: none, and nothing below is looked at
  double z_loss;  // lambda, >= 0
  Weights weights;
  int64_t padding;   // columns of the tensor after the valid ones: they may be read, and take no part
  double smoothing;  // epsilon, [0, 1]
  const int64_t* weight_words;  // with smoothing and weights: the exact sum of those of all classes (csrc/sums.h)
  LogitMap map;
};
constexpr RowOptions kNoOptions = {false, 0.0, {nullptr, 0}, 0, 0.0, nullptr, no_map()};
// What of these a column's gradient depends on. on: anything.
struct ColumnOptions {
  bool on;
  LogitMap map;
  const float* weights;  // with smoothing, of each class; or null
};
DCE_FN ColumnOptions columns_of(const RowOptions& o) {
  return {o.on && (o.smoothing != 0.0 || !is_identity(o.map)), o.map, o.smoothing != 0.0 ? o.weights.data : nullptr};
}

// What a mean divides by.
enum class Divisor : int {
  kOne,      // a sum
  kCount,    // the count among a batch's words (csrc/sums.h)
  kWeights,  // the sum of weights, in twelve words after those
};

// What finalize writes, one a row.
struct RowOutputs {
  float* loss;
  float* denom;
  double* state;  // two a row: inv, tgt; with options four: inv', tgt', inv, p; with smoothing five: -epsilon / V (SPEC 12) too
  int32_t* status;
  float* lse;     // with options; else null
  float* z_loss;
};
DCE_FN constexpr int64_t state_width(const RowOptions& o) { return !o.on ? 2 : o.smoothing == 0.0 ? 4 : 5; }
struct RowStates {
  const double* data;
  int64_t width;  // 2, 4 or 5 a row
};
// Statistics, one a row (SPEC 13). entropy null: none are asked for.
struct StatOutputs {
  float *lse, *logprob, *entropy, *max_abs;
  bool* hit;
};

// Words of rows beside their digits (csrc/words.h); null where they are not wanted.
struct RowWords {
  int64_t* logits;  // rows x 4: sums of logits
  int64_t* stats;   // rows x 2
  float* least;     // rows: the least logits
};
// Memory of a batch. zeros: the words of its sums (csrc/sums.h) and what else must start as 0, zero_words() in all; digits: rows x 8 words; words start as 0.
struct Scratch {
  int64_t* zeros;
  int64_t* digits;
  RowWords words;
};

// The one loss of a batch. out null: none is asked for. What a mean divides by is in the words of the batch already.
struct Total {
  Divisor divisor;
  float* out;
};

// Upstream gradient of the rows: one value a row, or one for all (stride 0); null is 1 for all.
struct Upstream {
  const float* grad;
  int64_t stride;
  const int64_t* sums;  // for a mean, the words that its divisor is read from; else null
  Divisor divisor;
  const float* lse;     // that of the row's lse, which needs states of width 4; null: none
  int64_t lse_stride;
};

#define DCE_BACKEND_FUNCTIONS(Context)                                                                                               \
  void row_max(const Logits&, const Shard&, float* out, Context);                                                                    \
  void denom_digits(const Logits&, const float* row_max, const Shard&, const LogitMap&, int64_t* digits, Context);                   \
  /* logit_words: rows x 4, with smoothing */                                                                                        \
  void logit_digits(const Logits&, const float* row_max, const Shard&, const LogitMap&, const Weights&, int64_t* logit_words,        \
                    Context);                                                                                                        \
  void stat_digits(const Logits&, const Targets&, const float* row_max, const Shard&, const LogitMap&, int64_t* stat_words,          \
                   Context);                                                                                                         \
  /* G(M, hi) - G(M, lo), salted */                                                                                                  \
  void shard_tags(const float* row_max, int64_t rows, const Shard&, uint64_t salt, int64_t* tags, Context);                          \
  /* above -inf, +inf if there is none */                                                                                            \
  void row_least(const Logits&, const Targets& ignored, const Shard&, float* out, Context);                                          \
  /* those of targets that the shard has, 0 for others */                                                                            \
  void target_logits(const Logits&, const Targets&, const Shard&, float* out, Context);                                              \
  /* columns: of the vocabulary, or -1: what word 6 says */                                                                          \
  void finalize(const int64_t* digits, const int64_t* logit_words, const float* target_logits, const Targets&, const float* row_max, \
                int64_t rows, int64_t columns, const RowOptions&, const RowOutputs&, Context);                                       \
  void finalize_stats(const int64_t* digits, const int64_t* stat_words, const float* least, const float* target_logits,              \
                      const Targets&, const float* row_max, int64_t rows, int64_t columns, const LogitMap&, const StatOutputs&,      \
                      Context);                                                                                                      \
  /* between ranks (ranks.h): images of maxima; one word, the hash of all weights; from the images' maximum, the maxima and a word   \
     a row; from summed words, the targets that all ranks have, in the dtype of targets, and their logits */                         \
  void order_images(const float* x, int64_t rows, int32_t* image, Context);                                                          \
  void hash_weights(const Weights&, int64_t* hash, Context);                                                                         \
  void rank_words(const Logits&, const Targets&, const int32_t* image, const Shard&, const Agreement&, float* row_max,               \
                  int64_t* words, Context);                                                                                          \
  void settle_targets(const int64_t* words, const Targets&, int64_t rows, void* settled, float* target_logits, Context);             \
  /* all stages over one tensor */                                                                                                   \
  void forward(const Logits&, const Targets&, const RowOptions&, const Scratch&, float* row_max, const RowOutputs&,                  \
               const StatOutputs&, const Total&, Context);                                                                           \
  /* forward, and the gradient for an upstream of 1, from one read of the logits where the device can. grad: rows at a distance of   \
     grad_stride elements */                                                                                                         \
  void forward_backward(const Logits&, const Targets&, const RowOptions&, const Scratch&, float* row_max, const RowOutputs&,         \
                        const StatOutputs&, const Total&, void* grad, int64_t grad_stride, Context);                                 \
  /* grad may be the logits themselves */                                                                                            \
  void backward(const Logits&, const Targets&, const float* row_max, const RowStates&, const Upstream&, const Shard&,                \
                const ColumnOptions&, void* grad, int64_t grad_stride, Context);                                                     \
  /* the whole gradient again, if the one upstream value is not 1; decided on the device */                                          \
  void backward_unless_one(const Logits&, const Targets&, const float* row_max, const RowStates&, const Upstream&,                   \
                           const ColumnOptions&, void* grad, int64_t grad_stride, Context);                                          \
  /* columns [lo, hi) of a gradient become +0 */                                                                                     \
  void zero_columns(void* grad, Dtype, int64_t rows, int64_t stride, int64_t lo, int64_t hi, Context);                               \
  /* how many words of Scratch must be 0 */                                                                                          \
  void zero_words(int64_t* words, Context);                                                                                          \
  /* 0 to `words` words, then the count of rows into those of a batch, which come first; then the losses, or the targets' weights,   \
     into words that are 0 but for the count */                                                                                      \
  void count_targets(const Targets&, int64_t rows, int64_t* sums, int64_t words, Context);                                           \
  void sum_losses(const float* loss, const Targets&, int64_t rows, int64_t* sums, Context);                                          \
  void sum_weights(const Weights&, const Targets&, int64_t rows, int64_t* sums, Context);                                            \
  /* sum_losses and round_sums; word kBatchWords of sums is there, and 0 */                                                          \
  void reduce_losses(const float* loss, const Targets&, int64_t rows, int64_t* sums, const Total&, Context);                         \
  void round_sums(const int64_t* sums, Divisor, float* out, Context);                                                                \
  void terms(const float* x, int64_t count, int32_t* significand, int32_t* exponent, Context);                                       \
  /* squares.h; words: kSquareWords, and one more as scratch */                                                                      \
  void square_digits(const void* data, Dtype, int64_t count, int64_t* words, Context);                                               \
  void square_norm(const int64_t* words, double* out, Context);

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
