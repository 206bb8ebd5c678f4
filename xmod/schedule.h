// The learning rate over a run.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <numbers>

namespace xmod {

enum class LrSchedule { cosine, linear, wsd, constant };

// Factor on the peak learning rate at `step` (0 .. steps-1): a linear warm-up that is never 0, then the
// schedule, down to final_fraction at the last step. wsd (warm-up, stable, decay) falls linearly over the
// last fifth.
inline double schedule_factor(LrSchedule schedule, int64_t step, int64_t steps, int64_t warmup,
                              double final_fraction) {
  if (step < warmup) return static_cast<double>(step + 1) / static_cast<double>(warmup + 1);
  const double span = static_cast<double>(std::max<int64_t>(1, steps - 1 - warmup));
  const double progress = static_cast<double>(step - warmup) / span;  // 0 .. 1
  const double fall = 1 - final_fraction;
  switch (schedule) {
    case LrSchedule::constant:
      return 1;
    case LrSchedule::linear:
      return 1 - fall * progress;
    case LrSchedule::cosine:
      return 1 - fall * 0.5 * (1 - std::cos(std::numbers::pi * progress));
    case LrSchedule::wsd: {
      constexpr double kDecay = 0.2;  // share of the steps behind the warm-up
      return 1 - fall * std::max(0.0, progress - (1 - kDecay)) / kDecay;
    }
  }
  return 1;
}

}  // namespace xmod
