// Gradient of the loss with respect to the logits of a shard (SPEC 7).
#include "gradient.cuh"
#include "launch.h"

namespace dce {
namespace cuda {
namespace {

// Rows blockIdx.x, + gridDim.x, ...; with `unless_one`, nothing if the upstream value is 1. kOptions: there is an upstream gradient of lse, or a mean divides by weights,
// or columns have options.
template <class T, bool kOptions, bool kColumns>
__global__ void __launch_bounds__(kBackwardPolicy.threads, kBackwardPolicy.resident)
    backward_kernel(Logits logits, Targets targets, const float* row_max, RowStates states, Upstream up, bool unless_one, Shard shard, ColumnOptions options, Pieces pieces, int64_t grad_stride,
                    T* grad) {
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
    if (ignored || !is_finite(f)) {
      fill_stretch<T, kBackwardPolicy.threads>(piece.length, ignored ? narrow<T>(0.0f) : canonical_nan<T>(), to);
    } else {
      const int64_t own = target - shard.start - shard.lo - piece.begin;
      if constexpr (kColumns) {
        const ColumnOptions here = {true, options.map, options.weights != nullptr ? options.weights + (target - own) : nullptr};
        gradient_stretch<T, true, kBackwardPolicy.threads, 1>(row, row_max[piece.row], f, here, own, to);
      } else {
        gradient_stretch<T, false, kBackwardPolicy.threads, kBackwardPolicy.unroll>(row, row_max[piece.row], f, options, own, to);
      }
    }
    __syncthreads();
  }
}

enum class Kind { kPlain, kOptions, kColumns };
Kind kind_of(const Upstream& u, const ColumnOptions& columns) {
  if (columns.on) return Kind::kColumns;
  return u.lse != nullptr || u.divisor == Divisor::kWeights ? Kind::kOptions : Kind::kPlain;
}

template <class... Args>
void launch(const Logits& logits, dim3 blocks, Kind kind, void* grad, Context context, const Args&... args) {
  with_dtype(logits.dtype, [&](auto type) {
    using T = decltype(type);
    const auto kernel = kind == Kind::kColumns ? backward_kernel<T, true, true> : kind == Kind::kOptions ? backward_kernel<T, true, false> : backward_kernel<T, false, false>;
    kernel<<<blocks, kBackwardPolicy.threads, 0, stream_of(context)>>>(logits, args..., static_cast<T*>(grad));
  });
  check(cudaGetLastError(), "grad_logits");
}

}  // namespace

void backward(const Logits& logits, const Targets& targets, const float* row_max, const RowStates& states, const Upstream& upstream, const Shard& shard,
              const ColumnOptions& columns, void* grad, int64_t grad_stride, Context context) {
  const Pieces pieces = cut_rows(kBackwardPolicy, logits.rows, shard.hi - shard.lo, element_bytes(logits.dtype));
  launch(logits, grid(logits.rows, pieces), kind_of(upstream, columns), grad, context, targets, row_max, states, upstream, false, shard, columns, pieces, grad_stride);
}

void backward_unless_one(const Logits& logits, const Targets& targets, const float* row_max, const RowStates& states, const Upstream& upstream,
                         const ColumnOptions& columns, void* grad, int64_t grad_stride, Context context) {
  const Shard whole = {0, logits.columns, 0};
  const Pieces pieces = cut_rows(kBackwardPolicy, logits.rows, logits.columns, element_bytes(logits.dtype));
  // usually there is nothing to do: few blocks, so that leaving is quick
  dim3 blocks = grid(logits.rows, pieces);
  const unsigned most = static_cast<unsigned>(8 * processors()) / blocks.y + 1;
  if (blocks.x > most) blocks.x = most;
  launch(logits, blocks, kind_of(upstream, columns), grad, context, targets, row_max, states, upstream, true, whole, columns, pieces, grad_stride);
}

}  // namespace cuda
}  // namespace dce
