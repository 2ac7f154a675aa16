// A warp's share of a slice in shared memory: its sum, and its gradient (fused.cu).
#pragma once

#include <type_traits>

#include "accumulate.cuh"
#include "gradient.cuh"
#include "layout.cuh"

namespace dce {
namespace cuda {

// Of each vector, so many logits are looked up and the rest computed: lookups are bound by the banks of shared memory, arithmetic by the FMA pipe, and both are there.
constexpr int kTabledLanes = 6;
static_assert(232448 / 3 / (kWorkers * kVectorBytes * kWarp) * kVector<__half> + kVector<__half> <= kWindowTerms, "a lane's share of a slice fits a window");
constexpr int kTableRows = 4;  // a group with fewer is done before the table would be
template <int kValue>
using Constant = std::integral_constant<int, kValue>;

// What a warp keeps of its share of a slice, from its sum to its gradient.
struct Share {
  float low;     // the least logit, -inf if there is a NaN
  float finite;  // the least of those above -inf, if `tabled`
  bool tabled;   // every logit is in the table, and every term in two windows
};

// A warp's share of a slice: vectors `first`, first + kWorkers * 32, ...
template <class T>
__device__ __forceinline__ Share sum_share(const uint4* slice, int vectors, int first, const TermTable<T>& table, WarpSum& out) {
  constexpr int kLanes = kVector<T>;
  constexpr int kStride = kWorkers * kWarp;
  const int lane = threadIdx.x % kWarp;
  const uint32_t all = 0xFFFFFFFFu;
  Vector<T> v;
  Extremes<T> extremes;
#pragma unroll 4
  for (int i = first; i < vectors; i += kStride) {
    v.raw = slice[i];
    extremes.add(v);
  }
  const int32_t image = __reduce_max_sync(all, order_image(extremes.greatest()));
  const float top = from_order_image(image);
  Share share = {is_nan(top) ? -INFINITY : from_order_image(__reduce_min_sync(all, order_image(extremes.least()))), 0.0f, false};

  Windows w;
  int32_t below = kNoneBelow;
  const bool has_terms = top >= kLowestTerm && top < 0x1p+20f;
  const int32_t n_top = has_terms ? term_exponent(term(top)) : 0;
  const float near_magic = magic(n_top - 31);
  if constexpr (TermTable<T>::kExists) {
    if (table.filled && has_terms && top < TermTable<T>::kLimit) {
      share.finite = share.low;
      if (share.low == -INFINITY) {
        LeastFinite least;
        for (int i = first; i < vectors; i += kStride) least.add(slice[i]);
        share.finite = from_order_image(__reduce_min_sync(all, order_image(least.least())));
      }
      // a value's exponent may be one less than n
      share.tabled = share.finite > -TermTable<T>::kLimit && term(share.finite, near_magic).z >= kMagic - 31;
    }
  }
  float x[kLanes];
  if (TermTable<T>::kExists && share.tabled) {
    if constexpr (TermTable<T>::kExists) {
      const uint32_t origin = static_cast<uint32_t>(n_top - 31 + 127);
      const auto sum = [&](auto tabled) {
        constexpr int kTabled = decltype(tabled)::value;
#pragma unroll 4
        for (int i = first; i < vectors; i += kStride) {
          v.raw = slice[i];
          float value[kTabled];
          table.look_up(v.raw, value);
          add_near_values(w, value, origin);
          if constexpr (kTabled < kLanes) {
            float rest[kLanes - kTabled];
#pragma unroll
            for (int j = kTabled; j < kLanes; ++j) rest[j - kTabled] = widen(v.lane[j]);
            add_near_terms(w, rest, near_magic);
          }
        }
      };
      if (term(share.finite, near_magic).z < kMagic + 1) {  // in two windows
#pragma unroll 4
        for (int i = first; i < vectors; i += kStride) {
          table.look_up(slice[i], x);
          add_near_and_far_values(w, x, origin);
        }
      } else if (share.finite == share.low) {
        sum(Constant<kTabledLanes>());
      } else {
        sum(Constant<kLanes>());
      }
    }
  } else if (has_terms && term(share.low, near_magic).z >= kMagic) {  // every term in one window
#pragma unroll 2
    for (int i = first; i < vectors; i += kStride) {
      v.raw = slice[i];
      widen(v, x);
      add_near_terms(w, x, near_magic);
    }
  } else if (has_terms && term(share.low, near_magic).z >= kMagic - 32) {  // in two
    const float far_magic = magic(n_top - 63);
#pragma unroll 2
    for (int i = first; i < vectors; i += kStride) {
      v.raw = slice[i];
      widen(v, x);
      add_near_and_far_terms(w, x, far_magic);
    }
  } else if (has_terms) {
    for (int i = first; i < vectors; i += kStride) {
      v.raw = slice[i];
      widen(v, x);
      below = max(below, add_terms(w, x, near_magic));
    }
  }
  constexpr uint32_t kMask = (1u << 21) - 1;
  const uint64_t window[2] = {w.near, w.far};
  uint32_t piece[2][3] = {};
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    if (i == 1 && !__any_sync(all, w.far != 0)) break;
    piece[i][0] = __reduce_add_sync(all, static_cast<uint32_t>(window[i]) & kMask);
    piece[i][1] = __reduce_add_sync(all, static_cast<uint32_t>(window[i] >> 21) & kMask);
    piece[i][2] = __reduce_add_sync(all, static_cast<uint32_t>(window[i] >> 42));
  }
  if (__any_sync(all, below != kNoneBelow)) below = __reduce_max_sync(all, below);
  if (lane == 0) {
#pragma unroll
    for (int i = 0; i < 3; ++i) {
      out.near[i] = piece[0][i];
      out.far[i] = piece[1][i];
    }
    out.image = image;
    out.below = below == kNoneBelow ? kNowhere : below + n_top - 31;
  }
  return share;
}

// The same share of the gradient. own: the target's column in the slice, or elsewhere.
template <class T>
__device__ __forceinline__ void write_share(const uint4* slice, int vectors, int first, const Share& share, const TermTable<T>& table, const RowMessage& message, T* to) {
  constexpr int kLanes = kVector<T>;
  constexpr int kStride = kWorkers * kWarp;
  Vector<T> v;
  float x[kLanes];
  const float row_magic = magic(message.n_max);
  // 2^-n_max goes from the term into the scale, where that is exact
  const int32_t scale_exponent = static_cast<int32_t>(bits(message.scale.scale) >> 23 & 0xFF), shifted_exponent = scale_exponent - message.n_max;
  if (TermTable<T>::kExists && share.tabled && term(share.finite, row_magic).z >= kMagic - kGradDepth && scale_exponent > 0 && shifted_exponent > 0 && shifted_exponent < 255) {
    if constexpr (TermTable<T>::kExists) {
      const float scale = from_bits(bits(message.scale.scale) - (static_cast<uint32_t>(message.n_max) << 23));
      const auto write = [&](auto tabled) {
        constexpr int kTabled = decltype(tabled)::value;
#pragma unroll 2
        for (int i = first; i < vectors; i += kStride) {
          v.raw = slice[i];
          float value[kTabled];
          table.look_up(v.raw, value);
          if constexpr (kTabled < kLanes) {
            float rest[kLanes - kTabled];
            T out[kLanes - kTabled];
#pragma unroll
            for (int j = kTabled; j < kLanes; ++j) rest[j - kTabled] = widen(v.lane[j]);
            gradients<T, false>(rest, row_magic, message.scale.scale, out);
#pragma unroll
            for (int j = kTabled; j < kLanes; ++j) v.lane[j] = out[j - kTabled];
          }
#pragma unroll
          for (int j = 0; j < kTabled; ++j) v.lane[j] = narrow<T>(mul32(value[j], scale));
          __stcs(reinterpret_cast<uint4*>(to) + i, v.raw);
        }
      };
      if (share.finite == share.low) {
        write(Constant<kTabledLanes>());
      } else {
        write(Constant<kLanes>());
      }
    }
  } else if (term(share.low, row_magic).z >= kMagic - kGradDepth) {
#pragma unroll 4
    for (int i = first; i < vectors; i += kStride) {
      v.raw = slice[i];
      widen(v, x);
      gradients<T, false>(x, row_magic, message.scale.scale, v.lane);
      __stcs(reinterpret_cast<uint4*>(to) + i, v.raw);
    }
  } else {
    for (int i = first; i < vectors; i += kStride) {
      v.raw = slice[i];
      widen(v, x);
      gradients<T, true>(x, row_magic, message.scale.scale, v.lane);
      __stcs(reinterpret_cast<uint4*>(to) + i, v.raw);
    }
  }
  // the target's column, by the thread that wrote over it
  if (message.own >= 0 && message.own / kLanes % kStride == first) to[message.own] = narrow<T>(message.scale.target);
}

}  // namespace cuda
}  // namespace dce
