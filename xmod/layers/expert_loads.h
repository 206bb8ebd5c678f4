// How evenly the tokens of a training step spread over the experts.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <vector>

namespace xmod {

// Of the layer where the load is least even; the active ratio of all layers together.
struct ExpertLoads {
  double max = 0;           // the largest load, in mean loads
  double entropy = 0;       // of the loads' distribution, as a share of log(E)
  double active_ratio = 0;  // active pairs of all pairs (token, expert)
};

// loads: of every layer with experts, tokens of each expert; tokens: how many there were.
inline ExpertLoads summarise_loads(const std::vector<std::vector<float>>& layers, int64_t tokens) {
  ExpertLoads worst{.max = 0, .entropy = 1, .active_ratio = 0};
  double active = 0, pairs = 0;
  for (const std::vector<float>& loads : layers) {
    const double experts = static_cast<double>(loads.size());
    double total = 0, largest = 0, entropy = 0;
    for (float load : loads) {
      total += load;
      largest = std::max<double>(largest, load);
    }
    active += total;
    pairs += experts * static_cast<double>(tokens);
    if (total == 0) continue;
    for (float load : loads) {
      if (load > 0) entropy -= load / total * std::log(load / total);
    }
    worst.max = std::max(worst.max, largest * experts / total);
    if (experts > 1) worst.entropy = std::min(worst.entropy, entropy / std::log(experts));
  }
  if (pairs > 0) worst.active_ratio = active / pairs;
  return worst;
}

}  // namespace xmod
