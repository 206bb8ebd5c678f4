// The rounding of bf16, for references in double precision.
#pragma once

#include <cmath>

namespace xmod {

// The nearest bf16 number, ties to even.
inline double round_to_bf16(double value) {
  const double spacing = std::ldexp(1.0, value == 0 ? 0 : std::ilogb(value) - 7);
  return std::nearbyint(value / spacing) * spacing;
}

}  // namespace xmod
