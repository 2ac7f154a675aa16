// A warp's share of a slice in shared memory: its sum, and its gradient (fused.cuh).
#pragma once

#include <type_traits>

#include "accumulate.cuh"
#include "gradient.cuh"
#include "layout.cuh"
#include "words.cuh"

namespace dce {
namespace cuda {

// Of each vector, so many logits are looked up and the rest computed: lookups are bound by the banks of shared memory, arithmetic by issue, and both are there. In two
// windows arithmetic costs more, and all are looked up.
constexpr int kTabledLanes = 6;
static_assert(232448 / 3 / (kWorkers * kVectorBytes * kWarp) * kVector<__half> + kVector<__half> <= kWindowTerms && kWindowTerms <= kFixedTerms,
              "a lane's share of a slice fits a window, and a FixedSum");
constexpr int kTableRows = 4;  // a group with fewer is done before the table would be
template <int kValue>
using Constant = std::integral_constant<int, kValue>;

// What a warp keeps of its share of a slice, from its sum to its gradient.
struct Share {
  float low;     // the least logit, -inf if there is a NaN
  float finite;  // the least of those above -inf, if `tabled`
  bool tabled;   // every logit is in the table, and every term in two windows
};

// The image of the least logit above -inf of a share. low: the least, -inf included.
template <class T>
__device__ __forceinline__ uint32_t least_image(const uint4* slice, int vectors, int first, float low) {
  if (low == -INFINITY) {
    Vector<T> v;
    low = INFINITY;
    for (int i = first; i < vectors; i += kWorkers * kWarp) {
      v.raw = slice[i];
#pragma unroll
      for (int j = 0; j < kVector<T>; ++j) low = fminf(low, widen(v.lane[j]) > -INFINITY ? widen(v.lane[j]) : INFINITY);
    }
    low = from_order_image(__reduce_min_sync(0xFFFFFFFFu, order_image(low)));
  }
  return image_of_least(low);
}

// The sum of logits of a share, as lane(v, j) gives them; for a row that is not shifted. top, low: the greatest and the least of these, -inf included.
template <class T, class Lane>
__device__ __forceinline__ void add_logits(const uint4* slice, int vectors, int columns, int first, float top, float low, const Lane& lane, Extra& extra) {
  constexpr int kLanes = kVector<T>;
  constexpr int kStride = kWorkers * kWarp;
  Vector<T> v;
  FixedSum sum;
  if (low > -kLogitLimit / 2 && top < kLogitLimit / 2) {  // half, for a cap's map may fall a little
#pragma unroll 2
    for (int i = first; i < vectors; i += kStride) {
      v.raw = slice[i];
#pragma unroll
      for (int j = 0; j < kLanes; ++j) add_fixed<kLogitShift>(sum, lane(v, j));
    }
  } else {
    bool wide = false;
    for (int i = first; i < vectors; i += kStride) {
      v.raw = slice[i];
#pragma unroll
      for (int j = 0; j < kLanes; ++j) {
        const float p = lane(v, j);
        const bool small = fabsf(p) < kLogitLimit;
        wide = wide || (!small && i * kLanes + j < columns);  // beyond: columns of the padding
        add_fixed<kLogitShift>(sum, small ? p : 0.0f);
      }
    }
    extra.wide = __any_sync(0xFFFFFFFFu, wide);
  }
  extra.logits = warp_total(sum);
}

// A lane of a vector as the softmax takes it. Under a cap float32 logits have been replaced by what they are mapped to.
template <class T, class Map>
__device__ __forceinline__ float mapped_lane(const Map& map, bool has_cap, T x) {
  if (!Map::kMaps) return widen(x);
  if (has_cap) return std::is_same_v<T, float> ? widen(x) : map(widen(x));
  return map.scaled(widen(x));
}
template <class T, class Map>
__device__ __forceinline__ void mapped_lanes(const Map& map, bool has_cap, const Vector<T>& v, float (&x)[kVector<T>]) {
#pragma unroll
  for (int j = 0; j < kVector<T>; ++j) x[j] = mapped_lane(map, has_cap, v.lane[j]);
}

// A warp's share of a slice: vectors `first`, first + kWorkers * 32, ... kExtras: with what `extras` asks for, too; else nothing of these is looked at.
template <class T, bool kExtras, class Map>
__device__ __forceinline__ Share sum_share(uint4* slice, int vectors, int columns, int first, const TermTable<T>& table, const Map& map, const RowExtras& extras,
                                           ShareSum<kExtras>& out) {
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
  const float raw_top = from_order_image(image), top = map(raw_top);
  Share share = {is_nan(raw_top) ? -INFINITY : from_order_image(__reduce_min_sync(all, order_image(extremes.least()))), 0.0f, false};
  const bool has_cap = Map::kMaps && extras.options.map.cap != 0.0f;
  const float raw_low = share.low, lowest_near = kMagic + static_cast<float>(map.above());  // z of the lowest term that is surely in the window
  if constexpr (kExtras) {
    share.low = map(raw_low);
    Extra extra = kNoExtra;
    if (extras.words.stats != nullptr) extra.least = least_image<T>(slice, vectors, first, raw_low);
    if (Map::kMaps && std::is_same_v<T, float> && has_cap) {
#pragma unroll 2
      for (int i = first; i < vectors; i += kStride) {
        v.raw = slice[i];
#pragma unroll
        for (int j = 0; j < kLanes; ++j) v.lane[j] = narrow<T>(capped(extras.options.map, widen(v.lane[j])));
        slice[i] = v.raw;
      }
      fence_async();
    }
    if (extras.words.logits != nullptr) {
      const auto mapped_to = [&](const Vector<T>& u, int j) { return mapped_lane(map, has_cap, u.lane[j]); };
      add_logits<T>(slice, vectors, columns, first, top, share.low, mapped_to, extra);
    }
    if (lane == 0) out.extra = extra;
  }

  Windows w;
  int32_t below = kNoneBelow;
  const bool has_terms = top >= kLowestTerm && top < 0x1p+20f;
  const int32_t n_top = (has_terms ? term_exponent(term(top)) : 0) + map.above();
  const float near_magic = magic(n_top - 31);
  if constexpr (TermTable<T>::kExists) {
    const float limit = Map::kMaps ? table.limit() : TermTable<T>::kLimit;
    if (table.filled && has_terms && raw_top < limit && top < TermTable<T>::kLimit) {
      float raw_finite = raw_low;
      if (raw_low == -INFINITY) {
        LeastFinite least;
        for (int i = first; i < vectors; i += kStride) least.add(slice[i]);
        raw_finite = from_order_image(__reduce_min_sync(all, order_image(least.least())));
      }
      share.finite = map(raw_finite);
      // a value's exponent may be one less than n
      share.tabled = raw_finite > -limit && share.finite > -TermTable<T>::kLimit && term(share.finite, near_magic).z >= lowest_near - 31;
    }
  }
  float x[kLanes];
  if (TermTable<T>::kExists && share.tabled) {
    if constexpr (TermTable<T>::kExists) {
      const uint32_t origin = static_cast<uint32_t>(n_top - 31 + 127);
      const auto sum = [&](auto tabled, auto finite, const auto& add_values) {
        constexpr int kTabled = decltype(tabled)::value;
#pragma unroll 4
        for (int i = first; i < vectors; i += kStride) {
          v.raw = slice[i];
          float value[kTabled];
          table.template look_up<decltype(finite)::value>(v.raw, value);
          add_values(value);
          if constexpr (kTabled < kLanes) {
            float rest[kLanes - kTabled];
#pragma unroll
            for (int j = kTabled; j < kLanes; ++j) rest[j - kTabled] = map.scaled(widen(v.lane[j]));
            add_near_terms(w, rest, near_magic);
          }
        }
      };
      const auto in_one = [&](const auto& value) { add_near_values(w, value, origin); };
      const auto in_two = [&](const auto& value) { add_near_and_far_values(w, value, origin); };
      const bool one = term(share.finite, near_magic).z >= lowest_near + 1, finite = share.finite == share.low;
      if (one && finite && !has_cap) {
        sum(Constant<kTabledLanes>(), std::true_type(), in_one);
      } else if (one) {
        sum(Constant<kLanes>(), std::false_type(), in_one);
      } else if (finite) {
        sum(Constant<kLanes>(), std::true_type(), in_two);
      } else {
        sum(Constant<kLanes>(), std::false_type(), in_two);
      }
    }
  } else if (has_terms && term(share.low, near_magic).z >= lowest_near) {  // every term in one window
#pragma unroll 2
    for (int i = first; i < vectors; i += kStride) {
      v.raw = slice[i];
      mapped_lanes(map, has_cap, v, x);
      add_near_terms(w, x, near_magic);
    }
  } else if (has_terms && term(share.low, near_magic).z >= lowest_near - 32) {  // in two
    const float far_magic = magic(n_top - 63);
#pragma unroll 2
    for (int i = first; i < vectors; i += kStride) {
      v.raw = slice[i];
      mapped_lanes(map, has_cap, v, x);
      add_near_and_far_terms(w, x, far_magic);
    }
  } else if (has_terms) {
    for (int i = first; i < vectors; i += kStride) {
      v.raw = slice[i];
      mapped_lanes(map, has_cap, v, x);
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

// The same share of the gradient, to `to`, and of the row's statistics, if they are asked for.
template <class T, bool kExtras, class Map, class Stats>
__device__ __forceinline__ void write_lanes(const uint4* slice, int vectors, int first, const Share& share, const TermTable<T>& table, const Map& map, const RowExtras& extras,
                                            const MessageOf<kExtras>& message, T* to, Stats& stats) {
  constexpr int kLanes = kVector<T>;
  constexpr int kStride = kWorkers * kWarp;
  constexpr bool kStats = !std::is_same_v<Stats, NoStats>;
  Vector<T> v;
  float x[kLanes];
  const auto store = [&](const Vector<T>& v, int i) {
    if (!kExtras || to != nullptr) __stcs(reinterpret_cast<uint4*>(to) + i, v.raw);
  };
  const float row_magic = magic(message.n_max);
  // 2^-n_max goes from the term into the scale, where that is exact
  const int32_t scale_exponent = static_cast<int32_t>(bits(message.scale.scale) >> 23 & 0xFF), shifted_exponent = scale_exponent - message.n_max;
  const bool has_cap = Map::kMaps && extras.options.map.cap != 0.0f;
  // under a cap the constant has a slope of its own, and statistics want what the table has not
  const bool table_has_it = !has_cap || (!kStats && extras.options.smoothing == 0.0);
  const bool scalable = scale_exponent > 0 && shifted_exponent > 0 && shifted_exponent < 255 && (!kStats || (message.n_max > -80 && message.n_max < 80));
  if (TermTable<T>::kExists && share.tabled && table_has_it && term(share.finite, row_magic).z >= kMagic - kGradDepth + static_cast<float>(map.above()) && scalable) {
    if constexpr (TermTable<T>::kExists) {
      const float scale = from_bits(bits(message.scale.scale) - (static_cast<uint32_t>(message.n_max) << 23));
      const auto power = [&](int k) { return from_bits(static_cast<uint32_t>(127 + k) << 23); };
      const float to_high = power(kFixedHigh - message.n_max), from_high = power(message.n_max - kFixedHigh), to_low = power(kFixedBits - message.n_max);
      const auto write = [&](auto tabled, const TermTable<T>& values, auto finite) {
        constexpr int kTabled = decltype(tabled)::value;
        constexpr bool kFinite = decltype(finite)::value;
#pragma unroll 2
        for (int i = first; i < vectors; i += kStride) {
          v.raw = slice[i];
          float value[kTabled];
          values.template look_up<kFinite>(v.raw, value);
          if constexpr (kStats) {  // of -inf the value is 0, and 0 times infinity is not
#pragma unroll
            for (int j = 0; j < kTabled; ++j) {
              const float below = add32(stats.top, -map.scaled(widen(v.lane[j])));
              add_fixed(stats.sum, mul32(value[j], kFinite ? below : fminf(below, 0x1p+30f)), to_high, from_high, to_low);
            }
          }
          if constexpr (kTabled < kLanes) {
            float rest[kLanes - kTabled];
            T out[kLanes - kTabled];
#pragma unroll
            for (int j = kTabled; j < kLanes; ++j) rest[j - kTabled] = map.scaled(widen(v.lane[j]));
            gradients<T, false, kExtras>(rest, row_magic, message.scale, out);
#pragma unroll
            for (int j = kTabled; j < kLanes; ++j) v.lane[j] = out[j - kTabled];
          }
#pragma unroll
          for (int j = 0; j < kTabled; ++j) v.lane[j] = narrow<T>(kExtras ? fma32(value[j], scale, message.scale.constant) : mul32(value[j], scale));
          store(v, i);
        }
      };
      if (has_cap) {
        TermTable<T> slopes = table;
        slopes.entries = table.slopes;
        write(Constant<kLanes>(), slopes, std::false_type());
      } else if (share.finite == share.low && !kStats) {
        write(Constant<kTabledLanes>(), table, std::true_type());
      } else if (kStats && share.finite == share.low) {
        write(Constant<kLanes>(), table, std::true_type());
      } else {
        write(Constant<kLanes>(), table, std::false_type());
      }
    }
  } else if (has_cap) {
    for (int i = first; i < vectors; i += kStride) {
      v.raw = slice[i];
      mapped_lanes(map, true, v, x);
      gradients_with<T>(x, extras.options.map, row_magic, message.scale, v.lane, 0.0f, NoWeight(), stats);
      store(v, i);
    }
  } else if (term(share.low, row_magic).z >= kMagic - kGradDepth) {
#pragma unroll 4
    for (int i = first; i < vectors; i += kStride) {
      v.raw = slice[i];
      mapped_lanes(map, false, v, x);
      gradients<T, false, kExtras>(x, row_magic, message.scale, v.lane, stats);
      store(v, i);
    }
  } else {
    for (int i = first; i < vectors; i += kStride) {
      v.raw = slice[i];
      mapped_lanes(map, false, v, x);
      gradients<T, true, kExtras>(x, row_magic, message.scale, v.lane, stats);
      store(v, i);
    }
  }
  // the target's column, by the thread that wrote over it
  if ((!kExtras || to != nullptr) && message.own >= 0 && message.own / kLanes % kStride == first) to[message.own] = narrow<T>(message.scale.target);
}
template <class T, bool kExtras, class Map>
__device__ __forceinline__ void write_share(const uint4* slice, int vectors, int first, const Share& share, const TermTable<T>& table, const Map& map, const RowExtras& extras,
                                            const MessageOf<kExtras>& message, T* to) {
  NoStats none;
  write_lanes<T, kExtras>(slice, vectors, first, share, table, map, extras, message, to, none);
}

// The share's statistics, and its gradient unless `to` is null. logits: the slice as it came.
template <class T, class Map>
__device__ __forceinline__ void write_share_and_stats(const uint4* slice, int vectors, int first, const Share& share, const TermTable<T>& table, const Map& map, const RowExtras& extras,
                                                      const MessageWithStats& message, const T* logits, int64_t* words, T* to) {
  constexpr int kLanes = kVector<T>;
  constexpr int kStride = kWorkers * kWarp;
  WithStats stats;
  stats.top = map(message.max);
  write_lanes<T, true>(slice, vectors, first, share, table, map, extras, message, to, stats);
  add_stats(stats.sum, words);
  if (message.before <= 0) return;
  bool found = false;
  Vector<T> v;
  for (int i = first; i < vectors; i += kStride) {
    v.raw = std::is_same_v<T, float> && extras.options.map.cap != 0.0f ? reinterpret_cast<const uint4*>(logits)[i] : slice[i];
#pragma unroll
    for (int j = 0; j < kLanes; ++j) found = found || (widen(v.lane[j]) == message.max && i * kLanes + j < message.before);
  }
  if (__any_sync(0xFFFFFFFFu, found) && threadIdx.x % kWarp == 0) atomic_add(&words[1], kBefore);
}

}  // namespace cuda
}  // namespace dce
