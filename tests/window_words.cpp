// window_words of csrc/digits.h for tests/test_windows.py: reads lines of near's and far's halves and low, prints the seven words.
#include <cinttypes>
#include <cstdio>

#include "../csrc/digits.h"

int main() {
  uint64_t near_high, near_low, far_high, far_low;
  int low;
  while (std::scanf("%" SCNu64 " %" SCNu64 " %" SCNu64 " %" SCNu64 " %d", &near_high, &near_low, &far_high, &far_low, &low) == 5) {
    uint32_t word[dce::kWindowWords];
    dce::window_words(static_cast<dce::uint128>(near_high) << 64 | near_low, static_cast<dce::uint128>(far_high) << 64 | far_low, low, word);
    for (const uint32_t w : word) std::printf("%" PRIu32 " ", w);
    std::printf("\n");
  }
}
