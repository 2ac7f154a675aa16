// How the blocks of a group agree on a row's sum: each mails its slice's digits to all, and each adds all mail. Integers, so in any order. Mail goes by the shared
// memory of a cluster, or, for a group that is none, by global memory.
#pragma once

#include "device.cuh"
#include "pipeline.cuh"

namespace dce {
namespace cuda {

constexpr int kMaxGroup = 16;  // blocks a group at most
constexpr int32_t kNowhere = INT32_MIN / 2;  // below every exponent

// The sum of a warp's share, relative to the share's own maximum.
struct WarpSum {
  uint32_t near[3], far[3];  // windows in pieces of 21 bits, summed over the lanes: each below 2^27
  int32_t image;             // order image of the maximum
  int32_t below;             // highest exponent below both windows, or kNowhere
};
// What options want to know of the logits of a share, a slice or a row beside that.
struct Extra {
  int64_t logits;  // sum of logits, with label smoothing (words.h): at most 2^43 each, below 2^63 a row
  uint32_t least;  // image of the least of them, with statistics
  uint32_t wide;   // not 0: `logits` leaves some out, for they are too large
};
constexpr Extra kNoExtra = {0, 0, 0};
template <bool kExtras>
struct ShareSum : WarpSum {};
template <>
struct ShareSum<true> : WarpSum {
  Extra extra;
};

// What a block tells the others of its slice, relative to the slice's own maximum and base, in pieces of 16 bytes: three, and one more with options. Words:
//   0..4  the digits, radix 2^32, in halves of 16 bits summed over the warps, each below 2^20: three a word
//   5     order image of the slice's maximum; 16 bits `lowest`: no term in the digits has an exponent below base + lowest, kNoTerm if there are none; 16 bits `below`: the
//         highest exponent that the digits leave out, though the slice alone would keep it, is base + below, kNoTerm if there is none
//   6, 7  Extra: least, wide; logits
constexpr int kMailDigits = kWindowWords;  // seven, the last below 2^22
constexpr int kHalfBits = 20, kHalvesAWord = 3;
template <bool kExtras>
struct alignas(16) Mail {
  static constexpr int kSize = kExtras ? 8 : 6;
  uint64_t word[kSize];
  __device__ __forceinline__ uint32_t half(int i) const { return static_cast<uint32_t>(word[i / kHalvesAWord] >> (kHalfBits * (i % kHalvesAWord))) & ((1u << kHalfBits) - 1); }
  __device__ __forceinline__ int32_t image() const { return static_cast<int32_t>(word[5]); }
  __device__ __forceinline__ uint16_t lowest() const { return static_cast<uint16_t>(word[5] >> 32); }
  __device__ __forceinline__ uint16_t below() const { return static_cast<uint16_t>(word[5] >> 48); }
};
constexpr uint16_t kNoTerm = 0xFFFF;
static_assert(2 * kMailDigits <= 5 * kHalvesAWord, "five words");

// The map of the logits: none, which costs nothing, or one. above: a term may have an exponent so much above its maximum's (SPEC 12).
struct NoMap {
  static constexpr bool kMaps = false;
  __device__ __forceinline__ float operator()(float x) const { return x; }
  __device__ __forceinline__ float scaled(float x) const { return x; }
  __device__ __forceinline__ int above() const { return 0; }
};
struct WithMap {
  static constexpr bool kMaps = true;
  LogitMap map;
  __device__ __forceinline__ float operator()(float x) const { return mapped(map, x); }
  __device__ __forceinline__ float scaled(float x) const { return mul32(x, map.scale); }  // the map, if there is no cap
  __device__ __forceinline__ int above() const { return map.cap != 0.0f; }
};

template <bool kMap>
__device__ __forceinline__ auto map_of(const LogitMap& map) {
  if constexpr (kMap) {
    return WithMap{map};
  } else {
    return NoMap{};
  }
}

// A warp adds the sums of a block's workers, lane i speaking for worker i. The mail is in every lane.
template <bool kExtras, int kCount, class Map>
__device__ __forceinline__ void write_mail(const ShareSum<kExtras> (&sums)[kCount], const Map& map, Mail<kExtras>& out) {
  const int lane = threadIdx.x % kWarp;
  const uint32_t all = 0xFFFFFFFFu;
  WarpSum mine = {};
  mine.image = kImageOfNegInf;
  mine.below = kNowhere;
  if (lane < kCount) mine = sums[lane];
  const int32_t image = __reduce_max_sync(all, mine.image);
  const float top = map(from_order_image(image)), own = map(from_order_image(mine.image));
  uint32_t word[kMailDigits] = {0, 0, 0, 0, 0, 0, 0};
  int32_t lowest = kNoTerm, below = -1;  // relative to base
  if (!is_degenerate(top) && top >= kLowestTerm) {
    const int32_t n_top = term_exponent(term(top));
    const int32_t base = base_of(n_top);
    if (row_shift(top) != 0.0f || __any_sync(all, own >= 0x1p+20f)) {  // the latter by a cap's fall
      below = n_top - base;  // no digits: exact only if the row drops the slice whole; a maximum this high is the fallback's anyway
    } else {
      below = max(-1, mine.below - base);
      const uint128 near = mine.near[0] + (static_cast<uint64_t>(mine.near[1]) << 21) + (static_cast<uint128>(mine.near[2]) << 42);  // < 2^69
      const uint128 far = mine.far[0] + (static_cast<uint64_t>(mine.far[1]) << 21) + (static_cast<uint128>(mine.far[2]) << 42);
      const int32_t n = own >= kLowestTerm ? term_exponent(term(own)) + map.above() : kNowhere;
      const int32_t low = (far != 0 ? n - 63 : n - 31) - base;
      if (near != 0 && n >= base) {
        if (low < 0) {
          below = max(below, n - base);  // the drop cuts through the window: all of it is left out
        } else {
          lowest = low;
          window_words(near, far, low, word);
        }
      }
    }
  }
  lowest = __reduce_min_sync(all, lowest);
  below = __reduce_max_sync(all, below);
#pragma unroll
  for (int i = 0; i < Mail<kExtras>::kSize; ++i) out.word[i] = 0;
#pragma unroll
  for (int i = 0; i < 2 * kMailDigits; ++i)
    out.word[i / kHalvesAWord] |= static_cast<uint64_t>(__reduce_add_sync(all, word[i / 2] >> (16 * (i % 2)) & 0xFFFF)) << (kHalfBits * (i % kHalvesAWord));
  out.word[5] = static_cast<uint32_t>(image) | static_cast<uint64_t>(static_cast<uint16_t>(lowest)) << 32 | static_cast<uint64_t>(static_cast<uint16_t>(below)) << 48;
  if constexpr (kExtras) {
    const Extra extra = lane < kCount ? sums[lane].extra : kNoExtra;
    out.word[6] = __reduce_max_sync(all, extra.least) | static_cast<uint64_t>(__reduce_or_sync(all, extra.wide)) << 32;
    out.word[7] = warp_total(static_cast<uint64_t>(extra.logits));
  }
}

// ---- by the shared memory of a cluster of at least two. box: the mail of each block for one row, in this block; `mailed` counts its bytes.

template <bool kExtras>
__device__ __forceinline__ void send_in_cluster(const Mail<kExtras>& mail, Mail<kExtras>* box, Barrier& mailed, int group, uint32_t rank) {
  const int lane = threadIdx.x % kWarp;
  if (lane == 0) mailed.arrive_and_expect(group * static_cast<uint32_t>(sizeof(Mail<kExtras>)));
  if (lane >= group) return;
#pragma unroll
  for (int i = 0; i < Mail<kExtras>::kSize; i += 2) send(lane, &box[rank].word[i], mail.word[i], mail.word[i + 1], mailed);
}

// ---- by global memory, which is 0 at first. Each piece of 16 bytes is written at once and marked with the turn it belongs to, so that a reader needs neither a flag
// nor a fence. The mark lies above what an even word holds.

constexpr int kMarkShift = kHalfBits * kHalvesAWord;
__device__ __forceinline__ uint64_t mark_of(uint32_t turn) { return turn % 15 + 1; }  // four bits, not 0: a mailbox last held the mail of the turn before the last

template <bool kExtras>
__device__ __forceinline__ void send_globally(const Mail<kExtras>& mail, Mail<kExtras>* box, uint32_t rank, uint32_t turn) {
  const int lane = threadIdx.x % kWarp;
#pragma unroll
  for (int i = 0; i < Mail<kExtras>::kSize; i += 2)
    if (lane == i / 2) store_whole(&box[rank].word[i], mail.word[i] | mark_of(turn) << kMarkShift, mail.word[i + 1]);
}
// Waits for the mail of block `rank`.
template <bool kExtras>
__device__ __forceinline__ Mail<kExtras> receive_globally(const Mail<kExtras>* box, int rank, uint32_t turn) {
  Mail<kExtras> mail;
  for (bool arrived = false; !arrived;) {
    arrived = true;
#pragma unroll
    for (int i = 0; i < Mail<kExtras>::kSize; i += 2) {
      load_whole(&box[rank].word[i], mail.word[i], mail.word[i + 1]);
      arrived = arrived && mail.word[i] >> kMarkShift == mark_of(turn);
      mail.word[i] &= (uint64_t{1} << kMarkShift) - 1;
    }
  }
  __syncwarp();
  return mail;
}

// A row's sum after the exchange: the same in every lane of every block.
struct RowTotal {
  float max;  // of the logits, unmapped
  int32_t n_max, base;
  uint64_t limb[4];  // S, in units of 2^(base - 23)
  bool degenerate;
  bool exact;  // false: the row needs the fallback
  Extra extra;
};
// mail: in lane i that of block i; lanes from `group` on repeat another.
template <bool kExtras, class Map>
__device__ __forceinline__ RowTotal add_mail(const Mail<kExtras>& mail, int group, const Map& map) {
  const uint32_t all = 0xFFFFFFFFu;
  const bool has = static_cast<int>(threadIdx.x % kWarp) < group;
  RowTotal out = {};
  out.max = from_order_image(__reduce_max_sync(all, mail.image()));
  out.exact = true;
  const float max = map(out.max);
  out.degenerate = is_degenerate(out.max) || is_degenerate(max);
  if (out.degenerate) return out;
  if constexpr (kExtras) {
    out.extra.least = __reduce_max_sync(all, static_cast<uint32_t>(mail.word[6]));
    out.extra.wide = __reduce_or_sync(all, static_cast<uint32_t>(mail.word[6] >> 32));
    out.extra.logits = static_cast<int64_t>(warp_total(has ? mail.word[7] : 0));
  }
  if (row_shift(max) != 0.0f || (kExtras && out.extra.wide)) {
    out.exact = false;
    return out;
  }
  out.n_max = term_exponent(term(max));
  out.base = base_of(out.n_max);

  const float own = map(from_order_image(mail.image()));
  const int32_t own_base = own >= kLowestTerm && has ? base_of(term_exponent(term(own))) : out.base;
  const int32_t drop = (out.base - own_base) / 32;  // words of the slice below the row's
  bool exact = drop >= 0 && (!has || mail.below() == kNoTerm || own_base + mail.below() < out.base);  // below 0 by a cap's fall
  uint64_t halves[kMailDigits];  // of a digit: the low one, and above 32 bits the high one
#pragma unroll
  for (int i = 0; i < kMailDigits; ++i) halves[i] = has ? mail.half(2 * i) | static_cast<uint64_t>(mail.half(2 * i + 1)) << 32 : 0;
  if (__any_sync(all, drop != 0)) {
    // Exact if the row drops the slice whole, or none of it.
    const bool none = mail.lowest() == kNoTerm || own_base + mail.lowest() >= out.base;
    const bool whole = term_exponent(term(own)) + map.above() < out.base;
    exact = exact && (drop == 0 || none || whole);
#pragma unroll
    for (int i = 0; i < kMailDigits; ++i) halves[i] = !whole && drop < kMailDigits ? halves[i] : 0;
#pragma unroll
    for (int step = 4; step > 0; step /= 2) {
      if (drop & step) {
#pragma unroll
        for (int i = 0; i < kMailDigits; ++i) halves[i] = i + step < kMailDigits ? halves[i + step] : 0;
      }
    }
  }
  out.exact = __all_sync(all, exact);
  uint64_t carry = 0;
  uint32_t limb[kMailDigits];
#pragma unroll
  for (int i = 0; i < kMailDigits; ++i) {
    carry += __reduce_add_sync(all, static_cast<uint32_t>(halves[i])) + (static_cast<uint64_t>(__reduce_add_sync(all, static_cast<uint32_t>(halves[i] >> 32))) << 16);
    limb[i] = static_cast<uint32_t>(carry);
    carry >>= 32;
  }
#pragma unroll
  for (int i = 0; i < 3; ++i) out.limb[i] = limb[2 * i] | static_cast<uint64_t>(limb[2 * i + 1]) << 32;
  out.limb[3] = limb[6];
  return out;
}

// row_sums, for a row that is not degenerate; x_target: the target's logit as mapped, -inf if there is no target: S in the even lanes, D = S - T in the odd ones, so that both are rounded at once.
__device__ __forceinline__ RowSums sums_of(const RowTotal& total, float x_target) {
  const uint32_t all = 0xFFFFFFFFu;
  const Term e = term(x_target);
  const int32_t shift = term_exponent(e) - total.base;
  uint64_t limb[4] = {total.limb[0], total.limb[1], total.limb[2], total.limb[3]};
  if ((threadIdx.x & 1) && x_target >= kLowestTerm && shift >= 0) {
    const uint128 v = static_cast<uint128>(term_significand(e)) << (shift & 63);
    uint64_t borrow = 0;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const uint64_t t = i == shift >> 6 ? static_cast<uint64_t>(v) : i == (shift >> 6) + 1 ? static_cast<uint64_t>(v >> 64) : 0;
      const uint64_t d = limb[i] - t, r = d - borrow;
      borrow = (limb[i] < t) | (d < borrow);
      limb[i] = r;
    }
  }
  const Scaled mine = leading(limb[0], limb[1], limb[2], limb[3]);
  RowSums sums = {};
  sums.kept = x_target >= kLowestTerm && shift >= 0;
  sums.n_target = term_exponent(e);
  sums.p_target = term_significand(e);
  sums.frame.n_max = total.n_max;
  const int unit = total.base - 23;
  sums.s = {__shfl_sync(all, mine.m, 0), __shfl_sync(all, mine.k, 0) + unit};
  sums.d = {__shfl_sync(all, mine.m, 1), __shfl_sync(all, mine.k, 1) + unit};
  return sums;
}

}  // namespace cuda
}  // namespace dce
