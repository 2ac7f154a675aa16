// The table of row loops of one instruction set, and how to get each.
#pragma once

#include "../row.h"
#include "half.h"

namespace dce {
namespace cpu {

template <class T>
struct RowLoops {
  int32_t (*max_image)(const T* x, int64_t n);  // order image of the maximum; of nothing: that of -inf
  // Adds the kept terms of x to digits; with Check, faulty columns add nothing and are counted. A row that is not degenerate. row_max: of x, unmapped.
  void (*digits)(const T* x, int64_t n, RowFrame frame, const LogitMap& map, int64_t* digits);
  int64_t (*digits_checked)(const T* x, int64_t n, RowFrame frame, const LogitMap& map, float row_max, int64_t* digits);
  int64_t (*count_above)(const T* x, int64_t n, float row_max);  // NaNs count
  void (*gradient)(const T* x, T* out, int64_t n, RowFrame frame, float scale);  // scale is finite
  // weights: of the classes of x, or null
  void (*gradient_with)(const T* x, T* out, int64_t n, RowFrame frame, RowScale f, const LogitMap& map, const float* weights);
  // Adds to a row's four words, and carries them.
  void (*logit_sum)(const T* x, int64_t n, float shift, const LogitMap& map, float row_max, const float* weights, int64_t* words);
  float (*least)(const T* x, int64_t n);  // above -inf, +inf if there is none
  // Adds to a row's two words; before: of so many columns, whether one is the maximum.
  void (*stats)(const T* x, int64_t n, RowFrame frame, const LogitMap& map, float row_max, int64_t before, int64_t* words);
};
struct LoopTable {
  const char* name;
  RowLoops<float> f32;
  RowLoops<Bf16> bf16;
  RowLoops<Fp16> fp16;
};
const LoopTable* portable_loops();
const LoopTable* avx2_loops();    // null where the compiler does not target x86
const LoopTable* avx512_loops();

}  // namespace cpu
}  // namespace dce
