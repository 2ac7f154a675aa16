#include "fused.cuh"

namespace dce {
namespace cuda {
template bool fused_of<float>(const Logits&, const Targets&, const RowOptions&, const Scratch&, float*, const RowOutputs&, const Total&, void*, int64_t, Context);
}  // namespace cuda
}  // namespace dce
