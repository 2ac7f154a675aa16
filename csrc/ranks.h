// What ranks send each other beside a row's digits, so that each can finish a row alone and none finishes a row that the ranks do not agree on. One int64 word
// a row, which adds over ranks, modulo 2^64: docs/SPEC.md section 11.
#pragma once

#include "row.h"

namespace dce {

constexpr int kRankWords = 1;

struct Agreement {
  uint64_t salt;    // of what else the ranks must have in common
  int64_t weight;   // W - 1 on one of W <= 2^31 ranks and -1 on the others, so that equal hashes add to 0
  Weights classes;  // of which the target's must be the same
  // On the device, or null:
  const int64_t* all_weights;  // with smoothing, where every class counts: their hash
  const int64_t* num_items;    // one word, any value
};
// What class v, [0, 2^31), adds to the hash of all weights: with its place, so that neither an exchange nor one class more leaves the sum as it was.
DCE_FN uint64_t weight_hash(int64_t v, float weight) { return mix64(static_cast<uint64_t>(v + 1) << 32 | bits(weight)); }

// High half: a hash of what the ranks must agree on, which adds to 0 where they do, and 1 more from a rank that has the target. Low half: the bits of the target's
// logit from that rank, 0 from every other. Of ranks that agree, k that have the target, 2 <= k <= 2^31, add to a high half in [k, 2k - 1], with what the low half carries.
DCE_FN int64_t rank_word(const Agreement& a, int64_t target, bool own, float logit) {
  uint64_t hash = mix64(a.salt + static_cast<uint64_t>(target));
  if (a.classes.data != nullptr) hash = mix64(hash + bits(weight_of(a.classes, target)));
  if (a.all_weights != nullptr) hash = mix64(hash + static_cast<uint64_t>(*a.all_weights));
  if (a.num_items != nullptr) hash = mix64(hash + static_cast<uint64_t>(*a.num_items));
  const uint64_t agreement = (hash >> 32) * static_cast<uint64_t>(a.weight) << 32;
  return static_cast<int64_t>(agreement + (own ? (uint64_t{1} << 32) + bits(logit) : 0));
}

// The column of the tensor that holds the row's target, or -1: it is ignored, or elsewhere.
DCE_FN int64_t own_column(const Targets& targets, const Shard& shard, int64_t row) {
  const int64_t target = target_at(targets, row);
  const bool own = target != targets.ignore_index && target >= shard.start + shard.lo && target < shard.start + shard.hi;
  return own ? target - shard.start : -1;
}

DCE_FN void set_target(void* targets, bool is_int64, int64_t row, int64_t target) {
  if (is_int64) {
    static_cast<int64_t*>(targets)[row] = target;
  } else {
    static_cast<int32_t*>(targets)[row] = static_cast<int32_t>(target);
  }
}

struct Settled {
  int64_t target;  // this rank's; one that is neither ignored nor in any vocabulary if the ranks do not agree
  float logit;     // the target's; NaN unless exactly one rank had it
};
// word: the sum over ranks.
DCE_FN Settled settle(int64_t word, int64_t target, int64_t ignore_index) {
  if (word == 0) return {target, from_bits(kNaN32)};  // they agree, and none has it: ignored, or no column
  if (word >> 32 == 1 && target != ignore_index) return {target, from_bits(static_cast<uint32_t>(word))};
  return {ignore_index == -1 ? -2 : -1, from_bits(kNaN32)};
}

}  // namespace dce
