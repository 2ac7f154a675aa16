// The arithmetic of csrc/squares.h that only a GPU uses, for tests/test_squares.py, in steps like those of csrc/cuda/squares.cu. Reads tensors of chunks, `wide count` and `count` bit
// patterns of fp32 each; 0 0 ends a tensor. Prints a line a tensor: its words, carried, then how many chunks were added quickly.
#include <cinttypes>
#include <cstdio>
#include <vector>

#include "../csrc/squares.h"

using namespace dce;

// false at the end of the input
bool add_tensor() {
  int64_t words[kSquareWords] = {};
  Window w = window_of(0);
  WindowSums sums = {0, 0, 0};
  int quick = 0, wide, count, added = 0;
  const auto leave = [&](const WindowSums& s, const Window& at) {
    uint32_t part[kParts];
    const int first = square_parts(window_total(s), 2 * at.low, part);
    for (int i = 0; i < kParts; ++i)
      if (part[i] != 0) words[first + i] += part[i];
  };
  for (;;) {
    if (std::scanf("%d %d", &wide, &count) != 2) return false;
    if (count == 0) break;
    std::vector<uint32_t> x(count);
    for (uint32_t& b : x)
      if (std::scanf("%" SCNu32, &b) != 1) return false;
    if (added + count > kMostInWindow) {
      leave(sums, w);
      sums = {0, 0, 0};
      added = 0;
    }
    added += count;
    WindowSums next = sums;
    Quick seen;
    for (const uint32_t b : x) wide ? add_square_quick<true>(from_bits(b), w, next, seen) : add_square_quick<false>(from_bits(b), w, next, seen);
    if (all_fitted(seen, w)) {
      sums = next;
      quick += 1;
      continue;
    }
    std::vector<uint32_t> left;
    for (uint32_t b : x) {
      b &= 0x7FFFFFFF;
      if (b >= kInf32) words[b == kInf32 ? kInfinitiesWord : kNaNsWord] += 1;
      if (b != 0 && b < kInf32) left.push_back(b);
    }
    for (bool own = true; !left.empty(); own = false) {
      uint32_t most = 0;
      for (const uint32_t b : left) most = b > most ? b : most;
      const Window at = window_of(significand(most).pos);
      WindowSums part = {0, 0, 0};
      if (own) {
        if (at.low != w.low) {
          leave(sums, w);
          sums = {0, 0, 0};
        }
        w = at;
        part = sums;
      }
      std::vector<uint32_t> others;
      for (const uint32_t b : left) in_window(significand(b), at) ? add_square(significand(b), at, part) : others.push_back(b);
      own ? void(sums = part) : leave(part, at);
      left = others;
    }
  }
  leave(sums, w);
  carry_squares(words);
  for (const int64_t word : words) std::printf("%" PRId64 " ", word);
  std::printf("%d\n", quick);
  return true;
}

int main() {
  while (add_tensor()) {
  }
}
