// Sum, and gradient for an upstream gradient of 1, in one pass over the logits (fused.cuh).
#pragma once

#include "launch.h"

namespace dce {
namespace cuda {

// Writes row_max, the rows' results, their total, where statistics are asked for the words that they are made from, and where grad is not null the gradient. False, with nothing done, where the device or the layout of the logits does not
// allow it.
bool fused(const Logits&, const Targets&, const RowOptions&, const Scratch&, float* row_max, const RowOutputs&, const Total&, void* grad, int64_t grad_stride, Context);
// Of logits of one type.
template <class T>
bool fused_of(const Logits&, const Targets&, const RowOptions&, const Scratch&, float* row_max, const RowOutputs&, const Total&, void* grad, int64_t grad_stride, Context);

}  // namespace cuda
}  // namespace dce
