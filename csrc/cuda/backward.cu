// Gradient of the loss with respect to the logits of a shard (SPEC 7).
#include <algorithm>

#include "gradient.cuh"
#include "launch.h"

namespace dce {
namespace cuda {
namespace {

template <class T, bool kColumns>
constexpr int kResident = kColumns ? kBackwardPolicy<T>.resident * 2 / 3 : kBackwardPolicy<T>.resident;  // options of columns take registers

// Piece blockIdx.x of rows blockIdx.y, + gridDim.y, ...; with `unless_one`, nothing if the upstream value is 1. kOptions: there is an upstream gradient of lse, or a mean divides by weights,
// or columns have options.
template <class T, bool kOptions, bool kColumns>
__global__ void __launch_bounds__(kBackwardPolicy<T>.threads, kResident<T, kColumns>)
    backward_kernel(Logits logits, Targets targets, const float* row_max, RowStates states, Upstream up, bool unless_one, Shard shard, ColumnOptions options, Pieces pieces, int64_t grad_stride,
                    T* grad) {
  __shared__ RowScale shared_scale;
  constexpr int kThreads = kBackwardPolicy<T>.threads, kUnroll = kColumns ? 1 : kBackwardPolicy<T>.unroll;
  if (unless_one && *up.grad == 1.0f) return;
  const int64_t columns = shard.hi - shard.lo;
  for (int64_t of_row = blockIdx.y; of_row < logits.rows; of_row += gridDim.y) {
    const Piece piece(pieces, columns, of_row, blockIdx.x);
    const int64_t target = target_at(targets, piece.row);
    T* const to = grad + piece.row * grad_stride + piece.begin;
    if (target == targets.ignore_index) {
      fill_stretch<T, kThreads>(piece.length, narrow<T>(0.0f), to);
      continue;
    }
    const RowVectors<T> row(static_cast<const T*>(logits.data) + piece.row * logits.row_stride + shard.lo + piece.begin, piece.length);
    const auto ahead = row.template load_ahead<kThreads, kUnroll>();  // while one thread makes the row's scale
    if (threadIdx.x == 0) shared_scale = kOptions ? row_scale_of(up, states, piece.row) : row_scale(plain_upstream_of(up, piece.row), state_of(states, piece.row));
    __syncthreads();
    const RowScale f = shared_scale;
    if (is_finite(f)) {
      const int64_t own = target - shard.start - shard.lo - piece.begin;
      ColumnOptions here = options;
      if (kColumns && options.weights != nullptr) here.weights += target - own;  // own is relative to the stretch
      gradient_stretch<T, kColumns>(row, ahead, row_max[piece.row], f, here, own, to);
    } else {
      fill_stretch<T, kThreads>(piece.length, canonical_nan<T>(), to);
    }
    __syncthreads();
  }
}

enum class Kind { kPlain, kOptions, kColumns };
Kind kind_of(const Upstream& u, const ColumnOptions& columns) {
  if (columns.on) return Kind::kColumns;
  return u.lse != nullptr || u.divisor == Divisor::kWeights ? Kind::kOptions : Kind::kPlain;
}

void launch(const Logits& logits, const Targets& targets, const float* row_max, const RowStates& states, const Upstream& upstream, bool unless_one, const Shard& shard,
            const ColumnOptions& columns, void* grad, int64_t grad_stride, Context context) {
  const Kind kind = kind_of(upstream, columns);
  with_dtype(logits.dtype, [&](auto type) {
    using T = decltype(type);
    const Pieces pieces = cut_rows(kBackwardPolicy<T>, logits.rows, shard.hi - shard.lo, sizeof(T));
    // usually, if it is 1, there is nothing to do: few blocks, so that leaving is quick, and no more than run at once, for a few more would take as long again
    const int64_t most = unless_one ? std::max<int64_t>(1, (kind == Kind::kColumns ? kResident<T, true> : kResident<T, false>) * processors() / pieces.pieces) : 65535;
    const dim3 blocks(static_cast<unsigned>(pieces.pieces), static_cast<unsigned>(logits.rows < most ? logits.rows : most));
    const auto kernel = kind == Kind::kColumns ? backward_kernel<T, true, true> : kind == Kind::kOptions ? backward_kernel<T, true, false> : backward_kernel<T, false, false>;
    kernel<<<blocks, kBackwardPolicy<T>.threads, 0, stream_of(context)>>>(
        logits, targets, row_max, states, upstream, unless_one, shard, columns, pieces, grad_stride, static_cast<T*>(grad));
  });
  check(cudaGetLastError(), "grad_logits");
}

}  // namespace

void backward(const Logits& logits, const Targets& targets, const float* row_max, const RowStates& states, const Upstream& upstream, const Shard& shard,
              const ColumnOptions& columns, void* grad, int64_t grad_stride, Context context) {
  launch(logits, targets, row_max, states, upstream, false, shard, columns, grad, grad_stride, context);
}

void backward_unless_one(const Logits& logits, const Targets& targets, const float* row_max, const RowStates& states, const Upstream& upstream,
                         const ColumnOptions& columns, void* grad, int64_t grad_stride, Context context) {
  launch(logits, targets, row_max, states, upstream, true, {0, logits.columns, 0}, columns, grad, grad_stride, context);
}

}  // namespace cuda
}  // namespace dce
