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

// The same where blocks are many, which would wait for each other's atomic additions: each leaves its words in `parts`, of kSumWords a block, and the last adds them up.
template <int kThreads>
__device__ __forceinline__ void add_parts_to_batch(const int64_t* block_words, int64_t* parts, int64_t* batch_words, const Total& total) {
  constexpr int kRuns = kThreads / kSumWords;
  __shared__ int64_t run[kRuns * kSumWords];
  if (threadIdx.x < kSumWords) parts[blockIdx.x * kSumWords + threadIdx.x] = block_words[threadIdx.x];
  if (!is_last_block(batch_words + kBatchWords)) return;
  if (threadIdx.x < kRuns * kSumWords) {
    int64_t sum = 0;
    for (unsigned i = threadIdx.x; i < gridDim.x * kSumWords; i += kRuns * kSumWords) sum += __ldcg(&parts[i]);
    run[threadIdx.x] = sum;
  }
  __syncthreads();
  if (threadIdx.x < kSumWords) {
    int64_t sum = __ldcg(&batch_words[threadIdx.x]);  // the count is there
    for (int i = 0; i < kRuns; ++i) sum += run[i * kSumWords + threadIdx.x];
    batch_words[threadIdx.x] = sum;
  }
  __syncthreads();
  if (threadIdx.x == 0) write_total(batch_words, total);
}

}  // namespace cuda
}  // namespace dce
