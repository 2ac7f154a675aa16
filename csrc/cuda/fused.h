// Sum, and gradient for an upstream gradient of 1, in one pass over the logits (fused.cu).
#pragma once

#include "launch.h"

namespace dce {
namespace cuda {

// Writes row_max, words and, where grad is not null, the gradient. status: scratch, one a row. sums: for a mean, the words its count is read from, else null.
// False, with nothing done, where the device or the layout of the logits does not allow it.
bool fused(const Logits&, const Targets&, const int64_t* sums, float* row_max, int64_t* words, int32_t* status, void* grad, Context);

}  // namespace cuda
}  // namespace dce
