// How a row ends: its results, by the combiner that has its sum; or all of it once more, by a block, where the fused kernel could not sum it (fused.cuh).
#pragma once

#include "accumulate.cuh"
#include "gradient.cuh"
#include "launch.h"
#include "layout.cuh"
#include "reduce.cuh"

namespace dce {
namespace cuda {

// What statistics are finished from, beside their own words and the digits.
__device__ __forceinline__ void write_checks(const Rows& rows, const RowExtras& extras, int64_t row, float max, uint32_t least) {
  int64_t* const words = rows.words + row * kWords;
  words[kColumnsWord] = rows.logits.columns;
  words[kTagWord] = shard_tag(max, 0, rows.logits.columns, map_salt(extras.options.map));
  extras.words.least[row] = least_of(least);
}
// And the digits themselves.
__device__ __forceinline__ void write_digits(const Rows& rows, int64_t row, const RowTotal& total) {
  int64_t* const words = rows.words + row * kWords;
#pragma unroll
  for (int i = 0; i < kDigits - 1; ++i) words[i] = static_cast<int64_t>(total.limb[i / 2] >> (32 * (i % 2)) & 0xFFFFFFFFu);
  words[kDigits - 1] = static_cast<int64_t>(total.limb[2] >> 32 | total.limb[3] << 32);
}

// A row of a combiner that waits to be settled, in a lane of its own: settling is a long chain of few instructions, and takes as long for eight rows as for one.
constexpr int kWaitingRows = 8;
struct Waiting {
  int64_t row, target;
  float x, max;  // the logit of the target, if it is a column and not ignored, and the maximum: not mapped
  bool degenerate;
  RowSums sums;  // unless it is ignored or degenerate
  Extra extra;
};

// The results of rows that have an exact sum or are ignored, in lanes [0, waiting). Adds the losses to the warp's: lane i has word i.
template <bool kExtras, class Map>
__device__ __forceinline__ void settle_rows(const Rows& rows, const RowExtras& extras, const RowOutputs& out, const Map& map, const Waiting& mine, int waiting, int64_t& batch_word) {
  const int lane = threadIdx.x % kWarp;
  float loss = 0.0f;
  if (lane < waiting) {
    const int64_t columns = rows.logits.columns;
    const bool has_target = mine.target >= 0 && mine.target < columns;
    const int32_t status = has_target ? kOk : kBadTarget;
    RowResult result;
    if (mine.target == rows.targets.ignore_index) {
      result = kIgnoredRow;
    } else if (mine.degenerate) {
      result = nan_row(status | kDegenerate);
    } else {
      const int64_t logit_words[kLogitWords] = {low_word(mine.extra.logits), high_word(mine.extra.logits), 0, 0};
      result = result_of(mine.sums, 0.0, logit_words, map(mine.max), has_target, mine.target, map(mine.x), columns, extras.options, status);
    }
    rows.row_max[mine.row] = mine.max;
    write_row(out, extras.options, mine.row, result);
    if (kExtras && extras.words.stats != nullptr) write_checks(rows, extras, mine.row, mine.max, mine.extra.least);
    loss = result.loss;
  }
  for (int i = 0; i < waiting; ++i) batch_word += word_of_loss(__shfl_sync(0xFFFFFFFFu, loss, i), lane);
}

// A row marked kRedo, by a whole block, with the maximum known. With statistics the row's least logit stands in its place already.
template <class T, bool kGrad, Features kFeatures>
__device__ __forceinline__ void redo_row(const Rows& rows, const RowExtras& extras, const RowOutputs& out, int64_t row, RedoScratch& scratch) {
  constexpr bool kExtras = kFeatures >= kExtraWords;
  constexpr int kThreads = kFusedThreads;
  const float max = rows.row_max[row];
  const RowOptions& options = extras.options;
  const auto map = map_of<kFeatures == kAll>(options.map);
  const RowVectors<T> whole(static_cast<const T*>(rows.logits.data) + row * rows.logits.row_stride, rows.logits.columns);
  const int64_t target = target_at(rows.targets, row);
  int64_t words[kWords];  // thread 0's
  sum_stretch<T, false, kFeatures == kAll, kThreads, kAccumulatePolicy.unroll>(whole, max, options.map, words, scratch.sum);
  if (threadIdx.x == 0) {
#pragma unroll
    for (int i = 0; i < kDigits; ++i) scratch.words[i] = words[i];
  }
  if constexpr (kExtras) {
    if (threadIdx.x < kLogitWords) scratch.logit_words[threadIdx.x] = 0;
    __syncthreads();
    if (extras.words.logits != nullptr) logit_stretch<T, kThreads, 1>(whole, max, options.map, nullptr, scratch.logit_words);
    if (extras.words.stats != nullptr) stat_stretch<T, kThreads, 1>(whole, max, options.map, target < 0 ? 0 : target, extras.words.stats + row * kStatWords);
    __syncthreads();
  }
  if (threadIdx.x == 0) {
    const bool has_target = target >= 0 && target < rows.logits.columns;
    const RowResult result = finish_row(scratch.words, scratch.logit_words, map(max), has_target, target, has_target ? map(widen(whole.data[target])) : 0.0f, rows.logits.columns, options,
                                        has_target ? kOk : kBadTarget);
    add_loss(result.loss, scratch.batch);
    write_row(out, options, row, result);
    if (kExtras && extras.words.stats != nullptr)
      for (int i = 0; i < kDigits; ++i) rows.words[row * kWords + i] = scratch.words[i];
    const double g = upstream_of(upstream_one(rows.sums, extras.divisor), row);
    scratch.scale = row_scale(g, result.state);
    if (kExtras && options.smoothing != 0.0) scratch.scale.constant = static_cast<float>(mul64(g, result.constant));
  }
  __syncthreads();
  if (kGrad && rows.grad != nullptr) {
    T* const to = static_cast<T*>(rows.grad) + row * extras.grad_stride;
    if (is_finite(scratch.scale)) {
      gradient_stretch<T, kExtras>(whole, whole.template load_ahead<kThreads, kExtras ? 1 : kBackwardPolicy<T>.unroll>(), max, scratch.scale, columns_of(options), target, to);
    } else {
      fill_stretch<T, kThreads>(whole.length, canonical_nan<T>(), to);
    }
  }
  __syncthreads();  // the scratch memory is the next row's
}

}  // namespace cuda
}  // namespace dce
