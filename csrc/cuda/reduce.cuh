// The exact sum of a batch of losses (SPEC 8), from the blocks of whichever kernel has them.
#pragma once

#include "device.cuh"

namespace dce {
namespace cuda {

// Whether this block is the last of the grid to have written what it has to say: then it sees what all have written. counter: 0 at first. All threads call.
__device__ __forceinline__ bool is_last_block(int64_t* counter) {
  __shared__ bool last;
  __threadfence();
  __syncthreads();
  if (threadIdx.x == 0) last = atomicAdd(reinterpret_cast<unsigned*>(counter), 1u) == gridDim.x - 1;
  __syncthreads();
  if (last) __threadfence();
  return last;
}
__device__ __forceinline__ void write_total(const int64_t* batch_words, const Total& total) {
  int64_t words[kBatchWords];
  for (int i = 0; i < (total.divisor == Divisor::kWeights ? kBatchWords : kSumWords); ++i) words[i] = __ldcg(&batch_words[i]);
  *total.out = round_sum(words, total.divisor);
}

// A block's words, in shared memory, to the batch's; if a total is asked for, the block that ends last rounds it. batch_words: kBatchWords, and one that counts blocks,
// 0 at first. All threads call, after a barrier.
__device__ __forceinline__ void add_to_batch(const int64_t* block_words, int64_t* batch_words, const Total& total) {
  if (threadIdx.x < kSumWords && block_words[threadIdx.x] != 0) atomic_add(&batch_words[threadIdx.x], block_words[threadIdx.x]);
  if (total.out != nullptr && is_last_block(batch_words + kBatchWords) && threadIdx.x == 0) write_total(batch_words, total);
}

// The same by warps, lane i with word i: `done` more of `all` have nothing to add any more. The last rounds the total, unless weights divide it.
__device__ __forceinline__ void add_to_batch_by_warp(int64_t word, unsigned done, unsigned all, int64_t* batch_words, const Total& total) {
  const int lane = threadIdx.x % kWarp;
  if (total.out == nullptr) return;
  if (lane < kSumWords && word != 0) atomic_add(&batch_words[lane], word);
  if (done == 0) return;
  __threadfence();
  __syncwarp();
  if (lane == 0 && atomicAdd(reinterpret_cast<unsigned*>(batch_words + kBatchWords), done) == all - done) {
    if (total.divisor == Divisor::kWeights) return;
    __threadfence();
    int64_t words[kSumWords];
#pragma unroll
    for (int i = 0; i < kSumWords; ++i) words[i] = __ldcg(&batch_words[i]);
    *total.out = round_over_count(words, total.divisor == Divisor::kCount);
  }
}

}  // namespace cuda
}  // namespace dce
