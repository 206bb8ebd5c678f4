// A shuffle that is computed, not stored: a keyed bijection of 0 .. n-1, evaluated at any one index in
// constant time and memory. The order of an epoch is such a permutation keyed by (seed, epoch), so the
// position within it is all that a checkpoint has to remember.
//
// How: a Feistel network permutes the 2h-bit numbers (h bits per half, the smallest h with 4^h >= n): each
// round XORs one half with a hash of the other, which can be undone whatever the hash is, hence bijective.
// Results of n and above are fed in again ("cycle walking"): following the cycle of a permutation from a
// point below n first returns below n at a point that no other start reaches, so the restriction is a
// bijection too. The domain is smaller than 4n (than 4 for n = 1), so fewer than 4 turns on average.
#pragma once

#include <cstdint>

#include "xmod/rng.h"

namespace xmod {

class Permutation {
 public:
  Permutation(int64_t n, uint64_t seed, uint64_t epoch)
      : n_(static_cast<uint64_t>(n)), seed_(seed), epoch_(epoch) {
    while ((uint64_t{1} << (2 * half_bits_)) < n_) half_bits_++;
  }

  // index: 0 .. n-1
  int64_t operator()(int64_t index) const {
    uint64_t x = static_cast<uint64_t>(index);
    do {
      x = feistel(x);
    } while (x >= n_);
    return static_cast<int64_t>(x);
  }

 private:
  uint64_t feistel(uint64_t x) const {
    const uint64_t mask = (uint64_t{1} << half_bits_) - 1;
    uint64_t left = x >> half_bits_, right = x & mask;
    for (uint64_t round = 0; round < 8; round++) {
      const uint64_t mixed = left ^ (philox(seed_, epoch_, right * 8 + round)[0] & mask);
      left = right;
      right = mixed;
    }
    return (left << half_bits_) | right;
  }

  uint64_t n_;
  uint64_t seed_;
  uint64_t epoch_;
  int half_bits_ = 1;
};

}  // namespace xmod
