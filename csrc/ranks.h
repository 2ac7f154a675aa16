// What ranks send each other beside a row's digits, so that each can finish a row alone and none finishes a row that the ranks do not agree on. Two int64 words
// a row, which add over ranks: docs/SPEC.md section 11.
#pragma once

#include "row.h"

namespace dce {

constexpr int kRankWords = 2;

// A sum over ranks of the owner's word: 2^32 + the bits of the target's logit from the rank that has it, 0 from every other. One owner is a high half of 1.
constexpr int64_t kOneOwner = int64_t{1} << 32;

// weight: W - 1 on one of W ranks and -1 on the others, so that equal hashes add to 0. mix64 is one to one, so two different targets never do unless their
// difference times the number of ranks that differ is a multiple of 2^64.
struct Agreement {
  uint64_t salt;   // of what else the ranks must have in common
  int64_t weight;
  Weights classes;  // of which the target's must be the same
};
DCE_FN int64_t agreement_word(const Agreement& a, int64_t target) {
  uint64_t hash = mix64(a.salt + static_cast<uint64_t>(target));
  if (a.classes.data != nullptr) hash = mix64(hash + bits(weight_of(a.classes, target)));
  return static_cast<int64_t>(hash * static_cast<uint64_t>(a.weight));
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
  int64_t target;  // this rank's; one that is neither ignored nor in any vocabulary if the ranks have different ones
  float logit;     // the target's; NaN unless exactly one rank had it
};
DCE_FN Settled settle(int64_t owner_word, int64_t agreement, int64_t target, int64_t ignore_index) {
  Settled out = {target, from_bits(kNaN32)};
  if (agreement != 0) {
    out.target = ignore_index == -1 ? -2 : -1;
  } else if (owner_word >> 32 == 1) {
    out.logit = from_bits(static_cast<uint32_t>(owner_word));
  }
  return out;
}

}  // namespace dce
