// Gradient of the loss with respect to the logits of a shard (SPEC 7).
#include "../sums.h"
#include "launch.h"

namespace dce {
namespace cuda {
namespace {

template <class T>
__global__ void __launch_bounds__(kBackwardPolicy.threads)
    backward_kernel(Logits logits, Targets targets, const float* row_max, const double* state, const float* grad, int64_t grad_stride, const int64_t* sums, Shard shard,
                    Pieces pieces, T* out) {
  constexpr int kUnroll = kBackwardPolicy.unroll, kThreads = kBackwardPolicy.threads, kLanes = kVector<T>;
  __shared__ RowScale shared_scale;
  const int64_t columns = shard.hi - shard.lo;
  const Piece piece(pieces, columns);
  const T* const from = static_cast<const T*>(logits.data) + piece.row * logits.row_stride + shard.lo + piece.begin;
  T* const to = out + piece.row * columns + piece.begin;
  const RowVectors<T> row(from, piece.length);
  const bool same_phase = (reinterpret_cast<uintptr_t>(from) ^ reinterpret_cast<uintptr_t>(to)) % kVectorBytes == 0;
  const int64_t target = target_at(targets, piece.row);
  const bool ignored = target == targets.ignore_index;

  if (threadIdx.x == 0 && !ignored) {
    shared_scale = row_scale(upstream(grad[piece.row * grad_stride], sums != nullptr ? sums[kCountWord] : 0), {state[2 * piece.row], state[2 * piece.row + 1]});
  }
  __syncthreads();
  const RowScale f = ignored ? RowScale{0.0f, 0.0f} : shared_scale;
  const bool constant = ignored || !is_finite(f.scale);  // the whole row is one value, and is not read
  const T fill = ignored ? narrow<T>(0.0f) : canonical_nan<T>();
  const RowFrame frame = row_frame(constant ? 0.0f : row_max[piece.row]);
  const float lowest = kMagic + static_cast<float>(frame.n_max - kGradDepth);
  const uint32_t anchor = kMagicBits + static_cast<uint32_t>(frame.n_max);

  for (int64_t i = threadIdx.x; i < row.count(); i += kUnroll * kThreads) {
    Vector<T> v[kUnroll];
    if (!constant) {
#pragma unroll
      for (int u = 0; u < kUnroll; ++u) v[u] = row.load(i + u * kThreads);
    }
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
      if (constant) {
#pragma unroll
        for (int j = 0; j < kLanes; ++j) v[u].lane[j] = fill;
      } else {
#pragma unroll
        for (int j = 0; j < kLanes; ++j) {
          const Term e = term(add32(widen(v[u].lane[j]), -frame.shift));
          const float a = from_bits(bits(add32(e.t, -0.5f)) + ((bits(e.z) - anchor) << 23));
          v[u].lane[j] = narrow<T>(mul32(e.z >= lowest ? a : 0.0f, f.scale));
        }
      }
      const int64_t at = i + u * kThreads, c = row.column(at);
      if (same_phase && row.whole(at)) {
        __stcs(reinterpret_cast<uint4*>(to + c), v[u].raw);
      } else {
#pragma unroll
        for (int j = 0; j < kLanes; ++j)
          if (c + j >= 0 && c + j < piece.length) to[c + j] = v[u].lane[j];
      }
    }
  }

  if (constant) return;
  const int64_t own = target - shard.start - shard.lo - piece.begin;
  if (own < 0 || own >= piece.length) return;
  __syncthreads();  // the target's column is written last
  if (threadIdx.x == 0) to[own] = narrow<T>(f.target);
}

}  // namespace

void backward(const Logits& logits, const Targets& targets, const float* row_max, const double* state, const float* grad, int64_t grad_stride, const int64_t* sums,
              const Shard& shard, void* out, Context context) {
  const Pieces pieces = cut_rows(kBackwardPolicy, logits.rows, shard.hi - shard.lo, element_bytes(logits.dtype));
  with_dtype(logits.dtype, [&](auto type) {
    using T = decltype(type);
    backward_kernel<T><<<grid(logits.rows, pieces), kBackwardPolicy.threads, 0, stream_of(context)>>>(logits, targets, row_max, state, grad, grad_stride, sums, shard, pieces,
                                                                                                       static_cast<T*>(out));
  });
  check(cudaGetLastError(), "grad_logits");
}

}  // namespace cuda
}  // namespace dce
