// The exact sum of a batch of losses (SPEC 8), from the blocks of whichever kernel has them.
#pragma once

#include "device.cuh"

namespace dce {
namespace cuda {

// A block's words, in shared memory, to the batch's; if a total is asked for, the block that ends last rounds it. batch_words: kBatchWords, and one that counts blocks,
// 0 at first. All threads call, after a barrier.
__device__ __forceinline__ void add_to_batch(const int64_t* block_words, int64_t* batch_words, const Total& total) {
  if (threadIdx.x < kSumWords && block_words[threadIdx.x] != 0) atomic_add(&batch_words[threadIdx.x], block_words[threadIdx.x]);
  if (total.out == nullptr) return;
  __threadfence();
  __syncthreads();
  if (threadIdx.x != 0 || atomicAdd(reinterpret_cast<unsigned*>(batch_words + kBatchWords), 1u) != gridDim.x - 1) return;
  __threadfence();
  int64_t words[kBatchWords];
  for (int i = 0; i < (total.divisor == Divisor::kWeights ? kBatchWords : kSumWords); ++i) words[i] = __ldcg(&batch_words[i]);
  *total.out = round_sum(words, total.divisor);
}

}  // namespace cuda
}  // namespace dce
