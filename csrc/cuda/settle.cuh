// How a row ends that the fused kernel has summed, or could not sum (fused.cu).
#pragma once

#include "accumulate.cuh"
#include "gradient.cuh"
#include "launch.h"
#include "layout.cuh"
#include "reduce.cuh"

namespace dce {
namespace cuda {

// A row marked kRedo, by a whole block, with the maximum known.
template <class T, bool kGrad, int kThreads>
__device__ void redo_row(const Rows& rows, const RowExtras& extras, int64_t row, SumScratch<kThreads>& scratch, RowScale& shared_scale) {
  const float max = rows.row_max[row];
  const RowVectors<T> whole(static_cast<const T*>(rows.logits.data) + row * rows.logits.row_stride, rows.logits.columns);
  const int64_t target = target_at(rows.targets, row);
  int64_t words[kWords];
  sum_stretch<T, false, kThreads, kAccumulatePolicy.unroll>(whole, max, words, scratch);
  if (threadIdx.x == 0) {
    for (int i = 0; i < kDigits; ++i) rows.words[row * kWords + i] = words[i];
    if (kGrad) {
      const bool has_target = target >= 0 && target < rows.logits.columns;
      RowSums sums;
      shared_scale = {from_bits(kNaN32), from_bits(kNaN32)};
      if (has_target && row_sums(words, max, true, widen(whole.data[target]), sums) == kOk)
        shared_scale = row_scale(upstream_of(upstream_one(rows.sums, extras.divisor), row), state_with(extras.options, sums, target));
    }
  }
  __syncthreads();
  if (!kGrad) return;
  T* const to = static_cast<T*>(rows.grad) + row * extras.grad_stride;
  if (is_finite(shared_scale.scale)) {
    gradient_stretch<T, kThreads, kBackwardPolicy.unroll>(whole, max, shared_scale, target, to);
  } else {
    fill_stretch<T, kThreads>(whole.length, canonical_nan<T>(), to);
  }
  __syncthreads();  // the scratch memory is the next row's
}

// A row from its digits to its results. Returns the loss as it counts for the batch: 0 for an ignored row.
template <class T>
__device__ float settle_row(const Rows& rows, const RowExtras& extras, int64_t row, const RowOutputs& out) {
  const int64_t target = target_at(rows.targets, row);
  const bool readable = target >= 0 && target < rows.logits.columns && target != rows.targets.ignore_index;
  const float x = readable ? widen(static_cast<const T*>(rows.logits.data)[row * rows.logits.row_stride + target]) : 0.0f;
  const float max = rows.row_max[row];
  int64_t words[kWords];
  for (int i = 0; i < kDigits; ++i) words[i] = rows.words[row * kWords + i];
  words[kColumnsWord] = rows.logits.columns;  // one kernel summed the whole row: there are no shards to check
  words[kTagWord] = shard_tag(max, 0, rows.logits.columns);
  const RowResult result = finalize_row(words, max, target, x, rows.logits.columns, rows.targets.ignore_index, extras.options);
  write_row(out, row, result);
  return result.loss;
}

// Redoes the rows that are marked, takes each row from its digits to its results, and adds the losses. A block's rows: as many as let all blocks be on the device at once.
constexpr int kSettleResident = 4;  // blocks a processor
template <class T, bool kGrad>
__global__ void __launch_bounds__(kAccumulatePolicy.threads, kSettleResident)
    settle_kernel(const Rows rows, const RowExtras extras, const RowOutputs out, int64_t rows_a_block, int64_t* batch_words, const Total total) {
  constexpr int kThreads = kAccumulatePolicy.threads, kWarps = kThreads / kWarp;
  __shared__ SumScratch<kThreads> scratch;
  __shared__ RowScale shared_scale;
  __shared__ float losses[kThreads];
  __shared__ int64_t block_words[kSumWords];
  const int64_t first = blockIdx.x * rows_a_block, end = first + rows_a_block < rows.logits.rows ? first + rows_a_block : rows.logits.rows;
  if (threadIdx.x < kSumWords) block_words[threadIdx.x] = 0;
  for (int64_t part = first; part < end; part += kThreads) {
    const int64_t own = part + threadIdx.x;
    if (__syncthreads_or(own < end && rows.status[own] == kRedo)) {  // seldom
      for (int64_t row = part; row < end && row < part + kThreads; ++row)
        if (rows.status[row] == kRedo) redo_row<T, kGrad>(rows, extras, row, scratch, shared_scale);
      __syncthreads();
    }
    // few rows in each of the warps rather than all in one: lanes go different ways
    const int64_t row = part + threadIdx.x % kWarp * kWarps + threadIdx.x / kWarp;
    if (row < end) losses[row - part] = settle_row<T>(rows, extras, row, out);
    __syncthreads();
    // a thread a word, for an atomic addition of 64 bits in shared memory is a loop
    if (total.out != nullptr && threadIdx.x < kSumWords)
      for (int i = 0; i < kThreads && part + i < end; ++i) block_words[threadIdx.x] += word_of_loss(losses[i], threadIdx.x);
  }
  if (total.out == nullptr) return;
  __syncthreads();
  add_to_batch(block_words, batch_words, total);
}

}  // namespace cuda
}  // namespace dce
