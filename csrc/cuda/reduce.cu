// The count of rows, the exact sum of their losses, and its rounding (SPEC 8); and the term by itself, for the exhaustive test.
#include "launch.h"
#include "pipeline.cuh"
#include "reduce.cuh"

namespace dce {
namespace cuda {
namespace {

constexpr int kSumThreads = 256;

// What is added up: losses, or the weights of the rows' targets.
struct Losses {
  const float* loss;
  __device__ __forceinline__ float operator()(const Targets&, int64_t row) const { return loss[row]; }
};
struct TargetWeights {
  Weights weights;
  __device__ __forceinline__ float operator()(const Targets& targets, int64_t row) const { return weight_of(weights, target_at(targets, row)); }
};

// Lanes whose losses fall on the same digit add up inside the warp; one of them adds to the block's words, one thread a word to the result.
template <class Values>
__global__ void __launch_bounds__(kSumThreads) sum_losses_kernel(Values values, Targets targets, int64_t rows, int64_t* sums, Total total) {
  __shared__ int64_t words[kSumWords];
  if (threadIdx.x < kSumWords) words[threadIdx.x] = 0;
  __syncthreads();
  const int64_t stride = static_cast<int64_t>(gridDim.x) * kSumThreads;
  for (int64_t first = static_cast<int64_t>(blockIdx.x) * kSumThreads; first < rows; first += stride) {
    const int64_t row = first + threadIdx.x;
    const bool counted = row < rows && !is_ignored(targets, row);
    const float l = counted ? values(targets, row) : 0.0f;
    const LossTerm t = loss_term(is_finite(l) ? l : 0.0f);
    const bool plus = is_nan(l) || (!is_finite(l) && l > 0), minus = is_nan(l) || (!is_finite(l) && l < 0);
    const unsigned all = 0xFFFFFFFFu;
    const int lane = threadIdx.x % kWarp;
    const int n_plus = __popc(__ballot_sync(all, plus)), n_minus = __popc(__ballot_sync(all, minus));
    if (lane == 0) {
      if (n_plus) atomic_add(&words[kPlusInfWord], n_plus);
      if (n_minus) atomic_add(&words[kMinusInfWord], n_minus);
    }
    for (int digit = 0; digit < kSumDigits - 1; ++digit) {
      const bool mine = t.digit == digit && (t.low != 0 || t.high != 0);
      if (__ballot_sync(all, mine) == 0) continue;
      // |low| < 2^32 in two pieces of 16 bits and sign, so that 32 lanes fit an int32
      const int sign = t.low < 0 ? -1 : 1;
      const uint32_t low = static_cast<uint32_t>(t.low < 0 ? -t.low : t.low);
      const int64_t a = __reduce_add_sync(all, mine ? sign * static_cast<int>(low & 0xFFFF) : 0);
      const int64_t b = __reduce_add_sync(all, mine ? sign * static_cast<int>(low >> 16) : 0);
      const int64_t c = __reduce_add_sync(all, mine ? t.high : 0);
      if (lane == 0) {
        atomic_add(&words[digit], a + b * 65536);
        atomic_add(&words[digit + 1], c);
      }
    }
  }
  __syncthreads();
  add_to_batch(words, sums, total);
}

__device__ __forceinline__ int count_of(const Targets& targets, int64_t rows, int64_t first, int64_t stride) {
  int mine = 0;
  for (int64_t row = first; row < rows; row += stride) mine += target_at(targets, row) != targets.ignore_index;
  return __reduce_add_sync(0xFFFFFFFFu, mine);
}
__global__ void __launch_bounds__(kSumThreads) count_targets_kernel(Targets targets, int64_t rows, int64_t* sums) {
  const int count = count_of(targets, rows, static_cast<int64_t>(blockIdx.x) * kSumThreads + threadIdx.x, static_cast<int64_t>(gridDim.x) * kSumThreads);
  if (threadIdx.x % kWarp == 0 && count != 0) atomic_add(&sums[kCountWord], count);
}
// For few rows: clears and counts in one launch of one block.
constexpr int kOneBlock = 1024;
constexpr int64_t kFewRows = 32768;
__global__ void __launch_bounds__(kOneBlock) clear_and_count_kernel(Targets targets, int64_t rows, int64_t* sums, int64_t words) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  let_next_kernel_start();  // the fused kernel, which waits for this one before it adds or divides
#endif
  for (int64_t i = threadIdx.x; i < words; i += kOneBlock) sums[i] = 0;
  const int count = count_of(targets, rows, threadIdx.x, kOneBlock);
  __syncthreads();
  if (threadIdx.x % kWarp == 0 && count != 0) atomic_add(&sums[kCountWord], count);
}

__global__ void round_sums_kernel(const int64_t* sums, Divisor divisor, float* out) { *out = round_sum(sums, divisor); }

__global__ void terms_kernel(const float* x, int64_t count, int32_t* significand, int32_t* exponent) {
  for (int64_t i = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x; i < count; i += static_cast<int64_t>(gridDim.x) * blockDim.x) {
    const Term e = term(x[i]);
    significand[i] = static_cast<int32_t>(term_significand(e));
    exponent[i] = term_exponent(e);
  }
}

}  // namespace

namespace {
unsigned sum_blocks(int64_t rows) {
  const int64_t blocks = (rows + kSumThreads - 1) / kSumThreads;
  return static_cast<unsigned>(blocks < 1 ? 1 : blocks < 256 ? blocks : 256);
}
}  // namespace

void count_targets(const Targets& targets, int64_t rows, int64_t* sums, int64_t words, Context context) {
  const cudaStream_t stream = stream_of(context);
  if (rows <= kFewRows) {
    clear_and_count_kernel<<<1, kOneBlock, 0, stream>>>(targets, rows, sums, words);
  } else {
    check(cudaMemsetAsync(sums, 0, words * sizeof(int64_t), stream), "cudaMemsetAsync");
    count_targets_kernel<<<sum_blocks(rows), kSumThreads, 0, stream>>>(targets, rows, sums);
  }
  check(cudaGetLastError(), "count_targets");
}

void sum_losses(const float* loss, const Targets& targets, int64_t rows, int64_t* sums, Context context) {
  if (rows > 0) sum_losses_kernel<<<sum_blocks(rows), kSumThreads, 0, stream_of(context)>>>(Losses{loss}, targets, rows, sums, Total{Divisor::kOne, nullptr});
  check(cudaGetLastError(), "loss_digits");
}

void sum_weights(const Weights& weights, const Targets& targets, int64_t rows, int64_t* sums, Context context) {
  if (rows > 0) sum_losses_kernel<<<sum_blocks(rows), kSumThreads, 0, stream_of(context)>>>(TargetWeights{weights}, targets, rows, sums, Total{Divisor::kOne, nullptr});
  check(cudaGetLastError(), "loss_digits");
}

void reduce_losses(const float* loss, const Targets& targets, int64_t rows, int64_t* sums, const Total& total, Context context) {
  sum_losses_kernel<<<sum_blocks(rows), kSumThreads, 0, stream_of(context)>>>(Losses{loss}, targets, rows, sums, total);
  check(cudaGetLastError(), "cross_entropy");
}

void round_sums(const int64_t* sums, Divisor divisor, float* out, Context context) {
  round_sums_kernel<<<1, 1, 0, stream_of(context)>>>(sums, divisor, out);
  check(cudaGetLastError(), "reduce_digits");
}

void terms(const float* x, int64_t count, int32_t* significand, int32_t* exponent, Context context) {
  const int64_t blocks = (count + 255) / 256;
  terms_kernel<<<static_cast<unsigned>(blocks < 8192 ? blocks : 8192), 256, 0, stream_of(context)>>>(x, count, significand, exponent);
  check(cudaGetLastError(), "term");
}

}  // namespace cuda
}  // namespace dce
