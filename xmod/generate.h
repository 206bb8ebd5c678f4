// Text from a checkpoint, token by token. Sparse layers use threshold routing: whether a token passes through
// a layer depends on nothing behind it, so what was written never changes.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <numeric>
#include <ostream>
#include <string>
#include <vector>

#include "xmod/model.h"
#include "xmod/options.h"
#include "xmod/rng.h"
#include "xmod/tokenizer.h"

namespace xmod {

struct Sampling {
  double temperature = 0.8;  // 0: always the most probable token
  int64_t top_k = 0;         // only the k most probable ones; 0: all
  double top_p = 1;          // only the most probable ones that together reach p
};

// One token id by logits (V); u in (0, 1) decides.
inline int32_t sample_token(const std::vector<float>& logits, const Sampling& sampling, double u) {
  std::vector<int32_t> order(logits.size());
  std::iota(order.begin(), order.end(), 0);
  std::stable_sort(order.begin(), order.end(), [&](int32_t a, int32_t b) { return logits[a] > logits[b]; });
  if (sampling.temperature == 0) return order[0];
  if (sampling.top_k > 0) order.resize(std::min(order.size(), static_cast<size_t>(sampling.top_k)));

  std::vector<double> weight;  // unnormalised probabilities, largest first
  for (int32_t id : order) {
    weight.push_back(std::exp((static_cast<double>(logits[id]) - logits[order[0]]) / sampling.temperature));
  }
  const double total = std::accumulate(weight.begin(), weight.end(), 0.0);
  size_t kept = 0;
  double kept_total = 0;
  while (kept < weight.size() && (kept == 0 || kept_total < sampling.top_p * total))
    kept_total += weight[kept++];

  double rest = u * kept_total;
  for (size_t i = 0; i < kept; i++) {
    rest -= weight[i];
    if (rest < 0) return order[i];
  }
  return order[kept - 1];
}

// Continues `prompt` (at least one id) by up to count tokens, calling emit(id) for each; stops at `end` (-1:
// no such token). Each step runs the model over the last seq_len tokens.
template <class Backend, class Emit>
void generate(Model<Backend>& model, std::vector<int32_t> tokens, int64_t count, const Sampling& sampling,
              uint64_t seed, int32_t end, Emit emit) {
  const uint64_t stream = stream_of("generate");
  std::vector<float> logits(static_cast<size_t>(model.config.vocab_size));
  for (int64_t i = 0; i < count; i++) {
    const int64_t size = static_cast<int64_t>(tokens.size());
    const int64_t T = std::min(size, model.config.seq_len);
    model.logits(logits.data(), tokens.data() + size - T, T, T - 1, 1, Routing::threshold);
    if (!std::all_of(logits.begin(), logits.end(), [](float logit) { return std::isfinite(logit); })) {
      fail("the model's logits are not finite numbers; its training diverged: take an earlier checkpoint");
    }
    const double u = to_unit_interval(philox(seed, stream, static_cast<uint64_t>(i))[0]);
    const int32_t id = sample_token(logits, sampling, u);
    if (id == end) return;
    tokens.push_back(id);
    emit(id);
  }
}

}  // namespace xmod
