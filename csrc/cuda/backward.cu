// Gradient of the loss with respect to the logits of a shard (SPEC 7).
#include "gradient.cuh"
#include "launch.h"

namespace dce {
namespace cuda {
namespace {

// Rows blockIdx.x, + gridDim.x, ...; with `unless_one`, nothing if the upstream value is 1. kOptions: there is an upstream gradient of lse, or a mean divides by weights.
template <class T, bool kOptions>
__global__ void __launch_bounds__(kBackwardPolicy.threads, kBackwardPolicy.resident)
    backward_kernel(Logits logits, Targets targets, const float* row_max, RowStates states, Upstream up, bool unless_one, Shard shard, Pieces pieces, int64_t grad_stride, T* grad) {
  __shared__ RowScale shared_scale;
  if (unless_one && *up.grad == 1.0f) return;
  const int64_t columns = shard.hi - shard.lo;
  for (Piece piece(pieces, columns); piece.row < logits.rows; piece.row += gridDim.x) {
    const int64_t target = target_at(targets, piece.row);
    const bool ignored = target == targets.ignore_index;
    if (threadIdx.x == 0 && !ignored) shared_scale = kOptions ? row_scale_of(up, states, piece.row) : row_scale(plain_upstream_of(up, piece.row), state_of(states, piece.row));
    __syncthreads();
    const RowVectors<T> row(static_cast<const T*>(logits.data) + piece.row * logits.row_stride + shard.lo + piece.begin, piece.length);
    T* const to = grad + piece.row * grad_stride + piece.begin;
    const RowScale f = shared_scale;
    if (ignored || !is_finite(f.scale)) {
      fill_stretch<T, kBackwardPolicy.threads>(piece.length, ignored ? narrow<T>(0.0f) : canonical_nan<T>(), to);
    } else {
      gradient_stretch<T, kBackwardPolicy.threads, kBackwardPolicy.unroll>(row, row_max[piece.row], f, target - shard.start - shard.lo - piece.begin, to);
    }
    __syncthreads();
  }
}

bool has_options(const Upstream& u) { return u.lse != nullptr || u.divisor == Divisor::kWeights; }

template <class... Args>
void launch(const Logits& logits, dim3 blocks, bool options, void* grad, Context context, const Args&... args) {
  with_dtype(logits.dtype, [&](auto type) {
    using T = decltype(type);
    const auto kernel = options ? backward_kernel<T, true> : backward_kernel<T, false>;
    kernel<<<blocks, kBackwardPolicy.threads, 0, stream_of(context)>>>(logits, args..., static_cast<T*>(grad));
  });
  check(cudaGetLastError(), "grad_logits");
}

}  // namespace

void backward(const Logits& logits, const Targets& targets, const float* row_max, const RowStates& states, const Upstream& upstream, const Shard& shard, void* grad, int64_t grad_stride,
              Context context) {
  const Pieces pieces = cut_rows(kBackwardPolicy, logits.rows, shard.hi - shard.lo, element_bytes(logits.dtype));
  launch(logits, grid(logits.rows, pieces), has_options(upstream), grad, context, targets, row_max, states, upstream, false, shard, pieces, grad_stride);
}

void backward_unless_one(const Logits& logits, const Targets& targets, const float* row_max, const RowStates& states, const Upstream& upstream, void* grad, int64_t grad_stride,
                         Context context) {
  const Shard whole = {0, logits.columns, 0};
  const Pieces pieces = cut_rows(kBackwardPolicy, logits.rows, logits.columns, element_bytes(logits.dtype));
  // usually there is nothing to do: few blocks, so that leaving is quick
  dim3 blocks = grid(logits.rows, pieces);
  const unsigned most = static_cast<unsigned>(8 * processors()) / blocks.y + 1;
  if (blocks.x > most) blocks.x = most;
  launch(logits, blocks, has_options(upstream), grad, context, targets, row_max, states, upstream, true, whole, pieces, grad_stride);
}

}  // namespace cuda
}  // namespace dce
