// What ranks exchange beside digits, one row a thread (ranks.h).
#include "../ranks.h"
#include "launch.h"

namespace dce {
namespace cuda {
namespace {

constexpr int kThreads = 256;
unsigned blocks_of(int64_t rows) { return static_cast<unsigned>((rows + kThreads - 1) / kThreads); }
__device__ __forceinline__ int64_t own_row() { return static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x; }

__global__ void order_images_kernel(const float* x, int64_t rows, int32_t* image) {
  const int64_t row = own_row();
  if (row < rows) image[row] = order_image(x[row]);
}

// hash: 0 at first. Integers, so the order of blocks does not matter.
__global__ void __launch_bounds__(kThreads) hash_weights_kernel(Weights weights, int64_t* hash) {
  uint64_t sum = 0;
  for (int64_t v = own_row(); v < weights.size; v += static_cast<int64_t>(gridDim.x) * kThreads) sum += weight_hash(v, weights.data[v]);
  sum = warp_sum(sum);
  if (threadIdx.x % kWarp == 0) atomic_add(hash, static_cast<int64_t>(sum));
}

template <class T>
__global__ void rank_words_kernel(Logits logits, Targets targets, const int32_t* image, Shard shard, Agreement agree, float* row_max, int64_t* words) {
  const int64_t row = own_row();
  if (row >= logits.rows) return;
  const int64_t column = own_column(targets, shard, row);
  row_max[row] = from_order_image(image[row]);
  const float logit = column < 0 ? 0.0f : widen(static_cast<const T*>(logits.data)[row * logits.row_stride + column]);
  words[row] = rank_word(agree, target_at(targets, row), column >= 0, logit);
}

__global__ void shard_tags_kernel(const float* row_max, int64_t rows, Shard shard, uint64_t salt, int64_t* tags) {
  const int64_t row = own_row();
  if (row < rows) tags[row] = shard_tag(canonical_max(row_max[row]), shard.start + shard.lo, shard.start + shard.hi, salt);
}

template <class T>
__global__ void target_logits_kernel(Logits logits, Targets targets, Shard shard, float* out) {
  const int64_t row = own_row();
  if (row >= logits.rows) return;
  const int64_t column = own_column(targets, shard, row);
  out[row] = column < 0 ? 0.0f : widen(static_cast<const T*>(logits.data)[row * logits.row_stride + column]);
}

__global__ void settle_targets_kernel(const int64_t* words, Targets targets, int64_t rows, void* settled, float* target_logits) {
  const int64_t row = own_row();
  if (row >= rows) return;
  const Settled s = settle(words[row], target_at(targets, row), targets.ignore_index);
  set_target(settled, targets.is_int64, row, s.target);
  target_logits[row] = s.logit;
}

}  // namespace

void order_images(const float* x, int64_t rows, int32_t* image, Context context) {
  order_images_kernel<<<blocks_of(rows), kThreads, 0, stream_of(context)>>>(x, rows, image);
  check(cudaGetLastError(), "order_images");
}

void hash_weights(const Weights& weights, int64_t* hash, Context context) {
  check(cudaMemsetAsync(hash, 0, sizeof(int64_t), stream_of(context)), "cudaMemsetAsync");
  const unsigned blocks = blocks_of(weights.size);
  if (blocks > 0) hash_weights_kernel<<<blocks < 256 ? blocks : 256, kThreads, 0, stream_of(context)>>>(weights, hash);
  check(cudaGetLastError(), "shard_words");
}

void rank_words(const Logits& logits, const Targets& targets, const int32_t* image, const Shard& shard, const Agreement& agree, float* row_max, int64_t* words,
                Context context) {
  with_dtype(logits.dtype, [&](auto type) {
    rank_words_kernel<decltype(type)><<<blocks_of(logits.rows), kThreads, 0, stream_of(context)>>>(logits, targets, image, shard, agree, row_max, words);
  });
  check(cudaGetLastError(), "shard_words");
}

void shard_tags(const float* row_max, int64_t rows, const Shard& shard, uint64_t salt, int64_t* tags, Context context) {
  shard_tags_kernel<<<blocks_of(rows), kThreads, 0, stream_of(context)>>>(row_max, rows, shard, salt, tags);
  check(cudaGetLastError(), "shard_tags");
}

void target_logits(const Logits& logits, const Targets& targets, const Shard& shard, float* out, Context context) {
  with_dtype(logits.dtype, [&](auto type) { target_logits_kernel<decltype(type)><<<blocks_of(logits.rows), kThreads, 0, stream_of(context)>>>(logits, targets, shard, out); });
  check(cudaGetLastError(), "target_logits");
}

void settle_targets(const int64_t* words, const Targets& targets, int64_t rows, void* settled, float* target_logits, Context context) {
  settle_targets_kernel<<<blocks_of(rows), kThreads, 0, stream_of(context)>>>(words, targets, rows, settled, target_logits);
  check(cudaGetLastError(), "settle_targets");
}

}  // namespace cuda
}  // namespace dce
