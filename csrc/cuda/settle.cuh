// How a row ends that the fused kernel has summed, or could not sum (fused.cuh).
#pragma once

#include "accumulate.cuh"
#include "gradient.cuh"
#include "launch.h"
#include "layout.cuh"
#include "reduce.cuh"

namespace dce {
namespace cuda {

// A row marked kRedo, by a whole block, with the maximum known.
template <class T, bool kGrad, bool kExtras, int kThreads>
__device__ void redo_row(const Rows& rows, const RowExtras& extras, int64_t row, SumScratch<kThreads>& scratch, RowScale& shared_scale) {
  const float max = rows.row_max[row];
  const RowOptions& options = extras.options;
  const auto map = map_of<kExtras>(options.map);
  const RowVectors<T> whole(static_cast<const T*>(rows.logits.data) + row * rows.logits.row_stride, rows.logits.columns);
  const int64_t target = target_at(rows.targets, row);
  const bool has_target = target >= 0 && target < rows.logits.columns;
  int64_t words[kWords];
  sum_stretch<T, false, kExtras, kThreads, kAccumulatePolicy.unroll>(whole, max, options.map, words, scratch);
  if (threadIdx.x == 0) {
    for (int i = 0; i < kDigits; ++i) rows.words[row * kWords + i] = words[i];
    if (kGrad) {
      RowSums sums;
      shared_scale = {from_bits(kNaN32), from_bits(kNaN32), from_bits(kNaN32)};
      const float y = has_target ? map(widen(whole.data[target])) : 0.0f;
      if (has_target && row_sums(words, map(max), true, y, sums) == kOk) {
        const double g = upstream_of(upstream_one(rows.sums, extras.divisor), row);
        shared_scale = row_scale(g, state_with(options, sums, target, y, rows.logits.columns));
        if (kExtras && options.smoothing != 0.0) shared_scale.constant = static_cast<float>(mul64(g, constant_of(options, rows.logits.columns)));
      }
    }
  }
  if constexpr (kExtras) {
    int64_t* const logit_words = extras.words.logits != nullptr ? extras.words.logits + row * kLogitWords : nullptr;
    if (logit_words != nullptr && threadIdx.x < kLogitWords) logit_words[threadIdx.x] = 0;  // what the fused kernel left there is not of shifted logits
    __syncthreads();
    if (logit_words != nullptr) logit_stretch<T, kThreads, 1>(whole, max, options.map, nullptr, logit_words);
    if (extras.words.stats != nullptr) stat_stretch<T, kThreads, 1>(whole, max, options.map, target < 0 ? 0 : target, extras.words.stats + row * kStatWords);
  }
  __syncthreads();
  if (!kGrad || rows.grad == nullptr) return;
  T* const to = static_cast<T*>(rows.grad) + row * extras.grad_stride;
  if (is_finite(shared_scale)) {
    gradient_stretch<T, kExtras, kThreads, kExtras ? 1 : kBackwardPolicy.unroll>(whole, max, shared_scale, columns_of(options), target, to);
  } else {
    fill_stretch<T, kThreads>(whole.length, canonical_nan<T>(), to);
  }
  __syncthreads();  // the scratch memory is the next row's
}

// A row from its digits to its results. Returns the loss as it counts for the batch: 0 for an ignored row. One kernel summed the whole row: there are no shards to check.
template <class T, bool kExtras>
__device__ float settle_row(const Rows& rows, const RowExtras& extras, int64_t row, const RowOutputs& out) {
  const float max = rows.row_max[row], x = target_logit<T>(rows.logits, rows.targets, row);
  const int64_t target = target_at(rows.targets, row), columns = rows.logits.columns;
  const bool has_target = target >= 0 && target < columns;
  const auto map = map_of<kExtras>(extras.options.map);
  const float y_max = map(max);
  const int32_t status = (has_target ? kOk : kBadTarget) | (is_degenerate(max) || is_degenerate(y_max) ? kDegenerate : kOk);
  int64_t digits[kDigits];
  for (int i = 0; i < kDigits; ++i) digits[i] = rows.words[row * kWords + i];
  if (kExtras && extras.words.stats != nullptr) {  // which look at the check words
    rows.words[row * kWords + kColumnsWord] = columns;
    rows.words[row * kWords + kTagWord] = shard_tag(max, 0, columns, map_salt(extras.options.map));
    extras.words.least[row] = least_of(bits(extras.words.least[row]));
  }
  RowResult result;
  if (target == rows.targets.ignore_index) {
    result = kIgnoredRow;
  } else if (status & kDegenerate) {
    result = nan_row(status);
  } else {
    result = finish_row(digits, row_words(extras.words.logits, row), y_max, has_target, target, map(x), columns, extras.options, status);
  }
  write_row(out, extras.options, row, result);
  return result.loss;
}

// Redoes the rows that are marked, takes each row from its digits to its results, and adds the losses. Few blocks, for the last adds up what they leave; as many rows a block as that takes.
constexpr int kSettleThreads = 256, kSettleResident = 2;  // blocks a processor
template <class T, bool kGrad, bool kExtras>
__global__ void __launch_bounds__(kSettleThreads, kSettleResident)
    settle_kernel(const Rows rows, const RowExtras extras, const RowOutputs out, int64_t rows_a_block, int64_t* batch_words, int64_t* parts, const Total total) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900  // for rows of the fused kernel, which there is from 9.0 on
  constexpr int kThreads = kSettleThreads, kWarps = kThreads / kWarp;
  __shared__ SumScratch<kThreads> scratch;
  __shared__ RowScale shared_scale;
  __shared__ float losses[kThreads];
  __shared__ int64_t block_words[kSumWords];
  const int warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp;
  const int64_t first = blockIdx.x * rows_a_block, end = first + rows_a_block < rows.logits.rows ? first + rows_a_block : rows.logits.rows;
  if (threadIdx.x < kSumWords) block_words[threadIdx.x] = 0;
  for (int64_t part = first; part < end; part += kThreads) {
    const int64_t own = part + threadIdx.x;
    if (__syncthreads_or(own < end && rows.status[own] == kRedo)) {  // seldom
      for (int64_t row = part; row < end && row < part + kThreads; ++row)
        if (rows.status[row] == kRedo) redo_row<T, kGrad, kExtras>(rows, extras, row, scratch, shared_scale);
      __syncthreads();
    }
    // few rows in each of the warps rather than all in one: lanes go different ways
    const int64_t row = part + lane * kWarps + warp;
    if (row < end) losses[row - part] = settle_row<T, kExtras>(rows, extras, row, out);
    if (total.out == nullptr) continue;
    __syncthreads();
    const int count = end - part < kThreads ? static_cast<int>(end - part) : kThreads;
    for (int word = warp; word < kSumWords; word += kWarps) {  // a warp a word, for an atomic addition of 64 bits in shared memory is a loop
      int64_t sum = 0;
      for (int i = lane; i < count; i += kWarp) sum += word_of_loss(losses[i], word);
      sum = static_cast<int64_t>(warp_sum(static_cast<uint64_t>(sum)));
      if (lane == 0) block_words[word] += sum;
    }
  }
  if (total.out == nullptr) return;
  __syncthreads();
  add_parts_to_batch<kThreads>(block_words, parts, batch_words, total);
#endif
}

}  // namespace cuda
}  // namespace dce
