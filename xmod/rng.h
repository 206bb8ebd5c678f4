// Counter-based random numbers: a value depends on (seed, stream, counter) and on nothing else, so every
// backend, thread count and rank count draws the same ones.
#pragma once

#include <array>
#include <cmath>
#include <cstdint>
#include <numbers>
#include <string>

#include "xmod/fingerprint.h"

namespace xmod {

// Philox4x32-10 (Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3"): four 32-bit words.
inline std::array<uint32_t, 4> philox(uint64_t seed, uint64_t stream, uint64_t counter) {
  std::array<uint32_t, 4> x = {static_cast<uint32_t>(counter), static_cast<uint32_t>(counter >> 32),
                               static_cast<uint32_t>(stream), static_cast<uint32_t>(stream >> 32)};
  uint32_t key0 = static_cast<uint32_t>(seed), key1 = static_cast<uint32_t>(seed >> 32);
  for (int round = 0; round < 10; round++) {
    const uint64_t p0 = uint64_t{0xD2511F53} * x[0], p1 = uint64_t{0xCD9E8D57} * x[2];
    x = {static_cast<uint32_t>(p1 >> 32) ^ x[1] ^ key0, static_cast<uint32_t>(p1),
         static_cast<uint32_t>(p0 >> 32) ^ x[3] ^ key1, static_cast<uint32_t>(p0)};
    key0 += 0x9E3779B9;
    key1 += 0xBB67AE85;
  }
  return x;
}

// Uniform in (0, 1): never 0, so that its logarithm is finite.
inline double to_unit_interval(uint32_t word) {
  return (word + 0.5) / 4294967296.0;
}

// Fills out (n) with N(0, std^2) draws (Box-Muller, in double): those from the first-th on, a multiple of 4.
inline void fill_normal(float* out, int64_t n, double std, uint64_t seed, uint64_t stream,
                        int64_t first = 0) {
#pragma omp parallel for schedule(static)
  for (int64_t block = 0; block < (n + 3) / 4; block++) {
    const auto words = philox(seed, stream, static_cast<uint64_t>(first / 4 + block));
    for (int64_t pair = 0; pair < 2; pair++) {
      const double radius = std * std::sqrt(-2 * std::log(to_unit_interval(words[2 * pair])));
      const double angle = 2 * std::numbers::pi * to_unit_interval(words[2 * pair + 1]);
      const int64_t i = 4 * block + 2 * pair;
      if (i < n) out[i] = static_cast<float>(radius * std::cos(angle));
      if (i + 1 < n) out[i + 1] = static_cast<float>(radius * std::sin(angle));
    }
  }
}

// A stream number from a tensor's name (FNV-1a): a tensor starts the same in every model that has it.
inline uint64_t stream_of(const std::string& name) {
  return hash_bytes(name.data(), name.size());
}

}  // namespace xmod
