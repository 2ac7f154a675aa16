// Row maximum, and the least logit above -inf: an integer maximum of order images, so that NaN and the sign of zero do not depend on the order (SPEC 2).
#include "launch.h"

namespace dce {
namespace cuda {
namespace {

// The bits of the maximum; of the least, which is the maximum of -x over x above -inf.
template <bool kLeast>
__device__ __forceinline__ int32_t result_bits(int32_t image) {
  const float m = from_order_image(image);
  return static_cast<int32_t>(bits(kLeast ? canonical_max(-m) : m));
}

// `image`: of a row's maximum, where several pieces meet; the maximum itself, where a row is one piece.
template <class T, bool kLeast>
__global__ void __launch_bounds__(kRowMaxPolicy.threads, kRowMaxPolicy.resident) rowmax_kernel(Logits logits, Targets ignored, Shard shard, Pieces pieces, int32_t* image) {
  constexpr int kUnroll = kRowMaxPolicy.unroll, kThreads = kRowMaxPolicy.threads;
  __shared__ int32_t scratch[kThreads / kWarp];
  const Piece piece(pieces, shard.hi - shard.lo);
  if (is_ignored(ignored, piece.row)) {
    if (threadIdx.x == 0) image[piece.row] = pieces.pieces == 1 ? result_bits<kLeast>(kImageOfNegInf) : kImageOfNegInf;
    return;
  }
  const RowVectors<T> row(static_cast<const T*>(logits.data) + piece.row * logits.row_stride + shard.lo + piece.begin, piece.length);
  float top = -INFINITY;
  const auto add = [&](const Vector<T>& v, int) {
#pragma unroll
    for (int j = 0; j < kVector<T>; ++j) {
      const float x = widen(v.lane[j]);
      top = kLeast ? fmaxf(top, x > -INFINITY ? -x : -INFINITY) : max_or_nan(top, x);
    }
  };
  row.template for_each<kThreads, kUnroll>(add, add);
  const int32_t max = block_max(order_image(top), scratch);
  if (threadIdx.x == 0) {
    if (pieces.pieces == 1) {
      image[piece.row] = result_bits<kLeast>(max);
    } else {
      atomicMax(&image[piece.row], max);
    }
  }
}

__global__ void start_images(int32_t* image, int64_t rows) {
  const int64_t row = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  if (row < rows) image[row] = kImageOfNegInf;
}
// In place: the image of a row's maximum becomes the maximum.
template <bool kLeast>
__global__ void images_to_floats(int32_t* image, int64_t rows) {
  const int64_t row = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  if (row < rows) image[row] = result_bits<kLeast>(image[row]);
}

template <bool kLeast>
void extreme_of(const Logits& logits, const Targets& ignored, const Shard& shard, float* out, Context context) {
  const Pieces pieces = cut_rows(kRowMaxPolicy, logits.rows, shard.hi - shard.lo, element_bytes(logits.dtype));
  int32_t* image = reinterpret_cast<int32_t*>(out);
  const unsigned small_grid = static_cast<unsigned>((logits.rows + 255) / 256);
  const cudaStream_t stream = stream_of(context);
  if (pieces.pieces > 1) start_images<<<small_grid, 256, 0, stream>>>(image, logits.rows);
  with_dtype(logits.dtype, [&](auto type) {
    rowmax_kernel<decltype(type), kLeast><<<grid(logits.rows, pieces), kRowMaxPolicy.threads, 0, stream>>>(logits, ignored, shard, pieces, image);
  });
  if (pieces.pieces > 1) images_to_floats<kLeast><<<small_grid, 256, 0, stream>>>(image, logits.rows);
  check(cudaGetLastError(), "rowmax");
}

}  // namespace

void row_max_of(const Logits& logits, const Targets& ignored, const Shard& shard, float* out, Context context) { extreme_of<false>(logits, ignored, shard, out, context); }
void row_max(const Logits& logits, const Shard& shard, float* out, Context context) { row_max_of(logits, kNoTargets, shard, out, context); }
void row_least(const Logits& logits, const Targets& ignored, const Shard& shard, float* out, Context context) { extreme_of<true>(logits, ignored, shard, out, context); }

}  // namespace cuda
}  // namespace dce
