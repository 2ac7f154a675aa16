// The exact sum of squares of a tensor on the CPU (SPEC 15): squares of one exponent add up in one bin.
#include "../squares.h"

#include <torch/csrc/stable/ops.h>

#include <vector>

#include "../backend.h"
#include "half.h"

namespace dce {
namespace cpu {
namespace {

constexpr int kPositions = 254;
constexpr int64_t kMostInBin = 65536;  // squares below 2^48

template <class T>
void add_squares(const T* x, int64_t n, int64_t* words) {
  for (int64_t begin = 0; begin < n; begin += kMostInBin) {
    const int64_t end = n - begin < kMostInBin ? n : begin + kMostInBin;
    uint64_t bin[kPositions] = {};
    for (int64_t i = begin; i < end; ++i) {
      const uint32_t b = bits(widen(x[i])) & 0x7FFFFFFF;
      if (b >= kInf32) {
        words[b == kInf32 ? kInfinitiesWord : kNaNsWord] += 1;
        continue;
      }
      const Significand s = significand(b);
      bin[s.pos] += static_cast<uint64_t>(s.mant) * s.mant;
    }
    for (int pos = 0; pos < kPositions; ++pos) {
      if (bin[pos] == 0) continue;
      uint32_t part[kParts];
      const int first = square_parts(bin[pos], 2 * pos, part);  // three are not 0: up to word 17
      for (int i = 0; i < 3; ++i) words[first + i] += part[i];
    }
    carry_squares(words);
  }
}

}  // namespace

void square_digits(const void* data, Dtype dtype, int64_t count, int64_t* words, Context) {
  const int64_t blocks = (count + kMostInBin - 1) / kMostInBin, threads = torch::stable::get_num_threads();
  const int64_t tasks = blocks < threads ? blocks : threads;
  std::vector<int64_t> part(tasks * kSquareWords, 0);
  torch::stable::parallel_for(0, tasks, 1, [&](int64_t task, int64_t end) {
    for (; task < end; ++task) {
      const int64_t lo = blocks * task / tasks * kMostInBin, hi = task + 1 < tasks ? blocks * (task + 1) / tasks * kMostInBin : count;
      int64_t* own = &part[task * kSquareWords];
      switch (dtype) {
        case Dtype::kFloat32: add_squares(static_cast<const float*>(data) + lo, hi - lo, own); break;
        case Dtype::kBFloat16: add_squares(static_cast<const Bf16*>(data) + lo, hi - lo, own); break;
        case Dtype::kFloat16: add_squares(static_cast<const Fp16*>(data) + lo, hi - lo, own); break;
      }
    }
  });
  for (int i = 0; i < kSquareWords; ++i) {
    words[i] = 0;
    for (int64_t task = 0; task < tasks; ++task) words[i] += part[task * kSquareWords + i];
  }
  carry_squares(words);
}

void square_norm(const int64_t* words, double* out, Context) { *out = norm_of(words); }

}  // namespace cpu
}  // namespace dce
