// Sums of logits and statistics of a shard of each row, relative to a given maximum (SPEC 12 and 13).
#include "words.cuh"

#include "launch.h"

namespace dce {
namespace cuda {
namespace {

template <class T>
__global__ void __launch_bounds__(kWordsPolicy.threads, kWordsPolicy.resident)
    logit_kernel(Logits logits, Targets ignored, const float* row_max, Shard shard, LogitMap map, Weights weights, Pieces pieces, int64_t* words) {
  const Piece piece(pieces, shard.hi - shard.lo);
  if (is_ignored(ignored, piece.row)) return;
  const float max = canonical_max(row_max[piece.row]);
  if (is_degenerate(max, map)) return;
  const int64_t first = shard.lo + piece.begin;
  const RowVectors<T> row(static_cast<const T*>(logits.data) + piece.row * logits.row_stride + first, piece.length);
  logit_stretch<T, kWordsPolicy.threads, kWordsPolicy.unroll>(row, max, map, weights.data != nullptr ? weights.data + shard.start + first : nullptr, words + piece.row * kLogitWords);
}

template <class T>
__global__ void __launch_bounds__(kWordsPolicy.threads, kWordsPolicy.resident)
    stat_kernel(Logits logits, Targets targets, const float* row_max, Shard shard, LogitMap map, Pieces pieces, int64_t* words) {
  const Piece piece(pieces, shard.hi - shard.lo);
  if (is_ignored(targets, piece.row)) return;
  const float max = canonical_max(row_max[piece.row]);
  if (is_degenerate(max, map)) return;
  const int64_t first = shard.lo + piece.begin, target = target_at(targets, piece.row);
  const RowVectors<T> row(static_cast<const T*>(logits.data) + piece.row * logits.row_stride + first, piece.length);
  stat_stretch<T, kWordsPolicy.threads, kWordsPolicy.unroll>(row, max, map, target < 0 ? 0 : target - shard.start - first, words + piece.row * kStatWords);
}

// In place, one row a thread: those of one shard.
__global__ void canonical_logit_kernel(int64_t* words, int64_t rows) {
  const int64_t row = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  if (row < rows) canonical_logit_words(words + row * kLogitWords);
}
__global__ void canonical_stat_kernel(int64_t* words, int64_t rows) {
  const int64_t row = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  if (row < rows) canonical_stat_words(words + row * kStatWords);
}

void clear(int64_t* words, int64_t count, cudaStream_t stream) { check(cudaMemsetAsync(words, 0, count * sizeof(int64_t), stream), "cudaMemsetAsync"); }

}  // namespace

void sum_logits(const Logits& logits, const Targets& ignored, const float* row_max, const Shard& shard, const LogitMap& map, const Weights& weights, int64_t* words, Context context) {
  const Pieces pieces = cut_rows(kWordsPolicy, logits.rows, shard.hi - shard.lo, element_bytes(logits.dtype));
  with_dtype(logits.dtype, [&](auto type) {
    logit_kernel<decltype(type)><<<grid(logits.rows, pieces), kWordsPolicy.threads, 0, stream_of(context)>>>(logits, ignored, row_max, shard, map, weights, pieces, words);
  });
  check(cudaGetLastError(), "logit_digits");
}

void sum_stats(const Logits& logits, const Targets& targets, const float* row_max, const Shard& shard, const LogitMap& map, int64_t* words, Context context) {
  const Pieces pieces = cut_rows(kWordsPolicy, logits.rows, shard.hi - shard.lo, element_bytes(logits.dtype));
  with_dtype(logits.dtype, [&](auto type) {
    stat_kernel<decltype(type)><<<grid(logits.rows, pieces), kWordsPolicy.threads, 0, stream_of(context)>>>(logits, targets, row_max, shard, map, pieces, words);
  });
  check(cudaGetLastError(), "stat_digits");
}

void logit_digits(const Logits& logits, const float* row_max, const Shard& shard, const LogitMap& map, const Weights& weights, int64_t* words, Context context) {
  clear(words, logits.rows * kLogitWords, stream_of(context));
  sum_logits(logits, kNoTargets, row_max, shard, map, weights, words, context);
  canonical_logit_kernel<<<static_cast<unsigned>((logits.rows + 255) / 256), 256, 0, stream_of(context)>>>(words, logits.rows);
  check(cudaGetLastError(), "logit_digits");
}

void stat_digits(const Logits& logits, const Targets& targets, const float* row_max, const Shard& shard, const LogitMap& map, int64_t* words, Context context) {
  clear(words, logits.rows * kStatWords, stream_of(context));
  sum_stats(logits, targets, row_max, shard, map, words, context);
  canonical_stat_kernel<<<static_cast<unsigned>((logits.rows + 255) / 256), 256, 0, stream_of(context)>>>(words, logits.rows);
  check(cudaGetLastError(), "stat_digits");
}

}  // namespace cuda
}  // namespace dce
