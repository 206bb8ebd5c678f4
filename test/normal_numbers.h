// Numbers for tests, the same everywhere.
#pragma once

#include <cstdint>
#include <vector>

#include "xmod/rng.h"

namespace xmod {

using Floats = std::vector<float>;

inline Floats normal_numbers(int64_t n, uint64_t seed, double deviation = 1) {
  Floats out(static_cast<size_t>(n));
  fill_normal(out.data(), n, deviation, seed, stream_of("test"));
  return out;
}

}  // namespace xmod
